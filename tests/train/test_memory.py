"""What a process does with freed memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from heedful.train import memory

FAULTS = """
import resource, torch
from heedful.train.memory import disable_malloc_trim

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(2**23).fill_(1.0)  # 32 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given_back, kept = faults(), disable_malloc_trim()
faults()
print(kept, given_back, faults())
"""

RELEASED = """
import torch
from heedful.train import memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

memory.disable_malloc_trim()
memory.TRIM_SECONDS = 0.0
freed = memory.MemoryTrimmer()
before = resident()
tensors = [torch.ones(2**18) for _ in range(200)]  # 1 MiB each
last = tensors[-1]
del tensors
print(resident() - before, freed.trim(), resident() - before)
memory.TRIM_SECONDS = 3600.0
print(freed.trim())
"""


@pytest.mark.slow
def test_freed_memory_is_used_again() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("only glibc has the settings")
    said = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "True" and int(said[1]) > 20 * 2**25 // 2**16 > 20 * int(said[2])


def test_freed_memory_is_returned_when_its_time_has_come() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("only glibc returns memory on request")
    found = subprocess.run([sys.executable, "-c", RELEASED], capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) > 190 << 20 and int(found[2]) < 40 << 20
    assert found[1::2] == ["True", "False"]


@pytest.mark.parametrize(("platform", "library"), [("darwin", None), ("linux", object())])
def test_elsewhere_nothing_is_set(monkeypatch: pytest.MonkeyPatch, platform: str, library: Any) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert not memory.disable_malloc_trim()

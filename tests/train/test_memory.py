"""Memory that a process has freed: it is used again, and returned to the system from time to time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest

from heedful.train import memory

PAGE_FAULTS_SCRIPT = """
import resource, torch
from heedful.train.memory import disable_malloc_trim

def count_page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(2**23).fill_(1.0)  # 32 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

count_page_faults()
with_trims, is_disabled = count_page_faults(), disable_malloc_trim()
count_page_faults()
print(is_disabled, with_trims, count_page_faults())
"""

TRIM_SCRIPT = """
import torch
from heedful.train import memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

memory.disable_malloc_trim()
memory.TRIM_SECONDS = 0.0
trimmer = memory.MemoryTrimmer()
before = resident_bytes()
tensors = [torch.ones(2**18) for _ in range(200)]  # 1 MiB each
last = tensors[-1]
del tensors
print(resident_bytes() - before, trimmer.trim(), resident_bytes() - before)
memory.TRIM_SECONDS = 3600.0
print(trimmer.trim())
"""


@pytest.mark.slow
def test_freed_memory_is_used_again() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("only glibc has mallopt")
    output = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS_SCRIPT], capture_output=True, text=True, check=True
    ).stdout.split()
    assert output[0] == "True" and int(output[1]) > 20 * 2**25 // 2**16 > 20 * int(output[2])


def test_freed_memory_is_returned_after_trim_seconds() -> None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("only glibc returns memory on request")
    output = subprocess.run(
        [sys.executable, "-c", TRIM_SCRIPT], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(output[0]) > 190 << 20 and int(output[2]) < 40 << 20
    assert output[1::2] == ["True", "False"]


@pytest.mark.parametrize(("platform", "library"), [("darwin", None), ("linux", object())])
def test_other_systems_have_no_setting(monkeypatch: pytest.MonkeyPatch, platform: str, library: Any) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert not memory.disable_malloc_trim()

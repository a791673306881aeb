"""What was measured on this machine, kept for the next process in small files: HEEDFUL_CACHE, or the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import heedful
from heedful.device import CPU
from heedful.durable import cache, put, whole
from heedful.native import kernels


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """What a measurement holds for: this processor, so many threads, these versions, and the GPU, if on one."""
    there = {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return there | {
        "processor": dict(sorted(torch.cpu.get_capabilities().items())),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": [heedful.__version__, torch.__version__],
        "kernels": found.path.stem if (found := kernels()) else None,
    }


def get(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What was found under exactly these facts; None: nothing, or nothing that can be read."""
    path = _path(facts)
    try:
        held = json.loads(path.read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return None
    return held["found"] if isinstance(held, dict) and held.get("facts") == _plain(facts) else None


def keep(facts: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write it down; a disk that cannot be written to costs measuring again, and nothing else."""
    path = _path(facts)
    if path is None:
        return
    text = json.dumps({"facts": _plain(facts), "found": found}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            put(part, [text.encode()])
    except OSError:
        return


@contextmanager
def alone(facts: Mapping[str, Any]) -> Iterator[None]:
    """While no other process finds out what holds under these facts; each one at once, where nothing can be kept."""
    import fcntl  # not on every system

    handle, path = None, _path(facts)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _plain(facts: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(facts))


def _path(facts: Mapping[str, Any]) -> Path | None:
    under = cache()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return under / f"measured-{digest[:32]}.json" if under else None

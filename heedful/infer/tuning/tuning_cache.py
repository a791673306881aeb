"""The tuning cache: measurements of this machine, in small files in HEEDFUL_CACHE or the cache folder of the user."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from heedful import cache
from heedful._version import __version__
from heedful.csrc import kernels
from heedful.device import CPU
from heedful.errors import HeedfulWarning

Record = TypeVar("Record")


def machine_facts(device: torch.device = CPU) -> dict[str, object]:
    """Return what a measurement depends on: processor, threads, versions, C++ kernels, and the GPU if it is used."""
    gpu = {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return gpu | {
        "processor": dict(sorted(torch.cpu.get_capabilities().items())),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__],
        "kernels": library.path.stem if (library := kernels()) else None,
    }


def read_entry(facts: Mapping[str, object], read: Callable[[Any], Record]) -> Record | None:
    """Return the record that is cached for these facts.

    Args:
        facts: All facts that the measurement depends on.
        read: Converts plain data to a record; raises a KeyError, TypeError or ValueError if the data is damaged.

    Returns:
        The record; None if it is missing or damaged, or if users other than this one and root may have written it.
    """
    try:
        path = _path(facts)
        entry = json.loads(cache.read_file(path)) if path else None
        if isinstance(entry, dict) and entry.get("facts") == _plain(facts):
            return read(entry["found"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError):  # a CacheError is a ValueError
        pass
    return None


def write_entry(facts: Mapping[str, object], record: Mapping[str, object]) -> None:
    """Write a record for these facts; without effect if the disk cannot be written.

    Warns if the cache folder cannot be trusted.
    """
    text = json.dumps({"facts": _plain(facts), "found": record}, indent=1) + "\n"
    try:
        path = _path(facts)
        if path is not None:
            cache.write_private_file(path, text.encode())
    except OSError:
        return
    except cache.CacheError as error:
        warnings.warn(f"the measurement is not cached: {error}", HeedfulWarning, stacklevel=2)


@contextmanager
def measuring_lock(facts: Mapping[str, object]) -> Iterator[bool]:
    """Hold a lock for these facts, so that other processes wait for the measurement, for a minute at most.

    Yields:
        Whether the measurement may be cached: only under the lock, since another process that measures at the same time
        disturbs it.
    """
    with ExitStack() as stack:
        try:
            path = _path(facts)
            if path is not None:
                stack.enter_context(cache.lock(path.with_suffix(".lock"), "measuring"))
        except OSError:
            path = None
        except cache.CacheError as error:
            warnings.warn(f"the measurement is not cached: {error}", HeedfulWarning, stacklevel=3)
            path = None
        yield path is not None


def _plain(facts: Mapping[str, object]) -> object:
    """Return facts as JSON preserves them: tuples become lists."""
    return json.loads(json.dumps(facts))


def _path(facts: Mapping[str, object]) -> Path | None:
    """Return the path of the file for these facts; None if HEEDFUL_CACHE is empty."""
    folder = cache.folder()
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return folder / f"measured-{digest[:32]}.json" if folder else None

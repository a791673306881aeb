"""A cache of a model's outputs on disk, in part files, so that an interrupted run resumes filling it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from heedful.atomic_io import atomic_path, write_synced
from heedful.errors import HeedfulError

PART_ENTRIES = 1024  # entries in one part file
MAX_OPEN_FILES = 256

Outputs = dict[str, list[Tensor]]  # tensors by name, one for each entry


class CachedOutputs:
    """Cached outputs of samples.

    Args:
        folder: Cache folder.
        count: Number of entries of the cache.
        at: Maps a sample number and a key to the number of an entry. If None, it is the sample number.
    """

    def __init__(self, folder: Path, count: int, at: Callable[[int, int], int] | None = None) -> None:
        self.folder, self.count, self._at = folder, count, at
        self._open = lru_cache(maxsize=MAX_OPEN_FILES)(self._open_part)

    def __call__(self, numbers: Sequence[int], keys: Sequence[int]) -> Outputs:
        """Return the outputs of these samples; float16 is converted to float32."""
        outputs: Outputs = {}
        for number, key in zip(numbers, keys, strict=True):
            part, entry = divmod(number if self._at is None else self._at(number, key), PART_ENTRIES)
            file, bounds_by_name = self._open(part)
            for name, bounds in bounds_by_name.items():
                output = file.get_slice(name)[bounds[entry] : bounds[entry + 1]]
                outputs.setdefault(name, []).append(output.float() if output.dtype == torch.float16 else output)
        return outputs

    def missing_parts(self) -> list[int]:
        """Return the numbers of the parts that are not on disk."""
        return [part for part in range(-(-self.count // PART_ENTRIES)) if not self._path(part).exists()]

    def part_rows(self, part: int) -> range:
        """Return the numbers of the entries in a part."""
        return range(part * PART_ENTRIES, min((part + 1) * PART_ENTRIES, self.count))

    def write_part(self, part: int, data: bytes) -> None:
        """Write a part atomically; `data` comes from `part_bytes`."""
        with atomic_path(self._path(part)) as temporary:
            write_synced(temporary, [data])

    def _path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.safetensors"

    def _open_part(self, part: int) -> tuple[Any, dict[str, list[int]]]:
        """Open a part; returns the file, and the bounds of the entries in each concatenated tensor."""
        path = self._path(part)
        try:
            file = safe_open(path, framework="pt")
            names = [name for name in file.keys() if name.startswith("sizes.")]  # type: ignore[no-untyped-call]  # noqa: SIM118
            sizes = {name: file.get_tensor(name) for name in names}  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise HeedfulError(
                f"{path} cannot be read: {error}. Remove it and rerun the command to recreate it"
            ) from None
        return file, {name.removeprefix("sizes."): [0, *accumulate(counts.tolist())] for name, counts in sizes.items()}


def part_bytes(outputs: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Return the content of a part file: the concatenated outputs of each name, and the length of each output."""
    lengths = {
        f"sizes.{name}": torch.from_numpy(np.array([len(row) for row in rows], dtype=np.int32))
        for name, rows in outputs.items()
    }
    return as_bytes({name: torch.cat(list(rows)) for name, rows in outputs.items()} | lengths)

"""What a teacher says, kept on the disk: made once, part by part, so that one that was killed goes on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor

from heedful.atomic_io import put, put_folder, whole
from heedful.data.sampler import cut
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.distillation.losses import topk_with_rest
from heedful.objectives.distillation.teacher import Teacher, TeacherOutputs
from heedful.train.ranks import SINGLE_PROCESS, Ranks

ABOUT, PART, TOKENS = "about.json", 1024, 4096  # samples of a part; tokens that the teacher reads at once
OPEN = 256  # parts that are open at a time
EVERY = 30.0  # seconds between two words on how far the teacher is


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """How it is kept."""

    half: bool = True  # in float16
    top: int | None = None  # classes of each target; None: all
    temperature: float = 1.0  # of the shares of these


def online_teacher(
    teacher: Teacher, samples: Sequence[Sample]
) -> Callable[[Sequence[int], Sequence[int]], TeacherOutputs]:
    """A teacher that reads along."""
    return lambda numbers, keys: teacher.says([samples[number] for number in numbers], keys)


class CachedOutputs:
    """What it said of each sample; numbers of samples in, what was said out."""

    def __init__(self, folder: Path, count: int, at: Callable[[int, int], int] | None = None) -> None:
        self.folder, self.count, self._at = folder, count, at
        self._open = lru_cache(maxsize=OPEN)(self._opened)

    def __call__(self, numbers: Sequence[int], keys: Sequence[int]) -> TeacherOutputs:
        """Of those samples."""
        found: TeacherOutputs = {}
        for number, key in zip(numbers, keys, strict=True):
            part, place = divmod(number if self._at is None else self._at(number, key), PART)
            file, bounds = self._open(part)
            for name, ends in bounds.items():
                held = file.get_slice(name)[ends[place] : ends[place + 1]]
                found.setdefault(name, []).append(held if held.dtype == torch.int32 else held.float())
        return found

    def _opened(self, part: int) -> tuple[Any, dict[str, list[int]]]:
        path = self.folder / part_name(part)
        try:
            file = safe_open(path, framework="pt")
            names = [name for name in file.keys() if name.startswith("sizes.")]  # type: ignore[no-untyped-call]  # noqa: SIM118
            sizes = {name: file.get_tensor(name) for name in names}  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise HeedfulError(
                f"{path} cannot be read: {error}. Remove it, and the same command makes it anew"
            ) from None
        return file, {name.removeprefix("sizes."): [0, *accumulate(each.tolist())] for name, each in sizes.items()}


def part_name(part: int) -> str:
    """Of its file."""
    return f"part-{part:06d}.safetensors"


def cache_teacher_outputs(
    folder: Path,
    teacher: Teacher,
    samples: Sequence[Sample],
    cache_format: CacheFormat,
    facts: dict[str, Any],
    *,
    mask_keys: Sequence[Sequence[int]] = (),
    ranks: Ranks = SINGLE_PROCESS,
    log: Callable[[str], None] = lambda text: None,
) -> CachedOutputs:
    """All that the teacher says of the samples: what is there stays, what is missing is made by the first rank.

    `facts` say what it was made of; where others are written down, it is refused. `versions` are the keys of all
    samples, once for each version of a sample whose targets are drawn.
    """
    times = max(1, len(mask_keys))
    count = times * len(samples)
    about = facts | {
        "samples": count,
        "half": cache_format.half,
        "top": cache_format.top,
        "wanted": teacher.wanted.names,
    }
    if cache_format.top is not None:
        about["temperature"] = cache_format.temperature
    if ranks.first:
        put_folder(folder)
        _begin(folder / ABOUT, json.loads(json.dumps(about)))
        missing = [part for part in range(-(-count // PART)) if not (folder / part_name(part)).exists()]
        size = len(missing) * PART if missing[1:] else count
        if missing:
            log(f"the teacher reads {size:,} samples, once; what it says is kept")
        last = time.monotonic()
        for number, part in enumerate(missing):
            if time.monotonic() - last > EVERY:
                last = time.monotonic()
                log(f"the teacher has read {number * PART:,} of {size:,}")
            numbers = range(part * PART, min((part + 1) * PART, count))
            mine = [samples[each % len(samples)] for each in numbers]
            keys = [mask_keys[each // len(samples)][each % len(samples)] if mask_keys else 0 for each in numbers]
            data = as_bytes(_tensors(teacher, mine, keys, cache_format))
            if not number:
                _need(folder, len(data) * len(missing))
            with whole(folder / part_name(part)) as temporary:
                put(temporary, [data])
    ranks.wait()
    return CachedOutputs(folder, count)


def _begin(path: Path, about: dict[str, Any]) -> None:
    if path.exists():
        before = json.loads(path.read_bytes())
        if other := [name for name in {*before, *about} if before.get(name) != about.get(name)]:
            raise HeedfulError(
                f"{path.parent} holds what a teacher said of something else: {', '.join(sorted(other))} changed. "
                "Remove that folder, or give another one with --output"
            )
        return
    with whole(path) as part:
        put(part, [json.dumps(about, indent=1, allow_nan=False).encode()])


def _need(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise HeedfulError(
            f"what the teacher says takes about {size / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB left: "
            "make room, set teacher_cache.top_k, or teacher_cache.enabled=false, with which the teacher reads along"
        )


def _tensors(teacher: Teacher, samples: Sequence[Sample], keys: Sequence[int], form: CacheFormat) -> dict[str, Tensor]:
    """Of a part: all values of each name end to end, and how many each sample has."""
    found: dict[str, list[Tensor]] = {}
    for group in cut([len(sample) for sample in samples], TOKENS):
        said = teacher.says([samples[number] for number in group], [keys[number] for number in group])
        if form.top is not None:
            ids, shares = zip(
                *(topk_with_rest(each, form.top, form.temperature) for each in said["scores"]), strict=True
            )
            said |= {"ids": [each.to(torch.int32) for each in ids], "scores": list(shares)}
        for name, each in said.items():
            place = found.setdefault(name, [torch.empty(0)] * len(samples))
            for number, value in zip(group, each, strict=True):
                place[number] = _kept(value.cpu(), form.half)
    sizes = {f"sizes.{name}": np.array([len(one) for one in each], dtype=np.int32) for name, each in found.items()}
    return {name: torch.cat(each) for name, each in found.items()} | {
        name: torch.from_numpy(each) for name, each in sizes.items()
    }


def _kept(value: Tensor, half: bool) -> Tensor:
    if not half or not value.is_floating_point():
        return value
    small = value.half()
    if bool((small.isinf() & ~value.isinf()).any()):
        raise HeedfulError("what the teacher says is too large for float16: set teacher_cache.precision=float32")
    return small

"""A cache of a teacher's outputs on the disk, made once in parts, so that an interrupted run resumes it."""

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

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.data.sampler import split_microbatches
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.distillation.losses import topk_with_rest
from heedful.objectives.distillation.teacher import Teacher, TeacherOutputs
from heedful.train.ranks import SINGLE_PROCESS, Ranks

ABOUT, PART, TOKENS = "about.json", 1024, 4096  # samples of a part; tokens of a batch of the teacher
OPEN = 256  # open files
EVERY = 30.0  # seconds between two reports of progress


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """The number format of cached outputs."""

    half: bool = True  # float16 instead of float32
    top: int | None = None  # likeliest classes kept of each target; None: all
    temperature: float = 1.0  # of the probabilities of these


def online_teacher(
    teacher: Teacher, samples: Sequence[Sample]
) -> Callable[[Sequence[int], Sequence[int]], TeacherOutputs]:
    """Return a function that computes the teacher's outputs for numbers of samples when they are needed."""
    return lambda numbers, keys: teacher.outputs([samples[number] for number in numbers], keys)


class CachedOutputs:
    """Cached outputs by numbers of samples.

    Args:
        folder: Of the cache.
        count: Number of cached rows.
        at: The row of a sample's number and key; None: the number.
    """

    def __init__(self, folder: Path, count: int, at: Callable[[int, int], int] | None = None) -> None:
        self.folder, self.count, self._at = folder, count, at
        self._open = lru_cache(maxsize=OPEN)(self._opened)

    def __call__(self, numbers: Sequence[int], keys: Sequence[int]) -> TeacherOutputs:
        """The outputs for these samples."""
        outputs: TeacherOutputs = {}
        for number, key in zip(numbers, keys, strict=True):
            part, place = divmod(number if self._at is None else self._at(number, key), PART)
            file, bounds = self._open(part)
            for name, ends in bounds.items():
                held = file.get_slice(name)[ends[place] : ends[place + 1]]
                outputs.setdefault(name, []).append(held if held.dtype == torch.int32 else held.float())
        return outputs

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
        return file, {name.removeprefix("sizes."): [0, *accumulate(counts.tolist())] for name, counts in sizes.items()}


def part_name(part: int) -> str:
    """The file name of a part."""
    return f"part-{part:06d}.safetensors"


def cache_teacher_outputs(
    folder: Path,
    teacher: Teacher,
    samples: Sequence[Sample],
    cache_format: CacheFormat,
    facts: dict[str, object],
    *,
    mask_keys: Sequence[Sequence[int]] = (),
    ranks: Ranks = SINGLE_PROCESS,
    log: Callable[[str], None] = lambda text: None,
) -> CachedOutputs:
    """Fill a cache with the teacher's outputs; the first rank computes the parts that are missing.

    Args:
        folder: Of the cache.
        teacher: Computes outputs.
        samples: Its inputs.
        cache_format: Number format.
        facts: What the outputs depend on.
        mask_keys: For samples with masked tokens, a list of keys per version of the masks; (): none.
        ranks: The processes that train together.
        log: Receives progress.

    Raises:
        HeedfulError: If the folder holds outputs with other facts, the disk is too small, or a number too large.
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
    if ranks.is_main:
        make_folder(folder)
        _begin(folder / ABOUT, json.loads(json.dumps(about)))
        missing = [part for part in range(-(-count // PART)) if not (folder / part_name(part)).exists()]
        size = len(missing) * PART if missing[1:] else count
        if missing:
            log(f"the teacher reads {size:,} samples, once; its outputs are kept")
        last = time.monotonic()
        for number, part in enumerate(missing):
            if time.monotonic() - last > EVERY:
                last = time.monotonic()
                log(f"the teacher has read {number * PART:,} of {size:,}")
            numbers = range(part * PART, min((part + 1) * PART, count))
            mine = [samples[row % len(samples)] for row in numbers]
            keys = [mask_keys[row // len(samples)][row % len(samples)] if mask_keys else 0 for row in numbers]
            data = as_bytes(_tensors(teacher, mine, keys, cache_format))
            if not number:
                _need(folder, len(data) * len(missing))
            with atomic_path(folder / part_name(part)) as temporary:
                write_synced(temporary, [data])
    ranks.barrier()
    return CachedOutputs(folder, count)


def _begin(path: Path, about: dict[str, object]) -> None:
    if path.exists():
        before = json.loads(path.read_bytes())
        if changed := [name for name in {*before, *about} if before.get(name) != about.get(name)]:
            raise HeedfulError(
                f"{path.parent} holds outputs of another teacher, or for other samples: {', '.join(sorted(changed))} "
                "changed. Remove that folder, or give another one with --output"
            )
        return
    with atomic_path(path) as part:
        write_synced(part, [json.dumps(about, indent=1, allow_nan=False).encode()])


def _need(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise HeedfulError(
            f"the outputs of the teacher take about {size / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB "
            "left: make room, set teacher_cache.top_k, or teacher_cache.enabled=false, to run the teacher in each step"
        )


def _tensors(teacher: Teacher, samples: Sequence[Sample], keys: Sequence[int], form: CacheFormat) -> dict[str, Tensor]:
    """The tensors of a part: values of all samples, concatenated by name, and the number of each sample."""
    values: dict[str, list[Tensor]] = {}
    for group in split_microbatches([len(sample) for sample in samples], TOKENS):
        outputs = teacher.outputs([samples[number] for number in group], [keys[number] for number in group])
        if form.top is not None:
            ids, shares = zip(
                *(topk_with_rest(scores, form.top, form.temperature) for scores in outputs["scores"]), strict=True
            )
            outputs |= {"ids": [row_ids.to(torch.int32) for row_ids in ids], "scores": list(shares)}
        for name, rows in outputs.items():
            place = values.setdefault(name, [torch.empty(0)] * len(samples))
            for number, value in zip(group, rows, strict=True):
                place[number] = _kept(value.cpu(), form.half)
    sizes = {f"sizes.{name}": np.array([len(row) for row in rows], dtype=np.int32) for name, rows in values.items()}
    return {name: torch.cat(rows) for name, rows in values.items()} | {
        name: torch.from_numpy(counts) for name, counts in sizes.items()
    }


def _kept(value: Tensor, half: bool) -> Tensor:
    if not half or not value.is_floating_point():
        return value
    small = value.half()
    if bool((small.isinf() & ~value.isinf()).any()):
        raise HeedfulError("an output of the teacher is too large for float16: set teacher_cache.precision=float32")
    return small

"""A cache of a teacher's outputs on the disk, made once in parts, so that an interrupted run resumes it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.data.sampler import split_microbatches
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.distillation.losses import topk_with_rest
from heedful.objectives.distillation.teacher import Teacher, TeacherOutputs
from heedful.train.output_cache import CachedOutputs, Outputs, part_bytes
from heedful.train.ranks import SINGLE_PROCESS, Ranks

ABOUT, TOKENS = "about.json", 4096  # tokens of a batch of the teacher
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
        "wanted": teacher.capture_spec.names,
    }
    if cache_format.top is not None:
        about["temperature"] = cache_format.temperature
    cache = CachedOutputs(folder, count)
    if ranks.is_main:
        make_folder(folder)
        _begin(folder / ABOUT, json.loads(json.dumps(about)))
        missing = cache.missing_parts()
        size, read = sum(len(cache.part_rows(part)) for part in missing), 0
        if missing:
            log(f"the teacher reads {size:,} samples, once; its outputs are kept")
        last = time.monotonic()
        for part in missing:
            if time.monotonic() - last > EVERY:
                last = time.monotonic()
                log(f"the teacher has read {read:,} of {size:,}")
            numbers = cache.part_rows(part)
            mine = [samples[row % len(samples)] for row in numbers]
            keys = [mask_keys[row // len(samples)][row % len(samples)] if mask_keys else 0 for row in numbers]
            data = part_bytes(_outputs(teacher, mine, keys, cache_format))
            if not read:
                _need(folder, len(data) * len(missing))
            cache.write_part(part, data)
            read += len(numbers)
    ranks.barrier()
    return cache


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


def _outputs(teacher: Teacher, samples: Sequence[Sample], keys: Sequence[int], form: CacheFormat) -> Outputs:
    """The teacher's outputs for all samples, in the format of the cache."""
    values: Outputs = {}
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
    return values


def _kept(value: Tensor, half: bool) -> Tensor:
    if not half or not value.is_floating_point():
        return value
    small = value.half()
    if bool((small.isinf() & ~value.isinf()).any()):
        raise HeedfulError("an output of the teacher is too large for float16: set teacher_cache.precision=float32")
    return small

"""A cache of a teacher's outputs on the disk, for distillation of tasks and of masked language models.

The cache is filled one part file after the other, so that an interrupted run resumes filling it.
"""

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

FACTS_FILE = "about.json"  # facts that the outputs depend on
BATCH_TOKENS = 4096  # tokens in a batch of the teacher
REPORT_SECONDS = 30.0  # seconds between two progress messages


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """The number format of cached outputs."""

    half: bool = True  # float16 instead of float32
    top: int | None = None  # how many of the likeliest classes are stored for each target, the others as one sum
    temperature: float = 1.0  # temperature of the stored probabilities; has no effect without `top`


def online_teacher(
    teacher: Teacher, samples: Sequence[Sample]
) -> Callable[[Sequence[int], Sequence[int]], TeacherOutputs]:
    """Return a function from sample indices and keys to the teacher's outputs, computed at each call."""
    return lambda indices, keys: teacher.outputs([samples[index] for index in indices], keys)


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
    """Fill a cache with the teacher's outputs. The first rank computes missing parts while the other ranks wait.

    Args:
        folder: The folder of the cache.
        teacher: Computes outputs.
        samples: The teacher's inputs.
        cache_format: Number format of the outputs.
        facts: JSON values that the outputs depend on, such as a digest of the weights.
        mask_keys: A list of sample keys for each static mask, for masked language models. The cached row of sample n
            with mask m is m * len(samples) + n. Without masks, there is one row for each sample.
        ranks: The processes that train together.
        log: Receives progress messages.

    Raises:
        HeedfulError: If the folder holds outputs with other facts, the disk is too small, or a number is too large
            for float16.
    """
    num_rows = max(1, len(mask_keys)) * len(samples)
    all_facts = facts | {
        "samples": num_rows,
        "half": cache_format.half,
        "top": cache_format.top,
        "wanted": teacher.capture_spec.names,
    }
    if cache_format.top is not None:
        all_facts["temperature"] = cache_format.temperature
    cache = CachedOutputs(folder, num_rows)
    if ranks.is_main:
        make_folder(folder)
        _write_or_check_facts(folder / FACTS_FILE, json.loads(json.dumps(all_facts)))
        _write_missing_parts(cache, teacher, samples, mask_keys, cache_format, log)
    ranks.barrier()
    return cache


def _write_missing_parts(
    cache: CachedOutputs,
    teacher: Teacher,
    samples: Sequence[Sample],
    mask_keys: Sequence[Sequence[int]],
    cache_format: CacheFormat,
    log: Callable[[str], None],
) -> None:
    """Compute and write the parts that the cache lacks."""
    missing_parts = cache.missing_parts()
    total_rows = sum(len(cache.part_rows(part)) for part in missing_parts)
    rows_done = 0
    if missing_parts:
        log(f"the teacher reads {total_rows:,} samples, once; its outputs are kept")
    last_report = time.monotonic()
    for part in missing_parts:
        if time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            log(f"the teacher has read {rows_done:,} of {total_rows:,}")
        rows = cache.part_rows(part)
        part_samples = [samples[row % len(samples)] for row in rows]
        keys = [0] * len(rows)
        if mask_keys:
            keys = [mask_keys[row // len(samples)][row % len(samples)] for row in rows]
        data = part_bytes(_part_outputs(teacher, part_samples, keys, cache_format))
        if not rows_done:  # the first part shows how large all of them will be
            _check_disk_space(cache.folder, len(data) * len(missing_parts))
        cache.write_part(part, data)
        rows_done += len(rows)


def _write_or_check_facts(path: Path, facts: dict[str, object]) -> None:
    """Write the facts of a new cache, or check that those of an existing one are equal."""
    if path.exists():
        stored = json.loads(path.read_bytes())
        if changed := [name for name in {*stored, *facts} if stored.get(name) != facts.get(name)]:
            raise HeedfulError(
                f"{path.parent} holds outputs of another teacher, or for other samples: {', '.join(sorted(changed))} "
                "changed. Remove that folder, or give another one with --output"
            )
        return
    with atomic_path(path) as temporary:
        write_synced(temporary, [json.dumps(facts, indent=1, allow_nan=False).encode()])


def _check_disk_space(folder: Path, size: int) -> None:
    """Raise a HeedfulError if the disk has fewer than `size` bytes left."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise HeedfulError(
            f"the outputs of the teacher take about {size / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB "
            "left: make room, set teacher_cache.top_k, or teacher_cache.enabled=false, to run the teacher in each step"
        )


def _part_outputs(
    teacher: Teacher, samples: Sequence[Sample], keys: Sequence[int], cache_format: CacheFormat
) -> Outputs:
    """Return the teacher's outputs for the samples of a part, in the format of the cache."""
    part_outputs: Outputs = {}
    for indices in split_microbatches([len(sample) for sample in samples], BATCH_TOKENS):
        outputs = teacher.outputs([samples[index] for index in indices], [keys[index] for index in indices])
        if cache_format.top is not None:
            top_by_sample = [
                topk_with_rest(scores, cache_format.top, cache_format.temperature) for scores in outputs["scores"]
            ]
            ids, log_probabilities = zip(*top_by_sample, strict=True)
            outputs |= {"ids": [sample_ids.to(torch.int32) for sample_ids in ids], "scores": list(log_probabilities)}
        for name, tensors in outputs.items():
            by_sample = part_outputs.setdefault(name, [torch.empty(0)] * len(samples))
            for index, tensor in zip(indices, tensors, strict=True):
                by_sample[index] = _in_cache_dtype(tensor.cpu(), cache_format.half)
    return part_outputs


def _in_cache_dtype(value: Tensor, half: bool) -> Tensor:
    """Convert floating-point values to float16 if `half` is set; raise a HeedfulError if one would become infinite."""
    if not half or not value.is_floating_point():
        return value
    halved = value.half()
    if bool((halved.isinf() & ~value.isinf()).any()):
        raise HeedfulError("an output of the teacher is too large for float16: set teacher_cache.precision=float32")
    return halved

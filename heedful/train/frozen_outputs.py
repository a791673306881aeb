"""Outputs of frozen layers, computed once for all training samples and read from disk in every epoch."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from heedful.atomic_io import atomic_path, make_folder, remove, write_synced
from heedful.data.sampler import split_microbatches
from heedful.device import autocast
from heedful.model.stack import Transformer
from heedful.objectives import PerEpochSamples, Sample
from heedful.objectives.base import pack_samples
from heedful.train.freezing import freezing_note
from heedful.train.output_cache import CachedOutputs, part_bytes
from heedful.train.trainer import Trainer

KEY = "about.json"  # file with the key of the cached outputs
STATES = "states"  # name of the outputs in part files
BATCH_TOKENS = 4096  # tokens in a batch
REPORT_SECONDS = 30.0  # seconds between two reports of progress
GB = 10**9  # bytes


class SamplesWithFrozenOutputs(Sequence[Sample]):
    """Samples with the outputs of the frozen layers, which are read from disk."""

    def __init__(self, samples: Sequence[Sample], outputs: CachedOutputs) -> None:
        self._samples, self._outputs = samples, outputs

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...
    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        """Return a sample, or several."""
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return replace(self._samples[number], states=self._outputs([number], [0])[STATES][0])


def cache_frozen_outputs(
    trainer: Trainer, folder: Path, log: Callable[[str], None], *, reserved_bytes: int = 0
) -> None:
    """Compute the outputs of the frozen layers for all samples, and let training read them from `folder`.

    Outputs that `folder` has already are not computed again; outputs of other weights or samples are removed from it.
    There is no cache, and outputs are computed in every step, if they do not fit into train.cache_gb or on the disk, or
    if training reads them only once.

    Args:
        trainer: Trainer of a model with frozen layers, whose objective takes samples without changes.
        folder: Cache folder.
        log: Receives messages about the cache.
        reserved_bytes: Disk space that is left for checkpoints, in bytes.
    """
    samples = trainer.samples
    outputs, size = CachedOutputs(folder, len(samples)), frozen_outputs_bytes(trainer)
    note, reason = freezing_note(trainer.settings.freeze_layers), ""
    if trainer.ranks.is_main:
        key = _cache_key(trainer, samples)
        is_started = folder.exists() and _read_key(folder) == key
        missing_rows = [row for part in outputs.missing_parts() for row in outputs.part_rows(part)]
        missing = frozen_outputs_bytes(trainer, missing_rows) if is_started else size
        reason = _no_cache_reason(trainer, size, missing, reserved_bytes, folder)
        if reason:
            log(f"{note}, and recomputed in every step: {reason}")
        else:
            if not is_started:
                _start_cache(folder, key)
            log(f"{note}; their outputs for {len(samples):,} samples are computed once ({size / GB:.2f} GB)")
            _fill_cache(trainer, outputs, samples, log)
    if not trainer.ranks.all_gather_object(reason)[0]:
        trainer.stages = (
            trainer.stages[0]._replace(samples=SamplesWithFrozenOutputs(samples, outputs)),
            *trainer.stages[1:],
        )


def frozen_outputs_bytes(trainer: Trainer, numbers: Iterable[int] | None = None) -> int:
    """Return the size of the outputs of the frozen layers for the samples with these numbers (None: all samples)."""
    samples = trainer.samples if numbers is None else (trainer.samples[number] for number in numbers)
    return sum(map(len, samples)) * trainer.loaded.config.model.width * torch.float32.itemsize


def _no_cache_reason(trainer: Trainer, size: int, missing: int, reserved: int, folder: Path) -> str:
    """Return why outputs are not cached, or "".

    Args:
        size: Bytes of all outputs.
        missing: Bytes that are still to be written.
        reserved: Bytes of the disk that are left for checkpoints.
        folder: Cache folder.
    """
    steps, limit = trainer.total_steps, trainer.settings.cache_gb
    if steps is not None and steps <= trainer.order.steps_per_epoch:
        return "training reads every sample once"
    if isinstance(trainer.samples, PerEpochSamples):
        return "the samples differ from epoch to epoch"
    if size > limit * GB:
        return f"their outputs take {size / GB:.2f} GB, and train.cache_gb is {limit:g}"
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if missing and missing + reserved > free:
        outputs = "their outputs take" if missing == size else "the missing part of their outputs takes"
        beside = f", beside {reserved / GB:.2f} GB for checkpoints" if reserved else ""
        return f"{outputs} {missing / GB:.2f} GB, and {folder} has {max(0, free - reserved) / GB:.2f} GB left{beside}"
    return ""


def _fill_cache(
    trainer: Trainer, outputs: CachedOutputs, samples: Sequence[Sample], log: Callable[[str], None]
) -> None:
    """Compute and write the missing parts of the cache."""
    missing, reported_at = outputs.missing_parts(), time.monotonic()
    for done, part in enumerate(missing):
        if time.monotonic() - reported_at > REPORT_SECONDS:
            reported_at = time.monotonic()
            log(f"outputs of the frozen layers: {done} of {len(missing)} parts")
        numbers = outputs.part_rows(part)
        states = list(_states(trainer, [samples[number] for number in numbers]))
        outputs.write_part(part, part_bytes({STATES: states}))


@torch.no_grad()
def _states(trainer: Trainer, samples: Sequence[Sample]) -> Iterator[Tensor]:
    """Yield the outputs of the frozen layers for each sample, in the precision of training."""
    model = trainer.loaded.model
    assert isinstance(model, Transformer) and not model.training
    states: dict[int, Tensor] = {}
    for group in split_microbatches([len(sample) for sample in samples], BATCH_TOKENS):
        batch = [samples[number] for number in group]
        packed = pack_samples(batch).to(trainer.device)
        with autocast(trainer.device, trainer.precision):
            rows = model.frozen_states(packed).cpu()
        states |= zip(group, rows.split([len(sample) for sample in batch]), strict=True)
    yield from (states[number] for number in range(len(samples)))


def _cache_key(trainer: Trainer, samples: Sequence[Sample]) -> str:
    """Return a SHA-256 of everything that decides the outputs: frozen weights, samples and precision."""
    model = trainer.loaded.model
    assert isinstance(model, Transformer)
    digest = hashlib.sha256(f"{trainer.precision} {trainer.device.type} {trainer.settings.freeze_layers}".encode())
    for module in model.frozen_modules():
        for tensor in module.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for sample in samples:
        digest.update(json.dumps(sample.bounds).encode())
        digest.update(sample.tokens.tobytes())
        digest.update(sample.types.tobytes())
    return digest.hexdigest()


def _read_key(folder: Path) -> str | None:
    """Return the key of the outputs in a cache folder; None if it has none."""
    path = folder / KEY
    return json.loads(path.read_bytes())["key"] if path.exists() else None


def _start_cache(folder: Path, key: str) -> None:
    """Make an empty cache folder with this key."""
    if folder.exists():
        remove(folder)
    make_folder(folder)
    with atomic_path(folder / KEY) as part:
        write_synced(part, [json.dumps({"key": key}).encode()])

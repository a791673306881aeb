"""The option --dry-run: the time, memory and disk space that fine-tuning needs, estimated from a few steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from heedful.checkpoint import ModelBundle
from heedful.data.bad_rows import OnBadRow
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.encoder_advice import reading_notes
from heedful.runs.finetune.few_labels import body_objective, sentence_vectors, with_vector_head
from heedful.runs.finetune.init_settings import ClassicInit, Scratch, model_name
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings, finetune_overrides
from heedful.runs.finetune.training_time import estimate_seconds
from heedful.runs.overrides import Overrides
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import check_run_folder
from heedful.runs.timing import peak_memory
from heedful.tasks.task import EncodedSplit
from heedful.train.frozen_outputs import GB, frozen_outputs_bytes
from heedful.train.trainer import Trainer

TIMED_SAMPLES = 64  # samples for timing the forward pass
CHECKPOINT_VALUES = 3  # values per parameter in a checkpoint: the weight and two moments, beside the best weight so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimated size, duration, memory and disk space of a run."""

    examples: int  # training examples
    samples: int  # samples for training; an example may have several windows
    tokens: int  # tokens of one epoch
    parameters: int
    seeds: int
    steps: int | None  # steps of one seed; None: training ends after a time budget
    seconds: float  # training of one seed, without evaluations
    tokens_per_second: float
    memory: int  # bytes: peak memory of this process, plus copies of the weights
    disk: int  # bytes of all checkpoints and models at the peak, when a new checkpoint replaces an old one
    free: int  # free bytes on the disk of the run folder
    notes: tuple[str, ...]  # sentences for the user

    def to_dict(self) -> JsonObject:
        """Convert to plain data for JSON."""
        return asdict(self)

    def table_rows(self) -> list[list[str]]:
        """Return the estimate as rows of a table, each with name and value."""
        times = f"{self.seeds} x " if self.seeds > 1 else ""
        steps = "as many as fit" if self.steps is None else f"{self.steps:,}"
        duration = f"{self.seconds / 60:.1f} min at {self.tokens_per_second:,.0f} tokens/s, without evaluations"
        return [
            ["examples", f"{self.examples:,}"],
            ["samples", f"{self.samples:,} of {self.tokens:,} tokens together"],
            ["parameters", f"{self.parameters:,}"],
            ["steps", f"{times}{steps}"],
            ["time", f"{times}{duration}"],
            ["memory", f"{self.memory / 2**30:.2f} GiB"],
            ["disk", f"{self.disk / 2**30:.2f} GiB; {self.free / 2**30:.1f} GiB are free"],
            *[["note", note] for note in self.notes],
        ]


def dry_run(
    task: str,
    data: object,
    output_dir: str | Path,
    *,
    model: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
) -> Estimate:
    """Estimate the time, memory and disk space that `finetune` needs, by reading the data and running a few steps.

    Nothing is written. Pre-training on the training texts (`mlm_steps`, `skipgram_steps`) is left out. The arguments
    are documented at `finetune`.
    """
    folder = Path(output_dir)
    overrides = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    plan = plan_finetune(task, data, overrides=overrides, on_bad_row=on_bad_row)
    check_run_folder(folder)
    # a dry run is a single process; with sharding each rank is equally fast and takes less memory
    train = replace(plan.settings.train, data_parallel_shard_degree=1)
    init = plan.settings.init
    if isinstance(init, Scratch):
        init = replace(init, mlm_steps=0)
    elif isinstance(init, ClassicInit):
        init = replace(init, skipgram_steps=0)
    settings = replace(plan.settings, init=init, train=train)
    base = initial_model(init, plan.source, plan.stats.counts, train.seed, settings.max_length, lambda text: None)
    objective, loaded = build_task(settings, plan.source, plan.stats, base)
    encoded = objective.encode_split(plan.source.examples("train"))
    notes = reading_notes(settings, plan.source, plan.stats, objective, encoded)
    if settings.method in ("linear", "contrastive"):
        loaded = with_vector_head(loaded, base)
    trainer = Trainer(loaded, body_objective(settings, objective), encoded.samples, train)
    is_linear = settings.method == "linear"
    if is_linear:
        seconds, tokens_per_second = _encoding_seconds(loaded, encoded)
    else:
        seconds, tokens_per_second = estimate_seconds(trainer, encoded.tokens)
    has_dev = "dev" in plan.stats.non_empty_splits
    weight_bytes = 4 * loaded.count()
    # models of the methods for few labels are not evaluated during training, so no best weights are stored
    has_best = settings.fit.load_best_at_end and has_dev and settings.method not in ("linear", "contrastive")
    weights_in_memory = _copies_of_weights(settings, has_best=has_best)
    weights_on_disk = _saved_weights(settings, has_best=has_best)
    return Estimate(
        examples=encoded.examples,
        samples=len(encoded.samples),
        tokens=encoded.tokens,
        parameters=loaded.count(),
        seeds=settings.seeds,
        steps=0 if is_linear else trainer.total_steps,
        seconds=seconds,
        tokens_per_second=tokens_per_second,
        memory=peak_memory() + weight_bytes * weights_in_memory,
        disk=weight_bytes * weights_on_disk + _frozen_bytes(trainer),
        free=shutil.disk_usage(_existing(folder)).free,
        notes=(*plan.notes, plan.why, *notes, *_gpu_notes(trainer.device), *_method_notes(settings)),
    )


def _copies_of_weights(settings: FinetuneSettings, *, has_best: bool) -> int:
    """Return how many copies of the weights are in memory: the best weights, and a checkpoint that is being written."""
    if settings.method == "linear":  # no checkpoints are written
        return 0
    return has_best + (CHECKPOINT_VALUES + has_best) * settings.fit.async_checkpoint


def _saved_weights(settings: FinetuneSettings, *, has_best: bool) -> int:
    """Return the peak disk space of models and checkpoints, in copies of the weights."""
    models = settings.seeds * (1 + has_best)  # the model, and the last weights beside the best ones
    if settings.seeds > 1:
        models += 1  # the model of the run, which is a copy of one seed's model
    if not model_name(settings.init):
        models += settings.seeds  # the initial models
    if settings.method == "linear":
        return models
    seeds_with_state = settings.seeds if settings.fit.keep_checkpoints else 1  # seeds that have a training state
    checkpoints = seeds_with_state * settings.fit.keep_last + 1  # a new one is written before an old one is removed
    return models + (CHECKPOINT_VALUES + has_best) * checkpoints


def _frozen_bytes(trainer: Trainer) -> int:
    """Return the disk space of cached outputs of frozen layers in bytes, or 0 if they are not cached."""
    size = frozen_outputs_bytes(trainer) if trainer.settings.freeze_layers else 0
    return size if size <= trainer.settings.cache_gb * GB else 0


def _encoding_seconds(loaded: ModelBundle, encoded: EncodedSplit) -> tuple[float, float]:
    """Estimate the seconds of a forward pass over all samples, and tokens per second, from the first samples."""
    samples = encoded.samples[:TIMED_SAMPLES]
    start = time.perf_counter()
    sentence_vectors(loaded, samples)
    tokens_per_second = sum(map(len, samples)) / (time.perf_counter() - start)
    return encoded.tokens / tokens_per_second, tokens_per_second


def _method_notes(settings: FinetuneSettings) -> list[str]:
    """Return a sentence about the comparison of methods that precedes training with method=auto, else []."""
    if settings.method != "auto":
        return []
    return [
        "this is the estimate for method=finetune; before it, methods are compared on held-out examples, for about "
        f"{settings.method_seconds:g} s, and another one may be chosen"
    ]


def _gpu_notes(device: torch.device) -> list[str]:
    """Return a sentence with the peak GPU memory of the timed steps, or [] on the CPU."""
    if device.type != "cuda":
        return []
    return [f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of memory were taken on the GPU"]


def _existing(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest existing parent."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())

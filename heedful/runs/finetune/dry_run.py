"""A dry run: what a fine-tuning would need, from its own data and a few of its own steps; nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heedful.data.bad_rows import OnBadRow
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.encoder_advice import reading_notes
from heedful.runs.finetune.init_settings import Classic, Scratch, model_name
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import finetune_overrides
from heedful.runs.finetune.training_time import estimate_seconds
from heedful.runs.overrides import Overrides
from heedful.runs.run_folder import check_run_folder
from heedful.runs.timing import peak_memory
from heedful.train.trainer import Trainer

STATE = 4  # of each parameter in a checkpoint: its value, two moments, and the best value so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a run would need."""

    examples: int
    samples: int
    tokens: int  # of one epoch
    parameters: int
    seeds: int
    steps: int | None  # of one seed; None: the clock decides
    seconds: float  # of training one seed, without evaluations; from steps that were run here
    tokens_per_second: float
    memory: int  # bytes that this process had at most while it ran those steps
    disk: int  # bytes of all checkpoints and models, about, while one more checkpoint is written
    free: int  # bytes on that disk
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def rows(self) -> list[list[str]]:
        """For a table."""
        times = f"{self.seeds} x " if self.seeds > 1 else ""
        return [
            ["examples", f"{self.examples:,}"],
            ["samples", f"{self.samples:,} of {self.tokens:,} tokens together"],
            ["parameters", f"{self.parameters:,}"],
            ["steps", f"{times}as many as fit" if self.steps is None else f"{times}{self.steps:,}"],
            [
                "time",
                f"{times}{self.seconds / 60:.1f} min at {self.tokens_per_second:,.0f} tokens/s, without evaluations",
            ],
            ["memory", f"{self.memory / 2**30:.2f} GiB"],
            ["disk", f"{self.disk / 2**30:.2f} GiB; {self.free / 2**30:.1f} GiB are free"],
            *[["note", note] for note in self.notes],
        ]


def dry_run(
    task: str,
    data: Any,
    output_dir: str | Path,
    *,
    model: str | Path = "",
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
) -> Estimate:
    """Read the data, run a few steps in memory, and tell; an encoder that would be trained on the spot is not."""
    folder = Path(output_dir)
    given = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    plan = plan_finetune(task, data, overrides=given, on_bad_row=on_bad_row)
    check_run_folder(folder)
    # one process estimates: sharded training is as fast, and takes less memory on each rank
    train = replace(plan.settings.train, data_parallel_shard_degree=1)
    init = plan.settings.init
    if isinstance(init, Scratch):
        init = replace(init, mlm_steps=0)
    elif isinstance(init, Classic):
        init = replace(init, skipgram_steps=0)
    settings = replace(plan.settings, init=init, train=train)
    counts, seed, longest = plan.survey.counts, settings.train.seed, settings.max_length
    base = initial_model(settings.init, plan.source, counts, seed, longest, lambda text: None)
    made, loaded = build_task(settings, plan.source, plan.survey, base)
    learned = made.read(plan.source.examples("train"))
    said = reading_notes(settings, plan.source, plan.survey, made, learned)
    trainer = Trainer(loaded, made, learned.samples, settings.train)
    seconds, speed = estimate_seconds(trainer, learned.tokens)
    weights, several = 4 * loaded.count(), settings.seeds > 1
    best = settings.fit.load_best_at_end and "dev" in plan.survey.splits
    more = weights * (best + STATE * settings.fit.async_checkpoint)  # weights of the best step; the copy being written
    models = settings.seeds * (1 + best) + several + (0 if model_name(init) else settings.seeds)
    states = settings.seeds if settings.fit.keep_checkpoints else 1  # seeds whose training state is there at once
    return Estimate(
        examples=learned.examples,
        samples=len(learned.samples),
        tokens=learned.tokens,
        parameters=loaded.count(),
        seeds=settings.seeds,
        steps=trainer.total,
        seconds=seconds,
        tokens_per_second=speed,
        memory=peak_memory() + more,
        disk=weights * (models + STATE * (states * settings.fit.keep_last + 1)),
        free=shutil.disk_usage(_existing(folder)).free,
        notes=(*plan.notes, plan.why, *said, *_on_gpu(trainer.device)),
    )


def _on_gpu(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    return [f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB of memory were taken on the GPU"]


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())

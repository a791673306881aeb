"""Quality of fine-tuning, Heedful's side: the plans and examples of finetune_data.py, measured by Heedful's metrics.

HEEDFUL_DATA=folder python benchmarks/finetune.py MRPC --seed 1 --out results/finetune/ours/MRPC-1.json

Where it is stopped, the same command goes on from a checkpoint beside --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from engines import minilm
from finetune_data import PLANS, Task, load, sample
from report import facts

import heedful
from heedful.checkpoint.new_head import with_head
from heedful.data import ScoredExample
from heedful.runs.scoring import measure_split
from heedful.tasks.classify import Classify
from heedful.tasks.qa import QuestionAnswering
from heedful.tasks.regress import Regress
from heedful.tasks.tag import Tag
from heedful.tasks.task import Task as Learning
from heedful.train.checkpoint import CheckpointManager
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings

EVERY, SAVE = 50, 200  # steps between two lines, and between two checkpoints
SHOWN = (
    "accuracy",
    "f1",
    "matthews",
    "pearson",
    "spearman",
    "precision",
    "recall",
    "strict_f1",
    "token_accuracy",
    "exact",
)


def build(task: Task, longest: int, seed: int) -> tuple[Learning, heedful.ModelBundle]:
    """The task and the encoder with its head."""
    loaded = heedful.load(minilm())
    common: dict[str, Any] = {"tokenizer": loaded.tokenizer, "limit": longest}
    if task.kind == "regress":
        scores = [each.score for each in task.train if isinstance(each, ScoredExample)]
        made: Learning = Regress(labels=("score",), mean=fmean(scores), deviation=pstdev(scores), **common)
        return made, with_head(
            loaded, "sequence_classification", labels=("score",), problem_type="regression", seed=seed
        )
    if task.kind == "qa":
        return QuestionAnswering(impossible=False, **common), with_head(loaded, "question_answering", seed=seed)
    if task.kind == "tag":
        return Tag(labels=task.labels, **common), with_head(
            loaded, "token_classification", labels=task.labels, seed=seed
        )
    return Classify(labels=task.labels, **common), with_head(
        loaded, "sequence_classification", labels=task.labels, seed=seed
    )


def main() -> None:
    """Train one task with one seed and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(PLANS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="default: the plan of the task in finetune_data.py; so with these:")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layer-decay", type=float, default=1.0)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit", type=int, help="train on a sample of that many examples")
    parser.add_argument("--limit-held", type=int, help="a rehearsal: measure on a sample")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    said = {name: getattr(given, name) for name in ("epochs", "rate", "batch") if getattr(given, name) is not None}
    plan, task = replace(PLANS[given.task], **said), load(given.task)
    task = replace(task, train=sample(task.train, given.limit), held=sample(task.held, given.limit_held))
    made, loaded = build(task, plan.longest, given.seed)
    learned = made.encode_split(task.train)
    settings = TrainSettings(
        epochs=plan.epochs,
        batch_size=plan.batch,
        optimizer=AdamW(lr=plan.rate, layer_decay=given.layer_decay),
        precision=given.precision,
        seed=given.seed,
    )
    trainer = Trainer(loaded, made, learned.samples, settings)
    print(f"{given.task}: {task.about}; {len(learned.samples)} samples, {trainer.total_steps} steps", flush=True)
    store, recent = CheckpointManager(given.out.with_suffix(".state")), 0.0
    asked = {"plan": asdict(plan), "layer decay": given.layer_decay, "precision": given.precision, "seed": given.seed}
    if (saved := store.load()) is not None:
        if saved.values["asked"] != asked:
            raise SystemExit(f"{store.folder} is of {saved.values['asked']}, expected {asked}: take another --out")
        trainer.load_state(saved.tensors, saved.values["trainer"])
        print(f"goes on from step {trainer.step}", flush=True)
    for step in trainer:
        recent += step.loss
        if step.number % EVERY == 0:
            speed = f"{trainer.tokens_seen / trainer.seconds:.0f} tokens/s {trainer.seconds:.0f} s"
            print(f"step {step.number} loss {recent / EVERY:.4f} {speed}", flush=True)
            recent = 0.0
        if step.number % SAVE == 0 or step.number == trainer.total_steps:
            tensors, values = trainer.state()
            store.save(step.number, tensors, {"asked": asked, "trainer": values})
    start = time.perf_counter()
    measured = measure_split(made, made.for_inference(loaded), task.held)
    numbers = made.compute_metrics(measured)
    result = {
        "task": given.task,
        "seed": given.seed,
        "plan": asdict(plan) | {"layer_decay": given.layer_decay},
        "precision": given.precision,
        "metrics": {name: 100 * numbers[name] for name in SHOWN if name in numbers},
        "intervals": measured.intervals(),
        "training": {
            "steps": trainer.step,
            "seconds": trainer.seconds,
            "tokens": trainer.tokens_seen,
            "tokens per second": trainer.tokens_seen / trainer.seconds,
        },
        "seconds of measuring": time.perf_counter() - start,
        "data": {
            "about": task.about,
            "train": len(task.train),
            "samples": len(learned.samples),
            "in windows": learned.windowed,
            "held": len(task.held),
            "rehearsal": given.limit_held is not None,
        },
        "threads": torch.get_num_threads(),
        "machine": facts(),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    part = given.out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    part.replace(given.out)
    shutil.rmtree(store.folder)
    print(json.dumps(result["metrics"]), flush=True)


if __name__ == "__main__":
    main()

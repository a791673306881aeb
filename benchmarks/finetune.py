"""Quality of fine-tuning, Heedful's side: the plans and examples of finetune_data.py, measured by Heedful's metrics.

HEEDFUL_DATA=folder python benchmarks/finetune.py MRPC --seed 1 --out results/finetune/ours/MRPC-1.json

After a stop, the same command resumes from a checkpoint beside --out.
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
from report import check_destination, facts

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
        scores = [example.score for example in task.train if isinstance(example, ScoredExample)]
        settings: Learning = Regress(labels=("score",), mean=fmean(scores), deviation=pstdev(scores), **common)
        return settings, with_head(
            loaded, "sequence_classification", labels=("score",), problem_type="regression", seed=seed
        )
    if task.kind == "qa":
        return QuestionAnswering(has_unanswerable=False, **common), with_head(loaded, "question_answering", seed=seed)
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
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    check_destination(options.out)
    torch.set_num_threads(options.threads)
    changes = {
        name: getattr(options, name) for name in ("epochs", "rate", "batch") if getattr(options, name) is not None
    }
    plan, task = replace(PLANS[options.task], **changes), load(options.task)
    task = replace(task, train=sample(task.train, options.limit), held=sample(task.held, options.limit_held))
    training_task, loaded = build(task, plan.longest, options.seed)
    loaded.to(options.device)
    learned = training_task.encode_split(task.train)
    settings = TrainSettings(
        epochs=plan.epochs,
        batch_size=plan.batch,
        optimizer=AdamW(lr=plan.rate, layer_decay=options.layer_decay),
        precision=options.precision,
        seed=options.seed,
    )
    trainer = Trainer(loaded, training_task, learned.samples, settings)
    print(f"{options.task}: {task.about}; {len(learned.samples)} samples, {trainer.total_steps} steps", flush=True)
    store, recent = CheckpointManager(options.out.with_suffix(".state")), 0.0
    asked = {
        "plan": asdict(plan),
        "layer decay": options.layer_decay,
        "precision": options.precision,
        "seed": options.seed,
    }
    if (saved := store.load()) is not None:
        if saved.values["asked"] != asked:
            raise SystemExit(f"{store.folder} is of {saved.values['asked']}, expected {asked}: take another --out")
        trainer.load_state(saved.tensors, saved.values["trainer"])
        print(f"resumes from step {trainer.step}", flush=True)
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
    measured = measure_split(training_task, training_task.for_inference(loaded), task.held)
    numbers = training_task.compute_metrics(measured)
    result = {
        "task": options.task,
        "seed": options.seed,
        "plan": asdict(plan) | {"layer_decay": options.layer_decay},
        "precision": options.precision,
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
            "rehearsal": options.limit_held is not None,
        },
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "machine": facts(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    part.replace(options.out)
    shutil.rmtree(store.folder)
    print(json.dumps(result["metrics"]), flush=True)


if __name__ == "__main__":
    main()

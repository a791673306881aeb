"""Fine-tune all-MiniLM-L6-v2 with Heedful, and score it by Heedful's metrics.

The tasks and their hyper-parameters are in finetune_data.py; finetune_peer.py does the same with transformers, and
finetune_table.py compares the results.

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
from finetune_data import PLANS, Plan, Task, load, sample
from report import check_destination, facts

import heedful
from heedful.checkpoint.new_head import with_head
from heedful.data import ScoredExample
from heedful.runs.scoring import measure_split
from heedful.tasks.classify import Classify
from heedful.tasks.qa import QuestionAnswering
from heedful.tasks.regress import Regress
from heedful.tasks.tag import Tag
from heedful.tasks.task import Task as TrainingTask
from heedful.train.checkpoint import CheckpointManager
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings

EVERY, SAVE = 50, 200  # steps between two lines of output, and between two checkpoints
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


def build(task: Task, longest: int, seed: int) -> tuple[TrainingTask, heedful.ModelBundle]:
    """Return Heedful's training task, and the encoder with a new head for it.

    Args:
        task: The data and the kind of the task.
        longest: Maximum tokens of a sequence.
        seed: Seed of the head's weights.
    """
    encoder = heedful.load(minilm())
    common: dict[str, Any] = {"tokenizer": encoder.tokenizer, "limit": longest}
    training_task: TrainingTask
    match task.kind:
        case "regress":
            scores = [example.score for example in task.train if isinstance(example, ScoredExample)]
            training_task = Regress(labels=("score",), mean=fmean(scores), deviation=pstdev(scores), **common)
            head: dict[str, Any] = {"labels": ("score",), "problem_type": "regression"}
            return training_task, with_head(encoder, "sequence_classification", seed=seed, **head)
        case "qa":
            training_task = QuestionAnswering(has_unanswerable=False, **common)
            return training_task, with_head(encoder, "question_answering", seed=seed)
        case "tag":
            training_task = Tag(labels=task.labels, **common)
            return training_task, with_head(encoder, "token_classification", labels=task.labels, seed=seed)
        case "classify":
            training_task = Classify(labels=task.labels, **common)
            return training_task, with_head(encoder, "sequence_classification", labels=task.labels, seed=seed)


def train(trainer: Trainer, checkpoints: CheckpointManager, settings: dict[str, Any]) -> None:
    """Train to the end, from the last checkpoint if there is one, and save checkpoints.

    Args:
        trainer: The trainer.
        checkpoints: The folder of the checkpoints.
        settings: The settings of this training. A checkpoint of other settings is an error.
    """
    if (saved := checkpoints.load()) is not None:
        saved_settings = saved.values["asked"]
        if saved_settings != settings:
            raise SystemExit(
                f"{checkpoints.folder} has checkpoints of other settings: {saved_settings} instead of {settings}; "
                "give another --out"
            )
        trainer.load_state(saved.tensors, saved.values["trainer"])
        print(f"resumes from step {trainer.step}", flush=True)
    recent_loss = 0.0  # sum since the last line of output
    for step in trainer:
        recent_loss += step.loss
        if step.number % EVERY == 0:
            speed = f"{trainer.tokens_seen / trainer.seconds:.0f} tokens/s {trainer.seconds:.0f} s"
            print(f"step {step.number} loss {recent_loss / EVERY:.4f} {speed}", flush=True)
            recent_loss = 0.0
        if step.number % SAVE == 0 or step.number == trainer.total_steps:
            tensors, values = trainer.state()
            checkpoints.save(step.number, tensors, {"asked": settings, "trainer": values})


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON; an interrupted call leaves no incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    part.replace(path)


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(PLANS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="default, as of --rate and --batch: PLANS in finetune_data.py")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layer-decay", type=float, default=1.0)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--limit", type=int, help="train on a sample of this many examples")
    parser.add_argument("--limit-held", type=int, help="rehearse: score a sample of this many examples")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the hyper-parameters of the task, with those of the command line instead where they are set."""
    names = ("epochs", "rate", "batch")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(PLANS[options.task], **changes)


def main() -> None:
    """Train one task with one seed, score it and write the result."""
    options = parsed_options()
    check_destination(options.out)
    torch.set_num_threads(options.threads)
    plan, task = plan_of(options), load(options.task)
    task = replace(task, train=sample(task.train, options.limit), held=sample(task.held, options.limit_held))
    training_task, loaded = build(task, plan.longest, options.seed)
    loaded.to(options.device)
    train_split = training_task.encode_split(task.train)
    settings = TrainSettings(
        epochs=plan.epochs,
        batch_size=plan.batch,
        optimizer=AdamW(lr=plan.rate, layer_decay=options.layer_decay),
        precision=options.precision,
        seed=options.seed,
    )
    trainer = Trainer(loaded, training_task, train_split.samples, settings)
    print(f"{options.task}: {task.about}; {len(train_split.samples)} samples, {trainer.total_steps} steps", flush=True)
    checkpoints = CheckpointManager(options.out.with_suffix(".state"))
    checkpoint_settings = {
        "plan": asdict(plan),
        "layer decay": options.layer_decay,
        "precision": options.precision,
        "seed": options.seed,
    }
    train(trainer, checkpoints, checkpoint_settings)
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
            "samples": len(train_split.samples),
            "in windows": train_split.windowed,
            "held": len(task.held),
            "rehearsal": options.limit_held is not None,
        },
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "machine": facts(),
    }
    write_result(options.out, result)
    shutil.rmtree(checkpoints.folder)
    print(json.dumps(result["metrics"]), flush=True)


if __name__ == "__main__":
    main()

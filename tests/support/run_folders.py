"""Run folders as finetune writes them, with generated predictions that went through the real metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from heedful.tasks.metrics import (
    Calibration,
    ConfusionMatrix,
    Coverage,
    EntityScores,
    MultiLabelScores,
    RankedRegressionScores,
    Result,
    TokenLoss,
)
from heedful.train.journal import Journal

Line = dict[str, Any]


def classification_result(
    labels: list[str], count: int = 400, seed: int = 0, right: float = 0.8
) -> tuple[Result, list[Line]]:
    """Return the metrics and the predictions of a classifier.

    Args:
        labels: Labels of the classes.
        count: Number of examples.
        seed: Seed of the random answers.
        right: Approximate accuracy; answers with more confidence are correct more often.
    """
    rng = np.random.default_rng(seed)
    gold = rng.integers(len(labels), size=count)
    confidence = rng.beta(6, 1.5, size=count)
    wrong = (gold + rng.choice([1, 1, 2, 5], size=count)) % len(labels)
    predicted = np.where(rng.random(count) < right * (0.6 + 0.5 * confidence), gold, wrong)
    loss = -np.log(np.where(predicted == gold, confidence, 1 - confidence))
    calibration = Calibration().update(confidence, predicted == gold).compute()
    metrics = ConfusionMatrix(labels=tuple(labels)).update(predicted, gold).compute()
    metrics |= {"loss": TokenLoss().update(loss, np.ones(count, dtype=int)).compute()["loss"]}
    metrics |= {"ece": calibration["ece"], "calibration": calibration["table"]}
    metrics |= {"coverage": Coverage().update(confidence, predicted == gold).compute()["table"]}
    lines = [
        {
            "id": int(n),
            "input": f"text number {n}",
            "label": labels[gold[n]],
            "prediction": labels[predicted[n]],
            "correct": bool(gold[n] == predicted[n]),
            "loss": float(loss[n]),
            "answer": {"label": labels[predicted[n]], "probability": float(confidence[n])},
        }
        for n in np.argsort(-loss, kind="stable")
    ]
    return metrics, lines


def multilabel_result(labels: list[str], count: int = 300, seed: int = 0) -> Result:
    """Return the metrics of a multi-label classifier."""
    rng = np.random.default_rng(seed)
    gold = rng.random((count, len(labels))) < np.linspace(0.05, 0.6, len(labels))
    predicted = gold ^ (rng.random(gold.shape) < np.linspace(0.02, 0.3, len(labels)))
    return MultiLabelScores(labels=tuple(labels)).update(predicted.astype(int), gold.astype(int)).compute() | {
        "loss": 0.31
    }


def tagging_result(count: int = 200, seed: int = 0) -> Result:
    """Return the metrics of a tagger of four entity types."""
    rng, tags = np.random.default_rng(seed), ["O", "O", "O", "B-PER", "B-LOC", "B-ORG", "B-MISC"]
    gold = [rng.choice(tags, size=12).tolist() for _ in range(count)]
    predicted = [[tag if rng.random() < 0.9 else rng.choice(tags) for tag in sentence] for sentence in gold]
    return EntityScores(scheme="conlleval").update(predicted, gold).compute() | {"strict_f1": 0.7}


def regression_result(count: int = 300, seed: int = 0) -> tuple[Result, list[Line]]:
    """Return the metrics and the predictions of a regression with scores from 0 to 5."""
    rng = np.random.default_rng(seed)
    gold = np.round(rng.random(count) * 25) / 5
    predicted = 0.8 * gold + 0.6 + rng.normal(0, 0.5, count)
    lines = [
        {
            "id": n,
            "input": ["one", "other"],
            "label": float(gold[n]),
            "prediction": float(predicted[n]),
            "correct": None,
        }
        | {"loss": float(abs(gold[n] - predicted[n])), "answer": {"values": {"score": float(predicted[n])}}}
        for n in np.argsort(-abs(gold - predicted), kind="stable").tolist()
    ]
    return RankedRegressionScores().update(predicted, gold).compute(), lines


def journal_records(steps: int = 300, num_evaluations: int = 6, seed: int = 0, epochs: float = 3.0) -> list[Line]:
    """Return the records of a journal, with this number of steps and evaluations."""
    rng = np.random.default_rng(seed)
    lines: list[Line] = []
    best = -1.0
    for step in range(1, steps + 1):
        loss = 0.25 + 0.9 * np.exp(-4 * step / steps) + rng.normal(0, 0.08)
        lr = 5e-5 * min(10 * step / steps, (steps - step) / (0.9 * steps))
        lines.append({"step": step, "epoch": epochs * step / steps, "loss": float(loss), "lr": lr, "grad_norm": 1.0})
        if num_evaluations and step % max(1, steps // num_evaluations) == 0:
            metric = float(0.92 - 0.4 * np.exp(-5 * step / steps) - 0.02 * (step > 0.8 * steps))
            dev = {"accuracy": metric, "loss": float(0.35 + 0.6 * np.exp(-5 * step / steps) + 0.1 * step / steps)}
            lines.append({"step": step, "dev": dev, "metric_value": metric, "best": metric > best})
            best = max(best, metric)
    return lines


def write_journal(folder: Path, lines: list[Line]) -> None:
    """Write a new journal, as training does, with these records."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").unlink(missing_ok=True)
    journal = Journal(folder / "journal.jsonl")
    for line in lines:
        journal.write(line)
    journal.close()


def interval(value: float) -> Line:
    """Return a confidence interval around a number."""
    return {"low": value - 0.02, "high": value + 0.02, "level": 0.95, "replicates": 1000, "count": 400}


def results_json(task: str, metric: str, splits: dict[str, Result], **fields: Any) -> dict[str, Any]:
    """Return the content of a results.json of finetune."""
    scores = {name: numbers[metric] for name, numbers in splits.items()}
    return {
        "task": task,
        "metric": metric,
        "labels": [],
        "base": "a small encoder, trained on the spot",
        "seed": 1,
        "seeds": [{"seed": 1, "best_step": 250, "steps": 300, "seconds": 61.2, "splits": scores}],
        "across_seeds": {name: {"mean": value, "std": None, "seeds": 1} for name, value in scores.items()},
        "splits": {
            name: {"numbers": numbers, "intervals": {metric: interval(numbers[metric])}}
            for name, numbers in splits.items()
        },
        "data": {
            "stated": ["train.csv: commas, a header"],
            "splits": {"train": {"examples": 3200}, **{name: {"examples": 400} for name in splits}},
            "files": {"train.csv": "ab" * 32},
        },
        "model": {"parameters": 1_234_567, "bytes": 4_938_268},
        "latency": {"16": {"p50": 1.21, "p99": 1.9}, "64": {"p50": 2.5, "p99": 3.75}},
        "throughput": 41_250,
        "machine": "EPYC, 2 cores, avx2",
        "versions": {"heedful": "0.1.0", "torch": "2.13.0"},
        "settings": {"task": {"kind": task}, "train": {"seed": 1, "batch_size": 32}},
        "notes": ["3,200 training examples are 3,200 samples of 64,000 tokens"],
    } | fields


def write_run_folder(
    folder: Path, run_results: dict[str, Any], lines: list[Line] | None = None, **split_lines: list[Line]
) -> Path:
    """Write results, a journal and predictions by split; returns the folder."""
    write_journal(folder, journal_records() if lines is None else lines)
    (folder / "results.json").write_bytes(json.dumps(run_results, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    for split, rows in split_lines.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in rows)
        (folder / f"predictions-{split}.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder

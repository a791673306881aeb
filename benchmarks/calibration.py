"""Measure the calibration of fine-tuned classifiers on AG News and IMDB, and the coverage of their prediction sets.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/calibration.py --starts shipped minilm --output FILE
python benchmarks/calibration.py --runs runs/IMDB-whole-0 runs/IMDB-whole-1 --output FILE   # finished runs

A model is fine-tuned by the command's defaults. The expected calibration error (ECE) is measured on the official test,
with the temperature that was fitted on dev and without it. For prediction sets the test is split into random halves,
SPLITS times: one half calibrates, and the sets of the other half are measured. Each result is kept in a file, so that a
run that was stopped continues after it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from engines import minilm
from finetune_data import load
from numpy.typing import NDArray
from parts import Parts, add_parts_option
from report import check_destination, facts

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import LabelledExample
from heedful.runs.finetune.run import finetune
from heedful.runs.results import read_predictions, read_results
from heedful.tasks.metrics import Calibration
from heedful.tasks.metrics.conformal import calibration_probabilities, least_probability

TASKS = ("AG News", "IMDB")
COVERAGES = (0.8, 0.9, 0.95, 0.99)  # shares of examples whose set has the gold label
SPLITS = 10  # random halves
STARTS: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}

Probabilities = NDArray[np.float64]  # [examples, labels]


def predictions_of(run: Path) -> tuple[list[str], Probabilities, list[str], float]:
    """Return the labels of a run, its probabilities on test, test's gold labels, and the temperature."""
    results, lines = read_results(run), list(read_predictions(run, "test"))
    labels = list(results["labels"])
    table = np.array([[line["answer"]["probabilities"][label] for label in labels] for line in lines])
    return labels, table, [line["label"] for line in lines], results.get("temperature") or 1.0


def predicted(name: str, start: str, seed: int, rows: int | None) -> tuple[list[str], Probabilities, list[str], float]:
    """Fine-tune a model, and return what `predictions_of` returns."""
    data = load(name)
    splits = {"train": data.train, "test": data.held}
    plain = {
        split: [{"text": row.text, "label": row.label} for row in examples if isinstance(row, LabelledExample)]
        for split, examples in splits.items()
    }
    if rows is not None:
        plain = {
            split: random.Random(seed).sample(split_rows, min(rows, len(split_rows)))
            for split, split_rows in plain.items()
        }
    with tempfile.TemporaryDirectory() as folder:
        # another seed than that of `load`, which leaves out IMDB's dev split
        overrides = {"train.seed": seed, "data.seed": 1, "eval_baseline": False}
        run = Path(folder) / "run"
        finetune("classify", plain, run, model=STARTS[start](), overrides=overrides)
        return predictions_of(run)


def calibration_error(labels: Sequence[str], table: Probabilities, gold: Sequence[str]) -> float:
    """Return the ECE of the most probable labels, in percent."""
    best = table.argmax(1)
    correct = [labels[index] == label for index, label in zip(best, gold, strict=True)]
    return 100 * float(Calibration().update(table.max(1).clip(max=1.0), correct).compute()["ece"])


def without_temperature(table: Probabilities, temperature: float) -> Probabilities:
    """Return the probabilities before the logits are divided by the temperature."""
    powers = np.exp(temperature * np.log(table.clip(min=1e-12)))
    uncalibrated: Probabilities = powers / powers.sum(1, keepdims=True)
    return uncalibrated


def measured_sets(labels: Sequence[str], table: Probabilities, gold: Sequence[str]) -> list[dict[str, float]]:
    """Return the coverage and the mean size of prediction sets for each of COVERAGES, as means over random halves."""
    gold_index = np.array([labels.index(label) for label in gold])
    gold_probability = table[np.arange(len(table)), gold_index]
    rows = []
    for target in COVERAGES:
        coverages, sizes = [], []
        for split in range(SPLITS):
            order = np.random.default_rng(split).permutation(len(table))
            calibrating, held = order[: len(order) // 2], order[len(order) // 2 :]
            least = least_probability(calibration_probabilities(gold_probability[calibrating]), target)
            in_set = (table[held] >= least) | (table[held] == table[held].max(1, keepdims=True))
            coverages.append(100 * float(in_set[np.arange(len(held)), gold_index[held]].mean()))
            sizes.append(float(in_set.sum(1).mean()))
        rows.append(
            {
                "asked": 100 * target,
                "coverage": round(statistics.fmean(coverages), 2),
                "std": round(statistics.stdev(coverages), 2),
                "mean size": round(statistics.fmean(sizes), 3),
            }
        )
    return rows


def measured(labels: Sequence[str], table: Probabilities, gold: Sequence[str], temperature: float) -> dict[str, Any]:
    """Return the accuracy of a model, its calibration and its prediction sets."""
    accuracy = float(np.mean([labels[i] == label for i, label in zip(table.argmax(1), gold, strict=True)]))
    return {
        "examples": len(gold),
        "accuracy": round(100 * accuracy, 2),
        "temperature": round(temperature, 3),
        "ece without temperature": round(calibration_error(labels, without_temperature(table, temperature), gold), 2),
        "ece": round(calibration_error(labels, table, gold), 2),
        "sets": measured_sets(labels, table, gold),
    }


def trained_and_measured(task: str, start: str, seed: int, rows: int | None) -> dict[str, Any]:
    """Fine-tune a model and measure it."""
    return measured(*predicted(task, start, seed, rows))


def results_of(options: argparse.Namespace, parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield the measurements of each finished run, or of each task with each seed and model."""
    for run in options.runs:
        yield {"run": run.name} | measured(*predictions_of(run))
    for seed, task, start in product(options.seeds, options.tasks, options.starts) if not options.runs else ():
        name = f"{task}, {start}, seed {seed}" + (f", {options.rows} rows" if options.rows else "")
        result = parts.result(name, partial(trained_and_measured, task, start, seed, options.rows))
        yield {"task": task, "start": start, "seed": seed} | result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each task with each seed and model; write the record again after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=["shipped"])
    parser.add_argument("--rows", type=int, help="of each split, instead of all")
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="finished runs to measure, instead of --tasks")
    parser.add_argument("--output", type=Path, required=True)
    add_parts_option(parser, "calibration")
    options = parser.parse_args(arguments)
    check_destination(options.output)
    parts = Parts(options.parts)
    record: dict[str, Any] = {"facts": facts(), "runs": []}
    for entry in results_of(options, parts):
        record["runs"].append(entry)
        record["commits"] = sorted(parts.commits)
        print(json.dumps(entry), flush=True)
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

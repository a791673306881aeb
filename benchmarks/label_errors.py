"""Measure how well `heedful check --label-errors` finds flipped labels, beside the loss of one model.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/label_errors.py --seeds 1 2 3

A share of the labels is replaced by random other labels. Both arms rank all rows; if n labels are flipped, precision is
the share of flipped labels among the first n rows. Wrong labels that the data have already count as mistakes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from finetune_data import load
from numpy.typing import NDArray
from report import RESULTS, check_destination, grid, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.runs.frozen_vectors import linear_classifier, sentence_features
from heedful.runs.label_errors import find_label_errors

TASKS = ("SST-2", "AG News")
ROWS = 5000
FLIPPED = 0.06  # share of the labels


def sampled_rows(name: str, seed: int, count: int) -> list[LabelledExample]:
    """Return random rows of SST-2's train or of AG News' test, each text once."""
    data = load(name)
    rows = [row for row in (data.held if name == "AG News" else data.train) if isinstance(row, LabelledExample)]
    distinct = list({row.text: row for row in rows}.values())
    return random.Random(f"rows {seed}").sample(distinct, min(count, len(distinct)))


def flipped_labels(labels: Sequence[str], share: float, seed: int) -> tuple[list[str], set[int]]:
    """Replace a share of the labels by random other ones; return all labels, and the indices of the replaced ones."""
    generator = random.Random(f"flips {seed}")
    classes = sorted(set(labels))
    indices = set(generator.sample(range(len(labels)), round(share * len(labels))))
    changed = [
        generator.choice([candidate for candidate in classes if candidate != label]) if index in indices else label
        for index, label in enumerate(labels)
    ]
    return changed, indices


def losses_of_one_model(engine: Engine, texts: Sequence[str], labels: Sequence[str]) -> NDArray[np.float64]:
    """Return the loss of each label by a linear model over frozen vectors, which is fitted on all of these labels."""
    features = sentence_features([(text,) for text in texts], engine)
    model = linear_classifier().fit(features, list(labels))
    columns = np.searchsorted(model.classes_, list(labels))
    losses: NDArray[np.float64] = -model.predict_log_proba(features)[np.arange(len(labels)), columns]
    return losses


def precision(ranked: Sequence[int], flipped: set[int]) -> float:
    """Return the share of flipped labels among the first n rows of a ranking; n labels are flipped."""
    return len(flipped.intersection(list(ranked)[: len(flipped)])) / len(flipped)


def measured(engine: Engine, rows: Sequence[LabelledExample], seed: int) -> dict[str, Any]:
    """Flip labels and rank the rows by both arms."""
    texts = [row.text for row in rows]
    labels, flipped = flipped_labels([row.label for row in rows], FLIPPED, seed)
    result = find_label_errors((texts, labels), model=engine, seed=seed)
    index_of_text = {text: index for index, text in enumerate(texts)}
    ranked = [index_of_text[error.text] for error in result.errors]
    order = np.argsort(-losses_of_one_model(engine, texts, labels), kind="stable").tolist()
    return {
        "rows": len(rows),
        "flipped": len(flipped),
        "listed": len(ranked),
        "precision": precision(ranked, flipped),
        "recall of the list": len(flipped.intersection(ranked)) / len(flipped),
        "precision by loss": precision(order, flipped),
        "accuracy": result.accuracy,
    }


def summary(by_seed: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the mean and the extremes of each figure over the seeds."""
    for name in by_seed[0]:
        values = [float(figures[name]) for figures in by_seed]
        yield name, {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Format the figures of all tasks as Markdown."""
    shares = ("precision", "precision by loss", "recall of the list", "accuracy")

    def percent(figure: dict[str, float]) -> str:
        return f"{100 * figure['mean']:.1f} ({100 * figure['low']:.1f}–{100 * figure['high']:.1f})"

    rows = []
    for task, figures in results.items():
        counts = [f"{figures[name]['mean']:,.0f}" for name in ("rows", "flipped")]
        rows.append([task, *counts, *(percent(figures[name]) for name in shares)])
    return grid(["data", "rows", "flipped", *(f"{name}, %" for name in shares)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each task with each seed, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    engine = Engine(BUNDLED_ENCODER)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for task in options.tasks:
        by_seed = []
        for seed in options.seeds:
            rows = sampled_rows(task, seed, options.rows)
            by_seed.append(measured(engine, rows, seed))
            print(task, seed, json.dumps(by_seed[-1]), flush=True)
        results[task] = dict(summary(by_seed))
    seeds = ", ".join(map(str, options.seeds))
    described = (
        f"`heedful check --label-errors` with {BUNDLED_ENCODER} on {options.rows:,} rows of SST-2's train (phrases) "
        f"and of AG News' official test, each text once. {FLIPPED:.0%} of the labels were replaced by another one. "
        f"Seeds {seeds}; mean and extremes. Precision: share of flipped labels among as many first rows as labels "
        "were flipped. By loss: the rows in the order of the loss of one logistic regression over the same vectors, "
        "fitted on all rows. Nothing was chosen by what is measured."
    )
    print(write("label-errors", described, [table(results)], results, options.output))


if __name__ == "__main__":
    main()

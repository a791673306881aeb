"""Measure how well `heedful check --label-errors` finds flipped labels, beside the loss of one model.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/label_errors.py --starts shipped minilm
HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/label_errors.py --starts shipped minilm --methods finetune

A share of the labels is replaced by random other labels. All arms rank the rows; if n labels are flipped, precision is
the share of flipped labels among the first n rows. Wrong labels that the data have already count as mistakes. Each
result is kept in a file, so that a run that was stopped continues after it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engines import minilm
from finetune_data import load
from numpy.typing import NDArray
from parts import Parts, add_parts_option
from report import RESULTS, check_destination, grid, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.runs.frozen_vectors import linear_classifier, sentence_features
from heedful.runs.label_errors import LabelErrorMethod, find_label_errors

TASKS = ("SST-2", "AG News")
ROWS = 5000
FLIPPED = 0.06  # share of the labels
METHODS: tuple[LabelErrorMethod, ...] = ("linear", "finetune")
STARTS: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}


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


def measured(task: str, count: int, seed: int, start: str, method: LabelErrorMethod) -> dict[str, Any]:
    """Flip labels, and rank the rows by a method and by the loss of one linear model."""
    rows, model = sampled_rows(task, seed, count), STARTS[start]()
    texts = [row.text for row in rows]
    labels, flipped = flipped_labels([row.label for row in rows], FLIPPED, seed)
    result = find_label_errors((texts, labels), model=model, method=method, seed=seed, log=print)
    index_of_text = {text: index for index, text in enumerate(texts)}
    ranked = [index_of_text[error.text] for error in result.errors]
    order = np.argsort(-losses_of_one_model(Engine(model), texts, labels), kind="stable").tolist()
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


def table(results: dict[str, dict[str, Any]]) -> str:
    """Format the figures of all arms as Markdown."""
    shares = ("precision", "precision by loss", "recall of the list", "accuracy")

    def percent(figure: dict[str, float]) -> str:
        return f"{100 * figure['mean']:.1f} ({100 * figure['low']:.1f}–{100 * figure['high']:.1f})"

    rows = []
    for arm, figures in results.items():
        counts = [f"{figures[name]['mean']:,.0f}" for name in ("rows", "flipped")]
        rows.append([arm, str(figures["draws"]), *counts, *(percent(figures[name]) for name in shares)])
    return grid(["data, model, method", "draws", "rows", "flipped", *(f"{name}, %" for name in shares)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each task with each model, method and seed; write the record again after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=["shipped"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["linear"])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    add_parts_option(parser, "label-errors")
    options = parser.parse_args(arguments)
    check_destination(options.output)
    parts = Parts(options.parts)
    by_seed: dict[str, list[dict[str, Any]]] = {}  # by data, model and method
    for method in options.methods:
        for seed in options.seeds:
            for task in options.tasks:
                for start in options.starts:
                    name = f"{task}, {start}, {method}"
                    result = parts.result(
                        f"{name}, {options.rows} rows, seed {seed}",
                        partial(measured, task, options.rows, seed, start, method),
                    )
                    by_seed.setdefault(name, []).append(result)
                    print(name, seed, json.dumps(result), flush=True)
            results = {name: {"draws": len(runs), **dict(summary(runs))} for name, runs in by_seed.items()}
            about = described(options.rows, options.seeds, parts.commits)
            path = write("label-errors", about, [table(results)], results, options.output)
    print(path)


def described(rows: int, seeds: Sequence[int], commits: Iterable[str]) -> str:
    """Return the description of the record."""
    return (
        f"`heedful check --label-errors` on {rows:,} rows of SST-2's train (phrases) and of AG News' official test, "
        f"each text once. {FLIPPED:.0%} of the labels were replaced by another one. Seeds "
        f"{', '.join(map(str, seeds))}; mean and extremes. Precision: share of flipped labels among as many first rows "
        "as labels were flipped. By loss: the rows in the order of the loss of one logistic regression over the same "
        "frozen vectors, fitted on all rows. Nothing was chosen by what is measured. Shipped: the encoder that comes "
        "with Heedful. Linear: a logistic regression over frozen vectors in five folds; finetune: the model fine-tuned "
        f"in each of them. Measured at {', '.join(sorted(commits))}."
    )


if __name__ == "__main__":
    main()

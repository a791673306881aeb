"""Measure bags of words on SST-2 (its dev), IMDB and AG News (their tests): TF-IDF and logistic regression.

HEEDFUL_DATA=folder OMP_NUM_THREADS=1 python benchmarks/words.py SST-2 IMDB "AG News"

scikit-learn fits each model twice: on the rows that a fine-tuning run gives its baseline, and on all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, Literal

from finetune_data import load
from report import RESULTS, check_destination, grid, write

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.runs.finetune.word_baseline import (
    MAX_ROWS,
    MAX_SECONDS,
    WordBaseline,
    measure_words,
    rows_of_splits,
    sample_mask,
)
from heedful.tasks.classify import Classify

TASKS = ("SST-2", "IMDB", "AG News")
Arm = Literal["as in a run", "all rows"]
ARMS: tuple[Arm, ...] = ("as in a run", "all rows")


def measured(name: str, arm: Arm, seed: int) -> dict[str, Any]:
    """Fit and score one arm: on all rows, or on those that a run would sample."""
    data = load(name)
    splits = {"train": list(data.train), "held": list(data.held)}
    counts = {split: len(examples) for split, examples in splits.items()}
    rows = counts
    if arm == "as in a run":
        sizes = {
            split: sum(len(t) for example in examples for t in example.texts) for split, examples in splits.items()
        }
        outputs = len(data.labels) if len(data.labels) > 2 else 1
        rows = rows_of_splits(counts, sizes, outputs, MAX_SECONDS)
    sampled = {
        split: list(compress(enumerate(examples), sample_mask(len(examples), rows[split], seed)))
        for split, examples in splits.items()
    }
    tokenizer = heedful.load(BUNDLED_ENCODER).tokenizer
    assert tokenizer is not None
    task = Classify(tokenizer=tokenizer, limit=None, labels=data.labels)
    words = WordBaseline(task)
    start = time.process_time()
    words.fit([example for _, example in sampled["train"]])
    fitted = time.process_time()
    result = measure_words(words, sampled["held"])
    return {
        "about": data.about,
        "accuracy": 100 * task.compute_metrics(result)["accuracy"],
        "interval": [100 * result.intervals()["accuracy"][end] for end in ("low", "high")],
        "learned from": rows["train"],
        "of": counts["train"],
        "scored on": rows["held"],
        "words": words.words,
        "fit seconds": fitted - start,
        "score seconds": time.process_time() - fitted,
    }


def table(name: str, results: dict[str, dict[str, Any]]) -> str:
    """Format the results of a data set as Markdown."""
    columns = [
        f"{name}: rows",
        "accuracy",
        "95 %",
        "learned from",
        "scored on",
        "words",
        "fitted in, CPU",
        "scored in, CPU",
    ]
    rows = [
        [
            arm,
            f"{result['accuracy']:.2f}",
            "{:.1f}–{:.1f}".format(*result["interval"]),
            f"{result['learned from']:,} of {result['of']:,}",
            f"{result['scored on']:,}",
            f"{result['words']:,}",
            f"{result['fit seconds']:.1f} s",
            f"{result['score seconds']:.1f} s",
        ]
        for arm, result in results.items()
    ]
    return grid(columns, rows)


def about(results: dict[str, dict[str, dict[str, Any]]], seed: int, note: str) -> str:
    """Describe how the tables were measured."""
    data = "; ".join(next(iter(result.values()))["about"] for result in results.values())
    return (
        f"TF-IDF and logistic regression by scikit-learn {version('scikit-learn')}, as `finetune classify` fits "
        f'them beside every model, seed {seed}. "As in a run" is limited to {MAX_ROWS:,} rows of a split and about '
        f"{MAX_SECONDS:g} s. Nothing was chosen by what is measured. Data: {data}. "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}.{' ' if note else ''}{note}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one task after another, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="a sentence for the record, on the machine's other work, say")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in options.tasks:
        results[name] = {}
        for arm in ARMS:
            results[name][arm] = measured(name, arm, options.seed)
            print(name, arm, json.dumps(results[name][arm]), flush=True)
    tables = [table(name, by_arm) for name, by_arm in results.items()]
    print(write("words", about(results, options.seed, options.note), tables, results, options.output))


if __name__ == "__main__":
    main()

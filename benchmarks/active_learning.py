"""Compare labelling the texts that `heedful select` chooses with labelling random texts, on SST-2 and AG News.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/active_learning.py --starts shipped minilm --output FILE

Both arms of a draw start with the same 20 random texts, and label 20 more from the same pool in each of five rounds.
After each round a model is trained from scratch on all labels, and scored on the same unseen rows. Each curve is kept
in a file, so that a run that was stopped continues after it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from engines import minilm
from finetune_data import load
from parts import Parts, add_parts_option
from report import check_destination, facts

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.runs.finetune.run import finetune
from heedful.runs.text_selection import select_texts

TASKS = ("SST-2", "AG News")
ARMS = ("select", "random")
COUNT, ROUNDS = 20, 5  # texts of a round, and how many rounds
POOL, HELD = 2000, 2000  # texts to choose from, and texts to score, at most
STARTS: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}


def trained(
    rows: Sequence[LabelledExample], held: Sequence[LabelledExample], model: str, method: str, folder: Path
) -> float:
    """Train in a folder, and return the accuracy on the held-out rows."""
    data = {
        split: [{"text": row.text, "label": row.label} for row in split_rows]
        for split, split_rows in (("train", rows), ("test", held))
    }
    settings = {"method": method, "eval_baseline": False, "data.dev_fraction": 0.0}
    results = finetune("classify", data, folder, model=model, overrides=settings).results
    return float(results["splits"]["test"]["numbers"]["accuracy"])


def curve(
    arm: str,
    first_texts: Sequence[str],
    pool: dict[str, LabelledExample],
    held: Sequence[LabelledExample],
    draw: int,
    model: str,
    method: str,
) -> list[float]:
    """Return the accuracy with the first texts, and after each round."""
    labelled = list(first_texts)
    generator = random.Random(f"round {draw}")
    accuracies = []
    with tempfile.TemporaryDirectory() as scratch:
        for round_index in range(ROUNDS + 1):
            run = Path(scratch, str(round_index))
            accuracies.append(trained([pool[text] for text in labelled], held, model, method, run))
            unlabelled = [text for text in pool if text not in set(labelled)]
            if arm == "random":
                labelled += generator.sample(unlabelled, COUNT)
            else:
                selection = select_texts(Engine(run), unlabelled, COUNT, seed=draw)
                labelled += [selected.text for selected in selection.texts]
    return accuracies


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean accuracies of both arms after each round, and the differences of the last ones, in points."""
    rows = []
    for task, start in dict.fromkeys((run["task"], run["start"]) for run in runs):
        of_task = [run for run in runs if (run["task"], run["start"]) == (task, start)]
        curves = {arm: [run["accuracies"] for run in of_task if run["arm"] == arm] for arm in ARMS}
        pairs = list(zip(*curves.values(), strict=False))
        last = [100 * (select[-1] - baseline[-1]) for select, baseline in pairs]
        means = {
            arm: [round(100 * statistics.fmean(column), 1) for column in zip(*arm_curves, strict=True)]
            for arm, arm_curves in curves.items()
        }
        spread = {"mean": statistics.fmean(last), "low": min(last), "high": max(last)} if last else {}
        rows.append({"task": task, "start": start, "draws": len(pairs), **means, "last difference": spread})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both arms on each draw; write the record again after each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--method", choices=("linear", "contrastive"), default="linear")
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=["shipped"])
    parser.add_argument("--output", type=Path, required=True)
    add_parts_option(parser, "active-learning")
    options = parser.parse_args(arguments)
    check_destination(options.output)
    parts = Parts(options.parts)
    record: dict[str, Any] = {"facts": facts(), "method": options.method, "runs": []}
    for draw in options.draws:
        for task in options.tasks:
            data = load(task)
            rows = {row.text: row for row in data.train if isinstance(row, LabelledExample) and row.text.strip()}
            generator = random.Random(f"{task} {draw}")
            pool = {text: rows[text] for text in generator.sample(list(rows), min(POOL, len(rows)))}
            held = [row for row in data.held if isinstance(row, LabelledExample) and row.text not in pool]
            scored = random.Random("scored").sample(held, min(HELD, len(held)))
            first_texts = generator.sample(list(pool), COUNT)
            while {pool[text].label for text in first_texts} != set(data.labels):  # a classifier needs all labels
                first_texts = generator.sample(list(pool), COUNT)
            for start, arm in product(options.starts, ARMS):
                model = STARTS[start]()
                accuracies = parts.result(
                    f"{task}, {start}, {options.method}, draw {draw}, {arm}",
                    partial(curve, arm, first_texts, pool, scored, draw, model, options.method),
                )
                run = {"task": task, "start": start, "draw": draw, "arm": arm, "accuracies": accuracies}
                record["runs"].append(run)
                print(task, start, draw, arm, *(f"{100 * accuracy:.1f}" for accuracy in accuracies), flush=True)
                record["commits"] = sorted(parts.commits)
                record["summary"] = summary(record["runs"])
                options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

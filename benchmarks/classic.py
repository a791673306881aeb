"""Classifiers from before the Transformer beside encoders: SST-2 (its dev) and IMDB (its test).

HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 IMDB --folder runs
HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 --arms bag attention --folder runs
HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 IMDB --folder runs --finished  # a record of what there is

An arm whose run is finished is only measured; one that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from finetune_data import load
from report import RESULTS, facts, grid, write

import heedful
from heedful.data import LabelledExample
from heedful.runs import timing
from heedful.runs.finetune.run import finetune
from heedful.runs.results import RESULTS as RUN_RESULTS
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer

EVERY = 500  # steps between two lines
ASKED, TURNS = 1000, 5  # texts whose answers are timed, and how often
KEPT_BACK = 0.05  # of the training texts, to choose the epoch by: what is measured was never looked at
ARMS: dict[str, tuple[str, ...]] = {
    "bag": ("init.kind=classic",),
    "attention": (
        "init.kind=classic",
        "init.reader.kind=attention",
    ),
    "BiLSTM with attention": ("init.kind=classic", "init.reader.kind=attention", "init.reader.over.kind=recurrent"),
    "structured": (
        "init.kind=classic",
        "init.reader.kind=structured",
    ),
    "hierarchical": (
        "init.kind=classic",
        "init.reader.kind=hierarchical",
    ),
    "heedful-mini-en": (),
    "MiniLM": (),
}
SAID = {("SST-2", "bag"): "80 to 83", ("IMDB", "bag"): "85.8"}  # published


def data(task: str, folder: Path) -> Path:
    """Texts and labels of three splits as files that Heedful reads: part of train, the rest of it, what is measured."""
    made = folder / f"data-{task}"
    if made.is_dir():
        return made
    given = load(task)
    rows, held = ([each for each in part if isinstance(each, LabelledExample)] for part in (given.train, given.held))
    random.Random(f"kept back of {task}").shuffle(rows)
    back = round(KEPT_BACK * len(rows))
    part = made.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    for split, examples in {"train": rows[back:], "dev": rows[:back], "test": held}.items():
        lines = [json.dumps({"text": each.text, "label": each.label}, ensure_ascii=False) for each in examples]
        (part / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    part.rename(made)
    return made


class Told(Reporter):
    """Says how it goes."""

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number % EVERY == 0:
            speed = trainer.tokens_seen / trainer.seconds
            print(
                f"step {step.number} of {trainer.total_steps}, loss {step.loss:.3f}, {speed:,.0f} tokens/s", flush=True
            )

    def message(self, text: str) -> None:
        print(text, flush=True)


def place(arm: str, task: str, folder: Path, seed: int) -> Path:
    """Of its run."""
    return folder / f"{task}-{arm.replace(' ', '-')}-{seed}"


def measured(arm: str, task: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train an arm, or go on, and measure it."""
    texts, run = data(task, folder), place(arm, task, folder, seed)
    model = str(minilm()) if arm == "MiniLM" else ""
    done = finetune(
        "classify", texts, run, model=model, assignments=(*ARMS[arm], f"train.seed={seed}"), reporter=Told()
    )
    if done.status != "completed":
        raise SystemExit(130)
    test, trained = done.results["splits"]["test"], done.results["seeds"][0]
    engine = heedful.Engine(run)
    asked = [json.loads(line)["text"] for line in (texts / "test.jsonl").open(encoding="utf-8")][:ASKED]
    with timing.gc_disabled():
        turns = [_seconds(engine, asked) for _ in range(1 + TURNS)][1:]  # the first one warms up
    return {
        "accuracy": 100 * test["numbers"]["accuracy"],
        "interval": [100 * test["intervals"]["accuracy"][end] for end in ("low", "high")],
        "learned from": done.results["data"]["splits"]["train"]["examples"],
        "parameters": done.results["model"]["parameters"],
        "bytes": sum(each.stat().st_size for each in (run / "model").glob("*.safetensors")),
        "training seconds": trained["seconds"],
        "threads": json.loads((run / "environment.json").read_bytes())["threads"],  # of the training
        "best step": trained["best_step"],
        "texts a second": len(asked) / statistics.median(turns),
    }


def _seconds(engine: heedful.Engine, asked: Sequence[str]) -> float:
    start = time.perf_counter()
    engine(asked)
    return time.perf_counter() - start


def about(found: dict[str, dict[str, dict[str, Any]]], threads: int, seed: int) -> str:
    """What the tables show."""
    arms = [arm for each in found.values() for arm in each.values()]
    learned = {name: next(iter(each.values()))["learned from"] for name, each in found.items() if each}
    texts = " and ".join(f"{count:,} texts of {name}" for name, count in learned.items())
    trained = " or ".join(map(str, sorted({arm["threads"] for arm in arms})))
    return (
        "Classifiers on SST-2's dev and IMDB's test, defaults of `heedful finetune classify` for each model, seed "
        f"{seed}. They learn from {texts} (threads: {trained}). {KEPT_BACK:.0%} of what is given choose the epoch, and "
        f"what is measured was never looked at. Texts a second: the engine's answers to {ASKED:,} of them in float32, "
        f"median of {TURNS} (threads: {threads})."
    )


def table(task: str, found: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    columns = [f"{task}: model", "accuracy", "95 %", "training", "parameters", "weights", "texts/s", "published"]
    rows = [
        [
            arm,
            f"{each['accuracy']:.2f}",
            "{:.1f}–{:.1f}".format(*each["interval"]),
            f"{each['training seconds'] / 60:.1f} min",
            f"{each['parameters']:,}",
            f"{each['bytes'] / 1e6:.1f} MB",
            f"{each['texts a second']:,.0f}",
            SAID.get((task, arm), ""),
        ]
        for arm, each in found.items()
    ]
    return grid(columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Each arm after the other; what was found so far is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=["SST-2", "IMDB"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs, so that they can go on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--finished", action="store_true", help="leave out arms whose run is not finished")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for task in given.tasks:
        found[task] = {}
        for arm in given.arms:
            if given.finished and not (place(arm, task, given.folder, given.seed) / RUN_RESULTS).exists():
                continue
            found[task][arm] = measured(arm, task, given.folder, given.seed)
            print(task, arm, json.dumps(found[task][arm]), flush=True)
            tables = [table(name, each) for name, each in found.items() if each]
            path = write(f"classic-{given.seed}", about(found, given.threads, given.seed), tables, found, given.output)
            print(path, facts()["date"], flush=True)


if __name__ == "__main__":
    main()

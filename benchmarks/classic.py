"""Measure classifiers from before the Transformer beside encoders, on the dev split of SST-2 and the test of IMDB.

HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 IMDB --folder runs
HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 --arms bag attention --folder runs
HEEDFUL_DATA=folder python benchmarks/classic.py SST-2 IMDB --folder runs --finished  # a record of what there is

An arm whose run is finished is only measured; one that was stopped resumes.
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
from report import RESULTS, check_destination, facts, grid, write

import heedful
from heedful.data import LabelledExample
from heedful.runs import timing
from heedful.runs.finetune.run import finetune
from heedful.runs.results import RESULTS as RUN_RESULTS
from heedful.train.fit import Reporter
from heedful.train.trainer import Step, Trainer

EVERY = 500  # training steps between two lines of output
TIMED, TURNS = 1000, 5  # texts whose predictions are timed, and how often
KEPT_BACK = 0.05  # share of the training texts that choose the epoch; the measured texts choose nothing
ARMS: dict[str, tuple[str, ...]] = {
    "bag": ("init.kind=classic",),
    "attention": ("init.kind=classic", "init.reader.kind=attention"),
    "BiLSTM with attention": ("init.kind=classic", "init.reader.kind=attention", "init.reader.over.kind=recurrent"),
    "structured": ("init.kind=classic", "init.reader.kind=structured"),
    "hierarchical": ("init.kind=classic", "init.reader.kind=hierarchical"),
    "heedful-mini-en": (),
    "MiniLM": (),
}
PUBLISHED = {("SST-2", "bag"): "80 to 83", ("IMDB", "bag"): "85.8"}  # accuracies, in per cent


def data(task: str, folder: Path) -> Path:
    """Write a task's splits train, dev (KEPT_BACK of its train) and test (its held-out texts); return their folder."""
    data_folder = folder / f"data-{task}"
    if data_folder.is_dir():
        return data_folder
    labelled = load(task)
    train, held = (
        [example for example in split if isinstance(example, LabelledExample)]
        for split in (labelled.train, labelled.held)
    )
    random.Random(f"kept back of {task}").shuffle(train)
    dev_count = round(KEPT_BACK * len(train))
    partial = data_folder.with_suffix(".part")
    partial.mkdir(parents=True, exist_ok=True)
    for split, examples in {"train": train[dev_count:], "dev": train[:dev_count], "test": held}.items():
        lines = [json.dumps({"text": example.text, "label": example.label}, ensure_ascii=False) for example in examples]
        (partial / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    partial.rename(data_folder)
    return data_folder


class PrintingReporter(Reporter):
    """A reporter that prints the progress of a training."""

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number % EVERY == 0:
            progress = f"step {step.number} of {trainer.total_steps}, loss {step.loss:.3f}"
            print(f"{progress}, {trainer.tokens_seen / trainer.seconds:,.0f} tokens/s", flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


def run_folder(arm: str, task: str, folder: Path, seed: int) -> Path:
    """Return the folder of an arm's run."""
    return folder / f"{task}-{arm.replace(' ', '-')}-{seed}"


def measured(arm: str, task: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train an arm, or resume its training, and measure it."""
    texts, run = data(task, folder), run_folder(arm, task, folder, seed)
    done = finetune(
        "classify",
        texts,
        run,
        model=str(minilm()) if arm == "MiniLM" else "",
        assignments=(*ARMS[arm], f"train.seed={seed}"),
        reporter=PrintingReporter(),
    )
    if done.status != "completed":
        raise SystemExit(130)
    test, trained = done.results["splits"]["test"], done.results["seeds"][0]
    engine = heedful.Engine(run)
    timed_texts = [json.loads(line)["text"] for line in (texts / "test.jsonl").open(encoding="utf-8")][:TIMED]
    with timing.gc_disabled():
        turns = [_seconds(engine, timed_texts) for _ in range(1 + TURNS)][1:]  # the first one warms up
    return {
        "accuracy": 100 * test["numbers"]["accuracy"],
        "interval": [100 * test["intervals"]["accuracy"][end] for end in ("low", "high")],
        "learned from": done.results["data"]["splits"]["train"]["examples"],
        "parameters": done.results["model"]["parameters"],
        "bytes": sum(path.stat().st_size for path in (run / "model").glob("*.safetensors")),
        "training seconds": trained["seconds"],
        "threads": json.loads((run / "environment.json").read_bytes())["threads"],  # of the training
        "best step": trained["best_step"],
        "texts a second": len(timed_texts) / statistics.median(turns),
    }


def _seconds(engine: heedful.Engine, texts: Sequence[str]) -> float:
    """Return how long the engine takes to predict the texts."""
    start = time.perf_counter()
    engine(texts)
    return time.perf_counter() - start


def about(results: dict[str, dict[str, dict[str, Any]]], threads: int, seed: int) -> str:
    """Describe how the arms were trained and measured."""
    arms = [arm for by_arm in results.values() for arm in by_arm.values()]
    learned = {name: next(iter(by_arm.values()))["learned from"] for name, by_arm in results.items() if by_arm}
    texts = " and ".join(f"{count:,} texts of {name}" for name, count in learned.items())
    trained = " or ".join(map(str, sorted({arm["threads"] for arm in arms})))
    return (
        "Classifiers on SST-2's dev and IMDB's test, defaults of `heedful finetune classify` for each model, seed "
        f"{seed}. They learn from {texts} (threads: {trained}). {KEPT_BACK:.0%} of what is given choose the epoch, and "
        f"what is measured was never looked at. Texts a second: the engine's answers to {TIMED:,} of them in float32, "
        f"median of {TURNS} (threads: {threads})."
    )


def table(task: str, results: dict[str, dict[str, Any]]) -> str:
    """Format the results of a task as Markdown."""
    columns = [f"{task}: model", "accuracy", "95 %", "training", "parameters", "weights", "texts/s", "published"]
    rows = [
        [
            arm,
            f"{result['accuracy']:.2f}",
            "{:.1f}–{:.1f}".format(*result["interval"]),
            f"{result['training seconds'] / 60:.1f} min",
            f"{result['parameters']:,}",
            f"{result['bytes'] / 1e6:.1f} MB",
            f"{result['texts a second']:,.0f}",
            PUBLISHED.get((task, arm), ""),
        ]
        for arm, result in results.items()
    ]
    return grid(columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure one arm after another; write the record again after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", choices=["SST-2", "IMDB"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs, so that runs can resume")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--finished", action="store_true", help="leave out arms whose run is not finished")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for task in options.tasks:
        results[task] = {}
        for arm in options.arms:
            if options.finished and not (run_folder(arm, task, options.folder, options.seed) / RUN_RESULTS).exists():
                continue
            results[task][arm] = measured(arm, task, options.folder, options.seed)
            print(task, arm, json.dumps(results[task][arm]), flush=True)
            tables = [table(name, by_arm) for name, by_arm in results.items() if by_arm]
            path = write(
                f"classic-{options.seed}",
                about(results, options.threads, options.seed),
                tables,
                results,
                options.output,
            )
            print(path, facts()["date"], flush=True)


if __name__ == "__main__":
    main()

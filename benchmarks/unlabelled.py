"""Does the unlabelled step pay? MiniLM trains on unlabelled reviews, then learns from 1,000 labels, or it does not.

HEEDFUL_DATA=folder python benchmarks/unlabelled.py --minutes 20 --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from report import RESULTS, check_destination, facts

from heedful.runs.finetune.run import finetune
from heedful.runs.pretrain.run import pretrain

LABELLED, MEASURED = 1000, 2000  # reviews
LONGEST = 128  # tokens of a review that are read when learning from labels, and when measured


def reviews(name: str) -> Iterator[dict[str, str]]:
    """Yield the reviews of a split."""
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "imdb", f"{name}.jsonl.xz")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def plain(text: str) -> str:
    """Without the tags of line ends."""
    return " ".join(text.replace("<br />", " ").split())


def sample(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Draw `count` labelled reviews, the same each time."""
    rows = [(plain(review["text"]), review["label"]) for review in reviews(name)]
    return random.Random(seed).sample(rows, count)


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write the rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def gone_on(folder: Path, minutes: float) -> dict[str, Any]:
    """Train MiniLM for some minutes on unlabelled reviews that are not in test; return its validation losses."""
    tested = {plain(review["text"]) for review in reviews("test")}
    texts = [text for text in (plain(review["text"]) for review in reviews("unsupervised")) if text not in tested]
    path = folder / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    done = pretrain(  # one that is there already is not made again
        [path],
        folder / "gone-on",
        model=minilm(),
        assignments=[
            f"train.time_budget={minutes}",
            "eval_every_steps=100",
            "train.batch_size=4",
            "train.optimizer.lr=1e-4",
            "corpus.dedup=exact",
        ],
    )
    journal = [json.loads(line) for line in (folder / "gone-on" / "journal.jsonl").read_text().splitlines()]
    looks = [(line["step"], line["dev"]["mlm_loss"], line["dev"]["mlm_accuracy"]) for line in journal if "dev" in line]
    return {"reviews": len(texts), "steps": done.results["steps"], "tokens": done.results["tokens"], "held_out": looks}


def main() -> None:
    """Train both arms with each seed; the labelled sample changes with the seed too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="of the labels; else Heedful's default")
    parser.add_argument(
        "--folder", type=Path, help="for the runs, so that they can resume; default: a temporary folder"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "unlabelled.json")
    options = parser.parse_args()
    check_destination(options.out)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        about = gone_on(folder, options.minutes)
        print(json.dumps(about), flush=True)
        starts: dict[str, str | Path] = {"as published": minilm(), "gone on": folder / "gone-on" / "model"}
        scores: dict[str, list[float]] = {name: [] for name in starts}
        for seed in options.seeds:
            data = folder / f"data-{seed}"
            data.mkdir(exist_ok=True)
            write(data / "test.csv", sample("test", MEASURED, seed=0))
            write(data / "train.csv", sample("train", LABELLED, seed))
            for name, start in starts.items():
                began = time.monotonic()
                wishes = [
                    f"train.seed={seed}",
                    f"max_length={LONGEST}",
                    "long_inputs=truncate",
                    "data.dev_fraction=0.0",
                ]
                wishes += [f"train.epochs={options.epochs}"] if options.epochs else []
                done = finetune("classify", data, folder / f"{name}-{seed}", model=start, assignments=wishes)
                scores[name].append(100 * done.results["splits"]["test"]["numbers"]["accuracy"])
                print(name, seed, scores[name][-1], f"{time.monotonic() - began:.0f} s", flush=True)
                facts_now = {
                    "about": about,
                    "labelled": LABELLED,
                    "measured": MEASURED,
                    "epochs": options.epochs,
                    "scores": scores,
                }
                options.out.write_text(json.dumps({"facts": facts(), **facts_now}, indent=2) + "\n")
    for name, score in scores.items():
        spread = statistics.stdev(score) if len(score) > 1 else float("nan")
        print(f"{name}: {statistics.fmean(score):.2f} (standard deviation {spread:.2f}, {len(score)} seeds)")


if __name__ == "__main__":
    main()

"""Measure the gain of pre-training on unlabelled reviews: MiniLM is fine-tuned on 1,000 labels with and without it.

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

LABELLED, MEASURED = 1000, 2000  # labelled reviews for training, and reviews for scoring
LONGEST = 128  # maximum tokens of a review in fine-tuning and scoring


def reviews(name: str) -> Iterator[dict[str, str]]:
    """Yield the reviews of a split."""
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "imdb", f"{name}.jsonl.xz")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def plain(text: str) -> str:
    """Return the text without <br /> tags and with single spaces."""
    return " ".join(text.replace("<br />", " ").split())


def sample(name: str, count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` random labelled reviews of a split, always the same for a seed."""
    rows = [(plain(review["text"]), review["label"]) for review in reviews(name)]
    return random.Random(seed).sample(rows, count)


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    """Write the rows as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def continue_pretraining(folder: Path, minutes: float) -> dict[str, Any]:
    """Train MiniLM for some minutes on unlabelled reviews that are not in test; return its validation losses."""
    test_texts = {plain(review["text"]) for review in reviews("test")}
    texts = [plain(review["text"]) for review in reviews("unsupervised")]
    texts = [text for text in texts if text not in test_texts]
    path = folder / "unlabelled.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    done = pretrain(  # a finished run is not repeated
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
    return {
        "reviews": len(texts),
        "steps": done.results["steps"],
        "tokens": done.results["tokens"],
        "held_out": [
            (line["step"], line["dev"]["mlm_loss"], line["dev"]["mlm_accuracy"]) for line in journal if "dev" in line
        ],
    }


def fine_tuned_accuracy(start: str | Path, data: Path, run: Path, seed: int, epochs: int | None) -> float:
    """Fine-tune a model and return its accuracy on test, in per cent.

    Args:
        start: The model.
        data: The folder of the data.
        run: The folder of the run.
        seed: The seed of the training.
        epochs: The number of epochs. If None, it is Heedful's default.
    """
    settings = [f"train.seed={seed}", f"max_length={LONGEST}", "long_inputs=truncate", "data.dev_fraction=0.0"]
    if epochs:
        settings.append(f"train.epochs={epochs}")
    done = finetune("classify", data, run, model=start, assignments=settings)
    return 100 * float(done.results["splits"]["test"]["numbers"]["accuracy"])


def main() -> None:
    """Fine-tune both models with each seed, which also draws the labelled sample.

    The record is written again after each run.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="epochs of fine-tuning; default: that of `heedful finetune`")
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
        about = continue_pretraining(folder, options.minutes)
        print(json.dumps(about), flush=True)
        starts: dict[str, str | Path] = {"as published": minilm(), "gone on": folder / "gone-on" / "model"}
        scores: dict[str, list[float]] = {name: [] for name in starts}
        for seed in options.seeds:
            data = folder / f"data-{seed}"
            data.mkdir(exist_ok=True)
            write(data / "test.csv", sample("test", MEASURED, seed=0))
            write(data / "train.csv", sample("train", LABELLED, seed))
            for name, start in starts.items():
                start_time = time.monotonic()
                run = folder / f"{name}-{seed}"
                scores[name].append(fine_tuned_accuracy(start, data, run, seed, options.epochs))
                print(name, seed, scores[name][-1], f"{time.monotonic() - start_time:.0f} s", flush=True)
                record = {
                    "facts": facts(),
                    "about": about,
                    "labelled": LABELLED,
                    "measured": MEASURED,
                    "epochs": options.epochs,
                    "scores": scores,
                }
                options.out.write_text(json.dumps(record, indent=2) + "\n")
    for name, accuracies in scores.items():
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else float("nan")
        mean = statistics.fmean(accuracies)
        print(f"{name}: {mean:.2f} (standard deviation {spread:.2f}, {len(accuracies)} seeds)")


if __name__ == "__main__":
    main()

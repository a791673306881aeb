"""Measure rerankers that are fine-tuned on TREC-QA: mean average precision and mean reciprocal rank on test.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/rank.py [--models minilm] [--losses listwise binary] [--seeds 3]
    [--list-size default] [--runs FOLDER]

The training split has 4,718 sentences for 94 questions; dev chooses the step by MAP. Questions without a right answer
are left out of the scores, as in trec_eval. Each number has its 95 % interval over the questions of test, for the seed
that was best on dev. Published results of 2015 and 2016 are MAP 0.73 to 0.77 and MRR 0.83 to 0.85; BM25 has 0.63 and
0.77.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines import minilm
from report import RESULTS, check_destination, grid, machine_busy, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.runs.finetune.run import finetune

LOSSES = ("listwise", "listnet", "binary", "cosent")
ALL_SENTENCES = 1000  # more than the 576 of one question of train, so that a sample has all sentences of its question
METRICS = ("map", "mrr", "ndcg@10")
COLUMNS = {"query": "qtext", "document": "atext", "relevance": "label"}


def measure(
    model: str, loss: str, seeds: int, epochs: float | None, list_size: int | None, data: Path, folder: Path
) -> dict[str, Any]:
    """Fine-tune with a loss, and return the scores on test.

    Args:
        model: Folder or name of the encoder.
        loss: One of LOSSES.
        seeds: The number of seeds.
        epochs: The number of epochs. If None, the default of `heedful finetune rank`.
        list_size: Sentences of a question in a training sample. If None, the default of `heedful finetune rank`.
        data: The folder of TREC-QA.
        folder: The folder of the run.
    """
    overrides: dict[str, object] = {"task.loss": loss, "task.metric": "map", "data.columns": COLUMNS, "seeds": seeds}
    if list_size is not None:
        overrides["task.list_size"] = list_size
    if epochs is not None:
        overrides["train.epochs"] = epochs
    start = time.perf_counter()
    files = {split: data / f"{split}.csv" for split in ("train", "dev", "test")}
    run = finetune("rank", files, folder, model=model, overrides=overrides)
    seconds = time.perf_counter() - start
    if run.status != "completed":
        raise SystemExit(f"the run with the loss {loss} was interrupted: nothing is recorded")
    results = run.results
    return {
        "loss": loss,
        "numbers": results["splits"]["test"]["numbers"],
        "intervals": results["splits"]["test"]["intervals"],
        "before training": results["baseline"]["splits"]["test"]["numbers"],
        "test map of each seed": [seed["splits"]["test"] for seed in results["seeds"]],
        "list size": list_size or "default",
        "settings": results["settings"]["train"],
        "seconds": round(seconds, 1),
    }


def percent(value: float, interval: dict[str, float]) -> str:
    """Format a share with its interval."""
    return f"{100 * value:.1f} ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the scores as Markdown."""
    lines = [
        [
            row["model"],
            row["loss"],
            str(row["list size"]),
            *(percent(row["numbers"][name], row["intervals"][name]) for name in METRICS),
            ", ".join(f"{100 * value:.1f}" for value in row["test map of each seed"]),
            f"{row['seconds']:,.0f}",
        ]
        for row in rows
    ]
    return grid(
        ["model", "loss", "list size", *(f"{name.upper()}, percent" for name in METRICS), "MAP of each seed", "s"],
        lines,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each model with each loss, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("shipped", "minilm"), default=["shipped", "minilm"])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["listwise", "binary"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float)
    parser.add_argument(
        "--list-size",
        type=lambda text: None if text == "default" else int(text),
        default=ALL_SENTENCES,
        help="sentences of a question in a training sample, or default, that of the command",
    )
    parser.add_argument("--runs", type=Path, help="folder in which the runs remain")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    makers: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
    data = Path(os.environ["HEEDFUL_DATA"]) / "tasks" / "trecqa"
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            for loss in options.losses:
                folder = (options.runs or Path(scratch)) / f"{name}-{loss}"
                arm = measure(makers[name](), loss, options.seeds, options.epochs, options.list_size, data, folder)
                rows.append({"model": name, **arm})
    others = machine_busy() - start_busy - (time.process_time() - start_own)
    share = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))
    about = (__doc__ or "").strip().split("\n\n", 2)[2]
    about += f"\n\nOther processes took {share:.0%} of the machine meanwhile; where that is much, times are too long."
    print(write("rank", about, [table(rows)], {"arms": rows}, options.output))


if __name__ == "__main__":
    main()

"""Measure fine-tuning with frozen lower layers: all-MiniLM-L6-v2 on SST-2, beside the training of all layers.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/freezing.py [--layers 3] [--epochs 3] [--seeds 1]

Both arms have the same settings and the same number of epochs, and the default precision. Seconds are those of the
whole run, with the pass that computes the outputs of the frozen layers, evaluations, checkpoints and plots. Accuracy is
that of the best evaluation on dev, with its 95 % interval over the 872 sentences for the best seed. The arms run one
after the other, all layers first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import minilm
from report import RESULTS, check_destination, grid, machine_busy, write

from heedful.runs.finetune.run import finetune


def measure(frozen: int, epochs: int, seeds: int, data: Path, max_steps: int | None) -> dict[str, Any]:
    """Fine-tune with `frozen` frozen layers, and return the seconds of the run and the accuracy on dev of each seed.

    Args:
        max_steps: Steps instead of epochs, for a rehearsal.
    """
    overrides: dict[str, object] = {"train.freeze_layers": frozen, "seeds": seeds, "eval_baseline": False}
    overrides |= {"train.epochs": epochs} if max_steps is None else {"train.max_steps": max_steps}
    files = {split: data / f"{split}.tsv" for split in ("train", "dev")}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        run = finetune("classify", files, Path(scratch) / "run", model=minilm(), overrides=overrides)
    if run.status != "completed":
        raise SystemExit(f"the run with {frozen} frozen layers was interrupted: nothing is recorded")
    seconds = time.perf_counter() - start
    results = run.results
    dev = results["splits"]["dev"]
    return {
        "frozen layers": frozen,
        "seconds": seconds,
        "training seconds": [seed["seconds"] for seed in results["seeds"]],
        "accuracies": [seed["splits"]["dev"] for seed in results["seeds"]],
        "interval": dev["intervals"]["accuracy"],
        "settings": results["settings"]["train"],
    }


def table(arms: Sequence[dict[str, Any]]) -> str:
    """Format the arms as Markdown; the ratio of seconds is to the first arm."""
    rows = []
    for arm in arms:
        low, high = arm["interval"]["low"], arm["interval"]["high"]
        accuracy = f"{100 * statistics.fmean(arm['accuracies']):.2f} ({100 * low:.2f} to {100 * high:.2f})"
        ratio = arms[0]["seconds"] / arm["seconds"]
        rows.append([str(arm["frozen layers"]), accuracy, f"{arm['seconds']:,.0f}", f"{ratio:.2f}"])
    return grid(["frozen layers", "accuracy on dev, percent", "seconds", "times as fast"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both arms, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3, help="frozen layers of the second arm")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="a rehearsal: training steps instead of epochs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    start, start_busy, start_own = time.perf_counter(), machine_busy(), time.process_time()
    data = Path(os.environ["HEEDFUL_DATA"]) / "tasks" / "glue" / "SST-2"
    arms = []
    for frozen in (0, options.layers):
        arms.append(measure(frozen, options.epochs, options.seeds, data, options.max_steps))
        print(arms[-1], flush=True)
    others = machine_busy() - start_busy - (time.process_time() - start_own)
    share = max(0.0, others / (time.perf_counter() - start) / (os.cpu_count() or 1))
    about = (__doc__ or "").strip().split("\n\n", 2)[2]
    about += f"\n\nOther processes took {share:.0%} of the machine meanwhile."
    print(write("freezing", about, [table(arms)], {"arms": arms}, options.output))


if __name__ == "__main__":
    main()

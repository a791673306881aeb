"""Measure fine-tuning with frozen lower layers: all-MiniLM-L6-v2 on SST-2, beside the training of all layers.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/freezing.py [--layers 3] [--epochs 3] [--seeds 1]

Both arms have the same settings and the same number of epochs, and the default precision. For each seed, the target is
the best accuracy on dev of the arm that trains all layers. Seconds are counted from the start of the run to the end of
the first evaluation on dev that reaches the target; they include the pass that computes the outputs of the frozen
layers, earlier evaluations and checkpoints. If the arm with frozen layers does not reach the target, the table has the
gap between the best accuracies instead of a ratio. The arms of a seed run one after the other, all layers first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engines import minilm
from parts import Parts, add_parts_option
from report import RESULTS, check_destination, grid, machine_busy, write

from heedful.runs.finetune.run import finetune
from heedful.train.fit import EvalResult, Reporter

Evaluations = Sequence[Sequence[float]]  # (seconds since the start of the run, accuracy on dev), in order


class Clock(Reporter):
    """Records when each evaluation on dev ended, and its accuracy."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.evaluations: list[tuple[float, float]] = []

    def evaluated(self, step: int, result: EvalResult, best: bool) -> None:
        """Record the time and the accuracy of an evaluation."""
        self.evaluations.append((time.perf_counter() - self.start, float(result.metrics["accuracy"])))

    def message(self, text: str) -> None:
        """Print a message of the run."""
        print(text, flush=True)


def measure(frozen: int, epochs: int, seed: int, data: Path, max_steps: int | None) -> dict[str, Any]:
    """Fine-tune with `frozen` frozen layers, and return the evaluations on dev with their times.

    Args:
        max_steps: Steps instead of epochs, for a rehearsal.
    """
    overrides: dict[str, object] = {"train.freeze_layers": frozen, "train.seed": seed, "eval_baseline": False}
    overrides |= {"train.epochs": epochs} if max_steps is None else {"train.max_steps": max_steps}
    files = {split: data / f"{split}.tsv" for split in ("train", "dev")}
    start_busy, start_own = machine_busy(), time.process_time()
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        run = finetune("classify", files, Path(scratch) / "run", model=minilm(), overrides=overrides, reporter=clock)
    if run.status != "completed":
        raise SystemExit(f"the run with {frozen} frozen layers was interrupted: nothing is recorded")
    seconds = time.perf_counter() - clock.start
    others = machine_busy() - start_busy - (time.process_time() - start_own)
    return {
        "frozen layers": frozen,
        "seed": seed,
        "seconds": seconds,
        "evaluations": clock.evaluations,
        "interval": run.results["splits"]["dev"]["intervals"]["accuracy"],
        "settings": run.results["settings"]["train"],
        "others": max(0.0, others / seconds / (os.cpu_count() or 1)),  # share of the machine that other processes took
    }


def seconds_to(target: float, evaluations: Evaluations) -> float | None:
    """Return the seconds until the first evaluation with at least this accuracy, or None if no evaluation has it."""
    return next((seconds for seconds, accuracy in evaluations if accuracy >= target), None)


def compare(every: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
    """Compare the arms of a seed with all layers and with frozen ones.

    Returns:
        Among others "ratio", the seconds to the target of the first arm divided by those of the second (None if it
        does not reach the target), and "gap", the best accuracy of the first arm minus that of the second.
    """
    best_every, best_frozen = (max(accuracy for _, accuracy in arm["evaluations"]) for arm in (every, frozen))
    seconds, frozen_seconds = (seconds_to(best_every, arm["evaluations"]) for arm in (every, frozen))
    assert seconds is not None, "the arm reaches its own best accuracy"
    return {
        "seed": every["seed"],
        "target": best_every,
        "seconds": seconds,
        "frozen seconds": frozen_seconds,
        "ratio": None if frozen_seconds is None else seconds / frozen_seconds,
        "gap": best_every - best_frozen,
        "interval": frozen["interval"],
        "whole runs": [every["seconds"], frozen["seconds"]],
    }


def table(compared: Sequence[dict[str, Any]]) -> str:
    """Format a row for each seed as Markdown."""
    rows = []
    for seed in compared:
        ratio, frozen_seconds = seed["ratio"], seed["frozen seconds"]
        low, high = seed["interval"]["low"], seed["interval"]["high"]
        rows.append(
            [
                str(seed["seed"]),
                f"{100 * seed['target']:.2f}",
                f"{100 * (seed['target'] - seed['gap']):.2f} ({100 * low:.2f} to {100 * high:.2f})",
                f"{seed['seconds']:,.0f}",
                "not reached" if frozen_seconds is None else f"{frozen_seconds:,.0f}",
                f"gap {100 * seed['gap']:.2f}" if ratio is None else f"{ratio:.2f}",
                " / ".join(f"{seconds:,.0f}" for seconds in seed["whole runs"]),
            ]
        )
    columns = ["seed", "best on dev, all layers", "best on dev, frozen (95 %)", "seconds to it, all layers"]
    return grid([*columns, "seconds, frozen", "times as fast", "whole runs, seconds"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both arms with each seed; write the record again after each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3, help="frozen layers of the second arm")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--max-steps", type=int, help="a rehearsal: training steps instead of epochs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    add_parts_option(parser, "freezing")
    options = parser.parse_args(arguments)
    check_destination(options.output)
    parts = Parts(options.parts)
    data = Path(os.environ["HEEDFUL_DATA"]) / "tasks" / "glue" / "SST-2"
    length = f"{options.epochs} epochs" if options.max_steps is None else f"{options.max_steps} steps"
    arms: list[dict[str, Any]] = []
    for seed in options.seeds:
        for frozen in (0, options.layers):
            work = partial(measure, frozen, options.epochs, seed, data, options.max_steps)
            arms.append(parts.result(f"{frozen} frozen layers, {length}, seed {seed}", work))
            print(arms[-1], flush=True)
        compared = [compare(every, frozen) for every, frozen in zip(arms[::2], arms[1::2], strict=True)]
        about = (__doc__ or "").strip().split("\n\n", 2)[2]
        others = statistics.fmean(arm["others"] for arm in arms)
        about += f"\n\nOther processes took {others:.0%} of the machine meanwhile. Measured at "
        about += f"{', '.join(sorted(parts.commits))}."
        path = write("freezing", about, [table(compared)], {"seeds": compared, "arms": arms}, options.output)
    print(path)


if __name__ == "__main__":
    main()

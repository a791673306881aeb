"""Recurrent cells of our own beside PyTorch's: a training step of a net that reads in both directions.

All in one process, in turns; LSTM and GRU, short and long texts, float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import taken
from lengths import draw
from report import RESULTS, Spread, check_destination, grid, write
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heedful.model.classic import time_major_order
from heedful.nn.recurrence import run_cells

ABOUT = """{rounds} rounds, both ways in turn, in one process with {threads} threads; milliseconds of the sum of all
rows and its gradients, median (min-max); tokens a second are real ones. Both take the same rows, time by time: torch.nn
as a PackedSequence. Rows and gradients agree within {near:.0e} before timing."""
GIVEN, NEAR = 96, 1e-4  # the width of the words' rows
CELLS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
CASES = {"32 short texts": ("sst2", 32), "32 texts of about 150 tokens": ("mean150", 32)}
WIDTHS = (128, 300)


def step(run: Callable[[Tensor], Tensor], x: Tensor, learned: list[nn.Parameter]) -> list[Tensor]:
    """Rows, and gradients of what is learned."""
    rows = run(x)
    return [rows.detach(), *torch.autograd.grad(rows.sum(), learned)]


def line(name: str, case: str, width: int, rounds: int) -> dict[str, Any]:
    """One net and its texts, both ways."""
    lengths = draw(*CASES[case])
    counts = torch.from_numpy(time_major_order((0, *accumulate(lengths)))[1])
    cells = CELLS[name](GIVEN, width, bidirectional=True)
    x, learned = torch.randn(sum(lengths), GIVEN), list(cells.parameters())
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "PyTorch": lambda rows: cells(PackedSequence(rows, counts))[0].data,
        "ours": lambda rows: run_cells(cells, rows, counts.tolist()),
    }
    reference, results = (step(run, x, learned) for run in ways.values())
    for expected, actual in zip(reference, results, strict=True):
        assert float((expected - actual).abs().max()) <= NEAR * float(expected.abs().max()), name
    times = taken({way: lambda run=run: step(run, x, learned) for way, run in ways.items()}, rounds)  # type: ignore[misc]
    return {
        "texts": case,
        "cells": name,
        "width": width,
        "tokens": sum(lengths),
        "milliseconds": {way: Spread.of(durations) for way, durations in times.items()},
        "times as fast": Spread.of([a / b for a, b in zip(times["PyTorch"], times["ours"], strict=True)]),
        "tokens a second": sum(lengths) / median(times["ours"]) * 1e3,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    rounds = 3 if options.quick else options.rounds
    lines = [line(name, case, width, rounds) for case in CASES for name in CELLS for width in WIDTHS]
    columns = ["texts", "cells", "width", "PyTorch, ms", "ours, ms", "times as fast", "tokens/s"]
    rows = [
        [
            measured["texts"],
            measured["cells"],
            str(measured["width"]),
            *(measured["milliseconds"][way].text(1) for way in ("PyTorch", "ours")),
            measured["times as fast"].text(),
            f"{measured['tokens a second']:,.0f}",
        ]
        for measured in lines
    ]
    print(grid(columns, rows))
    if not options.quick:
        plain = [
            measured
            | {
                "milliseconds": {way: asdict(spread) for way, spread in measured["milliseconds"].items()},
                "times as fast": asdict(measured["times as fast"]),
            }
            for measured in lines
        ]
        about = ABOUT.format(rounds=rounds, threads=options.threads, near=NEAR)
        print(write("recurrent", about, [grid(columns, rows)], plain, options.output))


if __name__ == "__main__":
    main()

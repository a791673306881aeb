"""Measure a training step of bidirectional LSTMs and GRUs, by Heedful's recurrent cells and by PyTorch's.

Both run in turn in one process, in float32, on short and on long texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels import Ways, time_in_turns
from lengths import draw
from report import RESULTS, Spread, check_destination, grid, write
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from heedful.model.classic import time_major_order
from heedful.nn.recurrence import run_cells

ABOUT = """{rounds} rounds, both ways in turn, in one process with {threads} threads; milliseconds of the forward pass
and of the gradients of the weights, median (min-max); tokens a second are those of Heedful's cells. Both read the rows
time step by time step: torch.nn as a PackedSequence. Rows and gradients agree within {near:.0e} before timing."""
INPUT_SIZE = 96  # size of a word vector
NEAR = 1e-4  # largest difference between both ways, over the largest value
CELLS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
# name of a distribution of lengths.py, and number of texts
CASES = {"32 short texts": ("sst2", 32), "32 texts of about 150 tokens": ("mean150", 32)}
WIDTHS = (128, 300)  # hidden sizes


def step(run: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the hidden states, and gradients of their sum for the parameters (x gets none)."""
    states = run(x)
    return [states.detach(), *torch.autograd.grad(states.sum(), parameters)]


def measure(name: str, case: str, width: int, rounds: int) -> dict[str, Any]:
    """Check that both ways agree, and time them, for one kind of cells, hidden size and case."""
    lengths = draw(*CASES[case])
    _, batch_sizes = time_major_order((0, *accumulate(lengths)))
    torch.manual_seed(0)
    cells = CELLS[name](INPUT_SIZE, width, bidirectional=True)
    parameters = list(cells.parameters())
    x = torch.randn(sum(lengths), INPUT_SIZE)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "PyTorch": lambda x: cells(PackedSequence(x, torch.from_numpy(batch_sizes)))[0].data,
        "ours": lambda x: run_cells(cells, x, batch_sizes.tolist()),
    }
    reference, results = (step(run, x, parameters) for run in ways.values())
    for expected, actual in zip(reference, results, strict=True):
        assert float((expected - actual).abs().max()) <= NEAR * float(expected.abs().max()), (name, case, width)
    steps: Ways = {way: partial(step, run, x, parameters) for way, run in ways.items()}
    times = time_in_turns(steps, rounds)
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
    """Measure all cases, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    rounds = 3 if options.quick else options.rounds
    measurements = [measure(name, case, width, rounds) for case in CASES for name in CELLS for width in WIDTHS]
    columns = ["texts", "cells", "width", "PyTorch, ms", "ours, ms", "times as fast", "ours, tokens/s"]
    rows = [
        [
            measured["texts"],
            measured["cells"],
            str(measured["width"]),
            *(measured["milliseconds"][way].text(1) for way in ("PyTorch", "ours")),
            measured["times as fast"].text(),
            f"{measured['tokens a second']:,.0f}",
        ]
        for measured in measurements
    ]
    print(grid(columns, rows))
    if not options.quick:
        records = [
            measured
            | {
                "milliseconds": {way: asdict(spread) for way, spread in measured["milliseconds"].items()},
                "times as fast": asdict(measured["times as fast"]),
            }
            for measured in measurements
        ]
        about = ABOUT.format(rounds=rounds, threads=options.threads, near=NEAR)
        print(write("recurrent", about, [grid(columns, rows)], records, options.output))


if __name__ == "__main__":
    main()

"""Measure which attention kernel, line widths and budget are fastest: all settings in turn, in one process.

The settings and their inputs are in attention_arms.py.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median

import torch
from attention_arms import BUDGET, HEADS, MODES, Case, make_batches, runner, settings
from lengths import DISTRIBUTIONS
from report import RESULTS, Spread, check_destination, grid, write

from heedful.nn.attend import REFERENCE
from heedful.nn.layout import AttentionArgs, Layout

ABOUT = """Attention alone: {rounds} rounds of every setting, in rotating order, in one process with {threads} threads.
A round is about {tokens:,} real tokens in batches of up to {budget}, filled longest first as heedful.Engine does
(forward) or in arrival order as in training (forward+backward). `ms` is a round with plans made before, median
(min–max); `plan ms` is what making them costs, once for all layers of a model. Before timing, results and gradients
are compared with the float32 reference's (bounds over the scale: {bounds}). A plain name is the kernel table's; `64/128
256k` is best-fit lines of these widths and at most 256k scores a head in a block. The score is the fastest setting's
time over this one's."""
TOKENS = 12_288  # of a round
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The measurements of a setting in one case; a record's JSON has these names."""

    setting: str
    milliseconds: Spread  # of a round
    plan: float  # milliseconds to make the plans
    score: float  # the fastest setting's time over this one's


def measure(case: Case, rounds: int, tokens: int) -> list[Line]:
    """Check and time all settings that support a case; return their lines, fastest first."""
    batches = make_batches(case, tokens)
    q = batches[0][0][:, 0]
    args = AttentionArgs(layout=Layout.of(batches[0][2]), scale=1.0)
    kernels = [kernel for kernel in settings() if not kernel.cannot(q, q, q, args)]
    references = runner(REFERENCE, make_batches(case._replace(precision="float32"), tokens))[0]()
    runs, plans = {}, {}
    for kernel in kernels:
        for _ in range(2):  # the first time warms up, too
            runs[kernel.name], layouts = runner(kernel, batches)
            for output, reference in zip(runs[kernel.name](), references, strict=True):
                error = float((output.float() - reference).abs().max() / reference.abs().max())
                assert error <= BOUNDS[case.precision], f"{kernel.name} is off by {error:.1e} of the scale in {case}"
            plans[kernel.name] = 1000 * sum(sum(layout.spent) for layout in layouts)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(rounds):
        first = round_index * len(kernels) // rounds
        for name in [*runs][first:] + [*runs][:first]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    best = min(map(median, times.values()))
    lines = [
        Line(setting=name, milliseconds=Spread.of(durations), plan=plans[name], score=best / median(durations))
        for name, durations in times.items()
    ]
    return sorted(lines, key=lambda line: -line.score)


def summary(results: dict[Case, list[Line]]) -> str:
    """Format the scores of all settings, averaged geometrically over distributions and heads, as Markdown."""
    scores: dict[str, dict[str, list[float]]] = {}
    for case, lines in results.items():
        for line in lines:
            scores.setdefault(line.setting, {}).setdefault(f"{case.mode} {case.precision}", []).append(line.score)
    columns = list(next(iter(scores.values())))
    means = {
        name: [geometric_mean(ratios[column]) if column in ratios else 0.0 for column in columns]
        for name, ratios in scores.items()
    }
    rows = [[name, *(f"{score:.2f}" for score in setting_means)] for name, setting_means in means.items()]
    return "## Scores\n\n" + grid(["setting", *columns], sorted(rows, key=lambda row: -sum(means[row[0]])))


def details(case: Case, lines: list[Line]) -> str:
    """Format the lines of one case as Markdown."""
    rows = [[line.setting, line.milliseconds.text(1), f"{line.plan:.1f}", f"{line.score:.2f}"] for line in lines]
    return f"## {', '.join(case)}\n\n" + grid(["setting", "ms", "plan ms", "score"], rows)


def main() -> None:
    """Measure all cases, print their tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="at least 7, but for --quick")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--precisions", nargs="+", choices=list(BOUNDS), default=list(BOUNDS))
    parser.add_argument("--quick", action="store_true", help="rehearse on a few hundred tokens, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    options = parser.parse_args()
    if options.rounds < 1 or (options.rounds < 7 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 7")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    tokens = 256 if options.quick else TOKENS
    results = {}
    for case in map(Case._make, product(options.modes, options.precisions, HEADS, DISTRIBUTIONS)):
        results[case] = measure(case, options.rounds, tokens)
        print(details(case, results[case]), flush=True)
    print(summary(results))
    if options.output or not options.quick:
        threads, bounds = torch.get_num_threads(), ", ".join(f"{bound} in {name}" for name, bound in BOUNDS.items())
        about = ABOUT.format(rounds=options.rounds, threads=threads, tokens=tokens, budget=BUDGET, bounds=bounds)
        texts = [summary(results), *(details(*item) for item in results.items())]
        data = [case._asdict() | {"lines": [asdict(line) for line in lines]} for case, lines in results.items()]
        print(write("attention", about, texts, data, options.output or RESULTS))


if __name__ == "__main__":
    main()

"""Time and memory of four kinds of layers over length n and width d, beside what the table of complexities says.

    self-attention, written out    n^2 d      all n x n weights are made
    self-attention, the kernel     n^2 d      the same from the fast kernel, which keeps none of them
    recurrent                      n d^2      a GRU in both directions, one step after another
    convolution, kernel k          k n d^2
    restricted, radius r           r n d      each row looks at 2 r + 1 rows

(Vaswani et al. 2017, table 1.) Projections, which cost n d^2 in every layer of a Transformer, are in none of them. An
exponent is the slope of log time over log size, by least squares; memory is what the forward pass keeps for the
backward one, its input too, parameters left out: n d numbers, and the weights n^2 where they are written out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from heedful.model.classic import make_over
from heedful.model.classic_config import Recurrent
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.local_attention import restricted
from heedful.runs.statistics import ENOUGH, mean_and_std, seed_count
from heedful.study import charts
from heedful.study.layers import Convolution, unfused_self_attention
from heedful.study.runner import Measure, StudyConfig, StudyResult

KERNEL, RADIUS = 3, 16
WRITTEN, KERNELS, RECURRENT, CONVOLUTION, RESTRICTED = (
    "self-attention, written out", "self-attention, the kernel", "recurrent", "convolution", "restricted",
)  # fmt: skip
NEAR = 0.2  # of theory
NAMES = ("time over n", "time over d", "memory over n", "memory over d")
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Theory:
    """Exponents, in the order of NAMES."""

    exponents: tuple[float, float, float, float]
    lengths: tuple[int, ...]  # the measured range of n
    widths: tuple[int, ...]
    at: tuple[int, int]  # d while n changes, n while d changes


WIDE, LONG = (64, 128, 256, 512), (512, 1024, 2048)
THEORY = {  # written out, n^2 weights outweigh n d numbers where n is above d
    WRITTEN: Theory(exponents=(2, 1, 2, 0), lengths=LONG, widths=WIDE, at=(128, 1024)),
    KERNELS: Theory(exponents=(2, 1, 1, 1), lengths=LONG, widths=WIDE, at=(128, 1024)),
    RECURRENT: Theory(exponents=(1, 2, 1, 1), lengths=(64, 128, 256, 512), widths=(128, 256, 512, 1024), at=(128, 32)),
    CONVOLUTION: Theory(
        exponents=(1, 2, 1, 1), lengths=(256, 512, 1024, 2048), widths=(128, 256, 512, 1024), at=(256, 256)
    ),
    RESTRICTED: Theory(
        exponents=(1, 1, 1, 1), lengths=(512, 1024, 2048, 4096), widths=(128, 256, 512, 1024), at=(128, 512)
    ),
}
QUICK = {arm: replace(each, lengths=(16, 32), widths=(16, 32), at=(16, 16)) for arm, each in THEORY.items()}
SOFTMAX = "the softmax makes n^2 exponentials whatever d is, which small widths feel most"
BELOW = {  # why time may grow more slowly with the width than in theory; nothing is said of what is not listed
    WRITTEN: SOFTMAX,
    KERNELS: SOFTMAX,
    RECURRENT: "each step has a cost of its own that no width lowers, and d^2 shows only once its products outgrow it",
    CONVOLUTION: "a product of small matrices does not fill the processor, whose speed grows with d until it does",
}
UNKNOWN = "no reason is known here; measure again on a machine that does nothing else"


def make_layer(arm: str, width: int, length: int) -> tuple[Run, nn.Module | None]:
    """One layer over one sequence, and its parameters."""
    layout, scale = Layout.of((0, length)), width**-0.5
    match arm:
        case "self-attention, written out":
            return unfused_self_attention, None
        case "self-attention, the kernel":
            return partial(_kernel, layout, scale), None
        case "recurrent":
            over = make_over(Recurrent(cell="gru", width=width), width)
            assert over is not None
            return lambda x: over(x, (0, length)), over
        case "convolution":
            inner = Convolution(width, KERNEL)
            return lambda x: inner(x, (0, length)), inner
    return partial(_restricted, layout, scale), None


def _kernel(layout: Layout, scale: float, x: Tensor) -> Tensor:
    rows = x[:, None]
    return attend(rows, rows, rows, layout, scale=scale)


def _restricted(layout: Layout, scale: float, x: Tensor) -> Tensor:
    rows = x[:, None]
    return restricted(rows, rows, rows, layout, radius=RADIUS, scale=scale)


def cpu_seconds(run: Run, x: Tensor, least: float) -> float:
    """Of the processor, for a forward and a backward pass: the least of at least three and of so many seconds."""
    found: list[float] = []
    run(x).sum().backward()
    while len(found) < 3 or sum(found) < least:
        began = time.process_time()  # so that what others take of the machine does not count
        run(x).sum().backward()
        found.append(time.process_time() - began)
    return max(min(found), 1e-9)


@contextmanager
def one_thread() -> Iterator[None]:
    """The processor's time is that of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def saved_bytes(run: Run, x: Tensor, inner: nn.Module | None) -> int:
    """Bytes that the forward pass keeps for the backward one; each storage counts once."""
    known = {each.untyped_storage().data_ptr() for each in (inner.parameters() if inner else ())}
    found: dict[int, int] = {}
    held: list[Any] = []  # so that no storage is given away and counted for another

    def take(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held.append(storage)
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(take, lambda tensor: tensor):
        run(x)
    return sum(found.values())


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """b of y = a x^b, by least squares of log y over log x.

    >>> round(exponent([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    across, up = ([log(point[axis]) for point in points] for axis in (0, 1))
    x, y = fmean(across), fmean(up)
    return sum((a - x) * (b - y) for a, b in zip(across, up, strict=True)) / sum((a - x) ** 2 for a in across)


def run(plan: StudyConfig) -> StudyResult:
    """A seed is a round: all sizes of all layers once more."""
    with one_thread():
        return _measured(plan)


def _measured(plan: StudyConfig) -> StudyResult:
    least = plan.by_scale(0.15, 0.0)
    theories = plan.by_scale(THEORY, QUICK)
    found: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in THEORY} for name in NAMES}
    points: dict[str, dict[str, dict[int, list[float]]]] = {name: {arm: {} for arm in THEORY} for name in NAMES}
    for seed in plan.seeds:
        generator = torch.Generator().manual_seed(seed)
        for arm, theory in theories.items():
            width, length = theory.at
            sizes = [("over n", n, n, width) for n in theory.lengths]
            sizes += [("over d", d, length, d) for d in theory.widths]
            for across, size, n, d in sizes:
                inner_run, inner = make_layer(arm, d, n)
                x = torch.randn(n, d, generator=generator).requires_grad_()
                points[f"time {across}"][arm].setdefault(size, []).append(cpu_seconds(inner_run, x, least))
                points[f"memory {across}"][arm].setdefault(size, []).append(float(saved_bytes(inner_run, x, inner)))
            for name in NAMES:
                latest = [(float(size), values[-1]) for size, values in points[name][arm].items()]
                found[name][arm].append(exponent(latest))
            plan.log(f"round {seed}, {arm}: " + ", ".join(f"{name} {found[name][arm][-1]:.2f}" for name in NAMES))
    measures = tuple(
        Measure(name=name, values={arm: tuple(values) for arm, values in found[name].items()}, unit="number")
        for name in NAMES
    )
    return _told(plan, theories, measures, points)


def _told(
    plan: StudyConfig,
    theories: Mapping[str, Theory],
    measures: tuple[Measure, ...],
    points: dict[str, dict[str, dict[int, list[float]]]],
) -> StudyResult:
    rows = []
    for arm, theory in theories.items():
        both = zip(measures, theory.exponents, strict=True)
        rows.append((arm, *(f"{mean_and_std(each.values[arm], 'number')} ({expected:g})" for each, expected in both)))
    head = ("layer", *(f"{measure.name} (theory)" for measure in measures))
    panels = [
        charts.Panel(
            x_label="length n" if name.endswith("n") else "width d",
            y_label="MB kept" if name.startswith("memory") else "milliseconds",
            logarithmic=True,
            lines=tuple(_line(name, arm, points[name][arm]) for arm in THEORY),
        )
        for name in NAMES
    ]
    about = (
        f"A forward and a backward pass of one layer over one sequence: the least processor time of at least three, "
        f"float32, one thread; convolution with kernel {KERNEL}, restricted attention with "
        f"radius {RADIUS}. Exponents of least squares, mean ± standard deviation over {seed_count(len(plan.seeds))}. "
        + "; ".join(
            f"{arm}: n {_range(each.lengths)} at d = {each.at[0]}, d {_range(each.widths)} at n = {each.at[1]}"
            for arm, each in theories.items()
        )
        + "."
    )
    figure = charts.line_plot(
        panels,
        "Four kinds of layers as length and width grow",
        "both axes logarithmic; the pale band has theory's slope",
    )
    facts = {
        "points": {name: {arm: _plain(values) for arm, values in each.items()} for name, each in points.items()},
        "theory": {arm: list(each.exponents) for arm, each in THEORY.items()},
    }
    return StudyResult(
        measures=measures, verdicts=_verdicts(plan, measures), figure=figure, about=about, facts=facts, columns=head,
        rows=tuple(rows),
    )  # fmt: skip


def _verdicts(plan: StudyConfig, measures: tuple[Measure, ...]) -> tuple[str, ...]:
    """Which exponents are not those of theory."""
    if plan.scale == "quick":
        return ("the quick form's sizes are too small for a verdict",)
    if len(plan.seeds) < ENOUGH:
        return (f"{seed_count(len(plan.seeds))}, too few for a verdict: give {ENOUGH} or more",)
    verdicts = []
    for arm, theory in THEORY.items():
        far = []
        for measure, expected in zip(measures, theory.exponents, strict=True):
            mean = fmean(measure.values[arm])
            if abs(mean - expected) > NEAR:
                known = measure.name == "time over d" and mean < expected and arm in BELOW
                why = f"likely because {BELOW[arm]}" if known else UNKNOWN
                far.append(f"{measure.name} {mean:.2f} where theory says {expected:g}: {why}")
        told = "; ".join(far) or f"all exponents within {NEAR} of theory over the measured range"
        verdicts.append(f"{arm}: {told}")
    return tuple(verdicts)


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}"


def _plain(values: dict[int, list[float]]) -> dict[str, float]:
    return {str(size): min(several) for size, several in values.items()}


def _line(name: str, arm: str, values: dict[int, list[float]]) -> charts.Line:
    slope = THEORY[arm].exponents[NAMES.index(name)]
    scale = 1e-6 if name.startswith("memory") else 1e3
    return charts.Line(
        name=arm, points=tuple((float(size), scale * min(several)) for size, several in values.items()), slope=slope
    )

"""Time and memory of four kinds of layers against length n and width d, compared with their theoretical complexity.

    self-attention, written out    n^2 d      all n x n weights are in memory
    self-attention, the kernel     n^2 d      a fused kernel, which stores no weights
    recurrent                      n d^2      a bidirectional GRU
    convolution, kernel k          k n d^2
    restricted, radius r           r n d      each row attends to 2 r + 1 rows

(Vaswani et al. 2017, table 1.) Projections, which cost n d^2 in every layer of a Transformer, are not included. An
exponent is the slope of log time against log size, by least squares. Memory is what the forward pass saves for the
backward pass, with the input, without parameters: n d numbers, and n^2 weights if they are written out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import log
from statistics import fmean

import torch
from torch import Tensor, nn

from heedful.model.classic import make_contextualizer
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
TOLERANCE = 0.2  # difference of an exponent from theory
NAMES = ("time over n", "time over d", "memory over n", "memory over d")
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Theory:
    """Theoretical exponents of a layer, and the sizes to measure."""

    exponents: tuple[float, float, float, float]  # in the order of NAMES
    lengths: tuple[int, ...]  # values of n
    widths: tuple[int, ...]  # values of d
    fixed: tuple[int, int]  # d while n varies, n while d varies


WIDE, LONG = (64, 128, 256, 512), (512, 1024, 2048)
THEORY = {  # if written out, n^2 weights dominate n d numbers for n > d
    WRITTEN: Theory(exponents=(2, 1, 2, 0), lengths=LONG, widths=WIDE, fixed=(128, 1024)),
    KERNELS: Theory(exponents=(2, 1, 1, 1), lengths=LONG, widths=WIDE, fixed=(128, 1024)),
    RECURRENT: Theory(
        exponents=(1, 2, 1, 1), lengths=(64, 128, 256, 512), widths=(128, 256, 512, 1024), fixed=(128, 32)
    ),
    CONVOLUTION: Theory(
        exponents=(1, 2, 1, 1), lengths=(256, 512, 1024, 2048), widths=(128, 256, 512, 1024), fixed=(256, 256)
    ),
    RESTRICTED: Theory(
        exponents=(1, 1, 1, 1), lengths=(512, 1024, 2048, 4096), widths=(128, 256, 512, 1024), fixed=(128, 512)
    ),
}
QUICK = {arm: replace(theory, lengths=(16, 32), widths=(16, 32), fixed=(16, 16)) for arm, theory in THEORY.items()}
SOFTMAX = "the softmax computes n^2 exponentials whatever d is, which dominates for small widths"
SLOWER_GROWTH = {  # likely reasons why time grows more slowly with the width than in theory
    WRITTEN: SOFTMAX,
    KERNELS: SOFTMAX,
    RECURRENT: "each step has a fixed cost, and d^2 only shows once the matrix products outgrow it",
    CONVOLUTION: "products of small matrices do not use the processor fully",
}
UNKNOWN = "no reason is known; measure again on an idle machine"


def make_layer(arm: str, width: int, length: int) -> tuple[Run, nn.Module | None]:
    """Return a function that runs one layer over one sequence, and the module with its parameters, if it has any."""
    layout, scale = Layout.of((0, length)), width**-0.5
    match arm:
        case "self-attention, written out":
            return unfused_self_attention, None
        case "self-attention, the kernel":
            return partial(_kernel, layout, scale), None
        case "recurrent":
            over = make_contextualizer(Recurrent(cell="gru", width=width), width)
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


def cpu_seconds(run: Run, x: Tensor, min_total: float) -> float:
    """Return the minimum processor time of a forward and a backward pass.

    Args:
        min_total: Seconds to measure for; at least three times are measured.
    """
    times: list[float] = []
    run(x).sum().backward()
    while len(times) < 3 or sum(times) < min_total:
        start = time.process_time()  # excludes the time of other processes
        run(x).sum().backward()
        times.append(time.process_time() - start)
    return max(min(times), 1e-9)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, since processor time adds up those of all threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def saved_bytes(run: Run, x: Tensor, inner: nn.Module | None) -> int:
    """Return the bytes, without parameters, that the forward pass saves; each storage counts once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in (inner.parameters() if inner else ())}
    sizes: dict[int, int] = {}  # by address
    storages: list[torch.UntypedStorage] = []  # keeps them alive, so that no address is used twice

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.append(storage)
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        run(x)
    return sum(sizes.values())


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return b of y = a x^b, by least squares of log y against log x.

    >>> round(exponent([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    xs, ys = ([log(point[axis]) for point in points] for axis in (0, 1))
    mean_x, mean_y = fmean(xs), fmean(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


Points = dict[str, dict[str, dict[int, list[float]]]]  # measured values by name of NAMES, arm and size


def run(config: StudyConfig) -> StudyResult:
    """Measure all sizes of all layers once for each seed."""
    with one_thread():
        return _measure(config)


def _measure(config: StudyConfig) -> StudyResult:
    min_total = config.by_scale(0.15, 0.0)
    theories = config.by_scale(THEORY, QUICK)
    exponents: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in THEORY} for name in NAMES}
    points: Points = {name: {arm: {} for arm in THEORY} for name in NAMES}
    for seed in config.seeds:
        generator = torch.Generator().manual_seed(seed)
        for arm, theory in theories.items():
            width, length = theory.fixed
            sizes = [("over n", n, n, width) for n in theory.lengths]
            sizes += [("over d", d, length, d) for d in theory.widths]
            for axis, size, n, d in sizes:
                run_layer, module = make_layer(arm, d, n)
                x = torch.randn(n, d, generator=generator).requires_grad_()
                seconds = cpu_seconds(run_layer, x, min_total)
                points[f"time {axis}"][arm].setdefault(size, []).append(seconds)
                points[f"memory {axis}"][arm].setdefault(size, []).append(float(saved_bytes(run_layer, x, module)))
            for name in NAMES:
                latest = [(float(size), values[-1]) for size, values in points[name][arm].items()]
                exponents[name][arm].append(exponent(latest))
            numbers = ", ".join(f"{name} {exponents[name][arm][-1]:.2f}" for name in NAMES)
            config.log(f"round {seed}, {arm}: {numbers}")
    measures = tuple(
        Measure(name=name, values={arm: tuple(values) for arm, values in exponents[name].items()}, unit="number")
        for name in NAMES
    )
    return _result(config, theories, measures, points)


def _result(
    config: StudyConfig, theories: Mapping[str, Theory], measures: tuple[Measure, ...], points: Points
) -> StudyResult:
    rows = []
    for arm, theory in theories.items():
        expected = zip(measures, theory.exponents, strict=True)
        cells = (f"{mean_and_std(measure.values[arm], 'number')} ({value:g})" for measure, value in expected)
        rows.append((arm, *cells))
    panels = [
        charts.Panel(
            x_label="length n" if name.endswith("n") else "width d",
            y_label="MB saved" if name.startswith("memory") else "milliseconds",
            logarithmic=True,
            lines=tuple(_line(name, arm, points[name][arm]) for arm in THEORY),
        )
        for name in NAMES
    ]
    ranges = (
        f"{arm}: n {_range(theory.lengths)} at d = {theory.fixed[0]}, "
        f"d {_range(theory.widths)} at n = {theory.fixed[1]}"
        for arm, theory in theories.items()
    )
    about = (
        f"A forward and a backward pass of one layer over one sequence: the minimum processor time of three or more, "
        f"float32, one thread; convolution with kernel {KERNEL}, restricted attention with radius {RADIUS}. Exponents "
        f"by least squares, mean ± standard deviation over {seed_count(len(config.seeds))}. {'; '.join(ranges)}."
    )
    return StudyResult(
        measures=measures,
        verdicts=_verdicts(config, measures),
        figure=charts.line_plot(
            panels,
            "Four kinds of layers as length and width grow",
            "both axes logarithmic; the pale band has the theoretical slope",
        ),
        about=about,
        facts={
            "points": {
                name: {arm: _minima(values) for arm, values in by_arm.items()} for name, by_arm in points.items()
            },
            "theory": {arm: list(theory.exponents) for arm, theory in THEORY.items()},
        },
        columns=("layer", *(f"{measure.name} (theory)" for measure in measures)),
        rows=tuple(rows),
    )


def _verdicts(config: StudyConfig, measures: tuple[Measure, ...]) -> tuple[str, ...]:
    """Return for each layer the exponents that differ from theory."""
    if config.scale == "quick":
        return ("the quick form's sizes are too small for a verdict",)
    if len(config.seeds) < ENOUGH:
        return (f"{seed_count(len(config.seeds))}, too few for a verdict: give {ENOUGH} or more",)
    verdicts = []
    for arm, theory in THEORY.items():
        differences = []
        for measure, expected in zip(measures, theory.exponents, strict=True):
            mean = fmean(measure.values[arm])
            if abs(mean - expected) > TOLERANCE:
                is_explained = measure.name == "time over d" and mean < expected and arm in SLOWER_GROWTH
                reason = f"likely because {SLOWER_GROWTH[arm]}" if is_explained else UNKNOWN
                differences.append(f"{measure.name} {mean:.2f} where theory says {expected:g}: {reason}")
        verdict = "; ".join(differences) or f"all exponents within {TOLERANCE} of theory over the measured range"
        verdicts.append(f"{arm}: {verdict}")
    return tuple(verdicts)


def _range(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]}"


def _minima(values: dict[int, list[float]]) -> dict[str, float]:
    """Return the minimum over seeds for each size, as plain data."""
    return {str(size): min(seeds) for size, seeds in values.items()}


def _line(name: str, arm: str, values: dict[int, list[float]]) -> charts.Line:
    slope = THEORY[arm].exponents[NAMES.index(name)]
    scale = 1e-6 if name.startswith("memory") else 1e3
    points = tuple((float(size), scale * min(seeds)) for size, seeds in values.items())
    return charts.Line(name=arm, points=points, slope=slope)

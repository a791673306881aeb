"""The study `complexity`: time and memory of layers against length n and hidden size d, compared with theory.

Theoretical time of each layer (Vaswani et al. 2017, table 1):

    self-attention, written out    n^2 d      all n x n weights are in memory
    self-attention, the kernel     n^2 d      a fused kernel, which stores no weights
    recurrent                      n d^2      a bidirectional GRU
    convolution, kernel k          k n d^2
    restricted, radius r           r n d      each token attends to 2 r + 1 tokens

Projections, which cost n d^2 in every layer of a Transformer, are not included. The study fits exponents: the slope of
log time, or of log memory, against log n or log d, by least squares. Memory is the size of the tensors that the forward
pass saves for the backward pass, including the input and without parameters: n d values, and n^2 attention weights if
they are not fused.
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
from heedful.runs.statistics import MIN_SEEDS, mean_and_std, seed_count
from heedful.study import charts
from heedful.study.layers import Convolution, unfused_self_attention
from heedful.study.runner import Measure, StudyConfig, StudyResult

KERNEL = 3  # k of the convolution
RADIUS = 16  # r of restricted attention
UNFUSED, FUSED = "self-attention, written out", "self-attention, the kernel"
RECURRENT, CONVOLUTION, RESTRICTED = "recurrent", "convolution", "restricted"
TOLERANCE = 0.2  # maximum difference of an exponent that agrees with theory
NAMES = ("time over n", "time over d", "memory over n", "memory over d")  # names of the measures
Layer = Callable[[Tensor], Tensor]  # the forward pass of a layer on one sequence, [n, d] -> [n, d]


@dataclass(frozen=True, kw_only=True, slots=True)
class Theory:
    """Theoretical exponents of a layer, and the sizes to measure."""

    exponents: tuple[float, float, float, float]  # exponent of each measure, in the order of NAMES
    lengths: tuple[int, ...]  # values of n to measure
    widths: tuple[int, ...]  # values of d to measure
    fixed: tuple[int, int]  # the value of d while n varies, and the value of n while d varies


ATTENTION_LENGTHS = (512, 1024, 2048)
ATTENTION_WIDTHS = (64, 128, 256, 512)
THEORY = {  # the memory of unfused attention is mostly its n^2 weights, since n > d
    UNFUSED: Theory(exponents=(2, 1, 2, 0), lengths=ATTENTION_LENGTHS, widths=ATTENTION_WIDTHS, fixed=(128, 1024)),
    FUSED: Theory(exponents=(2, 1, 1, 1), lengths=ATTENTION_LENGTHS, widths=ATTENTION_WIDTHS, fixed=(128, 1024)),
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
SLOWER_GROWTH = {  # likely reason why the time of a layer grows more slowly with d than in theory
    UNFUSED: SOFTMAX,
    FUSED: SOFTMAX,
    RECURRENT: "each step has a fixed cost, and d^2 only shows once the matrix products outgrow it",
    CONVOLUTION: "products of small matrices do not use the processor fully",
}
UNKNOWN = "no reason is known; measure again on an idle machine"


def make_layer(arm: str, width: int, length: int) -> tuple[Layer, nn.Module | None]:
    """Return a layer, and the module with its parameters, or None for a layer without parameters.

    Args:
        arm: Name of the layer.
        width: d.
        length: n.
    """
    layout, scale = Layout.of((0, length)), width**-0.5
    match arm:
        case "self-attention, written out":
            return unfused_self_attention, None
        case "self-attention, the kernel":
            return partial(_fused_attention, layout, scale), None
        case "recurrent":
            recurrent = make_contextualizer(Recurrent(cell="gru", width=width), width)
            assert recurrent is not None
            return lambda x: recurrent(x, (0, length)), recurrent
        case "convolution":
            convolution = Convolution(width, KERNEL)
            return lambda x: convolution(x, (0, length)), convolution
    return partial(_restricted_attention, layout, scale), None


def _fused_attention(layout: Layout, scale: float, x: Tensor) -> Tensor:
    """Return self-attention with one head, with x as queries, keys and values, by the fused kernel."""
    one_head = x[:, None]  # [n, 1, d]
    return attend(one_head, one_head, one_head, layout, scale=scale)


def _restricted_attention(layout: Layout, scale: float, x: Tensor) -> Tensor:
    """Return self-attention with one head to the neighbours of each token, with x as queries, keys and values."""
    one_head = x[:, None]  # [n, 1, d]
    return restricted(one_head, one_head, one_head, layout, radius=RADIUS, scale=scale)


def cpu_seconds(layer: Layer, x: Tensor, min_total: float) -> float:
    """Measure a forward and a backward pass several times, and return the minimum processor time in seconds.

    Args:
        layer: The layer.
        x: Input of the layer.
        min_total: The passes are repeated until they have taken this processor time together, in seconds, but at least
            three times.
    """
    times: list[float] = []
    layer(x).sum().backward()  # to warm up
    while len(times) < 3 or sum(times) < min_total:
        start = time.process_time()  # excludes the time of other processes
        layer(x).sum().backward()
        times.append(time.process_time() - start)
    return max(min(times), 1e-9)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread within a `with` block, since processor time is summed over threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def saved_bytes(layer: Layer, x: Tensor, module: nn.Module | None) -> int:
    """Return the size in bytes of the tensors that the forward pass saves for the backward pass, without parameters.

    Args:
        layer: The layer.
        x: Input of the layer.
        module: Module with the parameters of the layer, or None for a layer without parameters.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in (module.parameters() if module else ())}
    sizes: dict[int, int] = {}  # bytes of each storage by its address, so that no storage is counted twice
    storages: list[torch.UntypedStorage] = []  # keeps storages alive, so that no address is reused

    def record_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.append(storage)
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
        layer(x)
    return sum(sizes.values())


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Fit y = a x^b by least squares of log y against log x, and return b.

    >>> round(exponent([(1, 3), (2, 12), (4, 48)]), 6)
    2.0
    """
    log_xs = [log(x) for x, _ in points]
    log_ys = [log(y) for _, y in points]
    mean_x, mean_y = fmean(log_xs), fmean(log_ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_xs, log_ys, strict=True))
    variance = sum((x - mean_x) ** 2 for x in log_xs)
    return covariance / variance


# measured values, in seconds or bytes: a list with the value of each seed, by measure, arm and size (n or d)
Points = dict[str, dict[str, dict[int, list[float]]]]


def run(config: StudyConfig) -> StudyResult:
    """Measure all layers with all sizes, once for each seed."""
    with one_thread():
        return _measure(config)


def _measure(config: StudyConfig) -> StudyResult:
    """Measure time and memory, fit the exponents, and return the result."""
    min_total = config.by_scale(0.15, 0.0)
    theories = config.by_scale(THEORY, QUICK)
    exponents: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in THEORY} for name in NAMES}
    points: Points = {name: {arm: {} for arm in THEORY} for name in NAMES}
    for seed in config.seeds:
        generator = torch.Generator().manual_seed(seed)
        for arm, theory in theories.items():
            fixed_d, fixed_n = theory.fixed
            trials = [("over n", n, n, fixed_d) for n in theory.lengths]  # (axis, size on this axis, n, d)
            trials += [("over d", d, fixed_n, d) for d in theory.widths]
            for axis, size, n, d in trials:
                layer, module = make_layer(arm, d, n)
                x = torch.randn(n, d, generator=generator).requires_grad_()
                seconds = cpu_seconds(layer, x, min_total)
                points[f"time {axis}"][arm].setdefault(size, []).append(seconds)
                points[f"memory {axis}"][arm].setdefault(size, []).append(float(saved_bytes(layer, x, module)))
            for name in NAMES:
                latest = [(float(size), values[-1]) for size, values in points[name][arm].items()]
                exponents[name][arm].append(exponent(latest))
            fitted = ", ".join(f"{name} {exponents[name][arm][-1]:.2f}" for name in NAMES)
            config.log(f"round {seed}, {arm}: {fitted}")
    measures = tuple(
        Measure(name=name, values={arm: tuple(values) for arm, values in exponents[name].items()}, unit="number")
        for name in NAMES
    )
    return _result(config, theories, measures, points)


def _result(
    config: StudyConfig, theories: Mapping[str, Theory], measures: tuple[Measure, ...], points: Points
) -> StudyResult:
    """Return the result of the study: table, plots and conclusions.

    Args:
        config: How the study was run.
        theories: Theoretical exponents and measured sizes of each layer.
        measures: Fitted exponents of each layer, a measure for each of NAMES.
        points: Measured times and sizes.
    """
    rows = []
    for arm, theory in theories.items():
        cells = [
            f"{mean_and_std(measure.values[arm], 'number')} ({expected:g})"
            for measure, expected in zip(measures, theory.exponents, strict=True)
        ]
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
    """Return a sentence for each layer: which of its exponents differ from theory, and a likely reason."""
    if config.scale == "quick":
        return ("the quick form's sizes are too small for a verdict",)
    if len(config.seeds) < MIN_SEEDS:
        return (f"{seed_count(len(config.seeds))}, too few for a verdict: give {MIN_SEEDS} or more",)
    verdicts = []
    for arm, theory in THEORY.items():
        differences = []
        for measure, expected in zip(measures, theory.exponents, strict=True):
            mean = fmean(measure.values[arm])
            if abs(mean - expected) <= TOLERANCE:
                continue
            is_slower_growth = measure.name == "time over d" and mean < expected
            reason = UNKNOWN
            if is_slower_growth and arm in SLOWER_GROWTH:
                reason = f"likely because {SLOWER_GROWTH[arm]}"
            differences.append(f"{measure.name} {mean:.2f} where theory says {expected:g}: {reason}")
        verdict = "; ".join(differences) or f"all exponents within {TOLERANCE} of theory over the measured range"
        verdicts.append(f"{arm}: {verdict}")
    return tuple(verdicts)


def _range(sizes: Sequence[int]) -> str:
    """Format the first and the last size."""
    return f"{sizes[0]} to {sizes[-1]}"


def _minima(values_by_size: dict[int, list[float]]) -> dict[str, float]:
    """Return the minimum over seeds for each size, as data for JSON."""
    return {str(size): min(values) for size, values in values_by_size.items()}


def _line(name: str, arm: str, values_by_size: dict[int, list[float]]) -> charts.Line:
    """Return the line of an arm in a plot: for each size the minimum over seeds, in milliseconds or MB."""
    slope = THEORY[arm].exponents[NAMES.index(name)]
    scale = 1e-6 if name.startswith("memory") else 1e3
    points = tuple((float(size), scale * min(values)) for size, values in values_by_size.items())
    return charts.Line(name=arm, points=points, slope=slope)

"""Training curves of a run: loss, dev metric and learning rate over steps, drawn from the journal.

`runs.plots.figures` draws them for every run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float64

from heedful.runs.plots.style import BLUE, GREY, ORANGE, SKY, new_figure, style_axes
from heedful.runs.results import JsonObject, as_float
from heedful.tasks.metrics import metric_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Float64[np.ndarray, " points"]
Updates = Float64[np.ndarray, " updates"]
Evals = Float64[np.ndarray, " evaluations"]
Groups = Float64[np.ndarray, " groups"]
MAX_MARKERS = 30  # maximum points of a line that is drawn with markers
MAX_LOSS_POINTS = 2000  # maximum steps whose losses are drawn as a line; with more steps, ranges are drawn
SMOOTHING_PARTS = 40  # the smoothed loss is a moving mean; its window extends 1 / SMOOTHING_PARTS of the run both ways
LOG_AXIS_RATIO = 50  # the axis of losses is logarithmic if their maximum is larger than this multiple of their median


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCurves:
    """Columns of a journal. A missing number is NaN."""

    step: Updates  # number of each update, from 1
    epoch: Updates  # epochs that are finished after each update, with a fraction
    loss: Updates  # training loss of each update
    lr: Updates  # learning rate of each update
    eval_steps: Evals  # steps after which dev was evaluated
    dev_loss: Evals  # loss on dev at each evaluation
    score: Evals  # main metric on dev at each evaluation
    best: float  # step of the evaluation with the best main metric; NaN: dev was not evaluated

    @classmethod
    def of(cls, lines: Iterable[JsonObject]) -> TrainingCurves:
        """Read the records of a journal, in a single pass."""
        updates, evals, best = [], [], float("nan")
        for record in lines:
            if "loss" in record:
                updates.append([as_float(record.get(name)) for name in ("step", "epoch", "loss", "lr")])
            elif "dev" in record:
                eval_step = as_float(record["step"])
                evals.append([eval_step, as_float(record["dev"].get("loss")), as_float(record.get("metric_value"))])
                if record.get("best"):
                    best = eval_step
        step, epoch, loss, lr = np.array(updates, dtype=np.float64).reshape(-1, 4).T
        eval_steps, dev_loss, score = np.array(evals, dtype=np.float64).reshape(-1, 3).T
        return cls(
            step=step, epoch=epoch, loss=loss, lr=lr, eval_steps=eval_steps, dev_loss=dev_loss, score=score, best=best
        )


def plot_curves(lines: Iterable[JsonObject], metric: str) -> Figure | None:
    """Plot loss, dev metric and learning rate over steps, in panels.

    Args:
        lines: Records of a journal.
        metric: Name of the dev metric.

    Returns:
        The figure, or None if the journal has no training step.
    """
    from matplotlib.ticker import MaxNLocator

    curves = TrainingCurves.of(lines)
    if not len(curves.step):
        return None
    heights = [3.0, 2.2, 1.3] if len(curves.eval_steps) else [3.0, 1.3]
    figure = new_figure(8.0, sum(heights) + 1.0)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _plot_loss(panels[0], curves)
    if len(curves.eval_steps):
        _plot_score(panels[1], curves, metric)
    _plot_lr(panels[-1], curves)
    for axes in panels:
        style_axes(axes, grid="both")
    _add_epoch_axis(panels[0], curves)
    handles_and_labels = panels[0].get_legend_handles_labels()
    figure.legend(*handles_and_labels, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[-1].set_xlim(0, 1.02 * curves.step[-1])
    figure.align_ylabels()
    return figure


def _plot_loss(axes: Axes, curves: TrainingCurves) -> None:
    """Plot the training loss, raw and smoothed, and the dev loss. Steps without a finite loss are marked by crosses."""
    step = curves.step
    loss = curves.loss
    finite = np.isfinite(loss)
    half_width = max(1, len(step) // SMOOTHING_PARTS)
    if len(step) > MAX_LOSS_POINTS:
        size = -(-len(step) // (MAX_LOSS_POINTS // 2))  # steps of a range, rounded up
        low, high, mean_step = ranges(loss, step, size)
        axes.fill_between(mean_step, low, high, color=SKY, alpha=0.5, lw=0, label=f"training, range of {size} steps")
    else:
        label = "training, each step"
        axes.plot(step, np.where(finite, loss, np.nan), color=SKY, lw=0.8, **_markers(step), label=label)
    if half_width > 1:
        label = f"training, mean of {2 * half_width + 1} steps"
        axes.plot(step, moving_mean(loss, half_width), color=BLUE, lw=1.6, label=label)
    if np.isfinite(curves.dev_loss).any():
        markers = _markers(curves.eval_steps, "o")
        axes.plot(curves.eval_steps, curves.dev_loss, color=ORANGE, lw=1.4, **markers, label="dev")
    if not finite.all():
        cross: dict[str, Any] = {"color": ORANGE, "marker": "x", "ls": "none", "clip_on": False}
        zeros = np.zeros((~finite).sum())
        axes.plot(step[~finite], zeros, transform=axes.get_xaxis_transform(), label="not finite: left out", **cross)
    values = loss[finite]
    is_log = len(values) and values.min() > 0 and values.max() > LOG_AXIS_RATIO * np.median(values)
    if is_log:
        axes.set_yscale("log")
    axes.set_ylabel("loss (log)" if is_log else "loss")


def _plot_score(axes: Axes, curves: TrainingCurves, metric: str) -> None:
    """Plot the dev metric, with a star and a text at the best step."""
    axes.plot(curves.eval_steps, curves.score, color=ORANGE, lw=1.4, **_markers(curves.eval_steps, "o"))
    axes.set_ylabel(f"{metric} on dev", parse_math=False)
    axes.margins(y=0.25)
    least, greatest = metric_bounds(metric)
    scores = curves.score[np.isfinite(curves.score)]
    if len(scores) and least <= scores.min() and scores.max() <= greatest:
        bottom, top = axes.get_ylim()
        margin = 0.03 * (min(top, greatest) - max(bottom, least))  # room for the marker of a score at a bound
        axes.set_ylim(max(bottom, least - margin), min(top, greatest + margin))
    best_indices = np.flatnonzero(curves.eval_steps == curves.best)
    if len(best_indices):
        best_score = float(curves.score[best_indices[-1]])
        axes.plot([curves.best], [best_score], marker="*", ms=15, color=BLUE, ls="none", mec="white", zorder=5)
        text_on_left = curves.best > curves.step[-1] / 2
        axes.annotate(
            f"best: {best_score:.4g}, step {curves.best:,.0f}",
            (curves.best, best_score),
            xytext=(-9 if text_on_left else 9, 9),
            textcoords="offset points",
            ha="right" if text_on_left else "left",
            fontsize=8,
            color=BLUE,
        )


def _plot_lr(axes: Axes, curves: TrainingCurves) -> None:
    """Plot the learning rate."""
    axes.plot(curves.step, curves.lr, color=GREY, lw=1.4, **_markers(curves.step))
    axes.set_ylabel("learning rate")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _add_epoch_axis(axes: Axes, curves: TrainingCurves) -> None:
    """Add an axis with epochs on top. This assumes that all epochs have equally many steps."""
    epochs_per_step = curves.epoch[-1] / curves.step[-1]
    if np.isfinite(epochs_per_step) and epochs_per_step > 0:
        top = axes.secondary_xaxis(
            "top", functions=(lambda step: step * epochs_per_step, lambda epoch: epoch / epochs_per_step)
        )
        top.set_xlabel("epoch", fontsize=9)
        style_axes(top)


def _markers(points: Values, marker: str = ".") -> dict[str, Any]:
    """Return the arguments of `Axes.plot` for markers, or {} if there are more than MAX_MARKERS points."""
    return {"marker": marker, "ms": 4 if marker == "o" else 6} if len(points) <= MAX_MARKERS else {}


def moving_mean(values: Values, half_width: int) -> Values:
    """Return for each value the mean of the finite values up to `half_width` positions away, or NaN if none is finite.

    >>> moving_mean(np.array([1.0, np.nan, 3.0, 4.0]), 1)
    array([1. , 2. , 3.5, 3.5])
    """
    finite: Bool[np.ndarray, " points"] = np.isfinite(values)
    indices = np.arange(len(values))
    start, stop = np.maximum(indices - half_width, 0), np.minimum(indices + half_width + 1, len(values))
    cumulative_sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    cumulative_counts = np.concatenate(([0], np.cumsum(finite)))
    count = cumulative_counts[stop] - cumulative_counts[start]
    sums = cumulative_sums[stop] - cumulative_sums[start]
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def ranges(values: Values, positions: Values, size: int) -> tuple[Groups, Groups, Groups]:
    """Divide values into groups of `size` consecutive ones, and return the range of each group.

    Returns:
        Minimum and maximum of the finite values of each group, NaN if none is finite, and the group's mean position.
    """
    starts = np.arange(0, len(values), size)
    finite = np.isfinite(values)
    has_finite = np.logical_or.reduceat(finite, starts)
    low = np.where(has_finite, np.minimum.reduceat(np.where(finite, values, np.inf), starts), np.nan)
    high = np.where(has_finite, np.maximum.reduceat(np.where(finite, values, -np.inf), starts), np.nan)
    mean_positions = [float(positions[start : start + size].mean()) for start in starts]
    return low, high, np.array(mean_positions)

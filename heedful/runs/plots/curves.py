"""Curves of a run: loss, dev metric and learning rate, over steps and epochs."""

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
Parts = Float64[np.ndarray, " parts"]
FEW = 30  # points up to which each one gets a marker
MANY = 2000  # steps above which the raw loss is drawn as the range of neighbouring steps
SMOOTHED = 40  # the smoothed loss is a moving mean over 1 / SMOOTHED of the run on both sides
STEEP = 50  # a loss of this multiple of the median gets a logarithmic axis


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCurves:
    """Columns of the journal; NaN if a record lacks a number."""

    step: Updates
    epoch: Updates
    loss: Updates
    lr: Updates
    eval_steps: Evals  # steps after which dev was evaluated
    dev_loss: Evals
    score: Evals
    best: float  # step of the best metric; NaN without dev

    @classmethod
    def of(cls, lines: Iterable[JsonObject]) -> TrainingCurves:
        """Read the records of a journal once."""
        updates, evals, best = [], [], float("nan")
        for line in lines:
            if "loss" in line:
                updates.append([as_float(line.get(name)) for name in ("step", "epoch", "loss", "lr")])
            elif "dev" in line:
                evals.append(
                    [as_float(value) for value in (line["step"], line["dev"].get("loss"), line.get("metric_value"))]
                )
                best = evals[-1][0] if line.get("best") else best
        step, epoch, loss, lr = np.array(updates, dtype=np.float64).reshape(-1, 4).T
        eval_steps, dev_loss, score = np.array(evals, dtype=np.float64).reshape(-1, 3).T
        return cls(
            step=step, epoch=epoch, loss=loss, lr=lr, eval_steps=eval_steps, dev_loss=dev_loss, score=score, best=best
        )


def plot_curves(lines: Iterable[JsonObject], metric: str) -> Figure | None:
    """Plot loss, dev metric and learning rate in panels over steps; None if the journal has no update.

    `metric` is the name of the dev metric.
    """
    from matplotlib.ticker import MaxNLocator

    course = TrainingCurves.of(lines)
    if not len(course.step):
        return None
    heights = [3.0, 2.2, 1.3] if len(course.eval_steps) else [3.0, 1.3]
    figure = new_figure(8.0, sum(heights) + 1.0)
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _loss(panels[0], course)
    if len(course.eval_steps):
        _score(panels[1], course, metric)
    _rate(panels[-1], course)
    for axes in panels:
        style_axes(axes, grid="both")
    _epochs(panels[0], course)
    named = panels[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[-1].set_xlim(0, 1.02 * course.step[-1])
    figure.align_ylabels()
    return figure


def _loss(axes: Axes, course: TrainingCurves) -> None:
    step, loss = course.step, course.loss
    finite = np.isfinite(loss)
    width = max(1, len(step) // SMOOTHED)
    if len(step) > MANY:
        parts = -(-len(step) // (MANY // 2))
        low, high, at = ranges(loss, step, parts)
        axes.fill_between(at, low, high, color=SKY, alpha=0.5, lw=0, label=f"training, range of {parts} steps")
    else:
        shown = "training, each step"
        axes.plot(step, np.where(finite, loss, np.nan), color=SKY, lw=0.8, **_dots(step), label=shown)
    if width > 1:
        axes.plot(step, smoothed(loss, width), color=BLUE, lw=1.6, label=f"training, mean of {2 * width + 1} steps")
    if np.isfinite(course.dev_loss).any():
        axes.plot(
            course.eval_steps, course.dev_loss, color=ORANGE, lw=1.4, **_dots(course.eval_steps, "o"), label="dev"
        )
    if not finite.all():
        marks: dict[str, Any] = {"color": ORANGE, "marker": "x", "ls": "none", "clip_on": False}
        at, zero = step[~finite], np.zeros((~finite).sum())
        axes.plot(at, zero, transform=axes.get_xaxis_transform(), label="not finite: left out", **marks)
    usual = loss[finite]
    steep = len(usual) and usual.min() > 0 and usual.max() > STEEP * np.median(usual)
    if steep:
        axes.set_yscale("log")
    axes.set_ylabel("loss (log)" if steep else "loss")


def _score(axes: Axes, course: TrainingCurves, metric: str) -> None:
    axes.plot(course.eval_steps, course.score, color=ORANGE, lw=1.4, **_dots(course.eval_steps, "o"))
    axes.set_ylabel(f"{metric} on dev", parse_math=False)
    axes.margins(y=0.25)
    low, high = metric_bounds(metric)
    scores = course.score[np.isfinite(course.score)]
    if len(scores) and low <= scores.min() and scores.max() <= high:
        bottom, top = axes.get_ylim()
        room = 0.03 * (min(top, high) - max(bottom, low))  # so that a marker at the bound is whole
        axes.set_ylim(max(bottom, low - room), min(top, high + room))
    rows = np.flatnonzero(course.eval_steps == course.best)
    if len(rows):
        best = float(course.score[rows[-1]])
        axes.plot([course.best], [best], marker="*", ms=15, color=BLUE, ls="none", mec="white", zorder=5)
        left = course.best > course.step[-1] / 2
        axes.annotate(
            f"best: {best:.4g}, step {course.best:,.0f}",
            (course.best, best),
            xytext=(-9 if left else 9, 9),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
            color=BLUE,
        )


def _rate(axes: Axes, course: TrainingCurves) -> None:
    axes.plot(course.step, course.lr, color=GREY, lw=1.4, **_dots(course.step))
    axes.set_ylabel("learning rate")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _epochs(axes: Axes, course: TrainingCurves) -> None:
    """Add a second axis with epochs on top: a step is the same share of every epoch."""
    share = course.epoch[-1] / course.step[-1]
    if np.isfinite(share) and share > 0:
        top = axes.secondary_xaxis("top", functions=(lambda step: step * share, lambda epoch: epoch / share))
        top.set_xlabel("epoch", fontsize=9)
        style_axes(top)


def _dots(points: Values, marker: str = ".") -> dict[str, Any]:
    """Markers for few points, so that a single one is visible."""
    return {"marker": marker, "ms": 4 if marker == "o" else 6} if len(points) <= FEW else {}


def smoothed(values: Values, width: int) -> Values:
    """Moving mean of finite values over `width` neighbours on both sides; NaN if all of them are not finite.

    >>> smoothed(np.array([1.0, np.nan, 3.0, 4.0]), 1)
    array([1. , 2. , 3.5, 3.5])
    """
    finite: Bool[np.ndarray, " points"] = np.isfinite(values)
    places = np.arange(len(values))
    low, high = np.maximum(places - width, 0), np.minimum(places + width + 1, len(values))
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


def ranges(values: Values, at: Values, size: int) -> tuple[Parts, Parts, Parts]:
    """Least and greatest finite value of each `size` neighbours, and their mean position; NaN if none is finite."""
    starts = np.arange(0, len(values), size)
    finite = np.isfinite(values)
    some = np.logical_or.reduceat(finite, starts)
    low = np.where(some, np.minimum.reduceat(np.where(finite, values, np.inf), starts), np.nan)
    high = np.where(some, np.maximum.reduceat(np.where(finite, values, -np.inf), starts), np.nan)
    middles = [float(at[start : start + size].mean()) for start in starts]
    return low, high, np.array(middles)

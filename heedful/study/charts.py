"""Plots of studies: `dot_plot` shows the values of all seeds with their mean, and `line_plot` shows curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from statistics import fmean
from typing import TYPE_CHECKING

from heedful.runs.plots.style import BLUE, GREY, INK, ORANGE, PALE, SKY, new_figure, set_title, style_axes
from heedful.runs.statistics import mean_and_std, paired_t_interval, seed_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from heedful.study.runner import Measure

GREEN, PINK, YELLOW, BLACK = "#009E73", "#CC79A7", "#E69F00", "#222222"  # Okabe and Ito 2008, as in plots/style.py
MAX_WIDTH = 7.5  # inches; at most 830 pixels, the width of a documentation page
# colour, dash pattern and marker of the first line of a plot, of the second line, and so on
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK)
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def dot_plot(measures: Sequence[Measure], arms: Sequence[str], heading: str, metric: str = "") -> Figure:
    """Plot a panel for each measure and a row for each arm, with all seeds, their mean, and its 95 % interval.

    Args:
        measures: The measures.
        arms: Arms from top to bottom.
        heading: Title of the figure.
        metric: Beginning of the subtitle, such as "accuracy". If empty, the subtitle only has the number of seeds.
    """
    num_seeds = max(map(len, measures[0].values.values()))
    subtitle = seed_count(num_seeds)
    if num_seeds > 1:
        subtitle += " (dots), their mean and its 95 % interval"
    name_width = 0.075 * max(len(arm) for arm in arms)  # inches
    max_columns = max(1, min(len(measures), int((MAX_WIDTH - 1.0 - name_width) / 2.0)))
    grid_rows = ceil(len(measures) / max_columns)
    grid_columns = ceil(len(measures) / grid_rows)  # minimum columns for this number of rows
    width = min(MAX_WIDTH, 1.0 + name_width + 2.8 * grid_columns)
    figure = new_figure(width, 0.75 + grid_rows * (1.0 + 0.34 * len(arms)))
    grid = figure.subplots(grid_rows, grid_columns, sharey=True, squeeze=False)
    panels = grid.flatten()
    y_of_arm = {arm: len(arms) - 1 - index for index, arm in enumerate(arms)}
    for axes, measure in zip(panels, measures, strict=False):
        _plot_measure(axes, measure, y_of_arm)
    for axes in panels[len(measures) :]:
        axes.set_axis_off()
    for left_axes in grid[:, 0]:
        left_axes.set_yticks(list(y_of_arm.values()), list(y_of_arm))
    panels[0].set_ylim(-0.6, len(arms) - 0.4)
    set_title(figure, heading, f"{metric}, {subtitle}" if metric else subtitle)
    return figure


def _plot_measure(axes: Axes, measure: Measure, y_of_arm: Mapping[str, int]) -> None:
    """Plot one measure of all arms, with shares in percent.

    Args:
        axes: Where to plot.
        measure: The measure.
        y_of_arm: Position of each arm on the vertical axis.
    """
    scale = 100 if measure.unit == "share" else 1
    style_axes(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    if measure.chance is not None:
        axes.axvline(scale * measure.chance, color=GREY, lw=1, ls="--", zorder=1)
        axes.annotate(
            "chance", (scale * measure.chance, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=7, color=GREY,
        )  # fmt: skip
    for arm, values in measure.values.items():
        y, scaled = y_of_arm[arm], [scale * value for value in values]
        mean = fmean(scaled)
        interval = paired_t_interval(scaled, [0.0] * len(scaled), resolution=scale * measure.resolution)
        if isfinite(interval.low):
            low, high = interval.low, interval.high
            if scale == 100:
                low, high = min(max(low, 0), 100), min(max(high, 0), 100)
            axes.hlines(y, low, high, color=SKY, lw=4, alpha=0.55, zorder=2)
        axes.plot(scaled, [y] * len(scaled), ls="none", marker="o", ms=3.2, color=GREY, alpha=0.75, zorder=3)
        axes.plot([mean], [y], ls="none", marker="D", ms=5.5, color=BLUE, mec="white", mew=0.6, zorder=4)
        label = mean_and_std([mean / scale], measure.unit).removesuffix(" %")
        axes.annotate(
            label, (1, y), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8, color=INK, annotation_clip=False,
        )  # fmt: skip
    if scale == 100:
        axes.set_xlim(-3, 103)
        axes.set_xticks([0, 50, 100])
    axes.set_xlabel(measure.name + (" (%)" if scale == 100 else ""), fontsize=9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a plot."""

    name: str  # name in the legend
    points: tuple[tuple[float, float], ...]  # (x, y) of each point
    slope: float | None = None  # theoretical slope on logarithmic axes, drawn as a pale band, if it is known


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Axes with lines."""

    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    logarithmic: bool = False  # whether both axes are logarithmic


def line_plot(panels: Sequence[Panel], *title: str) -> Figure:
    """Plot panels side by side with one legend.

    Args:
        panels: The panels.
        title: Heading and subtitle.
    """
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    figure = new_figure(MAX_WIDTH if columns == 2 else 6.4, 0.5 + 3.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    handles: dict[str, Line2D] = {}  # the last line of each name
    for axes, panel in zip(grid, panels, strict=False):
        handles |= _plot_panel(axes, panel, names)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(names)), fontsize=8,
        frameon=False,
    )  # fmt: skip
    set_title(figure, *title)
    return figure


def _plot_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Line2D]:
    """Plot the lines of a panel, and return them by name.

    Args:
        axes: Where to plot.
        panel: The panel.
        names: Names of all lines of the figure. The colour of a line depends on the index of its name.
    """
    handles: dict[str, Line2D] = {}
    if panel.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style_axes(axes, grid="both")
    for line in panel.lines:
        style_index = names.index(line.name) % len(COLOURS)
        xs, ys = zip(*line.points, strict=True)
        if line.slope is not None:  # the band goes through the last point
            expected = [ys[-1] * (x / xs[-1]) ** line.slope for x in xs]
            axes.plot(xs, expected, color=PALE, lw=5, zorder=1, solid_capstyle="round")
        marker = MARKERS[style_index] if panel.logarithmic or len(line.points) == 1 else None
        (handles[line.name],) = axes.plot(
            xs, ys, zorder=3, color=COLOURS[style_index], ls=DASHES[style_index], lw=1.6, marker=marker, ms=5,
            mec="white", mew=0.5,
        )  # fmt: skip
    if panel.logarithmic:
        axes.set_xticks(sorted({x for line in panel.lines for x, _ in line.points}))
        axes.minorticks_off()
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    return handles


def smooth(curve: Sequence[float], size: int) -> tuple[tuple[float, float], ...]:
    """Average a curve over groups of `size` steps, and return the point (last step, mean) of each group.

    Args:
        curve: Value at each step, from step 1 on.
        size: Number of steps in a group; the last group may have fewer.

    >>> smooth([1.0, 3.0, 5.0], 2)
    ((2, 2.0), (3, 5.0))
    """
    groups = [(start, curve[start : start + size]) for start in range(0, len(curve), size)]
    return tuple((start + len(group), sum(group) / len(group)) for start, group in groups)

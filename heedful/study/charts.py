"""Pictures of studies: a dot for each seed beside the mean, and lines over a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from heedful.runs.plots.style import BLUE, GREY, INK, ORANGE, PALE, SKY, new_figure, set_title, style_axes
from heedful.runs.statistics import mean_and_std, paired_t_interval, seed_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from heedful.study.runner import Measure

GREEN, PINK, YELLOW, BLACK = "#009E73", "#CC79A7", "#E69F00", "#222222"  # Okabe and Ito 2008, as the style's own
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK)
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def dot_plot(measures: Sequence[Measure], arms: Sequence[str], heading: str, what: str = "") -> Figure:
    """A panel for each measure and a line for each arm: every seed, the mean, and its 95 % interval."""
    seeds = max(map(len, measures[0].values.values()))
    told = f"{seed_count(seeds)} (dots), their mean and its 95 % interval" if seeds > 1 else seed_count(seeds)
    longest = max(len(arm) for arm in arms)
    wide = 2.3 if len(measures) > 3 else 2.8
    figure = new_figure(1.0 + 0.075 * longest + wide * len(measures), 1.75 + 0.34 * len(arms))
    panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    places = {arm: len(arms) - 1 - number for number, arm in enumerate(arms)}
    for panel, measure in zip(panels, measures, strict=True):
        _panel(panel, measure, places)
    panels[0].set_yticks(list(places.values()), list(places))
    panels[0].set_ylim(-0.6, len(arms) - 0.4)
    set_title(figure, heading, f"{what}, {told}" if what else told)
    return figure


def _panel(panel: Any, measure: Measure, places: Mapping[str, int]) -> None:
    scale = 100 if measure.unit == "share" else 1
    style_axes(panel, grid="x")
    panel.tick_params(axis="y", length=0)
    if measure.chance is not None:
        panel.axvline(scale * measure.chance, color=GREY, lw=1, ls="--", zorder=1)
        panel.annotate(
            "chance", (scale * measure.chance, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=7, color=GREY,
        )  # fmt: skip
    for arm, values in measure.values.items():
        place, shown = places[arm], [scale * value for value in values]
        mean = fmean(shown)
        found = paired_t_interval(shown, [0.0] * len(shown), resolution=scale * measure.grain)
        if isfinite(found.low):
            low, high = (min(max(each, 0), 100) if scale == 100 else each for each in (found.low, found.high))
            panel.hlines(place, low, high, color=SKY, lw=4, alpha=0.55, zorder=2)
        panel.plot(shown, [place] * len(shown), ls="none", marker="o", ms=3.2, color=GREY, alpha=0.75, zorder=3)
        panel.plot([mean], [place], ls="none", marker="D", ms=5.5, color=BLUE, mec="white", mew=0.6, zorder=4)
        label = mean_and_std([mean / scale], measure.unit).removesuffix(" %")
        panel.annotate(
            label, (1, place), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            ha="left", va="center", fontsize=8, color=INK, annotation_clip=False,
        )  # fmt: skip
    if scale == 100:
        panel.set_xlim(-3, 103)
        panel.set_xticks([0, 50, 100])
    panel.set_xlabel(measure.name + (" (%)" if scale == 100 else ""), fontsize=9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A name and points; a slope to draw beside them, where there is a theory."""

    name: str
    points: tuple[tuple[float, float], ...]
    slope: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Lines over one axis."""

    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    logarithmic: bool = False


def line_plot(panels: Sequence[Panel], *said: str) -> Figure:
    """A panel beside the other, one legend for all; a line's theory is pale behind it."""
    figure = new_figure(max(6.4, 3.6 * len(panels) + 0.4), 4.1)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    looks = {name: number for number, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if panel.logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        style_axes(axes, grid="both")
        for line in panel.lines:
            number = looks[line.name]
            across, up = zip(*line.points, strict=True)
            if line.slope is not None:
                drawn = [up[-1] * (each / across[-1]) ** line.slope for each in across]
                axes.plot(across, drawn, color=PALE, lw=5, zorder=1, solid_capstyle="round")
            look: dict[str, Any] = {"color": COLOURS[number % 7], "ls": DASHES[number % 7], "lw": 1.6}
            if panel.logarithmic or len(line.points) == 1:
                look |= {"marker": MARKERS[number % 7], "ms": 5, "mec": "white", "mew": 0.5}
            (handles[line.name],) = axes.plot(across, up, zorder=3, **look)
        if panel.logarithmic:
            ticks = sorted({x for line in panel.lines for x, _ in line.points})
            axes.set_xticks(ticks)
            axes.minorticks_off()
        axes.set_xlabel(panel.x_label, fontsize=9)
        axes.set_ylabel(panel.y_label, fontsize=9)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(names)), fontsize=8,
        frameon=False,
    )  # fmt: skip
    set_title(figure, *said)
    return figure


def smooth(curve: Sequence[float], size: int) -> tuple[tuple[float, float], ...]:
    """Means of so many steps, each at its last step.

    >>> smooth([1.0, 3.0, 5.0], 2)
    ((2, 2.0), (3, 5.0))
    """
    parts = [(start, curve[start : start + size]) for start in range(0, len(curve), size)]
    return tuple((start + len(part), sum(part) / len(part)) for start, part in parts)

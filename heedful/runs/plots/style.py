"""How all plots look: one palette that colour-blind people can tell apart (Okabe and Ito 2008), little ink beside."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from heedful.atomic_io import put, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, SKY = "#0072B2", "#D55E00", "#56B4E9"
GREY, PALE, INK = "#6B6B6B", "#E4E4E4", "#222222"
DOTS = 110  # an inch


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches; it lays itself out so that nothing is cut off."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained", facecolor="white")


def style_axes(axes: Any, *, grid: Literal["x", "y", "both", ""] = "") -> None:
    """Thin axes, a pale grid behind the data."""
    axes.tick_params(labelsize=8, color=GREY, labelcolor=INK, which="both")
    axes.set_axisbelow(True)
    for side in axes.spines:
        axes.spines[side].set_color(PALE)
    if grid:
        axes.grid(axis=grid, color=PALE, lw=0.7)


def set_title(figure: Figure, *lines: str) -> None:
    """Above everything, from the left edge; empty lines are left out."""
    text = "\n".join(line for line in lines if line)
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, color=INK, parse_math=False)


def save_png(path: Path, figure: Figure) -> Path:
    """The figure as a PNG that is there whole or not at all, the same bytes every time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    with whole(path) as part:
        put(part, [image.getvalue()])
    return path

"""The style of all plots, and how figures are written to files.

Colours are from a palette that colour-blind people can tell apart (Okabe and Ito 2008).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from heedful.atomic_io import atomic_path, write_synced

if TYPE_CHECKING:
    from matplotlib.axes._base import _AxesBase
    from matplotlib.figure import Figure

BLUE, ORANGE, SKY = "#0072B2", "#D55E00", "#56B4E9"
GREY, PALE, INK = "#6B6B6B", "#E4E4E4", "#222222"
DPI = 110  # pixels per inch of a PNG
FORMATS = {  # suffix -> metadata that is left out of such files, because it depends on the time or on versions
    ".png": ("Software",),
    ".svg": ("Date", "Creator"),
    ".pdf": ("CreationDate", "Creator", "Producer"),
}
MAX_VECTOR_POINTS = 2000  # maximum points of a scatter plot that is drawn as vectors in an SVG; others are rasterized


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; `width` and `height` are in inches."""
    from matplotlib.figure import Figure

    from heedful.runs.plots.layout import RoundedLayout

    return Figure(figsize=(width, height), dpi=DPI, layout=RoundedLayout(), facecolor="white")


def style_axes(axes: _AxesBase, *, grid: Literal["x", "y", "both", ""] = "") -> None:
    """Draw thin axes, and grid lines behind the data for the axis `grid`, or no grid lines for ""."""
    axes.tick_params(labelsize=8, color=GREY, labelcolor=INK, which="both")
    axes.set_axisbelow(True)
    for side in axes.spines:
        axes.spines[side].set_color(PALE)
    if grid:
        axes.grid(axis=grid, color=PALE, lw=0.7)


def set_title(figure: Figure, *lines: str) -> None:
    """Put lines of text above the figure, aligned to the left. Empty lines are left out."""
    text = "\n".join(line for line in lines if line)
    figure.suptitle(text, x=0.01, ha="left", fontsize=10, color=INK, parse_math=False)


def save_plot(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG and as SVG, atomically. Equal figures have equal bytes.

    Args:
        path: Path of the PNG file. The SVG file is beside it, with the suffix .svg.
        figure: The figure.

    Returns:
        `path`.
    """
    write_figure(path.with_suffix(".svg"), figure)
    write_figure(path, figure)
    return path


def write_figure(path: Path, figure: Figure, *, scale: float = 1.0) -> None:
    """Write a figure in the format of its suffix, one of `FORMATS`.

    Args:
        path: The file.
        figure: The figure.
        scale: Factor by which width and height of a PNG in pixels are multiplied.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "heedful"}):
        metadata = dict.fromkeys(FORMATS[path.suffix])
        figure.savefig(image, format=path.suffix[1:], metadata=metadata, dpi=scale * DPI)
    with atomic_path(path) as temporary:
        write_synced(temporary, [image.getvalue()])

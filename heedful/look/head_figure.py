"""The attention of one layer as a figure for papers and slides: lines from each token to those it attends to."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.errors import RequestError
from heedful.look.head_patterns import telling_heads
from heedful.look.inspection import Inspection
from heedful.look.model_title import model_title
from heedful.model.trace import check_numbers
from heedful.runs.plots.labels import BOX, drawable_labels
from heedful.runs.plots.style import FORMATS, GREY, INK, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1987f7", "#f92501", "#600b37", "#9f7eac", "#0301b9", "#d26968", "#4d0c6c", "#8d0214")  # as in look.css
FAINT = 0.03  # weights below are not drawn
MAX_LINES = 3000  # the strongest ones are drawn
WIDTH = 5.2  # inches
ROW = 0.24  # inches of a token
MAX_HEIGHT = 60.0  # inches of all tokens
MAX_NAME = 24  # characters of a token
MAX_TEXT = 300  # characters of the text in the caption
COLUMNS = 6  # of the legend
SCALE = (0.05, 0.2, 0.5, 1.0)  # weights in the legend
PNG_SCALE = 2.0


def write_head_figure(
    inspection: Inspection, path: Path, *, part: str = "", layer: int | None = None, heads: Sequence[int] = ()
) -> None:
    """Write the attention of heads of one layer as SVG, PNG (at 2x) or PDF.

    Args:
        inspection: The model and the text.
        path: The file; its suffix is the format.
        part: A part of `inspection.views`; "": that of the head, or the first.
        layer: From 0; None: that of the most telling head.
        heads: From 0; none: the most telling head of the layer, or head 0.

    Raises:
        RequestError: If the suffix is no known format, or there is no such part, layer or head.
    """
    if path.suffix not in FORMATS:
        raise RequestError(f"{path.name} ends in {path.suffix!r}: use one of {', '.join(FORMATS)}")
    chosen = choose_heads(inspection, part, layer, heads)
    write_figure(path, draw_heads(inspection, *chosen), scale=PNG_SCALE)


def choose_heads(
    inspection: Inspection, part: str, layer: int | None, heads: Sequence[int]
) -> tuple[str, int, tuple[int, ...]]:
    """Return part, layer and heads; what is not given is that of the most telling head that fits the rest."""
    named = [
        named_head
        for named_head in telling_heads(inspection)
        if part in ("", named_head["part"])
        and layer in (None, named_head["layer"])
        and (not heads or named_head["head"] in heads)
    ]
    part = part or (named[0]["part"] if named else inspection.views[0].part)
    view = inspection.view(part)
    layer = (named[0]["layer"] if named else 0) if layer is None else layer
    check_numbers("layers", [layer], view.layers)
    found_heads = tuple(heads) or ((named[0]["head"],) if named else (0,))
    check_numbers("heads", found_heads, view.heads)
    return part, layer, found_heads


def draw_heads(inspection: Inspection, part: str, layer: int, heads: Sequence[int]) -> Figure:
    """Draw lines between tokens, one colour for each head, the stronger the larger the weight.

    The figure has the names of the tokens, a scale of the lines, and a caption of model, layer, heads and text.
    """
    from matplotlib.collections import PathCollection
    from matplotlib.colors import to_rgba
    from matplotlib.path import Path as Curve

    view = inspection.view(part)
    weights = inspection.weights(part, layer, heads).float()
    sides = [[token["text"] for token in inspection.sides[side]] for side in (view.rows, view.keys)]
    longest = max(map(len, sides))
    step = min(ROW, MAX_HEIGHT / longest)
    caption = _caption(inspection, part, layer, heads)
    rows = -(-(len(heads) + len(SCALE)) // COLUMNS)  # of the legend
    below = 0.12 + 0.2 * rows + 0.16 * len(caption)
    figure = new_figure(WIDTH, longest * step + below)
    axes = figure.subplots()
    axes.set_axis_off()
    lines = [
        (float(weights[number, row, key]), number, row, key)
        for number, row, key in (weights >= FAINT).nonzero().tolist()
    ]
    lines = sorted(lines)[-MAX_LINES:]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    curves = [Curve([(0, row), (0.4, row), (0.6, key), (1, key)], codes) for _, _, row, key in lines]
    colours = [to_rgba(COLOURS[number % len(COLOURS)], _opacity(weight)) for weight, number, _, _ in lines]
    dashes = ["--" if _is_dashed(number) else "-" for _, number, _, _ in lines]
    axes.add_collection(
        PathCollection(curves, facecolors="none", edgecolors=colours, linestyles=dashes, linewidths=1.3)
    )
    for side, (names, x) in enumerate(zip(sides, (-0.02, 1.02), strict=True)):
        _name_tokens(axes, names, x, "left" if side else "right", step)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(longest - 0.5, -0.5)
    _scale(figure, heads, view.names, 0.1 + 0.16 * len(caption))
    text, height = "\n".join(caption), figure.get_figheight()
    characters = sorted(set(text) - {"\n"})
    labels = drawable_labels(characters)
    boxes = {ord(character): BOX for character, name in zip(characters, labels.names, strict=True) if BOX in name}
    style: dict[str, Any] = {"color": GREY, "va": "bottom", "parse_math": False, "fontfamily": list(labels.fonts)}
    figure.text(0.02, 0.08 / height, text.translate(boxes), fontsize=8, **style)
    if (engine := figure.get_layout_engine()) is not None:
        engine.set(rect=(0, below / height, 1, 1 - below / height))  # type: ignore[call-arg]
    return figure


def _name_tokens(axes: Axes, names: Sequence[str], x: float, side: str, step: float) -> None:
    short = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in names]
    different = list(dict.fromkeys(short))
    labels = drawable_labels(different)
    label_of = dict(zip(different, labels.names, strict=True))
    every = max(1, round(0.11 / step))  # a name needs 0.11 inches
    style: dict[str, Any] = {"ha": side, "va": "center", "color": INK, "parse_math": False}
    for place in range(0, len(names), every):
        size = min(9.0, 72 * step * every * 0.8)
        axes.text(x, place, label_of[short[place]], fontsize=size, fontfamily=list(labels.fonts), **style)


def _scale(figure: Figure, heads: Sequence[int], names: Sequence[str], bottom: float) -> None:
    """Add the colours of the heads, and lines of known weights; `bottom` is in inches."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[number % len(COLOURS)], ls="--" if _is_dashed(number) else "-", lw=2)
        for number in range(len(heads))
    ]
    labels = [names[head] if names else f"head {head}" for head in heads]
    handles += [Line2D([], [], color=INK, alpha=_opacity(weight), lw=1.3) for weight in SCALE]
    labels += [f"{100 * weight:.0f} %" for weight in SCALE]
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, bottom / figure.get_figheight()), ncols=COLUMNS,
        fontsize=8, frameon=False, handlelength=1.6, columnspacing=1.0, borderpad=0.2,
    ).set_in_layout(False)  # fmt: skip


def _caption(inspection: Inspection, part: str, layer: int, heads: Sequence[int]) -> list[str]:
    view = inspection.view(part)
    where = [model_title(inspection.name)]
    where += [part] if len(inspection.views) > 1 else []
    where += [f"layer {layer}"] if view.layers > 1 else []
    if view.heads > 1:
        where.append(f"{'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))}")
    item = inspection.item
    text = " | ".join(item) if isinstance(item, tuple) else item
    text = "".join(character if character.isprintable() else " " for character in text)
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
    return [" · ".join(where), *textwrap.wrap(text, 84)]


def _opacity(weight: float) -> float:
    return min(1.0, 0.06 + 0.94 * weight)


def _is_dashed(number: int) -> bool:
    """Whether a head is dashed, since an earlier one has its colour."""
    return number % (2 * len(COLOURS)) >= len(COLOURS)

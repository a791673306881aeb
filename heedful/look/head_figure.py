"""The attention of one layer as a figure for papers and slides: lines between tokens, made by `look --figure`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from heedful.errors import RequestError
from heedful.look.head_patterns import telling_heads
from heedful.look.inspection import Inspection
from heedful.look.model_title import model_title
from heedful.model.trace import check_indices
from heedful.runs.plots.labels import BOX, drawable_labels
from heedful.runs.plots.style import FORMATS, GREY, INK, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#1987f7", "#f92501", "#600b37", "#9f7eac", "#0301b9", "#d26968", "#4d0c6c", "#8d0214")  # as in look.css
MIN_WEIGHT = 0.03  # smallest attention weight that is drawn
MAX_LINES = 3000  # maximum number of weights to draw, the largest ones
WIDTH = 5.2  # width of the figure, in inches
TOKEN_HEIGHT = 0.24  # inches
MAX_TOKENS_HEIGHT = 60.0  # inches of all tokens; with more tokens each one is lower
MIN_NAME_HEIGHT = 0.11  # inches
MAX_NAME_CHARS = 24  # characters after which the name of a token is cut
MAX_TEXT_CHARS = 300  # characters after which the text in the caption is cut
CAPTION_CHARS = 84  # characters in a line of the caption
CAPTION_LINE = 0.16  # height of a line of the caption, in inches
LEGEND_COLUMNS = 6
LEGEND_LINE = 0.2  # height of a line of the legend, in inches
LEGEND_WEIGHTS = (0.05, 0.2, 0.5, 1.0)
PNG_SCALE = 2.0


def write_head_figure(
    inspection: Inspection, path: Path, *, part: str = "", layer: int | None = None, heads: Sequence[int] = ()
) -> None:
    """Write the attention of heads of one layer as SVG, PNG (at 2x) or PDF.

    Args:
        inspection: The model and the text.
        path: The file; its suffix is the format.
        part: A part of `inspection.views`. If "", `choose_heads` chooses one.
        layer: Index of the layer, from 0. If None, `choose_heads` chooses one.
        heads: Indices of the heads, from 0. If (), `choose_heads` chooses one.

    Raises:
        RequestError: If the suffix is no known format, or there is no such part.
        HeedfulError: If there is no such layer or head.
    """
    if path.suffix not in FORMATS:
        raise RequestError(f"{path.name} ends in {path.suffix!r}: use one of {', '.join(FORMATS)}")
    part, layer, heads = choose_heads(inspection, part, layer, heads)
    write_figure(path, draw_heads(inspection, part, layer, heads), scale=PNG_SCALE)


def choose_heads(
    inspection: Inspection, part: str, layer: int | None, heads: Sequence[int]
) -> tuple[str, int, tuple[int, ...]]:
    """Return part, layer and heads; arguments that are "", None or () are filled in.

    Their values are those of the first of `telling_heads` that matches the other arguments. If no head matches, they
    are the first part, layer 0 and head 0.
    """
    matching = [
        head
        for head in telling_heads(inspection)
        if part in ("", head["part"]) and layer in (None, head["layer"]) and (not heads or head["head"] in heads)
    ]
    default = (matching[0]["part"], matching[0]["layer"], matching[0]["head"]) if matching else ("", 0, 0)
    part = part or default[0] or inspection.views[0].part
    view = inspection.view(part)
    layer = default[1] if layer is None else layer
    check_indices("layers", [layer], view.layers)
    heads = tuple(heads) or (default[2],)
    check_indices("heads", heads, view.heads)
    return part, layer, heads


def draw_heads(inspection: Inspection, part: str, layer: int, heads: Sequence[int]) -> Figure:
    """Draw a line from each token to the tokens it attends to: one colour for each head, opaque for large weights.

    Below are a legend and a caption with model, layer, heads and text.
    """
    view = inspection.view(part)
    weights = inspection.weights(part, layer, heads).float()
    row_names, key_names = ([token["text"] for token in inspection.sides[side]] for side in (view.rows, view.keys))
    num_positions = max(len(row_names), len(key_names))
    token_height = min(TOKEN_HEIGHT, MAX_TOKENS_HEIGHT / num_positions)
    caption = _caption(inspection, part, layer, heads)
    legend_lines = ceil((len(heads) + len(LEGEND_WEIGHTS)) / LEGEND_COLUMNS)
    bottom = 0.12 + LEGEND_LINE * legend_lines + CAPTION_LINE * len(caption)  # inches below the tokens
    height = num_positions * token_height + bottom
    figure = new_figure(WIDTH, height)
    axes = figure.subplots()
    axes.set_axis_off()
    _draw_lines(axes, weights)
    _draw_token_names(axes, row_names, -0.02, "right", token_height)
    _draw_token_names(axes, key_names, 1.02, "left", token_height)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(num_positions - 0.5, -0.5)
    _draw_legend(figure, heads, view.names, 0.1 + CAPTION_LINE * len(caption))
    _draw_caption(figure, "\n".join(caption))
    if (engine := figure.get_layout_engine()) is not None:
        engine.set(rect=(0, bottom / height, 1, 1 - bottom / height))  # type: ignore[call-arg]
    return figure


def _draw_lines(axes: Axes, weights: Float[Tensor, "heads rows keys"]) -> None:
    """Draw a curve for each of the largest weights; larger weights are above smaller ones."""
    from matplotlib.collections import PathCollection
    from matplotlib.colors import to_rgba
    from matplotlib.path import Path as Curve

    lines = [
        (float(weights[index, row, key]), index, row, key)
        for index, row, key in (weights >= MIN_WEIGHT).nonzero().tolist()
    ]
    lines = sorted(lines)[-MAX_LINES:]
    codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    curves = [Curve([(0, row), (0.4, row), (0.6, key), (1, key)], codes) for _, _, row, key in lines]
    colours = [to_rgba(COLOURS[index % len(COLOURS)], _opacity(weight)) for weight, index, _, _ in lines]
    dashes = ["--" if _is_dashed(index) else "-" for _, index, _, _ in lines]
    axes.add_collection(
        PathCollection(curves, facecolors="none", edgecolors=colours, linestyles=dashes, linewidths=1.3)
    )


def _draw_token_names(axes: Axes, names: Sequence[str], x: float, alignment: str, token_height: float) -> None:
    """Draw the names of tokens below each other at `x`, or only every n-th name if there is too little space."""
    shortened = [name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…" for name in names]
    unique = list(dict.fromkeys(shortened))
    labels = drawable_labels(unique)
    label_of = dict(zip(unique, labels.names, strict=True))
    step = max(1, round(MIN_NAME_HEIGHT / token_height))
    font_size = min(9.0, 72 * token_height * step * 0.8)
    style: dict[str, Any] = {"ha": alignment, "va": "center", "color": INK, "parse_math": False}
    for position in range(0, len(names), step):
        label = label_of[shortened[position]]
        axes.text(x, position, label, fontsize=font_size, fontfamily=list(labels.fonts), **style)


def _draw_legend(figure: Figure, heads: Sequence[int], names: Sequence[str], bottom: float) -> None:
    """Draw a legend of the heads' colours and of lines of some weights.

    Args:
        figure: The figure.
        heads: Indices of the heads.
        names: Names of all heads of the part, or () if heads have no names.
        bottom: Distance of the legend from the bottom of the figure, in inches.
    """
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLOURS[index % len(COLOURS)], ls="--" if _is_dashed(index) else "-", lw=2)
        for index in range(len(heads))
    ]
    labels = [names[head] if names else f"head {head}" for head in heads]
    handles += [Line2D([], [], color=INK, alpha=_opacity(weight), lw=1.3) for weight in LEGEND_WEIGHTS]
    labels += [f"{100 * weight:.0f} %" for weight in LEGEND_WEIGHTS]
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, bottom / figure.get_figheight()), ncols=LEGEND_COLUMNS,
        fontsize=8, frameon=False, handlelength=1.6, columnspacing=1.0, borderpad=0.2,
    ).set_in_layout(False)  # fmt: skip


def _draw_caption(figure: Figure, text: str) -> None:
    """Draw a text at the bottom of the figure, with a box for each character that no font has."""
    characters = sorted(set(text) - {"\n"})
    labels = drawable_labels(characters)
    boxes = {ord(character): BOX for character, name in zip(characters, labels.names, strict=True) if BOX in name}
    style: dict[str, Any] = {"color": GREY, "va": "bottom", "parse_math": False, "fontfamily": list(labels.fonts)}
    figure.text(0.02, 0.08 / figure.get_figheight(), text.translate(boxes), fontsize=8, **style)


def _caption(inspection: Inspection, part: str, layer: int, heads: Sequence[int]) -> list[str]:
    """Return the lines of the caption: model, part, layer and heads, then the text."""
    view = inspection.view(part)
    title = [model_title(inspection.name)]
    if len(inspection.views) > 1:
        title.append(part)
    if view.layers > 1:
        title.append(f"layer {layer}")
    if view.heads > 1:
        title.append(f"{'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))}")
    item = inspection.item
    text = " | ".join(item) if isinstance(item, tuple) else item
    text = "".join(character if character.isprintable() else " " for character in text)
    text = text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"
    return [" · ".join(title), *textwrap.wrap(text, CAPTION_CHARS)]


def _opacity(weight: float) -> float:
    """Return the opacity of the line of a weight, from 0 to 1, as `strength` of draw.js."""
    return min(1.0, sqrt(weight))


def _is_dashed(index: int) -> bool:
    """Return whether the lines of a head are dashed, because an earlier head has the same colour.

    Args:
        index: Index of the head among the heads of the figure.
    """
    return index % (2 * len(COLOURS)) >= len(COLOURS)

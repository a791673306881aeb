"""Alignments: the attention of a decoder to the source text, for each token that it generated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from heedful.checkpoint import RUN_MODEL, ModelBundle, load
from heedful.model.trace import Trace
from heedful.packed import Packed
from heedful.runs.plots.labels import drawable_labels
from heedful.runs.plots.style import new_figure, set_title, style_axes
from heedful.runs.results import read_predictions
from heedful.tasks.generation import sequence_ends
from heedful.tokenizer import Encoding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4  # alignments of a plot
LONGEST = 28  # tokens of a source or target text that is shown
CANDIDATES = 2000  # predictions among which short ones are searched
SPACE = "\u2581"  # shown for a token of white space


class Alignment(NamedTuple):
    """Attention weights of each target token over the source tokens; a row sums to 1 or less."""

    read: tuple[str, ...]
    written: tuple[str, ...]
    weights: Float[np.ndarray, "written read"]


def alignment(loaded: ModelBundle, text: str, written: str) -> Alignment | None:
    """The alignment in the decoder's last layer, as the mean over its heads; None if the model has no cross-attention.

    The target is tokenized again; the row of a token is the one from which it was predicted.
    """
    tokenizer, model = loaded.tokenizer, loaded.config.model
    if tokenizer is None or not loaded.needs_target or "weights" not in loaded.model.traceable:
        return None
    mark = sequence_ends(model, tokenizer)
    assert mark.start is not None
    source, target = tokenizer.encode_batch([text, written])
    inner = [id for id, special in zip(target.ids, target.special, strict=True) if not special]
    layer = 0 if model.decoder is None else model.decoder.layers - 1
    trace = Trace(parts=("cross",), layers=[layer])
    with torch.inference_mode():
        loaded.hidden_states(Packed.of([source.ids], [source.types]), Packed.of([[mark.start, *inner]]), trace=trace)
    looked = trace.attention["cross", layer, 0].weights
    assert looked is not None
    names = [name for name, special in zip(_names(target, written), target.special, strict=True) if not special]
    weights = looked.float().mean(0).numpy()
    return Alignment(_names(source, text, loaded), (*names, tokenizer.name(mark.stop)), weights)


def _names(encoded: Encoding, text: str, loaded: ModelBundle | None = None) -> tuple[str, ...]:
    """The characters of each token, or SPACE; the names of special tokens."""
    return tuple(
        (loaded.tokenizer.name(id) if loaded is not None and loaded.tokenizer is not None else "")
        if special
        else text[start:stop].strip() or SPACE
        for id, special, (start, stop) in zip(encoded.ids, encoded.special, encoded.offsets, strict=True)
    )


def plot_alignments(folder: Path, split: str) -> Figure | None:
    """Plot the alignments of the first few short predictions of a split; None without any."""
    if not (folder / RUN_MODEL / "config.json").is_file():
        return None
    lines = islice(read_predictions(folder, split), CANDIDATES)
    predictions = sorted(
        (line["id"], line["input"], line["prediction"]) for line in lines if isinstance(line["prediction"], str)
    )
    loaded = load(folder / RUN_MODEL)
    if loaded.tokenizer is None or not loaded.needs_target:
        return None
    chosen: list[Alignment] = []
    most = (
        LONGEST if loaded.max_length is None else min(LONGEST, loaded.max_length - 1)
    )  # one more token begins the target
    for _, text, prediction in predictions:
        if prediction and max(map(len, loaded.tokenizer.encode_batch([text, prediction]))) <= most:
            plotted = alignment(loaded, text, prediction)
            if plotted is None:
                return None
            chosen.append(plotted)
        if len(chosen) == SHOWN:
            break
    about = "rows: generated tokens; columns: source tokens; dark: attended to; last layer, mean of its heads"
    return draw_alignments(chosen, f"Attention to the source on {split}", about) if chosen else None


def draw_alignments(alignments: Sequence[Alignment], *lines: str) -> Figure:
    """Plot each alignment as a grid of weights, in two columns."""
    columns = min(2, len(alignments))
    rows = -(-len(alignments) // columns)
    size = 0.22 * max(max(len(aligned.read), len(aligned.written)) for aligned in alignments)
    figure = new_figure(columns * (size + 1.5), rows * (size + 1.3) + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, aligned in zip(grid, alignments, strict=False):
        axes.imshow(aligned.weights, cmap="Blues", vmin=0, vmax=1, aspect="equal")
        style_axes(axes)
        for names, put in ((aligned.read, axes.set_xticks), (aligned.written, axes.set_yticks)):
            different = list(dict.fromkeys(names))
            shown = drawable_labels(different)
            as_shown = dict(zip(different, shown.names, strict=True))
            text: dict[str, Any] = {"parse_math": False, "fontfamily": list(shown.fonts), "fontsize": 7}
            turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if names is aligned.read else {}
            put(range(len(names)), [as_shown[name] for name in names], **text, **turned)
    for axes in grid[len(alignments) :]:
        axes.set_axis_off()
    set_title(figure, *lines)
    return figure

"""Plots of alignments: the attention of a decoder to the source text, for each token that it generated."""

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

MAX_ALIGNMENTS = 4  # maximum alignments in a plot
MAX_TOKENS = 28  # maximum tokens of a source or target text in a plot
MAX_PREDICTIONS = 2000  # predictions among which short ones are searched
SPACE = "\u2581"  # name of a token of white space


class Alignment(NamedTuple):
    """Attention weights of each target token over the source tokens."""

    source: tuple[str, ...]  # names of the tokens
    target: tuple[str, ...]  # names of the tokens, including the end token
    weights: Float[np.ndarray, "target source"]  # each row sums to 1 or less


def alignment(loaded: ModelBundle, source_text: str, target_text: str) -> Alignment | None:
    """Return the cross-attention in the decoder's last layer, as the mean over heads.

    The target is tokenized again. The row of a token is the attention at the position that predicts the token.

    Returns:
        The alignment, or None if the model has no cross-attention or records no weights.
    """
    tokenizer, model = loaded.tokenizer, loaded.config.model
    if tokenizer is None or not loaded.needs_target or "weights" not in loaded.model.traceable:
        return None
    ends = sequence_ends(model, tokenizer)
    assert ends.start is not None
    source, target = tokenizer.encode_batch([source_text, target_text])
    target_ids = [id for id, is_special in zip(target.ids, target.special, strict=True) if not is_special]
    layer = 0 if model.decoder is None else model.decoder.layers - 1
    trace = Trace(parts=("cross",), layers=[layer])
    with torch.inference_mode():
        source_batch = Packed.of([source.ids], [source.types])
        loaded.hidden_states(source_batch, Packed.of([[ends.start, *target_ids]]), trace=trace)
    head_weights = trace.attention["cross", layer, 0].weights  # [heads, target, source]
    assert head_weights is not None
    target_names = [
        name
        for name, is_special in zip(_token_names(target, target_text), target.special, strict=True)
        if not is_special
    ]
    return Alignment(
        source=_token_names(source, source_text, loaded),
        target=(*target_names, tokenizer.name(ends.stop)),
        weights=head_weights.float().mean(0).numpy(),
    )


def _token_names(encoding: Encoding, text: str, loaded: ModelBundle | None = None) -> tuple[str, ...]:
    """Return the names of tokens: their characters, SPACE, or for special tokens the name in the vocabulary."""
    names = []
    for id, is_special, (start, stop) in zip(encoding.ids, encoding.special, encoding.offsets, strict=True):
        if not is_special:
            names.append(text[start:stop].strip() or SPACE)
        elif loaded is not None and loaded.tokenizer is not None:
            names.append(loaded.tokenizer.name(id))
        else:
            names.append("")
    return tuple(names)


def plot_alignments(folder: Path, split: str) -> Figure | None:
    """Plot the alignments of the first few short predictions of a split.

    Returns:
        The figure, or None if the run has no model with cross-attention or no prediction is short enough.
    """
    if not (folder / RUN_MODEL / "config.json").is_file():
        return None
    lines = islice(read_predictions(folder, split), MAX_PREDICTIONS)
    predictions = sorted(
        (line["id"], line["input"], line["prediction"]) for line in lines if isinstance(line["prediction"], str)
    )
    loaded = load(folder / RUN_MODEL)
    if loaded.tokenizer is None or not loaded.needs_target:
        return None
    alignments: list[Alignment] = []
    max_tokens = MAX_TOKENS
    if loaded.max_length is not None:
        max_tokens = min(MAX_TOKENS, loaded.max_length - 1)  # the target begins with one more token
    for _, text, prediction in predictions:
        if prediction and max(map(len, loaded.tokenizer.encode_batch([text, prediction]))) <= max_tokens:
            aligned = alignment(loaded, text, prediction)
            if aligned is None:
                return None
            alignments.append(aligned)
        if len(alignments) == MAX_ALIGNMENTS:
            break
    if not alignments:
        return None
    legend = "rows: generated tokens; columns: source tokens; dark: attended to; last layer, mean of its heads"
    return draw_alignments(alignments, f"Attention to the source on {split}", legend)


def draw_alignments(alignments: Sequence[Alignment], *title: str) -> Figure:
    """Plot each alignment as a grid of weights, in two columns, with the lines `title` above the figure."""
    columns = min(2, len(alignments))
    rows = -(-len(alignments) // columns)
    size = 0.22 * max(max(len(aligned.source), len(aligned.target)) for aligned in alignments)
    figure = new_figure(columns * (size + 1.5), rows * (size + 1.3) + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, aligned in zip(grid, alignments, strict=False):
        axes.imshow(aligned.weights, cmap="Blues", vmin=0, vmax=1, aspect="equal")
        style_axes(axes)
        for names, set_ticks in ((aligned.source, axes.set_xticks), (aligned.target, axes.set_yticks)):
            unique_names = list(dict.fromkeys(names))
            labels = drawable_labels(unique_names)
            label_of = dict(zip(unique_names, labels.names, strict=True))
            text: dict[str, Any] = {"parse_math": False, "fontfamily": list(labels.fonts), "fontsize": 7}
            if names is aligned.source:
                text |= {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
            set_ticks(range(len(names)), [label_of[name] for name in names], **text)
    for axes in grid[len(alignments) :]:
        axes.set_axis_off()
    set_title(figure, *title)
    return figure

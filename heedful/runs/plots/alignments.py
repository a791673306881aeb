"""Plots of alignments: how much a decoder attended to each token of the source text for each generated token.

`runs.plots.figures` draws them for runs of seq2seq models.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import compress
from operator import itemgetter
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
from heedful.runs.results import JsonObject, read_predictions
from heedful.tasks.generation import sequence_ends
from heedful.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_ALIGNMENTS = 4  # maximum alignments in a plot
MAX_TOKENS = 28  # maximum tokens of a source or target text in a plot
MAX_PREDICTIONS = 2000  # maximum predictions that are searched for texts of at most MAX_TOKENS tokens
SPACE = "\u2581"  # label of a token that is white space


class Alignment(NamedTuple):
    """Attention weights of each target token over the source tokens."""

    source: tuple[str, ...]  # label of each source token
    target: tuple[str, ...]  # label of each target token, including the end token
    weights: Float[np.ndarray, "target source"]  # each row sums to 1, or to less if a Gaussian scales the weights


def compute_alignment(loaded: ModelBundle, source_text: str, target_text: str) -> Alignment | None:
    """Compute the cross-attention in the decoder's last layer, as the mean over heads.

    The target text is tokenized again and given to the decoder (teacher forcing). Row i of the weights is the attention
    at the position that predicts target token i.

    Args:
        loaded: The model, on the CPU.
        source_text: Text that the encoder reads.
        target_text: Text that the decoder generates.

    Returns:
        The alignment, or None if the model has no cross-attention or does not expose attention weights.
    """
    tokenizer, model = loaded.tokenizer, loaded.config.model
    if tokenizer is None or not loaded.needs_target or "weights" not in loaded.model.traceable:
        return None
    ends = sequence_ends(model, tokenizer)
    assert ends.start is not None
    source, target = tokenizer.encode_batch([source_text, target_text])
    is_text = [not is_special for is_special in target.special]
    layer = 0 if model.decoder is None else model.decoder.layers - 1
    trace = Trace(parts=("cross",), layers=[layer])
    with torch.inference_mode():
        source_batch = Packed.of([source.ids], [source.types])
        decoder_input = Packed.of([[ends.start, *compress(target.ids, is_text)]])
        loaded.hidden_states(source_batch, decoder_input, trace=trace)  # fills the trace
    sequence = 0  # index of the only sequence in the batch
    head_weights = trace.attention["cross", layer, sequence].weights  # [heads, target, source]
    assert head_weights is not None
    return Alignment(
        source=_token_labels(source, source_text, tokenizer),
        target=(*compress(_token_labels(target, target_text, tokenizer), is_text), tokenizer.name(ends.stop)),
        weights=head_weights.float().mean(0).numpy(),
    )


def _token_labels(encoding: Encoding, text: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a label for each token: its characters, SPACE if it is white space, or the name of a special token."""
    labels = []
    for id, is_special, (start, stop) in zip(encoding.ids, encoding.special, encoding.offsets, strict=True):
        if is_special:
            labels.append(tokenizer.name(id))
        else:
            labels.append(text[start:stop].strip() or SPACE)
    return tuple(labels)


def plot_run_alignments(folder: Path, split: str) -> Figure | None:
    """Plot the alignments of the first MAX_ALIGNMENTS examples of a split whose texts are short.

    Returns:
        The figure, or None if the run has no model with cross-attention or no example has short texts.
    """
    if not (folder / RUN_MODEL / "config.json").is_file():
        return None
    predictions = _first_predictions(folder, split)
    loaded = load(folder / RUN_MODEL)
    if loaded.tokenizer is None or not loaded.needs_target:
        return None
    alignments: list[Alignment] = []
    max_tokens = MAX_TOKENS
    if loaded.max_length is not None:
        max_tokens = min(MAX_TOKENS, loaded.max_length - 1)  # the decoder's input also has a start token
    for line in predictions:
        text, prediction = line["input"], line["prediction"]
        if prediction and max(map(len, loaded.tokenizer.encode_batch([text, prediction]))) <= max_tokens:
            alignment = compute_alignment(loaded, text, prediction)
            if alignment is None:
                return None
            alignments.append(alignment)
        if len(alignments) == MAX_ALIGNMENTS:
            break
    if not alignments:
        return None
    subtitle = "rows: generated tokens; columns: source tokens; dark: attended to; last layer, mean of its heads"
    return draw_alignments(alignments, f"Attention to the source on {split}", subtitle)


def _first_predictions(folder: Path, split: str) -> list[JsonObject]:
    """Return the predictions for the first MAX_PREDICTIONS examples of a split, in the order of the examples.

    The file is sorted by loss, so the whole file is read, but only MAX_PREDICTIONS predictions are in memory.
    """
    lines = (line for line in read_predictions(folder, split) if isinstance(line["prediction"], str))
    return heapq.nsmallest(MAX_PREDICTIONS, lines, key=itemgetter("id"))


def draw_alignments(alignments: Sequence[Alignment], *title_lines: str) -> Figure:
    """Draw each alignment as a grid of weights, in up to two columns, with a title above the figure."""
    columns = min(2, len(alignments))
    rows = math.ceil(len(alignments) / columns)
    size = 0.22 * max(len(labels) for alignment in alignments for labels in (alignment.source, alignment.target))
    figure = new_figure(columns * (size + 1.5), rows * (size + 1.3) + 0.6)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, alignment in zip(grid, alignments, strict=False):
        axes.imshow(alignment.weights, cmap="Blues", vmin=0, vmax=1, aspect="equal")
        style_axes(axes)
        _set_token_ticks(axes.set_xticks, alignment.source, rotation=60, ha="right", rotation_mode="anchor")
        _set_token_ticks(axes.set_yticks, alignment.target)
    for axes in grid[len(alignments) :]:
        axes.set_axis_off()
    set_title(figure, *title_lines)
    return figure


def _set_token_ticks(set_ticks: Callable[..., object], labels: Sequence[str], **style: Any) -> None:
    """Write the label of each token on an axis.

    Args:
        set_ticks: `Axes.set_xticks` or `Axes.set_yticks`.
        labels: Label of each token. Equal labels are written equally, although `drawable_labels` numbers repeats.
        style: More text properties of the ticks.
    """
    unique_labels = list(dict.fromkeys(labels))
    drawable = drawable_labels(unique_labels)
    drawable_by_label = dict(zip(unique_labels, drawable.names, strict=True))
    text_style = {"parse_math": False, "fontfamily": list(drawable.fonts), "fontsize": 7, **style}
    set_ticks(range(len(labels)), [drawable_by_label[label] for label in labels], **text_style)

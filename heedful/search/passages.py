"""Passages: parts of a long text that a model reads one at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from heedful.infer.bundle_engine import BundleEngine

OVERLAP = 8  # the last 1/OVERLAP of a passage begins the next one
Span = tuple[int, int]  # first character of a part of a text, and that after its last


class PassageSplitter:
    """Splits texts into passages of at most some tokens, which begin and end between words where they can."""

    def __init__(self, engine: BundleEngine, tokens: int) -> None:
        self._tokenizer = engine.tokenizer
        prompt = engine.prompt("document", "passage", "corpus")
        self.room = max(1, tokens - len(engine.tokenizer.encode(prompt)))  # special tokens and prompt are in each

    def split(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the passages of each text; a text without tokens is one passage."""
        offsets = [
            [span for span, segment in zip(encoded.offsets, encoded.segments, strict=True) if segment is not None]
            for encoded in self._tokenizer.encode_batch(list(texts))
        ]
        return [passage_spans(text, spans, self.room) for text, spans in zip(texts, offsets, strict=True)]


def passage_spans(text: str, tokens: Sequence[Span], room: int) -> list[Span]:
    """Return passages of at most `room` tokens that cover a text and overlap.

    >>> text = "one two three four five"
    >>> tokens = [(0, 3), (4, 7), (8, 13), (14, 18), (19, 23)]
    >>> [text[start:end] for start, end in passage_spans(text, tokens, 2)]
    ['one two', 'three four', 'five']
    >>> passage_spans(text, tokens, 5), passage_spans("", [], 5)
    ([(0, 23)], [(0, 0)])
    """
    if len(tokens) <= room:
        return [(0, len(text))]
    starts = [number for number, (start, _) in enumerate(tokens) if start == 0 or text[start - 1].isspace()]
    spans, first = [], 0
    while first + room < len(tokens):
        stop = _last(starts, first, first + room) or first + room
        spans.append((tokens[first][0], tokens[stop - 1][1]))
        overlap = (stop - first) // OVERLAP
        first = (_last(starts, first, stop - overlap) or stop - overlap) if overlap else stop
    spans.append((tokens[first][0], len(text)))
    return spans


def _last(starts: Sequence[int], after: int, until: int) -> int | None:
    """Return the last token in (after, until] that begins a word; None if no token does."""
    place = bisect_right(starts, until)
    return starts[place - 1] if place and starts[place - 1] > after else None

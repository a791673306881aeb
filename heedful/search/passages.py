"""Splitting of long texts into overlapping passages, which a search index encodes one by one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from heedful.infer.bundle_engine import BundleEngine

OVERLAP = 8  # the last 1/8 of a passage is repeated at the start of the next one
Span = tuple[int, int]  # start and end of a part of a text, in characters; the end is exclusive


class PassageSplitter:
    """Splits texts into passages with a maximum number of tokens, between words if possible."""

    def __init__(self, engine: BundleEngine, tokens: int) -> None:
        """Take the tokenizer of an engine.

        Args:
            engine: The engine.
            tokens: Maximum tokens of a passage, with special tokens and the prompt for documents.
        """
        self._tokenizer = engine.tokenizer
        prompt = engine.prompt("document", "passage", "corpus")
        self.max_text_tokens = max(1, tokens - len(engine.tokenizer.encode(prompt)))

    def split(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the passages of each text; a text without tokens is one passage."""
        offsets = [
            [span for span, segment in zip(encoded.offsets, encoded.segments, strict=True) if segment is not None]
            for encoded in self._tokenizer.encode_batch(list(texts))
        ]
        return [passage_spans(text, spans, self.max_text_tokens) for text, spans in zip(texts, offsets, strict=True)]


def passage_spans(text: str, tokens: Sequence[Span], max_tokens: int) -> list[Span]:
    """Return overlapping passages that cover a text, with at most `max_tokens` tokens each.

    Args:
        text: The text.
        tokens: Span of each token.
        max_tokens: Maximum tokens of a passage.

    >>> text = "one two three four five"
    >>> tokens = [(0, 3), (4, 7), (8, 13), (14, 18), (19, 23)]
    >>> [text[start:end] for start, end in passage_spans(text, tokens, 2)]
    ['one two', 'three four', 'five']
    >>> passage_spans(text, tokens, 5), passage_spans("", [], 5)
    ([(0, 23)], [(0, 0)])
    """
    if len(tokens) <= max_tokens:
        return [(0, len(text))]
    word_starts = [index for index, (start, _) in enumerate(tokens) if start == 0 or text[start - 1].isspace()]
    spans = []
    first = 0  # index of the first token of the passage
    while first + max_tokens < len(tokens):
        stop = _last_in(word_starts, first, first + max_tokens) or first + max_tokens
        spans.append((tokens[first][0], tokens[stop - 1][1]))
        next_first = stop
        if overlap := (stop - first) // OVERLAP:
            next_first = _last_in(word_starts, first, stop - overlap) or stop - overlap
        first = next_first
    spans.append((tokens[first][0], len(text)))
    return spans


def _last_in(indices: Sequence[int], after: int, until: int) -> int | None:
    """Return the largest of ascending indices in the interval (after, until], or None if the interval has none."""
    count = bisect_right(indices, until)
    return indices[count - 1] if count and indices[count - 1] > after else None

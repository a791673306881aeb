"""Find the answer to a question in a context: the span whose start and end score most."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from heedful.tasks.base import Answer, Answerer, Place, Setting, Window, best_places, named_texts, read_pair, trimmed
from heedful.tokenizer import Encoded, Item, Tokenizer

LONGEST = 30  # tokens of an answer


def items(given: Any) -> list[Item] | None:
    """{"question": ..., "context": ...}."""
    return read_pair(named_texts(given, "question", "context"))


def places(windows: list[Encoded], tokenizer: Tokenizer) -> list[Place]:
    """All tokens."""
    return [(number, place) for number, window in enumerate(windows) for place in range(len(window))]


def answer(given: Any, windows: list[Window], setting: Setting) -> Answer:
    """{"answer", "start", "end", "score", "no_answer_score"}: characters of the context, and sums of two scores.

    A span starts at a token of the context in the window where that token sees most around it, ends at or after it,
    and has at most 30 tokens. The no-answer score is that of the first token, the least over the windows: where the
    model was trained on questions without answers, no answer is meant when it exceeds the score by a threshold.
    """
    context: str = given["context"]
    best: tuple[float, Window, int, int] | None = None
    starts: dict[int, list[int]] = {}
    for number, place in best_places([window.encoded for window in windows], segment=1):
        starts.setdefault(number, []).append(place)
    for number, mine in starts.items():
        window = windows[number]
        last = max(place for place, segment in enumerate(window.encoded.segments) if segment == 1)
        start, stop, score = best_span(window.scores, mine, last)
        if best is None or score > best[0]:
            best = score, window, start, stop
    found: Answer = {"answer": "", "start": 0, "end": 0, "score": None}
    if best is not None:
        score, window, start, stop = best
        offsets = window.encoded.offsets
        first, end = trimmed(context, offsets[start][0], offsets[stop][1])
        found = {"answer": context[first:end], "start": first, "end": end, "score": score}
    nothing = min(float(window.scores[0].sum()) for window in windows)
    return found | {"no_answer_score": nothing, "windows": len(windows)}


def best_span(scores: Tensor, starts: list[int], last: int) -> tuple[int, int, float]:
    """The start among `starts` and the end, at most `last`, with the largest sum of scores[:, 0] and scores[:, 1]."""
    ends = F.pad(scores[: last + 1, 1], (0, LONGEST - 1), value=float("-inf")).unfold(0, LONGEST, 1)
    sums = scores[starts, :1] + ends[starts]  # [starts, lengths]
    index, length = divmod(int(sums.argmax()), LONGEST)
    return starts[index], starts[index] + length, float(sums[index, length])


EXTRACT = Answerer(
    expects='questions with their contexts, like [{"question": "Who?", "context": "Ada wrote it."}]',
    items=items,
    places=places,
    answer=answer,
)

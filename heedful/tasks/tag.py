"""Label every word of a text, and join labelled words into entities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from heedful.model.config import TokenClasses
from heedful.tasks.base import Answer, Answerer, Place, Setting, Window, best_places, trimmed
from heedful.tokenizer import Encoded, Item, Tokenizer, Words

BEGIN, INSIDE = "BSU", "IEL"  # IOB2, BIOES and BILOU: B-x, S-x and U-x begin an entity; I-x, E-x and L-x continue it
OPEN = "BI"  # the next word may continue the entity; S, E, U and L end it
OUTSIDE = "O"


def items(given: Any) -> list[Item] | None:
    """A text, or a list of words."""
    if isinstance(given, list) and all(isinstance(word, str) for word in given):
        return [Words(given)]
    return [given] if isinstance(given, str | Words) else None


def places(windows: list[Encoded], tokenizer: Tokenizer) -> list[Place]:
    """The first piece of each word, in the window where it sees most around it."""
    first: dict[int | None, Place] = {}
    for number, place in best_places(windows):
        first.setdefault(windows[number].words[place], (number, place))
    return list(first.values())


def answer(given: Any, windows: list[Window], setting: Setting) -> Answer:
    """{"words": [{"word", "label", "probability", "start", "end"}], "entities": [...]}, start and end in characters.

    A word's first piece speaks for it. Given words count as joined by single spaces. A word of which no piece is left
    (a control character, say) is outside, with probability None.
    """
    head = setting.head
    assert isinstance(head, TokenClasses)
    text, spans = _text_and_spans(given, [window.encoded for window in windows])
    said: dict[int | None, tuple[str, float]] = {}
    for window in windows:
        probabilities, numbers = window.scores.softmax(-1).max(-1)
        for place, probability, best in zip(window.places, probabilities.tolist(), numbers.tolist(), strict=True):
            said[window.encoded.words[place]] = head.labels[best], probability
    nothing = (OUTSIDE if OUTSIDE in head.labels else None, None)
    words = []
    for number, (start, stop) in spans.items():
        label, share = said.get(number, nothing)
        words.append({"word": text[start:stop], "label": label, "probability": share, "start": start, "end": stop})
    return {"words": words, "entities": entities(text, words), "windows": len(windows)}


def _text_and_spans(given: Any, windows: list[Encoded]) -> tuple[str, dict[int, tuple[int, int]]]:
    """The whole text, and where each word stands in it."""
    if not isinstance(given, str):
        words: Sequence[str] = given.words if isinstance(given, Words) else given
        starts = accumulate((len(word) + 1 for word in words), initial=0)
        return " ".join(words), {
            number: (start, start + len(word)) for number, (start, word) in enumerate(zip(starts, words, strict=False))
        }
    spans: dict[int, tuple[int, int]] = {}
    for window in windows:
        for word, (start, stop) in zip(window.words, window.offsets, strict=True):
            if word is not None:
                low, high = spans.get(word, (start, stop))
                spans[word] = min(low, start), max(high, stop)
    return given, {word: trimmed(given, *spans[word]) for word in sorted(spans)}


def entities(text: str, words: Sequence[Answer]) -> list[Answer]:
    """Neighbouring words of one type joined, as conlleval reads them: I-x after anything but an open x begins anew."""
    found: list[list[Answer]] = []
    previous = ""
    for word in words:
        mark, dash, kind = (word["label"] or OUTSIDE).partition("-")
        inside = dash and mark in INSIDE and kind == previous
        if inside:
            found[-1].append(word)
        elif dash and mark in BEGIN + INSIDE:
            found.append([word])
        previous = kind if dash and mark in OPEN else ""
    return [
        {
            "label": group[0]["label"].partition("-")[2],
            "text": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
            "probability": sum(word["probability"] for word in group) / len(group),
        }
        for group in found
    ]


TAG = Answerer(
    expects='lists of words or whole texts, like [["Ada", "lives", "here"], "a whole text"]',
    items=items,
    places=places,
    answer=answer,
)

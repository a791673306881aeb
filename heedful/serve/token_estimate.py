"""About how many tokens texts have, without holding all of them: far too many are refused before they cost memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from heedful.infer.scheduling.errors import TooLongError

PART_CHARACTERS = 16_384  # characters that are tokenised at a time
SURE = 2  # times the limit: what is cut in parts has a few tokens more or less than the whole; exactly is for the queue


def check_token_estimate(engine: Any, texts: Sequence[str], most: int, *, whole: bool = False) -> Iterator[None]:
    """Refuse what has far more tokens; a token may be one character, and in Python it takes some hundred bytes.

    It yields after each part that was counted, so that a thread can do something else in between. What a model of
    embeddings cuts does not count, unless texts are taken `whole`.
    """
    limit = engine.limit if engine.kind == "embedding" and not whole else None  # the others read it in windows
    counts = [0] * len(texts)
    total = 0
    for group in _groups(texts):
        for (number, _), encoded in zip(group, engine.tokenizer.encode_batch([part for _, part in group]), strict=True):
            before = counts[number]
            counts[number] += len(encoded)
            total += counts[number] - before if limit is None else min(counts[number], limit) - min(before, limit)
        if total > SURE * most:
            raise TooLongError(f"the texts have more than {total} tokens, and those of a request may have {most}")
        yield


def count_characters(given: Any) -> int:
    """How many characters of an input are tokenised; a prompt is beside each of its choices."""
    match given:
        case str():
            return len(given)
        case {"prompt": prompt, "choices": choices}:
            return sum(len(prompt) + len(choice) for choice in choices)
        case dict():
            return sum(map(count_characters, given.values()))
        case list() | tuple():
            return sum(map(count_characters, given)) + len(given)
    return 0


def group_in_turns(inputs: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Some PART characters of inputs together, with the number of the first; an input is never divided."""
    first = size = 0
    for number, input_value in enumerate(inputs):
        more = count_characters(input_value)
        if number > first and size + more > PART_CHARACTERS:
            yield first, inputs[first:number]
            first, size = number, 0
        size += more
    yield first, inputs[first:]


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Parts of texts, with the number of the text, some PART characters together."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        for first in range(0, len(text), PART_CHARACTERS):
            part = text[first : first + PART_CHARACTERS]
            if group and size + len(part) > PART_CHARACTERS:
                yield group
                group, size = [], 0
            group.append((number, part))
            size += len(part)
    if group:
        yield group

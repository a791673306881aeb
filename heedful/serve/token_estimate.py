"""About how many tokens texts have, without holding all of them: far too many are refused before they cost memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import TooLongError
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS
from heedful.tasks.answering import PromptedText

T = TypeVar("T")
SURE = 2  # times the limit: what is cut in parts has a few tokens more or less than the whole; exactly is for the queue


def check_token_estimate(
    engine: BundleEngine, texts: Sequence[str], most: int, *, whole: bool = False
) -> Iterator[None]:
    """Refuse what has far more tokens; a token may be one character, and in Python it takes some hundred bytes.

    It yields after each part that was counted, so that a thread can do something else in between. What a model of
    embeddings cuts does not count, unless texts are taken `whole`.
    """
    limit = engine.limit if engine.kind == "embedding" and not whole else None  # the others read it in windows
    counts = [0] * len(texts)
    total = 0
    parts = [
        (number, text[start : start + TURN_CHARACTERS])
        for number, text in enumerate(texts)
        for start in range(0, len(text), TURN_CHARACTERS)
    ]
    for _, group in group_in_turns(parts, lambda part: len(part[1])):
        for (number, _), encoded in zip(group, engine.tokenizer.encode_batch([part for _, part in group]), strict=True):
            before = counts[number]
            counts[number] += len(encoded)
            total += counts[number] - before if limit is None else min(counts[number], limit) - min(before, limit)
        if total > SURE * most:
            raise TooLongError(f"the texts have more than {total} tokens, and those of a request may have {most}")
        yield


def count_characters(value: object) -> int:
    """How many characters of an input are tokenised; a prompt is beside each of its choices."""
    match value:
        case str():
            return len(value)
        case PromptedText(prompt=prompt, text=text):
            return len(prompt) + len(text)
        case {"prompt": prompt, "choices": choices}:
            return sum(len(prompt) + len(choice) for choice in choices)
        case dict():
            return sum(map(count_characters, value.values()))
        case list() | tuple():
            return sum(map(count_characters, value)) + len(value)
    return 0


def group_in_turns(
    inputs: Sequence[T], count: Callable[[T], int] = count_characters
) -> Iterator[tuple[int, Sequence[T]]]:
    """Some TURN_CHARACTERS of inputs together, with the number of the first; an input is never divided."""
    first = size = 0
    for number, input_value in enumerate(inputs):
        more = count(input_value)
        if number > first and size + more > TURN_CHARACTERS:
            yield first, inputs[first:number]
            first, size = number, 0
        size += more
    yield first, inputs[first:]

"""Estimated token counts, by which requests with far too many tokens are refused before their tokens cost memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import TooLongError
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS
from heedful.tasks.answering import PromptedText

T = TypeVar("T")
MARGIN = (
    2  # estimates up to this multiple of the limit are accepted, since parts of texts have other tokens at their ends
)


def check_token_estimate(
    engine: BundleEngine, texts: Sequence[str], max_tokens: int, *, counts_truncated: bool = False
) -> Iterator[None]:
    """Refuse texts with far more than `max_tokens`; yield after each part, so that the thread may serve others.

    Parts of texts are tokenised one after the other, and only their counts are kept: a token takes some hundred bytes
    in Python. The queue refuses texts by their exact number of tokens later.

    Args:
        engine: The engine, whose tokenizer is used.
        texts: The texts.
        max_tokens: Maximum tokens of all texts.
        counts_truncated: Whether tokens count that an embedding model will drop; other models drop none.

    Raises:
        TooLongError: If the texts have more than MARGIN times `max_tokens`.
    """
    limit = engine.limit if engine.kind == "embedding" and not counts_truncated else None
    counts = [0] * len(texts)
    total = 0
    parts = [
        (number, text[start : start + TURN_CHARACTERS])
        for number, text in enumerate(texts)
        for start in range(0, len(text), TURN_CHARACTERS)
    ]
    for _, group in group_in_turns(parts, lambda part: len(part[1])):
        encodings = engine.tokenizer.encode_batch([text for _, text in group])
        for (number, _), encoding in zip(group, encodings, strict=True):
            before = counts[number]
            counts[number] += len(encoding)
            total += counts[number] - before if limit is None else min(counts[number], limit) - min(before, limit)
        if total > MARGIN * max_tokens:
            raise TooLongError(f"the texts have more than {total} tokens, and those of a request may have {max_tokens}")
        yield


def count_characters(value: object) -> int:
    """Return the number of characters of an input that are tokenised; a prompt is tokenised with each choice."""
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
    """Yield groups of inputs with up to TURN_CHARACTERS, or of one longer input; each with the number of its first.

    Args:
        inputs: The inputs.
        count: Returns the number of characters of an input.
    """
    first = characters = 0
    for number, input_value in enumerate(inputs):
        input_characters = count(input_value)
        if number > first and characters + input_characters > TURN_CHARACTERS:
            yield first, inputs[first:number]
            first, characters = number, 0
        characters += input_characters
    yield first, inputs[first:]

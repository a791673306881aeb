"""`check_token_estimate`: refuses requests with far too many tokens, before these tokens take memory.

`group_in_turns` groups inputs for tokenization, so that no request occupies a tokenizing thread for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import TooLongError
from heedful.infer.scheduling.tokenizer_pool import TURN_CHARACTERS
from heedful.tasks.answering import PromptedText

T = TypeVar("T")
# estimates up to this multiple of the limit are accepted: at the ends of its parts, a text gets other tokens
MARGIN = 2


def check_token_estimate(
    engine: BundleEngine, texts: Sequence[str], max_tokens: int, *, counts_truncated: bool = False
) -> Iterator[None]:
    """Refuse texts with far more than `max_tokens` tokens; yield after each group of parts, so that others can run.

    The texts are tokenized in parts. Only the number of tokens of each part is stored, since a token takes some hundred
    bytes in Python. The scheduler later refuses texts by their exact numbers of tokens.

    Args:
        engine: The engine, whose tokenizer is used.
        texts: The texts.
        max_tokens: Maximum tokens of all texts.
        counts_truncated: Whether to count tokens that an embedding model truncates. Other models do not truncate.

    Raises:
        TooLongError: If the texts have more than MARGIN times `max_tokens`.
    """
    limit = engine.limit if engine.kind == "embedding" and not counts_truncated else None
    counts = [0] * len(texts)
    total = 0
    parts = [
        (index, text[start : start + TURN_CHARACTERS])
        for index, text in enumerate(texts)
        for start in range(0, len(text), TURN_CHARACTERS)
    ]
    for _, group in group_in_turns(parts, lambda part: len(part[1])):
        encodings = engine.tokenizer.encode_batch([text for _, text in group])
        for (index, _), encoding in zip(group, encodings, strict=True):
            previous = counts[index]
            counts[index] += len(encoding)
            total += counts[index] - previous if limit is None else min(counts[index], limit) - min(previous, limit)
        if total > MARGIN * max_tokens:
            raise TooLongError(f"the texts have more than {total} tokens, and those of a request may have {max_tokens}")
        yield


def count_characters(value: object) -> int:
    """Return the number of characters to tokenize in an input. A prompt is tokenized with each of its choices."""
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
    """Yield (index of the first input, inputs) for groups of up to TURN_CHARACTERS characters or a single input.

    Args:
        inputs: The inputs.
        count: Returns the number of characters of an input.
    """
    first = characters = 0
    for index, input_value in enumerate(inputs):
        input_characters = count(input_value)
        if index > first and characters + input_characters > TURN_CHARACTERS:
            yield first, inputs[first:index]
            first = index
            characters = 0
        characters += input_characters
    yield first, inputs[first:]

"""Tokenized inputs: the windows of an input that a model scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from heedful.tasks.answering import AnswerHead, PromptedText
from heedful.tokenizer import Encoding


class Chunk(NamedTuple):
    """A window of tokens to be scored."""

    answerer: AnswerHead
    encoded: Encoding
    positions: list[int]  # positions of the tokens to score; empty: the whole window is scored
    unpooled: int = 0  # tokens at the start, of a prompt, that are not pooled into the vector


class EncodedInput(NamedTuple):
    """A tokenized input, with the answer head for it."""

    engine_input: object
    answerer: AnswerHead
    chunks: list[Chunk]  # the windows that are to be scored
    dropped: int = 0  # tokens at the end of the input that are in no window
    windows: Sequence[Encoding] = ()  # all windows, also those in which nothing is scored

    @property
    def tokens(self) -> int:
        """The number of tokens to be scored."""
        return sum(len(chunk.encoded) for chunk in self.chunks)


def with_prompt(prompt: str, texts: Iterable[str]) -> list[object]:
    """Return texts as inputs of an embedding model, with this prompt instead of the model's default prompt."""
    return [PromptedText(prompt, text) for text in texts]


def describe_value(value: object, max_characters: int = 80) -> str:
    """Return the type and the value, at most this many characters, for error messages."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def token_batches(chunks: Sequence[Chunk], token_budget: int) -> Iterator[list[int]]:
    """Yield the numbers of the chunks of each batch: one answer head, longest first, within the token budget."""
    batch: list[int] = []
    tokens = 0
    order = sorted(range(len(chunks)), key=lambda n: (id(chunks[n].answerer), -len(chunks[n].encoded)))
    for number in order:
        chunk = chunks[number]
        fits = tokens + len(chunk.encoded) <= token_budget
        if batch and not (fits and chunk.answerer is chunks[batch[0]].answerer):
            yield batch
            batch, tokens = [], 0
        batch.append(number)
        tokens += len(chunk.encoded)
    if batch:
        yield batch

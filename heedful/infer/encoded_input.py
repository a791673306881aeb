"""Tokenized inputs: the windows of an input that a model scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from heedful.errors import HeedfulError, InputError
from heedful.tasks.answering import AnswerHead, PromptedText, group_by_window, input_windows
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput


class Chunk(NamedTuple):
    """A window of tokens to be scored."""

    answer_head: AnswerHead
    encoded: Encoding
    positions: list[int]  # positions of the tokens to score; empty: the whole window is scored
    unpooled: int = 0  # tokens at the start, of a prompt, that are not pooled into the vector


class EncodedInput(NamedTuple):
    """A tokenized input, with the answer head for it."""

    engine_input: object
    answer_head: AnswerHead
    chunks: list[Chunk]  # the windows that are to be scored
    dropped: int = 0  # tokens at the end of the input that are in no window
    windows: Sequence[Encoding] = ()  # all windows, also those in which nothing is scored

    @property
    def tokens(self) -> int:
        """The number of tokens to be scored."""
        return sum(len(chunk.encoded) for chunk in self.chunks)


def all_windows(
    number: int, answer_head: AnswerHead, texts: list[TokenizerInput], encodings: list[Encoding], limit: int | None
) -> list[Encoding]:
    """Return the windows of all texts of an input; raises InputError if one is too long for the head."""
    try:
        by_text = input_windows(answer_head, texts, encodings, limit)
        return [window for windows in by_text for window in windows]
    except HeedfulError as error:
        raise InputError(str(error), number) from None


def scored_chunks(answer_head: AnswerHead, windows: list[Encoding], unpooled: int, tokenizer: Tokenizer) -> list[Chunk]:
    """Return the windows of an input in which something is to be scored."""
    if answer_head.positions is None:
        return [Chunk(answer_head, window, [], unpooled) for window in windows]
    by_window = group_by_window(answer_head.positions(windows, tokenizer), len(windows))
    return [
        Chunk(answer_head, window, positions) for window, positions in zip(windows, by_window, strict=True) if positions
    ]


def token_batches(chunks: Sequence[Chunk], token_budget: int) -> Iterator[list[int]]:
    """Yield the indices of the chunks of each batch: one answer head, longest first, within the token budget."""
    batch: list[int] = []
    tokens = 0
    order = sorted(range(len(chunks)), key=lambda index: (id(chunks[index].answer_head), -len(chunks[index].encoded)))
    for index in order:
        chunk = chunks[index]
        fits = tokens + len(chunk.encoded) <= token_budget
        if batch and not (fits and chunk.answer_head is chunks[batch[0]].answer_head):
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += len(chunk.encoded)
    if batch:
        yield batch


def with_prompt(prompt: str, texts: Iterable[str]) -> list[object]:
    """Return texts as inputs of an embedding model, with this prompt instead of the model's default prompt."""
    return [PromptedText(prompt, text) for text in texts]


def describe_value(value: object, max_characters: int = 80) -> str:
    """Return the type and the value, at most this many characters, for error messages."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"

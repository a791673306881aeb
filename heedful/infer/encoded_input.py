"""Tokenized inputs, and their windows: the sequences of tokens that a model reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from heedful.errors import HeedfulError, InputError
from heedful.model.config import Head, SentenceEmbedding
from heedful.tasks.answering import AnswerHead, PromptedText, group_by_window, input_windows
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput


class Chunk(NamedTuple):
    """A window of tokens in which the head scores tokens, or that it scores as a whole."""

    answer_head: AnswerHead
    encoded: Encoding
    positions: list[int]  # positions of the tokens to score; empty: one score for the whole window
    unpooled: int = 0  # tokens of a prompt at the start that pooling excludes


class EncodedInput(NamedTuple):
    """A tokenized input with the answer head that answers it."""

    engine_input: object
    answer_head: AnswerHead
    chunks: list[Chunk]  # windows to score
    dropped: int = 0  # tokens that were truncated from the end of the input
    windows: Sequence[Encoding] = ()  # all windows, including those without tokens to score

    @property
    def tokens(self) -> int:
        """The number of tokens in all windows to score."""
        return sum(len(chunk.encoded) for chunk in self.chunks)


def all_windows(
    number: int, answer_head: AnswerHead, texts: list[TokenizerInput], encodings: list[Encoding], limit: int | None
) -> list[Encoding]:
    """Return the windows of all texts of the input with this number; raises an InputError if a text is too long."""
    try:
        by_text = input_windows(answer_head, texts, encodings, limit)
        return [window for windows in by_text for window in windows]
    except HeedfulError as error:
        raise InputError(str(error), number) from None


def scored_chunks(answer_head: AnswerHead, windows: list[Encoding], unpooled: int, tokenizer: Tokenizer) -> list[Chunk]:
    """Return the windows to score: all of them, or only those with token positions that the head scores."""
    if answer_head.positions is None:
        return [Chunk(answer_head, window, [], unpooled) for window in windows]
    by_window = group_by_window(answer_head.positions(windows, tokenizer), len(windows))
    return [
        Chunk(answer_head, window, positions) for window, positions in zip(windows, by_window, strict=True) if positions
    ]


def unpooled_tokens(prompt: str, head: Head, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of a prompt at the start of a text, if pooling excludes them; otherwise 0.

    As in sentence-transformers, it is the number of tokens of the prompt encoded by itself, without a special token
    at the end.
    """
    if not prompt or not isinstance(head, SentenceEmbedding) or head.pools_prompt:
        return 0
    encoding = tokenizer.encode(prompt)
    return len(encoding) - int(bool(encoding.special) and encoding.special[-1])


def token_batches(chunks: Sequence[Chunk], token_budget: int) -> Iterator[list[int]]:
    """Yield the indices of each batch of chunks: of one answer head, longest first, within the token budget."""
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
    """Return texts as inputs of an embedding model, with a prompt that replaces the model's default prompt."""
    return [PromptedText(prompt, text) for text in texts]


def describe_value(value: object, max_characters: int = 80) -> str:
    """Return the type of a value and its repr, shortened to `max_characters`, for error messages."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"

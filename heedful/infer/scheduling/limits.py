"""Limits and counters of a queue, and its interface to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from heedful.infer.encoded_input import Chunk, EncodedInput
from heedful.model.decode import BeamSearch, Decoding
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Limits of the queue, which are never exceeded."""

    max_concurrent_requests: int = 512  # requests that wait or run
    max_queued_tokens: int = 262_144  # tokens of waiting requests
    max_request_tokens: int = 16_384  # tokens of one request, over all windows
    max_queued_characters: int = 4_194_304  # characters of long requests that are not tokenised yet
    # tokens of a batch; None: the token budget of the engine. A single window that has more is a batch by itself
    max_batch_tokens: int | None = None


@dataclass(kw_only=True, slots=True)
class QueueCounters:
    """Counts since the start."""

    batches: int = 0
    sequences: int = 0  # windows that reached the model
    tokens: int = 0  # cost of the batches, see `token_cost`
    retries: int = 0  # parts of batches that ran again because an input made the batch fail
    failed: int = 0  # inputs on which the model failed
    full: int = 0  # requests refused because too many waited
    expired: int = 0  # requests whose deadline passed
    cancelled: int = 0  # requests whose client disconnected


@runtime_checkable
class ScheduledEngine(Protocol):
    """The part of `Engine` that a queue uses."""

    writing: GenerationConfig  # generation settings of requests that have none
    token_budget: int  # maximum tokens of a batch, unless the limits of the queue have one

    @property
    def stages(self) -> Sequence[tuple[ScheduledEngine, float]]:
        """The stages of a cascade with their confidence thresholds; the engine alone if it is no cascade."""

    def tokenize(self, inputs: Sequence[object]) -> list[EncodedInput]:
        """Tokenize inputs into windows."""

    def score(
        self, chunks: Sequence[Chunk], writing: GenerationConfig | None = None, *, top_k: int | None = None
    ) -> list[object]:
        """Return the scores of one batch."""

    def decode(self, chunks: Sequence[Chunk], writing: GenerationConfig | None = None) -> Decoding:
        """Start the text generation of one batch, which the caller runs step by step."""

    def answer(self, encoded_input: EncodedInput, scores: Sequence[object], *, top_k: int = 5) -> Answer:
        """Return the answer to an input from the scores of its chunks."""


def token_cost(tokens: int, writing: GenerationConfig | None) -> int:
    """Return the cost of a chunk: its tokens and those that may be generated for it, times the beams."""
    if writing is None:
        return tokens
    beams = writing.how.num_beams if isinstance(writing.how, BeamSearch) else 1
    return (tokens + writing.max_new_tokens) * beams

"""Limits and counters of a scheduler, and the interface of the engines that it runs."""

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
    """Limits of a scheduler. A request that would exceed a limit of requests or tokens is refused."""

    max_concurrent_requests: int = 512  # requests that are waiting or running
    max_queued_tokens: int = 262_144  # tokens of all waiting requests
    max_request_tokens: int = 16_384  # tokens of one request, over all windows
    max_queued_characters: int = 4_194_304  # characters of all long requests that wait to be tokenized
    # tokens of a batch, or None for the token budget of the engine. A window with more tokens is a batch by itself
    max_batch_tokens: int | None = None


@dataclass(kw_only=True, slots=True)
class QueueCounters:
    """Counts of batches and requests since the scheduler started."""

    batches: int = 0  # batches that have run
    sequences: int = 0  # windows in these batches
    tokens: int = 0  # cost of these batches, see `token_cost`
    retries: int = 0  # runs of parts of a batch after an input made the batch fail
    failed: int = 0  # inputs on which the model failed
    full: int = 0  # requests refused because the queue was full
    expired: int = 0  # requests whose deadline passed
    cancelled: int = 0  # requests whose client disconnected


@runtime_checkable
class ScheduledEngine(Protocol):
    """The part of `Engine` that a scheduler uses."""

    writing: GenerationConfig  # generation settings of requests that have no settings of their own
    token_budget: int  # maximum tokens of a batch, unless `QueueLimits.max_batch_tokens` is set

    @property
    def stages(self) -> Sequence[tuple[ScheduledEngine, float]]:
        """The stages of a cascade as (engine, confidence threshold); only this engine, with 0, if it is no cascade."""

    def tokenize(self, inputs: Sequence[object]) -> list[EncodedInput]:
        """Tokenize inputs into windows."""

    def score(
        self, chunks: Sequence[Chunk], writing: GenerationConfig | None = None, *, top_k: int | None = None
    ) -> list[object]:
        """Return the scores of each chunk of one batch."""

    def decode(self, chunks: Sequence[Chunk], writing: GenerationConfig | None = None) -> Decoding:
        """Start the generation of texts for one batch, which the caller then runs step by step."""

    def answer(self, encoded_input: EncodedInput, scores: Sequence[object], *, top_k: int = 5) -> Answer:
        """Return the answer to an input from the scores of its chunks."""


def token_cost(tokens: int, writing: GenerationConfig | None) -> int:
    """Return the cost of a chunk: (tokens + maximum of generated tokens) * beams; without `writing`, its tokens."""
    if writing is None:
        return tokens
    beams = writing.how.num_beams if isinstance(writing.how, BeamSearch) else 1
    return (tokens + writing.max_new_tokens) * beams

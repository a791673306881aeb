"""Limits and counters of a queue, and its interface to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from heedful.infer.bundle_engine import TOKEN_BUDGET, Chunk, EncodedInput
from heedful.model.decode import BeamSearch, Decoding
from heedful.tasks.answering import Answer
from heedful.tasks.generation import GenerationConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Limits of the queue, which are never exceeded."""

    max_concurrent_requests: int = 512  # that wait or run
    max_queued_tokens: int = 262_144  # that wait
    max_request_tokens: int = 16_384  # of one request
    max_queued_characters: int = 4_194_304  # of long requests, that wait to be tokenised or are
    max_batch_tokens: int = TOKEN_BUDGET  # of a batch, or one window that alone has more


@dataclass(kw_only=True, slots=True)
class QueueCounters:
    """Counts since the start."""

    batches: int = 0
    sequences: int = 0  # windows that reached the model
    tokens: int = 0
    retries: int = 0  # batches that were run again in parts, since one of their inputs made them fail
    failed: int = 0
    full: int = 0
    expired: int = 0
    cancelled: int = 0


@runtime_checkable
class ScheduledEngine(Protocol):
    """The part of `Engine` that a queue uses."""

    writing: GenerationConfig  # how texts are written where a request does not say

    @property
    def stages(self) -> Sequence[tuple[ScheduledEngine, float]]:
        """The stages of a cascade, each with the least probability with which it answers; else the engine alone."""

    def tokenize(self, inputs: Sequence[object]) -> list[EncodedInput]:
        """Inputs become windows."""

    def score(
        self, pieces: Sequence[Chunk], writing: GenerationConfig | None = None, *, top_k: int | None = None
    ) -> list[object]:
        """One batch."""

    def decode(self, pieces: Sequence[Chunk], writing: GenerationConfig | None = None) -> Decoding:
        """One batch for which texts are written, to be taken step by step."""

    def answer(self, asked: EncodedInput, scores: Sequence[object], *, top_k: int = 5) -> Answer:
        """Scores become an answer."""


def token_cost(tokens: int, writing: GenerationConfig | None) -> int:
    """Return the cost of a piece: its tokens and those that may be generated for it, times the beams."""
    if writing is None:
        return tokens
    beams = writing.how.num_beams if isinstance(writing.how, BeamSearch) else 1
    return (tokens + writing.max_new_tokens) * beams

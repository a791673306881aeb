"""Greedy decoding by a CUDA graph: a token of each sequence of a batch costs one launch instead of some hundred.

The tokens that a replay chooses, the lengths, positions and masks stay on the device; the host reads the tokens once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.model.config import Buckets, Rotary
from heedful.model.decode_step import Score, next_log_probabilities
from heedful.model.kv_cache import FixedKVCache, KVCache
from heedful.model.stack import Transformer
from heedful.nn.cuda_graph import record
from heedful.packed import Packed

MIN_STEPS = 32  # steps that may follow, from which a step is recorded: recording takes as long as about ten steps
MIN_TOKENS = 8  # generated tokens before a step is recorded, since many texts are short
MAX_STEPS = 512  # steps for which the cache gets slots; then it grows, and a step is recorded again


def can_record_steps(model: Transformer) -> bool:
    """Return whether the decoding step of a model can be recorded: it may copy nothing between host and device."""
    if type(model) is not Transformer or model.decoder is None:
        return False
    return isinstance(model.decoder.config.relation, Rotary | Buckets | None)


def worth_recording(device: torch.device, steps: int, generated: int) -> bool:
    """Return whether recording a step pays off after `generated` tokens, if up to `steps` more may follow."""
    return device.type == "cuda" and steps >= MIN_STEPS and generated >= MIN_TOKENS


class RecordedSteps:
    """Greedy decoding of a fixed batch, whose sequences all get a token in each step."""

    def __init__(self, model: Transformer, score: Score, cache: KVCache, tokens: Tensor, steps: int) -> None:
        """Prepare the tensors of a step.

        Args:
            model: The model.
            score: Its vocabulary head.
            cache: The cache, whose lines this object extends.
            tokens: The token of each sequence that the first step reads, on the model's device.
            steps: Number of steps that any sequence may need.
        """
        self.steps_left = min(steps, MAX_STEPS)
        max_length = max(cache.lengths) + self.steps_left
        positions = model.output_embedding.config.positions
        if positions is not None and positions.limit is not None:
            max_length = min(max_length, positions.limit)
        self.cache = FixedKVCache(cache, max_length, tokens.device)
        self._model, self._score, self._from, self._steps = model, score, cache, 0
        zeros = torch.zeros_like(tokens)
        self._batch = Packed(tokens=tokens.clone(), positions=zeros, types=zeros, bounds=tuple(range(len(tokens) + 1)))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result = torch.zeros(2, len(tokens), dtype=torch.float64, device=tokens.device)

    @property
    def tokens(self) -> Tensor:
        """The token of each sequence that the next step reads."""
        return self._batch.tokens

    def run(self) -> Float[Tensor, "2 sequences"]:
        """Take a step; returns the chosen tokens and their log-probabilities."""
        log_p = next_log_probabilities(self._model, self._score, self._batch, self.cache)
        tokens = log_p.argmax(-1)
        token_log_p = log_p.gather(-1, tokens[:, None])[:, 0]
        self._batch.tokens.copy_(tokens)
        return torch.stack([tokens.double(), token_log_p.double()])

    def record(self) -> None:
        """Record a step. The slots that recording writes are written again by the steps that follow."""
        with torch.inference_mode():
            tokens, lengths = self._batch.tokens.clone(), self.cache.device_lengths.clone()
            self._graph, self._result = record(self.run, tokens.device)
            self._batch.tokens.copy_(tokens)
            self.cache.device_lengths.copy_(lengths)

    def step(self) -> list[list[float]]:
        """Take a step, and read the chosen tokens and their log-probabilities."""
        assert self.steps_left and self._graph is not None
        self._graph.replay()
        self.steps_left -= 1
        self._steps += 1
        numbers: list[list[float]] = self._result.tolist()
        return numbers

    def finish(self) -> None:
        """Let the cache that was given continue, with the rows that were added to it."""
        self.cache.hand_back(self._from, self._steps)

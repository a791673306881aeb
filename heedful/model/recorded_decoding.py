"""Greedy decoding by a CUDA graph: the host launches a recorded step by one call instead of a few hundred.

Tokens, lengths, positions and masks stay on the device; in each step the host reads the new tokens only. `decode.py`
uses this module.
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

MIN_STEPS = 32  # minimum of remaining steps for a recording, which takes as long as about ten steps
MIN_TOKENS = 8  # minimum of generated tokens before a recording, since many texts end earlier
MAX_STEPS = 512  # steps for which the cache has slots; after them, the cache grows and a step is recorded again


def can_record_steps(model: Transformer) -> bool:
    """Return whether the decoding step of a model can be recorded: it must copy nothing between host and device."""
    if type(model) is not Transformer or model.decoder is None:
        return False
    return isinstance(model.decoder.config.relation, Rotary | Buckets | None)


def worth_recording(device: torch.device, steps: int, generated: int) -> bool:
    """Return whether to record a step, after `generated` tokens and with up to `steps` steps left."""
    return device.type == "cuda" and steps >= MIN_STEPS and generated >= MIN_TOKENS


class RecordedSteps:
    """Greedy decoding of a fixed batch by a recorded step, in which every sequence gets a token.

    Call `record` once, then `step` up to `steps_left` times, then `finish`.
    """

    def __init__(self, model: Transformer, score: Score, cache: KVCache, tokens: Tensor, steps: int) -> None:
        """Prepare the tensors of a step.

        Args:
            model: The model.
            score: Its language-model head.
            cache: The KV cache; its lines are extended for the steps.
            tokens: Input of the first step, one token of each sequence, on the model's device.
            steps: Largest number of steps that a sequence may need.
        """
        self.steps_left = min(steps, MAX_STEPS)
        max_length = max(cache.lengths) + self.steps_left
        positions = model.output_embedding.config.positions
        if positions is not None and positions.limit is not None:
            max_length = min(max_length, positions.limit)
        self.cache = FixedKVCache(cache, max_length, tokens.device)
        self._model, self._score = model, score
        self._outer_cache, self._finished_steps = cache, 0
        zeros = torch.zeros_like(tokens)
        self._batch = Packed(tokens=tokens.clone(), positions=zeros, types=zeros, bounds=tuple(range(len(tokens) + 1)))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result = torch.zeros(2, len(tokens), dtype=torch.float64, device=tokens.device)

    @property
    def tokens(self) -> Tensor:
        """Input of the next step, one token of each sequence."""
        return self._batch.tokens

    def run(self) -> Float[Tensor, "2 sequences"]:
        """Compute a step; returns the most likely tokens and their log-probabilities."""
        log_p = next_log_probabilities(self._model, self._score, self._batch, self.cache)
        tokens = log_p.argmax(-1)
        token_log_p = log_p.gather(-1, tokens[:, None])[:, 0]
        self._batch.tokens.copy_(tokens)
        return torch.stack([tokens.double(), token_log_p.double()])

    def record(self) -> None:
        """Record a step, and restore tokens and lengths; the next steps overwrite the slots that it wrote."""
        with torch.inference_mode():
            tokens, lengths = self._batch.tokens.clone(), self.cache.device_lengths.clone()
            self._graph, self._result = record(self.run, tokens.device)
            self._batch.tokens.copy_(tokens)
            self.cache.device_lengths.copy_(lengths)

    def step(self) -> list[list[float]]:
        """Replay the recorded step; returns the most likely tokens and their log-probabilities as two lists."""
        assert self.steps_left and self._graph is not None
        self._graph.replay()
        self.steps_left -= 1
        self._finished_steps += 1
        tokens_and_log_p: list[list[float]] = self._result.tolist()
        return tokens_and_log_p

    def finish(self) -> None:
        """Let the cache from which this object was made continue with the keys and values of the replayed steps."""
        self.cache.hand_back(self._outer_cache, self._finished_steps)

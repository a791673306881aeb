"""Micro-batches by the free memory of a GPU: a simple estimate, on the safe side."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.model.config import (
    MaskedTokens,
    ModelConfig,
    NextToken,
    NextTokenAndChoice,
    PermutedTokens,
    Pretraining,
)
from heedful.train.settings import TrainSettings

DEFAULT_TOKENS = 8192  # tokens of a micro-batch where memory is not estimated
MAX_TOKENS = 65_536  # a GPU is not faster with more
SHARE = 0.5  # share of the free memory for activations; the rest is for their gradients, kernels and fragmentation
# bytes that a block keeps for its backward pass, for each token and each number of its width or its inner width
BYTES_PER_WIDTH, BYTES_PER_INNER_WIDTH = 40, 6
BYTES_PER_SCORE = 12  # a score over the vocabulary, in half precision and in float32, and its gradient
VOCABULARY_HEADS = (MaskedTokens, NextToken, NextTokenAndChoice, PermutedTokens, Pretraining)


def initial_max_tokens(
    loaded: ModelBundle,
    settings: TrainSettings,
    device: torch.device,
    precision: torch.dtype,
    parameters: Iterable[Tensor],
) -> int:
    """Return the maximum tokens of a micro-batch: that of the settings, or on a GPU as many as fit into its memory.

    Deterministic training has the same number everywhere, since free memory differs from run to run, and numbers are
    rounded differently in micro-batches of other sizes.

    Args:
        loaded: The model.
        settings: Settings of training.
        device: The device of training.
        precision: The dtype of matrix products.
        parameters: Trained tensors on this device, whose gradients will need memory.
    """
    if settings.max_tokens_per_microbatch != "auto":
        return settings.max_tokens_per_microbatch
    is_half = precision in (torch.bfloat16, torch.float16)
    token_bytes = bytes_per_token(loaded, gradient_checkpointing=settings.gradient_checkpointing, is_half=is_half)
    if device.type != "cuda" or settings.deterministic or token_bytes is None:
        return DEFAULT_TOKENS
    return tokens_that_fit(free_bytes(device, parameters), token_bytes)


def bytes_per_token(loaded: ModelBundle, *, gradient_checkpointing: bool, is_half: bool) -> int | None:
    """Estimate the memory for activations of training, for each token; None for models without Transformer blocks.

    Args:
        loaded: The model and its head.
        gradient_checkpointing: Whether blocks keep only their input.
        is_half: Whether matrix products are computed in half precision.
    """
    model, head = loaded.config.model, loaded.config.head
    if not isinstance(model, ModelConfig):
        return None
    total = 0
    for stack in filter(None, (model.encoder, model.decoder)):
        block = BYTES_PER_WIDTH * stack.width + BYTES_PER_INNER_WIDTH * stack.inner_width * (2 if stack.gated else 1)
        total += block + 4 * stack.width * stack.layers if gradient_checkpointing else block * stack.layers
    if isinstance(head, VOCABULARY_HEADS):
        total += BYTES_PER_SCORE * model.embedding.vocabulary
    return (total if is_half else 2 * total) or None  # a table of vectors has no blocks


def tokens_that_fit(free_bytes: int, token_bytes: int) -> int:
    """Return the tokens of a micro-batch that use a share of the free memory, in whole thousands up to `MAX_TOKENS`.

    >>> tokens_that_fit(70 * 2**30, 900_000), tokens_that_fit(2**40, 100_000), tokens_that_fit(10**6, 900_000)
    (41000, 65536, 1000)
    """
    return min(MAX_TOKENS, max(1000, int(SHARE * free_bytes / token_bytes) // 1000 * 1000))


def free_bytes(device: torch.device, parameters: Iterable[Tensor]) -> int:
    """Return the free bytes of a GPU, minus the bytes that gradients of these parameters will need."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - sum(parameter.nbytes for parameter in parameters)

"""One step of text generation: the first KV cache, limits of the length, and the next token's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import DataError, ModelError
from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer
from heedful.model.token_constraints import TokenConstraints
from heedful.packed import Packed, send

Score = Callable[[Tensor, Packed], Tensor]  # a language-model head: hidden states, their batch -> [rows, vocabulary]


def init_cache(model: Transformer, prompts: Packed, source: Packed | None) -> KVCache:
    """Return the KV cache for the first step; the encoder, if there is one, reads the source.

    Args:
        model: The model, in eval mode.
        prompts: Prompt of each sequence.
        source: The encoder's input, one sequence for each prompt. None without an encoder.

    Raises:
        HeedfulError: If the model is in training mode, a prompt is empty, or the source does not fit the model or the
            prompts.
    """
    if model.training:
        raise ModelError("the model is in training mode: call eval() before it generates text")
    prompts.first_rows()  # raises DataError for an empty prompt
    if (source is None) == model.config.has_encoder:
        need = "needs a source" if source is None else "takes no source"
        raise ModelError(f"this model {need}: only a model with an encoder reads one")
    if source is not None and len(source) != len(prompts):
        raise DataError(f"there are {len(prompts)} prompts, but {len(source)} sources: give each prompt its own")
    with torch.inference_mode():
        return model.init_cache(len(prompts) if source is None else source)


def token_limits(
    model: Transformer, prompts: Packed, max_new_tokens: int, constraints: TokenConstraints
) -> dict[int, int]:
    """Return the maximum number of new tokens after each prompt, by the index of the prompt.

    It is limited by `max_new_tokens`, and by the constraints' maximum length and the model's positions, which allow at
    least one token. The last new token is not an input, so it needs no position.
    """
    positions = model.output_embedding.config.positions
    limits = [] if positions is None or positions.limit is None else [positions.limit + 1]
    limits += [] if constraints.max_length is None else [constraints.max_length]
    return {
        index: min([max_new_tokens, *(max(1, limit - length) for limit in limits)])
        for index, length in enumerate(prompts.lengths)
    }


def next_log_probabilities(
    model: Transformer, score: Score, batch: Packed, cache: KVCache
) -> Float[Tensor, "sequences vocabulary"]:
    """Decode the tokens of a batch; returns the log-probabilities of each sequence's next token, in float32 at least.

    Args:
        model: The model.
        score: Its language-model head.
        batch: Tokens that continue the cached ones: the prompts, or the last token of each sequence.
        cache: The KV cache, to which the keys and values of the batch are added.
    """
    with torch.inference_mode():
        rows = model.decode_step(batch, cache)
        if len(rows) > len(batch):  # prompts: only their last rows predict a new token
            rows = rows[send(batch.bounds[1:], rows.device) - 1]
        logits = score(rows, batch)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def top_candidates(rows: Float[Tensor, "rows columns"], count: int) -> Iterator[list[tuple[float, int]]]:
    """Yield the `count` largest numbers of each row with their indices, largest first.

    NaN is larger than any number, and equal numbers are in the order of their indices, as in `argmax`.
    """
    if rows.device.type != "cpu":
        yield from sorted_candidates(rows, count)
        return
    smallest = rows.topk(count, -1).values[:, -1:]  # topk does not order equal numbers by index
    for row, is_candidate in zip(rows, ~(rows < smallest), strict=True):
        indices = is_candidate.nonzero()[:, 0]
        values, order = row[indices].sort(descending=True, stable=True)
        yield list(zip(values[:count].tolist(), indices[order[:count]].tolist(), strict=True))


def sorted_candidates(rows: Float[Tensor, "rows columns"], count: int) -> Iterator[list[tuple[float, int]]]:
    """Yield the result of `top_candidates`, by one sort of all rows and one copy from the device."""
    sorted_values, sorted_indices = rows.double().sort(descending=True, stable=True)
    values, indices = torch.stack([sorted_values[:, :count], sorted_indices[:, :count].double()]).tolist()
    for row, columns in zip(values, indices, strict=True):
        yield list(zip(row, map(int, columns), strict=True))

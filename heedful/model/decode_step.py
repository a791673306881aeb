"""One step of text generation: the cache before it, how many tokens may follow, and the scores of the next token."""

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

Score = Callable[[Tensor, Packed], Tensor]  # a vocabulary head: rows and their batch -> [rows, vocabulary]


def init_cache(model: Transformer, prompts: Packed, source: Packed | None) -> KVCache:
    """Return the cache for the first step; raises HeedfulError for inputs that do not fit the model or each other."""
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
    """Return the maximum number of tokens after each prompt, by its number; the last token needs no position."""
    positions = model.output_embedding.config.positions
    limits = [] if positions is None or positions.limit is None else [positions.limit + 1]
    limits += [] if constraints.max_length is None else [constraints.max_length]
    return {
        number: min([max_new_tokens, *(max(1, limit - length) for limit in limits)])
        for number, length in enumerate(prompts.lengths)
    }


def next_log_probabilities(
    model: Transformer, score: Score, batch: Packed, cache: KVCache
) -> Float[Tensor, "sequences vocabulary"]:
    """Return the log-probabilities of each sequence's next token, in float32 at least."""
    with torch.inference_mode():
        rows = model.decode_step(batch, cache)
        if len(rows) > len(batch):  # the prompts
            rows = rows[send(batch.bounds[1:], rows.device) - 1]
        scores = score(rows, batch)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)


def top_candidates(rows: Float[Tensor, "rows columns"], count: int) -> Iterator[list[tuple[float, int]]]:
    """Yield the `count` greatest numbers of each row with their indices, greatest first.

    NaN counts as greatest, and equal numbers are in the order of their indices, as in `argmax`.
    """
    if rows.device.type != "cpu":
        yield from sorted_candidates(rows, count)
        return
    least = rows.topk(count, -1).values[:, -1:]
    for row, large_enough in zip(rows, ~(rows < least), strict=True):
        indices = large_enough.nonzero()[:, 0]
        values, order = row[indices].sort(descending=True, stable=True)
        yield list(zip(values[:count].tolist(), indices[order[:count]].tolist(), strict=True))


def sorted_candidates(rows: Float[Tensor, "rows columns"], count: int) -> Iterator[list[tuple[float, int]]]:
    """Yield what `top_candidates` yields, by one sort of all rows and one read of the device."""
    ordered = rows.double().sort(descending=True, stable=True)
    values, indices = torch.stack([part[:, :count].double() for part in ordered]).tolist()
    for row, columns in zip(values, indices, strict=True):
        yield list(zip(row, map(int, columns), strict=True))

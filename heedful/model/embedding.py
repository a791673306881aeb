"""The input embedding: from tokens, positions and token types of a batch to the input of the first block."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import DataError
from heedful.model.config import EmbeddingConfig, Learned, Sinusoidal
from heedful.nn.dropout import dropout
from heedful.nn.layers import make_norm
from heedful.nn.positions import sinusoid
from heedful.packed import Packed


class EmbeddingLayer(nn.Module):
    """The input embedding project(dropout(norm(x + type))), where x is scale * token + position.

    Positions may be concatenated instead of added. Only the token is always there; the config decides about the other
    parts. In rows of the query stream (Yang et al. 2019, section 2.3), the trained vector `query` replaces
    scale * token. `project` is a linear layer if the dimensions differ or the config requires one.
    """

    def __init__(self, config: EmbeddingConfig, output_width: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=config.padding)
        joined_width = config.width
        if config.positions is not None and config.positions.join == "concatenate":
            assert config.positions.width is not None
            joined_width += config.positions.width
        if isinstance(config.positions, Learned):
            learned = config.positions
            self.positions = nn.Embedding(learned.count, learned.width or config.width, padding_idx=learned.padding)
        if config.types:
            self.types = nn.Embedding(config.types, joined_width)
        self.norm = (
            make_norm(config.norm, joined_width, config.norm_eps, config.norm_bias) if config.norm else nn.Identity()
        )
        needs_projection = joined_width != output_width or config.always_project
        self.project = nn.Linear(joined_width, output_width) if needs_projection else nn.Identity()
        if config.query:
            self.query = nn.Parameter(torch.zeros(config.width))

    def forward(self, batch: Packed) -> Float[Tensor, "rows width"]:
        self.check(batch)
        config = self.config
        x: Tensor = self.tokens(batch.tokens)
        if config.scale != 1.0:
            x = x * config.scale
        if batch.key_lengths is not None:
            x = torch.where(_query_stream_rows(batch), self.query, x)
        if config.positions is not None:
            vectors = self._position_vectors(config.positions, batch, like=x)
            x = torch.cat([x, vectors], -1) if config.positions.join == "concatenate" else x + vectors
        if config.types:
            x = x + self.types(batch.types)
        x = dropout(self.norm(x), config.dropout, self.training)
        projected: Tensor = self.project(x)
        return projected

    def _position_vectors(
        self, positions: Learned | Sinusoidal, batch: Packed, like: Tensor
    ) -> Float[Tensor, "rows _width"]:
        """Return the vector of each token's position; sinusoids have the dtype and the device of `like`."""
        if isinstance(positions, Learned):
            learned: Tensor = self.positions(batch.positions + positions.offset)
            return learned
        ids = torch.arange(positions.offset, positions.offset + batch.max_length, device=like.device)
        table = sinusoid(ids, positions.width or self.config.width, positions.layout, positions.base).to(like)
        return table[batch.positions]

    def check(self, batch: Packed) -> None:
        """Raise DataError for positions beyond the limit, unknown ids, or a query stream that the model lacks."""
        if batch.key_lengths is not None and not self.config.query:
            raise DataError("key_lengths is given, but this model has no query stream: leave it out")
        limit = None if self.config.positions is None else self.config.positions.limit
        # the sequence that pads a batch to its bucket may be longer than the limit, because all its positions are 0
        if limit is not None and batch.max_length > limit and batch.positions.max() >= limit:
            past_lengths = batch.past_lengths or [0] * len(batch)
            lengths = [length + past for length, past in zip(batch.lengths, past_lengths, strict=True)]
            index = next(index for index, length in enumerate(lengths) if length > limit)
            raise DataError(
                f"sequence {index} has {lengths[index]} tokens, but the model has positions for {limit}: split it "
                "into windows or truncate it"
            )
        if (extremes := batch.id_extremes()) is not None:
            tokens, types = extremes
            _check_ids("token", tokens, self.config.vocabulary)
            if self.config.types:
                _check_ids("type", types, self.config.types)


def _query_stream_rows(batch: Packed) -> Bool[Tensor, "rows 1"]:
    """Return which rows belong to the query stream: the rows of a sequence after its keys."""
    assert batch.key_lengths is not None
    lengths = zip(batch.lengths, batch.key_lengths, strict=True)
    is_query = torch.cat([torch.arange(length) >= keys for length, keys in lengths])
    return is_query[:, None].to(batch.tokens.device, non_blocking=True)


def _check_ids(kind: str, extremes: tuple[int, int], count: int) -> None:
    """Raise DataError unless the smallest and the largest id are rows of a table of `count` rows."""
    low, high = extremes
    if not 0 <= low <= high < count:
        raise DataError(
            f"{kind} id {low if low < 0 else high} is unknown; this model knows 0 to {count - 1}: "
            "was the batch made with another tokenizer?"
        )

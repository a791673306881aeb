"""The input embedding: tokens, positions and token types of a batch become the rows that enter the first block."""

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
    """dropout(norm(scale token + position + type)), then a projection where the widths differ or the config asks."""

    def __init__(self, config: EmbeddingConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=config.padding)
        joined = config.width
        if config.positions is not None and config.positions.join == "concatenate":
            joined += config.positions.width or 0
        if isinstance(config.positions, Learned):
            learned = config.positions
            self.positions = nn.Embedding(learned.count, learned.width or config.width, padding_idx=learned.padding)
        if config.types:
            self.types = nn.Embedding(config.types, joined)
        self.norm = make_norm(config.norm, joined, config.norm_eps, config.norm_bias) if config.norm else nn.Identity()
        self.project = nn.Linear(joined, width) if joined != width or config.always_project else nn.Identity()
        if config.query:
            self.query = nn.Parameter(torch.zeros(config.width))

    def forward(self, batch: Packed) -> Float[Tensor, "rows width"]:
        self._check(batch)
        config = self.config
        x: Tensor = self.tokens(batch.tokens)
        if config.scale != 1.0:
            x = x * config.scale
        if batch.key_lengths is not None:
            x = torch.where(self._is_query_stream(batch), self.query, x)
        positions: Tensor | None = None
        match config.positions:
            case Learned(offset=offset):
                positions = self.positions(batch.positions + offset)
            case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
                steps = torch.arange(offset, offset + batch.max_length, device=x.device)
                positions = sinusoid(steps, width or config.width, layout, base).to(x)[batch.positions]
        if positions is not None and config.positions is not None:
            x = torch.cat([x, positions], -1) if config.positions.join == "concatenate" else x + positions
        if config.types:
            x = x + self.types(batch.types)
        x = dropout(self.norm(x), config.dropout, self.training)
        projected: Tensor = self.project(x)
        return projected

    def _is_query_stream(self, batch: Packed) -> Bool[Tensor, "rows 1"]:
        """Return which rows attend to their sequence without being part of it (Yang et al. 2019, section 2.3)."""
        if not self.config.query:
            raise DataError("this model has one stream: all rows of a batch must be keys")
        assert batch.key_lengths is not None
        lengths = zip(batch.lengths, batch.key_lengths, strict=True)
        return torch.cat([torch.arange(length) >= keys for length, keys in lengths])[:, None].to(
            batch.tokens.device, non_blocking=True
        )

    def _check(self, batch: Packed) -> None:
        """Raise DataError for a sequence without positions, or for ids that the tables do not have."""
        positions = self.config.positions
        limit = batch.max_length if positions is None or positions.limit is None else positions.limit
        if batch.max_length > limit and batch.positions.max() >= limit:  # positions of a padding sequence are 0
            past_lengths = batch.past_lengths or [0] * len(batch)
            lengths = [length + past for length, past in zip(batch.lengths, past_lengths, strict=True)]
            number = next(number for number, length in enumerate(lengths) if length > limit)
            raise DataError(
                f"sequence {number} has {lengths[number]} tokens, but the model has positions for {limit}: split it "
                "into windows or truncate it"
            )
        if (extremes := batch.id_extremes()) is not None:
            counts = (self.config.vocabulary, self.config.types)
            for name, (low, high), count in zip(("token", "type"), extremes, counts, strict=True):
                if count and not 0 <= low <= high < count:
                    raise DataError(
                        f"{name} id {low if low < 0 else high} is unknown; this model knows 0 to {count - 1}: "
                        "was the batch made with another tokenizer?"
                    )

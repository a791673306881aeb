"""What enters the first block: the sum of what is known of each token, its place and its segment."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, Sinusoidal
from heedful.nn.dropout import dropout
from heedful.nn.layers import make_norm
from heedful.nn.positions import sinusoid
from heedful.packed import Packed


class Embedding(nn.Module):
    """dropout(norm(scale token + position + type)), then a projection where the widths differ or the config asks."""

    def __init__(self, config: EmbeddingConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width, padding_idx=config.padding)
        joined = config.width
        if config.positions is not None and config.positions.join == "concatenate":
            joined += config.positions.width or 0
        if isinstance(config.positions, Learned):
            place = config.positions
            self.positions = nn.Embedding(place.count, place.width or config.width, padding_idx=place.padding)
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
            x = torch.where(self._looks_on(batch), self.query, x)
        place: Tensor | None = None
        match config.positions:
            case Learned(offset=offset):
                place = self.positions(batch.positions + offset)
            case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
                steps = torch.arange(offset, offset + batch.max_length, device=x.device)
                place = sinusoid(steps, width or config.width, layout, base).to(x)[batch.positions]
        if place is not None and config.positions is not None:
            x = torch.cat([x, place], -1) if config.positions.join == "concatenate" else x + place
        if config.types:
            x = x + self.types(batch.types)
        x = dropout(self.norm(x), config.dropout, self.training)
        projected: Tensor = self.project(x)
        return projected

    def _looks_on(self, batch: Packed) -> Bool[Tensor, "rows 1"]:
        """Which rows are not part of their sequence."""
        if not self.config.query:
            raise HeedfulError("this model has one stream: all rows of a batch must be keys")
        assert batch.key_lengths is not None
        at = [torch.arange(length) >= keys for length, keys in zip(batch.lengths, batch.key_lengths, strict=True)]
        return torch.cat(at)[:, None].to(batch.tokens.device)

    def _check(self, batch: Packed) -> None:
        place = self.config.positions
        most = place.count - place.offset if isinstance(place, Learned) else batch.max_length
        if batch.max_length > most and batch.positions.max() >= most:  # all of a sequence that only fills are 0
            lengths = [n + m for n, m in zip(batch.lengths, batch.past_lengths or [0] * len(batch), strict=True)]
            number = next(number for number, length in enumerate(lengths) if length > most)
            raise HeedfulError(
                f"sequence {number} has {lengths[number]} tokens, but the model has positions for {most}: cut it into "
                "windows or truncate it"
            )
        if batch.tokens.device.type == "cpu" and len(batch.tokens):  # elsewhere looking would stall the queue
            for what, ids, count in (
                ("token", batch.tokens, self.config.vocabulary),
                ("type", batch.types, self.config.types),
            ):
                low, high = (int(edge) for edge in ids.aminmax())
                if count and not 0 <= low <= high < count:
                    bad = low if low < 0 else high
                    raise HeedfulError(
                        f"{what} id {bad} was given, but this model knows 0 to {count - 1}: "
                        "was the batch made with another tokenizer?"
                    )

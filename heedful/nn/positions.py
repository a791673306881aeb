"""Positions that are put into embeddings: a trained table, or sines and cosines."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

Waves = Literal["interleaved", "halves", "halves_inclusive"]


def sinusoid(
    positions: Int[Tensor, " rows"], width: int, layout: Waves = "interleaved", base: float = 10_000.0
) -> Float[Tensor, "rows width"]:
    """sin(p / base^e) and cos(p / base^e) of each position p at width / 2 wavelengths (Vaswani et al. 2017, 3.5).

    e = 2i/d, i from 0, with sin and cos alternating ("interleaved", the paper) or all sines first ("halves", Marian);
    e = i/(d/2 - 1) with all sines first ("halves_inclusive": tensor2tensor and fairseq). An odd width has one sine
    more than cosines, or ends with a zero ("halves_inclusive"). In float64.
    """
    pairs = width // 2 if layout == "halves_inclusive" else (width + 1) // 2
    i = torch.arange(pairs, dtype=torch.float64, device=positions.device)
    exponent = i / max(pairs - 1, 1) if layout == "halves_inclusive" else 2 * i / width
    angles = positions[:, None].double() * base**-exponent
    if layout == "interleaved":
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]
    else:
        waves = torch.cat([angles.sin(), angles.cos()[:, : width // 2]], -1)
        waves = F.pad(waves, (0, width - waves.shape[1]))
    return waves

"""W_Q W_K as a learned similarity of words: its spectrum, and whether it is one that a metric could have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.model.stack import Block
from heedful.model.trace import within
from heedful.nn.inference_linear import Laid, Panels, Rounded


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QKSpectrum:
    """Of one head: score(x, y) = x M y, without biases and positions; M = W_Q^T W_K has the rank of a head's width."""

    singular_values: Float[Tensor, " rank"]  # of M, largest first
    eigenvalues: Float[Tensor, " kept"]  # of (M + M^T) / 2, those that are not 0, largest first
    symmetric_share: (
        float  # share of |M|^2 (Frobenius) in its symmetric part: 1 for a symmetric M, 0 for one with M^T = -M
    )

    @property
    def positive_share(self) -> float:
        """The share of the positive ones in the sum of |eigenvalues|."""
        return float(self.eigenvalues.clamp(min=0).sum() / self.eigenvalues.abs().sum().clamp(min=1e-30))

    @property
    def summary(self) -> str:
        """Whether it is an inner product, in a sentence."""
        if self.symmetric_share > 0.999 and self.positive_share > 0.999:
            return "Symmetric and positive: an inner product, so a distance belongs to it."
        why, even = [], 100 * self.symmetric_share
        if self.symmetric_share <= 0.999:
            why.append(f"only {even:.0f} % of it is symmetric, so x may look at y without y looking at x")
        if self.positive_share <= 0.999:
            why.append(
                f"{100 - 100 * self.positive_share:.0f} % of its symmetric part is negative, "
                "so a row may be unlike itself"
            )
        return f"No metric: {'; '.join(why)}."


def qk_spectrum(loaded: Loaded, part: str, layer: int, head: int) -> QKSpectrum:
    """Of one head. M is never made: its spectrum is that of small matrices of a head's width."""
    model = loaded.model
    stack = model.encoder if part == "encoder" else model.decoder
    if stack is None or part not in ("encoder", "decoder", "cross") or (part == "cross" and not stack.config.cross):
        raise HeedfulError(f'this model has no part "{part}" with queries and keys')
    config = stack.config
    within("layers", [layer], config.layers)
    within("heads", [head], config.heads)
    block = stack.blocks[layer * len(stack.blocks) // config.layers]
    assert isinstance(block, Block)
    d = config.head_width
    mine = slice(head * d, (head + 1) * d)
    if part == "cross":
        q, k = _weight(block.cross.q)[mine], _weight(block.cross.kv)[: config.heads * d][mine]
    else:
        inner = config.heads * d
        both = _weight(block.attention.qkv)
        q, k = both[:inner][mine], both[inner : 2 * inner][mine]
    return spectrum_of(q, k)


def _weight(layer: nn.Module) -> Float[Tensor, "out width"]:
    """Also of a layer that was exchanged to answer."""
    parts = layer.parts() if isinstance(layer, Laid | Panels | Rounded) else dict(layer.named_parameters())
    weight: Tensor = parts["weight"].detach().double()
    return weight * parts["scale"] if "scale" in parts else weight


def spectrum_of(q: Float[Tensor, "d width"], k: Float[Tensor, "d width"]) -> QKSpectrum:
    """From the rows of W_Q and W_K of a head.

    With Q = A S (thin QR), M = Q^T K; all that is not 0 in M + M^T lives in the span of the rows of both.
    """
    basis, _ = torch.linalg.qr(torch.cat([q, k]).T)  # [width, 2 d or width]
    small = (q @ basis).T @ (k @ basis)
    symmetric = (small + small.T) / 2
    total = float((small**2).sum())
    values = torch.linalg.eigvalsh(symmetric).flip(0)
    return QKSpectrum(
        singular_values=torch.linalg.svdvals(small)[: len(q)],
        eigenvalues=values,
        symmetric_share=float((symmetric**2).sum()) / max(total, 1e-300),
    )

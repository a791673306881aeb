"""Spectrum of a head's query-key matrix W_Q^T W_K, a learned similarity of hidden states: is it an inner product?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.errors import RequestError
from heedful.model.stack import Block
from heedful.model.trace import check_numbers
from heedful.nn.inference_linear import Int8Linear, NativeLinear, OneDnnLinear


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QKSpectrum:
    """Spectrum of M = W_Q^T W_K of one head, without biases and positions: score(x, y) = x M y.

    The rank of M is at most the width of a head.
    """

    singular_values: Float[Tensor, " rank"]  # of M, largest first
    eigenvalues: Float[Tensor, " kept"]  # of (M + M^T) / 2, those that are not 0, largest first
    symmetric_share: float  # of |M|^2 (Frobenius) in its symmetric part; 1: M is symmetric; 0: M^T = -M

    @property
    def positive_share(self) -> float:
        """Share of the positive eigenvalues in the sum of |eigenvalues|."""
        return float(self.eigenvalues.clamp(min=0).sum() / self.eigenvalues.abs().sum().clamp(min=1e-30))

    @property
    def summary(self) -> str:
        """Sentence that says whether M is an inner product."""
        if self.symmetric_share > 0.999 and self.positive_share > 0.999:
            return "Symmetric and positive: an inner product, which defines a distance."
        reasons = []
        if self.symmetric_share <= 0.999:
            share = 100 * self.symmetric_share
            reasons.append(f"only {share:.0f} % of it is symmetric, so x may attend to y without y attending to x")
        if self.positive_share <= 0.999:
            share = 100 - 100 * self.positive_share
            reasons.append(f"{share:.0f} % of its symmetric part is negative, so a vector may be dissimilar to itself")
        return f"No metric: {'; '.join(reasons)}."


def qk_spectrum(loaded: ModelBundle, part: str, layer: int, head: int) -> QKSpectrum:
    """Return the spectrum of one head of "encoder", "decoder" or "cross", computed in float64."""
    model = loaded.model
    stack = model.encoder if part == "encoder" else model.decoder
    if stack is None or part not in ("encoder", "decoder", "cross") or (part == "cross" and not stack.config.cross):
        raise RequestError(f'part "{part}" of this model has no queries and keys: choose another part')
    config = stack.config
    check_numbers("layers", [layer], config.layers)
    check_numbers("heads", [head], config.heads)
    block = stack.blocks[layer * len(stack.blocks) // config.layers]
    assert isinstance(block, Block)
    if part == "cross":
        q, k = _weight(block.cross.q), _weight(block.cross.kv)
    elif config.qk_norm:
        raise RequestError("queries and keys of this model are normalised: no matrix W_Q^T W_K gives their scores")
    else:
        q, k, _ = _weight(block.attention.qkv).split(block.attention.sizes)
    width, group = config.head_width, 1 if part == "cross" else config.heads // block.attention.kv_heads
    return spectrum_of(q.unflatten(0, (-1, width))[head], k.unflatten(0, (-1, width))[head // group])


def _weight(layer: nn.Module) -> Float[Tensor, "out width"]:
    """Return the weight of a linear layer, dequantized if the layer was converted for inference."""
    tensors = (
        layer.parts() if isinstance(layer, OneDnnLinear | NativeLinear | Int8Linear) else dict(layer.named_parameters())
    )
    weight: Tensor = tensors["weight"].detach().double()
    return weight * tensors["scale"] if "scale" in tensors else weight


def spectrum_of(q: Float[Tensor, "d width"], k: Float[Tensor, "d width"]) -> QKSpectrum:
    """Return the spectrum of q^T k without computing this matrix.

    In an orthonormal basis of the rows of q and k (thin QR), all non-zero eigenvalues are those of a matrix of at
    most 2 d rows.
    """
    basis, _ = torch.linalg.qr(torch.cat([q, k]).T)  # [width, 2 d or width]
    small = (q @ basis).T @ (k @ basis)
    symmetric = (small + small.T) / 2
    total = float((small**2).sum())
    return QKSpectrum(
        singular_values=torch.linalg.svdvals(small)[: len(q)],
        eigenvalues=torch.linalg.eigvalsh(symmetric).flip(0),
        symmetric_share=float((symmetric**2).sum()) / max(total, 1e-300),
    )

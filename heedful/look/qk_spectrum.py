"""Spectrum of a head's query-key matrix W_Q^T W_K, which shows whether the attention score is an inner product.

The page asks for `qk_spectrum` through `page_api.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.errors import RequestError
from heedful.model.stack import Block
from heedful.model.trace import check_indices
from heedful.nn.inference_linear import Int8Linear, NativeLinear, OneDnnLinear


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QKSpectrum:
    """Spectrum of M = W_Q^T W_K of one head, without biases and positions: score(x, y) = x M y.

    The rank of M is at most the dimension of a head.
    """

    singular_values: Float[Tensor, " rank"]  # singular values of M, largest first
    eigenvalues: Float[Tensor, " nonzero"]  # eigenvalues of (M + M^T) / 2 that are not 0, largest first
    symmetric_share: float  # share of |M|^2 (Frobenius) in the symmetric part of M: 1 if M = M^T, 0 if M = -M^T

    @property
    def positive_share(self) -> float:
        """Share of positive eigenvalues in the sum of absolute eigenvalues."""
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
    """Return the spectrum of one head of "encoder", "decoder" or "cross", computed in float64.

    Raises:
        RequestError: If the part has no queries and keys, or they are normalised.
        HeedfulError: If there is no such layer or head.
    """
    model = loaded.model
    stack = model.encoder if part == "encoder" else model.decoder
    if stack is None or part not in ("encoder", "decoder", "cross") or (part == "cross" and not stack.config.cross):
        raise RequestError(f'part "{part}" of this model has no queries and keys: choose another part')
    config = stack.config
    check_indices("layers", [layer], config.layers)
    check_indices("heads", [head], config.heads)
    block = stack.blocks[layer * len(stack.blocks) // config.layers]
    assert isinstance(block, Block)
    if part == "cross":
        q, k = _weight(block.cross.q), _weight(block.cross.kv)
    elif config.qk_norm:
        raise RequestError("queries and keys of this model are normalised: no matrix W_Q^T W_K gives their scores")
    else:
        q, k, _ = _weight(block.attention.qkv).split(block.attention.sizes)
    queries_per_key = 1 if part == "cross" else config.heads // block.attention.kv_heads
    q_heads, k_heads = (weight.unflatten(0, (-1, config.head_width)) for weight in (q, k))
    return spectrum_of(q_heads[head], k_heads[head // queries_per_key])


def _weight(layer: nn.Module) -> Float[Tensor, "out width"]:
    """Return the weight of a linear layer, dequantized if the layer was converted for inference."""
    tensors = (
        layer.parts() if isinstance(layer, OneDnnLinear | NativeLinear | Int8Linear) else dict(layer.named_parameters())
    )
    weight: Tensor = tensors["weight"].detach().double()
    return weight * tensors["scale"] if "scale" in tensors else weight


def spectrum_of(q: Float[Tensor, "d width"], k: Float[Tensor, "d width"]) -> QKSpectrum:
    """Return the spectrum of q^T k without computing this matrix.

    An orthonormal basis of the rows of q and k (thin QR) reduces it to a matrix of at most 2 d rows, with the same
    singular values and non-zero eigenvalues.
    """
    basis, _ = torch.linalg.qr(torch.cat([q, k]).T)  # [width, min(2 d, width)]
    reduced = (q @ basis).T @ (k @ basis)
    symmetric = (reduced + reduced.T) / 2
    total = float((reduced**2).sum())
    return QKSpectrum(
        singular_values=torch.linalg.svdvals(reduced)[: len(q)],
        eigenvalues=torch.linalg.eigvalsh(symmetric).flip(0),
        symmetric_share=float((symmetric**2).sum()) / max(total, 1e-300),
    )

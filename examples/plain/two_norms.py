"""Layer norm and batch norm of a minibatch of sentences, [B, L, D], by hand and as PyTorch has them.

Layer norm: one mean and variance for each of the B L tokens, over its D features. Batch norm: one for each of the D
features, over all B L tokens, so that padding and the other sentences change what becomes of a token.
"""

import torch
from torch import nn

B, L, D = 4, 6, 8


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """Normalise each token over its features: the statistics are [B, L, 1]."""
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    return (x - mean) / (variance + 1e-5).sqrt()


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    """Normalise each feature over all tokens of the batch: the statistics are [1, 1, D]."""
    mean, variance = x.mean((0, 1), keepdim=True), x.var((0, 1), keepdim=True, correction=0)
    return (x - mean) / (variance + 1e-5).sqrt()


def main() -> dict[str, float]:
    """Return how far the first sentence moves when another sentence, or padding, changes."""
    torch.manual_seed(0)
    x = torch.randn(B, L, D)
    assert torch.allclose(layer_norm(x), nn.LayerNorm(D)(x), atol=1e-5)
    by_torch = nn.BatchNorm1d(D)(x.transpose(1, 2)).transpose(1, 2)  # it wants the features in the middle
    assert torch.allclose(batch_norm(x), by_torch, atol=1e-5)

    other = x.clone()
    other[1] = 3 * torch.randn(L, D)  # the second sentence is another one
    padded = torch.cat([x, torch.zeros(B, L, D)], dim=1)  # and every sentence is padded to twice its length
    moved = {}
    for name, norm in (("layer norm", layer_norm), ("batch norm", batch_norm)):
        moved[f"{name}, another sentence beside it"] = float((norm(other)[0] - norm(x)[0]).abs().max())
        moved[f"{name}, padding"] = float((norm(padded)[0, :L] - norm(x)[0]).abs().max())
    return moved


if __name__ == "__main__":
    for case, distance in main().items():
        print(f"{case:42}{distance:.3f}")

"""Sinusoidal positions, and why attention needs them.

Attention without positions treats a text as a set: permuting the rows permutes the outputs. Adding sin and cos of
several wavelengths tells positions apart, and PE(p + k) is a fixed rotation of PE(p) (Vaswani et al. 2017, section
3.5).
"""

import torch

from heedful.nn.positions import sinusoid

WIDTH = 8


def encoding(position: int) -> torch.Tensor:
    """Return sin and cos of position / 10000^(2i/d), alternating."""
    rates = 10_000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    return torch.stack([(position * rates).sin(), (position * rates).cos()], dim=-1).flatten()


def attention(x: torch.Tensor) -> torch.Tensor:
    """Compute self-attention without projections."""
    return (x @ x.T / WIDTH**0.5).softmax(-1) @ x


def main() -> None:
    """Check the formula, the rotation, and what permuting rows does with and without positions."""
    plain = torch.stack([encoding(position) for position in range(10)])
    assert torch.allclose(plain, sinusoid(torch.arange(10), WIDTH))

    rates = 10_000.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    cos, sin = (3 * rates).cos(), (3 * rates).sin()  # rotate each pair by the angle of three positions
    pairs = encoding(4).view(-1, 2)
    rotated = torch.stack([pairs[:, 0] * cos + pairs[:, 1] * sin, pairs[:, 1] * cos - pairs[:, 0] * sin], dim=-1)
    assert torch.allclose(rotated.flatten(), encoding(7))

    torch.manual_seed(0)
    x, order = torch.randn(10, WIDTH, dtype=torch.float64), torch.randperm(10)
    assert torch.allclose(attention(x)[order], attention(x[order]))  # equivariant: no order without positions
    assert not torch.allclose(attention(x + plain)[order], attention(x[order] + plain))


if __name__ == "__main__":
    main()

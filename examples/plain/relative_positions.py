"""Relative positions change the score of each pair, not the input: Shaw's vectors, T5's numbers, rotation.

One head reads six equal words, so that only their positions can make scores differ.
"""

import torch

from heedful import Packed
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.positions import RotaryPosition, ShawPosition

LENGTH, WIDTH, REACH = 6, 8, 3


def distances(n: int) -> torch.Tensor:
    """j - i for query i and key j, [n, n]; those beyond REACH count as REACH."""
    places = torch.arange(n)
    return (places[None, :] - places[:, None]).clamp(-REACH, REACH)


def shaw(q: torch.Tensor, k: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Scores q_i . (k_j + r_(j-i)) / sqrt(d), with a vector r for each distance (Shaw et al. 2018)."""
    vectors = r[distances(len(q)) + REACH]  # [n, n, width]
    return (q[:, None] * (k[None, :] + vectors)).sum(-1) / WIDTH**0.5


def bucketed(q: torch.Tensor, k: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Scores q_i . k_j + b_(j-i), with a number b for each distance (T5, which shares one among far distances)."""
    return q @ k.T + b[distances(len(q)) + REACH]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of components of row i by an angle proportional to i (Su et al. 2021)."""
    half = WIDTH // 2
    angles = torch.arange(len(x))[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(turned, -1)


def main() -> dict[str, torch.Tensor]:
    """Return the scores of each kind, [n, n]."""
    torch.manual_seed(0)
    q, k, v = torch.randn(WIDTH).repeat(LENGTH, 1), torch.randn(WIDTH).repeat(LENGTH, 1), torch.randn(LENGTH, WIDTH)
    library = ShawPosition(reach=REACH, width=WIDTH, values=False)
    scores = {
        "no positions": q @ k.T / WIDTH**0.5,
        "Shaw": shaw(q, k, library.keys.weight.detach()),
        "buckets": bucketed(q, k, torch.randn(2 * REACH + 1)),
        "rotary": rotated(q) @ rotated(k).T / WIDTH**0.5,
    }
    for matrix in scores.values():  # the score depends on j - i alone: every diagonal is constant
        assert torch.allclose(matrix[1:, 1:], matrix[:-1, :-1], atol=1e-5)
    batch, scale = Packed.of([[0] * LENGTH]), WIDTH**-0.5
    prepared = library.prepare(batch, q, cache_bias=False)
    bias = library.bias(q[:, None], k[:, None], prepared, scale, lambda rows: (rows, rows, rows))
    mixed = attend(q[:, None], k[:, None], v[:, None], Layout.of([0, LENGTH]), scale=scale, bias=bias)
    assert torch.allclose(mixed[:, 0], scores["Shaw"].softmax(-1) @ v, atol=1e-5)
    rotary = RotaryPosition(10_000.0, WIDTH)
    turned, _ = rotary.rotate(q[:, None], k[:, None], rotary.prepare(batch, q, cache_bias=False))
    assert torch.allclose(turned[:, 0], rotated(q), atol=1e-5)
    return scores


if __name__ == "__main__":
    for name, matrix in main().items():
        print(f"{name:12} scores of word 3 for words 0 to 5: {' '.join(f'{score:5.2f}' for score in matrix[3])}")

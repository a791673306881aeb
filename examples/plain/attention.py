"""Scaled dot-product attention for one sequence, and the library's packed attention beside it.

Each query is compared with every key, the scores become weights that sum to 1, and the output is the weighted mean of
the values (Vaswani et al. 2017, equation 1).
"""

import torch

from heedful.nn.attend import attend
from heedful.nn.layout import Layout


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(d)) v, with q [n, d], k [m, d] and v [m, d]."""
    scores = q @ k.T / k.shape[-1] ** 0.5  # [n, m]
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)  # softmax: positive, each row sums to 1
    return weights @ v


def main() -> None:
    """Compare both on two sequences that lie end to end in one batch."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 7, 8, dtype=torch.float64)  # seven rows, width 8
    plain = torch.cat([attention(q[:4], k[:4], v[:4]), attention(q[4:], k[4:], v[4:])])
    packed = attend(q[:, None], k[:, None], v[:, None], Layout.of([0, 4, 7]), scale=8**-0.5)[:, 0]  # one head
    assert torch.allclose(plain, packed)


if __name__ == "__main__":
    main()

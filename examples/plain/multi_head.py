"""Multi-head attention: several attentions over slices of the width, concatenated and mixed by one matrix.

Each head has its own projections and so its own notion of similarity (Vaswani et al. 2017, section 3.2.2).
"""

import torch
from torch import nn

from heedful.nn.attend import attend
from heedful.nn.layout import Layout

WIDTH, HEADS, ROWS = 12, 3, 5


def count(heads: int, width: int = WIDTH) -> int:
    """Parameters: q, k and v of each head are [width, width / heads], the output matrix is [width, width]."""
    return heads * 3 * width * (width // heads) + width * width


def main() -> dict[int, int]:
    """Compute it head by head and with the library's kernel; return the parameters by the number of heads."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    wq, wk, wv, wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    size = WIDTH // HEADS
    heads = []
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)  # this head's columns
        q, k, v = (x @ matrix.weight[own].T for matrix in (wq, wk, wv))  # [rows, size]
        heads.append((q @ k.T / size**0.5).softmax(-1) @ v)
    plain = wo(torch.cat(heads, dim=-1))
    q, k, v = (matrix(x).view(ROWS, HEADS, size) for matrix in (wq, wk, wv))
    library = wo(attend(q, k, v, Layout.of([0, ROWS]), scale=size**-0.5).flatten(1))
    assert torch.allclose(plain, library, atol=1e-6)
    assert count(HEADS) == sum(matrix.weight.numel() for matrix in (wq, wk, wv, wo))
    return {heads: count(heads, 768) for heads in (1, 4, 12, 48)}


if __name__ == "__main__":
    for heads, parameters in main().items():
        size = 768 // heads
        print(f"{heads:2} heads of width {size:3}, concatenated {heads * size}: {parameters:,} parameters")

"""Multi-head attention: several attentions over slices of the width, concatenated and mixed by one matrix.

Each head has its own projections and so its own notion of similarity (Vaswani et al. 2017, section 3.2.2).
"""

import torch
from torch import nn

from heedful.nn.attend import attend
from heedful.nn.layout import Layout

WIDTH, HEADS, ROWS = 12, 3, 5


def main() -> None:
    """Compute multi-head attention head by head; compare it with the library's kernel."""
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


if __name__ == "__main__":
    main()

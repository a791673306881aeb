"""Structured self-attention: several learned queries read one text, a penalty keeps them apart.

A = softmax(W2 tanh(W1 H^T)), M = A H, and |A A^T - I|^2 is added to the loss (Lin et al. 2017, equations 6 to 8).
"""

import torch

from heedful.model.classic_config import AttentionPooling
from heedful.model.pooling import QueryPooler

HOPS, WIDTH, INNER, ROWS = 3, 8, 5, 6


def main() -> torch.Tensor:
    """Return A for a random text, after comparing the mixtures M with the library's."""
    torch.manual_seed(0)
    h = torch.randn(ROWS, WIDTH)
    queries = QueryPooler(AttentionPooling(keys="tanh"), WIDTH, HOPS, INNER, bias=False)
    for parameter in queries.parameters():
        torch.nn.init.normal_(parameter)
    w1, w2 = sorted((parameter.detach() for parameter in queries.parameters()), key=lambda w: w.shape[1], reverse=True)
    assert w1.shape == (INNER, WIDTH) and w2.shape == (HOPS, INNER)
    a = (w2 @ (w1 @ h.T).tanh()).softmax(-1)  # [hops, rows]
    with torch.no_grad():
        assert torch.allclose(a @ h, queries(h, (0, ROWS))[0], atol=1e-6)
    penalty = (a @ a.T - torch.eye(HOPS)).square().sum()
    assert penalty > 0  # 0 only if each query reads one row of its own
    return a


if __name__ == "__main__":
    print(main())

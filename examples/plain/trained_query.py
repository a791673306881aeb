"""Attention for classification: one trained query reads a text; with one query for each class it is multi-class.

a = softmax(K q / sqrt(d)) and h = a^T V with K = X W_K and V = X W_V; a class is scored by w h + b. The weights depend
on the words but not on their order.
"""

import torch
from torch import nn

from heedful.model.classic_config import AttentionPooling
from heedful.model.pooling import QueryPooler

ROWS, WIDTH, CLASSES = 5, 8, 3


def main() -> torch.Tensor:
    """Return the attention weights of each class, [classes, rows], after comparing the vectors with the library's."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    reader = QueryPooler(
        AttentionPooling(keys="linear", values="linear", scaled=True), WIDTH, CLASSES, WIDTH, bias=False
    )
    for parameter in reader.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        keys, values = x @ reader.key.weight.T, x @ reader.value.weight.T
        weights = (reader.queries @ keys.T / WIDTH**0.5).softmax(-1)  # [classes, rows]
        assert torch.allclose(weights @ values, reader(x, (0, ROWS))[0], atol=1e-5)
        order = torch.randperm(ROWS)
        assert torch.allclose(reader(x[order], (0, ROWS)), reader(x, (0, ROWS)), atol=1e-5)  # order does not count
    return weights


if __name__ == "__main__":
    print(main())

"""Attention for classification: one trained query reads a text; with one query for each class it is multi-class.

a = softmax(K q / sqrt(d)) and h = a^T V with K = X W_K and V = X W_V; a class is scored by w h + b. The weights depend
on the words but not on their order.
"""

import torch
from torch import nn

from heedful.model.classic_config import AttentionPooling
from heedful.model.pooling import QueryPooler

ROWS, WIDTH, CLASSES = 7, 8, 5


def main() -> dict[str, tuple[int, ...]]:
    """Return the shapes of both ways, after comparing the vectors with the library's."""
    torch.manual_seed(0)
    x, shapes = torch.randn(ROWS, WIDTH), {}
    for name, count in (("one query", 1), ("one query for each class", CLASSES)):
        config = AttentionPooling(keys="linear", values="linear", scaled=True)
        reader = QueryPooler(config, WIDTH, count, WIDTH, bias=False)
        for parameter in reader.parameters():
            nn.init.normal_(parameter)
        w, b = torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)
        with torch.no_grad():
            keys, values = x @ reader.key.weight.T, x @ reader.value.weight.T
            weights = (reader.queries @ keys.T / WIDTH**0.5).softmax(-1)  # [queries, rows]
            h = weights @ values  # [queries, width]
            scores = w @ h[0] + b if count == 1 else (w * h).sum(-1) + b  # W h + b, or w_c . h_c + b_c for each class c
            assert torch.allclose(h, reader(x, (0, ROWS))[0], atol=1e-5)
            order = torch.randperm(ROWS)
            assert torch.allclose(reader(x[order], (0, ROWS))[0], h, atol=1e-5)  # order does not count
        shapes |= {f"{name}: q": tuple(reader.queries.shape), f"{name}: weights": tuple(weights.shape)}
        shapes |= {f"{name}: h": tuple(h.shape), f"{name}: W": tuple(w.shape), f"{name}: scores": tuple(scores.shape)}
    return shapes


if __name__ == "__main__":
    for name, shape in main().items():
        print(f"{name:34} {list(shape)}")

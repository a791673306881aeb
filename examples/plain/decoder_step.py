"""One step of a decoder with shapes: what goes in, and what is computed, when the third word is written.

Four source words were read, two words are written, so the input is the start token and these two. With a cache only
the last row is computed; the keys and values of earlier rows are kept (Vaswani et al. 2017, section 3.2.3).
"""

import torch

from heedful.nn.attend import attend
from heedful.nn.layout import Layout

WIDTH, HEADS, SOURCE, WRITTEN, VOCABULARY = 8, 2, 4, 3, 20  # written: the start token and two words
SIZE = WIDTH // HEADS


def split(x: torch.Tensor) -> torch.Tensor:
    """[rows, d] to [heads, rows, d / heads]."""
    return x.view(len(x), HEADS, SIZE).transpose(0, 1)


def main() -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, after comparing the whole prefix, the cached step and the library."""
    torch.manual_seed(0)
    encoded, x = torch.randn(SOURCE, WIDTH), torch.randn(WRITTEN, WIDTH)  # encoder's last rows; decoder's input
    wq, wk, wv, cross_q, cross_k, cross_v = torch.randn(6, WIDTH, WIDTH) / WIDTH**0.5

    q, k, v = split(x @ wq), split(x @ wk), split(x @ wv)  # self-attention: all from the words written so far
    scores = q @ k.mT / SIZE**0.5
    own = scores.masked_fill(torch.ones(WRITTEN, WRITTEN).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = (own @ v).transpose(0, 1).flatten(1)
    y = x + mixed  # norms, the output matrix and the feed-forward layer are left out

    cross_queries = split(y @ cross_q)  # cross-attention: queries from the decoder, the rest from the encoder
    cross_keys, cross_values = split(encoded @ cross_k), split(encoded @ cross_v)
    across = (cross_queries @ cross_keys.mT / SIZE**0.5).softmax(-1)  # no mask: the whole source is known
    y = y + (across @ cross_values).transpose(0, 1).flatten(1)
    logits = y[-1] @ torch.randn(WIDTH, VOCABULARY)  # the last row alone says what comes third

    last = split(x[-1:] @ wq)  # with a cache of k and v: one query, three keys
    cached = ((last @ k.mT / SIZE**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
    assert torch.allclose(cached[0], mixed[-1], atol=1e-5)
    rows = [each.transpose(0, 1) for each in (q, k, v)]
    library = attend(*rows, Layout.of([0, WRITTEN]), scale=SIZE**-0.5, causal=True)
    assert torch.allclose(library.flatten(1), mixed, atol=1e-5)
    return {
        "decoder input": tuple(x.shape),
        "encoder output": tuple(encoded.shape),
        "self-attention q, k, v": tuple(q.shape),
        "self-attention weights": tuple(own.shape),
        "cross-attention q": tuple(cross_queries.shape),
        "cross-attention k, v": tuple(cross_keys.shape),
        "cross-attention weights": tuple(across.shape),
        "scores of the third word": tuple(logits.shape),
        "with a cache: q": tuple(last.shape),
    }


if __name__ == "__main__":
    for name, shape in main().items():
        print(f"{name:26} {list(shape)}")

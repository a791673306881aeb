"""Masks: a causal mask hides later tokens, a padding mask hides padding, and packed rows need no padding mask.

A masked score is minus infinity, so its weight is exactly 0 and the others sum to 1. Weights that are multiplied by the
mask after the softmax sum to less, unless they are divided by their sum.
"""

import torch

from heedful.nn.attend import attend
from heedful.nn.layout import Layout

WIDTH = 8


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return attention with the pairs where `mask` is True; q is [..., n, d], the mask [..., n, m]."""
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def main() -> tuple[float, float]:
    """Compare a causal mask, a padded batch and packed rows; return two sums of weights, of both places of a mask."""
    torch.manual_seed(0)
    lengths = [4, 2]
    sequences = [torch.randn(length, WIDTH) for length in lengths]
    rows = torch.cat(sequences)
    layout = Layout.of([0, 4, 6])

    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    plain = attention(*[sequences[0]] * 3, causal)
    packed = attend(*[rows[:, None]] * 3, layout, scale=WIDTH**-0.5, causal=True)[:4, 0]
    assert torch.allclose(plain, packed, atol=1e-6)

    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # [2, 4, d]: two rows are padding
    present = torch.arange(4)[None] < torch.tensor(lengths)[:, None]  # [2, 4]
    output = attention(*[padded] * 3, present[:, None, :])
    packed = attend(*[rows[:, None]] * 3, layout, scale=WIDTH**-0.5)[:, 0]
    assert torch.allclose(output[present], packed, atol=1e-6)  # 8 rows computed, or 6

    scores = (padded @ padded.mT / WIDTH**0.5)[1, 0]  # of the first row of the shorter text: two keys are padding
    before = scores.masked_fill(~present[1], -torch.inf).softmax(-1)
    after = scores.softmax(-1) * present[1]
    assert torch.allclose(after / after.sum(), before)
    return float(before.sum()), float(after.sum())


if __name__ == "__main__":
    print("weights sum to {:.3f} (mask before the softmax) and {:.3f} (after it)".format(*main()))

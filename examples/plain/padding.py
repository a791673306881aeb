"""Reviews of many lengths in batches: what truncation drops, and how many computed rows are padding.

Lengths are drawn with a long tail. Truncation cuts at 512 tokens, the table of positions; a batch of 32 is padded to
the longest review of all, of its batch, or of its batch after sorting; packed batches have no padding.
"""

import torch

from heedful import Packed

LONGEST, BATCH, REVIEWS = 512, 32, 2_048


def padded(lengths: torch.Tensor, to: int | None = None) -> int:
    """Rows that are computed when each batch is padded to `to`, or to its longest text."""
    return sum(len(batch) * int(to or batch.max()) for batch in lengths.split(BATCH))


def main() -> dict[str, float]:
    """Return the shares of cut reviews and dropped tokens, and computed rows for each real one."""
    torch.manual_seed(0)
    lengths = (5.4 + 0.65 * torch.randn(REVIEWS)).exp().int()  # median 221 tokens
    kept = lengths.clamp(max=LONGEST)
    real = int(kept.sum())
    packed = Packed.of([[1] * int(length) for length in kept[:BATCH]])
    assert len(packed.tokens) == int(kept[:BATCH].sum()) <= padded(kept[:BATCH])
    rows = {
        "padded to 512": padded(kept, LONGEST) / real,
        "padded to the longest of a batch": padded(kept) / real,
        "the same, sorted by length": padded(kept.sort().values) / real,
        "packed": 1.0,
    }
    assert list(rows.values()) == sorted(rows.values(), reverse=True)
    cut = lengths > LONGEST
    return {"reviews that are cut": float(cut.float().mean()), "tokens dropped": 1 - real / int(lengths.sum())} | rows


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:34} {value:.3f}")

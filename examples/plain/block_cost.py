"""From which length on is attention the slow part of a block, or the large one? Count, and measure on this machine.

A block of width d has 12 n d^2 multiplications in its matrices (4 d^2 in the projections, 8 d^2 in the feed-forward
network) and 2 n^2 d in attention (scores and mixtures), which are equal at n = 6 d. Written out, the weights are heads
times n^2 numbers, more than the block's input n d from n = d / heads on.
"""

import sys
from collections.abc import Callable
from time import process_time

import torch

from heedful.nn.attend import attend
from heedful.nn.layout import Layout

WIDTH, HEADS = 256, 4
LENGTHS = (64, 256, 1_024)


def seconds(step: Callable[[], object], repeats: int = 3) -> float:
    """The shortest processor time of a call."""
    times = []
    for _ in range(repeats):
        start = process_time()
        step()
        times.append(process_time() - start)
    return min(times)


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [heads, n, size] that makes all [heads, n, n] weights."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def main(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[float, ...]]:
    """Return for each length: share of operations, milliseconds of matrices, attention and the kernel, megabytes."""
    torch.manual_seed(0)
    return [costs(n) for n in lengths]


def costs(n: int) -> tuple[float, ...]:
    """Return one line of the table."""
    size = WIDTH // HEADS
    q_k_v_out = torch.randn(WIDTH, 4 * WIDTH) / 16  # the four projections, side by side
    up, down = torch.randn(WIDTH, 4 * WIDTH) / 16, torch.randn(4 * WIDTH, WIDTH) / 16  # the feed-forward network
    x, (q, k, v) = torch.randn(n, WIDTH), torch.randn(3, HEADS, n, size)
    rows, layout = [tensor.transpose(0, 1).contiguous() for tensor in (q, k, v)], Layout.of([0, n])

    def matrices() -> object:
        return x @ q_k_v_out, (x @ up).relu() @ down

    def kernel() -> torch.Tensor:
        return attend(*rows, layout, scale=size**-0.5)

    assert torch.allclose(kernel().transpose(0, 1), written_out(q, k, v), atol=1e-5)
    share = 2 * n * n * WIDTH / (2 * n * n * WIDTH + 12 * n * WIDTH**2)
    times = [1e3 * seconds(step) for step in (matrices, lambda: written_out(q, k, v), kernel)]
    return n, share, *times, 4 * HEADS * n * n / 1e6, 4 * n * WIDTH / 1e6  # float32 numbers have 4 bytes


if __name__ == "__main__":
    print("    n operations  matrices attention    kernel  weights     rows")
    for n, share, *milliseconds, weights, rows in main(tuple(int(n) for n in sys.argv[1:]) or LENGTHS):
        times = " ".join(f"{duration:6.1f} ms" for duration in milliseconds)
        print(f"{n:5} {share:10.0%} {times} {weights:5.1f} MB {rows:5.2f} MB")

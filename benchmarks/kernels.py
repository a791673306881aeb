"""Time the parts of a Transformer layer, by Heedful's kernels in C++ and by PyTorch's operators.

The layer is MiniLM's (hidden size 384, 12 heads, 1,536 in the feed-forward) in bfloat16, for short and for long texts.
All ways to compute a part run in turn in one process. Products are also compared with the rate of large products.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lengths import sequences
from report import RESULTS, Spread, check_destination, grid, write
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.csrc import kernels, unavailable_reason
from heedful.nn import cpu_ops
from heedful.nn.attend import attend_with
from heedful.nn.inference_linear import Int8Linear, NativeLinear, OneDnnLinear
from heedful.nn.layout import AttentionArgs, Layout

ABOUT = """{rounds} rounds, every way in turn, in one process with {threads} threads; milliseconds, median (min-max).
The matrix rate is the best of oneDNN's and our products of 4,096 x 768 with 768 x 3,072 in bfloat16: {rate:,.0f}
GFLOP/s. `of it` is the share of this rate that a product reaches; only its multiplications and additions count.
Training is under autocast from float32 weights, and includes the casts; `PyTorch` is what Heedful runs without
kernels."""
WIDTH = 384  # hidden size
HEADS = 12
INNER = 1536  # size inside the feed-forward
WORDS = 30_522  # size of the vocabulary
CASES = {"32 short texts": ("sst2", 32), "16 texts of about 150 tokens": ("mean150", 16)}
Ways = dict[str, Callable[[], Any]]  # functions that compute the same in different ways, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The measurements of a part by one way; a record's JSON has these names."""

    case: str
    part: str
    way: str
    milliseconds: Spread
    share: float | None  # of the matrix rate; only products have one
    gain: float  # PyTorch's time over this one's


def time_in_turns(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Run all ways in turn, after two rounds to warm up; return the milliseconds of each round by way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_index in range(rounds + 2):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if round_index > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def rate(rounds: int, precision: str = "bfloat16") -> float:
    """Return the GFLOP/s of large products in bfloat16, float32 or int8, by the fastest linear layer."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    x = torch.randn(4096, 768).to(dtype)
    linear = nn.Linear(768, 3072, dtype=dtype)
    layers: dict[str, tuple[type[nn.Module], ...]] = {
        "float32": (OneDnnLinear,),
        "bfloat16": (OneDnnLinear, NativeLinear),
        "int8": (Int8Linear,),
    }
    with torch.inference_mode():
        times = time_in_turns({layer.__name__: partial(layer(linear), x) for layer in layers[precision]}, rounds)
    return 2 * 4096 * 768 * 3072 / 1e6 / min(median(durations) for durations in times.values())


def train_step(run: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Any]:
    """Return a function that runs `run` on the tensors under autocast, and then backward."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]

    def run_both() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return run_both


def parts(lengths: list[int]) -> list[tuple[str, float, Ways]]:
    """Return the parts of a layer for texts of these lengths.

    Each part has a name, the GFLOP of its matrix product (0.0 for parts that are no product), and the ways to compute
    it; "PyTorch" is the reference.
    """
    tokens = sum(lengths)
    return [
        *linear_parts(tokens),
        *attention_parts(lengths),
        ("norm(x + dropout(y)), training", 0.0, add_norm_ways(tokens)),
        ("GELU, training", 0.0, gelu_ways(tokens)),
        ("cross-entropy over 30,522 words", 0.0, cross_entropy_ways(max(1, tokens * 15 // 100))),
    ]


def linear_parts(tokens: int) -> list[tuple[str, float, Ways]]:
    """Return the first linear layer of the feed-forward, in serving and in training."""
    x = torch.randn(tokens, WIDTH)
    x_bfloat16 = x.bfloat16()
    up = cpu_ops.TrainedLinear(WIDTH, INNER).bfloat16()
    serving: Ways = {
        "PyTorch": partial(F.linear, x_bfloat16, up.weight.detach(), up.bias.detach()),
        "laid out for oneDNN": partial(OneDnnLinear(up), x_bfloat16),
        "ours": partial(NativeLinear(up), x_bfloat16),
        "ours, bytes": partial(Int8Linear(up), x_bfloat16),
    }
    trained = cpu_ops.TrainedLinear(WIDTH, INNER)
    training: Ways = {
        "PyTorch": train_step(partial(nn.Linear.forward, trained), x),
        "ours": train_step(trained, x),
    }
    gflop = 2 * tokens * WIDTH * INNER / 1e9
    return [("linear layer, serving", gflop, serving), ("linear layer, training", 3 * gflop, training)]


def attention_parts(lengths: list[int]) -> list[tuple[str, float, Ways]]:
    """Return attention without its linear layers, in serving and in training."""
    q, k, v = torch.randn(sum(lengths), 3, HEADS, WIDTH // HEADS).bfloat16().unbind(1)
    args = AttentionArgs(layout=Layout.of([0, *accumulate(lengths)]), scale=(WIDTH // HEADS) ** -0.5)

    def attend(backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_with(q, k, v, args, backend=backend)

    serving: Ways = {
        "PyTorch": partial(attend, "bmm", q, k, v),
        "PyTorch, fused": partial(attend, "fused", q, k, v),
        "ours": partial(attend, "native", q, k, v),
    }
    training: Ways = {
        "PyTorch": train_step(partial(attend, "bmm"), q, k, v),
        "ours": train_step(partial(attend, "native"), q, k, v),
    }
    return [("attention, serving", 0.0, serving), ("attention, training", 0.0, training)]


def add_norm_ways(tokens: int) -> Ways:
    """Return the ways to add a residual to hidden states with dropout, and to normalise the sum."""
    x, norm = torch.randn(tokens, WIDTH), nn.LayerNorm(WIDTH)

    def add_norm(x: Tensor, residual: Tensor) -> Tensor:
        output = cpu_ops.add_norm(x, residual, norm, 0.1)
        assert output is not None
        return output

    return {
        "PyTorch": train_step(lambda x, y: norm(x + F.dropout(y, 0.1)), x, x.bfloat16()),
        "ours": train_step(add_norm, x, x.bfloat16()),
    }


def gelu_ways(tokens: int) -> Ways:
    """Return the ways to compute GELU inside the feed-forward."""
    x = torch.randn(tokens, INNER).bfloat16()
    return {"PyTorch": train_step(F.gelu, x), "ours": train_step(cpu_ops.gelu, x)}


def cross_entropy_ways(masked: int) -> Ways:
    """Return the ways to compute the gradient of the cross-entropy of masked tokens."""
    scores, targets = torch.randn(masked, WORDS).bfloat16(), torch.arange(masked)

    def cross_entropy(logits: Tensor) -> Tensor:
        logits = logits.float().requires_grad_()
        F.cross_entropy(logits, targets, reduction="sum").backward()
        assert logits.grad is not None
        return logits.grad.bfloat16()

    return {"PyTorch": partial(cross_entropy, scores), "ours": partial(cpu_ops.cross_entropy, scores, targets)}


def measure(case: str, rounds: int, best: float) -> list[Line]:
    """Time all parts of a layer for the texts of a case.

    Args:
        best: The matrix rate, in GFLOP/s.
    """
    name, count = CASES[case]
    lines = []
    for part, gflop, ways in parts([len(sequence) for sequence in sequences(name, count)]):
        with torch.inference_mode("serving" in part):
            times = time_in_turns(ways, rounds)
        for way, durations in times.items():
            typical = median(durations)
            share = gflop / (typical / 1e3) / best if gflop and "bytes" not in way else None
            gain = median(times["PyTorch"]) / typical
            lines.append(Line(case=case, part=part, way=way, milliseconds=Spread.of(durations), share=share, gain=gain))
    return lines


def table(case: str, lines: list[Line]) -> str:
    """Format the lines of a case as Markdown."""
    rows = [
        [
            line.part,
            line.way,
            line.milliseconds.text(3),
            "" if line.share is None else f"{line.share:.0%}",
            f"{line.gain:.2f}",
        ]
        for line in lines
    ]
    return f"## {case}\n\n" + grid(["part", "way", "ms", "of it", "times as fast as PyTorch"], rows)


def main() -> None:
    """Measure both cases, print their tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    library = kernels()
    if library is None or not library.has_bfloat16:
        parser.error(
            f"there are no kernels for bfloat16 here: {unavailable_reason() or 'the processor does not multiply it'}"
        )
    if not options.quick:
        check_destination(options.output)
    rounds = 3 if options.quick else options.rounds
    best = rate(rounds)
    results = {case: measure(case, rounds, best) for case in CASES}
    texts = [table(case, lines) for case, lines in results.items()]
    print(f"matrix rate: {best:,.0f} GFLOP/s", *texts, sep="\n\n")
    if not options.quick:
        about = ABOUT.format(rounds=rounds, threads=torch.get_num_threads(), rate=best)
        data = [asdict(line) for lines in results.values() for line in lines]
        print(write("kernels", about, texts, data, options.output))


if __name__ == "__main__":
    main()

"""The kernels in C++ beside PyTorch's operators: how long a layer's parts take, and their share of the matrix rate.

All in one process, in turns; MiniLM's layer (384 wide, 12 heads, 1,536 inside), bfloat16, short and long texts.
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
GFLOP/s. `of it` is the share of that rate that a product uses, of its multiplications alone. Training is under
autocast, from float32 weights, with what that copies; `PyTorch` is what Heedful takes without kernels."""
WIDTH, HEADS, INNER, WORDS = 384, 12, 1536, 30_522
CASES = {"32 short texts": ("sst2", 32), "16 texts of about 150 tokens": ("mean150", 16)}
Ways = dict[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One part by one way."""

    case: str
    part: str
    way: str
    milliseconds: Spread
    share: float | None  # of the matrix rate
    gain: float  # PyTorch's time over this one's


def taken(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns, after two that warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if number > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def rate(rounds: int, precision: str = "bfloat16") -> float:
    """GFLOP/s of large products in bfloat16, float32 or int8, by the fastest of the ways."""
    kind = torch.float32 if precision == "float32" else torch.bfloat16
    x, linear = torch.randn(4096, 768).to(kind), nn.Linear(768, 3072, dtype=kind)
    kinds: dict[str, tuple[type[nn.Module], ...]]
    kinds = {"float32": (OneDnnLinear,), "bfloat16": (OneDnnLinear, NativeLinear), "int8": (Int8Linear,)}
    with torch.inference_mode():
        times = taken({kind.__name__: partial(kind(linear), x) for kind in kinds[precision]}, rounds)
    return 2 * 4096 * 768 * 3072 / 1e6 / min(median(durations) for durations in times.values())


def learning(run: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], Any]:
    """Forward and backward under autocast."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]

    def both() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*inputs)
        out.backward(torch.ones_like(out))
        for tensor in inputs:
            tensor.grad = None

    return both


def parts(lengths: list[int]) -> list[tuple[str, float, Ways]]:
    """Each part of a layer: its name, GFLOP, and the ways to compute it."""
    rows, bounds = sum(lengths), [0, *accumulate(lengths)]
    x, wide = torch.randn(rows, WIDTH), torch.randn(rows, INNER)
    halves, wide_halves = x.bfloat16(), wide.bfloat16()
    up, norm = cpu_ops.TrainedLinear(WIDTH, INNER), nn.LayerNorm(WIDTH)
    q, k, v = torch.randn(rows, 3, HEADS, WIDTH // HEADS).bfloat16().unbind(1)
    call = AttentionArgs(layout=Layout.of(bounds), scale=(WIDTH // HEADS) ** -0.5)
    laid: dict[str, Any] = {
        "PyTorch": F.linear,
        "laid out for oneDNN": OneDnnLinear(up.bfloat16()),
        "ours": NativeLinear(up),
        "ours, bytes": Int8Linear(up),
    }
    weight, bias = up.weight.detach(), up.bias.detach()
    up.float()
    flops = 2 * rows * WIDTH * INNER / 1e9
    chosen = max(1, rows * 15 // 100)
    scores, targets = torch.randn(chosen, WORDS).bfloat16(), torch.arange(chosen)

    def attended(name: str, q: Tensor, k: Tensor, third: Tensor) -> Tensor:
        return attend_with(q, k, third, call, backend=name)

    def normed(x: Tensor, residual: Tensor) -> Tensor:
        output = cpu_ops.add_norm(x, residual, norm, 0.1)
        assert output is not None
        return output

    def crossed(logits: Tensor) -> Tensor:
        logits = logits.float().requires_grad_()
        F.cross_entropy(logits, targets, reduction="sum").backward()
        assert logits.grad is not None
        return logits.grad.bfloat16()

    serving: Ways = {
        name: partial(way, halves, weight, bias) if way is F.linear else partial(way, halves)
        for name, way in laid.items()
    }
    attending: Ways = {name: partial(attend_with, q, k, v, call, backend=name) for name in ("bmm", "fused", "native")}
    return [
        ("linear layer, serving", flops, serving),
        (
            "attention, serving",
            0.0,
            {"PyTorch": attending["bmm"], "PyTorch, fused": attending["fused"], "ours": attending["native"]},
        ),
        (
            "linear layer, training",
            3 * flops,
            {
                "PyTorch": learning(partial(nn.Linear.forward, up), x),
                "ours": learning(up, x),
            },
        ),
        (
            "attention, training",
            0.0,
            {
                "PyTorch": learning(partial(attended, "bmm"), q, k, v),
                "ours": learning(partial(attended, "native"), q, k, v),
            },
        ),
        (
            "norm(x + dropout(y)), training",
            0.0,
            {
                "PyTorch": learning(lambda rows_, y: norm(rows_ + F.dropout(y, 0.1)), x, halves),
                "ours": learning(normed, x, halves),
            },
        ),
        (
            "GELU, training",
            0.0,
            {"PyTorch": learning(F.gelu, wide_halves), "ours": learning(cpu_ops.gelu, wide_halves)},
        ),
        (
            "cross-entropy over 30,522 words",
            0.0,
            {
                "PyTorch": partial(crossed, scores),
                "ours": partial(cpu_ops.cross_entropy, scores, targets),
            },
        ),
    ]


def measure(case: str, rounds: int, best: float) -> list[Line]:
    """All parts of a layer for the texts of a case."""
    name, count = CASES[case]
    lines = []
    for part, flops, ways in parts([len(sequence) for sequence in sequences(name, count)]):
        with torch.inference_mode("serving" in part):
            times = taken(ways, rounds)
        for way, durations in times.items():
            usual = median(durations)
            share = flops / (usual / 1e3) / best if flops and "bytes" not in way else None
            gain = median(times["PyTorch"]) / usual
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
    """Measure, print and write."""
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
        print(
            write(
                "kernels", about, texts, [asdict(line) for lines in results.values() for line in lines], options.output
            )
        )


if __name__ == "__main__":
    main()

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
from report import RESULTS, Spread, grid, write
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
        found = taken({each.__name__: partial(each(linear), x) for each in kinds[precision]}, rounds)
    return 2 * 4096 * 768 * 3072 / 1e6 / min(median(each) for each in found.values())


def learning(run: Callable[..., Tensor], *given: Tensor) -> Callable[[], Any]:
    """Forward and backward under autocast."""
    inputs = [each.detach().requires_grad_() for each in given]

    def both() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*inputs)
        out.backward(torch.ones_like(out))
        for each in inputs:
            each.grad = None

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

    def attended(name: str, one: Tensor, other: Tensor, third: Tensor) -> Tensor:
        return attend_with(one, other, third, call, backend=name)

    def normed(one: Tensor, other: Tensor) -> Tensor:
        found = cpu_ops.add_norm(one, other, norm, 0.1)
        assert found is not None
        return found

    def crossed(given: Tensor) -> Tensor:
        given = given.float().requires_grad_()
        F.cross_entropy(given, targets, reduction="sum").backward()
        assert given.grad is not None
        return given.grad.bfloat16()

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
                "PyTorch": learning(lambda one, other: norm(one + F.dropout(other, 0.1)), x, halves),
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
    for part, flops, ways in parts([len(each) for each in sequences(name, count)]):
        with torch.inference_mode("serving" in part):
            times = taken(ways, rounds)
        for way, each in times.items():
            usual = median(each)
            share = flops / (usual / 1e3) / best if flops and "bytes" not in way else None
            gain = median(times["PyTorch"]) / usual
            lines.append(Line(case=case, part=part, way=way, milliseconds=Spread.of(each), share=share, gain=gain))
    return lines


def table(case: str, lines: list[Line]) -> str:
    """As Markdown."""
    rows = [
        [
            each.part,
            each.way,
            each.milliseconds.text(3),
            "" if each.share is None else f"{each.share:.0%}",
            f"{each.gain:.2f}",
        ]
        for each in lines
    ]
    return f"## {case}\n\n" + grid(["part", "way", "ms", "of it", "times as fast as PyTorch"], rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    given = parser.parse_args()
    found = kernels()
    if found is None or not found.has_bfloat16:
        parser.error(
            f"there are no kernels for bfloat16 here: {unavailable_reason() or 'the processor does not multiply it'}"
        )
    rounds = 3 if given.quick else given.rounds
    best = rate(rounds)
    results = {case: measure(case, rounds, best) for case in CASES}
    texts = [table(case, lines) for case, lines in results.items()]
    print(f"matrix rate: {best:,.0f} GFLOP/s", *texts, sep="\n\n")
    if not given.quick:
        about = ABOUT.format(rounds=rounds, threads=torch.get_num_threads(), rate=best)
        print(
            write("kernels", about, texts, [asdict(line) for each in results.values() for line in each], given.output)
        )


if __name__ == "__main__":
    main()

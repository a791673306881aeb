"""The attention settings that are compared, and the rows on which they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import lengths
import torch
from torch import Tensor

from heedful.nn.kernels import KERNELS, Core, Kernel, bmm, fused, make_plan, run_plan, share_lines
from heedful.nn.layout import AttentionArgs, Layout

BUDGET = 4096  # tokens of a batch
HEADS = {"12 x 32": (12, 32), "12 x 64": (12, 64)}
MODES = ("forward", "forward+backward")
WIDTHS = ((), (64,), (64, 128), (64, 128, 256))
BUDGETS = (1 << 15, 1 << 18, 1 << 20)  # scores a head in a block
USUAL = ((64, 128), 1 << 16)  # in the kernel table
Batch = tuple[Tensor, Tensor, tuple[int, ...]]  # q, k and v side by side; the gradient of the result; bounds


class Case(NamedTuple):
    """The inputs of attention that are measured."""

    mode: str
    precision: str
    heads: str
    distribution: str


@dataclass(frozen=True, eq=False)
class Timed(Layout):
    """A layout that notes how long its plans took."""

    spent: list[float] = field(default_factory=list)

    def plan(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The plan of that key, made once and timed."""
        start, missing = time.perf_counter(), key not in self._plans
        plan = super().cached(key, make)
        self.spent.extend([time.perf_counter() - start] if missing else [])
        return plan


def settings() -> Iterator[Kernel]:
    """The kernel table as it is, then lines of other widths and blocks of other budgets."""
    yield from KERNELS
    others = [*product(WIDTHS, USUAL[1:]), *product(USUAL[:1], BUDGETS)]
    for (widths, budget), core in product(others, (fused, bmm)):
        name = f"{core.__name__} {'/'.join(map(str, widths)) or 'alone'} {budget >> 10}k"
        if (widths, budget) != USUAL:
            yield Kernel(name=name, run=partial(_run, core, widths, budget))


def _run(
    core: Core, widths: tuple[int, ...], budget: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
) -> Tensor:
    arrange = partial(share_lines, widths=widths, budget=budget)
    return run_plan(q, k, v, call, call.layout.cached((widths,), lambda: make_plan(call, arrange, q, k)), core)


def make_batches(case: Case, tokens: int) -> list[Batch]:
    """Make batches of about `tokens` random rows, with q, k and v side by side as in a model."""
    drawn = lengths.draw(case.distribution, max(2, int(tokens // lengths.DISTRIBUTIONS[case.distribution].mean)))
    batches, generator, train = [], torch.Generator().manual_seed(0), case.mode != "forward"
    for numbers in lengths.fill(drawn, BUDGET, longest_first=not train):
        bounds = (0, *accumulate(drawn[number] for number in numbers))
        qkv = torch.randn(bounds[-1], 3, *HEADS[case.heads], generator=generator)
        gradient = torch.randn(qkv[:, 0].shape, generator=generator)
        # rounded in every precision alike, so that results can be compared
        qkv, gradient = (tensor.bfloat16().to(getattr(torch, case.precision)) for tensor in (qkv, gradient))
        batches.append((qkv.requires_grad_(train), gradient, bounds))
    return batches


def runner(kernel: Kernel, batches: list[Batch]) -> tuple[Callable[[], list[Tensor]], list[Timed]]:
    """A round that returns results and gradients, and the layouts that keep its plans."""
    layouts = [Timed(pairs, pairs) for pairs in (tuple(pairwise(bounds)) for *_, bounds in batches)]

    def run() -> list[Tensor]:
        outputs: list[Tensor] = []
        for (qkv, gradient, _), layout in zip(batches, layouts, strict=True):
            q, k, v = qkv.unbind(1)
            with torch.set_grad_enabled(qkv.requires_grad):
                mixed = kernel.run(q, k, v, AttentionArgs(layout=layout, scale=q.shape[-1] ** -0.5))
            outputs += [mixed.detach(), *(torch.autograd.grad(mixed, qkv, gradient) if qkv.requires_grad else ())]
        return outputs

    return run, layouts

"""The settings of attention that attention.py compares, and the random queries, keys and values on which they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
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
BUDGETS = (1 << 15, 1 << 18, 1 << 20)  # scores of a head in a block
USUAL = ((64, 128), 1 << 16)  # widths and budget of the kernel table
Batch = tuple[Tensor, Tensor, tuple[int, ...]]  # q, k and v [tokens, 3, heads, head size]; result's gradient; bounds


class Case(NamedTuple):
    """The inputs of attention that are measured."""

    mode: str
    precision: str
    heads: str
    distribution: str


@dataclass(frozen=True, eq=False)
class Timed(Layout):
    """A layout that records how long each of its plans took to make."""

    spent: list[float] = field(default_factory=list)  # seconds

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan cached under a key, made and timed on first use."""
        is_missing = key not in self._plans
        start = time.perf_counter()
        plan = super().cached(key, make)
        if is_missing:
            self.spent.append(time.perf_counter() - start)
        return plan


def settings() -> Iterator[Kernel]:
    """Yield the kernels of the table, then kernels with lines of other widths and with blocks of other budgets."""
    yield from KERNELS
    variants = [*product(WIDTHS, USUAL[1:]), *product(USUAL[:1], BUDGETS)]
    for (widths, budget), core in product(variants, (fused, bmm)):
        name = f"{core.__name__} {'/'.join(map(str, widths)) or 'alone'} {budget >> 10}k"
        if (widths, budget) != USUAL:
            yield Kernel(name=name, run=partial(_run, core, widths, budget))


def _run(
    core: Core, widths: tuple[int, ...], budget: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
) -> Tensor:
    """Run a core over lines of the given widths, in blocks of a budget."""
    arrange = partial(share_lines, widths=widths, budget=budget)
    return run_plan(q, k, v, call, call.layout.cached((widths,), lambda: make_plan(call, arrange, q, k)), core)


def make_batches(case: Case, tokens: int) -> list[Batch]:
    """Make batches of about `tokens` random tokens in all, with q, k and v in one tensor as in a model."""
    count = max(2, int(tokens // lengths.DISTRIBUTIONS[case.distribution].mean))
    sizes = lengths.draw(case.distribution, count)
    generator = torch.Generator().manual_seed(0)
    train = case.mode != "forward"
    batches = []
    for indices in lengths.fill(sizes, BUDGET, longest_first=not train):
        bounds = (0, *accumulate(sizes[index] for index in indices))
        qkv = torch.randn(bounds[-1], 3, *HEADS[case.heads], generator=generator)
        gradient = torch.randn(qkv[:, 0].shape, generator=generator)
        # rounded to bfloat16 in every precision, so that results can be compared
        qkv, gradient = (tensor.bfloat16().to(getattr(torch, case.precision)) for tensor in (qkv, gradient))
        batches.append((qkv.requires_grad_(train), gradient, bounds))
    return batches


def runner(kernel: Kernel, batches: list[Batch]) -> tuple[Callable[[], list[Tensor]], list[Timed]]:
    """Return a round, whose outputs are results and gradients, and the layouts in which its plans are cached."""
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

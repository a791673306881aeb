"""The fastest execution plan of a model on this machine: measured, or read from the tuning cache."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.device import CPU
from heedful.errors import HeedfulError
from heedful.infer.precision import Precision
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.execution_plan import (
    LINEAR_KERNELS,
    ExecutionPlan,
    LinearKernel,
    apply_plan,
    example_bias,
    exchange_linears,
    unsupported_reason,
)
from heedful.infer.tuning.fused_block import FusedBlock, can_fuse
from heedful.model.config import Shaw, StackConfig, TransformerXl
from heedful.model.stack import AttentionContext, Block, ExecutionOptions, LayerContext
from heedful.nn.attend import KERNELS, attend_with
from heedful.nn.layers import Mlp
from heedful.nn.layout import AttentionArgs, Layout
from heedful.nn.positions import RelativePosition

AUTOTUNE_VARIABLE = (
    "HEEDFUL_AUTOTUNE"  # "off": nothing is measured, and every machine uses the same kernels: reproducible, but slower
)
LINEAR_ROWS = (16, 1024)  # rows at which linear layers, or blocks, are timed: a short text, and a batch
LINEAR_TEXT = 64  # tokens of each text of that batch, where whole blocks are timed
TEXT_LENGTHS = (256, 128, *[64] * 6, *[24] * 10)  # tokens of the texts whose attention is timed
ROUNDS = 7
MAX_TIME_RATIO = 0.97  # a linear kernel replaces the plain one if the geometric mean of its time ratios is at most this


def autotune(bundle: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Apply the fastest plan to a model in the precision's dtype, and return it; the model can no longer be trained."""
    plan = tuned_plan(bundle, precision)
    apply_plan(bundle, plan)
    return plan


def tuned_plan(bundle: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Return the fastest plan on this machine, measured now or before.

    Raises:
        HeedfulError: If such a model cannot be computed in that precision on its device.
    """
    if reason := unsupported_reason(precision, bundle.config.model, next(bundle.parameters()).device):
        raise HeedfulError(f"{bundle.source}: {reason}")
    return fastest_plan(bundle, precision)


def autotune_enabled() -> bool:
    """Whether ways are measured at all: not where HEEDFUL_AUTOTUNE is off."""
    return os.environ.get(AUTOTUNE_VARIABLE) != "off"


def fastest_plan(loaded: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Return the fastest plan for a model and this machine, from the tuning cache or measured now."""
    stack = loaded.config.model.encoder or loaded.config.model.decoder
    parameter = next(loaded.parameters())
    if stack is None:
        return ExecutionPlan(precision=precision, why=("without a stack of blocks there is one way",))
    if parameter.device.type != "cpu":
        return ExecutionPlan(precision=precision, why=(f"on {parameter.device.type} PyTorch's own products are taken",))
    if not autotune_enabled():
        linears: LinearKernel = "int8" if precision == "int8" else "plain"
        return ExecutionPlan(
            precision=precision, linears=linears, why=(f"nothing was measured: {AUTOTUNE_VARIABLE} is off",)
        )
    facts = {"machine": tuning_cache.machine_facts(), "precision": precision, "stack": repr(stack)}
    way = tuning_cache.read_entry(facts, _read)
    if way is None:
        way = _measured(loaded, stack, precision)
        tuning_cache.write_entry(facts, asdict(way))
    return way


def _read(record: Any) -> ExecutionPlan:
    """Return a way from plain data; raises a TypeError, KeyError or ValueError for anything else."""
    way = ExecutionPlan(**{**record, "why": tuple(record["why"])})
    kernels = ("", *(kernel.name for kernel in KERNELS))
    known = way.precision in get_args(Precision) and way.linears in get_args(LinearKernel) and way.attention in kernels
    if not known or not all(isinstance(reason, str) for reason in way.why):
        raise ValueError(f"{record} is not a way to compute a model")
    return way


def _measured(loaded: ModelBundle, config: StackConfig, precision: Precision) -> ExecutionPlan:
    way = ExecutionPlan(precision=precision)
    dtype = next(loaded.parameters()).dtype
    with torch.inference_mode():
        # those have a bias of each row's own, beside which kernels take their time for other things
        if loaded.model.encoder is not None and not isinstance(config.relation, Shaw | TransformerXl):
            way = _with_attention(way, config, dtype)
        if precision == "int8":
            return replace(way, linears="int8", why=(*way.why, "linear layers: products of whole numbers"))
        linear = next(module for module in loaded.modules() if isinstance(module, Mlp)).up
        block = None if loaded.model.encoder is None else loaded.model.encoder.blocks[0]
        return _with_linears(way, config, linear, block if isinstance(block, Block) else None)


def _with_attention(way: ExecutionPlan, config: StackConfig, dtype: torch.dtype) -> ExecutionPlan:
    bounds = [sum(TEXT_LENGTHS[:number]) for number in range(len(TEXT_LENGTHS) + 1)]
    q, k, v = _rows(3 * bounds[-1], config.heads * config.head_width, dtype).view(
        3, bounds[-1], config.heads, config.head_width
    )
    k, v = k[:, : config.kv_heads], v[:, : config.kv_heads]
    bias = example_bias(config, bounds[-1], max(TEXT_LENGTHS), dtype, CPU)
    call = AttentionArgs(layout=Layout.of(bounds), scale=1.0, window=config.window, bias=bias)
    names = [kernel.name for kernel in KERNELS if not kernel.cannot(q, k, v, call)]

    times = median_times({name: partial(attend_with, q, k, v, replace(call, preferred=name)) for name in names})
    best = min(times, key=times.__getitem__)
    return replace(way, attention=best, why=(*way.why, f"attention: {best} ({_shown(times)} for {bounds[-1]} tokens)"))


def _with_linears(way: ExecutionPlan, config: StackConfig, plain: nn.Linear, block: Block | None) -> ExecutionPlan:
    """Add the fastest linear layers to a plan: of whole blocks where native ones make a single call of a block."""
    reasons: dict[LinearKernel, str] = {
        name: kernel.cannot(plain) for name, kernel in LINEAR_KERNELS.items() if name != "int8"
    }
    usable: list[LinearKernel] = [name for name, reason in reasons.items() if not reason]
    layers: dict[LinearKernel, Callable[[Tensor], object]] = {
        "plain": plain,
        **{name: LINEAR_KERNELS[name].make(plain, None) for name in usable},
    }
    timed = "a layer"
    if "native" in usable and block is not None and config.relation is None and way.attention in ("", "native"):
        blocks = {name: _exchanged(block, name) for name in layers}
        if can_fuse(blocks["native"]):
            timed, layers = "a block", {name: _block_run(blocks[name], config, way.attention) for name in blocks}
    ratios: dict[LinearKernel, float] = dict.fromkeys(layers, 1.0)
    notes = []
    for rows in LINEAR_ROWS if usable else ():
        x = _rows(rows, plain.in_features, plain.weight.dtype)
        times = median_times({name: partial(run, x) for name, run in layers.items()})
        ratios = {name: ratio * times[name] / times["plain"] for name, ratio in ratios.items()}
        notes.append(f"{_shown(times)} for {rows} rows of {timed}")
    best = min(ratios, key=ratios.__getitem__)
    if ratios[best] > MAX_TIME_RATIO ** len(LINEAR_ROWS):
        best = "plain"
    notes += [f"no {name}: {reason}" for name, reason in reasons.items() if reason]
    return replace(way, linears=best, why=(*way.why, f"linear layers: {best} ({'; '.join(notes)})"))


def _exchanged(block: Block, linears: LinearKernel) -> Block:
    """Return a copy of a block with other linear layers."""
    blocks = nn.ModuleList([copy.deepcopy(block)])
    if linears != "plain":
        exchange_linears(blocks, linears)
    copied = blocks[0]
    assert isinstance(copied, Block)
    return copied.eval()


def _block_run(block: Block, config: StackConfig, attention: str) -> Callable[[Tensor], object]:
    """Return a function that computes a block for rows, which are texts of LINEAR_TEXT tokens or a shorter one."""
    execution = ExecutionOptions(encoder_kernel=attention, fused_block=FusedBlock() if can_fuse(block) else None)
    layer = LayerContext(
        part="encoder", layer=0, window=config.window_of(0), relation=RelativePosition(), prepared=None
    )

    def run(x: Tensor) -> Tensor:
        layout = Layout.of(range(0, len(x) + 1, min(LINEAR_TEXT, len(x))))
        y: Tensor = block(x, AttentionContext(layout=layout, execution=execution), layer)
        return y

    return run


def _rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def median_times(runs: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each, the median over rounds in which all have their turn, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def _shown(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())

"""The fastest execution plan of a model on this machine, from the tuning cache or measured."""

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
from heedful.model.attention import AttentionContext, ExecutionOptions, LayerContext
from heedful.model.config import Shaw, StackConfig, TransformerXl
from heedful.model.stack import Block
from heedful.nn.attend import KERNELS, attend_with
from heedful.nn.layers import Mlp
from heedful.nn.layout import AttentionArgs, Layout
from heedful.nn.positions import RelativePosition

# environment variable; if it is "off", plans are not measured but the same on every machine: reproducible, but slower
AUTOTUNE_VARIABLE = "HEEDFUL_AUTOTUNE"
LINEAR_ROWS = (16, 1024)  # rows of the inputs for which linear layers or blocks are timed: a short text, and a batch
LINEAR_TEXT = 64  # tokens of each text in the batch, if blocks are timed
TEXT_LENGTHS = (256, 128, *[64] * 6, *[24] * 10)  # tokens of the texts whose attention is timed
ROUNDS = 7  # timed runs of each kernel
# maximum geometric mean of a linear kernel's times / the plain kernel's times, for which it replaces the plain kernel
MAX_TIME_RATIO = 0.97


def autotune(bundle: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Apply the fastest plan to a model, which then cannot be trained any more; return the plan.

    Args:
        bundle: The model, loaded in the activation dtype of the precision.
        precision: The precision.
    """
    plan = tuned_plan(bundle, precision)
    apply_plan(bundle, plan)
    return plan


def tuned_plan(bundle: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Return the fastest plan of a model on this machine, from the tuning cache or measured now.

    Raises:
        HeedfulError: If the model cannot be computed in the precision on its device.
    """
    if reason := unsupported_reason(precision, bundle.config.model, next(bundle.parameters()).device):
        raise HeedfulError(f"{bundle.source}: {reason}")
    return fastest_plan(bundle, precision)


def autotune_enabled() -> bool:
    """Return whether plans may be measured: the environment variable HEEDFUL_AUTOTUNE is not "off"."""
    return os.environ.get(AUTOTUNE_VARIABLE) != "off"


def fastest_plan(bundle: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Return the fastest plan of a model on its device. The precision is not checked, unlike in `tuned_plan`."""
    stack = bundle.config.model.encoder or bundle.config.model.decoder
    parameter = next(bundle.parameters())
    if stack is None:
        return ExecutionPlan(precision=precision, why=("a model without blocks has one plan",))
    if parameter.device.type != "cpu":
        return ExecutionPlan(precision=precision, why=(f"on {parameter.device.type} PyTorch's own kernels are used",))
    if not autotune_enabled():
        linears: LinearKernel = "int8" if precision == "int8" else "plain"
        return ExecutionPlan(
            precision=precision, linears=linears, why=(f"nothing was measured: {AUTOTUNE_VARIABLE} is off",)
        )
    facts = {"machine": tuning_cache.machine_facts(), "precision": precision, "stack": repr(stack)}
    plan = tuning_cache.read_entry(facts, _plan_from_record)
    if plan is None:
        plan = _measure_plan(bundle, stack, precision)
        tuning_cache.write_entry(facts, asdict(plan))
    return plan


def _plan_from_record(record: Any) -> ExecutionPlan:
    """Return a plan from plain data; raises a TypeError, KeyError or ValueError if the data is damaged."""
    plan = ExecutionPlan(**{**record, "why": tuple(record["why"])})
    kernels = ("", *(kernel.name for kernel in KERNELS))
    if plan.precision not in get_args(Precision) or plan.linears not in get_args(LinearKernel):
        raise ValueError(f"{record} has an unknown precision or kernel of linear layers")
    if plan.attention not in kernels or not all(isinstance(reason, str) for reason in plan.why):
        raise ValueError(f"{record} has an unknown attention kernel, or reasons that are not text")
    return plan


def _measure_plan(bundle: ModelBundle, config: StackConfig, precision: Precision) -> ExecutionPlan:
    """Time the kernels for attention and for linear layers, and return the plan with the fastest ones."""
    plan = ExecutionPlan(precision=precision)
    dtype = next(bundle.parameters()).dtype
    with torch.inference_mode():
        # computing the biases of each row takes most of the time of these relations, with any kernel
        has_row_bias = isinstance(config.relation, Shaw | TransformerXl)
        if bundle.model.encoder is not None and not has_row_bias:
            plan = _with_attention(plan, config, dtype)
        if precision == "int8":
            return replace(plan, linears="int8", why=(*plan.why, "linear layers: int8 products"))
        linear = next(module for module in bundle.modules() if isinstance(module, Mlp)).up
        block = None if bundle.model.encoder is None else bundle.model.encoder.blocks[0]
        return _with_linears(plan, config, linear, block if isinstance(block, Block) else None)


def _with_attention(plan: ExecutionPlan, config: StackConfig, dtype: torch.dtype) -> ExecutionPlan:
    """Return the plan with the attention kernel that is fastest for texts with TEXT_LENGTHS tokens."""
    bounds = [sum(TEXT_LENGTHS[:number]) for number in range(len(TEXT_LENGTHS) + 1)]
    q, k, v = _random_rows(3 * bounds[-1], config.heads * config.head_width, dtype).view(
        3, bounds[-1], config.heads, config.head_width
    )
    k, v = k[:, : config.kv_heads], v[:, : config.kv_heads]
    bias = example_bias(config, bounds[-1], max(TEXT_LENGTHS), dtype, CPU)
    args = AttentionArgs(layout=Layout.of(bounds), scale=1.0, window=config.window, bias=bias)
    names = [kernel.name for kernel in KERNELS if not kernel.cannot(q, k, v, args)]
    times = median_times({name: partial(attend_with, q, k, v, replace(args, preferred=name)) for name in names})
    fastest = min(times, key=times.__getitem__)
    reason = f"attention: {fastest} ({_format_times(times)} for {bounds[-1]} tokens)"
    return replace(plan, attention=fastest, why=(*plan.why, reason))


def _with_linears(plan: ExecutionPlan, config: StackConfig, linear: nn.Linear, block: Block | None) -> ExecutionPlan:
    """Return the plan with the fastest kernel for linear layers.

    Whole blocks are timed if `FusedBlock` can compute them with native layers; otherwise single layers are timed.

    Args:
        plan: The plan so far, with its attention kernel.
        config: The stack.
        linear: A linear layer of the stack, as it was loaded.
        block: A block of the encoder; None if the model has no encoder.
    """
    reasons: dict[LinearKernel, str] = {
        name: kernel.cannot(linear) for name, kernel in LINEAR_KERNELS.items() if name != "int8"
    }
    usable: list[LinearKernel] = [name for name, reason in reasons.items() if not reason]
    functions: dict[LinearKernel, Callable[[Tensor], object]] = {
        "plain": linear,
        **{name: LINEAR_KERNELS[name].make(linear, None) for name in usable},
    }
    timed_module = "a layer"
    if "native" in usable and block is not None and config.relation is None and plan.attention in ("", "native"):
        blocks = {name: _with_kernel(block, name) for name in functions}
        if can_fuse(blocks["native"]):
            timed_module = "a block"
            functions = {name: _block_function(blocks[name], config, plan.attention) for name in blocks}
    # product over LINEAR_ROWS of (time / time of the plain layer)
    ratios: dict[LinearKernel, float] = dict.fromkeys(functions, 1.0)
    notes = []
    for rows in LINEAR_ROWS if usable else ():
        x = _random_rows(rows, linear.in_features, linear.weight.dtype)
        times = median_times({name: partial(function, x) for name, function in functions.items()})
        ratios = {name: ratio * times[name] / times["plain"] for name, ratio in ratios.items()}
        notes.append(f"{_format_times(times)} for {rows} rows of {timed_module}")
    fastest = min(ratios, key=ratios.__getitem__)
    if ratios[fastest] > MAX_TIME_RATIO ** len(LINEAR_ROWS):
        fastest = "plain"
    notes += [f"no {name}: {reason}" for name, reason in reasons.items() if reason]
    return replace(plan, linears=fastest, why=(*plan.why, f"linear layers: {fastest} ({'; '.join(notes)})"))


def _with_kernel(block: Block, linears: LinearKernel) -> Block:
    """Return a copy of a block whose linear layers use this kernel."""
    blocks = nn.ModuleList([copy.deepcopy(block)])
    if linears != "plain":
        exchange_linears(blocks, linears)
    copied = blocks[0]
    assert isinstance(copied, Block)
    return copied.eval()


def _block_function(block: Block, config: StackConfig, attention: str) -> Callable[[Tensor], object]:
    """Return a function that computes a block for inputs [rows, width], as texts of up to LINEAR_TEXT tokens."""
    execution = ExecutionOptions(encoder_kernel=attention, fused_block=FusedBlock() if can_fuse(block) else None)
    layer = LayerContext(
        part="encoder", layer=0, window=config.window_of(0), relation=RelativePosition(), prepared=None
    )

    def compute(x: Tensor) -> Tensor:
        layout = Layout.of(range(0, len(x) + 1, min(LINEAR_TEXT, len(x))))
        y: Tensor = block(x, AttentionContext(layout=layout, execution=execution), layer)
        return y

    return compute


def _random_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return normally distributed numbers, [count, width], from a fixed seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def median_times(functions: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median duration of each function in seconds.

    In each round, all functions run in turn, so that changes of the machine's speed affect all of them. The first round
    is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def _format_times(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())

"""A model made ready to answer: its linear layers and its attention computed in the way that is fastest here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.device import CPU, has_fast_bfloat16
from heedful.errors import HeedfulError
from heedful.infer.precision import Precision
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.fused_block import FusedBlock, can_fuse
from heedful.model.config import Buckets, ModelConfig, Shaw, StackConfig, TransformerXl
from heedful.model.stack import Block, ExecutionOptions
from heedful.nn.attend import KERNELS, attend_with
from heedful.nn.cpu_ops import usable_kernels
from heedful.nn.inference_linear import (
    FUSED,
    Int8Linear,
    NativeLinear,
    OneDnnLinear,
    cannot_use_native,
    cannot_use_onednn,
)
from heedful.nn.layers import ACTIVATIONS, Mlp
from heedful.nn.layout import AttentionArgs, Bias, Layout, RelativeBias

LinearKernel = Literal["plain", "laid", "panels", "rounded"]
AUTOTUNE_VARIABLE = (
    "HEEDFUL_AUTOTUNE"  # "off": the same way on every machine, for the same bits, and not the fastest one
)
LINEAR_ROWS = (16, 1024)  # of the linear layers that are timed: one short text, a batch
TEXT_LENGTHS = (256, 128, *[64] * 6, *[24] * 10)  # tokens of the texts whose attention is timed
ROUNDS = 7
MAX_TIME_RATIO = 0.97  # another way is taken when it takes at most so much of the time


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """How a model is computed, and why so."""

    precision: Precision
    linears: LinearKernel = "plain"
    attention: str = ""  # the kernel that is tried first; none: in the order of the kernel table
    why: tuple[str, ...] = ()


class _Laying(NamedTuple):
    make: Callable[[nn.Linear, str | None], nn.Module]
    applies: tuple[str, ...]  # activations
    cannot: Callable[[nn.Linear], str]


LINEAR_KERNELS: dict[LinearKernel, _Laying] = {
    "laid": _Laying(OneDnnLinear, tuple(FUSED), lambda linear: cannot_use_onednn(linear.weight.dtype)),
    "panels": _Laying(NativeLinear, ("gelu",), cannot_use_native),
    "rounded": _Laying(Int8Linear, ("gelu",), lambda linear: ""),
}


def activation_dtype(precision: Precision) -> torch.dtype:
    """Of the rows, and of weights that stay as they are; whole numbers beside bfloat16 where the processor has it."""
    return torch.bfloat16 if precision == "bfloat16" or (precision == "int8" and has_fast_bfloat16()) else torch.float32


def unsupported_reason(precision: Precision, model: ModelConfig, device: torch.device) -> str:
    """Why such a model does not answer in that precision on that device, or nothing."""
    if precision == "int8" and device.type != "cpu":
        return f"int8 is for the processor: on {device.type} take float32, bfloat16 or auto"
    if precision == "int8" and model.encoder is None and model.decoder is None:
        return "int8 rounds the linear layers of blocks, and this model has none: take float32, bfloat16 or auto"
    return ""


def autotune(loaded: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Measure, or remember, which way is the fastest here, and compute the model that way from now on.

    The model has to be in the precision's dtype. Weights of linear layers are replaced: it answers, and learns no
    more.
    """
    if reason := unsupported_reason(precision, loaded.config.model, next(loaded.parameters()).device):
        raise HeedfulError(f"{loaded.source}: {reason}")
    way = fastest_plan(loaded, precision)
    model = loaded.model
    if way.linears != "plain":
        for stack in (model.encoder, model.decoder):
            if stack is not None:
                _exchange(stack.blocks, way.linears)
    blocks = [] if model.encoder is None else list(model.encoder.blocks)
    fuses = way.attention in ("", "native") and any(isinstance(block, Block) and can_fuse(block) for block in blocks)
    model.execution = ExecutionOptions(
        encoder_kernel=way.attention,
        fused_block=FusedBlock() if fuses else None,
        pad_to_bucket=model.execution.pad_to_bucket if way.linears == "plain" else way.linears == "laid",
    )
    return way


def _exchange(blocks: nn.ModuleList, linears: LinearKernel) -> None:
    for above in list(blocks.modules()):
        way = LINEAR_KERNELS[linears]
        if isinstance(above, Mlp) and (name := _fused(above)) in way.applies and not way.cannot(above.up):
            above.add_module("up", way.make(above.up, name))
            above.activation = _as_it_is
        if isinstance(above, nn.LayerNorm) and usable_kernels(above.weight) is not None:
            above.float()  # as the kernels read it
        for name, each in above.named_children():
            if isinstance(each, nn.Linear) and not way.cannot(each):
                above.add_module(name, way.make(each, None))


def _fused(mlp: Mlp) -> str:
    """The name of the activation that the product before it can apply."""
    return next((name for name in FUSED if mlp.activation is ACTIVATIONS[name] and not mlp.gated), "")


def _as_it_is(x: Tensor) -> Tensor:
    return x


# -- the fastest way ------------------------------------------------------------------------------------------


def autotune_enabled() -> bool:
    """Whether ways are measured at all: not where HEEDFUL_AUTOTUNE is off."""
    return os.environ.get(AUTOTUNE_VARIABLE) != "off"


def fastest_plan(loaded: ModelBundle, precision: Precision) -> ExecutionPlan:
    """Of a model in its precision on its device: as was measured on this machine before, or now, in a moment."""
    stack = loaded.config.model.encoder or loaded.config.model.decoder
    parameter = next(loaded.parameters())
    if stack is None:
        return ExecutionPlan(precision=precision, why=("without a stack of blocks there is one way",))
    if parameter.device.type != "cpu":
        return ExecutionPlan(precision=precision, why=(f"on {parameter.device.type} PyTorch's own products are taken",))
    if not autotune_enabled():
        linears: LinearKernel = "rounded" if precision == "int8" else "plain"
        return ExecutionPlan(
            precision=precision, linears=linears, why=(f"nothing was measured: {AUTOTUNE_VARIABLE} is off",)
        )
    facts = {"machine": tuning_cache.machine_facts(), "precision": precision, "stack": repr(stack)}
    way = tuning_cache.read_entry(facts, _read)
    if way is None:
        way = _measured(loaded, stack, precision)
        tuning_cache.write_entry(facts, asdict(way))
    return way


def _read(found: Any) -> ExecutionPlan:
    """Return a way from plain data; raises a TypeError, KeyError or ValueError for anything else."""
    way = ExecutionPlan(**{**found, "why": tuple(found["why"])})
    kernels = ("", *(each.name for each in KERNELS))
    known = way.precision in get_args(Precision) and way.linears in get_args(LinearKernel) and way.attention in kernels
    if not known or not all(isinstance(each, str) for each in way.why):
        raise ValueError(f"{found} is not a way to compute a model")
    return way


def _measured(loaded: ModelBundle, config: StackConfig, precision: Precision) -> ExecutionPlan:
    way = ExecutionPlan(precision=precision)
    dtype = next(loaded.parameters()).dtype
    with torch.inference_mode():
        # those have a bias of each row's own, beside which kernels take their time for other things
        if loaded.model.encoder is not None and not isinstance(config.relation, Shaw | TransformerXl):
            way = _with_attention(way, config, dtype)
        if precision == "int8":
            return replace(way, linears="rounded", why=(*way.why, "linear layers: products of whole numbers"))
        linear = next(each for each in loaded.modules() if isinstance(each, Mlp)).up
        return _with_linears(way, linear)


def _with_attention(way: ExecutionPlan, config: StackConfig, dtype: torch.dtype) -> ExecutionPlan:
    bounds = [sum(TEXT_LENGTHS[:number]) for number in range(len(TEXT_LENGTHS) + 1)]
    q, k, v = _rows(3 * bounds[-1], config.heads * config.head_width, dtype).view(
        3, bounds[-1], config.heads, config.head_width
    )
    bias = example_bias(config, bounds[-1], max(TEXT_LENGTHS), dtype, CPU)
    call = AttentionArgs(layout=Layout.of(bounds), scale=1.0, window=config.window, bias=bias)
    names = [each.name for each in KERNELS if not each.cannot(q, k, v, call)]

    times = median_times({name: partial(attend_with, q, k, v, replace(call, preferred=name)) for name in names})
    best = min(times, key=times.__getitem__)
    return replace(way, attention=best, why=(*way.why, f"attention: {best} ({_shown(times)} for {bounds[-1]} tokens)"))


def example_bias(config: StackConfig, rows: int, longest: int, dtype: torch.dtype, device: torch.device) -> Bias | None:
    """A bias of the kind and shape that a stack adds to the scores of texts with so many rows; all of it is 0."""
    match config.relation:
        case Buckets(reach=reach):
            heads: tuple[int, ...] = (config.heads,)
        case Shaw(reach=reach):
            heads = (rows, config.heads)
        case TransformerXl():
            heads, reach = (rows, config.heads), longest
        case _:
            return None
    gaps = 2 * min(reach, longest - 1) + 1
    has_values = isinstance(config.relation, Shaw) and config.relation.values
    values = torch.zeros(gaps, config.head_width, dtype=dtype, device=device) if has_values else None
    return RelativeBias(table=torch.zeros(*heads, gaps, dtype=dtype, device=device), values=values, blocks={})


def _with_linears(way: ExecutionPlan, plain: nn.Linear) -> ExecutionPlan:
    reasons: dict[LinearKernel, str] = {
        name: each.cannot(plain) for name, each in LINEAR_KERNELS.items() if name != "rounded"
    }
    made = {name: LINEAR_KERNELS[name].make(plain, None) for name, reason in reasons.items() if not reason}
    ratios: dict[LinearKernel, float] = dict.fromkeys(made, 1.0)
    told = []
    for rows in LINEAR_ROWS if made else ():
        x = _rows(rows, plain.in_features, plain.weight.dtype)
        times = median_times({name: partial(layer, x) for name, layer in {"plain": plain, **made}.items()})
        ratios = {name: ratio * times[name] / times["plain"] for name, ratio in ratios.items()}
        told.append(f"{_shown(times)} for {rows} rows")
    best: LinearKernel = min(ratios, key=ratios.__getitem__, default="plain")
    if made and ratios[best] > MAX_TIME_RATIO**2:
        best = "plain"
    told += [f"no {name}: {reason}" for name, reason in reasons.items() if reason]
    return replace(way, linears=best, why=(*way.why, f"linear layers: {best} ({'; '.join(told)})"))


def _rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def median_times(runs: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of each, the median over rounds in which all have their turn, after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in times.items()}


def _shown(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())

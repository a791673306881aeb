"""The relative position modules of a stack, made from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from heedful.model.config import (
    Buckets,
    Disentangled,
    DynamicNtk,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Rotary,
    Scaling,
    Shaw,
    StackConfig,
    TransformerXl,
    Yarn,
)
from heedful.nn.positions import (
    BucketedPosition,
    DisentangledPosition,
    DynamicNtkShape,
    Llama3Shape,
    LongRopeShape,
    RelativePosition,
    RotaryPosition,
    ShawPosition,
    TransformerXlPosition,
    YarnShape,
)


def make_relations(config: StackConfig) -> list[RelativePosition]:
    """Make the relative position modules of a stack.

    The list has one module for all layers; or two, for layers without and with a window; or one for each block.
    """
    match config.relation:
        case Rotary(base=base, local_base=local_base, scaling=scaling, local_scaling=local_scaling):
            rotary = _make_rotary(base, scaling, config.head_width)
            if local_base is None:
                return [rotary]
            return [rotary, _make_rotary(local_base, local_scaling, config.head_width)]
        case Buckets(count=count, reach=reach):
            return [BucketedPosition(count=count, reach=reach, heads=config.heads, causal=config.causal)]
        case Disentangled(buckets=count, reach=reach, norm=norm):
            eps = config.norm_eps if norm else None
            sizes = {"buckets": count, "reach": reach, "width": config.width}
            return [DisentangledPosition(**sizes, norm_eps=eps, dropout=config.dropout)]
        case Shaw(reach=reach, values=values):
            make: Callable[[], RelativePosition] = partial(
                ShawPosition, reach=reach, width=config.head_width, values=values
            )
        case TransformerXl(reach=reach):
            sizes = {"width": config.width, "heads": config.heads, "head_width": config.head_width}
            make = partial(TransformerXlPosition, **sizes, reach=reach, dropout=config.dropout)
        case None:
            return [RelativePosition()]
    return [make() for _ in range(config.blocks or config.layers)]


def _make_rotary(base: float, scaling: Scaling | None, width: int) -> RotaryPosition:
    """Make rotary positions.

    Args:
        base: Base of the frequencies.
        scaling: Scaling for sequences longer than those in training. None: no scaling.
        width: Head dimension.
    """
    match scaling:
        case LinearScaling(factor=factor):
            return RotaryPosition(base, width, factor=factor)
        case DynamicNtk(factor=factor, trained=trained):
            return RotaryPosition(base, width, by_length=DynamicNtkShape(factor=factor, trained=trained))
        case Yarn(factor=factor, trained=trained, fast=fast, slow=slow, truncate=truncate):
            yarn = YarnShape(factor=factor, trained=trained, fast=fast, slow=slow, truncate=truncate)
            return RotaryPosition(base, width, shape=yarn, magnitude=scaling.magnitude)
        case Llama3Scaling(factor=factor, trained=trained, low=low, high=high):
            return RotaryPosition(base, width, shape=Llama3Shape(factor=factor, trained=trained, low=low, high=high))
        case LongRope(short=short, long=long, trained=trained):
            longrope = LongRopeShape(short=short, long=long, trained=trained)
            return RotaryPosition(base, width, shape=longrope, by_length=longrope, magnitude=scaling.magnitude)
    return RotaryPosition(base, width)

"""How fresh weights are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heedful.model.config import Normal, TruncatedNormal, Xavier
from heedful.model.stack import Attention, CrossAttention
from heedful.nn.layers import Mlp


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def undrawn() -> Iterator[None]:
    """What is made within has no memory, and its weights are not drawn: that alone would import PyTorch's compiler,
    which takes longer than to read a small model."""
    with torch.device("meta"), _Undrawn():
        yield


@torch.no_grad()
def initialise(
    module: nn.Module, scheme: TruncatedNormal | Normal | Xavier, generator: torch.Generator | None = None
) -> None:
    """Draw every weight below the module afresh: biases 0, norms 1 and 0, padding rows 0, the rest by the scheme."""
    drawn: set[torch.Tensor] = set()
    stacked = {each: count for part in module.modules() for each, count in _stacked(part)}
    # embeddings first: an output that is tied to one is not drawn again, and its padding row stays 0
    for part in sorted(module.modules(), key=lambda part: not isinstance(part, nn.Embedding)):
        if isinstance(part, nn.Linear | nn.Embedding) and part.weight not in drawn:
            for matrix in part.weight.chunk(stacked.get(part, 1)):
                _draw(matrix, scheme, isinstance(part, nn.Embedding), generator)
            drawn.add(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            part.bias.zero_()
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            part.weight.fill_(1.0)
        if not isinstance(part, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm):
            for loose in part.parameters(recurse=False):
                _draw(loose.view(-1, loose.shape[-1]), scheme, True, generator)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx].zero_()


def _stacked(part: nn.Module) -> list[tuple[nn.Module, int]]:
    """Linear layers that are several below each other, each drawn by its own fan-out."""
    match part:
        case Attention():
            return [(part.qkv, 3)]
        case CrossAttention():
            return [(part.kv, 2)]
        case Mlp(gated=True):
            return [(part.up, 2)]
    return []


def _draw(
    weight: torch.Tensor,
    scheme: TruncatedNormal | Normal | Xavier,
    embedding: bool,
    generator: torch.Generator | None,
) -> None:
    match scheme:
        case TruncatedNormal(std=std):
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
        case Normal(std=std):
            weight.normal_(0.0, std, generator=generator)
        case Xavier() if embedding:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        case Xavier():
            nn.init.xavier_uniform_(weight, generator=generator)

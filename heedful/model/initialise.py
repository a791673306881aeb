"""Initialisation of new weights, and `skip_init` for models whose weights are loaded instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from heedful.model.attention import Attention, CrossAttention
from heedful.model.config import FanIn, Initialisation, Normal, TruncatedNormal, Xavier
from heedful.model.stack import Stack
from heedful.nn.layers import Mlp
from heedful.nn.positions import BucketedPosition


class _SkipInit(TorchFunctionMode):
    """A mode in which the functions of torch.nn.init return their tensor unchanged."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def skip_init() -> Iterator[None]:
    """Create modules on the meta device, without memory and without initial weights.

    Initialising on the meta device would import PyTorch's compiler, which takes longer than loading a small model.
    """
    with torch.device("meta"), _SkipInit():
        yield


@torch.no_grad()
def initialise(module: nn.Module, scheme: Initialisation, generator: torch.Generator | None = None) -> None:
    """Initialise every weight of a module.

    Biases and padding rows are set to 0, and gains of norms to 1. Other weights are sampled as the scheme defines.
    """
    initialised: set[torch.Tensor] = set()
    matrices_of: dict[nn.Module, Matrices] = {}
    for submodule in module.modules():
        matrices_of |= _matrices(submodule, scheme)
    # embeddings first: an output layer that is tied to one is not initialised again, and the padding row stays 0
    for submodule in sorted(module.modules(), key=lambda submodule: not isinstance(submodule, nn.Embedding)):
        if isinstance(submodule, nn.Linear | nn.Embedding) and submodule.weight not in initialised:
            for matrix, factor in matrices_of.get(submodule, [(submodule.weight, 1.0)]):
                _sample(matrix, scheme, isinstance(submodule, nn.Embedding), factor, generator)
            initialised.add(submodule.weight)
        if isinstance(submodule, nn.Linear | nn.LayerNorm) and submodule.bias is not None:
            submodule.bias.zero_()
        if isinstance(submodule, nn.LayerNorm | nn.RMSNorm):
            submodule.weight.fill_(1.0)
        if not isinstance(submodule, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm):
            for name, parameter in submodule.named_parameters(recurse=False):
                if name.startswith("bias"):  # biases of recurrent networks
                    parameter.zero_()
                    continue
                _sample(parameter.view(-1, parameter.shape[-1]), scheme, True, 1.0, generator)
        if isinstance(submodule, nn.Embedding) and submodule.padding_idx is not None:
            submodule.weight[submodule.padding_idx].zero_()


Matrices = list[tuple[torch.Tensor, float]]  # (matrix, factor) of each matrix that a layer's weight consists of


def _matrices(module: nn.Module, scheme: Initialisation) -> dict[nn.Module, Matrices]:
    """Return the matrices of those layers of a module whose weights join several matrices or have another factor."""
    output_factor = getattr(scheme, "outputs", 1.0)
    has_unscaled_scores = isinstance(scheme, FanIn)
    match module:
        case Attention():
            factors = (module.head_width**-0.5 if has_unscaled_scores else 1.0, 1.0, 1.0)
            qkv = list(zip(module.qkv.weight.split(module.sizes), factors, strict=True))
            return {module.qkv: qkv, module.out: _split(module.out, output_factor)}
        case CrossAttention():
            query_factor = (module.q.out_features // module.heads) ** -0.5 if has_unscaled_scores else 1.0
            return {
                module.q: _split(module.q, query_factor),
                module.kv: _split(module.kv, 1.0, 1.0),
                module.out: _split(module.out, output_factor),
            }
        case Mlp():
            up_factors = (1.0, 1.0) if module.gated else (1.0,)
            return {module.up: _split(module.up, *up_factors), module.down: _split(module.down, output_factor)}
        case Stack() if has_unscaled_scores:
            tables = [relation.table for relation in module.relations if isinstance(relation, BucketedPosition)]
            return {table: _split(table, module.config.width**-0.5) for table in tables}
    return {}


def _split(layer: nn.Linear | nn.Embedding, *factors: float) -> Matrices:
    """Split a layer's weight into matrices of equal size, one for each factor."""
    return list(zip(layer.weight.chunk(len(factors)), factors, strict=True))


def _sample(
    weight: torch.Tensor, scheme: Initialisation, embedding: bool, factor: float, generator: torch.Generator | None
) -> None:
    """Sample the elements of one matrix; `factor` multiplies their standard deviation, except with Xavier."""
    match scheme:
        case TruncatedNormal(std=std, cut=cut):
            std *= factor
            nn.init.trunc_normal_(weight, std=std, a=-cut * std, b=cut * std, generator=generator)
        case Normal(std=std):
            weight.normal_(0.0, std * factor, generator=generator)
        case FanIn(factor=scheme_factor):
            fan_in = 1.0 if embedding else weight.shape[1] ** -0.5
            weight.normal_(0.0, scheme_factor * factor * fan_in, generator=generator)
        case Xavier() if embedding:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        case Xavier():
            nn.init.xavier_uniform_(weight, generator=generator)

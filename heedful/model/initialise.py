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
    """Initialise every weight of the module: biases 0, norms 1 and 0, padding rows 0, the rest by the scheme."""
    initialised: set[torch.Tensor] = set()
    matrices_of = {layer: matrices for part in module.modules() for layer, matrices in _matrices(part, scheme)}
    # embeddings first: an output layer that is tied to one is not initialised again, and the padding row stays 0
    for part in sorted(module.modules(), key=lambda part: not isinstance(part, nn.Embedding)):
        if isinstance(part, nn.Linear | nn.Embedding) and part.weight not in initialised:
            for matrix, factor in matrices_of.get(part, [(part.weight, 1.0)]):
                _sample(matrix, scheme, isinstance(part, nn.Embedding), factor, generator)
            initialised.add(part.weight)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            part.bias.zero_()
        if isinstance(part, nn.LayerNorm | nn.RMSNorm):
            part.weight.fill_(1.0)
        if not isinstance(part, nn.Linear | nn.Embedding | nn.LayerNorm | nn.RMSNorm):
            for name, parameter in part.named_parameters(recurse=False):
                if name.startswith("bias"):  # biases of recurrent networks
                    parameter.zero_()
                    continue
                _sample(parameter.view(-1, parameter.shape[-1]), scheme, True, 1.0, generator)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx].zero_()


Matrices = list[tuple[torch.Tensor, float]]  # matrices of one layer's weight, with the factor of their deviation


def _matrices(part: nn.Module, scheme: Initialisation) -> list[tuple[nn.Module, Matrices]]:
    """Return the matrices of layers whose weight joins several matrices, or has another factor than 1."""
    output_factor = getattr(scheme, "outputs", 1.0)
    has_unscaled_scores = isinstance(scheme, FanIn)
    match part:
        case Attention():
            factors = (part.head_width**-0.5 if has_unscaled_scores else 1.0, 1.0, 1.0)
            qkv = list(zip(part.qkv.weight.split(part.sizes), factors, strict=True))
            return [(part.qkv, qkv), (part.out, _split(part.out, output_factor))]
        case CrossAttention():
            query_factor = (part.q.out_features // part.heads) ** -0.5 if has_unscaled_scores else 1.0
            kv = _split(part.kv, 1.0, 1.0)
            return [(part.q, _split(part.q, query_factor)), (part.kv, kv), (part.out, _split(part.out, output_factor))]
        case Mlp():
            up = _split(part.up, *[1.0] * (2 if part.gated else 1))
            return [(part.up, up), (part.down, _split(part.down, output_factor))]
        case Stack() if has_unscaled_scores:
            tables = [relation.table for relation in part.relations if isinstance(relation, BucketedPosition)]
            return [(table, _split(table, part.config.width**-0.5)) for table in tables]
    return []


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

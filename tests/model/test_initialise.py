"""Initialisation: distributions, seeds, and the tensors that are 0 or 1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from heedful.model.config import (
    EmbeddingConfig,
    Learned,
    MaskedTokens,
    ModelConfig,
    Normal,
    StackConfig,
    TruncatedNormal,
    Xavier,
)
from heedful.model.heads import make_head
from heedful.model.initialise import initialise
from heedful.model.stack import Transformer

Scheme = TruncatedNormal | Normal | Xavier
WIDTH = 64


def build(scheme: Scheme, seed: int = 0, kv_heads: int | None = None) -> nn.Module:
    """Return a model with a tied head, initialised after all its parameters were set to 7."""
    config = ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=500, width=WIDTH, padding=3, norm="layer", positions=Learned(count=40, padding=1), types=2
        ),
        encoder=StackConfig(width=WIDTH, layers=1, heads=4, kv_heads=kv_heads, head_width=16, inner_width=256),
    )
    model = Transformer(config)
    module = nn.ModuleDict({"model": model, "head": make_head(MaskedTokens(), model)})
    for parameter in module.parameters():
        nn.init.constant_(parameter, 7.0)
    initialise(module, scheme, torch.Generator().manual_seed(seed))
    return module


@pytest.mark.parametrize("scheme", [TruncatedNormal(std=0.05), Normal(std=0.05)], ids=lambda scheme: scheme.kind)
def test_normal_distributions(scheme: TruncatedNormal | Normal) -> None:
    weight = build(scheme).get_parameter("model.encoder.blocks.0.mlp.up.weight")
    count, std = weight.numel(), 0.05
    truncated_std = 0.8796256610342398  # of a standard normal distribution, truncated at 2
    expected = std * (truncated_std if isinstance(scheme, TruncatedNormal) else 1.0)
    assert abs(weight.mean()) < 5 * expected / count**0.5, "within 5 standard errors"
    assert abs(weight.std() / expected - 1) < 5 / (2 * count) ** 0.5
    assert (weight.abs().max() <= 2 * std) == isinstance(scheme, TruncatedNormal)
    assert weight.abs().max() > 1.9 * std


def test_xavier() -> None:
    module = build(Xavier())
    weight = module.get_parameter("model.encoder.blocks.0.mlp.up.weight")
    bound = (6 / (64 + 256)) ** 0.5
    assert 0.99 * bound < weight.abs().max() <= bound
    assert abs(weight.var() / (2 / (64 + 256)) - 1) < 0.05
    fused = module.get_parameter("model.encoder.blocks.0.attention.qkv.weight")  # three matrices of 64 x 64
    assert abs(fused.var() / (2 / (64 + 64)) - 1) < 0.05
    shared = build(Xavier(), kv_heads=1).get_parameter("model.encoder.blocks.0.attention.qkv.weight")
    for matrix in shared.split((64, 16, 16)):
        assert abs(matrix.var() / (2 / (64 + len(matrix))) - 1) < 0.1
    tokens = module.get_parameter("model.embedding.tokens.weight")
    assert abs(tokens.std() * WIDTH**0.5 - 1) < 0.05, "a tied tensor is initialised as an embedding"


@pytest.mark.parametrize("scheme", [TruncatedNormal(), Normal(), Xavier()], ids=lambda scheme: scheme.kind)
def test_padding_rows_and_biases_are_zero_and_norms_one(scheme: Scheme) -> None:
    module = build(scheme)
    assert module.get_parameter("model.embedding.tokens.weight")[3].eq(0).all()
    assert module.get_parameter("model.embedding.positions.weight")[1].eq(0).all()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            assert parameter.ne(0).float().mean() > 0.9 and parameter.ne(7).all(), name


def test_the_seed_decides() -> None:
    first, same_seed, other_seed = (dict(build(Normal(), seed).named_parameters()) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], same_seed[name]) for name in first)
    assert not torch.equal(first["model.embedding.tokens.weight"], other_seed["model.embedding.tokens.weight"])

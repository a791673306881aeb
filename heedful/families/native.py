"""Heedful's own: any mixture that the stack can build; config.json holds ModelConfig and the head as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from heedful.families.table import Family, HeadEntry, Keys, Table, rows
from heedful.model.config import (
    Choice,
    Classes,
    EmbeddingConfig,
    Head,
    MaskedTokens,
    ModelConfig,
    NextSentence,
    NextToken,
    NextTokenAndChoice,
    PermutedTokens,
    Pooled,
    Pretraining,
    ReplacedTokens,
    Sinusoidal,
    Span,
    StackConfig,
    TokenClasses,
    Xavier,
)
from heedful.settings import read as read_settings
from heedful.settings import to_mapping


def read(keys: Keys) -> ModelConfig:
    """The key "model"."""
    model: ModelConfig = read_settings(ModelConfig, keys.mapping("model"), source=f"{keys.source}: model")
    return model


def write(model: ModelConfig) -> dict[str, Any]:
    """The same."""
    return {"model": to_mapping(model)}


def _entry(head: type) -> HeadEntry:
    def read_head(keys: Keys, model: ModelConfig) -> Head:
        found: Head = read_settings(head, keys.mapping("head"), source=f"{keys.source}: head")
        return found

    # no table: the body's one row claims the head's names as well
    return HeadEntry(head=head, read=read_head, write=lambda given: {"head": to_mapping(given)})


def original(width: int, heads: int, inner: int, dropout: float) -> dict[str, Any]:
    """The original Transformer (Vaswani et al. 2017, table 3): one embedding for source, target and output."""
    encoder = StackConfig(
        width=width,
        layers=6,
        heads=heads,
        head_width=width // heads,
        inner_width=inner,
        activation="relu",
        norm_eps=1e-6,
        dropout=dropout,
    )
    embedding = EmbeddingConfig(
        vocabulary=37_000, width=width, positions=Sinusoidal(), scale=width**0.5, dropout=dropout
    )
    decoder = replace(encoder, causal=True, cross=True)
    model = ModelConfig(embedding=embedding, encoder=encoder, decoder=decoder, initialisation=Xavier())
    return {"model": to_mapping(model)}


HEADS = (
    *(Pooled, MaskedTokens, Pretraining, NextSentence, Classes, TokenClasses, Choice, Span),
    *(ReplacedTokens, NextToken, NextTokenAndChoice, PermutedTokens),
)

FAMILY = Family(
    prefix="",
    read=read,
    write=write,
    body=lambda model: Table(rows=rows(("{any}", "{any}"))),
    heads={
        "HeedfulModel": HeadEntry(head=type(None), read=lambda keys, model: None),
        **{f"HeedfulFor{head.__name__}": _entry(head) for head in HEADS},
    },
    sizes={
        "transformer-base": original(512, 8, 2048, 0.1),
        "transformer-big": original(1024, 16, 4096, 0.3),
    },
)

"""Heedful's own format for any model that the stack can build: config.json holds our ModelConfig and head."""

from __future__ import annotations

from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family, HeadMap
from heedful.families.names import NameTable, name_rows
from heedful.model.config import (
    Choice,
    Classes,
    Head,
    MaskedTokens,
    ModelConfig,
    NextSentenceScores,
    NextToken,
    NextTokenAndChoice,
    PermutedTokens,
    Pooled,
    Pretraining,
    ReplacedTokens,
    SpanScores,
    TokenClasses,
)
from heedful.model.vaswani import PUBLISHED_SIZES, vaswani_config
from heedful.settings import from_mapping as read_settings
from heedful.settings import to_mapping


def read(reader: ConfigReader) -> ModelConfig:
    """Read ModelConfig from the key "model"."""
    model: ModelConfig = read_settings(ModelConfig, reader.mapping("model"), source=f"{reader.source}: model")
    return model


def write(model: ModelConfig) -> dict[str, object]:
    """Write the key "model"."""
    return {"model": to_mapping(model)}


def _entry(head: type) -> HeadMap:
    """Return the HeadMap of a head, whose configuration is under the key "head"."""

    def read_head(reader: ConfigReader, model: ModelConfig) -> Head:
        head_config: Head = read_settings(head, reader.mapping("head"), source=f"{reader.source}: head")
        return head_config

    # the head needs no name table: the one row of the body's table claims all names
    return HeadMap(head=head, read=read_head, write=lambda head_config: {"head": to_mapping(head_config)})


HEADS: dict[str, type] = {  # end of the architecture's name -> configuration
    "Pooled": Pooled,
    "MaskedTokens": MaskedTokens,
    "Pretraining": Pretraining,
    "NextSentence": NextSentenceScores,
    "Classes": Classes,
    "TokenClasses": TokenClasses,
    "Choice": Choice,
    "Span": SpanScores,
    "ReplacedTokens": ReplacedTokens,
    "NextToken": NextToken,
    "NextTokenAndChoice": NextTokenAndChoice,
    "PermutedTokens": PermutedTokens,
}

FAMILY = Family(
    prefix="",
    read=read,
    write=write,
    body=lambda model: NameTable(rows=name_rows(("{any}", "{any}"))),
    heads={
        "HeedfulModel": HeadMap(head=type(None), read=lambda reader, model: None),
        **{f"HeedfulFor{name}": _entry(head) for name, head in HEADS.items()},
    },
    sizes={f"transformer-{name}": write(vaswani_config(shape, 37_000)) for name, shape in PUBLISHED_SIZES.items()},
)

"""Heedful's models from before the Transformer; config.json holds ClassicConfig and the head as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from heedful.errors import HeedfulError
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family, HeadMap
from heedful.families.names import NameTable, name_maps
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import Classes, Head, ModelConfig, NextToken, TokenClasses
from heedful.settings import from_mapping as read_settings
from heedful.settings import to_mapping


def read(keys: ConfigReader) -> ModelConfig:
    """The key "model"."""
    model: ClassicConfig = read_settings(ClassicConfig, keys.mapping("model"), source=f"{keys.source}: model")
    return model


def write(model: ModelConfig) -> dict[str, Any]:
    """The same."""
    return {"model": to_mapping(model)}


def _entry(head: type) -> HeadMap:
    def read_head(keys: ConfigReader, model: ModelConfig) -> Head:
        if model.has_decoder != (head is NextToken):
            does = (
                'writes texts: it has the head "language_model" alone'
                if model.has_decoder
                else "reads texts and writes none"
            )
            raise HeedfulError(f"{keys.source}: this classic model {does}")
        found: Head = read_settings(head, keys.mapping("head"), source=f"{keys.source}: head")
        # the model's reader makes the vectors of a text, so that there is no dense layer
        return replace(found, dense=False, activation=None) if isinstance(found, Classes) else found

    return HeadMap(head=head, read=read_head, write=lambda given: {"head": to_mapping(given)})


FAMILY = Family(
    prefix="",
    read=read,
    write=write,
    body=lambda model: NameTable(rows=name_maps(("{any}", "{any}"))),
    heads={
        "HeedfulClassicModel": HeadMap(head=type(None), read=lambda keys, model: None),
        **{f"HeedfulClassicFor{head.__name__}": _entry(head) for head in (Classes, TokenClasses, NextToken)},
    },
)

"""Heedful's models from before the Transformer: config.json holds our ClassicConfig and head."""

from __future__ import annotations

from dataclasses import replace

from heedful.errors import HeedfulError
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family, HeadMap
from heedful.families.names import NameTable, name_rows
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import Classes, Head, ModelConfig, NextToken, TokenClasses
from heedful.settings import from_mapping as read_settings
from heedful.settings import to_mapping


def read(reader: ConfigReader) -> ModelConfig:
    """Read ClassicConfig from the key "model"."""
    model: ClassicConfig = read_settings(ClassicConfig, reader.mapping("model"), source=f"{reader.source}: model")
    return model


def write(model: ModelConfig) -> dict[str, object]:
    """Write the key "model"."""
    return {"model": to_mapping(model)}


def _entry(head: type) -> HeadMap:
    """Return the HeadMap of a head, whose configuration is under the key "head"."""

    def read_head(reader: ConfigReader, model: ModelConfig) -> Head:
        if model.has_decoder != (head is NextToken):
            does = (
                'generates text: it has only the head "language_model"'
                if model.has_decoder
                else "reads text and generates none"
            )
            raise HeedfulError(f"{reader.source}: this classic model {does}")
        head_config: Head = read_settings(head, reader.mapping("head"), source=f"{reader.source}: head")
        # the pooling belongs to the model here, so the head has no dense layer
        return replace(head_config, dense=False, activation=None) if isinstance(head_config, Classes) else head_config

    return HeadMap(head=head, read=read_head, write=lambda head_config: {"head": to_mapping(head_config)})


FAMILY = Family(
    prefix="",
    read=read,
    write=write,
    body=lambda model: NameTable(rows=name_rows(("{any}", "{any}"))),
    heads={
        "HeedfulClassicModel": HeadMap(head=type(None), read=lambda reader, model: None),
        **{f"HeedfulClassicFor{head.__name__}": _entry(head) for head in (Classes, TokenClasses, NextToken)},
    },
)

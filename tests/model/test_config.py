"""Configurations that cannot be built are refused, by the name of the field."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

import heedful
from heedful.checkpoint import read_config
from heedful.families import FAMILIES
from heedful.model.config import EmbeddingConfig, StackConfig

STACK: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "head_width": 4, "inner_width": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", 0), ("layers", -1), ("heads", 0), ("window", -1), ("global_every", 0), ("dropout", 1.5)],
)
def test_a_stack_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(heedful.HeedfulError, match=f"^{name} is {value}; expected a"):
        StackConfig(**STACK | {name: value})


def test_an_embedding_names_the_field() -> None:
    with pytest.raises(heedful.HeedfulError, match=r"^vocabulary is 0; expected a whole number from 1"):
        EmbeddingConfig(vocabulary=0, width=8)


def test_a_native_config_names_the_path() -> None:
    values: dict[str, Any] = {"model_type": "heedful", **deepcopy(FAMILIES["heedful"].sizes["transformer-base"])}
    values["model"]["encoder"] = {**values["model"]["encoder"], "heads": 0}
    with pytest.raises(heedful.HeedfulError, match=r"config\.json: model.*heads is 0"):
        read_config(values, "config.json")
    values["model"]["encoder"] = {**values["model"]["encoder"], "heads": 8, "hedas": 8}
    with pytest.raises(heedful.HeedfulError, match=r'hedas.*did you mean "heads"'):
        read_config(values, "config.json")

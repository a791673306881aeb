"""Invalid configurations are refused, and the error names the field."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import read_config
from heedful.families import FAMILIES
from heedful.model.config import (
    Buckets,
    Disentangled,
    EmbeddingConfig,
    Learned,
    Sinusoidal,
    StackConfig,
    TransformerXl,
)
from heedful.nn.positions import distance_buckets

STACK: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "head_width": 4, "inner_width": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", 0), ("layers", -1), ("heads", 0), ("window", -1), ("global_every", 0), ("dropout", 1.5)],
)
def test_a_stack_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(heedful.HeedfulError, match=f"^{name} is {value}; expected a"):
        StackConfig(**STACK | {name: value})


@pytest.mark.parametrize("kv_heads", [0, 3, 4])
def test_kv_heads_must_divide_heads(kv_heads: int) -> None:
    with pytest.raises(heedful.HeedfulError, match=f"^kv_heads is {kv_heads}; expected a number that divides heads, 2"):
        StackConfig(**STACK, kv_heads=kv_heads)


@pytest.mark.parametrize("relation", [TransformerXl(), Disentangled()])
@pytest.mark.parametrize("changed", [{"kv_heads": 1}, {"qk_norm": True}])
def test_some_relations_refuse_grouped_and_normalised_heads(relation: Any, changed: dict[str, Any]) -> None:
    with pytest.raises(heedful.HeedfulError, match=f'not supported with relation "{relation.kind}": leave them out'):
        StackConfig(**STACK, relation=relation, **changed)


def test_kv_heads_of_another_number_of_heads_have_the_same_group_size() -> None:
    stack = StackConfig(**STACK | {"heads": 9}, kv_heads=3)
    assert [stack.kv_heads_of(heads) for heads in (12, 3, 8)] == [4, 1, None]
    assert StackConfig(**STACK).kv_heads_of(6) is None


def test_global_every_and_global_layers_exclude_each_other() -> None:
    with pytest.raises(heedful.HeedfulError, match="global_every and global_layers both say which layers see"):
        StackConfig(**STACK, window=2, global_every=2, global_layers=(0,))


@pytest.mark.parametrize(
    ("relation", "causal", "message"),
    [
        (Buckets(count=3), False, "relation.count is 3; expected a whole number of buckets from 4"),
        (Buckets(count=1), True, "relation.count is 1; expected a whole number of buckets from 2"),
        (Buckets(count=32, reach=8), False, "relation.reach is 8; expected more than 8: nearer ones have a bucket"),
        (Buckets(count=32, reach=16), True, "relation.reach is 16; expected more than 16: nearer ones have a bucket"),
    ],
)
def test_buckets_hold_distances(relation: Buckets, causal: bool, message: str) -> None:
    with pytest.raises(heedful.HeedfulError, match=f"^{message}"):
        StackConfig(**STACK, relation=relation, causal=causal)


@pytest.mark.parametrize(("count", "reach", "causal"), [(4, 2, False), (2, 2, True), (32, 9, False), (32, 17, True)])
def test_the_smallest_allowed_buckets_are_all_used_in_order(count: int, reach: int, causal: bool) -> None:
    assert StackConfig(**STACK, relation=Buckets(count=count, reach=reach), causal=causal).causal == causal
    buckets = distance_buckets(torch.arange(-reach, reach + 1), count, reach, causal).tolist()
    assert set(buckets) <= set(range(count)) and buckets[0] == (count if causal else count // 2) - 1
    assert buckets[: reach + 1] == sorted(buckets[: reach + 1], reverse=True)


def test_an_embedding_names_the_field() -> None:
    with pytest.raises(heedful.HeedfulError, match=r"^vocabulary is 0; expected a whole number from 1"):
        EmbeddingConfig(vocabulary=0, width=8)


@pytest.mark.parametrize("kind", [partial(Learned, count=9), Sinusoidal])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"join": "concatenate"}, "positions.width is None; concatenated positions need a whole number from 1"),
        ({"join": "concatenate", "width": 0}, "positions.width is 0; concatenated positions need a whole number .*"),
        ({"width": 6}, "positions.width is 6; added positions are as wide as tokens, 8: leave it out"),
    ],
)
def test_positions_have_a_width_that_fits(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(heedful.HeedfulError, match=f"^{message}$"):
        EmbeddingConfig(vocabulary=30, width=8, positions=kind(**arguments))
    assert EmbeddingConfig(vocabulary=30, width=8, positions=kind(width=8)).positions is not None


def test_errors_of_a_heedful_config_name_the_path() -> None:
    values: dict[str, Any] = {"model_type": "heedful", **deepcopy(FAMILIES["heedful"].sizes["transformer-base"])}
    values["model"]["encoder"] = {**values["model"]["encoder"], "heads": 0}
    with pytest.raises(heedful.HeedfulError, match=r"config\.json: model.*heads is 0"):
        read_config(values, "config.json")
    values["model"]["encoder"] = {**values["model"]["encoder"], "heads": 8, "hedas": 8}
    with pytest.raises(heedful.HeedfulError, match=r'hedas.*did you mean "heads"'):
        read_config(values, "config.json")

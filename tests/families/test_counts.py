"""Exact parameter counts of the published models, tied weights counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heedful.checkpoint import Loaded, read_config
from heedful.families import FAMILIES

COUNTS = {
    "bert-base-uncased": {
        "pooled": 109_482_240,
        "pretraining": 110_106_428,
        "masked": 109_514_298,
        "classes": 109_483_778,
        "span": 108_893_186,
    },
    "bert-base-cased": {"pooled": 108_310_272},
    "bert-base-multilingual-cased": {"pooled": 177_853_440},
    "bert-large-uncased": {"pooled": 335_141_888, "pretraining": 336_226_108},
    "bert-large-cased": {"pooled": 333_579_264},
    "bert-tiny": {"pooled": 4_385_920},
    "bert-mini": {"pooled": 11_170_560},
    "bert-small": {"pooled": 28_763_648},
    "bert-medium": {"pooled": 41_373_184},
    "minilm-l6-h384-uncased": {"pooled": 22_713_216},
    "minilm-l12-h384-uncased": {"pooled": 33_360_000},
    "tinybert-4l-312d": {"pooled": 14_350_248},
    "roberta-base": {"pooled": 124_645_632, "masked": 124_697_433},
    "roberta-large": {"pooled": 355_359_744, "masked": 355_412_057},
    "distilroberta-base": {"pooled": 82_118_400},
    "distilbert-base-uncased": {"none": 66_362_880, "masked": 66_985_530, "classes": 66_955_010},
    "distilbert-base-cased": {"none": 65_190_912},
}
SIZES: dict[str, tuple[str, Any]] = {
    name: (kind, values) for kind, family in FAMILIES.items() for name, values in family.sizes.items()
}


@pytest.mark.parametrize(
    ("name", "head", "count"), [(name, head, count) for name, heads in COUNTS.items() for head, count in heads.items()]
)
def test_count(name: str, head: str, count: int) -> None:
    kind, values = SIZES[name]
    with torch.device("meta"):
        assert Loaded(read_config({**values, "model_type": kind}, name, head=head)).count() == count


def test_every_published_size_can_be_built() -> None:
    for name, (kind, values) in SIZES.items():
        with torch.device("meta"):
            assert Loaded(read_config({**values, "model_type": kind}, name)).count() > 0

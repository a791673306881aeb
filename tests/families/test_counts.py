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
    "albert-base-v2": {"pooled": 11_683_584, "masked": 11_221_680},
    "albert-large-v2": {"pooled": 17_683_968, "masked": 16_795_824},
    "albert-xlarge-v2": {"pooled": 58_724_864, "masked": 54_821_040},
    "albert-xxlarge-v2": {"pooled": 222_595_584, "masked": 206_368_944},
    "xlnet-base-cased": {"none": 116_718_336, "permuted": 116_750_336},
    "xlnet-large-cased": {"none": 360_268_800, "permuted": 360_300_800},
    "t5-small": {"none": 60_506_624, "next_token": 60_506_624, "encoder": 35_330_816},
    "t5-base": {"none": 222_903_552, "encoder": 109_628_544},
    "t5-large": {"none": 737_668_096, "encoder": 334_939_648},
    "t5-3b": {"none": 2_851_598_336},
    "t5-11b": {"none": 11_307_321_344},
    "gpt2": {"none": 124_439_808, "next_token": 124_439_808},
    "gpt2-medium": {"none": 354_823_168},
    "gpt2-large": {"none": 774_030_080},
    "gpt2-xl": {"none": 1_557_611_200},
    "distilgpt2": {"none": 81_912_576},
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

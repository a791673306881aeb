"""Exact parameter counts of the published models, tied weights counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heedful.checkpoint import ModelBundle, read_config
from heedful.families import FAMILIES

COUNTS = {
    "bert-base-uncased": {
        "pooler": 109_482_240,
        "pretraining": 110_106_428,
        "masked_lm": 109_514_298,
        "sequence_classification": 109_483_778,
        "question_answering": 108_893_186,
    },
    "bert-base-cased": {"pooler": 108_310_272},
    "bert-base-multilingual-cased": {"pooler": 177_853_440},
    "bert-large-uncased": {"pooler": 335_141_888, "pretraining": 336_226_108},
    "bert-large-cased": {"pooler": 333_579_264},
    "bert-tiny": {"pooler": 4_385_920},
    "bert-mini": {"pooler": 11_170_560},
    "bert-small": {"pooler": 28_763_648},
    "bert-medium": {"pooler": 41_373_184},
    "minilm-l6-h384-uncased": {"pooler": 22_713_216},
    "minilm-l12-h384-uncased": {"pooler": 33_360_000},
    "multilingual-minilm-l12-h384": {"pooler": 117_653_760},
    "tinybert-4l-312d": {"pooler": 14_350_248},
    "bge-m3": {"pooler": 567_754_752},
    "ettin-encoder-1b": {"none": 1_028_050_688},
    "mmbert-base": {"none": 306_939_648, "masked_lm": 307_786_240},
    "roberta-base": {"pooler": 124_645_632, "masked_lm": 124_697_433},
    "roberta-large": {"pooler": 355_359_744, "masked_lm": 355_412_057},
    "distilroberta-base": {"pooler": 82_118_400},
    "distilbert-base-uncased": {"none": 66_362_880, "masked_lm": 66_985_530, "sequence_classification": 66_955_010},
    "distilbert-base-cased": {"none": 65_190_912},
    "mpnet-base": {"pooler": 109_486_464, "masked_lm": 109_518_527},
    "nomic-embed-text-v1.5": {"none": 136_731_648, "masked_lm": 137_354_304},
    "gte-multilingual-base": {"none": 305_368_320, "sequence_classification": 305_960_450},
    "gte-base-en-v1.5": {"none": 136_776_192},
    "gte-large-en-v1.5": {"none": 434_139_136},
    "jina-embeddings-v3": {"pooler": 559_364_096},
    "deberta-v3-xsmall": {"none": 70_682_112},
    "deberta-v3-small": {"none": 141_304_320},
    "deberta-v3-base": {"none": 183_831_552, "masked_lm": 184_551_780, "sequence_classification": 184_423_682},
    "deberta-v3-large": {"none": 434_012_160, "multiple_choice": 435_062_785},
    "mdeberta-v3-base": {"none": 278_218_752, "question_answering": 278_220_290},
    "albert-base-v2": {"pooler": 11_683_584, "masked_lm": 11_221_680},
    "albert-large-v2": {"pooler": 17_683_968, "masked_lm": 16_795_824},
    "albert-xlarge-v2": {"pooler": 58_724_864, "masked_lm": 54_821_040},
    "albert-xxlarge-v2": {"pooler": 222_595_584, "masked_lm": 206_368_944},
    "xlnet-base-cased": {"none": 116_718_336, "permutation_lm": 116_750_336},
    "xlnet-large-cased": {"none": 360_268_800, "permutation_lm": 360_300_800},
    "t5-small": {"none": 60_506_624, "language_model": 60_506_624, "encoder": 35_330_816},
    "t5-base": {"none": 222_903_552, "encoder": 109_628_544},
    "t5-large": {"none": 737_668_096, "encoder": 334_939_648},
    "t5-3b": {"none": 2_851_598_336},
    "t5-11b": {"none": 11_307_321_344},
    "bart-base": {"none": 139_420_416, "language_model": 139_420_416 + 50_265},  # its bias is a buffer in transformers
    "bart-large": {"none": 406_291_456, "sequence_classification": 407_343_106},
    "mbart-large-cc25": {"none": 610_851_840},
    "mbart-large-50": {"none": 610_879_488},
    "opus-mt-en-de": {"none": 73_886_208, "language_model": 73_886_208 + 58_101},
    "gpt2": {"none": 124_439_808, "language_model": 124_439_808},
    "gpt2-medium": {"none": 354_823_168},
    "gpt2-large": {"none": 774_030_080},
    "gpt2-xl": {"none": 1_557_611_200},
    "distilgpt2": {"none": 81_912_576},
    "eurobert-210m": {"none": 211_766_016, "masked_lm": 310_266_624},
    "eurobert-610m": {"none": 607_874_688, "masked_lm": 755_625_600},
    "eurobert-2.1b": {"none": 2_107_590_912, "masked_lm": 2_403_092_736},
    "smollm2-135m": {"none": 134_515_008, "language_model": 134_515_008},
    "smollm2-360m": {"none": 361_821_120, "language_model": 361_821_120},
    "tinyllama-1.1b": {"none": 1_034_512_384, "language_model": 1_100_048_384},
    "qwen3-0.6b": {"none": 596_049_920, "language_model": 596_049_920},
    "qwen3-embedding-0.6b": {"none": 595_776_512},
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
        assert ModelBundle(read_config({**values, "model_type": kind}, name, head=head)).count() == count


def test_every_published_size_can_be_built() -> None:
    for name, (kind, values) in SIZES.items():
        with torch.device("meta"):
            assert ModelBundle(read_config({**values, "model_type": kind}, name)).count() > 0

"""Settings and specifications of masked language modelling, also with next sentence or sentence order prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.errors import HeedfulError
from heedful.runs.pretrain.spec import MaskingSettings, ObjectiveSpec

MaskUnit = Literal["tokens", "words", "spans"]


class _StaticMasks(MaskingSettings):
    """Base class of settings with a count of static masks, which it checks."""

    __slots__ = ()
    mask_unit: MaskUnit
    num_static_masks: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_static_masks is not None and self.num_static_masks < 1:
            raise HeedfulError(
                f"num_static_masks is {self.num_static_masks}; expected a whole number from 1, or none for new masks "
                "in each epoch"
            )


class SentencePairSettings(_StaticMasks):
    """Base class of settings for masked language modelling on labelled pairs of segments."""

    __slots__ = ()
    short_seq_prob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmSettings(_StaticMasks):
    """Masked language modelling."""

    kind: Literal["mlm"] = "mlm"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # unit of masking: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # static masks of each row, used in turn; none: new masks in each epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmNspSettings(SentencePairSettings):
    """Masked language modelling and next sentence prediction."""

    kind: Literal["mlm+nsp"] = "mlm+nsp"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # unit of masking: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # static sets of pairs with masks, used in turn; none: new ones in each epoch
    short_seq_prob: float = 0.1  # probability that the pairs of a document are shorter than max_seq_length


@dataclass(frozen=True, kw_only=True, slots=True)
class MlmSopSettings(SentencePairSettings):
    """Masked language modelling and sentence order prediction."""

    kind: Literal["mlm+sop"] = "mlm+sop"
    mask_prob: float = 0.15  # share of the tokens that are masked
    mask_unit: MaskUnit = "tokens"  # unit of masking: tokens, whole words, or spans of words
    num_static_masks: int | None = None  # static sets of pairs with masks, used in turn; none: new ones in each epoch
    short_seq_prob: float = 0.1  # probability that the pairs of a document are shorter than max_seq_length


MLM = ObjectiveSpec(
    name="mlm",
    settings=MlmSettings,
    builder_ref="heedful.runs.pretrain.builders:MlmBuilder",
    head="masked_lm",
    phase_settings=("mask_prob",),
    fixed_shape=True,
)
MLM_NSP = ObjectiveSpec(
    name="mlm+nsp",
    settings=MlmNspSettings,
    builder_ref="heedful.runs.pretrain.builders:NspBuilder",
    head="pretraining",
    phase_settings=("mask_prob",),
    fixed_shape=True,
)
MLM_SOP = ObjectiveSpec(
    name="mlm+sop",
    settings=MlmSopSettings,
    builder_ref="heedful.runs.pretrain.builders:SopBuilder",
    head="pretraining",
    phase_settings=("mask_prob",),
    fixed_shape=True,
)

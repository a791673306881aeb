"""Settings and specification of span corruption (--objective span_corruption)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.runs.pretrain.spec import MaskingSettings, ObjectiveSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanCorruptionSettings(MaskingSettings):
    """Span corruption: spans are removed from the encoder's input, and the decoder generates them."""

    kind: Literal["span_corruption"] = "span_corruption"
    mask_prob: float = 0.15  # share of the tokens that are removed (noise density)
    mean_noise_span_length: float = 3.0  # mean length of a span in tokens


SPAN_CORRUPTION = ObjectiveSpec(
    name="span_corruption",
    settings=SpanCorruptionSettings,
    builder_ref="heedful.runs.pretrain.builders:SpanCorruptionBuilder",
    head="language_model",
    sentinels=True,
)

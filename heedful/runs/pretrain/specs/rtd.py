"""Settings and specification of replaced token detection (--objective rtd)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.runs.pretrain.spec import MaskingSettings, ObjectiveSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RtdSettings(MaskingSettings):
    """Replaced token detection: a small generator fills masked tokens, and the model finds the replaced ones."""

    kind: Literal["rtd"] = "rtd"
    mask_prob: float = 0.15  # share of the tokens that are masked for the generator
    disc_weight: float = 50.0  # weight of the discriminator's loss; the generator's is 1
    generator_size: float = 0.25  # the generator's hidden size, heads and feed-forward size as a share of the model's


RTD = ObjectiveSpec(
    name="rtd",
    settings=RtdSettings,
    builder_ref="heedful.runs.pretrain.builders:RtdBuilder",
    head="replaced_token_detection",
)

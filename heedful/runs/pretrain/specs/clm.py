"""Settings and specification of causal language modelling (--objective clm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ClmSettings(ObjectiveSettings):
    """Causal language modelling."""

    kind: Literal["clm"] = "clm"


CLM = ObjectiveSpec(
    name="clm",
    settings=ClmSettings,
    builder_ref="heedful.runs.pretrain.builders:ClmBuilder",
    head="language_model",
    algorithm="bpe",  # as in the published decoders
)

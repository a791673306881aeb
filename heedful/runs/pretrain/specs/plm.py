"""Settings and specification of permutation language modelling (--objective plm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlmSettings(ObjectiveSettings):
    """Permutation language modelling, with two-stream attention."""

    kind: Literal["plm"] = "plm"


PLM = ObjectiveSpec(
    name="plm",
    settings=PlmSettings,
    builder_ref="heedful.runs.pretrain.builders:PlmBuilder",
    head="permutation_lm",
)

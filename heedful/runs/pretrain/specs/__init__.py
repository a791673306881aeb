"""The pre-training objectives by name, as --objective takes them. `register_objective` adds one."""

from __future__ import annotations

from heedful.errors import HeedfulError
from heedful.runs.pretrain.spec import ObjectiveSettings, ObjectiveSpec
from heedful.runs.pretrain.specs.clm import CLM
from heedful.runs.pretrain.specs.distillation import DISTILLATION
from heedful.runs.pretrain.specs.mlm import MLM, MLM_NSP, MLM_SOP
from heedful.runs.pretrain.specs.plm import PLM
from heedful.runs.pretrain.specs.rtd import RTD
from heedful.runs.pretrain.specs.span_corruption import SPAN_CORRUPTION
from heedful.settings import clear_type_caches

OBJECTIVES: dict[str, ObjectiveSpec] = {}  # name -> specification


def register_objective(spec: ObjectiveSpec) -> None:
    """Add an objective to OBJECTIVES and its settings to the choices of `objective`.

    Raises:
        HeedfulError: If an objective of that name is registered already.
    """
    if spec.name in OBJECTIVES:
        raise HeedfulError(f'an objective named "{spec.name}" is registered already: choose another name')
    OBJECTIVES[spec.name] = spec
    ObjectiveSettings.MEMBERS.append(spec.settings)
    clear_type_caches()


def unregister_objective(name: str) -> None:
    """Remove a registered objective."""
    ObjectiveSettings.MEMBERS.remove(OBJECTIVES.pop(name).settings)
    clear_type_caches()


for _spec in (MLM, MLM_NSP, MLM_SOP, PLM, SPAN_CORRUPTION, CLM, RTD, DISTILLATION):
    register_objective(_spec)

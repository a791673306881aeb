"""Specification of regression: a number for a text or a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, TaskSpec
from heedful.tasks.specs.classify import PIPELINE, no_sigmoid

if TYPE_CHECKING:
    from heedful.model.config import Head


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressSettings(TaskSettings):
    """A number."""

    kind: Literal["regress"] = "regress"


def _recognizes(head: Head) -> bool:
    return head.kind == "sequence_classification" and head.problem_type == "regression" and len(head.labels) == 1


REGRESS = TaskSpec(
    name="regress",
    aliases=("regression", "text-regression"),
    help="a score of a text or pair",
    settings=RegressSettings,
    example_ref="heedful.data.examples:ScoredExample",
    task_ref="heedful.tasks.regress:Regress",
    head="sequence_classification",
    recognizes=_recognizes,
    check_reader=no_sigmoid,
    linear_model="ridge",
    card=Card(
        name="A number for a text",
        mistake=lambda line, results, shown: (shown(line["label"]), shown(line["prediction"])),
        does="Gives a text, or a pair of texts, a number",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more=', function_to_apply="none"', given="{given}"),
    ),
    distillation="numbers",
    classic_students=("bag", "bilstm"),
)

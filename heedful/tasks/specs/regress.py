"""Specification and settings of regression: a score for a text or a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec
from heedful.tasks.specs.classify import PIPELINE, refuse_sigmoid

if TYPE_CHECKING:
    from heedful.model.config import Head


@dataclass(frozen=True, kw_only=True, slots=True)
class RegressSettings(TaskSettings):
    """Settings of regression."""

    kind: Literal["regress"] = "regress"


def _recognizes(head: Head) -> bool:
    """Whether a head outputs one score."""
    return head.kind == "sequence_classification" and head.problem_type == "regression" and len(head.labels) == 1


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the gold score and the predicted score of a line."""
    return format_number(line["label"]), format_number(line["prediction"])


REGRESS = TaskSpec(
    name="regress",
    aliases=("regression", "text-regression"),
    help="a score of a text or pair",
    settings=RegressSettings,
    example_ref="heedful.data.examples:ScoredExample",
    task_ref="heedful.tasks.regress:Regress",
    head="sequence_classification",
    recognizes=_recognizes,
    check_pooling=refuse_sigmoid,
    linear_model="ridge",
    card=Card(
        name="A number for a text",
        describe_mistake=_describe_mistake,
        description="Gives a text, or a pair of texts, a number",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more=', function_to_apply="none"', example="{example}"),
    ),
    distillation="numbers",
    classic_students=("bag", "bilstm"),
)

"""Specifications and settings of classification, with one label and with any number of labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats
    from heedful.model.classic_config import PoolingConfigs

ClassWeight = Literal["balanced"] | None  # balanced: examples / (classes * examples of the class)
PIPELINE = """from transformers import pipeline

answer = pipeline("{kind}", model="path/to/model"{more})
print(answer({example}))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifySettings(TaskSettings):
    """Settings of classification with one label of several."""

    kind: Literal["classify"] = "classify"
    class_weight: ClassWeight = None  # balanced: weights each class by the inverse of its frequency
    calibrate: bool = True  # divide scores by a temperature, fitted on dev or held-out folds (Guo et al. 2017)

    def fits_temperature(self) -> bool:
        return self.calibrate


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiLabelSettings(TaskSettings):
    """Settings of classification with any number of labels."""

    UNTUNED: ClassVar[str] = "thresholds=0.5"
    kind: Literal["multiple"] = "multiple"
    class_weight: ClassWeight = None  # balanced: a label's positives weigh as much as its negatives
    thresholds: float | Literal["tuned"] = 0.5  # probability from which a label is given; tuned: best F1 on dev
    calibrate: bool = True  # divide scores by a temperature, fitted on dev or held-out folds (Guo et al. 2017)

    def __post_init__(self) -> None:
        if self.thresholds != "tuned" and not 0 < self.thresholds < 1:
            raise HeedfulError(f'thresholds is {self.thresholds}; expected a number between 0 and 1, or "tuned"')

    def tunes_thresholds(self, stats: DatasetStats) -> bool:
        return self.thresholds == "tuned"

    def fits_temperature(self) -> bool:
        return self.calibrate

    def for_student(self, thresholds: Mapping[str, float], *, has_dev: bool) -> TaskSettings:
        return replace(self, thresholds="tuned") if thresholds and has_dev else self


def _check_sigmoid(pooling: PoolingConfigs, name: str, labels: int) -> None:
    """Refuse a single sigmoid output unless there are two labels."""
    if pooling.binary == "sigmoid" and labels != 2:
        raise HeedfulError(f'{name}.binary is "sigmoid", which is for two labels, but there are {labels}: leave it out')


def refuse_sigmoid(pooling: PoolingConfigs, name: str, labels: int) -> None:
    """Refuse a single sigmoid output, which can only tell two labels apart."""
    if pooling.binary == "sigmoid":
        raise HeedfulError(f'{name}.binary is "sigmoid", which is only for one label of two: leave it out')


def _describe_label_sets(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the gold labels and the predicted labels of a line, each as a list of names separated by commas."""
    label, prediction = (", ".join(line[side]) or "(none)" for side in ("label", "prediction"))
    return label, prediction


CLASSIFY = TaskSpec(
    name="classify",
    aliases=(
        *("text-classification", "sequence-classification", "sentiment-analysis", "textcat"),
        *("multi-label-classification", "multiclass", "classification"),
    ),
    settings=ClassifySettings,
    example_ref="heedful.data.examples:LabelledExample",
    task_ref="heedful.tasks.classify:Classify",
    head="sequence_classification",
    recognizes=lambda head: getattr(head, "problem_type", None) == "single_label_classification",
    check_pooling=_check_sigmoid,
    card=Card(
        name="Text classification",
        description="Gives a text, or a pair of texts, one label, with a probability",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more="", example="{example}"),
    ),
    distillation="classes",
    linear_model="logistic",
    classic_students=("bag", "bilstm"),
)
MULTI_LABEL = TaskSpec(
    name="multiple",
    command="classify",
    settings=MultiLabelSettings,
    example_ref="heedful.data.examples:MultiLabelExample",
    task_ref="heedful.tasks.classify:ClassifyMultiLabel",
    head="sequence_classification",
    recognizes=lambda head: getattr(head, "problem_type", None) == "multi_label_classification",
    check_pooling=refuse_sigmoid,
    card=Card(
        name="Text classification, any number of labels",
        describe_mistake=_describe_label_sets,
        description="Gives a text, or a pair of texts, any number of labels, with a probability for each",
        pipeline="text-classification",
        code=PIPELINE.format(kind="text-classification", more=", top_k=None", example="{example}"),
    ),
    distillation="multiple",
    linear_model="logistic_per_label",
    classic_students=("bag", "bilstm"),
)

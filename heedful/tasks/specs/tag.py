"""Specification and settings of tagging: a label for every word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec
from heedful.tasks.specs.classify import PIPELINE

if TYPE_CHECKING:
    from heedful.model.classic_config import PoolingConfigs

EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 6.0), (500, 8.0), (0, 15.0))  # results/tag-epochs-2026-11-25.md


@dataclass(frozen=True, kw_only=True, slots=True)
class TagSettings(TaskSettings):
    """Settings of tagging."""

    kind: Literal["tag"] = "tag"


def refuse_pooled_output(task: str, pooling: PoolingConfigs, name: str) -> None:
    """Refuse pooling with settings of a pooled output, since the task uses the hidden state of each token."""
    from heedful.model.classic_config import BagPooling

    if pooling != BagPooling(over=pooling.over):
        reason = f'{name}.kind is "{pooling.kind}", or has settings of classes: {task} takes the rows themselves'
        raise HeedfulError(f'{reason}; give kind = "bag", and over')


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the gold and the predicted tag of each wrongly tagged word, as "word: tag"."""
    tagged_words = zip(line["input"], line["label"], line["prediction"], strict=False)
    wrong = [(word, gold, predicted) for word, gold, predicted in tagged_words if gold != predicted]
    label = ", ".join(f"{word}: {gold}" for word, gold, _ in wrong)
    prediction = ", ".join(f"{word}: {predicted}" for word, _, predicted in wrong)
    return label, prediction


TAG = TaskSpec(
    name="tag",
    aliases=("ner", "token-classification", "pos-tagging", "named-entity-recognition"),
    help="NER",
    settings=TagSettings,
    example_ref="heedful.data.examples:TaggedExample",
    task_ref="heedful.tasks.tag:Tag",
    head="token_classification",
    recognizes=lambda head: head.kind == "token_classification",
    check_pooling=lambda pooling, name, labels: refuse_pooled_output("tag", pooling, name),
    epochs=EPOCHS,
    card=Card(
        name="Labels for words",
        description="Labels every word of a text, and joins labelled words into entities",
        pipeline="token-classification",
        takes_pairs=False,
        input_text=lambda engine_input: engine_input if isinstance(engine_input, str) else " ".join(engine_input),
        describe_mistake=_describe_mistake,
        code=PIPELINE.format(kind="token-classification", more="", given="{given}"),
    ),
    distillation="tokens",
    classic_students=("bilstm",),
)

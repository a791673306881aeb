"""Specification of tagging: a label for every word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, JsonObject, Shown, TaskSpec
from heedful.tasks.specs.classify import PIPELINE

if TYPE_CHECKING:
    from heedful.model.classic_config import PoolingConfigs

EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 6.0), (500, 8.0), (0, 15.0))  # results/tag-epochs-2026-11-25.md


@dataclass(frozen=True, kw_only=True, slots=True)
class TagSettings(TaskSettings):
    """A label for every word."""

    kind: Literal["tag"] = "tag"


def rows_alone(task: str, reader: PoolingConfigs, name: str) -> None:
    """Refuse a reader whose pooled output would not be used."""
    from heedful.model.classic_config import BagPooling

    if reader != BagPooling(over=reader.over):
        what = f'{name}.kind is "{reader.kind}", or has settings of classes: {task} takes the rows themselves'
        raise HeedfulError(f'{what}; give kind = "bag", and over')


def _mistake(line: JsonObject, results: JsonObject, shown: Shown) -> tuple[str, str]:
    rows = zip(line["input"], line["label"], line["prediction"], strict=False)
    words = [row for row in rows if row[1] != row[2]]
    label, prediction = (", ".join(f"{word[0]}: {word[side]}" for word in words) for side in (1, 2))
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
    check_reader=lambda reader, name, labels: rows_alone("tag", reader, name),
    epochs=EPOCHS,
    card=Card(
        name="Labels for words",
        does="Labels every word of a text, and joins labelled words into entities",
        pipeline="token-classification",
        takes_pairs=False,
        input_text=lambda engine_input: engine_input if isinstance(engine_input, str) else " ".join(engine_input),
        mistake=_mistake,
        code=PIPELINE.format(kind="token-classification", more="", given="{given}"),
    ),
    distillation="tokens",
    classic_students=("bilstm",),
)

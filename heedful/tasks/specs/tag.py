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

# (minimum training examples, default epochs); measured in benchmarks/results/tag-epochs-2026-11-25.md
EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 6.0), (500, 8.0), (0, 15.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class TagSettings(TaskSettings):
    """Settings of tagging, which has none of its own."""

    kind: Literal["tag"] = "tag"


def refuse_pooled_output(task: str, pooling: PoolingConfigs, name: str) -> None:
    """Refuse settings of how tokens are pooled into one vector, since the task needs the hidden state of each token.

    Args:
        task: Name of the task, for the message.
        pooling: Pooling of a classic model. Only `over`, the layers below the pooling, may differ from the defaults.
        name: Path of the pooling's settings, for the message.

    Raises:
        HeedfulError: If the kind is not "bag", or a setting other than `over` is set.
    """
    from heedful.model.classic_config import BagPooling

    if pooling != BagPooling(over=pooling.over):
        problem = f'{name}.kind is "{pooling.kind}"' if pooling.kind != "bag" else f"{name} has more settings than over"
        raise HeedfulError(
            f'{problem}: {task} needs the hidden state of each token, not a pooled one; set kind = "bag" and only over'
        )


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
        # the card fills in {example}
        code=PIPELINE.format(kind="token-classification", more="", example="{example}"),
    ),
    distillation="tokens",
    classic_students=("bilstm",),
)

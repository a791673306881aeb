"""Specification and settings of multiple choice: choose the candidate that fits a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec
from heedful.tasks.specs.qa import refuse_classic_models

CODE = """import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForMultipleChoice.from_pretrained("path/to/model")
choices = ["Take a hat.", "Sleep."]
inputs = tokenizer(["It rains."] * 2, choices, padding=True, return_tensors="pt")
with torch.inference_mode():
    scores = model(**{name: values[None] for name, values in inputs.items()}).logits[0]
print(choices[scores.argmax()])"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoiceSettings(TaskSettings):
    """Settings of multiple choice."""

    kind: Literal["multiple-choice"] = "multiple-choice"


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the texts of the correct and of the predicted candidate."""
    choices = line["input"]["choices"]
    return choices[line["label"]], choices[line["prediction"]]


MULTIPLE_CHOICE = TaskSpec(
    name="multiple-choice",
    aliases=("multiple_choice", "swag"),
    settings=MultipleChoiceSettings,
    example_ref="heedful.data.examples:ChoiceExample",
    task_ref="heedful.tasks.multiple_choice:MultipleChoiceTask",
    head="multiple_choice",
    recognizes=lambda head: head.kind == "multiple_choice",
    check_pooling=lambda pooling, name, labels: refuse_classic_models("multiple-choice", pooling, name),
    predict_arguments='"A prompt." --choice "one" --choice "another"',
    card=Card(
        name="Choosing among candidates",
        description="Chooses one of several candidates that go with a prompt",
        pipeline="multiple-choice",
        input_text=lambda engine_input: str(engine_input["prompt"]),
        describe_mistake=_describe_mistake,
        cli_arguments='--choice "Take a hat." --choice "Sleep." "It rains."',
        python_input='{"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}',
        code=CODE,
    ),
    distillation="choice",
    replaceable=False,
)

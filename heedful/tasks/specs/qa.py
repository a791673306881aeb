"""Specification of question answering: the answer is a span of the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, JsonObject, Shown, TaskSpec

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats
    from heedful.model.classic_config import PoolingConfigs

MAX_ANSWER_TOKENS = 30  # tokens of an answer, unless a threshold says how many
ANSWER_LIMIT = "max_answer_tokens"  # kept beside thresholds where it is not MAX_ANSWER_TOKENS
CODE = """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/model")
model = AutoModelForQuestionAnswering.from_pretrained("path/to/model")
inputs = tokenizer("Who?", "Ada wrote it.", return_tensors="pt")
with torch.inference_mode():
    scores = model(**inputs)
start, end = scores.start_logits.argmax(), scores.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class QASettings(TaskSettings):
    """A span of the context."""

    UNTUNED: ClassVar[str] = "no_answer_threshold=0"
    kind: Literal["qa"] = "qa"
    no_answer_threshold: float | Literal["tuned"] = "tuned"  # margin of "no answer" over an answer; tuned: on dev
    max_answer_tokens: int = MAX_ANSWER_TOKENS  # maximum tokens of an answer, saved with the model

    def __post_init__(self) -> None:
        if self.max_answer_tokens < 1:
            raise HeedfulError(f"max_answer_tokens is {self.max_answer_tokens}; expected a whole number from 1")

    def tunes_thresholds(self, survey: DatasetStats) -> bool:
        return self.no_answer_threshold == "tuned" and survey.has_unanswerable

    def of_teacher(self, thresholds: Mapping[str, float], *, has_dev: bool) -> TaskSettings:
        return replace(self, max_answer_tokens=max_answer_tokens_of(thresholds))


def max_answer_tokens_of(thresholds: Mapping[str, float]) -> int:
    """Return the largest number of tokens of an answer, from the thresholds of a model."""
    return int(thresholds.get(ANSWER_LIMIT, MAX_ANSWER_TOKENS))


def no_classic_head(task: str, reader: PoolingConfigs, name: str) -> None:
    """Refuse every reader: classic models have no head for the task."""
    raise HeedfulError(f'{name}.kind is "{reader.kind}": classic models have no head for {task}')


def _input_text(engine_input: object) -> str:
    assert isinstance(engine_input, dict)
    question, context = engine_input["question"], engine_input["context"]
    return f"{question} / {context}" if context else str(question)


def _mistake(line: JsonObject, results: JsonObject, shown: Shown) -> tuple[str, str]:
    answers = line["label"]
    return (answers[0] if answers else "") or "(no answer)", line["prediction"] or "(no answer)"


QA = TaskSpec(
    name="qa",
    aliases=("question-answering", "extractive-question-answering", "squad"),
    help="answers in a context, as SQuAD",
    settings=QASettings,
    example_ref="heedful.data.examples:QuestionExample",
    task_ref="heedful.tasks.qa:QuestionAnswering",
    head="question_answering",
    recognizes=lambda head: head.kind == "question_answering",
    check_reader=lambda reader, name, labels: no_classic_head("qa", reader, name),
    predict_arguments='"A long text." --question "What is asked?"',
    card=Card(
        name="Answers from a text",
        does="Finds the answer to a question in a context",
        pipeline="question-answering",
        input_text=_input_text,
        mistake=_mistake,
        words='--question "Who?" "Ada wrote it."',
        python_input='{"question": "Who?", "context": "Ada wrote it."}',
        code=CODE,
    ),
    distillation="span",
    replaceable=False,
)

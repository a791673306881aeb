"""Specification and settings of question answering: the answer is a span of the context."""

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

MAX_ANSWER_TOKENS = 30  # default maximum tokens in an answer
ANSWER_LIMIT = "max_answer_tokens"  # key among a model's thresholds; if it is missing, MAX_ANSWER_TOKENS applies
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
    """Settings of question answering."""

    UNTUNED: ClassVar[str] = "no_answer_threshold=0"
    kind: Literal["qa"] = "qa"
    no_answer_threshold: float | Literal["tuned"] = "tuned"  # margin of "no answer" over an answer; tuned: on dev
    max_answer_tokens: int = MAX_ANSWER_TOKENS  # maximum tokens of an answer, saved with the model

    def __post_init__(self) -> None:
        if self.max_answer_tokens < 1:
            raise HeedfulError(f"max_answer_tokens is {self.max_answer_tokens}; expected a whole number from 1")

    def tunes_thresholds(self, stats: DatasetStats) -> bool:
        return self.no_answer_threshold == "tuned" and stats.has_unanswerable

    def for_student(self, thresholds: Mapping[str, float], *, has_dev: bool) -> TaskSettings:
        return replace(self, max_answer_tokens=max_answer_tokens_of(thresholds))


def max_answer_tokens_of(thresholds: Mapping[str, float]) -> int:
    """Return the maximum tokens in an answer, which is stored with the thresholds of a model."""
    return int(thresholds.get(ANSWER_LIMIT, MAX_ANSWER_TOKENS))


def refuse_classic_models(task: str, pooling: PoolingConfigs, name: str) -> None:
    """Refuse every classic model, since classic models have no head for the task."""
    raise HeedfulError(f'{name}.kind is "{pooling.kind}": classic models have no head for {task}')


def _input_text(engine_input: object) -> str:
    """Return question and context on one line."""
    assert isinstance(engine_input, dict)
    question, context = engine_input["question"], engine_input["context"]
    return f"{question} / {context}" if context else str(question)


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the first gold answer and the predicted one."""
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
    check_pooling=lambda pooling, name, labels: refuse_classic_models("qa", pooling, name),
    predict_arguments='"A long text." --question "What is asked?"',
    card=Card(
        name="Answers from a text",
        description="Finds the answer to a question in a context",
        pipeline="question-answering",
        input_text=_input_text,
        describe_mistake=_describe_mistake,
        cli_arguments='--question "Who?" "Ada wrote it."',
        python_input='{"question": "Who?", "context": "Ada wrote it."}',
        code=CODE,
    ),
    distillation="span",
    replaceable=False,
)

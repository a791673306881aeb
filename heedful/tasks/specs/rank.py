"""Specification and settings of reranking: a score for a query and a document, by which documents are sorted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError, SettingError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec
from heedful.tasks.specs.classify import refuse_sigmoid

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats
    from heedful.model.config import Head

RankLoss = Literal["listwise", "listnet", "binary", "margin_mse", "cosent"]
CODE = """from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/model")
print(model.predict([("a query", "a text"), ("a query", "another text")]))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings(TaskSettings):
    """Settings of reranking."""

    kind: Literal["rank"] = "rank"
    # listwise: cross-entropy of the softmax over a query's documents; listnet: the same, for graded relevance;
    # binary: cross-entropy of each document; margin_mse: a teacher's margins; cosent: each pair in the right order
    loss: RankLoss = "listwise"
    metric: Literal["ndcg@10", "map", "mrr"] = "ndcg@10"  # ranks models
    # texts of a query that are learned from in an epoch, sampled from longer lists: the relevant ones, and others
    list_size: int = 64

    def __post_init__(self) -> None:
        if self.list_size < 2:
            raise HeedfulError(f"list_size is {self.list_size}; expected a number of texts from 2")

    def check_data(self, stats: DatasetStats) -> None:
        if self.loss == "margin_mse" and not stats.has_teacher_scores:
            raise SettingError(
                "task.loss is margin_mse, which learns scores of a teacher, and the data has none: add the column "
                "teacher_scores, or choose another loss",
                path="task.loss",
            )
        if self.loss == "binary" and stats.max_relevance > 1:
            raise SettingError(
                f"task.loss is binary, which takes relevance from 0 to 1, and train has {stats.max_relevance:g}: "
                "set task.loss=listnet, which takes grades",
                path="task.loss",
            )

    def summary(self) -> str:
        return f", {self.loss} loss"


def _recognizes(head: Head) -> bool:
    """Whether a head is the head of a cross-encoder: one score with an activation."""
    return (
        head.kind == "sequence_classification"
        and head.problem_type == "regression"
        and head.score_activation is not None
        and len(head.labels) == 1
    )


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return the most relevant text with its rank, and the text with the highest score."""
    texts, scores, relevance = line["input"]["texts"], line["prediction"], line["label"]
    top = max(range(len(texts)), key=scores.__getitem__)
    most_relevant = max(range(len(texts)), key=relevance.__getitem__)
    return f"{texts[most_relevant]} (number {line['loss']:.0f})", texts[top]


RANK = TaskSpec(
    name="rank",
    aliases=("text-ranking", "rerank", "reranking", "cross-encoder"),
    help="reranking of search results",
    settings=RankSettings,
    example_ref="heedful.data.examples:RankExample",
    task_ref="heedful.tasks.rank:Rank",
    head="sequence_classification",
    recognizes=_recognizes,
    check_pooling=refuse_sigmoid,
    predict_arguments='"A query." --pair "A text."',
    card=Card(
        name="Reranking",
        description="Scores a query with a text by how relevant the text is; "
        "only the order of the scores means something",
        pipeline="text-ranking",
        library="sentence-transformers",
        cli_arguments='"a query" --pair "a text"',
        python_input='("a query", "a text")',
        latency_input="a query and a text",
        input_text=lambda engine_input: str(engine_input["query"]),
        describe_mistake=_describe_mistake,
        code=CODE,
    ),
    distillation="ranking",
    replaceable=False,
    zero_shot=True,
)

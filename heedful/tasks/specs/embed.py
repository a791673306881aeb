"""Specification and settings of sentence embeddings: a vector for a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError, SettingError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, FormatNumber, JsonObject, TaskSpec
from heedful.tasks.specs.tag import refuse_pooled_output

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats

PairLoss = Literal["auto", "multiple_negatives", "margin_mse", "cosine", "cosent"]
NEEDS: dict[PairLoss, str] = {  # columns that each loss needs, for messages
    "multiple_negatives": "no scores",
    "margin_mse": "scores of a teacher (the column teacher_scores)",
    "cosine": "scores (the column score)",
    "cosent": "scores (the column score)",
}
CODE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/model")
vectors = model.encode(["a text", "another"])
print(model.similarity(vectors, vectors))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedSettings(TaskSettings):
    """Settings of sentence embeddings."""

    kind: Literal["embed"] = "embed"
    # multiple_negatives: find the positive among the texts of a group, hard negatives included; margin_mse: margins of
    # a teacher; cosine: the score of a pair; cosent: pairs of a group in the order of their scores; auto: cosine for
    # pairs with scores, else multiple_negatives
    loss: PairLoss = "auto"
    group_size: int = 32  # pairs in a group of in-batch negatives (multiple_negatives), or that are compared (cosent)
    scale: float = 20.0  # factor of the cosines in every loss but cosine
    matryoshka_dimensions: tuple[int, ...] = ()  # the first numbers of a vector that are also trained as a vector

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise HeedfulError(f"group_size is {self.group_size}; expected a whole number of pairs from 2")
        if not 0 < self.scale < float("inf"):
            raise HeedfulError(f"scale is {self.scale}; expected a number above 0")
        if wrong := [dimension for dimension in self.matryoshka_dimensions if dimension < 1]:
            raise HeedfulError(f"matryoshka_dimensions has {wrong[0]}; expected whole numbers from 1")

    def used_loss(self, *, scored: bool) -> PairLoss:
        """Return the chosen loss, or the loss that "auto" selects for pairs with or without scores."""
        if self.loss == "auto":
            return "cosine" if scored else "multiple_negatives"
        return self.loss

    def check_data(self, stats: DatasetStats) -> None:
        scored = stats.min_score is not None
        loss = self.used_loss(scored=scored)
        if scored != (loss in ("cosine", "cosent")) or (loss == "margin_mse" and not stats.has_teacher_scores):
            raise SettingError(
                f"task.loss is {loss}, which needs pairs with {NEEDS[loss]}, and the data has other pairs: "
                "leave it out, or change the columns",
                path="task.loss",
            )

    def samples_per_group(self, *, scored: bool) -> int:
        return self.group_size if self.used_loss(scored=scored) in ("multiple_negatives", "cosent") else 1

    def unused_settings(self, stats: DatasetStats) -> dict[str, str]:
        loss = self.used_loss(scored=stats.min_score is not None)
        reasons = {}
        if loss in ("cosine", "margin_mse"):
            reasons["group_size"] = f"the loss {loss} compares no pairs with each other"
        if loss == "cosine":
            reasons["scale"] = "pairs with scores learn their cosine itself"
        return {name: why for name, why in reasons.items() if getattr(self, name) != getattr(EmbedSettings(), name)}


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[str, str]:
    """Return label and prediction of a pair, as scores on the scale of the data, or as a rank for unscored pairs."""
    label, cosine = line["label"], line["prediction"]
    if label is None:
        rank = f", found as number {line['rank']:,}" if "rank" in line else ""
        return "(they belong together)", format_number(cosine) + rank
    if "label_scaling" not in results:
        return format_number(label), format_number(cosine)
    low = float(results["label_scaling"]["low"])  # score that corresponds to a cosine of 0
    high = float(results["label_scaling"]["high"])  # score that corresponds to a cosine of 1
    score = format_number(low + float(cosine) * (high - low))
    return format_number(label), f"{score} (a cosine of {format_number(cosine)})"


EMBED = TaskSpec(
    name="embed",
    aliases=("sentence-similarity", "feature-extraction", "sentence-embedding", "sentence-embeddings"),
    help="sentence embeddings",
    settings=EmbedSettings,
    example_ref="heedful.data.examples:PairExample",
    task_ref="heedful.tasks.embed:Embed",
    head="embedding",
    recognizes=lambda head: head.kind == "embedding",
    check_pooling=lambda pooling, name, labels: refuse_pooled_output("embed", pooling, name),
    predicts_cosines=True,
    card=Card(
        name="Sentence embeddings",
        describe_mistake=_describe_mistake,
        description="Gives each text a vector; the cosine of two vectors says how alike the texts are",
        pipeline="sentence-similarity",
        library="sentence-transformers",
        python_input='("a text", "another")',
        code=CODE,
        has_windows=False,
    ),
    distillation="vectors",
    truncates=True,
    zero_shot=True,
    classic_students=("bag", "bilstm"),
)

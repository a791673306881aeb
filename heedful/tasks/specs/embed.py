"""Specification of sentence embeddings: a vector for a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from heedful.errors import HeedfulError
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, JsonObject, Shown, TaskSpec
from heedful.tasks.specs.tag import rows_alone

if TYPE_CHECKING:
    from heedful.data.labelled.statistics import DatasetStats

CODE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/model")
vectors = model.encode(["a text", "another"])
print(model.similarity(vectors, vectors))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedSettings(TaskSettings):
    """A vector."""

    kind: Literal["embed"] = "embed"
    group_size: int = 32  # pairs in a group of in-batch negatives, for pairs without scores
    scale: float = 20.0  # factor of the cosines before the softmax

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise HeedfulError(f"group_size is {self.group_size}; expected a whole number of pairs from 2")
        if not 0 < self.scale < float("inf"):
            raise HeedfulError(f"scale is {self.scale}; expected a number above 0")

    def group(self, *, scored: bool) -> int:
        return 1 if scored else self.group_size

    def unused(self, survey: DatasetStats) -> dict[str, str]:
        if survey.low is None:
            return {}
        reasons = {
            "group_size": "pairs with scores have no negatives",
            "scale": "pairs with scores learn their cosine itself",
        }
        return {name: why for name, why in reasons.items() if getattr(self, name) != getattr(EmbedSettings(), name)}


def _mistake(line: JsonObject, results: JsonObject, shown: Shown) -> tuple[str, str]:
    label, cosine = line["label"], line["prediction"]
    if label is None:
        rank = f", found as number {line['rank']:,}" if "rank" in line else ""
        return "(they belong together)", shown(cosine) + rank
    if "label_scaling" not in results:
        return shown(label), shown(cosine)
    low, high = (float(results["label_scaling"][name]) for name in ("low", "high"))  # of cosines 0 and 1
    return shown(label), f"{shown(low + float(cosine) * (high - low))} (a cosine of {shown(cosine)})"


EMBED = TaskSpec(
    name="embed",
    aliases=("sentence-similarity", "feature-extraction", "sentence-embedding", "sentence-embeddings"),
    help="sentence embeddings",
    settings=EmbedSettings,
    example_ref="heedful.data.examples:PairExample",
    task_ref="heedful.tasks.embed:Embed",
    head="embedding",
    recognizes=lambda head: head.kind == "embedding",
    check_reader=lambda reader, name, labels: rows_alone("embed", reader, name),
    predicts_cosines=True,
    card=Card(
        name="Sentence embeddings",
        mistake=_mistake,
        does="Gives each text a vector; the cosine of two vectors says how alike the texts are",
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

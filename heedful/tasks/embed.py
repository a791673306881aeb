"""One vector for each text, and how alike two texts are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, PairExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.objectives import Batch, Sample
from heedful.objectives.base import full_precision, pack_samples, sample_weights, upcast
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_text
from heedful.tasks.metrics import Result, Retrieval
from heedful.tasks.predictions import Embedding, Similarity
from heedful.tasks.regress import correlation_metrics, update_correlation
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.embed import EmbedSettings
from heedful.tasks.task import EvalMetrics, LongInputs, ScoredAnswer, Task, TaskSetup
from heedful.tokenizer import Encoding, TokenizerInput


def vector_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"vector", "tokens", "cut"}: how many tokens were read, and how many at the end were cut off."""
    (window,) = windows
    return {"vector": window.scores.tolist(), "tokens": len(window.encoded), "cut": window.encoded.dropped}


def pair_inputs(given: Any) -> list[TokenizerInput] | None:
    """Two texts, each read by itself."""
    match given:
        case (str() as first, str() as second):
            return [first, second]
    return None


def similarity_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"similarity", "vectors", "cut"}: the cosine of the two texts' vectors."""
    a, b = (window.scores.double() for window in windows)
    return {
        "similarity": float(F.cosine_similarity(a, b, dim=0).clamp(-1, 1)),  # rounding may leave more than 1
        "vectors": [window.scores.tolist() for window in windows],
        "cut": sum(window.encoded.dropped for window in windows),
    }


def _vector(loaded: ModelBundle) -> list[type]:
    return [float if next(loaded.parameters()).dtype == torch.float64 else np.float32]


EMBED_HEAD = AnswerHead(
    expects='texts, like ["a text"]',
    tokenizer_inputs=read_text,
    answer=vector_answer,
    long_inputs="truncate",
    prediction=lambda answer: Embedding(
        vector=np.asarray(answer["vector"], np.float32), tokens=answer["tokens"], truncated_tokens=answer.get("cut", 0)
    ),
    columns=lambda loaded, writing: {"vector": _vector(loaded), "tokens": int, "cut": int},
    pairs=False,
)
SIMILARITY_HEAD = AnswerHead(
    expects='pairs to compare, like [("a text", "another")]',
    tokenizer_inputs=pair_inputs,
    answer=similarity_answer,
    long_inputs="truncate",
    prediction=lambda answer: Similarity(
        similarity=answer["similarity"],
        vectors=np.asarray(answer["vectors"], np.float32),
        truncated_tokens=answer.get("cut", 0),
    ),
    columns=lambda loaded, writing: {"similarity": float, "vectors": [_vector(loaded)], "cut": int},
    pairs=True,
)


@dataclass(frozen=True, kw_only=True)
class Embed(Task):
    """Pairs that belong together, or that are alike as much as a score says.

    With scores: (cos(a, b) - score)², scores brought to [0, 1] (Reimers and Gurevych 2019). Without: cross-entropy of
    scale cos(a, b) over the second texts of all `together` pairs of a group (Henderson et al. 2017), but for those that
    equal b; a group is taken whole, so the loss depends on neither micro-batches nor ranks. The last group of an epoch
    may be smaller.
    """

    example: ClassVar[type[Example]] = PairExample
    head: ClassVar[str] = "embedding"
    answerers: ClassVar[tuple[AnswerHead, ...]] = (EMBED_HEAD, SIMILARITY_HEAD)
    metric: str = ""  # "": Spearman's rho with scores, else the accuracy of finding the second text
    long_inputs: LongInputs = "truncate"
    scored: bool  # whether pairs have scores
    low: float = 0.0  # the score of texts that have nothing in common
    high: float = 1.0  # the score of texts that say the same
    scale: float = 20.0  # of the cosines of unscored pairs

    def __post_init__(self) -> None:
        if not self.metric:
            object.__setattr__(self, "metric", "spearman" if self.scored else "accuracy")
        if self.long_inputs != "truncate":
            raise HeedfulError(f'long_inputs is "{self.long_inputs}", but a text has one vector: set it to "truncate"')
        if self.scored and not self.low < self.high:
            raise HeedfulError(f"scores go from {self.low} to {self.high}: low must be below high")
        if not self.scored and self.together < 2:
            raise HeedfulError(
                f"together is {self.together}: pairs are told apart from others, so 2 or more are needed"
            )

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings = setup.settings
        assert isinstance(settings, EmbedSettings)
        how = comparison(setup.survey, settings.group_size)
        task, made = cls.with_new_head(
            setup, long_inputs="truncate", scale=settings.scale, **how
        )  # a text has one vector
        made.label_scaling = {name: how[name] for name in ("low", "high") if name in how}
        return task, made

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, survey: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> dict[str, Any]:
        """Return the fields for evaluation: how pairs are compared, with scores on the scale of the training data."""
        how = comparison(survey()) | {"long_inputs": "truncate"}
        return how | (loaded.label_scaling if how["scored"] else {})

    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        return [example.anchor, example.positive]

    def engine_input(self, example: Any) -> Any:
        return (example.anchor, example.positive)

    def make_samples(self, example: PairExample, seen: list[list[Encoding]]) -> list[Sample]:
        first, second = (windows[0] for windows in seen)
        return [Sample.of([first.ids, second.ids], [first.types, second.types], target=self.target(example))]

    def target(self, example: PairExample) -> float:
        """The score, from 0 to 1."""
        return 0.0 if example.score is None else (example.score - self.low) / (self.high - self.low)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        values = [sample.target for sample in samples] if self.scored else _same([_second(each) for each in samples])
        targets = torch.tensor(values, dtype=torch.float64)
        return Batch(packed=pack_samples(samples), targets=targets, weights=sample_weights(samples))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        vectors = F.normalize(upcast(scores), dim=-1)
        a, b = vectors[0::2], vectors[1::2]
        if self.scored:
            return ((a * b).sum(-1) - batch.targets.to(a)).square()
        groups = zip(*(each.split(self.together) for each in (a, b, batch.targets)), strict=True)
        return torch.cat([self._told_apart(x, y, texts) for x, y, texts in groups])

    def _told_apart(self, x: Tensor, y: Tensor, texts: Tensor) -> Tensor:
        """The losses of one group, whose second texts have these numbers, equal ones the same."""
        own = torch.arange(len(x), device=x.device)
        twins = (texts[:, None] == texts) & (own[:, None] != own)
        with full_precision(x):  # cosines times the scale would be rounded to eighths
            likeness = self.scale * x @ y.T
        return F.cross_entropy(likeness.masked_fill(twins, -torch.inf), own, reduction="none")

    def new_metrics(self) -> EvalMetrics:
        return correlation_metrics() if self.scored else EvalMetrics(metrics={"pairs": Retrieval()})

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[PairExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        if self.scored:
            said = [answer["similarity"] for answer in answers]
            return update_correlation(metrics, said, [self.target(example) for example in examples], ids)
        vectors = np.array([answer["vectors"] for answer in answers])
        pairs = metrics.metrics["pairs"].update(ids, vectors, [example.positive for example in examples])
        return EvalMetrics(metrics={"pairs": pairs})

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        found: Result = metrics.metrics["numbers" if self.scored else "pairs"].compute()
        return found

    def score_answer(self, example: PairExample, answer: Answer) -> ScoredAnswer:
        said = answer["similarity"]
        if not self.scored:
            return ScoredAnswer(None, said, None, 1 - said)
        return ScoredAnswer(example.score, said, None, abs(said - self.target(example)))

    def ranks(self, metrics: EvalMetrics) -> Sequence[int]:
        return () if self.scored else metrics.metrics["pairs"].ranks()[1].tolist()


def comparison(survey: DatasetStats, group_size: int = 2) -> dict[str, Any]:
    """Return how pairs are compared: with scores between 0, or the lowest, and the highest; else with each other."""
    if survey.low is None or survey.high is None:
        return {"scored": False, "together": group_size}
    low = min(0.0, survey.low)
    return {"scored": True, "low": low, "high": survey.high if survey.high > low else 1.0}


def _second(sample: Sample) -> bytes:
    """The tokens of a pair's second text."""
    _, start, stop = sample.bounds
    return sample.tokens[start:stop].tobytes()


def _same(texts: Sequence[bytes]) -> list[int]:
    """The number of each text's first place: equal ones have the same."""
    first: dict[bytes, int] = {}
    return [first.setdefault(text, number) for number, text in enumerate(texts)]

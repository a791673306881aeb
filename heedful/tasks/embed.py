"""Sentence embeddings: the task `Embed` with its losses, and the answers (the vector of a text, a similarity)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, PairExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError, SettingError
from heedful.model.config import SentenceEmbedding
from heedful.objectives import Batch, Sample
from heedful.objectives.base import full_precision, pack_samples, upcast, weights_of_samples
from heedful.packed import send
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_text
from heedful.tasks.metrics import Result, Retrieval
from heedful.tasks.predictions import Embedding, Similarity
from heedful.tasks.rank import cosent, margin_mse
from heedful.tasks.regress import correlation_metrics, update_correlation
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.embed import EmbedSettings, PairLoss
from heedful.tasks.task import EvalMetrics, LongInputs, ScoredAnswer, Task, TaskFields, TaskSetup
from heedful.tokenizer import Encoding, TokenizerInput


def vector_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"vector", "tokens", "truncated_tokens"}: the embedding, and counts of tokens used and dropped."""
    (window,) = windows
    return {"vector": window.scores.tolist(), "tokens": len(window.encoded), "truncated_tokens": window.encoded.dropped}


def pair_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return two texts as two tokenizer inputs, or None for an input of another form."""
    match engine_input:
        case (str() as first, str() as second):
            return [first, second]
    return None


def similarity_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"similarity", "vectors", "truncated_tokens"}; the similarity is the cosine of both vectors."""
    a, b = (window.scores.double() for window in windows)
    return {
        "similarity": float(F.cosine_similarity(a, b, dim=0).clamp(-1, 1)),  # rounding errors may exceed 1
        "vectors": [window.scores.tolist() for window in windows],
        "truncated_tokens": sum(window.encoded.dropped for window in windows),
    }


def _vector_type(loaded: ModelBundle) -> list[type]:
    """Return the type of a vector in the model's answers."""
    return [float if next(loaded.parameters()).dtype == torch.float64 else np.float32]


EMBED_HEAD = AnswerHead(
    expects='texts, like ["a text"]',
    tokenizer_inputs=read_text,
    answer=vector_answer,
    long_inputs="truncate",
    prediction=lambda answer: Embedding.from_answer({**answer, "vector": np.asarray(answer["vector"], np.float32)}),
    columns=lambda loaded, generation: {"vector": _vector_type(loaded), "tokens": int, "truncated_tokens": int},
    pairs=False,
)
SIMILARITY_HEAD = AnswerHead(
    expects='pairs to compare, like [("a text", "another")]',
    tokenizer_inputs=pair_inputs,
    answer=similarity_answer,
    long_inputs="truncate",
    prediction=lambda answer: Similarity.from_answer({**answer, "vectors": np.asarray(answer["vectors"], np.float32)}),
    columns=lambda loaded, generation: {
        "similarity": float,
        "vectors": [_vector_type(loaded)],
        "truncated_tokens": int,
    },
    pairs=True,
)


@dataclass(frozen=True, kw_only=True)
class Embed(Task[PairExample]):
    """Sentence embeddings, learned from positive pairs, with or without hard negatives, or from pairs with scores.

    Pairs are compared in groups of `group_size`. A group is never split, so the loss depends on neither micro-batches
    nor ranks. The last group of an epoch may be smaller. With Matryoshka dimensions the loss is the sum of the losses
    of the full vectors and of the vectors cut to each of these dimensions (Kusupati et al. 2022).
    """

    example: ClassVar[type[Example]] = PairExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (EMBED_HEAD, SIMILARITY_HEAD)
    metric: str = ""  # "": Spearman's rho for pairs with scores, else the accuracy of retrieving the positive
    long_inputs: LongInputs = "truncate"
    scored: bool  # whether pairs have scores
    pair_loss: PairLoss = "auto"
    low: float = 0.0  # score that corresponds to a cosine of 0
    high: float = 1.0  # score that corresponds to a cosine of 1
    scale: float = 20.0  # factor of the cosines in every loss but "cosine"
    matryoshka_dimensions: tuple[int, ...] = ()  # dimensions of the cut vectors that are trained too
    prompt: str = ""  # the model's default prompt, in front of each text

    def __post_init__(self) -> None:
        if self.pair_loss == "auto":
            object.__setattr__(self, "pair_loss", "cosine" if self.scored else "multiple_negatives")
        if not self.metric:
            object.__setattr__(self, "metric", "spearman" if self.scored else "accuracy")
        if self.long_inputs != "truncate":
            raise HeedfulError(f'long_inputs is "{self.long_inputs}", but a text has one vector: set it to "truncate"')
        if self.scored and not self.low < self.high:
            raise HeedfulError(f"scores go from {self.low} to {self.high}: low must be below high")
        if self.pair_loss == "multiple_negatives" and self.group_size < 2:
            raise HeedfulError(
                f"group_size is {self.group_size}, but in-batch negatives need groups of 2 or more pairs"
            )

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings = setup.settings
        assert isinstance(settings, EmbedSettings)
        scored = setup.stats.min_score is not None
        fields = comparison(setup.stats, settings.samples_per_group(scored=scored)) | _default_prompt(setup.loaded)
        task, bundle = cls.with_new_head(
            setup,
            long_inputs="truncate",  # windows would give several vectors
            pair_loss=settings.used_loss(scored=scored),
            scale=settings.scale,
            matryoshka_dimensions=settings.matryoshka_dimensions,
            **fields,
        )
        _check_dimensions(settings.matryoshka_dimensions, bundle)
        bundle.label_scaling = {name: fields[name] for name in ("low", "high") if name in fields}
        return task, bundle

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> TaskFields:
        """Return the fields for evaluation: how pairs are compared, with scores on the scale of the training data."""
        fields = comparison(read_stats()) | {"long_inputs": "truncate", "prompt": loaded.default_prompt}
        return fields | (loaded.label_scaling if fields["scored"] else {})

    def tokenizer_inputs(self, example: PairExample) -> list[TokenizerInput]:
        return [self.prompt + text for text in example.texts]

    def engine_input(self, example: PairExample) -> object:
        return (example.anchor, example.positive)

    def make_samples(self, example: PairExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return one sample with a sequence for the anchor, the positive and each negative."""
        encoded = [windows[0] for windows in item_windows]
        target = example.teacher_scores if self.pair_loss == "margin_mse" else self.target(example)
        return [Sample.of([text.ids for text in encoded], [text.types for text in encoded], target=target)]

    def target(self, example: PairExample) -> float:
        """Return the score of a pair, scaled to the range 0 to 1, or 0 for a pair without a score."""
        return 0.0 if example.score is None else (example.score - self.low) / (self.high - self.low)

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch. Its `groups` say how many texts each sample has."""
        weights = weights_of_samples(samples)
        groups = tuple(len(sample.bounds) - 1 for sample in samples)
        values: list[float] | list[int]
        if self.scored:
            values = [sample.target for sample in samples]
        elif self.pair_loss == "margin_mse":
            values = [score for sample in samples for score in sample.target]
            weights = torch.ones(sum(groups) - 2 * len(groups))  # one margin for each negative
        else:
            values = _first_occurrences([text for sample in samples for text in _candidate_texts(sample)])
        targets = torch.tensor(values, dtype=torch.float64)
        return Batch(packed=pack_samples(samples), targets=targets, weights=weights, groups=groups)

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each pair, or of each margin."""
        scores = upcast(scores)
        sizes = sorted({scores.shape[-1], *self.matryoshka_dimensions}, reverse=True)
        with full_precision(scores):  # in bfloat16, cosines times the scale are rounded to eighths
            losses = [self._losses(F.normalize(scores[:, :size], dim=-1), batch) for size in sizes]
        return torch.stack(losses).sum(0)

    def _losses(self, vectors: Tensor, batch: Batch) -> Tensor:
        """Return the losses from the unit vectors of all texts, [texts, dimension]."""
        match self.pair_loss:
            case "cosine":
                return (_cosines(vectors) - batch.targets.to(vectors)).square()
            case "cosent":
                group_cosines = _cosines(vectors).split(self.group_size)
                group_scores = batch.targets.split(self.group_size)
                groups = zip(group_cosines, group_scores, strict=True)
                return torch.cat(
                    [cosent(self.scale * cosines, scores).expand(len(scores)) for cosines, scores in groups]
                )
            case "margin_mse":
                teacher_scores = batch.targets.to(vectors).split([size - 1 for size in batch.groups])
                samples = zip(vectors.split(batch.groups), teacher_scores, strict=True)
                return torch.cat([margin_mse(self.scale * (texts[1:] @ texts[0]), scores) for texts, scores in samples])
        starts = range(0, len(batch.groups), self.group_size)
        sizes_by_group = [batch.groups[start : start + self.group_size] for start in starts]  # texts of each pair
        vectors_by_group = vectors.split([sum(sizes) for sizes in sizes_by_group])
        ids_by_group = batch.targets.split([sum(sizes) - len(sizes) for sizes in sizes_by_group])  # without anchors
        losses = map(self._in_batch_losses, vectors_by_group, ids_by_group, sizes_by_group)
        return torch.cat(list(losses))

    def _in_batch_losses(self, vectors: Tensor, text_ids: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return -log softmax(scale cos)_positive of each pair, over the positives and negatives of all pairs.

        The texts of other pairs are in-batch negatives (Henderson et al. 2017), except texts equal to the pair's
        positive.

        Args:
            vectors: Unit vectors of the anchor, the positive and the negatives of each pair in turn.
            text_ids: An id for each positive and negative; equal texts have equal ids.
            sizes: How many vectors each pair has: anchor, positive and negatives.
        """
        anchor_rows = [0, *accumulate(sizes)][:-1]
        candidate_rows = sorted(set(range(len(vectors))) - set(anchor_rows))  # positives and negatives
        rows = send([*anchor_rows, *candidate_rows], vectors.device)
        anchors, candidates = rows.split([len(anchor_rows), len(candidate_rows)])
        pairs = torch.arange(len(sizes), device=vectors.device)
        positives = anchors - pairs  # index of each pair's positive among the candidates
        duplicates = text_ids[positives][:, None] == text_ids
        duplicates[pairs, positives] = False
        similarities = self.scale * vectors[anchors] @ vectors[candidates].T
        return F.cross_entropy(similarities.masked_fill(duplicates, -torch.inf), positives, reduction="none")

    def new_metrics(self) -> EvalMetrics:
        return correlation_metrics() if self.scored else EvalMetrics(metrics={"pairs": Retrieval()})

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[PairExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        if self.scored:
            similarities = [answer["similarity"] for answer in answers]
            return update_correlation(metrics, similarities, [self.target(example) for example in examples], ids)
        vectors = np.array([answer["vectors"] for answer in answers])
        pairs = metrics.metrics["pairs"].update(ids, vectors, [example.positive for example in examples])
        return EvalMetrics(metrics={"pairs": pairs})

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        results: Result = metrics.metrics["numbers" if self.scored else "pairs"].compute()
        return results

    def score_answer(self, example: PairExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the score. The loss is the absolute error, or 1 - similarity without a score."""
        similarity = answer["similarity"]
        if not self.scored:
            return ScoredAnswer(None, similarity, None, 1 - similarity)
        return ScoredAnswer(example.score, similarity, None, abs(similarity - self.target(example)))

    def ranks(self, metrics: EvalMetrics) -> Sequence[int]:
        return () if self.scored else metrics.metrics["pairs"].ranks()[1].tolist()


def comparison(stats: DatasetStats, group_size: int = 2) -> TaskFields:
    """Return the fields of `Embed` that depend on whether pairs have scores.

    The scores of pairs are scaled: min(0, lowest score) corresponds to a cosine of 0, the highest score to 1. Pairs
    without scores are compared with each other in groups of `group_size`.
    """
    if stats.min_score is None or stats.max_score is None:
        return {"scored": False, "group_size": group_size}
    low = min(0.0, stats.min_score)
    return {"scored": True, "low": low, "high": stats.max_score if stats.max_score > low else 1.0}


def _default_prompt(loaded: ModelBundle) -> TaskFields:
    """Return the field `prompt` for training; raise HeedfulError if the model does not pool the prompt's tokens."""
    head, prompt = loaded.config.head, loaded.default_prompt
    if prompt and isinstance(head, SentenceEmbedding) and not head.pools_prompt:
        raise HeedfulError(
            f"{loaded.source} puts {prompt!r:.80} before each text and does not pool its tokens, which "
            "training here cannot do: set include_prompt to true or default_prompt_name to null in its folder"
        )
    return {"prompt": prompt}


def _check_dimensions(dimensions: Sequence[int], bundle: ModelBundle) -> None:
    """Raise SettingError if a Matryoshka dimension is not smaller than the embedding dimension."""
    head = bundle.config.head
    assert isinstance(head, SentenceEmbedding)
    full_dimension = head.width(bundle.config.model)
    if too_large := [dimension for dimension in dimensions if dimension >= full_dimension]:
        raise SettingError(
            f"task.matryoshka_dimensions has {too_large[0]}, but the vectors of {bundle.source} have {full_dimension} "
            "numbers: give smaller ones",
            path="task.matryoshka_dimensions",
        )


def _cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of the unit vectors 0 and 1, 2 and 3, and so on."""
    return (vectors[0::2] * vectors[1::2]).sum(-1)


def _candidate_texts(sample: Sample) -> list[bytes]:
    """Return the token ids of each text of a sample except the anchor, as bytes."""
    return [sample.tokens[start:stop].tobytes() for start, stop in pairwise(sample.bounds[1:])]


def _first_occurrences(texts: Sequence[bytes]) -> list[int]:
    """Return, for each text, the index of its first occurrence."""
    first_index: dict[bytes, int] = {}
    return [first_index.setdefault(text, index) for index, text in enumerate(texts)]

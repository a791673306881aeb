"""Reranking: the task `Rank` with its losses. A cross-encoder encodes query and document together and scores them.

The documents of an example are the "texts" of users: in inputs, messages and docs/searching.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, RankExample
from heedful.errors import HeedfulError
from heedful.model.config import Classes, ProblemType
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, dict_values
from heedful.tasks.classify import CLASSIFY_HEAD, Scores, classify_answer
from heedful.tasks.list_sampling import RankTarget, SampledLists
from heedful.tasks.metrics import RankingScores, Result
from heedful.tasks.metrics.ranking import ranked
from heedful.tasks.predictions import Reranking
from heedful.tasks.specs.rank import RankLoss, RankSettings
from heedful.tasks.task import EncodedSplit, EvalMetrics, ScoredAnswer, Task, TaskSetup
from heedful.tokenizer import Encoding, TokenizerInput

DEFAULT_OUTPUT_NAME = "score"
DocumentScores = Float[Tensor, " documents"]  # a score for each document of one query


def rerank_inputs(engine_input: object) -> list[TokenizerInput] | None:
    """Return the pairs of {"query": ..., "texts": [...]} as tokenizer inputs, or None for an input of another form."""
    query, texts = dict_values(engine_input, "query", "texts") or (None, None)
    if not isinstance(query, str) or not isinstance(texts, list | tuple) or not texts:
        return None
    return [(query, text) for text in texts] if all(isinstance(text, str) for text in texts) else None


def rerank_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"scores", "windows"}: the score of each document for the query, and how many windows there were."""
    answers = [
        classify_answer(engine_input, document_windows, context) for document_windows in _windows_by_document(windows)
    ]
    scores = [score for answer in answers for score in answer["values"].values()]
    return {"scores": scores, "windows": len(windows)}


def _windows_by_document(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yield the windows of each document. A document's first window has the start of the query and of the document."""
    document_windows: list[Window] = []
    for window in windows:
        # the query is the first text of the pair, the document the second, from whose start `start` counts
        if document_windows and not window.encoded.start and not window.encoded.first_text_start:
            yield document_windows
            document_windows = []
        document_windows.append(window)
    yield document_windows


RERANK_HEAD = AnswerHead(
    expects='queries with texts to rank, like [{"query": "weather", "texts": ["It rains.", "A book."]}]',
    tokenizer_inputs=rerank_inputs,
    answer=rerank_answer,
    prediction=lambda answer: Reranking.from_answer({**answer, "scores": tuple(answer["scores"])}),
    columns=lambda loaded, generation: {},  # no fields: rows of files are pairs, which CLASSIFY_HEAD answers
)


# -- losses of the documents of one query -----------------------------------------------------------------------------


def listwise(scores: DocumentScores, relevance: DocumentScores) -> Float[Tensor, " 1"]:
    """Return -Σ_i y_i log softmax(s)_i, with y = relevance / sum(relevance) (Zhuang et al. 2023, equation 5)."""
    return -(relevance / relevance.sum() * scores.log_softmax(0)).sum(0, keepdim=True)


def listnet(scores: DocumentScores, relevance: DocumentScores) -> Float[Tensor, " 1"]:
    """Return -Σ_i softmax(y)_i log softmax(s)_i, with y the relevance (Cao et al. 2007, top-one probabilities)."""
    return -(relevance.softmax(0) * scores.log_softmax(0)).sum(0, keepdim=True)


def binary(scores: DocumentScores, relevance: DocumentScores) -> DocumentScores:
    """Return the binary cross-entropy of each document."""
    return F.binary_cross_entropy_with_logits(scores, relevance, reduction="none")


def margin_mse(scores: DocumentScores, teacher: DocumentScores) -> Float[Tensor, " margins"]:
    """Return ((s_1 - s_i) - (t_1 - t_i))² for each document i > 1, with teacher scores t (Hofstätter et al. 2020).

    In the paper, the first document is the relevant one: `RankExample` has the most relevant document first.
    """
    return ((scores[0] - scores[1:]) - (teacher[0] - teacher[1:])).square()


def cosent(scores: DocumentScores, relevance: DocumentScores) -> Float[Tensor, " 1"]:
    """Return log(1 + Σ exp(s_j - s_i)), the sum over all i, j with i more relevant than j (CoSENT).

    The published scale, 20, is for cosines, which end at 1, and `Embed` multiplies them first. The scores of a
    cross-encoder have no bounds and need no scale.
    """
    differences = scores - scores[:, None]  # [i, j] = s_j - s_i
    differences = differences.masked_fill(relevance[:, None] <= relevance, -torch.inf)
    return torch.cat([scores.new_zeros(1), differences.flatten()]).logsumexp(0, keepdim=True)


class RankingLoss(NamedTuple):
    """A loss over the documents of one query."""

    function: Callable[[DocumentScores, DocumentScores], Tensor]  # (scores, targets) -> terms of the loss
    term_count: Callable[[int], int]  # how many documents -> how many terms


LOSSES: dict[RankLoss, RankingLoss] = {
    "listwise": RankingLoss(listwise, lambda documents: 1),
    "listnet": RankingLoss(listnet, lambda documents: 1),
    "binary": RankingLoss(binary, lambda documents: documents),
    "margin_mse": RankingLoss(margin_mse, lambda documents: documents - 1),
    "cosent": RankingLoss(cosent, lambda documents: 1),
}


# -- the task ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rank(Task[RankExample]):
    """Reranking: a score for each document of a query. A sample is a query with all its documents.

    The score of a long document is the mean over its windows, in training and in inference.
    """

    example: ClassVar[type[Example]] = RankExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (CLASSIFY_HEAD, RERANK_HEAD)
    problem_type: ClassVar[ProblemType] = "regression"
    takes_pairs: ClassVar[bool] = True
    # completes "N training examples were left out: ...", see `encoding_notes`
    skipped_because: ClassVar[str] = "their texts are all equally relevant, or there is only one"
    metric: str = "ndcg@10"
    ranking_loss: RankLoss = "listwise"
    list_size: int = RankSettings().list_size  # maximum documents of a query in an epoch
    seed: int = 0  # seed of the sampling of documents

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        """Return task and model. A cross-encoder keeps its head, without its output activation."""
        settings, head = setup.settings, setup.loaded.config.head
        assert isinstance(settings, RankSettings)
        has_score = isinstance(head, Classes) and head.problem_type == "regression" and len(head.labels) == 1
        labels = head.labels if isinstance(head, Classes) and has_score else (DEFAULT_OUTPUT_NAME,)
        task, bundle = cls.with_new_head(
            setup,
            labels=labels,
            metric=settings.metric,
            ranking_loss=settings.loss,
            list_size=settings.list_size,
            seed=setup.seed,
        )
        assert isinstance(bundle.config.head, Classes)
        # a sigmoid would lose precision near 0 and 1
        bundle.config = replace(bundle.config, head=replace(bundle.config.head, score_activation="identity"))
        return task, bundle

    def tokenizer_inputs(self, example: RankExample) -> list[TokenizerInput]:
        return [(example.query, document) for document in example.documents]

    def engine_input(self, example: RankExample) -> object:
        return {"query": example.query, "texts": list(example.documents)}

    def make_samples(self, example: RankExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return one sample, or none if the loss would learn nothing from the documents.

        The losses "listwise", "listnet" and "cosent" need documents that differ in relevance. "margin_mse" needs only
        two documents, since its targets are a teacher's scores.
        """
        is_margin = self.ranking_loss == "margin_mse"
        num_distinct = len(example.documents) if is_margin else len({*example.relevance})
        if num_distinct == 1 and self.ranking_loss != "binary":
            return []
        values = example.teacher_scores if is_margin else example.relevance
        windows = list(chain.from_iterable(item_windows))
        target = RankTarget(values, tuple(map(len, item_windows)), example.relevance)
        return [Sample.of([window.ids for window in windows], [window.types for window in windows], target=target)]

    def remarks(self, example: RankExample, item_windows: list[list[Encoding]]) -> list[str]:
        remarks = super().remarks(example, item_windows)
        if len(example.documents) <= self.list_size:
            return remarks
        return [*remarks, f"have more than {self.list_size} texts; {self.list_size} of them are sampled"]

    def encode_split(self, examples: Iterable[RankExample]) -> EncodedSplit:
        """Encode examples. For queries with more than `list_size` documents, each epoch samples documents anew."""
        encoded = super().encode_split(examples)
        if all(len(sample.target.relevance) <= self.list_size for sample in encoded.samples):
            return encoded
        lists = SampledLists(queries=encoded.samples, list_size=self.list_size, seed=self.seed)
        return replace(encoded, samples=lists, tokens=sum(map(len, lists.at(0))))

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch. A group is the documents of a query."""
        document_counts = [len(sample.target.values) for sample in samples]
        window_counts = torch.tensor([count for sample in samples for count in sample.target.windows])
        return Batch(
            packed=pack_samples(samples),
            targets=torch.tensor([value for sample in samples for value in sample.target.values], dtype=torch.float64),
            weights=torch.ones(sum(map(LOSSES[self.ranking_loss].term_count, document_counts))),
            groups=tuple(document_counts),
            labels=torch.arange(len(window_counts)).repeat_interleave(window_counts),  # document index of each window
        )

    def scores(self, loaded: ModelBundle, batch: Batch, hidden_states: Tensor | None = None) -> Scores:
        """Return the score of each document, [documents, 1]."""
        document_of_window = batch.labels
        assert document_of_window is not None
        window_scores = super().scores(loaded, batch, hidden_states)[:, 0]
        return mean_by_document(window_scores, document_of_window, len(batch.targets))[:, None]

    def target_losses(self, scores: Scores, batch: Batch) -> Tensor:
        """Return the terms of the loss of all queries."""
        groups = zip(scores[:, 0].split(batch.groups), batch.targets.to(scores).split(batch.groups), strict=True)
        return torch.cat([LOSSES[self.ranking_loss].function(*group) for group in groups])

    def check(self, examples: Iterable[RankExample]) -> None:
        """Raise HeedfulError if no query has a relevant document."""
        first = None
        for example in examples:
            first = first or example
            if any(relevance > 0 for relevance in example.relevance):
                return
        if first is not None:
            raise HeedfulError(f"{first.file}: no query has a relevant document, so that no ranking can be measured")

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(metrics={"queries": RankingScores(recall_at=())})

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[RankExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        queries = RankingScores(recall_at=())
        for query_id, example, answer in zip(ids, examples, answers, strict=True):
            queries = queries.update(str(query_id), by_id(answer["scores"]), by_id(example.relevance))
        return EvalMetrics(metrics={"queries": metrics.metrics["queries"].merge_state(queries)})

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        queries = metrics.metrics["queries"]
        assert isinstance(queries, RankingScores)
        left_out = f"queries without a relevant document, which are left out: {queries.left_out:,}"
        return queries.compute() | ({"notes": [left_out]} if queries.left_out else {})

    def score_answer(self, example: RankExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the relevances. It is correct if the top document is relevant.

        The loss is the rank of the first relevant document, or 0 if no document is relevant. Metrics leave out queries
        without a relevant document, and their answers are neither correct nor wrong.
        """
        relevance = by_id(example.relevance)
        is_relevant = [relevance[document] > 0 for document in ranked(by_id(answer["scores"]))]
        rank = is_relevant.index(True) + 1 if any(is_relevant) else 0
        return ScoredAnswer(list(example.relevance), answer["scores"], rank == 1 if rank else None, float(rank))


def by_id(values: Sequence[float]) -> dict[str, float]:
    """Return the values of documents by id. Ids are zero-padded indices, whose alphabetical order is numeric."""
    return {f"{index:09}": value for index, value in enumerate(values)}


def mean_by_document(
    scores: Float[Tensor, " windows"], document_of_window: Int[Tensor, " windows"], num_documents: int
) -> Float[Tensor, " documents"]:
    """Return the mean score of the windows of each document.

    Args:
        scores: Score of each window.
        document_of_window: Index of the document of each window.
        num_documents: How many documents there are.
    """
    if len(scores) == num_documents:  # each document has a window, so that each has exactly one
        return scores
    window_counts = torch.bincount(document_of_window, minlength=num_documents)
    return scores.new_zeros(num_documents).index_add(0, document_of_window, scores) / window_counts

"""Embed: losses with hard negatives, teacher scores and Matryoshka dimensions equal those of sentence-transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import pairwise_cos_sim
from torch import Tensor

import heedful
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import DataSettings, PairExample, Skip, read
from heedful.data.labelled.statistics import DatasetStats, compute_stats
from heedful.errors import HeedfulError, SettingError
from heedful.tasks.embed import Embed
from heedful.tasks.specs.embed import EmbedSettings
from heedful.tasks.task import Counter, TaskSetup
from tests.support.model_folders import LIMIT
from tests.support.task_parity import backward_all, load_both, sequence_text, tokenizer

ROWS = (
    ("the cat sat", "on the mat", ("a dog sat", "the mat")),
    ("who ?", "ada wrote it", ("he wrote it", "ada")),
    ("in paris", "she lives here .", ("he lives in france", "paris is love")),
    ("the dog", "ran to france", ("the dog ran", "to paris")),
)
HARD = [
    PairExample(anchor=anchor, positive=positive, negatives=negatives, teacher_scores=(number / 2, 0.25, -number / 4))
    for number, (anchor, positive, negatives) in enumerate(ROWS)
]
SCORED = [
    PairExample(anchor=anchor, positive=positive, score=score)
    for (anchor, positive, _), score in zip(ROWS, (0.0, 0.5, 0.2, 1.0), strict=True)
]
COLUMNS = [[example.texts[column] for example in HARD] for column in range(4)]
DIMENSIONS = (16, 8)


def task(**changes: Any) -> Embed:
    """A task for the tiny model, with all pairs in one group."""
    return Embed(**{"tokenizer": tokenizer(), "limit": LIMIT, "scored": False, "group_size": 4} | changes)


@cache
def model() -> ModelBundle:
    """The tiny model with mean pooling, in float64."""
    return with_head(load_both("bare").model, "embedding")


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    """The test model as a SentenceTransformer, in float64."""
    folder = tmp_path_factory.mktemp("peer") / "model"
    heedful.save(model(), folder)
    return SentenceTransformer(str(folder), device="cpu").double().eval()


def peer_loss(loss: Any, peer: SentenceTransformer, columns: list[list[str]], labels: Tensor | None = None) -> float:
    """The loss of a batch in sentence-transformers; `columns` has the anchors, the positives, the first negatives, …"""
    value = loss([peer.preprocess(column) for column in columns], labels)
    assert isinstance(value, Tensor)
    return value.item()


def our_loss(embed_task: Embed, examples: list[PairExample]) -> float:
    """The mean loss of a batch."""
    total = backward_all(embed_task, model(), examples)
    return float(total.sum) / total.count


def scaled_cosine(a: Tensor, b: Tensor) -> Tensor:
    return 20.0 * pairwise_cos_sim(a, b)


def test_the_loss_with_hard_negatives_equals_sentence_transformers(peer: SentenceTransformer) -> None:
    expected = peer_loss(losses.MultipleNegativesRankingLoss(peer), peer, COLUMNS)
    assert our_loss(task(), HARD) == pytest.approx(expected, abs=1e-6)


def test_the_margin_mse_loss_equals_sentence_transformers(peer: SentenceTransformer) -> None:
    loss = losses.MarginMSELoss(peer, similarity_fct=scaled_cosine)
    teacher_scores = torch.tensor([example.teacher_scores for example in HARD], dtype=torch.float64)
    expected = peer_loss(loss, peer, COLUMNS, teacher_scores)
    assert our_loss(task(pair_loss="margin_mse"), HARD) == pytest.approx(expected, abs=1e-6)


def test_the_cosent_loss_equals_sentence_transformers(peer: SentenceTransformer) -> None:
    labels = torch.tensor([example.score for example in SCORED], dtype=torch.float64)
    expected = peer_loss(losses.CoSENTLoss(peer), peer, COLUMNS[:2], labels)
    assert our_loss(task(scored=True, pair_loss="cosent"), SCORED) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["multiple_negatives", "margin_mse", "cosent", "cosine"])
def test_losses_with_matryoshka_dimensions_equal_sentence_transformers(peer: SentenceTransformer, loss: Any) -> None:
    scored = loss in ("cosent", "cosine")
    examples = SCORED if scored else HARD
    inner = {
        "multiple_negatives": losses.MultipleNegativesRankingLoss,
        "margin_mse": partial(losses.MarginMSELoss, similarity_fct=scaled_cosine),
        "cosent": losses.CoSENTLoss,
        "cosine": losses.CosineSimilarityLoss,
    }[loss](peer)
    values = [example.score if scored else example.teacher_scores for example in examples]
    labels = torch.tensor(values, dtype=torch.float64)
    outer = losses.MatryoshkaLoss(peer, inner, [32, *DIMENSIONS])
    expected = peer_loss(outer, peer, COLUMNS[:2] if scored else COLUMNS, labels)
    embed_task = task(scored=scored, pair_loss=loss, matryoshka_dimensions=DIMENSIONS)
    assert our_loss(embed_task, examples) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["multiple_negatives", "margin_mse", "cosent"])
def test_micro_batches_of_whole_groups_give_equal_losses(loss: Any) -> None:
    scored, loaded = loss == "cosent", model()
    embed_task = task(scored=scored, pair_loss=loss, group_size=2, matryoshka_dimensions=(8,))
    examples = SCORED if scored else HARD
    one_batch, two_batches = (backward_all(embed_task, loaded, examples, parts) for parts in (1, 2))
    assert one_batch.count == two_batches.count
    assert float(two_batches.sum) == pytest.approx(float(one_batch.sum), abs=1e-12)


def test_pairs_may_have_different_numbers_of_negatives() -> None:
    examples = [HARD[0], replace(HARD[1], negatives=()), replace(HARD[2], negatives=("x",))]
    encoded = task().encode_split(examples)
    assert [len(sample.bounds) - 1 for sample in encoded.samples] == [4, 2, 3]
    assert sequence_text(encoded.samples[0], 3) == "[CLS] the mat [SEP]"
    batch = task().batch(encoded.samples, [0] * 3)
    assert batch.groups == (4, 2, 3) and batch.targets.tolist() == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(task().scores(model(), batch), dim=-1)
    anchors, documents = vectors[[0, 4, 6]], vectors[[1, 2, 3, 5, 7, 8]]
    positives = torch.tensor([0, 3, 4])  # indices into the documents
    expected = torch.nn.functional.cross_entropy(20 * anchors @ documents.T, positives)
    assert our_loss(task(), examples) == pytest.approx(float(expected), abs=1e-6)


def test_a_negative_that_equals_the_positive_does_not_count() -> None:
    assert our_loss(task(), [replace(HARD[0], negatives=(HARD[0].positive, HARD[0].positive))]) == 0


def test_negatives_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('query,positive,negative_1,negative_2,margins\nq,p,a,b,"[1, 2]"\nr,s,c,,3\n')
    dataset = read(file, PairExample, DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    first, second = dataset.examples("train")
    assert (first.negatives, first.teacher_scores, second.negatives) == (("a", "b"), (0.0, -1.0, -2.0), ("c",))
    assert first.texts == ("q", "p", "a", "b")
    assert compute_stats(dataset, ["train"]).has_teacher_scores
    file.write_text("query,positive,negative,score\nq,p,a,0.5\n")
    with pytest.raises(HeedfulError, match=r"a pair with negatives has none: leave it out .*columns\.teacher_scores="):
        read(file, PairExample, DataSettings(dev_fraction=0.0))


def stats(**changes: Any) -> DatasetStats:
    return DatasetStats(**{"counts": {"train": 4}, "labels": Counter()} | changes)


@pytest.mark.parametrize(
    ("loss", "statistics", "message"),
    [
        ("cosent", {}, r"task\.loss is cosent, which needs pairs with scores \(the column score\)"),
        ("margin_mse", {}, r"task\.loss is margin_mse, which needs pairs with scores of a teacher"),
        ("multiple_negatives", {"min_score": 0.0}, r"loss is multiple_negatives, which needs pairs with no scores"),
    ],
)
def test_a_loss_that_does_not_fit_the_pairs_is_refused(loss: Any, statistics: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        EmbedSettings(loss=loss).check_data(stats(**statistics))


def test_the_default_loss_and_unused_settings() -> None:
    assert [EmbedSettings().used_loss(scored=scored) for scored in (True, False)] == ["cosine", "multiple_negatives"]
    assert EmbedSettings(loss="cosent").samples_per_group(scored=True) == 32
    assert EmbedSettings(loss="cosine").samples_per_group(scored=True) == 1
    assert {*EmbedSettings(loss="margin_mse", group_size=8, scale=2.0).unused_settings(stats())} == {"group_size"}


def test_matryoshka_dimensions_must_be_smaller_than_the_vectors() -> None:
    with pytest.raises(HeedfulError, match="matryoshka_dimensions has 0; expected whole numbers from 1"):
        EmbedSettings(matryoshka_dimensions=(8, 0))
    setup = TaskSetup(settings=EmbedSettings(matryoshka_dimensions=(8, 32)), loaded=model(), labels=(), stats=stats())
    with pytest.raises(SettingError, match=r"has 32, but the vectors of .* have 32 numbers: give smaller ones"):
        Embed.create(setup)
    embed_task, _ = Embed.create(replace(setup, settings=EmbedSettings(matryoshka_dimensions=(8,))))
    assert isinstance(embed_task, Embed)
    assert embed_task.matryoshka_dimensions == (8,)
    assert embed_task.group_size == 32

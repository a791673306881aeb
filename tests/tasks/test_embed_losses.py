"""Losses of embeddings, with hard negatives and Matryoshka dimensions, are those of sentence-transformers."""

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


def task(**more: Any) -> Embed:
    """For the tiny model, with all pairs in one group."""
    return Embed(**{"tokenizer": tokenizer(), "limit": LIMIT, "scored": False, "group_size": 4} | more)


@cache
def model() -> ModelBundle:
    """Mean pooling over the tiny model, in float64."""
    return with_head(load_both("bare").model, "embedding")


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    """The test model as a SentenceTransformer, in float64."""
    folder = tmp_path_factory.mktemp("peer") / "model"
    heedful.save(model(), folder)
    return SentenceTransformer(str(folder), device="cpu").double().eval()


def peer_loss(loss: Any, peer: SentenceTransformer, columns: list[list[str]], labels: Tensor | None = None) -> float:
    """The loss of a batch in sentence-transformers."""
    value = loss([peer.preprocess(column) for column in columns], labels)
    assert isinstance(value, Tensor)
    return value.item()


def our_loss(embed_task: Embed, examples: list[PairExample]) -> float:
    """The mean loss of a batch."""
    total = backward_all(embed_task, model(), examples)
    return float(total.sum) / total.count


def scaled_cosine(a: Tensor, b: Tensor) -> Tensor:
    return 20.0 * pairwise_cos_sim(a, b)


def test_hard_negatives_are_told_apart_as_in_sentence_transformers(peer: SentenceTransformer) -> None:
    expected = peer_loss(losses.MultipleNegativesRankingLoss(peer), peer, COLUMNS)
    assert our_loss(task(), HARD) == pytest.approx(expected, abs=1e-6)


def test_margins_to_a_teacher_are_those_of_sentence_transformers(peer: SentenceTransformer) -> None:
    loss = losses.MarginMSELoss(peer, similarity_fct=scaled_cosine)
    expected = peer_loss(
        loss, peer, COLUMNS, torch.tensor([example.teacher_scores for example in HARD], dtype=torch.float64)
    )
    assert our_loss(task(pair_loss="margin_mse"), HARD) == pytest.approx(expected, abs=1e-6)


def test_cosent_is_that_of_sentence_transformers(peer: SentenceTransformer) -> None:
    labels = torch.tensor([example.score for example in SCORED], dtype=torch.float64)
    expected = peer_loss(losses.CoSENTLoss(peer), peer, COLUMNS[:2], labels)
    assert our_loss(task(scored=True, pair_loss="cosent"), SCORED) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["multiple_negatives", "margin_mse", "cosent", "cosine"])
def test_matryoshka_dimensions_are_those_of_sentence_transformers(peer: SentenceTransformer, loss: Any) -> None:
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
def test_micro_batches_of_whole_groups_do_not_matter(loss: Any) -> None:
    scored, loaded = loss == "cosent", model()
    embed_task = task(scored=scored, pair_loss=loss, group_size=2, matryoshka_dimensions=(8,))
    whole, parts = (backward_all(embed_task, loaded, SCORED if scored else HARD, parts) for parts in (1, 2))
    assert whole.count == parts.count and float(parts.sum) == pytest.approx(float(whole.sum), abs=1e-12)


def test_pairs_may_have_different_numbers_of_negatives() -> None:
    examples = [HARD[0], replace(HARD[1], negatives=()), replace(HARD[2], negatives=("x",))]
    read = task().encode_split(examples)
    assert [len(sample.bounds) - 1 for sample in read.samples] == [4, 2, 3]
    assert sequence_text(read.samples[0], 3) == "[CLS] the mat [SEP]"
    batch = task().batch(read.samples, [0] * 3)
    assert batch.groups == (4, 2, 3) and batch.targets.tolist() == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        vectors = torch.nn.functional.normalize(task().scores(model(), batch), dim=-1)
    anchors, rest = vectors[[0, 4, 6]], vectors[[1, 2, 3, 5, 7, 8]]
    expected = torch.nn.functional.cross_entropy(20 * anchors @ rest.T, torch.tensor([0, 3, 4]))
    assert our_loss(task(), examples) == pytest.approx(float(expected), abs=1e-6)


def test_a_negative_that_equals_the_positive_does_not_count() -> None:
    assert our_loss(task(), [replace(HARD[0], negatives=(HARD[0].positive, HARD[0].positive))]) == 0


def test_negatives_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('query,positive,negative_1,negative_2,margins\nq,p,a,b,"[1, 2]"\nr,s,c,,3\n')
    source = read(file, PairExample, DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    first, second = source.examples("train")
    assert (first.negatives, first.teacher_scores, second.negatives) == (("a", "b"), (0.0, -1.0, -2.0), ("c",))
    assert first.texts == ("q", "p", "a", "b") and compute_stats(source, ["train"]).has_teacher_scores
    file.write_text("query,positive,negative,score\nq,p,a,0.5\n")
    with pytest.raises(HeedfulError, match=r"a pair with negatives has none: leave it out .*columns\.teacher_scores="):
        read(file, PairExample, DataSettings(dev_fraction=0.0))


def stats(**more: Any) -> DatasetStats:
    return DatasetStats(**{"counts": {"train": 4}, "labels": Counter()} | more)


@pytest.mark.parametrize(
    ("loss", "of", "message"),
    [
        ("cosent", {}, r"task\.loss is cosent, which needs pairs with scores \(the column score\)"),
        ("margin_mse", {}, r"task\.loss is margin_mse, which needs pairs with scores of a teacher"),
        ("multiple_negatives", {"min_score": 0.0}, r"loss is multiple_negatives, which needs pairs with no scores"),
    ],
)
def test_a_loss_that_does_not_fit_the_pairs_is_refused(loss: Any, of: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        EmbedSettings(loss=loss).check_data(stats(**of))


def test_which_loss_is_used() -> None:
    assert [EmbedSettings().used_loss(scored=scored) for scored in (True, False)] == ["cosine", "multiple_negatives"]
    assert EmbedSettings(loss="cosent").samples_per_group(scored=True) == 32
    assert EmbedSettings(loss="cosine").samples_per_group(scored=True) == 1
    assert {*EmbedSettings(loss="margin_mse", group_size=8, scale=2.0).unused_settings(stats())} == {"group_size"}


def test_dimensions_that_vectors_do_not_have_are_refused() -> None:
    with pytest.raises(HeedfulError, match="matryoshka_dimensions has 0; expected whole numbers from 1"):
        EmbedSettings(matryoshka_dimensions=(8, 0))
    setup = TaskSetup(settings=EmbedSettings(matryoshka_dimensions=(8, 32)), loaded=model(), labels=(), stats=stats())
    with pytest.raises(SettingError, match=r"has 32, but the vectors of .* have 32 numbers: give smaller ones"):
        Embed.create(setup)
    embed_task, _ = Embed.create(replace(setup, settings=EmbedSettings(matryoshka_dimensions=(8,))))
    assert isinstance(embed_task, Embed) and embed_task.matryoshka_dimensions == (8,) and embed_task.group_size == 32

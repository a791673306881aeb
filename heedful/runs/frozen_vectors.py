"""Features for linear models (frozen sentence vectors, words), and out-of-fold predictions of such models.

Fine-tuning with few labels and the search for label errors use them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from heedful.bundled import BUNDLED_ENCODER
from heedful.errors import DataError
from heedful.infer.engine import Engine

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

INVERSE_REGULARISATION = 0.1  # C of scikit-learn's LogisticRegression, for features with a mean square of 1
MAX_ITERATIONS = 1000  # maximum iterations of the optimizer of a logistic regression

Texts = Sequence[tuple[str, ...]]  # one or two texts per example
# (indices of training examples, indices of held-out examples) -> probabilities that a model, trained on the former,
# predicts for the latter, [held-out examples, classes]
PredictFold = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]


def sentence_features(
    texts: Texts, model: str | Path | Engine = BUNDLED_ENCODER, *, device: str | None = None
) -> Float[NDArray[np.float32], "examples features"]:
    """Embed examples as features of a linear model, scaled so that the mean square over all examples is 1.

    A pair of texts with vectors u and v has the features (u, v, |u - v|, u * v) (Conneau et al. 2017, section 3.1). The
    four blocks are scaled separately.

    Args:
        texts: One or two texts of each example.
        model: A sentence embedding model.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.

    Raises:
        HeedfulError: If the model's head does not return sentence embeddings.
    """
    engine = model if isinstance(model, Engine) else Engine(model, device=device)
    first = engine.encode([parts[0] for parts in texts])
    if not any(len(parts) > 1 for parts in texts):
        return _scaled(first)
    second = engine.encode([" ".join(parts[1:]) for parts in texts])
    return np.concatenate([_scaled(block) for block in (first, second, np.abs(first - second), first * second)], axis=1)


def _scaled(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide features by their root mean square."""
    root_mean_square = float(np.sqrt(np.mean(np.square(block, dtype=np.float64)))) if block.size else 0.0
    return block / np.float32(root_mean_square) if root_mean_square else block


def linear_classifier() -> LogisticRegression:
    """Return a new logistic regression for the features of `sentence_features`."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS)


def word_features(texts: Texts) -> object:
    """Return the TF-IDF of the words of examples, as a sparse matrix [examples, words].

    Raises:
        DataError: If the texts have no words.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    try:
        return TfidfVectorizer(sublinear_tf=True, dtype=np.float32).fit_transform([" ".join(parts) for parts in texts])
    except ValueError:  # no words
        raise DataError("the texts have no words: expected texts with letters or digits") from None


def out_of_fold_probabilities(
    texts: Texts,
    targets: NDArray[np.int64],
    groups: NDArray[np.int64],
    *,
    folds: int = 5,
    seed: int = 0,
    model: str | Path | Engine = BUNDLED_ENCODER,
    device: str | None = None,
    predict_fold: PredictFold | None = None,
) -> Float[NDArray[np.float64], "examples classes"]:
    """Predict the probability of each class for each example, with models fitted without the example's fold.

    A probability is the mean over two models: a logistic regression over frozen sentence vectors, or the model of
    `predict_fold` instead, and a logistic regression over words.

    Args:
        texts: One or two texts of each example.
        targets: Class id of each example, from 0 to classes - 1. Each class has at least one example.
        groups: Group id of each example. The examples of a group are in the same fold.
        folds: How many folds.
        seed: Seed of the folds.
        model: A sentence embedding model. It is not used with `predict_fold`.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
        predict_fold: Trains the first of the two models and predicts with it. If None, it is the logistic regression
            over sentence vectors.

    Raises:
        DataError: If there are fewer groups than folds, only one class, or fewer than two folds.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedGroupKFold

    classes = int(targets.max(initial=-1)) + 1
    if classes < 2:
        raise DataError(f"the data has {classes} label{'s' * (classes != 1)}; expected 2 or more")
    if folds < 2:
        raise DataError(f"folds is {folds}; expected 2 or more")
    if (distinct := len(np.unique(groups))) < folds:
        raise DataError(
            f"different texts that are not near duplicates or phrases of each other: {distinct}; expected {folds} or "
            "more, one for each fold"
        )
    probability_sums = np.zeros((len(texts), classes))  # over the two models
    if predict_fold is None:
        vectors = sentence_features(texts, model, device=device)
        predict_fold = _linear_fold_predictor(vectors, targets, classes, linear_classifier())
    by_words = LogisticRegression(max_iter=MAX_ITERATIONS)
    predict_by_words = _linear_fold_predictor(word_features(texts), targets, classes, by_words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about classes with fewer examples than folds
        splits = list(StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(targets, targets, groups))
    for train, held_out in splits:
        seen_classes = np.unique(targets[train])
        if len(seen_classes) < 2:  # no model can be fitted: the only class has probability 1 in both
            probability_sums[np.ix_(held_out, seen_classes)] += 2
        else:
            probability_sums[held_out] += predict_fold(train, held_out) + predict_by_words(train, held_out)
    return probability_sums / 2


def _linear_fold_predictor(
    features: Any, targets: NDArray[np.int64], classes: int, estimator: LogisticRegression
) -> PredictFold:
    """Return a function that fits a logistic regression to some examples, and predicts the classes of others.

    Args:
        features: Features of all examples, a dense or sparse matrix [examples, features].
        targets: Class id of each example.
        classes: How many classes there are. Those that no training example has get the probability 0.
        estimator: The logistic regression, which is fitted again for each fold.
    """

    def predict(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> NDArray[np.float64]:
        probabilities = np.zeros((len(held_out), classes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about convergence
            estimator.fit(features[train], targets[train])
        probabilities[:, estimator.classes_] = estimator.predict_proba(features[held_out])
        return probabilities

    return predict

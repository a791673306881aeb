"""Linear models over frozen sentence vectors and words, and their predictions for held-out examples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from heedful.bundled import BUNDLED_ENCODER
from heedful.errors import DataError
from heedful.infer.engine import Engine

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

INVERSE_REGULARISATION = 0.1  # C of scikit-learn's LogisticRegression, for features whose mean square is 1
MAX_ITERATIONS = 1000  # iterations of the optimizer of a logistic regression

Texts = Sequence[tuple[str, ...]]  # one or two texts of each example


def sentence_features(
    texts: Texts, model: str | Path | Engine = BUNDLED_ENCODER, *, device: str | None = None
) -> Float[NDArray[np.float32], "examples features"]:
    """Embed examples as features of a linear model, scaled so that the mean square over all examples is 1.

    A pair of texts with vectors u and v has the features (u, v, |u - v|, u * v) (Conneau et al. 2017, section 3.1);
    each of the four blocks is scaled by itself.

    Args:
        texts: One text of each example, or two.
        model: A sentence embedding model.
        device: "cpu", "cuda" or "cuda:1"; None: a GPU where there is one.

    Raises:
        HeedfulError: If the model's head makes no sentence embeddings.
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
    """Return a new logistic regression for features of `sentence_features`."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS)


def word_features(texts: Texts) -> object:
    """Return the TF-IDF of the words of examples, a sparse matrix [examples, words].

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
) -> Float[NDArray[np.float64], "examples classes"]:
    """Predict the probability of each class for each example, by models that were fitted without the example's fold.

    A probability is the mean of two logistic regressions: over frozen sentence vectors, and over a bag of words.

    Args:
        texts: One text of each example, or two.
        targets: Class of each example, from 0 to classes - 1; each class has at least one example.
        groups: Group of each example; the examples of a group are in the same fold.
        folds: Number of folds.
        seed: Seed of the folds.
        model: A sentence embedding model.
        device: "cpu", "cuda" or "cuda:1"; None: a GPU where there is one.

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
        raise DataError(f"the data has {distinct} different texts; expected {folds} or more, one for each fold")
    probability_sums = np.zeros((len(texts), classes))  # over the two models
    vectors, words = sentence_features(texts, model, device=device), word_features(texts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about classes with fewer examples than folds, and about too few steps
        splits = StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(vectors, targets, groups)
        for train, held_out in splits:
            seen_classes = np.unique(targets[train])
            if len(seen_classes) < 2:  # no model can be fitted: the only class has probability 1 twice
                probability_sums[np.ix_(held_out, seen_classes)] += 2
                continue
            for features, estimator in (
                (vectors, linear_classifier()),
                (words, LogisticRegression(max_iter=MAX_ITERATIONS)),
            ):
                estimator.fit(features[train], targets[train])  # type: ignore[index]
                probabilities = estimator.predict_proba(features[held_out])  # type: ignore[index]
                probability_sums[np.ix_(held_out, estimator.classes_)] += probabilities
    return probability_sums / 2

"""Estimators with scikit-learn's interface for text classification, regression, tagging and sentence embeddings.

X is a sequence of texts instead of a matrix. Apart from that, the estimators work in pipelines, grid searches and
cross-validation like those of scikit-learn. A fitted estimator has a model folder. A pickled estimator contains the
files of this folder, so that it can be loaded on another machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import ClassVar, TypeAlias, cast
from weakref import finalize

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from heedful.api import finetune
from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import RUN_MODEL
from heedful.errors import DataError
from heedful.infer.engine import Engine
from heedful.runs.evaluate import evaluate

TextItem: TypeAlias = str | tuple[str, str] | Sequence[str]  # a text, or a pair of texts
State: TypeAlias = dict[str, object]  # state of a pickled estimator


class _TextEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of all estimators; a fitted one has a model folder and an engine, and can be pickled."""

    @property
    def engine_(self) -> Engine:
        """The engine of the fitted model, opened at the first access."""
        check_is_fitted(self, "model_dir_")
        if getattr(self, "_engine", None) is None:
            self._engine: Engine | None = Engine(self.model_dir_)
        assert self._engine is not None
        return self._engine

    def _new_folder(self) -> Path:
        """Make a temporary folder, which is removed with the estimator."""
        folder = Path(mkdtemp(prefix="heedful-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        return folder

    def __getstate__(self) -> State:
        state = dict(super().__getstate__())
        state.pop("_engine", None)
        if folder := state.pop("model_dir_", None):
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            state["_model_files"] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return state

    def __setstate__(self, state: State) -> None:
        files = cast("dict[str, bytes] | None", state.pop("_model_files", None))
        super().__setstate__(state)
        if files is not None:
            self.model_dir_ = self._new_folder()
            for name, data in files.items():
                path = self.model_dir_ / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

    def __sklearn_tags__(self) -> Tags:
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags


class _FinetunedEstimator(_TextEstimator):
    """Base class of estimators that are fine-tuned. The value of an argument that is None depends on the data.

    Args:
        model: A folder, or NAME[@REVISION] on the hub (default: the encoder that ships with Heedful).
        epochs: Passes over the training data.
        max_steps: Number of optimizer steps; excludes `epochs`.
        lr: Peak learning rate.
        batch_size: Samples per optimizer step.
        max_length: Maximum sequence length in tokens.
        seed: Random seed.
        overrides: Other settings by path or unique last component, as in `heedful.finetune`.
        output_dir: The run folder, which must not hold another run (default: a temporary folder, which is deleted
            with the estimator).
    """

    _task: ClassVar[str]

    def __init__(
        self,
        model: str | Path = "",
        *,
        epochs: float | None = None,
        max_steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        seed: int = 1,
        overrides: Mapping[str, object] | None = None,
        output_dir: str | Path | None = None,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.max_steps = max_steps
        self.lr = lr
        self.batch_size = batch_size
        self.max_length = max_length
        self.seed = seed
        self.overrides = overrides
        self.output_dir = output_dir

    def _train(self, inputs: Sequence[object], targets: Sequence[object]) -> None:
        """Fine-tune on all inputs, without a dev split unless `overrides` sets `data.dev_fraction`."""
        folder = self._new_folder() / "run" if self.output_dir is None else Path(self.output_dir)
        overrides = {"data.dev_fraction": 0.0, "eval_baseline": False} | dict(self.overrides or {})
        result = finetune(
            self._task, {"train": (inputs, targets)}, folder, model=self.model, epochs=self.epochs,
            max_steps=self.max_steps, lr=self.lr, batch_size=self.batch_size, max_length=self.max_length,
            seed=self.seed, overrides=overrides,
        )  # fmt: skip
        if result.status != "completed":
            raise KeyboardInterrupt
        self.model_dir_ = folder / RUN_MODEL
        self._engine = None


class TextClassifier(ClassifierMixin, _FinetunedEstimator):  # type: ignore[misc]
    """Classify texts, or pairs of texts, into one of several classes."""

    _task = "classify"

    def fit(self, X: Sequence[TextItem], y: ArrayLike) -> TextClassifier:
        """Fine-tune on texts X and their classes y."""
        texts, targets = _texts(X), _targets(X, y)
        self.classes_, class_ids = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has only the class {self.classes_[0]}; expected 2 classes or more")
        self._names = [f"{value}" for value in self.classes_.tolist()]
        self._train(texts, [self._names[id] for id in class_ids])
        return self

    def predict_proba(self, X: Sequence[TextItem]) -> NDArray[np.float64]:
        """Return the probability of each class, [texts, classes], in the order of `classes_`."""
        answers = self.engine_(_texts(X))
        probabilities = [[answer["probabilities"][name] for name in self._names] for answer in answers]
        return np.array(probabilities, np.float64).reshape(len(answers), len(self.classes_))

    def predict(self, X: Sequence[TextItem]) -> NDArray[np.generic]:
        """Return the most likely class of each text."""
        probabilities = self.predict_proba(X)
        predicted: NDArray[np.generic] = self.classes_[probabilities.argmax(1)]
        return predicted


class TextRegressor(RegressorMixin, _FinetunedEstimator):  # type: ignore[misc]
    """Predict a number for each text or pair of texts."""

    _task = "regress"

    def fit(self, X: Sequence[TextItem], y: ArrayLike) -> TextRegressor:
        """Fine-tune on texts X and their numbers y."""
        self._train(_texts(X), [float(value) for value in _targets(X, y)])
        return self

    def predict(self, X: Sequence[TextItem]) -> NDArray[np.float64]:
        """Return the predicted number of each text."""
        return np.array([next(iter(answer["values"].values())) for answer in self.engine_(_texts(X))], np.float64)


class TokenClassifier(_FinetunedEstimator):
    """Tag the words of texts. X has a list of words for each text, y a list of tags such as B-PER, I-PER, O."""

    _task = "tag"

    def fit(self, X: Sequence[Sequence[str]], y: Sequence[Sequence[str]]) -> TokenClassifier:
        """Fine-tune on the words X of texts and their tags y."""
        if len(X) != len(y):
            raise DataError(f"X has {len(X)} texts, but y has {len(y)}; expected the same number")
        self._train([list(words) for words in X], [list(tags) for tags in y])
        return self

    def predict(self, X: Sequence[Sequence[str]]) -> list[list[str | None]]:
        """Return the tag of each word. In a model without the tag "O", words without a token get None."""
        answers = self.engine_([list(words) for words in X])
        return [[word["label"] for word in answer["words"]] for answer in answers]

    def score(self, X: Sequence[Sequence[str]], y: Sequence[Sequence[str]]) -> float:
        """Return the entity F1, or the accuracy if the tags mark no entities."""
        data = {"test": ([list(words) for words in X], [list(tags) for tags in y])}
        evaluated = evaluate(self.engine_.loaded, data)
        return float(evaluated.numbers[evaluated.metric])


class SentenceEncoder(TransformerMixin, _TextEstimator):  # type: ignore[misc]
    """Embed texts with a trained model, as a step of a pipeline. `fit` only loads the model.

    Args:
        model: A folder of sentence-transformers, a run of the task embed, or NAME[@REVISION] on the hub.
        prompt: Prefix of each text.
    """

    def __init__(self, model: str | Path = BUNDLED_ENCODER, *, prompt: str = "") -> None:
        self.model = model
        self.prompt = prompt

    def fit(self, X: Sequence[str], y: object = None) -> SentenceEncoder:
        """Load the model; `y` is ignored."""
        from heedful.checkpoint import load, save

        folder = self._new_folder() / "model"
        save(load(self.model), folder)
        self.model_dir_ = folder
        self._engine = None
        return self

    def transform(self, X: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings, [texts, dimensions]."""
        return self.engine_.encode(cast("list[str]", _texts(X)), prompt=self.prompt)


def _texts(X: object) -> list[str | tuple[str, ...]]:
    """Return a sequence of texts or pairs of texts as a list.

    Raises:
        DataError: If X is not such a sequence, or is empty.
    """
    if isinstance(X, str) or not isinstance(X, Iterable) or not hasattr(X, "__len__"):
        raise DataError(f"X is {type(X).__name__}; expected a list or an array of texts")
    values = X.tolist() if hasattr(X, "tolist") else list(X)
    for index, value in enumerate(values):
        if not isinstance(value, str) and not _is_pair(value):
            raise DataError(f"X[{index}] is {type(value).__name__}; expected a text, or a pair of texts")
    if not values:
        raise DataError("X has 0 sample(s); expected texts")
    return [value if isinstance(value, str) else tuple(value) for value in values]


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _targets(X: Sequence[TextItem], y: ArrayLike | None) -> NDArray[np.generic]:
    """Return y as an array of one target for each text.

    Raises:
        DataError: If y is None or has another shape.
    """
    if y is None:
        raise DataError("this estimator requires y to be passed, but the target y is None")
    targets = np.asarray(y)
    if targets.ndim != 1 or len(targets) != len(X):
        raise DataError(f"y has the shape {targets.shape}; expected one target for each of {len(X)} texts")
    return targets

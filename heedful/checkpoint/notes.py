"""Read and write heedful.json of a model folder: values that `load` and `save` cannot put into Hugging Face's files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heedful.checkpoint.folder_json import read_folder_json
from heedful.errors import ModelError
from heedful.model.token_pruning import TokenPruning

NOTES = "heedful.json"
VECTOR_SAMPLE = 256  # windows of texts whose mean vector is compared with that of the training texts


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingVectors:
    """A summary of the vectors of training texts, with which a server compares those of the texts that it gets.

    The vector of a text, or of each window of a long text, is the mean of the last hidden states that the head reads.

    Attributes:
        mean: Mean of the vectors.
        radius: Root of the mean squared distance of the vectors from their mean.
        held_out: Quantiles, such as {"0.5": 0.08}, of `distance` for random samples of dev.
    """

    mean: tuple[float, ...]
    radius: float
    held_out: dict[str, float]

    def distance(self, vectors: NDArray[np.float32]) -> float:
        """Return how far the mean of VECTOR_SAMPLE vectors is from the mean of the training texts, in `radius`.

        For texts that are like those of training, it is about 1 / sqrt(VECTOR_SAMPLE), 0.06.
        """
        return float(np.linalg.norm(vectors.mean(axis=0, dtype=np.float64) - np.array(self.mean))) / self.radius


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """The values of heedful.json. `ModelBundle` has most of them as attributes, and explains them."""

    tokenizer: object = None  # fingerprint of the tokenizer that the model was saved with, if there was one
    thresholds: dict[str, float] = field(default_factory=dict)
    label_scaling: dict[str, float] = field(default_factory=dict)
    calibration: tuple[float, ...] = ()
    text_suffix: str = ""
    pairs: bool | None = None
    stage_thresholds: tuple[float, ...] = ()  # thresholds of the early stages of a cascade, in order
    token_pruning: TokenPruning | None = None
    training_vectors: TrainingVectors | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the values that differ from the defaults, by name."""
        names = ("tokenizer", "thresholds", "label_scaling", "calibration", "text_suffix", "stage_thresholds")
        values = {name: getattr(self, name) for name in names}
        if self.pairs is not None:
            values["pairs"] = self.pairs
        if self.token_pruning is not None:
            values["token_pruning"] = asdict(self.token_pruning)
        if self.training_vectors is not None:
            values["training_vectors"] = asdict(self.training_vectors)
        return {name: value for name, value in values.items() if value or name == "pairs"}


def read_notes(folder: Path) -> Notes:
    """Read heedful.json, which may be missing; raises ModelError for a value of a wrong type."""
    path = folder / NOTES
    values = read_folder_json(path) if path.exists() else {}
    text_suffix, pairs = values.get("text_suffix", ""), values.get("pairs")
    if not isinstance(text_suffix, str):
        raise _wrong_type(path, "text_suffix", text_suffix, "a text")
    if not isinstance(pairs, bool | None):
        raise _wrong_type(path, "pairs", pairs, "true or false")
    return Notes(
        tokenizer=values.get("tokenizer"),
        thresholds=_numbers(path, values, "thresholds"),
        label_scaling=_numbers(path, values, "label_scaling"),
        calibration=_probabilities(path, values, "calibration"),
        text_suffix=text_suffix,
        pairs=pairs,
        stage_thresholds=_stage_thresholds(path, values),
        token_pruning=_token_pruning(path, values),
        training_vectors=_training_vectors(path, values),
    )


def stage_folder(index: int) -> str:
    """Return the name of the subfolder with an early stage of a cascade; the first one has the index 1."""
    return f"stage-{index}"


def _numbers(path: Path, values: Mapping[str, object], name: str) -> dict[str, float]:
    """Return an object whose values are numbers, or {} if it is missing."""
    numbers = values.get(name, {})
    if not isinstance(numbers, dict) or not all(type(value) in (int, float) for value in numbers.values()):
        raise _wrong_type(path, name, numbers, "names with a number each")
    return {key: float(value) for key, value in numbers.items()}


def _probabilities(path: Path, values: Mapping[str, object], name: str) -> tuple[float, ...]:
    """Return a list of probabilities, sorted, or () if it is missing."""
    listed = values.get(name, [])
    if not isinstance(listed, list) or not all(type(value) in (int, float) and 0 <= value <= 1 for value in listed):
        raise _wrong_type(path, name, listed, "a list of probabilities")
    return tuple(sorted(map(float, listed)))


def _stage_thresholds(path: Path, values: Mapping[str, object]) -> tuple[float, ...]:
    """Return the thresholds of a cascade's early stages, or () if they are missing."""
    listed = values.get("stage_thresholds", [])
    if not isinstance(listed, list) or not all(type(value) in (int, float) and value >= 0 for value in listed):
        raise _wrong_type(path, "stage_thresholds", listed, "a list of probabilities")
    return tuple(map(float, listed))


def _token_pruning(path: Path, values: Mapping[str, object]) -> TokenPruning | None:
    """Return the token pruning, or None if it is missing."""
    match values.get("token_pruning"):
        case None:
            return None
        case {"layer": int(layer), "keep_rate": int() | float() as keep_rate, **rest} if not (
            rest or isinstance(layer, bool) or isinstance(keep_rate, bool)
        ):
            try:
                return TokenPruning(layer=layer, keep_rate=float(keep_rate))
            except ModelError as error:
                raise ModelError(f"{path}: token_pruning: {error}") from error
        case other:
            raise _wrong_type(path, "token_pruning", other, 'an object like {"layer": 3, "keep_rate": 0.5}')


def _training_vectors(path: Path, values: Mapping[str, object]) -> TrainingVectors | None:
    """Return the summary of the vectors of training texts, or None if it is missing."""
    match values.get("training_vectors"):
        case None:
            return None
        case {"mean": list(mean), "radius": int() | float() as radius, "held_out": dict(held_out), **rest} if (
            mean
            and all(type(value) in (int, float) and math.isfinite(value) for value in (*mean, radius))
            and radius > 0
            and not rest
        ):
            return TrainingVectors(
                mean=tuple(map(float, mean)),
                radius=float(radius),
                held_out=_numbers(path, {"held_out": held_out}, "held_out"),
            )
        case value:
            raise _wrong_type(path, "training_vectors", value, "an object with mean, radius and held_out")


def _wrong_type(path: Path, name: str, value: object, expected: str) -> ModelError:
    """Return the error for a value of a wrong type."""
    return ModelError(f"{path}: {name} is {value!r:.80}; expected {expected}")

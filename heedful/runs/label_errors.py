"""Likely label errors in classification data, by confident learning (Northcutt et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import Dataset, DataSettings, Raise, dataset_for_task
from heedful.data.bad_rows import BadRowPolicy
from heedful.data.corpus.dedup import minhash_signatures, near_duplicate_groups
from heedful.data.examples import Example, LabelledExample
from heedful.data.labelled.corrections import write_review_file
from heedful.errors import DataError
from heedful.infer.engine import Engine
from heedful.runs.frozen_vectors import out_of_fold_probabilities

NEAR_DUPLICATE = 0.8  # least Jaccard similarity of near duplicates, between their sets of five consecutive words
Reason = Literal["near-duplicate", "confident-learning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelError:
    """An example whose label is likely wrong."""

    text: str
    text_pair: str | None  # second text of a pair
    label: str  # label in the data
    suggested_label: str  # label of most near duplicates, or else the most probable one
    probability: float  # probability of `label`, by models that were fitted without the example
    suggested_probability: float  # probability of `suggested_label`, by the same models
    reason: Reason  # "near-duplicate": most near duplicates of the text have another label
    split: str
    file: str
    line: int  # line of the file

    def to_dict(self) -> dict[str, object]:
        """Return plain data that JSON can hold."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelErrors:
    """Result of `find_label_errors`: near duplicates with different labels first, then the least likely labels."""

    errors: tuple[LabelError, ...]
    examples: int  # number of examples that were examined
    accuracy: float  # share of the examples whose label is predicted by models that were fitted without the example

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file in which a person corrects the column `label`, for the setting `data.corrections`.

        A label that is not changed stays as it is in the data. A label that is emptied removes the example.

        Raises:
            DataError: If the file exists or cannot be written.
        """
        pairs = any(error.text_pair is not None for error in self.errors)
        columns = ["text", *(["text_pair"] if pairs else []), "label", "given_label", "suggested_label"]
        columns += ["probability", "suggested_probability", "reason", "split", "file", "line"]
        rows = []
        for error in self.errors:
            numbers = {name: f"{getattr(error, name):.4f}" for name in ("probability", "suggested_probability")}
            rows.append(error.to_dict() | {"given_label": error.label} | numbers)
        write_review_file(Path(path), columns, rows)


def find_label_errors(
    data: object,
    *,
    model: str | Path | Engine = BUNDLED_ENCODER,
    folds: int = 5,
    seed: int = 0,
    device: str | None = None,
    settings: DataSettings | None = None,
    on_bad_row: BadRowPolicy | None = None,
) -> LabelErrors:
    """Find examples whose label is likely wrong.

    Linear models over frozen sentence vectors and words are fitted by cross-validation, with near duplicates in the
    same fold. An example is listed for one of two reasons:

    - The models predict another label, and its own label is among the least probable ones. As many are listed as
      confident learning estimates to be wrong (Northcutt et al. 2021, section 3).
    - Most near duplicates of its text have another label.

    All splits are examined together.

    Args:
        data: A file, a folder, or any other data that `finetune` takes, with one label for each example.
        model: A sentence embedding model.
        folds: Number of folds.
        seed: Seed of the folds.
        device: "cpu", "cuda" or "cuda:1"; None: a GPU where there is one.
        settings: How the data is read; None: with defaults.
        on_bad_row: Policy for rows that cannot be read; None: an error.

    Raises:
        DataError: If the examples do not have one label each, or there are too few of them.
    """
    settings = settings or DataSettings(dev_fraction=0.0)
    source = dataset_for_task(LabelledExample, data, settings, on_bad_row or Raise())
    return label_errors_of(source, model=model, folds=folds, seed=seed, device=device)


def label_errors_of(
    source: Dataset[Example],
    *,
    model: str | Path | Engine = BUNDLED_ENCODER,
    folds: int = 5,
    seed: int = 0,
    device: str | None = None,
) -> LabelErrors:
    """Find label errors in an open dataset; see `find_label_errors`."""
    examples: list[LabelledExample] = []
    splits: list[str] = []
    for split in source.splits:
        for example in source.examples(split):
            if not isinstance(example, LabelledExample):
                raise DataError(f"label errors need examples with one label, but each example is {example.about}")
            examples.append(example)
            splits.append(split)
    labels = sorted({example.label for example in examples})
    class_of_label = {label: index for index, label in enumerate(labels)}
    targets = np.array([class_of_label[example.label] for example in examples], np.int64)
    texts = [example.texts for example in examples]
    groups = near_duplicate_groups(minhash_signatures(map("\n".join, texts)), NEAR_DUPLICATE)
    probabilities = out_of_fold_probabilities(
        texts, targets, groups, folds=folds, seed=seed, model=model, device=device
    )
    group_targets = _group_targets(probabilities, targets, groups)
    differs_from_group = group_targets != targets
    is_unlikely = least_likely_labels(probabilities, targets)
    suggested = np.where(differs_from_group, group_targets, _best_other_class(probabilities, targets))
    target_probabilities = probabilities[np.arange(len(targets)), targets]
    listed = np.flatnonzero(differs_from_group | is_unlikely)
    listed = listed[np.lexsort((target_probabilities[listed], ~differs_from_group[listed]))]
    errors = tuple(
        LabelError(
            text=examples[row].text, text_pair=examples[row].text_pair, label=examples[row].label,
            suggested_label=labels[suggested[row]], probability=float(target_probabilities[row]),
            suggested_probability=float(probabilities[row, suggested[row]]),
            reason="near-duplicate" if differs_from_group[row] else "confident-learning",
            split=splits[row], file=examples[row].file, line=examples[row].line,
        )
        for row in listed.tolist()
    )  # fmt: skip
    accuracy = float((probabilities.argmax(axis=1) == targets).mean())
    return LabelErrors(errors=errors, examples=len(examples), accuracy=accuracy)


def confident_errors(
    probabilities: Float[NDArray[np.float64], "examples classes"], targets: NDArray[np.int64]
) -> Bool[NDArray[np.bool_], " examples"]:
    """Mark the examples that are off the diagonal of the confident joint (Northcutt et al. 2021, equation 1).

    The threshold of a class is its mean probability over the examples labelled with it. An example counts for the most
    probable class among those that reach their threshold; it is marked if that class is not its label.

    >>> confident_errors(np.array([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 0, 1, 1])).tolist()
    [False, False, True, False]
    """
    classes = probabilities.shape[1]
    has_label = targets[:, None] == np.arange(classes)
    thresholds = (probabilities * has_label).sum(axis=0) / np.maximum(has_label.sum(axis=0), 1)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    errors: NDArray[np.bool_] = (confident.max(axis=1) >= 0) & (confident.argmax(axis=1) != targets)
    return errors


def least_likely_labels(
    probabilities: Float[NDArray[np.float64], "examples classes"], targets: NDArray[np.int64]
) -> Bool[NDArray[np.bool_], " examples"]:
    """Mark the examples whose labels are the least probable; their number is that of `confident_errors`.

    Examples whose label is the most probable one are not marked. (Northcutt et al. 2021, section 3.2: pruning, here by
    self-confidence over all classes.)

    >>> least_likely_labels(np.array([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 0, 1, 1])).tolist()
    [False, False, True, False]
    """
    target_probabilities = probabilities[np.arange(len(targets)), targets]
    mispredicted = np.flatnonzero(probabilities.argmax(axis=1) != targets)
    count = int(confident_errors(probabilities, targets).sum())
    errors = np.zeros(len(targets), bool)
    errors[mispredicted[np.argsort(target_probabilities[mispredicted], kind="stable")[:count]]] = True
    return errors


def _best_other_class(probabilities: NDArray[np.float64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the most probable class of each example apart from its target."""
    without_target = probabilities.copy()
    without_target[np.arange(len(targets)), targets] = -1.0
    best: NDArray[np.int64] = without_target.argmax(axis=1)
    return best


def _group_targets(
    probabilities: NDArray[np.float64], targets: NDArray[np.int64], groups: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the most frequent target in the group of each example; mean probability decides between equal counts.

    Args:
        probabilities: Of each class for each example; [examples, classes].
        targets: Class of each example.
        groups: Group of each example, a number from 0 to examples - 1.
    """
    counts, probability_sums = np.zeros_like(probabilities), np.zeros_like(probabilities)
    np.add.at(counts, (groups, targets), 1.0)
    np.add.at(probability_sums, groups, probabilities)
    sizes = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    # half a mean probability is less than 1, the least difference of counts
    scores = np.where(counts > 0, counts + probability_sums / (2 * sizes), 0.0)
    best: NDArray[np.int64] = scores.argmax(axis=1)
    return best[groups]

"""Search for label errors in classification data by confident learning (Northcutt et al. 2021).

`heedful check --label-errors` and the Python function `heedful.find_label_errors` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from heedful.data.labelled.phrases import join_phrases
from heedful.errors import DataError, HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.finetune.out_of_fold import finetuned_fold_predictor
from heedful.runs.frozen_vectors import PredictFold, out_of_fold_probabilities

NEAR_DUPLICATE = 0.8  # minimum Jaccard similarity of near duplicates, between their sets of 5-shingles of words
Reason = Literal["near-duplicate", "confident-learning"]
LabelErrorMethod = Literal["linear", "finetune"]  # a linear model over frozen sentence vectors; a fine-tuned model


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelError:
    """An example whose label is likely wrong."""

    text: str
    text_pair: str | None  # second text of a pair
    label: str  # label in the data
    suggested_label: str  # label of most near duplicates, else the most probable label
    probability: float  # probability of `label`, predicted by models that were fitted without this example
    suggested_probability: float  # probability of `suggested_label`, predicted by the same models
    reason: Reason  # "near-duplicate": most near duplicates of the text have another label
    split: str  # "train", "dev" or "test"
    file: str  # path of the file with the example, or a name for data in memory
    line: int  # line number in the file, from 1

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelErrors:
    """Result of `find_label_errors`."""

    errors: tuple[LabelError, ...]  # those with the reason "near-duplicate" first; then by increasing `probability`
    examples: int  # number of examples that were examined
    accuracy: float  # share of the examples whose label is predicted by models that were fitted without the example

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file in which a person corrects the column `label`, for the setting `data.corrections`.

        An unchanged label keeps the label of the data. An emptied label removes the example.

        Raises:
            DataError: If the file exists or cannot be written.
        """
        has_pairs = any(error.text_pair is not None for error in self.errors)
        columns = ["text", *(["text_pair"] if has_pairs else []), "label", "given_label", "suggested_label"]
        columns += ["probability", "suggested_probability", "reason", "split", "file", "line"]
        rows = [
            error.to_dict()
            | {
                "given_label": error.label,
                "probability": f"{error.probability:.4f}",
                "suggested_probability": f"{error.suggested_probability:.4f}",
            }
            for error in self.errors
        ]
        write_review_file(Path(path), columns, rows)


def find_label_errors(
    data: object,
    *,
    model: str | Path | Engine = BUNDLED_ENCODER,
    method: LabelErrorMethod = "linear",
    folds: int = 5,
    seed: int = 0,
    device: str | None = None,
    log: Callable[[str], None] | None = None,
    settings: DataSettings | None = None,
    on_bad_row: BadRowPolicy | None = None,
) -> LabelErrors:
    """Find examples whose label is likely wrong.

    Two models predict the label of each example by cross-validation: one that reads sentences (see `method`), and a
    logistic regression over TF-IDF of words. Near duplicates are in the same fold, and so are a sentence and the
    phrases that were cut from it. An example is listed for one of two reasons:

    - The models predict another label, and the example's label is among the least probable ones. As many examples are
      listed as confident learning estimates to be wrong (Northcutt et al. 2021, section 3).
    - Most near duplicates of the text have another label.

    The splits are not kept apart: all examples are in one cross-validation.

    Args:
        data: A file, a folder, or any other data that `finetune` accepts, with one label per example.
        model: A sentence embedding model. With the method "finetune", any pretrained model.
        method: "linear": a logistic regression over frozen sentence vectors, in seconds. "finetune": the model is
            fine-tuned for each fold, which takes minutes.
        folds: Number of folds of the cross-validation.
        seed: Random seed of the assignment of examples to folds, and of fine-tuning.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
        log: Receives a message after each fine-tuning. If None, messages are dropped.
        settings: How the data is read. If None, the defaults, without a dev split made from train.
        on_bad_row: Policy for rows that cannot be read. If None, such a row is an error.

    Raises:
        DataError: If the examples do not have exactly one label each, or if there are too few examples.
        HeedfulError: If the method is unknown, or is "finetune" and the model an engine.
    """
    settings = settings or DataSettings(dev_fraction=0.0)
    source = dataset_for_task(LabelledExample, data, settings, on_bad_row or Raise())
    return label_errors_of(source, model=model, method=method, folds=folds, seed=seed, device=device, log=log)


def label_errors_of(
    source: Dataset[Example],
    *,
    model: str | Path | Engine = BUNDLED_ENCODER,
    method: LabelErrorMethod = "linear",
    folds: int = 5,
    seed: int = 0,
    device: str | None = None,
    log: Callable[[str], None] | None = None,
) -> LabelErrors:
    """Find label errors in a dataset that is open already. See `find_label_errors` for the method and the arguments."""
    examples, splits = _read_examples(source)
    labels = sorted({example.label for example in examples})
    class_of_label = {label: index for index, label in enumerate(labels)}
    targets = np.array([class_of_label[example.label] for example in examples], np.int64)
    texts = [example.texts for example in examples]
    groups = near_duplicate_groups(minhash_signatures(map("\n".join, texts)), NEAR_DUPLICATE)
    predict_fold: PredictFold | None = None
    if method != "linear":
        predict_fold = _fine_tuning_predictor(method, examples, labels, model, seed, device, log)
    probabilities = out_of_fold_probabilities(
        texts,
        targets,
        join_phrases(["\n".join(parts) for parts in texts], groups),
        folds=folds,
        seed=seed,
        model=model,
        device=device,
        predict_fold=predict_fold,
    )
    group_targets = _group_targets(probabilities, targets, groups)
    differs_from_group = group_targets != targets
    is_unlikely = least_likely_labels(probabilities, targets)
    suggested = np.where(differs_from_group, group_targets, _best_other_class(probabilities, targets))
    target_probabilities = probabilities[np.arange(len(targets)), targets]
    listed = np.flatnonzero(differs_from_group | is_unlikely)
    # near duplicates first, then by increasing probability; the last key of lexsort is the primary one
    listed = listed[np.lexsort((target_probabilities[listed], ~differs_from_group[listed]))]
    errors = []
    for index in listed.tolist():
        example = examples[index]
        errors.append(
            LabelError(
                text=example.text,
                text_pair=example.text_pair,
                label=example.label,
                suggested_label=labels[suggested[index]],
                probability=float(target_probabilities[index]),
                suggested_probability=float(probabilities[index, suggested[index]]),
                reason="near-duplicate" if differs_from_group[index] else "confident-learning",
                split=splits[index],
                file=example.file,
                line=example.line,
            )
        )
    accuracy = float((probabilities.argmax(axis=1) == targets).mean())
    return LabelErrors(errors=tuple(errors), examples=len(examples), accuracy=accuracy)


def _fine_tuning_predictor(
    method: str, examples: Sequence[LabelledExample], labels: Sequence[str], model: str | Path | Engine, seed: int,
    device: str | None, log: Callable[[str], None] | None,
) -> PredictFold:  # fmt: skip
    """Check the method and the model, and return a function that fine-tunes the model on some of the examples."""
    if method != "finetune":
        raise HeedfulError(f'method is "{method}"; expected linear or finetune')
    if isinstance(model, Engine):
        raise HeedfulError(
            "model is an engine, and the method finetune trains a model: give the name or the folder of a model"
        )
    if len(labels) < 2:
        raise DataError(f"the data has {len(labels)} label{'s' * (len(labels) != 1)}; expected 2 or more")
    return finetuned_fold_predictor(
        examples, labels, model=model, seed=seed, device=device, log=log or (lambda message: None)
    )


def _read_examples(source: Dataset[Example]) -> tuple[list[LabelledExample], list[str]]:
    """Return the examples of all splits, and the name of the split of each example.

    Raises:
        DataError: If the examples do not have exactly one label each.
    """
    examples: list[LabelledExample] = []
    splits: list[str] = []
    for split in source.splits:
        for example in source.examples(split):
            if not isinstance(example, LabelledExample):
                raise DataError(f"label errors need examples with one label, but each example is {example.about}")
            examples.append(example)
            splits.append(split)
    return examples, splits


def confident_errors(
    probabilities: Float[NDArray[np.float64], "examples classes"], targets: NDArray[np.int64]
) -> Bool[NDArray[np.bool_], " examples"]:
    """Mark the examples that are off the diagonal of the confident joint (Northcutt et al. 2021, equation 1).

    The threshold of a class is its mean probability over the examples with that label. The confident class of an
    example is the most probable class among those that reach their threshold. An example is marked if it has a
    confident class other than its label.

    Args:
        probabilities: Predicted probability of each class for each example.
        targets: Class id of each example's label, [examples].

    >>> confident_errors(np.array([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 0, 1, 1])).tolist()
    [False, False, True, False]
    """
    num_classes = probabilities.shape[1]
    has_label = targets[:, None] == np.arange(num_classes)  # one-hot labels [examples, classes]
    thresholds = (probabilities * has_label).sum(axis=0) / np.maximum(has_label.sum(axis=0), 1)
    reached = np.where(probabilities >= thresholds, probabilities, -1.0)  # -1: below the threshold of the class
    has_confident_class = reached.max(axis=1) >= 0
    errors: NDArray[np.bool_] = has_confident_class & (reached.argmax(axis=1) != targets)
    return errors


def least_likely_labels(
    probabilities: Float[NDArray[np.float64], "examples classes"], targets: NDArray[np.int64]
) -> Bool[NDArray[np.bool_], " examples"]:
    """Mark the examples with the least probable labels: as many examples as `confident_errors` marks.

    Examples whose label is the most probable class are not marked. This is pruning by self-confidence over all classes
    (Northcutt et al. 2021, section 3.2).

    Args:
        probabilities: Predicted probability of each class for each example.
        targets: Class id of each example's label, [examples].

    >>> least_likely_labels(np.array([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 0, 1, 1])).tolist()
    [False, False, True, False]
    """
    target_probabilities = probabilities[np.arange(len(targets)), targets]
    mispredicted = np.flatnonzero(probabilities.argmax(axis=1) != targets)
    by_probability = mispredicted[np.argsort(target_probabilities[mispredicted], kind="stable")]
    count = int(confident_errors(probabilities, targets).sum())
    errors = np.zeros(len(targets), bool)
    errors[by_probability[:count]] = True
    return errors


def _best_other_class(probabilities: NDArray[np.float64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each example the most probable class other than its target."""
    without_target = probabilities.copy()
    without_target[np.arange(len(targets)), targets] = -1.0
    best: NDArray[np.int64] = without_target.argmax(axis=1)
    return best


def _group_targets(
    probabilities: NDArray[np.float64], targets: NDArray[np.int64], groups: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each example the most frequent label in its group of near duplicates, as a class id.

    If several labels are equally frequent, the one with the highest mean probability in the group is returned.

    Args:
        probabilities: Probability of each class for each example, [examples, classes].
        targets: Class id of each example's label, [examples].
        groups: Group id of each example, from 0 to examples - 1.
    """
    counts = np.zeros_like(probabilities)  # [groups, classes], with a row for each possible group id
    probability_sums = np.zeros_like(probabilities)  # [groups, classes]
    np.add.at(counts, (groups, targets), 1.0)
    np.add.at(probability_sums, groups, probabilities)
    group_sizes = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    # half of a mean probability is below 1, so it decides only between equal counts
    scores = np.where(counts > 0, counts + probability_sums / (2 * group_sizes), 0.0)
    best: NDArray[np.int64] = scores.argmax(axis=1)
    return best[groups]

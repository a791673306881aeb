"""Active learning: select unlabelled texts that a classifier is unsure about and that differ from each other.

`heedful select` and the Python function `heedful.select_texts` use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from heedful.data import DataSettings
from heedful.data.corpus.dedup import minhash_signatures, near_duplicate_groups
from heedful.data.inputs.input_files import open_inputs
from heedful.data.labelled.corrections import write_review_file
from heedful.errors import DataError, HeedfulError
from heedful.infer.engine import Engine
from heedful.model.config import Classes
from heedful.runs.data_settings import input_settings_for
from heedful.runs.label_errors import NEAR_DUPLICATE

CANDIDATES_PER_TEXT = 10  # candidates for each text that is selected (Zhdanov 2019)
Text = str | tuple[str, str]  # a text or a pair of texts


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedText:
    """A text that a person should label."""

    text: str
    text_pair: str | None  # second text of a pair
    margin: float  # probability of the most probable label minus that of the second most probable one
    suggested_label: str  # the most probable label
    probability: float  # probability of the suggested label

    def to_dict(self) -> dict[str, object]:
        """Convert to plain data for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedTexts:
    """Result of `select_texts`."""

    texts: tuple[SelectedText, ...]  # the selected texts, sorted by increasing margin
    pool: int  # number of texts in the pool
    left_out: int  # number of texts in the pool that are empty, duplicates or near duplicates of other texts
    bad_rows: int = 0  # number of rows of the files that cannot be read

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file in which a person fills in the column `label`, for `finetune` to read.

        Raises:
            DataError: If the file exists or cannot be written.
        """
        has_pairs = any(selected.text_pair is not None for selected in self.texts)
        columns = ["text", *(["text_pair"] if has_pairs else []), "label", "margin", "suggested_label"]
        rows = [selected.to_dict() | {"label": "", "margin": f"{selected.margin:.4f}"} for selected in self.texts]
        write_review_file(Path(path), columns, rows)


def select_texts(
    model: str | Path | Engine,
    pool: str | Path | Sequence[Text | Path],
    count: int,
    *,
    seed: int = 0,
    device: str | None = None,
    settings: DataSettings | None = None,
) -> SelectedTexts:
    """Select texts that a classifier is unsure about and that differ from each other (active learning).

    Candidates are the `CANDIDATES_PER_TEXT * count` texts with the smallest margin between the two most probable
    labels, one per group of near duplicates. Their embeddings are clustered into `count` clusters by k-means, in which
    a text with a smaller margin has more weight. The text nearest to each centre is selected (Zhdanov 2019, "Diverse
    mini-batch Active Learning", section 3).

    Args:
        model: A model that predicts one label, or an engine with such a model.
        pool: A path of a file or folder, several `Path` objects, or a list of texts or pairs of texts.
        count: Number of texts to select. If the pool has fewer different texts, all of them are selected.
        seed: Random seed of the clustering.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
        settings: How files are read. If None, as the model's run read its data.

    Raises:
        HeedfulError: If the model does not predict one label, if count is below 1, or if the pool has no texts.
    """
    if count < 1:
        raise HeedfulError(f"count is {count}; expected the number of texts to label, from 1")
    engine = model if isinstance(model, Engine) else Engine(model, device=device)
    _check_head(engine)
    texts, bad_rows = _read_pool(engine, model, pool, settings)
    distinct = [text for text in dict.fromkeys(texts) if any(map(str.strip, _as_tuple(text)))]
    if not distinct:
        raise DataError("the pool has no texts; expected texts without labels")
    answers = engine(distinct)
    labels = list(answers[0]["probabilities"])
    probabilities = np.array([list(answer["probabilities"].values()) for answer in answers])
    margins = label_margins(probabilities)
    by_margin = _without_near_duplicates(np.argsort(margins, kind="stable"), distinct)
    chosen = by_margin[: CANDIDATES_PER_TEXT * count]
    if count < len(chosen):
        vectors = engine.pooled_vectors([distinct[index] for index in chosen])
        chosen = chosen[spread(vectors, 1 - margins[chosen], count, seed)]
    best = probabilities.argmax(axis=1)
    selected = []
    for index in chosen.tolist():
        text = distinct[index]
        selected.append(
            SelectedText(
                text=_as_tuple(text)[0],
                text_pair=None if isinstance(text, str) else text[1],
                margin=float(margins[index]),
                suggested_label=labels[best[index]],
                probability=float(probabilities[index, best[index]]),
            )
        )
    left_out = len(texts) - len(by_margin)
    return SelectedTexts(texts=tuple(selected), pool=len(texts), left_out=left_out, bad_rows=bad_rows)


def _check_head(engine: Engine) -> None:
    """Raise a HeedfulError for a model that does not predict one label of several."""
    head = engine.loaded.config.head
    if not isinstance(head, Classes) or head.problem_type != "single_label_classification":
        kind = head.problem_type if isinstance(head, Classes) else engine.kind
        raise HeedfulError(f"texts are selected by a model that chooses one label, and this one has a head for {kind}")


def _without_near_duplicates(order: NDArray[np.int64], texts: Sequence[Text]) -> NDArray[np.int64]:
    """Return the indices `order` of texts without those of near duplicates of texts before them."""
    signatures = minhash_signatures("\n".join(_as_tuple(text)) for text in texts)
    groups = near_duplicate_groups(signatures, NEAR_DUPLICATE)
    _, first_positions = np.unique(groups[order], return_index=True)  # of each group, the first position in `order`
    return order[np.sort(first_positions)]


def _as_tuple(text: Text) -> tuple[str, ...]:
    """Return the text, or both texts of a pair, as a tuple."""
    return (text,) if isinstance(text, str) else text


def label_margins(probabilities: Float[NDArray[np.float64], "texts labels"]) -> Float[NDArray[np.float64], " texts"]:
    """Return for each text the difference between its two largest probabilities (Scheffer et al. 2001).

    If there is a single label, the margin is 1.

    >>> label_margins(np.array([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])).tolist()
    [0.25, 1.0]
    """
    if probabilities.shape[1] < 2:
        return np.ones(len(probabilities))
    highest = np.sort(probabilities, axis=1)[:, -2:]
    margins: NDArray[np.float64] = highest[:, 1] - highest[:, 0]
    return margins


def spread(
    vectors: Float[NDArray[np.float32], "texts dimension"],
    weights: Float[NDArray[np.float64], " texts"],
    count: int,
    seed: int,
) -> NDArray[np.int64]:
    """Cluster texts by k-means, and return the indices of the texts nearest to the centres, in ascending order.

    Args:
        vectors: Vector of each text. The vectors are normalized before clustering.
        weights: Weight of each text in the mean that is the centre of its cluster.
        count: Number of clusters, and of returned indices; at most the number of texts.
        seed: Random seed of the initial centres.
    """
    from sklearn.cluster import KMeans

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about fewer different vectors than clusters
        means = KMeans(count, n_init=1, random_state=seed).fit(units, sample_weight=np.maximum(weights, 1e-6))
    distances = means.transform(units)  # [texts, clusters]
    is_free = np.ones(len(units), bool)  # whether each text can still be chosen
    chosen = []
    for cluster in range(count):
        members = is_free & (means.labels_ == cluster)
        candidates = np.flatnonzero(members if members.any() else is_free)  # a cluster may have no free member
        nearest = candidates[distances[candidates, cluster].argmin()]
        is_free[nearest] = False
        chosen.append(nearest)
    return np.sort(np.array(chosen, np.int64))


def _read_pool(
    engine: Engine, model: object, pool: str | Path | Sequence[Text | Path], settings: DataSettings | None
) -> tuple[list[Text], int]:
    """Return the texts of a pool, and the number of rows of its files that cannot be read.

    Args:
        engine: The engine of the model.
        model: The argument `model` of `select_texts`.
        pool: A path, several paths, or texts.
        settings: How files are read. If None, as the model's run read its data.
    """
    listed = [Path(pool)] if isinstance(pool, str | Path) else list(pool)
    files = [item for item in listed if isinstance(item, Path)]
    if not files:
        return [item for item in listed if not isinstance(item, Path)], 0
    if len(files) < len(listed):
        raise HeedfulError("the pool has texts and paths of files; expected only one of them")
    if settings is None:
        run = engine.loaded.source if isinstance(model, Engine) else str(model)
        settings = input_settings_for(run, engine.kind, files, DataSettings())
    texts: list[Text] = []
    bad_rows = 0
    for file in open_inputs(files, engine.kind, settings, exclude=None):
        for row in file.rows():
            text, error = file.engine_input(row)
            bad_rows += error is not None
            if isinstance(text, str | tuple):
                texts.append(text)
    return texts, bad_rows

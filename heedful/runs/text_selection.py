"""`heedful select`: texts to label next, about which a classifier is unsure and which differ from each other."""

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

CANDIDATES_PER_TEXT = 10  # candidates per selected text (Zhdanov 2019)
Text = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedText:
    """A text that is worth a label."""

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

    texts: tuple[SelectedText, ...]  # the texts with the smallest margin first
    pool: int  # texts in the pool
    left_out: int  # texts in the pool that are empty, or duplicates or near duplicates of other texts
    bad_rows: int = 0  # rows of the files that cannot be read

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file in which a person fills in the column `label`, for `finetune` to read.

        Raises:
            DataError: If the file exists or cannot be written.
        """
        pairs = any(selected.text_pair is not None for selected in self.texts)
        columns = ["text", *(["text_pair"] if pairs else []), "label", "margin", "suggested_label"]
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
    labels, one per group of near duplicates. Their embeddings are clustered into `count` clusters, in which unsure
    texts have more weight. The text nearest to each centre is selected (Zhdanov 2019, "Diverse mini-batch Active
    Learning", section 3).

    Args:
        model: A model that predicts one label, or an engine with such a model.
        pool: A file, a folder, several paths, or a list of texts or pairs of texts.
        count: How many texts to select. If the pool has fewer different texts, all of them are selected.
        seed: Seed of the clusters.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
        settings: How files are read. If None, as the run read its data.

    Raises:
        HeedfulError: If the model does not predict one label, if count is below 1, or if the pool has no texts.
    """
    if count < 1:
        raise HeedfulError(f"count is {count}; expected the number of texts to label, from 1")
    engine = model if isinstance(model, Engine) else Engine(model, device=device)
    head = engine.loaded.config.head
    if not isinstance(head, Classes) or head.problem_type != "single_label_classification":
        kind = head.problem_type if isinstance(head, Classes) else engine.kind
        raise HeedfulError(f"texts are selected by a model that chooses one label, and this one has a head for {kind}")
    texts, bad_rows = _read_pool(engine, model, pool, settings)
    distinct = [text for text in dict.fromkeys(texts) if any(map(str.strip, _parts(text)))]
    if not distinct:
        raise DataError("the pool has no texts; expected texts without labels")
    answers = engine(distinct)
    labels = list(answers[0]["probabilities"])
    probabilities = np.array([list(answer["probabilities"].values()) for answer in answers])
    margins = label_margins(probabilities)
    order = np.argsort(margins, kind="stable")
    signatures = minhash_signatures("\n".join(_parts(text)) for text in distinct)
    groups = near_duplicate_groups(signatures, NEAR_DUPLICATE)
    order = order[np.sort(np.unique(groups[order], return_index=True)[1])]  # the smallest margin of each group
    candidates = order[: CANDIDATES_PER_TEXT * count]
    if count < len(candidates):
        vectors = engine.pooled_vectors([distinct[index] for index in candidates])
        chosen = candidates[spread(vectors, 1 - margins[candidates], count, seed)]
    else:
        chosen = candidates
    best = probabilities.argmax(axis=1)
    selected = []
    for index in chosen.tolist():
        text = distinct[index]
        selected.append(
            SelectedText(
                text=_parts(text)[0],
                text_pair=None if isinstance(text, str) else text[1],
                margin=float(margins[index]),
                suggested_label=labels[best[index]],
                probability=float(probabilities[index, best[index]]),
            )
        )
    return SelectedTexts(texts=tuple(selected), pool=len(texts), left_out=len(texts) - len(order), bad_rows=bad_rows)


def _parts(text: Text) -> tuple[str, ...]:
    """Return the text, or both texts of a pair, as a tuple."""
    return (text,) if isinstance(text, str) else text


def label_margins(probabilities: Float[NDArray[np.float64], "texts labels"]) -> Float[NDArray[np.float64], " texts"]:
    """Return for each text the margin between its two most probable labels (Scheffer et al. 2001).

    With a single label the margin is 1.

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
    """Cluster texts by k-means, and return the ascending indices of the texts nearest to the centres.

    Args:
        vectors: Vectors of the texts, which are normalized before clustering.
        weights: Weights of the texts in the centres.
        count: How many clusters, at most as many as texts.
        seed: Seed of the initial centres.
    """
    from sklearn.cluster import KMeans

    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about fewer different vectors than clusters
        means = KMeans(count, n_init=1, random_state=seed).fit(units, sample_weight=np.maximum(weights, 1e-6))
    distances = means.transform(units)
    is_free = np.ones(len(units), bool)
    chosen = []
    for cluster in range(count):
        members = is_free & (means.labels_ == cluster)
        candidates = np.flatnonzero(members if members.any() else is_free)  # any text if the cluster has no free one
        nearest = candidates[distances[candidates, cluster].argmin()]
        is_free[nearest] = False
        chosen.append(nearest)
    return np.sort(np.array(chosen, np.int64))


def _read_pool(
    engine: Engine, model: object, pool: str | Path | Sequence[Text | Path], settings: DataSettings | None
) -> tuple[list[Text], int]:
    """Return the texts of a pool, and how many rows of its files cannot be read."""
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

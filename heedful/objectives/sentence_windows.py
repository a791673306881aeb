"""Windows of a few sentences, and pairs of them, planned over a corpus for objectives that compare texts.

A plan is a pure function of the corpus and a seed: every epoch has the same windows, so that a teacher's vectors of
them can be cached.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import derive_seed, epoch_order
from heedful.objectives.packing import Ranges, segment_bounds
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.random_streams import Stream

MIN_NEIGHBOUR_TOKENS = 5  # shorter texts are too short to compare
SECOND_START, FIRST_TEXT, SECOND_TEXT = 0, 1, 2  # columns of WindowPlan.targets


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """How windows and pairs are sampled."""

    short_window_prob: float = 0.5  # probability that a window has 1 to `max_sentences` sentences; else it is full
    max_sentences: int = 3
    pair_prob: float = 0.0  # probability that a short window triggers a pair


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbours:
    """Texts from all over a corpus, and for each the index of the text with the most similar teacher vector."""

    texts: Ranges  # [texts, 1, 2]
    nearest: NDArray[np.int64]  # [texts]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPlan:
    """Sequences of one text or of two, and the texts whose teacher vectors are their targets."""

    ranges: Ranges  # [sequences, 2, 2] in tokens of the corpus; the second text of a single sequence is empty
    targets: NDArray[np.int64]  # [sequences, 3]: SECOND_START, the token where the second text begins (0: there is
    # none), and FIRST_TEXT and SECOND_TEXT, indices into `texts`
    texts: Ranges  # [texts, 1, 2]: the windows of the documents, then the texts of `Neighbours`


def plan_windows(
    corpus: Corpus,
    documents: NDArray[np.int64],
    settings: WindowSettings,
    *,
    single: SpecialTokenTemplate,
    pair: SpecialTokenTemplate,
    length: int,
    seed: int,
    neighbours: Neighbours | None = None,
) -> WindowPlan:
    """Cut documents into windows of whole sentences, and join some short windows to pairs.

    Each short window that is in no pair yet triggers one with probability `pair_prob`. Its kind is drawn, all kinds
    equally often: the window and the next window of its document, if that is short and in no pair; the window and a
    random short window of the corpus, which may be in another pair; with `neighbours`, two of its texts that are
    nearest to each other, while the window itself stays single. Pairs of more than `length` tokens are not made.
    """
    windows, is_short, continues = cut_documents(corpus, documents, single.room(length), settings, seed)
    count, room = len(windows), pair.room(length)
    texts = windows if neighbours is None else np.concatenate([windows, neighbours.texts])
    sizes = texts[:, 0, 1] - texts[:, 0, 0]
    rng = Random(derive_seed(seed, Stream.WINDOW_PAIRS))
    short_windows = np.flatnonzero(is_short).tolist()
    paired = np.zeros(count, dtype=np.bool_)
    pairs: list[tuple[int, int]] = []
    for window in short_windows:
        if paired[window] or rng.random() >= settings.pair_prob:
            continue
        after = window + 1
        match rng.randrange(2 if neighbours is None else 3):
            case 0 if after < count and is_short[after] and continues[after] and not paired[after]:
                first, second = window, after
            case 1:
                first, second = window, short_windows[rng.randrange(len(short_windows))]
            case 2:
                assert neighbours is not None
                index = rng.randrange(len(neighbours.nearest))
                first, second = count + index, count + int(neighbours.nearest[index])
            case _:
                continue
        if first != second and sizes[first] + sizes[second] <= room:
            pairs.append((first, second))
            paired[[text for text in (first, second) if text < count]] = True
    single_texts, pair_texts = np.flatnonzero(~paired), np.array(pairs, dtype=np.int64).reshape(-1, 2)
    ranges = np.zeros((len(single_texts) + len(pair_texts), 2, 2), dtype=np.int64)
    ranges[: len(single_texts), 0] = texts[single_texts, 0]
    ranges[len(single_texts) :] = texts[pair_texts, 0]
    targets = np.zeros((len(ranges), 3), dtype=np.int64)
    targets[: len(single_texts), FIRST_TEXT] = single_texts
    targets[len(single_texts) :, FIRST_TEXT:] = pair_texts
    special_tokens = len(pair.runs[0][0]) + len(pair.runs[1][0])  # [CLS] before the first text, [SEP] after it
    targets[len(single_texts) :, SECOND_START] = special_tokens + sizes[pair_texts[:, 0]]
    return WindowPlan(ranges=ranges, targets=targets, texts=texts)


def cut_documents(
    corpus: Corpus, documents: NDArray[np.int64], room: int, settings: WindowSettings, seed: int
) -> tuple[Ranges, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return windows [windows, 1, 2], which of them are short, and which continue the document of the one before them.

    A sentence that is longer than `room` is cut.
    """
    ranges: list[tuple[int, int]] = []
    short: list[bool] = []
    continues: list[bool] = []
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        rng = Random(derive_seed(seed, Stream.SENTENCE_WINDOWS, document))
        start, stop = bounds[0], bounds[-1]
        document_start = start
        while start < stop:
            is_short = rng.random() < settings.short_window_prob
            end = min(stop, start + room)
            if is_short:
                sentence = bisect_left(bounds, start + 1)
                end = min(end, bounds[min(sentence + rng.randrange(settings.max_sentences), len(bounds) - 1)])
            elif end < stop:
                last_sentence_end = bounds[bisect_left(bounds, end + 1) - 1]
                end = last_sentence_end if last_sentence_end > start else end
            ranges.append((start, end))
            short.append(is_short)
            continues.append(start > document_start)
            start = end
    return (
        np.array(ranges, dtype=np.int64).reshape(-1, 1, 2),
        np.array(short, dtype=bool),
        np.array(continues, dtype=bool),
    )


def sample_texts(
    corpus: Corpus, documents: NDArray[np.int64], count: int, room: int, settings: WindowSettings, seed: int
) -> Ranges:
    """Return at most `count` short windows from documents in random order, [texts, 1, 2]."""
    parts: list[Ranges] = []
    total = 0
    short = WindowSettings(short_window_prob=1.0, max_sentences=settings.max_sentences)
    pool_seed = derive_seed(seed, Stream.TEXT_POOL)
    for index in epoch_order(len(documents), pool_seed, 0).tolist():
        if total >= count:
            break
        windows, _, _ = cut_documents(corpus, documents[index : index + 1], room, short, pool_seed)
        windows = windows[windows[:, 0, 1] - windows[:, 0, 0] >= MIN_NEIGHBOUR_TOKENS]
        parts.append(windows)
        total += len(windows)
    return np.concatenate([*parts, np.zeros((0, 1, 2), dtype=np.int64)])[:count]

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

MIN_POOL_TOKENS = 5  # shorter texts have no meaning of their own to compare


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """How windows and pairs are sampled."""

    short_window_prob: float = 0.5  # probability that a window has 1 to `max_sentences` sentences; else it is full
    max_sentences: int = 3
    pair_prob: float = 0.0  # probability that a short window begins a pair


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbours:
    """Texts from all over a corpus, and for each the number of the one with the most similar vector."""

    texts: Ranges  # [texts, 1, 2]
    nearest: NDArray[np.int64]  # [texts]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPlan:
    """Sequences of one text or of two."""

    ranges: Ranges  # [sequences, 2, 2] in tokens of the corpus; the second text of a single one is empty
    columns: NDArray[np.int64]  # [sequences, 3]: where the second text begins (0: single), the windows of both texts
    windows: Ranges  # [windows, 1, 2]: all texts that are numbered in `columns`


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

    A pair is, with equal probability, a window and the next one of its document, or two windows from anywhere; with
    `neighbours` a third kind is as frequent, a text and its nearest. Pairs of more than `length` tokens are not made.
    """
    windows, short, follows = cut_documents(corpus, documents, single.room(length), settings, seed)
    count = len(windows)
    every = windows if neighbours is None else np.concatenate([windows, neighbours.texts])
    sizes = every[:, 0, 1] - every[:, 0, 0]
    draw, room, shorts = (
        Random(derive_seed(seed, Stream.WINDOW_PAIRS)),
        pair.room(length),
        np.flatnonzero(short).tolist(),
    )
    taken = np.zeros(count, dtype=np.bool_)
    couples: list[tuple[int, int]] = []
    for first in shorts:
        if taken[first] or draw.random() >= settings.pair_prob:
            continue
        after = first + 1
        match draw.randrange(2 if neighbours is None else 3):
            case 0 if after < count and short[after] and follows[after] and not taken[after]:
                a, b = first, after
            case 1:
                a, b = first, shorts[draw.randrange(len(shorts))]
            case 2:
                assert neighbours is not None
                number = draw.randrange(len(neighbours.nearest))
                a, b = count + number, count + int(neighbours.nearest[number])
            case _:
                continue
        if a != b and sizes[a] + sizes[b] <= room:
            couples.append((a, b))
            taken[[number for number in (a, b) if number < count]] = True
    lone, joined = np.flatnonzero(~taken), np.array(couples, dtype=np.int64).reshape(-1, 2)
    ranges = np.zeros((len(lone) + len(joined), 2, 2), dtype=np.int64)
    ranges[: len(lone), 0] = every[lone, 0]
    ranges[len(lone) :] = every[joined, 0]
    columns = np.zeros((len(ranges), 3), dtype=np.int64)
    columns[: len(lone), 1] = lone
    columns[len(lone) :, 1:] = joined
    before = len(pair.runs[0][0]) + len(pair.runs[1][0])
    columns[len(lone) :, 0] = before + sizes[joined[:, 0]]
    return WindowPlan(ranges=ranges, columns=columns, windows=every)


def cut_documents(
    corpus: Corpus, documents: NDArray[np.int64], room: int, settings: WindowSettings, seed: int
) -> tuple[Ranges, NDArray[np.bool_], NDArray[np.bool_]]:
    """Return windows [windows, 1, 2], which of them are short, and which continue the one before them.

    A sentence that is longer than `room` is cut.
    """
    ranges: list[tuple[int, int]] = []
    short: list[bool] = []
    follows: list[bool] = []
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        draw = Random(derive_seed(seed, Stream.SENTENCE_WINDOWS, document))
        start, stop = bounds[0], bounds[-1]
        begins = start
        while start < stop:
            is_short = draw.random() < settings.short_window_prob
            end = min(stop, start + room)
            if is_short:
                sentence = bisect_left(bounds, start + 1)
                end = min(end, bounds[min(sentence + draw.randrange(settings.max_sentences), len(bounds) - 1)])
            elif end < stop:
                whole = bounds[bisect_left(bounds, end + 1) - 1]
                end = whole if whole > start else end
            ranges.append((start, end))
            short.append(is_short)
            follows.append(start > begins)
            start = end
    return (
        np.array(ranges, dtype=np.int64).reshape(-1, 1, 2),
        np.array(short, dtype=bool),
        np.array(follows, dtype=bool),
    )


def sample_texts(
    corpus: Corpus, documents: NDArray[np.int64], count: int, room: int, settings: WindowSettings, seed: int
) -> Ranges:
    """Return at most `count` short windows from documents in random order, [texts, 1, 2]."""
    parts: list[Ranges] = []
    total = 0
    short = WindowSettings(short_window_prob=1.0, max_sentences=settings.max_sentences)
    for at in epoch_order(len(documents), derive_seed(seed, Stream.TEXT_POOL), 0).tolist():
        if total >= count:
            break
        windows, _, _ = cut_documents(corpus, documents[at : at + 1], room, short, derive_seed(seed, Stream.TEXT_POOL))
        windows = windows[windows[:, 0, 1] - windows[:, 0, 0] >= MIN_POOL_TOKENS]
        parts.append(windows)
        total += len(windows)
    return np.concatenate([*parts, np.zeros((0, 1, 2), dtype=np.int64)])[:count]

"""Windows of a few sentences, and pairs of windows, planned over a corpus for objectives that compare texts.

A plan is a pure function of the corpus and a seed. Every epoch has the same windows, so that a teacher's sentence
embeddings of the windows can be cached.
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

MIN_NEIGHBOUR_TOKENS = 5  # minimum tokens in a text of `Neighbours`
SECOND_START, FIRST_TEXT, SECOND_TEXT = 0, 1, 2  # columns of WindowPlan.targets


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """Settings of the sampling of windows and pairs."""

    short_window_prob: float = 0.5  # probability that a window has 1 to `max_sentences` sentences; others are full
    max_sentences: int = 3  # maximum sentences in a short window
    pair_prob: float = 0.0  # probability that a short window is used for a pair


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbours:
    """Texts of a corpus with their nearest neighbours by the teacher's sentence embeddings."""

    texts: Ranges  # [texts, 1, 2]
    nearest: NDArray[np.int64]  # [texts]: for each text, the index of its nearest neighbour


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPlan:
    """Sequences of one or two texts, and the texts whose sentence embeddings are the targets of the sequences."""

    # [sequences, 2, 2]: begin and end of both texts, in tokens of the corpus; with one text, the second one is empty
    ranges: Ranges
    # [sequences, 3]: column SECOND_START is the position of the second text in the sequence, or 0 if there is no second
    # text; columns FIRST_TEXT and SECOND_TEXT are indices into `texts`
    targets: NDArray[np.int64]
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

    For each short window that is in no pair yet, a pair is made with probability `pair_prob`. The kind of the pair is
    random, and all kinds are equally likely:

    * the window and the next window of its document, if that is short and in no pair;
    * the window and a random short window of the corpus, which may be in another pair;
    * with `neighbours`, a random text of these and its nearest neighbour; the window itself remains single.

    A pair of more than `length` tokens is not made.

    Args:
        corpus: The corpus.
        documents: Indices of the documents in the corpus.
        settings: How windows and pairs are sampled.
        single: Special tokens around one text.
        pair: Special tokens around two texts.
        length: Maximum tokens in a sequence.
        seed: Seed of the random choices.
        neighbours: Texts for pairs of similar texts. If None, pairs of the third kind are not made.
    """
    windows, is_short, continues = cut_documents(corpus, documents, single.room(length), settings, seed)
    texts = windows if neighbours is None else np.concatenate([windows, neighbours.texts])
    sizes = texts[:, 0, 1] - texts[:, 0, 0]
    count, room = len(windows), pair.room(length)
    rng = Random(derive_seed(seed, Stream.WINDOW_PAIRS))
    short_windows = np.flatnonzero(is_short).tolist()
    is_paired = np.zeros(count, dtype=np.bool_)
    pairs: list[tuple[int, int]] = []
    for window in short_windows:
        if is_paired[window] or rng.random() >= settings.pair_prob:
            continue
        following = window + 1
        match rng.randrange(2 if neighbours is None else 3):
            case 0 if following < count and is_short[following] and continues[following] and not is_paired[following]:
                first, second = window, following
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
            is_paired[[text for text in (first, second) if text < count]] = True
    pair_texts = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return _assemble_plan(texts, np.flatnonzero(~is_paired), pair_texts, pair)


def _assemble_plan(
    texts: Ranges, single_texts: NDArray[np.int64], pair_texts: NDArray[np.int64], pair: SpecialTokenTemplate
) -> WindowPlan:
    """Return the plan of sequences of one text, followed by sequences of two texts.

    Args:
        texts: Ranges of all texts, [texts, 1, 2].
        single_texts: Indices of the texts that form a sequence alone, [singles].
        pair_texts: Indices of the two texts of each pair, [pairs, 2].
        pair: Special tokens around two texts.
    """
    count = len(single_texts)
    ranges = np.zeros((count + len(pair_texts), 2, 2), dtype=np.int64)
    ranges[:count, 0] = texts[single_texts, 0]
    ranges[count:] = texts[pair_texts, 0]
    targets = np.zeros((len(ranges), 3), dtype=np.int64)
    targets[:count, FIRST_TEXT] = single_texts
    targets[count:, FIRST_TEXT:] = pair_texts
    special_tokens = len(pair.runs[0][0]) + len(pair.runs[1][0])  # before the first text, and between both
    first_sizes = texts[pair_texts[:, 0], 0, 1] - texts[pair_texts[:, 0], 0, 0]
    targets[count:, SECOND_START] = special_tokens + first_sizes
    return WindowPlan(ranges=ranges, targets=targets, texts=texts)


def cut_documents(
    corpus: Corpus, documents: NDArray[np.int64], room: int, settings: WindowSettings, seed: int
) -> tuple[Ranges, NDArray[np.bool_], NDArray[np.bool_]]:
    """Cut documents into windows of whole sentences with at most `room` tokens. A longer sentence is cut.

    Returns:
        The windows, [windows, 1, 2]; a mask of the short windows; and a mask of the windows that continue the document
        of the previous window.
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
    """Return at most `count` short windows of documents in random order, [texts, 1, 2].

    Windows of fewer than `MIN_NEIGHBOUR_TOKENS` tokens are left out.
    """
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

"""Packs hold every sequence once and are full; windows and pairs as published, anew in each epoch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from heedful.data.corpus.build import Corpus
from heedful.errors import HeedfulError
from heedful.objectives import packing as module
from heedful.objectives.packing import (
    FixedShape,
    PackedSequences,
    SegmentPairs,
    held_out,
    pack_best_fit,
    segment_windows,
    truncate_pair,
)
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.tokenizer import Tokenizer
from tests.support.corpora import make_corpus, make_documents, train_on

COUNT = 60
DOCUMENTS = make_documents(COUNT, seed=4, sentences=(1, 12))
Pair = tuple[tuple[int, int], tuple[int, int]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on the documents."""
    return train_on(DOCUMENTS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Corpus:
    """60 documents of 1 to 12 sentences."""
    return make_corpus(tmp_path_factory.mktemp("corpus"), DOCUMENTS, tokenizer)


def bounds_of(corpus: Corpus, document: int) -> list[int]:
    """Where its segments begin, and where the last one ends; read apart from the code under test."""
    first, stop = int(corpus.documents[document]), int(corpus.documents[document + 1])
    return [int(corpus.segments[number]) for number in range(first, stop + 1)]


def owners(corpus: Corpus) -> NDArray[np.int64]:
    """The document of each token."""
    return np.repeat(np.arange(len(corpus)), np.diff(corpus.segments[corpus.documents]))


# -- rows ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(0, 99))
def test_nothing_is_lost_or_doubled(lengths: list[int], seed: int) -> None:
    rows = pack_best_fit(np.array(lengths, dtype=np.int64), 64, seed)
    packed = [number for row in rows for number in row.tolist()]
    assert sorted(packed) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in row) <= 64 for row in rows)
    again = pack_best_fit(np.array(lengths, dtype=np.int64), 64, seed)
    assert [row.tolist() for row in again] == [row.tolist() for row in rows]


def cut(draw: np.random.Generator, count: int, room: int) -> NDArray[np.int64]:
    """Lengths of windows of whole sentences over documents of very different lengths, as in real text."""
    lengths: list[int] = []
    while len(lengths) < count:
        left = int(draw.lognormal(5.5, 1.0)) + 3
        while left > 0:
            window = left if left <= room else room - int(draw.integers(0, 25))
            lengths.append(window + 2)
            left -= window
    return np.array(lengths[:count])


def test_rows_are_full(tmp_path: Path) -> None:
    lengths = cut(np.random.default_rng(0), 20_000, 126)
    full = np.array([lengths[row].sum() for row in pack_best_fit(lengths, 1024, 1)]) / 1024
    assert (full >= 0.97).mean() > 0.995 and full.mean() > 0.995 and full.max() <= 1
    few = pack_best_fit(lengths[:100], 1024, 1)  # of a small corpus only the last row is not
    assert len(few) == -(-int(lengths[:100].sum()) // 1024)


@pytest.mark.parametrize("kind", ["real", "600 of 1024", "long"])
def test_time_grows_with_the_sequences_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cannot be full, as with two windows of almost half a row, nothing is tried again and again."""
    once, tried = module._fit_block, list[int]()

    def counted(sequences: list[int], *more: Any) -> Any:
        tried.append(len(sequences))
        return once(sequences, *more)

    monkeypatch.setattr(module, "_fit_block", counted)
    draw = np.random.default_rng(1)
    many = {
        "real": cut(draw, 60_000, 126),
        "600 of 1024": np.full(60_000, 600),
        "long": 512 - draw.integers(0, 30, 60_000),
    }[kind]
    assert sum(map(len, pack_best_fit(many, 1024, 1))) == len(many)
    assert max(tried) <= 2 * module.BLOCK and sum(tried) <= 2 * len(many)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(HeedfulError, match="a pack has 64: set pack_length to 65 or more"):
        pack_best_fit(np.array([3, 65]), 64, 0)
    assert pack_best_fit(np.zeros(0, dtype=np.int64), 64, 0) == []


def test_a_row_holds_whole_sequences_with_their_labels(corpus: Corpus, tokenizer: Tokenizer) -> None:
    frame = SpecialTokenTemplate.of(tokenizer, pair=False)
    ranges = segment_windows(corpus, np.arange(COUNT), 30)
    labels = np.arange(len(ranges))
    rows = PackedSequences(corpus, frame, ranges, 100, seed=3, labels=labels)
    seen: list[int] = []
    for number in range(len(rows)):
        sample = rows[number]
        assert len(sample) <= 100 and sample.bounds[-1] == len(sample) == len(sample.types)
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target, strict=True):
            first, last = ranges[label, 0]
            expected = [
                tokenizer.special.bos_or_cls,
                *corpus.tokens(int(first), int(last)),
                tokenizer.special.eos_or_sep,
            ]
            assert sample.tokens[start:stop].tolist() == expected
        seen += sample.target.tolist()
    assert sorted(seen) == labels.tolist()
    assert rows.tokens == sum(len(rows[number]) for number in range(len(rows)))
    assert rows.tokens == int((ranges[:, 0, 1] - ranges[:, 0, 0] + 2).sum())
    assert PackedSequences(corpus, frame, ranges, 100, seed=3)[0].target is None
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            _ = rows[outside]


def test_room_that_is_reserved_for_padding_is_named(corpus: Corpus, tokenizer: Tokenizer) -> None:
    template, ranges = SpecialTokenTemplate.of(tokenizer, pair=False), segment_windows(corpus, np.arange(COUNT), 28)
    longest = int((ranges[:, 0, 1] - ranges[:, 0, 0]).max()) + template.width
    shape = FixedShape(sequences=4, pad=0)
    message = rf"a sequence has {longest} tokens, .* raise pack_length from {longest} to {longest + 4}"
    with pytest.raises(HeedfulError, match=message):
        PackedSequences(corpus, template, ranges, longest, seed=3, shape=shape)
    assert len(PackedSequences(corpus, template, ranges, longest + 4, seed=3, shape=shape)[0]) == longest + 4


def test_rows_of_every_epoch_end(corpus: Corpus, tokenizer: Tokenizer) -> None:
    segment_pairs = pairs(corpus, tokenizer)
    for epoch in range(2):
        assert len(list(segment_pairs.at(epoch))) == len(segment_pairs)
        with pytest.raises(IndexError):
            _ = segment_pairs.at(epoch)[len(segment_pairs)]


def test_a_sequence_after_which_its_document_goes_on_has_a_frame_of_its_own(
    corpus: Corpus, tokenizer: Tokenizer
) -> None:
    frame, ranges = SpecialTokenTemplate.of(tokenizer, pair=False), segment_windows(corpus, np.arange(COUNT), 30)
    labels, owner = np.arange(len(ranges)), owners(corpus)
    rows = PackedSequences(corpus, frame, ranges, 100, seed=3, labels=labels, continued=frame.without_end)
    closed = 0
    for number in range(len(rows)):
        sample = rows[number]
        assert len(sample) <= 100
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target, strict=True):
            first, last = (int(each) for each in ranges[label, 0])
            ends = last == len(owner) or owner[last] != owner[first]
            closing = [tokenizer.special.eos_or_sep] if ends else []
            expected = [tokenizer.special.bos_or_cls, *corpus.tokens(first, last), *closing]
            assert sample.tokens[start:stop].tolist() == expected
            closed += ends
    assert closed == COUNT < len(ranges) and rows.tokens == sum(len(rows[number]) for number in range(len(rows)))


# -- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [2, 7, 16, 30, 1000])
def test_windows_part_every_document(corpus: Corpus, room: int) -> None:
    chosen = np.arange(1, COUNT, 2)
    windows = [tuple(each[0].tolist()) for each in segment_windows(corpus, chosen, room)]
    place = 0
    for document in chosen.tolist():
        bounds = bounds_of(corpus, document)
        at = bounds[0]
        while at < bounds[-1]:
            start, stop = windows[place]
            assert start == at and start < stop <= min(start + room, bounds[-1])
            whole = [bound for bound in bounds if start < bound <= start + room]
            # as many whole segments as there is room for; a segment that is longer than that is cut, and full
            assert stop == (whole[-1] if whole else start + room)
            at, place = stop, place + 1
    assert place == len(windows)


# -- held out -----------------------------------------------------------------------------------------------------


def test_held_out_by_the_text_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    many = make_documents(1500, seed=9, sentences=(1, 3))
    first = make_corpus(tmp_path / "a", many, tokenizer)
    masks = {share: held_out(first, share) for share in (0.01, 0.1, 0.5)}
    for share, mask in masks.items():
        assert abs(mask.sum() - share * 1500) < 4 * (share * (1 - share) * 1500) ** 0.5
    assert not (masks[0.01] & ~masks[0.1]).any() and not (masks[0.1] & ~masks[0.5]).any()  # a larger share has it all
    again = make_corpus(tmp_path / "b", [*many[700:], *many[:700], *many[:100]], tokenizer)
    mask = held_out(again, 0.1)
    assert mask.tolist() == [*masks[0.1][700:], *masks[0.1][:700], *masks[0.1][:100]]  # equal texts: the same side


def test_both_splits_have_a_document_if_there_are_two_different_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, second, third = make_documents(3, seed=2)
    corpus = make_corpus(tmp_path / "few", [first, second, first, third], tokenizer)
    assert held_out(corpus, 1e-9).sum() in (1, 2), "equal documents are in the same split"
    assert (~held_out(corpus, 1 - 1e-9)).sum() in (1, 2)
    alike = make_corpus(tmp_path / "alike", [first] * 3, tokenizer)
    assert held_out(alike, 1e-9).sum() == 0


# -- pairs --------------------------------------------------------------------------------------------------------


def pairs(corpus: Corpus, tokenizer: Tokenizer, **more: Any) -> SegmentPairs:
    """Labelled pairs of all documents."""
    settings = {"length": 64, "size": 128, "seed": 5} | more
    frame = SpecialTokenTemplate.of(tokenizer, pair=True)
    return SegmentPairs(corpus=corpus, documents=np.arange(len(corpus)), template=frame, **settings)


def planned(segment_pairs: SegmentPairs, epoch: int = 0) -> list[tuple[Pair, int]]:
    """Ranges and label of each pair."""
    ranges, labels = segment_pairs.plan(epoch)
    return [(((a, b), (c, d)), label) for ((a, b), (c, d)), label in zip(ranges.tolist(), labels.tolist(), strict=True)]


def test_next_sentence_pairs_follow_or_do_not(corpus: Corpus, tokenizer: Tokenizer) -> None:
    owner, segment_pairs = owners(corpus), pairs(corpus, tokenizer)
    room = segment_pairs.template.room(64)
    labels: Counter[int] = Counter()
    single = 0
    for epoch in range(20):
        for ((a, b), (c, d)), label in planned(segment_pairs, epoch):
            assert a < b and c < d and (b - a) + (d - c) <= room
            assert owner[a] == owner[b - 1] and owner[c] == owner[d - 1], "a part is of one document"
            assert (owner[a] == owner[c]) == (label == 0)
            if label == 0:
                assert b <= c, "as written"
                lost = c - b  # by truncation, of the end of the first or the beginning of the second
                assert lost == 0 or (b - a) + (d - c) == room
            labels[label] += 1
        single += sum(len(bounds_of(corpus, document)) == 2 for document in range(COUNT))
    share = labels[1] / labels.total()
    assert 0.5 < share < 0.8, "single segments never have one that follows"
    assert single, "there are documents of one segment"


def test_a_chunk_of_one_segment_makes_no_pair_that_follows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    segment_pairs = pairs(make_corpus(tmp_path, make_documents(20, sentences=(1, 1)), tokenizer), tokenizer)
    planned_pairs = planned(segment_pairs)
    assert len(planned_pairs) == 20 and all(label == 1 for _, label in planned_pairs)


def test_pairs_lose_only_truncated_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Segments that a random part displaced come back: without truncation, every one is used in every epoch."""
    segment_pairs = pairs(corpus, tokenizer, length=1000, size=1000, short_seq_prob=0.9)
    for swapped in (False, True):
        for epoch in range(5):
            segment_pairs = pairs(corpus, tokenizer, length=1000, size=1000, short_seq_prob=0.9, swapped=swapped)
            used = np.zeros(corpus.count, dtype=int)
            for ((a, b), (c, d)), label in planned(segment_pairs, epoch):
                used[a:b] += 1
                if swapped or label == 0:
                    used[c:d] += 1
            assert (used == 1).all()
    room = segment_pairs.template.room(40)
    for ((a, b), (c, d)), label in planned(pairs(corpus, tokenizer, length=40)):
        for start, stop in ((a, b), (c, d)):
            bounds = set(bounds_of(corpus, int(owners(corpus)[start])))
            if not {start, stop} <= bounds:
                assert (b - a) + (d - c) == room, f"only what is too long is cut, label {label}"


def test_random_second_sentences_come_from_all_documents(corpus: Corpus, tokenizer: Tokenizer) -> None:
    owner, segment_pairs = owners(corpus), pairs(corpus, tokenizer)
    others: Counter[int] = Counter()
    places = set()
    for epoch in range(60):
        for (_, (start, _)), label in planned(segment_pairs, epoch):
            if label == 1:
                others[int(owner[start])] += 1
                places.add(start)
    counts = np.array([others[document] for document in range(COUNT)])
    assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5, "each document as likely"
    # nearly every segment begins a random part at some time, the last one of its document too
    assert sum(int(bound) in places for bound in corpus.segments[:-1]) > 0.9 * (len(corpus.segments) - 1)


def test_a_tenth_of_the_pairs_is_short(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One length is drawn for a document, as in create_instances_from_document of Devlin et al. 2019."""
    long = make_corpus(tmp_path, make_documents(40, sentences=(60, 60)), tokenizer)
    owner, count = owners(long), 0
    longest = int(np.diff(long.segments).max())
    for short in (0.0, 0.1, 0.5):
        less = []
        for epoch in range(10):
            segment_pairs = pairs(long, tokenizer, length=128, size=128, short_seq_prob=short, swapped=True)
            room, lengths = segment_pairs.template.room(128), dict[int, list[int]]()
            for ((a, b), (c, d)), _ in planned(segment_pairs, epoch):
                lengths.setdefault(int(owner[a]), []).append((b - a) + (d - c))
            for each in lengths.values():
                inner = each[:-1]  # an ordinary pair is full but at the end of its document
                less.append(max(inner) < room)
                assert max(inner) - min(inner) <= longest, "a document has one length"
                count += len(each)
        # of short ones, nearly all are less than full: those that aim at a sentence less than the room may be full
        assert abs(np.mean(less) - short) <= 0.25 * short + 4 * (short * (1 - short) / 400) ** 0.5
    assert count > 1000


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 80), st.integers(0, 9))
def test_truncated_at_random_ends(one: int, two: int, room: int, seed: int) -> None:
    first, second = truncate_pair((100, 100 + one), (300, 300 + two), room, Random(seed))
    left = [stop - start for start, stop in (first, second)]
    assert sum(left) == min(room, one + two) and min(left) >= 1
    assert 100 <= first[0] < first[1] <= 100 + one and 300 <= second[0] < second[1] <= 300 + two
    if one + two > room:  # the longer one loses
        assert abs(left[0] - left[1]) <= 1 or (left[0] == one) != (left[1] == two)


def test_truncation_takes_from_both_ends() -> None:
    truncated = [truncate_pair((0, 50), (100, 110), 40, Random(seed)) for seed in range(200)]
    assert all(second == (100, 110) and stop - start == 30 for (start, stop), second in truncated)
    starts = np.array([start for (start, _), _ in truncated])
    assert abs(starts.mean() - 10) < 1 and starts.min() < 7 and starts.max() > 13


def test_order(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """0: as written, 1: swapped; both parts lie side by side in one document."""
    owner, segment_pairs = owners(corpus), pairs(corpus, tokenizer, swapped=True)
    labels: Counter[int] = Counter()
    for epoch in range(10):
        for (one, two), label in planned(segment_pairs, epoch):
            first, second = (two, one) if label else (one, two)
            assert owner[first[0]] == owner[second[1] - 1] and first[1] <= second[0]
            if second[0] > first[1]:
                assert (one[1] - one[0]) + (two[1] - two[0]) == segment_pairs.template.room(64), (
                    "only truncation parts them"
                )
            labels[label] += 1
    assert abs(labels[1] / labels.total() - 0.5) < 4 * 0.5 / labels.total() ** 0.5


@pytest.mark.parametrize("swapped", [False, True])
def test_epochs_differ_and_come_again(corpus: Corpus, tokenizer: Tokenizer, swapped: bool) -> None:
    segment_pairs, equal_pairs = (pairs(corpus, tokenizer, swapped=swapped) for _ in range(2))
    plans = [planned(segment_pairs, epoch) for epoch in range(4)]
    assert plans == [planned(equal_pairs, epoch) for epoch in range(4)]
    assert all(plans[0] != plan for plan in plans[1:])
    assert planned(pairs(corpus, tokenizer, swapped=swapped, seed=6)) != plans[0]
    contents = []
    for epoch in range(6):
        rows = segment_pairs.at(epoch)
        assert len(rows) == len(segment_pairs)
        samples = [rows[number] for number in range(len(rows))]
        assert all(len(sample) <= 128 and len(sample.target) == len(sample.bounds) - 1 for sample in samples)
        contents.append([sample.tokens.tolist() for sample in samples])
        repeated = [equal_pairs.at(epoch)[number].tokens.tolist() for number in range(len(rows))]
        assert repeated == contents[-1]
    assert all(contents[0] != each for each in contents[1:])
    assert segment_pairs[2].tokens.tolist() == contents[0][2]


def test_a_sequence_says_what_its_tokenizer_would(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """[CLS] A [SEP] B [SEP], with types, and the label of each pair beside it."""
    segment_pairs = pairs(corpus, tokenizer, size=10_000)
    ranges, labels = segment_pairs.plan(0)
    known = {}
    for (one, two), label in zip(ranges.tolist(), labels.tolist(), strict=True):
        parts = [tokenizer.decode(corpus.tokens(*each).tolist()) for each in (one, two)]
        encoded = tokenizer.encode((parts[0], parts[1]))
        known[tuple(encoded.ids)] = (list(encoded.types), label)
    compared = 0
    for number in range(len(segment_pairs)):
        sample = segment_pairs[number]
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target.tolist(), strict=True):
            ids = tuple(sample.tokens[start:stop].tolist())
            if ids in known:  # a word that truncation has cut is encoded otherwise
                assert known[ids] == (sample.types[start:stop].tolist(), label)
                compared += 1
    assert compared > 0.7 * len(labels)

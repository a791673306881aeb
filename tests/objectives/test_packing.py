"""Packing, the validation split, windows of documents, and pairs of segments."""

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

NUM_DOCUMENTS = 60
DOCUMENTS = make_documents(NUM_DOCUMENTS, seed=4, sentences=(1, 12))
Pair = tuple[tuple[int, int], tuple[int, int]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on the documents."""
    return train_on(DOCUMENTS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Corpus:
    """A corpus of 60 documents with 1 to 12 sentences."""
    return make_corpus(tmp_path_factory.mktemp("corpus"), DOCUMENTS, tokenizer)


def segment_bounds(corpus: Corpus, document: int) -> list[int]:
    """Return the first token of each segment of a document, and the end of the last, without the tested code."""
    first, stop = int(corpus.documents[document]), int(corpus.documents[document + 1])
    return [int(corpus.segments[number]) for number in range(first, stop + 1)]


def token_documents(corpus: Corpus) -> NDArray[np.int64]:
    """Return the index of the document of each token."""
    return np.repeat(np.arange(len(corpus)), np.diff(corpus.segments[corpus.documents]))


# -- packs --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(0, 99))
def test_every_sequence_is_in_one_pack(lengths: list[int], seed: int) -> None:
    packs = pack_best_fit(np.array(lengths, dtype=np.int64), 64, seed)
    packed = [number for pack in packs for number in pack.tolist()]
    assert sorted(packed) == list(range(len(lengths)))
    assert all(0 < sum(lengths[number] for number in pack) <= 64 for pack in packs)
    repeated = pack_best_fit(np.array(lengths, dtype=np.int64), 64, seed)
    assert [pack.tolist() for pack in repeated] == [pack.tolist() for pack in packs]


def window_lengths(rng: np.random.Generator, count: int, room: int) -> NDArray[np.int64]:
    """Return lengths of windows of whole sentences, for documents whose lengths are distributed as in real text."""
    lengths: list[int] = []
    while len(lengths) < count:
        remaining = int(rng.lognormal(5.5, 1.0)) + 3
        while remaining > 0:
            window = remaining if remaining <= room else room - int(rng.integers(0, 25))
            lengths.append(window + 2)
            remaining -= window
    return np.array(lengths[:count])


def test_packs_are_full(tmp_path: Path) -> None:
    lengths = window_lengths(np.random.default_rng(0), 20_000, 126)
    fullness = np.array([lengths[pack].sum() for pack in pack_best_fit(lengths, 1024, 1)]) / 1024
    assert (fullness >= 0.97).mean() > 0.995 and fullness.mean() > 0.995 and fullness.max() <= 1
    small_packs = pack_best_fit(lengths[:100], 1024, 1)  # only the last pack is not full
    assert len(small_packs) == -(-int(lengths[:100].sum()) // 1024)


@pytest.mark.parametrize("kind", ["real", "600 of 1024", "long"])
def test_time_is_linear_in_the_number_of_sequences(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of packs that cannot become full are not packed again and again."""
    original, block_sizes = module._fit_block, list[int]()

    def fit_block(sequences: list[int], *arguments: Any) -> Any:
        block_sizes.append(len(sequences))
        return original(sequences, *arguments)

    monkeypatch.setattr(module, "_fit_block", fit_block)
    rng = np.random.default_rng(1)
    lengths = {
        "real": window_lengths(rng, 60_000, 126),
        "600 of 1024": np.full(60_000, 600),
        "long": 512 - rng.integers(0, 30, 60_000),
    }[kind]
    assert sum(map(len, pack_best_fit(lengths, 1024, 1))) == len(lengths)
    assert max(block_sizes) <= 2 * module.BLOCK and sum(block_sizes) <= 2 * len(lengths)


def test_sequences_longer_than_a_pack_are_refused() -> None:
    with pytest.raises(HeedfulError, match="a pack has 64: set pack_length to 65 or more"):
        pack_best_fit(np.array([3, 65]), 64, 0)
    assert pack_best_fit(np.zeros(0, dtype=np.int64), 64, 0) == []


def test_a_pack_has_whole_sequences_with_their_labels(corpus: Corpus, tokenizer: Tokenizer) -> None:
    template = SpecialTokenTemplate.of(tokenizer, pair=False)
    ranges = segment_windows(corpus, np.arange(NUM_DOCUMENTS), 30)
    labels = np.arange(len(ranges))
    packs = PackedSequences(corpus, template, ranges, 100, seed=3, labels=labels)
    all_labels: list[int] = []
    for number in range(len(packs)):
        sample = packs[number]
        assert len(sample) <= 100 and sample.bounds[-1] == len(sample) == len(sample.types)
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target, strict=True):
            first, last = ranges[label, 0]
            expected = [
                tokenizer.special.bos_or_cls,
                *corpus.tokens(int(first), int(last)),
                tokenizer.special.eos_or_sep,
            ]
            assert sample.tokens[start:stop].tolist() == expected
        all_labels += sample.target.tolist()
    assert sorted(all_labels) == labels.tolist()
    assert packs.tokens == sum(len(packs[number]) for number in range(len(packs)))
    assert packs.tokens == int((ranges[:, 0, 1] - ranges[:, 0, 0] + 2).sum())
    assert PackedSequences(corpus, template, ranges, 100, seed=3)[0].target is None
    for index in (-1, len(packs)):
        with pytest.raises(IndexError):
            _ = packs[index]


def test_the_error_names_the_tokens_reserved_for_padding(corpus: Corpus, tokenizer: Tokenizer) -> None:
    template = SpecialTokenTemplate.of(tokenizer, pair=False)
    ranges = segment_windows(corpus, np.arange(NUM_DOCUMENTS), 28)
    longest = int((ranges[:, 0, 1] - ranges[:, 0, 0]).max()) + template.width
    shape = FixedShape(sequences=4, pad=0)
    message = rf"a sequence has {longest} tokens, .* raise pack_length from {longest} to {longest + 4}"
    with pytest.raises(HeedfulError, match=message):
        PackedSequences(corpus, template, ranges, longest, seed=3, shape=shape)
    assert len(PackedSequences(corpus, template, ranges, longest + 4, seed=3, shape=shape)[0]) == longest + 4


def test_packs_of_every_epoch_end_with_an_index_error(corpus: Corpus, tokenizer: Tokenizer) -> None:
    segment_pairs = make_pairs(corpus, tokenizer)
    for epoch in range(2):
        assert len(list(segment_pairs.at(epoch))) == len(segment_pairs)
        with pytest.raises(IndexError):
            _ = segment_pairs.at(epoch)[len(segment_pairs)]


def test_a_sequence_inside_a_document_uses_the_continued_template(corpus: Corpus, tokenizer: Tokenizer) -> None:
    template = SpecialTokenTemplate.of(tokenizer, pair=False)
    ranges = segment_windows(corpus, np.arange(NUM_DOCUMENTS), 30)
    labels, document_of = np.arange(len(ranges)), token_documents(corpus)
    packs = PackedSequences(corpus, template, ranges, 100, seed=3, labels=labels, continued=template.without_end)
    num_ends = 0
    for number in range(len(packs)):
        sample = packs[number]
        assert len(sample) <= 100
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target, strict=True):
            first, last = (int(bound) for bound in ranges[label, 0])
            ends = last == len(document_of) or document_of[last] != document_of[first]
            end_token = [tokenizer.special.eos_or_sep] if ends else []
            expected = [tokenizer.special.bos_or_cls, *corpus.tokens(first, last), *end_token]
            assert sample.tokens[start:stop].tolist() == expected
            num_ends += ends
    assert num_ends == NUM_DOCUMENTS < len(ranges)
    assert packs.tokens == sum(len(packs[number]) for number in range(len(packs)))


# -- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [2, 7, 16, 30, 1000])
def test_windows_partition_every_document(corpus: Corpus, room: int) -> None:
    documents = np.arange(1, NUM_DOCUMENTS, 2)
    windows = [tuple(window[0].tolist()) for window in segment_windows(corpus, documents, room)]
    number = 0
    for document in documents.tolist():
        bounds = segment_bounds(corpus, document)
        expected_start = bounds[0]
        while expected_start < bounds[-1]:
            start, stop = windows[number]
            assert start == expected_start and start < stop <= min(start + room, bounds[-1])
            segment_ends = [bound for bound in bounds if start < bound <= start + room]
            # a window has as many whole segments as fit, or a part of a segment that does not fit
            assert stop == (segment_ends[-1] if segment_ends else start + room)
            expected_start, number = stop, number + 1
    assert number == len(windows)


# -- validation split --------------------------------------------------------------------------------------------


def test_the_validation_split_depends_only_on_the_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = make_documents(1500, seed=9, sentences=(1, 3))
    first = make_corpus(tmp_path / "a", documents, tokenizer)
    masks = {share: held_out(first, share) for share in (0.01, 0.1, 0.5)}
    for share, mask in masks.items():
        assert abs(mask.sum() - share * 1500) < 4 * (share * (1 - share) * 1500) ** 0.5
    # a larger split contains a smaller one
    assert not (masks[0.01] & ~masks[0.1]).any()
    assert not (masks[0.1] & ~masks[0.5]).any()
    reordered = make_corpus(tmp_path / "b", [*documents[700:], *documents[:700], *documents[:100]], tokenizer)
    # equal texts are in the same split
    assert held_out(reordered, 0.1).tolist() == [*masks[0.1][700:], *masks[0.1][:700], *masks[0.1][:100]]


def test_both_splits_have_a_document_if_there_are_two_different_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, second, third = make_documents(3, seed=2)
    corpus = make_corpus(tmp_path / "few", [first, second, first, third], tokenizer)
    assert held_out(corpus, 1e-9).sum() in (1, 2), "equal documents are in the same split"
    assert (~held_out(corpus, 1 - 1e-9)).sum() in (1, 2)
    equal_documents = make_corpus(tmp_path / "alike", [first] * 3, tokenizer)
    assert held_out(equal_documents, 1e-9).sum() == 0


# -- pairs --------------------------------------------------------------------------------------------------------


def make_pairs(corpus: Corpus, tokenizer: Tokenizer, **fields: Any) -> SegmentPairs:
    """Return labelled pairs of all documents of a corpus."""
    settings = {"length": 64, "size": 128, "seed": 5} | fields
    template = SpecialTokenTemplate.of(tokenizer, pair=True)
    return SegmentPairs(corpus=corpus, documents=np.arange(len(corpus)), template=template, **settings)


def plan_pairs(segment_pairs: SegmentPairs, epoch: int = 0) -> list[tuple[Pair, int]]:
    """Return the token ranges and the label of each pair of an epoch."""
    ranges, labels = segment_pairs.plan(epoch)
    return [(((a, b), (c, d)), label) for ((a, b), (c, d)), label in zip(ranges.tolist(), labels.tolist(), strict=True)]


def test_next_sentence_pairs_have_the_right_labels(corpus: Corpus, tokenizer: Tokenizer) -> None:
    document_of, segment_pairs = token_documents(corpus), make_pairs(corpus, tokenizer)
    room = segment_pairs.template.room(64)
    labels: Counter[int] = Counter()
    num_single_segments = 0
    for epoch in range(20):
        for ((a, b), (c, d)), label in plan_pairs(segment_pairs, epoch):
            assert a < b and c < d and (b - a) + (d - c) <= room
            assert document_of[a] == document_of[b - 1] and document_of[c] == document_of[d - 1], (
                "a part has tokens of two documents"
            )
            assert (document_of[a] == document_of[c]) == (label == 0)
            if label == 0:
                assert b <= c, "the parts are swapped"
                lost = c - b  # tokens that truncation removed between the parts
                assert lost == 0 or (b - a) + (d - c) == room
            labels[label] += 1
        num_single_segments += sum(len(segment_bounds(corpus, document)) == 2 for document in range(NUM_DOCUMENTS))
    share = labels[1] / labels.total()
    assert 0.5 < share < 0.8, "pairs of single segments do not have label 1"
    assert num_single_segments, "no document has one segment"


def test_a_chunk_of_one_segment_gets_a_part_of_another_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    segment_pairs = make_pairs(make_corpus(tmp_path, make_documents(20, sentences=(1, 1)), tokenizer), tokenizer)
    planned_pairs = plan_pairs(segment_pairs)
    assert len(planned_pairs) == 20 and all(label == 1 for _, label in planned_pairs)


def test_pairs_lose_only_truncated_tokens(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Text that a random part replaces is used for the next pair: without truncation, an epoch has every token."""
    segment_pairs = make_pairs(corpus, tokenizer, length=1000, size=1000, short_seq_prob=0.9)
    for swapped in (False, True):
        for epoch in range(5):
            segment_pairs = make_pairs(corpus, tokenizer, length=1000, size=1000, short_seq_prob=0.9, swapped=swapped)
            used = np.zeros(corpus.count, dtype=int)
            for ((a, b), (c, d)), label in plan_pairs(segment_pairs, epoch):
                used[a:b] += 1
                if swapped or label == 0:
                    used[c:d] += 1
            assert (used == 1).all()
    room = segment_pairs.template.room(40)
    for ((a, b), (c, d)), label in plan_pairs(make_pairs(corpus, tokenizer, length=40)):
        for start, stop in ((a, b), (c, d)):
            bounds = set(segment_bounds(corpus, int(token_documents(corpus)[start])))
            if not {start, stop} <= bounds:
                assert (b - a) + (d - c) == room, f"a pair with label {label} was truncated without need"


def test_random_second_sentences_come_from_all_documents(corpus: Corpus, tokenizer: Tokenizer) -> None:
    document_of, segment_pairs = token_documents(corpus), make_pairs(corpus, tokenizer)
    counts_by_document: Counter[int] = Counter()
    starts = set()
    for epoch in range(60):
        for (_, (start, _)), label in plan_pairs(segment_pairs, epoch):
            if label == 1:
                counts_by_document[int(document_of[start])] += 1
                starts.add(start)
    counts = np.array([counts_by_document[document] for document in range(NUM_DOCUMENTS)])
    assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5, "documents are not equally likely"
    # nearly every segment begins some random part, even the last one of its document
    assert sum(int(bound) in starts for bound in corpus.segments[:-1]) > 0.9 * (len(corpus.segments) - 1)


def test_short_documents_have_the_given_probability(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each document has one target length, as in create_instances_from_document of Devlin et al. 2019."""
    long = make_corpus(tmp_path, make_documents(40, sentences=(60, 60)), tokenizer)
    document_of, count = token_documents(long), 0
    longest = int(np.diff(long.segments).max())
    for short_seq_prob in (0.0, 0.1, 0.5):
        is_short = []
        for epoch in range(10):
            segment_pairs = make_pairs(
                long, tokenizer, length=128, size=128, short_seq_prob=short_seq_prob, swapped=True
            )
            room, lengths = segment_pairs.template.room(128), dict[int, list[int]]()
            for ((a, b), (c, d)), _ in plan_pairs(segment_pairs, epoch):
                lengths.setdefault(int(document_of[a]), []).append((b - a) + (d - c))
            for document_lengths in lengths.values():
                inner = document_lengths[:-1]  # the last pair of a document may be short anyway
                is_short.append(max(inner) < room)
                assert max(inner) - min(inner) <= longest, "a document has several target lengths"
                count += len(document_lengths)
        # a target length of almost the whole room still fills it, so some short documents are not counted
        standard_error = (short_seq_prob * (1 - short_seq_prob) / 400) ** 0.5
        assert abs(np.mean(is_short) - short_seq_prob) <= 0.25 * short_seq_prob + 4 * standard_error
    assert count > 1000


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 80), st.integers(0, 9))
def test_truncation_shortens_the_longer_text(size_a: int, size_b: int, room: int, seed: int) -> None:
    first, second = truncate_pair((100, 100 + size_a), (300, 300 + size_b), room, Random(seed))
    sizes = [stop - start for start, stop in (first, second)]
    assert sum(sizes) == min(room, size_a + size_b) and min(sizes) >= 1
    assert 100 <= first[0] < first[1] <= 100 + size_a and 300 <= second[0] < second[1] <= 300 + size_b
    if size_a + size_b > room:  # the longer text is shortened
        assert abs(sizes[0] - sizes[1]) <= 1 or (sizes[0] == size_a) != (sizes[1] == size_b)


def test_truncation_takes_from_both_ends() -> None:
    truncated = [truncate_pair((0, 50), (100, 110), 40, Random(seed)) for seed in range(200)]
    assert all(second == (100, 110) and stop - start == 30 for (start, stop), second in truncated)
    starts = np.array([start for (start, _), _ in truncated])
    assert abs(starts.mean() - 10) < 1 and starts.min() < 7 and starts.max() > 13


def test_sentence_order_pairs_have_the_right_labels(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """The parts are adjacent in one document; with label 1, they are swapped."""
    document_of, segment_pairs = token_documents(corpus), make_pairs(corpus, tokenizer, swapped=True)
    labels: Counter[int] = Counter()
    for epoch in range(10):
        for (a, b), label in plan_pairs(segment_pairs, epoch):
            first, second = (b, a) if label else (a, b)
            assert document_of[first[0]] == document_of[second[1] - 1] and first[1] <= second[0]
            if second[0] > first[1]:
                assert (a[1] - a[0]) + (b[1] - b[0]) == segment_pairs.template.room(64), (
                    "there are tokens between the parts of a pair that was not truncated"
                )
            labels[label] += 1
    assert abs(labels[1] / labels.total() - 0.5) < 4 * 0.5 / labels.total() ** 0.5


@pytest.mark.parametrize("swapped", [False, True])
def test_epochs_differ_and_are_reproducible(corpus: Corpus, tokenizer: Tokenizer, swapped: bool) -> None:
    segment_pairs, equal_pairs = (make_pairs(corpus, tokenizer, swapped=swapped) for _ in range(2))
    plans = [plan_pairs(segment_pairs, epoch) for epoch in range(4)]
    assert plans == [plan_pairs(equal_pairs, epoch) for epoch in range(4)]
    assert all(plans[0] != plan for plan in plans[1:])
    assert plan_pairs(make_pairs(corpus, tokenizer, swapped=swapped, seed=6)) != plans[0]
    contents = []
    for epoch in range(6):
        packs = segment_pairs.at(epoch)
        assert len(packs) == len(segment_pairs)
        samples = [packs[number] for number in range(len(packs))]
        assert all(len(sample) <= 128 and len(sample.target) == len(sample.bounds) - 1 for sample in samples)
        contents.append([sample.tokens.tolist() for sample in samples])
        repeated = [equal_pairs.at(epoch)[number].tokens.tolist() for number in range(len(packs))]
        assert repeated == contents[-1]
    assert all(contents[0] != content for content in contents[1:])
    assert segment_pairs[2].tokens.tolist() == contents[0][2]


def test_sequences_equal_the_encoding_of_the_tokenizer(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Sequences are [CLS] A [SEP] B [SEP] with token types, and the targets are the labels."""
    segment_pairs = make_pairs(corpus, tokenizer, size=10_000)
    ranges, labels = segment_pairs.plan(0)
    types_and_labels = {}
    for (first, second), label in zip(ranges.tolist(), labels.tolist(), strict=True):
        parts = [tokenizer.decode(corpus.tokens(*text).tolist()) for text in (first, second)]
        encoded = tokenizer.encode((parts[0], parts[1]))
        types_and_labels[tuple(encoded.ids)] = (list(encoded.types), label)
    compared = 0
    for number in range(len(segment_pairs)):
        sample = segment_pairs[number]
        for (start, stop), label in zip(pairwise(sample.bounds), sample.target.tolist(), strict=True):
            ids = tuple(sample.tokens[start:stop].tolist())
            if ids in types_and_labels:  # words that truncation has cut are encoded differently
                assert types_and_labels[ids] == (sample.types[start:stop].tolist(), label)
                compared += 1
    assert compared > 0.7 * len(labels)

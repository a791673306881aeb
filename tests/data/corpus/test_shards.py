"""Corpus, the reader of a built corpus: its tokens are those of the texts, and damaged files are refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from heedful.data.corpus import shards
from heedful.data.corpus.build import CorpusSettings, build_corpus
from heedful.data.corpus.sentence_split import split_sentences
from heedful.data.corpus.shards import (
    SKETCH_HASHES,
    Corpus,
    batch_by_characters,
    estimate_distinct,
    hash_document,
    merge_sketches,
)
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

TEXTS = [
    "A ferry left. It was late!\n\nNobody waited for it.",
    "One document of one sentence",
    "Rain fell on the harbour. Rain fell on the harbour. The boats came home.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, TokenizerSettings(vocab_size=120, min_frequency=1))


@pytest.fixture(scope="module")
def byte_level_tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, TokenizerSettings(algorithm="bpe", vocab_size=300, min_frequency=1))


def make_corpus(folder: Path, tokenizer: Tokenizer, texts: list[str] = TEXTS, shard_chars: int = 10) -> Corpus:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build_corpus([file], tokenizer, folder / "corpus", CorpusSettings(shard_chars=shard_chars))


@pytest.mark.parametrize("kind", ["tokenizer", "byte_level_tokenizer"])
def test_a_corpus_holds_the_ids_of_its_texts(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    corpus = make_corpus(tmp_path, tokenizer)
    assert len(corpus) == 3
    assert len(corpus.about["shards"]) == 3, "every document is longer than a shard, so each has its own"
    assert (corpus.fingerprint, corpus.vocabulary) == (tokenizer.fingerprint, tokenizer.size)
    assert corpus.documents.tolist() == [0, 3, 4, 7]
    assert corpus.paragraphs.tolist() == [True, False, True, True, True, False, False]
    assert corpus.hashes.tolist() == [hash_document(text) for text in TEXTS]
    expected = [tokenizer.ids(split_sentences(text)[0]) for text in TEXTS]
    segments = [ids for document in expected for ids in document]
    for index, ids in enumerate(segments):
        start, stop = corpus.segments[index : index + 2].tolist()
        assert corpus.tokens(start, stop).tolist() == ids.tolist()
    all_tokens = corpus.tokens(0, corpus.count)
    assert all_tokens.dtype == np.int32
    assert all_tokens.tolist() == np.concatenate(segments).tolist()
    for start in range(corpus.count + 1):  # ranges that go over one or more shards
        assert corpus.tokens(start, corpus.count).tolist() == all_tokens[start:].tolist()
    all_tokens[:] = 0
    assert corpus.tokens(0, 5).any(), "tokens() returns a copy"
    if kind == "byte_level_tokenizer":
        first_document = corpus.tokens(0, int(corpus.segments[3])).tolist()
        assert tokenizer.decode(first_document) == TEXTS[0], "spaces are preserved"


def test_a_corpus_can_be_pickled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus = make_corpus(tmp_path, tokenizer)
    again = pickle.loads(pickle.dumps(corpus))
    assert len(pickle.dumps(corpus)) < 500
    assert again.tokens(0, again.count).tolist() == corpus.tokens(0, corpus.count).tolist()
    assert repr(corpus).startswith("Corpus('")
    assert f"documents=3, tokens={corpus.count})" in repr(corpus)
    with pytest.raises(ValueError, match="read-only"):
        corpus.segments[0] = 1


def test_few_shards_are_open_at_a_time(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 2)
    corpus = make_corpus(tmp_path, tokenizer)
    for _ in range(2):
        assert len(corpus.tokens(0, corpus.count)) == corpus.count
    assert len(corpus._open) == 2


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 10_000)])
def test_token_ranges_outside_the_corpus_are_refused(
    tmp_path: Path, tokenizer: Tokenizer, start: int, stop: int
) -> None:
    with pytest.raises(HeedfulError, match=f"^tokens {start} to {stop} were asked for, but the corpus has 0 to "):
        make_corpus(tmp_path, tokenizer).tokens(start, stop)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("manifest.json", None, "corpus: is no corpus: it has no manifest.json"),
        ("manifest.json", b"{", r"manifest.json: cannot be read: "),
        ("manifest.json", b"[]", r"manifest.json: is damaged: it holds no object"),
        ("manifest.json", b'{"version": 1}', "manifest.json: is damaged: 'counts'; build the corpus again"),
        ("manifest.json", b'{"version": 9}', "is a corpus of version 9, expected 1"),
        ("segments.bin", None, "segments.bin: is missing: the corpus is damaged, build it again in a new folder"),
        ("tokens-00001.bin", b"123", "tokens-00001.bin: has 3 bytes, expected "),
    ],
)
def test_a_damaged_corpus_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, data: bytes | None, message: str
) -> None:
    folder = make_corpus(tmp_path, tokenizer).folder
    (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
    with pytest.raises(HeedfulError, match=message):
        Corpus.open(folder)


def test_an_unfinished_corpus_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(HeedfulError, match="is not finished: build it again with the same files and settings, and it"):
        Corpus.open(tmp_path)


def test_the_paragraph_mark_of_an_empty_segment_moves_to_the_next(tmp_path: Path) -> None:
    """The normaliser of a tokenizer removes U+200E, so a segment of it alone has no tokens."""
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(vocab_size=120, min_frequency=1))
    corpus = make_corpus(tmp_path, tokenizer, ["A ferry.", "\u200e", "\u200e\n\nRain fell. It fell."])
    assert corpus.documents.tolist() == [0, 1, 3]
    assert corpus.paragraphs.tolist() == [True, True, False]
    assert corpus.about["left_out"]["empty"] == 1
    assert corpus.hashes.tolist() == [hash_document("A ferry."), hash_document("\u200e\n\nRain fell. It fell.")]


def test_a_large_vocabulary_is_stored_with_32_bits(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {f"word{number}": number for number in range(70_000)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    corpus = make_corpus(tmp_path, Tokenizer(backend), ["word65535 word65536 word69999"])
    assert corpus.about["dtype"] == "<u4"
    assert corpus.tokens(0, 3).tolist() == [65535, 65536, 69999]


def test_estimate_distinct() -> None:
    rng = np.random.default_rng(1)
    few = rng.integers(0, 1000, 5000, dtype=np.uint64)
    assert estimate_distinct(merge_sketches(few[:100], few)) == len(np.unique(few))
    many = rng.integers(0, 2**64, 300_000, dtype=np.uint64)
    sketch = merge_sketches(*[merge_sketches(part) for part in np.array_split(many, 7)], many[:100])
    assert len(sketch) == SKETCH_HASHES
    assert estimate_distinct(sketch) == pytest.approx(300_000, rel=4 / SKETCH_HASHES**0.5)


def test_batches_keep_order() -> None:
    texts = ["a" * 300_000, "b" * 300_000, "c", "d" * 900_000, "e"]
    assert [len(batch) for batch in batch_by_characters(texts)] == [2, 2, 1]
    assert [text for batch in batch_by_characters(texts) for text in batch] == texts

"""Two SentencePiece models with one vocabulary: ids and texts are those of transformers' tokenizer of such files."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers

import heedful
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.sentencepiece_model import read_model
from tests.support.sentencepiece_models import TEXTS, train_sentencepiece
from tests.support.tiny_models import save_tiny

CLASS = {"tokenizer_class": "MarianTokenizer"}


def save_files(folder: Path) -> dict[str, int]:
    """Write both models and their vocabulary, in which some pieces of the first are missing, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(train_sentencepiece())
    (folder / "target.spm").write_bytes(train_sentencepiece(vocab_size=45, normalization_rule_name="nmt_nfkc_cf"))
    pieces = [text for name in ("source.spm", "target.spm") for text, _, _ in read_model(folder, name).pieces]
    others = sorted(set(pieces[10:]) - set(pieces[20:25]))
    tokens = ["</s>", "<unk>", *others, "ß", "üß", "aß", ">>deu<<", ">>fra<<", "<pad>"]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(json.dumps({"source_lang": "eng", "target_lang": "deu"}))
    return vocabulary


def theirs_of(folder: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it recommends sacremoses, and does not use it
        return transformers.MarianTokenizer.from_pretrained(folder)


def test_ids_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    vocabulary = save_files(tmp_path)
    ours, theirs, draw = Tokenizer.load(tmp_path, CLASS), theirs_of(tmp_path), random.Random(1)
    drawn = ["".join(draw.choice("abcdefg ABC.ßüß漢é  ") for _ in range(draw.randrange(20))) for _ in range(200)]
    for text in (*drawn, *TEXTS[:20], "", " ", ">>deu<< Ada reads", ">>fra<<Ada", "a</s> b", "<unk> ▁x"):
        assert list(ours.encode(text).ids) == theirs(text).input_ids, text
        assert ours.pack([text]).tokens.tolist() == theirs(text).input_ids, text
        targets = theirs(text_target=text).input_ids
        if not text.startswith(">>"):
            assert list(ours.for_targets.encode(text).ids) == targets, text
        assert ours.decode(targets).strip() == theirs.decode(targets, skip_special_tokens=True), text
    assert ours.size == len(vocabulary) and ours.max_length == 512
    assert (ours.special.pad, ours.special.eos_or_sep, ours.special.unknown) == (vocabulary["<pad>"], 0, 1)
    assert ours.encode("Ada reads").ids != ours.for_targets.encode("Ada reads").ids
    with pytest.raises(
        HeedfulError, match="begins with '>>ita<<', a language unknown to this model: it has >>deu<<, >>f"
    ):
        ours.encode(">>ita<< Ada")


def test_offsets_are_those_of_the_text(tmp_path: Path) -> None:
    save_files(tmp_path)
    encoding = Tokenizer.load(tmp_path).encode("Ada reads the map")
    spans = [span for span, segment in zip(encoding.offsets, encoding.segments, strict=True) if segment is not None]
    assert "".join("Ada reads the map"[start:stop] for start, stop in spans).replace(" ", "") == "Adareadsthemap"


def test_the_files_are_saved_as_they_were_read(tmp_path: Path) -> None:
    vocabulary = save_files(tmp_path / "model")
    pad = {"pad_token_id": vocabulary["<pad>"], "decoder_start_token_id": vocabulary["<pad>"]}
    save_tiny(tmp_path / "model", "marian", "MarianMTModel", vocab_size=len(vocabulary), **pad)
    loaded = heedful.load(tmp_path / "model")
    heedful.save(loaded, tmp_path / "saved")
    for name in ("source.spm", "target.spm", "vocab.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    again = heedful.load(tmp_path / "saved").tokenizer
    assert loaded.tokenizer is not None and again is not None and again.fingerprint == loaded.tokenizer.fingerprint
    assert again.fingerprint != again.for_targets.fingerprint
    with warnings.catch_warnings(action="ignore"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("Ada reads").input_ids == list(again.encode("Ada reads").ids)
    assert pickle.loads(pickle.dumps(again)).encode("Ada reads").ids == again.encode("Ada reads").ids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"separate_vocabs": True}, "separate_vocabs is true; only one vocabulary for both sides can be loaded"),
        ({"eos_token": "[SEP]"}, "eos_token is .*SEP.*; only </s> can be loaded"),
    ],
)
def test_other_vocabularies_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    save_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(HeedfulError, match=message):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path: Path) -> None:
    vocabulary = save_files(tmp_path)
    del vocabulary["<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(HeedfulError, match=r"vocab\.json has no <pad>, the pad_token"):
        Tokenizer.load(tmp_path)

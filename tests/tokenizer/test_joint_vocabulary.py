"""Tokenizers with two SentencePiece models and one vocabulary, as in Marian: equal to transformers."""

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


def load_reference(folder: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it recommends sacremoses without using it
        return transformers.MarianTokenizer.from_pretrained(folder)


def test_ids_and_texts_equal_transformers(tmp_path: Path) -> None:
    vocabulary = save_files(tmp_path)
    tokenizer, reference, rng = Tokenizer.load(tmp_path, CLASS), load_reference(tmp_path), random.Random(1)
    random_texts = ["".join(rng.choice("abcdefg ABC.ßüß漢é  ") for _ in range(rng.randrange(20))) for _ in range(200)]
    for text in (*random_texts, *TEXTS[:20], "", " ", ">>deu<< Ada reads", ">>fra<<Ada", "a</s> b", "<unk> ▁x"):
        assert list(tokenizer.encode(text).ids) == reference(text).input_ids, text
        assert tokenizer.pack([text]).tokens.tolist() == reference(text).input_ids, text
        targets = reference(text_target=text).input_ids
        if not text.startswith(">>"):
            assert list(tokenizer.for_targets.encode(text).ids) == targets, text
        assert tokenizer.decode(targets).strip() == reference.decode(targets, skip_special_tokens=True), text
    assert tokenizer.size == len(vocabulary) and tokenizer.max_length == 512
    assert (tokenizer.special.pad, tokenizer.special.eos_or_sep, tokenizer.special.unknown) == (
        vocabulary["<pad>"],
        0,
        1,
    )
    assert tokenizer.encode("Ada reads").ids != tokenizer.for_targets.encode("Ada reads").ids
    with pytest.raises(
        HeedfulError, match="begins with '>>ita<<', a language unknown to this model: it has >>deu<<, >>f"
    ):
        tokenizer.encode(">>ita<< Ada")


def test_offsets_spell_the_text(tmp_path: Path) -> None:
    save_files(tmp_path)
    encoding = Tokenizer.load(tmp_path).encode("Ada reads the map")
    spans = [span for span, segment in zip(encoding.offsets, encoding.segments, strict=True) if segment is not None]
    assert "".join("Ada reads the map"[start:stop] for start, stop in spans).replace(" ", "") == "Adareadsthemap"


def test_files_are_saved_unchanged(tmp_path: Path) -> None:
    vocabulary = save_files(tmp_path / "model")
    pad = {"pad_token_id": vocabulary["<pad>"], "decoder_start_token_id": vocabulary["<pad>"]}
    save_tiny(tmp_path / "model", "marian", "MarianMTModel", vocab_size=len(vocabulary), **pad)
    loaded = heedful.load(tmp_path / "model")
    heedful.save(loaded, tmp_path / "saved")
    for name in ("source.spm", "target.spm", "vocab.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    saved = heedful.load(tmp_path / "saved").tokenizer
    assert loaded.tokenizer is not None
    assert saved is not None
    assert saved.fingerprint == loaded.tokenizer.fingerprint
    assert saved.fingerprint != saved.for_targets.fingerprint
    with warnings.catch_warnings(action="ignore"):
        reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert reference("Ada reads").input_ids == list(saved.encode("Ada reads").ids)
    assert pickle.loads(pickle.dumps(saved)).encode("Ada reads").ids == saved.encode("Ada reads").ids


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

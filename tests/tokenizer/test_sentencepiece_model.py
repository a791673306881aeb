"""SentencePiece models, read without its library: equal to it on random text, as its families use them, or refused."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

import heedful
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.families import FAMILIES
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.sentencepiece_model import read_model
from tests.support.sentencepiece_models import TEXTS, train_sentencepiece
from tests.support.tiny_models import save_tiny

SPECIAL = {
    "albert": {"control_symbols": "[CLS],[SEP],[MASK]", "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
    "xlnet": {"control_symbols": "<cls>,<sep>,<pad>,<mask>,<eod>,<eop>", "unk_id": 0, "bos_id": 1, "eos_id": 2},
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}


def written(folder: Path, **options: Any) -> tuple[Any, Path]:
    """The library's processor, and the folder with the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(train_sentencepiece(**options))
    return sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(**options)), folder


def alone(folder: Path) -> Tokenizer:
    with pytest.warns(HeedfulWarning, match=r"spiece\.model does not name the special tokens around a text"):
        return Tokenizer.load(folder)


COMMON = "abcdefghij klmno  pqrstuvwxyz.,ABC\t\n'\"0123▁"
LATIN = "".join(map(chr, range(0x20, 0x250)))
WIDE = "".join(map(chr, [*range(0x4E00, 0x4E80), *range(0xAC00, 0xAC80), *range(0xFF10, 0xFF5B), 0x3000, 0xA0, 0x200B]))
# without what combines: the tokenizers library normalises by grapheme, SentencePiece by the longest rule
ANY = "".join(chr(c) for c in range(0x20, 0x3000) if unicodedata.category(chr(c)) not in ("Cn", "Mn", "Mc", "Me", "Lo"))


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity", "nmt_nfkc_cf", "nfkc"])
@pytest.mark.parametrize("pool", [COMMON, LATIN, WIDE, ANY], ids=["common", "latin", "wide", "any"])
def test_ids_are_the_librarys_on_random_text(tmp_path: Path, rule: str, pool: str) -> None:
    theirs, folder = written(tmp_path, normalization_rule_name=rule, byte_fallback=rule == "nfkc")
    ours, draw = alone(folder), random.Random(rule)
    for _ in range(500):
        text = "".join(draw.choice(pool) for _ in range(draw.randrange(30)))
        assert list(ours.encode(text).ids) == theirs.encode(text), text
    for text in (*TEXTS[:50], "", " ", "   a   b ", "▁", "\n"):
        assert list(ours.encode(text).ids) == theirs.encode(text), text
    for text in TEXTS[:50]:
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text))


@pytest.mark.parametrize("options", [{"add_dummy_prefix": False}, {"remove_extra_whitespaces": False}])
def test_spaces_are_treated_as_the_file_says(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs, folder = written(tmp_path, **options)
    ours, draw = alone(folder), random.Random(1)
    for _ in range(300):
        text = "".join(draw.choice("abc  .") for _ in range(draw.randrange(20)))
        assert list(ours.encode(text).ids) == theirs.encode(text), text


@pytest.mark.parametrize("family", SPECIAL)
def test_a_model_folder_with_its_pieces(tmp_path: Path, family: str) -> None:
    """The specials around texts are the family's; what is saved is tokenizer.json and gives the same ids."""
    theirs, folder = written(tmp_path / "model", **SPECIAL[family])
    save_tiny(folder, family, FAMILIES[family].bare, vocab_size=420)
    loaded = heedful.load(folder)
    ours = loaded.tokenizer
    assert ours is not None

    def spoken(text: str) -> list[int]:
        if family == "t5":
            return theirs.encode(text)  # type: ignore[no-any-return]
        text = "".join(each for each in unicodedata.normalize("NFKD", text) if not unicodedata.combining(each))
        return theirs.encode(text.lower() if family == "albert" else text)  # type: ignore[no-any-return]

    def id(token: str) -> int:
        found = ours.id(token)
        assert found is not None
        return found

    one, other = spoken("Ada reads the café guide"), spoken("Nobody has lost it")
    pair = ours.encode(("Ada reads the café guide", "Nobody has lost it"))
    single = ours.encode("Ada reads the café guide")
    match family:
        case "albert":
            assert list(single.ids) == [id("[CLS]"), *one, id("[SEP]")]
            assert list(pair.ids) == [id("[CLS]"), *one, id("[SEP]"), *other, id("[SEP]")]
            assert list(pair.types) == [0] * (len(one) + 2) + [1] * (len(other) + 1)
            assert list(ours.encode("``ada''").ids) == list(ours.encode('"ada"').ids)
        case "xlnet":
            assert list(single.ids) == [*one, id("<sep>"), id("<cls>")] and list(single.types)[-1] == 2
            assert list(pair.types) == [0] * (len(one) + 1) + [1] * (len(other) + 1) + [2]
        case "t5":
            assert list(single.ids) == [*one, id("</s>")]
            assert list(pair.ids) == [*one, id("</s>"), *other, id("</s>")]
            assert id("<extra_id_0>") == theirs.get_piece_size() + 99 and id("<extra_id_99>") == theirs.get_piece_size()
            assert ours.special.eos_or_sep == id("</s>") and ours.special.pad == id("<pad>")
    heedful.save(loaded, tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").is_file() and not (tmp_path / "saved/spiece.model").exists()
    again = heedful.load(tmp_path / "saved").tokenizer
    assert again is not None and again.fingerprint == ours.fingerprint
    assert again.encode("Ada reads").ids == ours.encode("Ada reads").ids
    (tmp_path / "saved/tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path / "saved").special == ours.special, "what stands in tokenizer.json alone tells it"


def test_what_the_configuration_says_counts(tmp_path: Path) -> None:
    _, folder = written(tmp_path, **SPECIAL["t5"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 3, "do_lower_case": True}))
    made = Tokenizer.load(folder, FAMILIES["t5"].tokenizer_defaults)
    assert made.id("<extra_id_2>") is not None and made.id("<extra_id_3>") is None
    assert made.encode("ADA").ids == made.encode("ada").ids
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": -3}))
    with pytest.raises(HeedfulError, match="extra_ids is -3; expected a whole number from 0 to 10000"):
        Tokenizer.load(folder, FAMILIES["t5"].tokenizer_defaults)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(HeedfulError, match=r"spiece\.model has no \[CLS\], \[SEP\], which its model expects"):
        Tokenizer.load(folder, FAMILIES["albert"].tokenizer_defaults)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "it holds no pieces"),
        (b"\x0a", "is no SentencePiece model, or is damaged"),
        (b"\xff" * 30, "a number without an end"),
        (train_sentencepiece()[:500], "it ends in the middle of a field, at byte 500"),
        (b"{}", "is no SentencePiece model, or is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "spiece.model").write_bytes(data)
    with pytest.raises(HeedfulError, match=told):
        read_model(tmp_path, "spiece.model")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"model_type": "bpe"}, "it is no Unigram model: convert it to tokenizer.json with the library that made it"),
        ({"treat_whitespace_as_suffix": True}, "it writes spaces in an unusual way"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    _, folder = written(tmp_path, **options)
    with pytest.raises(HeedfulError, match=told):
        Tokenizer.load(folder)

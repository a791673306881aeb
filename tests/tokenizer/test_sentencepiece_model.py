"""SentencePiece models are read without the sentencepiece library, and give the same ids as it does or are refused."""

from __future__ import annotations

import importlib
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

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


def write_model(folder: Path, **options: Any) -> tuple[Any, Path]:
    """Train a model and write it to a folder: the processor of the sentencepiece library, and the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(train_sentencepiece(**options))
    return sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(**options)), folder


def load_without_family(folder: Path) -> Tokenizer:
    """Load a model file without the defaults of a model family, which gives a warning."""
    with pytest.warns(HeedfulWarning, match=r"spiece\.model does not name the special tokens around a text"):
        return Tokenizer.load(folder)


COMMON = "abcdefghij klmno  pqrstuvwxyz.,ABC\t\n'\"0123▁"
LATIN = "".join(map(chr, range(0x20, 0x250)))
WIDE = "".join(map(chr, [*range(0x4E00, 0x4E80), *range(0xAC00, 0xAC80), *range(0xFF10, 0xFF5B), 0x3000, 0xA0, 0x200B]))
# without combining characters: the tokenizers library normalises by grapheme, SentencePiece by the longest rule
ANY = "".join(chr(c) for c in range(0x20, 0x3000) if unicodedata.category(chr(c)) not in ("Cn", "Mn", "Mc", "Me", "Lo"))


@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity", "nmt_nfkc_cf", "nfkc"])
@pytest.mark.parametrize("pool", [COMMON, LATIN, WIDE, ANY], ids=["common", "latin", "wide", "any"])
def test_unigram_ids_equal_sentencepiece_on_random_text(tmp_path: Path, rule: str, pool: str) -> None:
    reference, folder = write_model(tmp_path, normalization_rule_name=rule, byte_fallback=rule == "nfkc")
    tokenizer, rng = load_without_family(folder), random.Random(rule)
    for _ in range(500):
        text = "".join(rng.choice(pool) for _ in range(rng.randrange(30)))
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text
    for text in (*TEXTS[:50], "", " ", "   a   b ", "▁", "\n"):
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text
    for text in TEXTS[:50]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == reference.decode(reference.encode(text))


@pytest.mark.parametrize("options", [{"add_dummy_prefix": False}, {"remove_extra_whitespaces": False}])
def test_options_for_spaces_equal_sentencepiece(tmp_path: Path, options: dict[str, Any]) -> None:
    reference, folder = write_model(tmp_path, **options)
    tokenizer, rng = load_without_family(folder), random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("abc  .") for _ in range(rng.randrange(20)))
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text


@pytest.mark.parametrize("family", SPECIAL)
def test_a_model_folder_with_a_sentencepiece_model(tmp_path: Path, family: str) -> None:
    """The special tokens around texts are those of the family; tokenizer.json is saved, and gives the same ids."""
    reference, folder = write_model(tmp_path / "model", **SPECIAL[family])
    save_tiny(folder, family, FAMILIES[family].bare, vocab_size=420)
    loaded = heedful.load(folder)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None

    def pieces_of(text: str) -> list[int]:
        if family == "t5":
            return reference.encode(text)  # type: ignore[no-any-return]
        text = "".join(
            character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)
        )
        return reference.encode(text.lower() if family == "albert" else text)  # type: ignore[no-any-return]

    def id(token: str) -> int:
        token_id = tokenizer.id(token)
        assert token_id is not None
        return token_id

    first, second = pieces_of("Ada reads the café guide"), pieces_of("Nobody has lost it")
    pair = tokenizer.encode(("Ada reads the café guide", "Nobody has lost it"))
    single = tokenizer.encode("Ada reads the café guide")
    match family:
        case "albert":
            assert list(single.ids) == [id("[CLS]"), *first, id("[SEP]")]
            assert list(pair.ids) == [id("[CLS]"), *first, id("[SEP]"), *second, id("[SEP]")]
            assert list(pair.types) == [0] * (len(first) + 2) + [1] * (len(second) + 1)
            assert list(tokenizer.encode("``ada''").ids) == list(tokenizer.encode('"ada"').ids)
        case "xlnet":
            assert list(single.ids) == [*first, id("<sep>"), id("<cls>")]
            assert list(single.types)[-1] == 2
            assert list(pair.types) == [0] * (len(first) + 1) + [1] * (len(second) + 1) + [2]
        case "t5":
            assert list(single.ids) == [*first, id("</s>")]
            assert list(pair.ids) == [*first, id("</s>"), *second, id("</s>")]
            assert id("<extra_id_0>") == reference.get_piece_size() + 99
            assert id("<extra_id_99>") == reference.get_piece_size()
            assert tokenizer.special.eos_or_sep == id("</s>")
            assert tokenizer.special.pad == id("<pad>")
    heedful.save(loaded, tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").is_file()
    assert not (tmp_path / "saved/spiece.model").exists()
    saved = heedful.load(tmp_path / "saved").tokenizer
    assert saved is not None and saved.fingerprint == tokenizer.fingerprint
    assert saved.encode("Ada reads").ids == tokenizer.encode("Ada reads").ids
    (tmp_path / "saved/tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path / "saved").special == tokenizer.special, "tokenizer.json is sufficient"


def test_settings_of_tokenizer_config(tmp_path: Path) -> None:
    _, folder = write_model(tmp_path, **SPECIAL["t5"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 3, "do_lower_case": True}))
    tokenizer = Tokenizer.load(folder, FAMILIES["t5"].tokenizer_defaults)
    assert tokenizer.id("<extra_id_2>") is not None
    assert tokenizer.id("<extra_id_3>") is None
    assert tokenizer.encode("ADA").ids == tokenizer.encode("ada").ids
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": -3}))
    with pytest.raises(HeedfulError, match="extra_ids is -3; expected a whole number from 0 to 10000"):
        Tokenizer.load(folder, FAMILIES["t5"].tokenizer_defaults)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(HeedfulError, match=r"spiece\.model has no \[CLS\], \[SEP\], which its model expects"):
        Tokenizer.load(folder, FAMILIES["albert"].tokenizer_defaults)


@pytest.mark.parametrize("tokenizer_class", ["MBartTokenizer", "MBart50Tokenizer"])
def test_language_codes_around_texts(tmp_path: Path, tokenizer_class: str) -> None:
    """The code of the source language is added to every text, also by transformers with the saved files."""
    model = train_sentencepiece()
    (tmp_path / "sentencepiece.bpe.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    tokenizer = Tokenizer.load(tmp_path, FAMILIES["mbart"].tokenizer_defaults)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = "Ada reads the map of Spain"
    pieces = [id + 1 for id in reference.encode(text)]  # fairseq's vocabulary begins with one more token
    codes = importlib.import_module(getattr(transformers, tokenizer_class).__module__).FAIRSEQ_LANGUAGE_CODES

    def expected(code: str) -> list[int]:
        id = reference.get_piece_size() + 1 + codes.index(code)
        return [id, *pieces, 2] if "50" in tokenizer_class else [*pieces, 2, id]

    assert list(tokenizer.languages) == codes and tokenizer.special.eos_or_sep == 2
    assert list(tokenizer.encode(text).ids) == expected("en_XX")
    german = tokenizer.with_source_language("de_DE")
    assert list(german.encode(text).ids) == expected("de_DE")
    german.save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert saved.fingerprint == german.fingerprint
    assert saved.languages == tokenizer.languages
    read = getattr(transformers, tokenizer_class).from_pretrained(tmp_path / "saved")
    assert read(text).input_ids == expected("de_DE")
    with pytest.raises(HeedfulError, match=r"'en_UK' is no language of this model.*; it has ar_AR, cs_CZ"):
        tokenizer.with_source_language("en_UK")
    with pytest.raises(HeedfulError, match="this tokenizer puts no language code beside a text"):
        Tokenizer.load(tmp_path, FAMILIES["xlm-roberta"].tokenizer_defaults).with_source_language("de_DE")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file holds no pieces"),
        (b"\x0a", "is not a SentencePiece model, or is damaged"),
        (b"\xff" * 30, "a number without an end"),
        (train_sentencepiece()[:500], "the file ends in the middle of a field, at byte 500"),
        (b"{}", "is not a SentencePiece model, or is damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, data: bytes, expected: str) -> None:
    (tmp_path / "spiece.model").write_bytes(data)
    with pytest.raises(HeedfulError, match=expected):
        read_model(tmp_path, "spiece.model")


def test_the_maximum_number_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spiece.model").write_bytes(train_sentencepiece())
    count = len(read_model(tmp_path, "spiece.model").pieces)
    monkeypatch.setattr("heedful.tokenizer.sentencepiece_model.MAX_TOKENS", count)
    assert len(read_model(tmp_path, "spiece.model").pieces) == count
    only_pieces = b"".join(b"\x0a\x03\x0a\x01" + bytes([97 + letter]) for letter in range(3))
    (tmp_path / "spiece.model").write_bytes(only_pieces)
    monkeypatch.setattr("heedful.tokenizer.sentencepiece_model.MAX_TOKENS", 2)
    with pytest.raises(HeedfulError, match="more than 2 pieces"):
        read_model(tmp_path, "spiece.model")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"model_type": "char"},
            "the model is neither Unigram nor BPE: convert it to tokenizer.json with the library that made",
        ),
        ({"model_type": "bpe", "user_defined_symbols": "book"}, "defined by its maker, such as 'book'; they are not"),
        ({"treat_whitespace_as_suffix": True}, "the model represents spaces in an unusual way"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    _, folder = write_model(tmp_path, **options)
    with pytest.raises(HeedfulError, match=expected):
        Tokenizer.load(folder)


BPE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"byte_fallback": True, "vocab_size": 500},
    {"normalization_rule_name": "identity"},
    {"split_by_whitespace": False},
    {"add_dummy_prefix": False, "remove_extra_whitespaces": False},
]


@pytest.mark.parametrize("pool", [COMMON, LATIN, WIDE, ANY], ids=["common", "latin", "wide", "any"])
@pytest.mark.parametrize("options", BPE_OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_bpe_ids_equal_sentencepiece_on_random_text(tmp_path: Path, options: dict[str, Any], pool: str) -> None:
    reference, folder = write_model(tmp_path, model_type="bpe", **options)
    tokenizer, rng = load_without_family(folder), random.Random(pool)
    for _ in range(500):
        text = "".join(rng.choice(pool) for _ in range(rng.randrange(30)))
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text
        if "byte_fallback" in options and "▁" not in text:  # SentencePiece decodes ▁ as a space
            assert tokenizer.decode(tokenizer.encode(text).ids) == reference.decode(reference.encode(text)), text
    for text in (*TEXTS[:50], "", " ", "   a   b ", "▁", "\n"):
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text
        if text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text).ids) == reference.decode(reference.encode(text))


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True, "vocab_size": 500}])
def test_user_defined_symbols(tmp_path: Path, options: dict[str, Any]) -> None:
    """Like the punctuation of XLNet, they are always tokens, and no space is added after them."""
    reference, folder = write_model(tmp_path, user_defined_symbols="the,a,.,–,£", **options)
    tokenizer, rng = load_without_family(folder), random.Random(2)
    for _ in range(500):
        text = "".join(rng.choice("the b a.–£ c3") for _ in range(rng.randrange(30)))
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text


def with_unused(data: bytes, piece: str) -> bytes:
    """A model file with one normal piece marked as unused."""
    text = piece.encode()
    start = data.index(b"\x0a" + bytes([len(text)]) + text + b"\x15")  # start of the protobuf entry of the piece
    length = data[start - 1]
    entry, rest = data[start : start + length], data[start + length :]
    type_unused = b"\x18\x05"
    return data[: start - 1] + bytes([length + len(type_unused)]) + entry + type_unused + rest


def test_unused_pieces_are_not_used(tmp_path: Path) -> None:
    data = with_unused(train_sentencepiece(), "ook")
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    (tmp_path / "spiece.model").write_bytes(data)
    tokenizer = load_without_family(tmp_path)
    assert tokenizer.id("ook") not in tokenizer.encode("the book").ids
    for text in TEXTS[:100]:
        assert list(tokenizer.encode(text).ids) == reference.encode(text), text
    (tmp_path / "spiece.model").write_bytes(with_unused(train_sentencepiece(model_type="bpe"), "ook"))
    with pytest.raises(HeedfulError, match="is BPE with pieces that are unused or defined by its maker, such as 'ook'"):
        Tokenizer.load(tmp_path)


LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {  # family -> class of transformers, file, options of training
    "xlm-roberta": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", {}),
    "camembert": ("CamembertTokenizer", "sentencepiece.bpe.model", {}),
    "bert": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", {}),  # multilingual MiniLM and E5
    "new": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", {}),
    "jina_embeddings_v3": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", {}),
    "albert": ("AlbertTokenizer", "spiece.model", SPECIAL["albert"]),
    "xlnet": ("XLNetTokenizer", "spiece.model", SPECIAL["xlnet"]),
    "t5": ("T5Tokenizer", "spiece.model", SPECIAL["t5"]),
    "deberta-v2": (
        "DebertaV2Tokenizer",
        "spm.model",
        {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
        | {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    ),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_ids_equal_transformers(tmp_path: Path, family: str) -> None:
    """Heedful and transformers read only the model file; texts, pairs and texts with a mask are compared."""
    name, file, options = LAYOUTS[family]
    (tmp_path / file).write_bytes(train_sentencepiece(**options))
    tokenizer = Tokenizer.load(tmp_path, FAMILIES[family].tokenizer_defaults)
    reference = getattr(transformers, name).from_pretrained(tmp_path)
    texts = [*TEXTS[:100], "", "  two  spaces ", "naïve CAFÉ — “quoted”", "unseen: 漢字 ☃", "line\nbreak\ttab"]
    if family != "deberta-v2":  # transformers reads this file without its character map
        texts += ["２０２３ ﬁne"]
    if reference.mask_token:
        texts += [f"Ada reads the {reference.mask_token}.", f"{reference.mask_token} reads"]
        assert tokenizer.special.mask == reference.mask_token_id
    for text in texts:
        assert list(tokenizer.encode(text).ids) == reference(text)["input_ids"], text
    for pair in zip(texts, filter(None, reversed(texts)), strict=False):
        assert list(tokenizer.encode(pair).ids) == reference(*pair)["input_ids"], pair
    assert tokenizer.size == len(reference)
    assert tokenizer.special.pad == reference.pad_token_id


def test_unexpected_first_pieces_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(train_sentencepiece(**SPECIAL["t5"]))
    with pytest.raises(
        HeedfulError, match=r"begins with \['<pad>', '</s>', '<unk>'\]; the family of its model expects"
    ):
        Tokenizer.load(tmp_path, FAMILIES["xlm-roberta"].tokenizer_defaults)


def test_defaults_of_another_file_are_not_used(tmp_path: Path) -> None:
    _, folder = write_model(tmp_path)
    with pytest.warns(HeedfulWarning, match=r"spiece\.model does not name the special tokens around a text"):
        tokenizer = Tokenizer.load(folder, FAMILIES["bert"].tokenizer_defaults)
    assert tokenizer.id("<mask>") is None

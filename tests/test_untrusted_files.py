"""Files of a model folder from an untrusted source: links must not leave it, sizes are bounded, errors are short."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import heedful
from heedful.checkpoint import sentence_transformers
from heedful.errors import MAX_MESSAGE, HeedfulError, quoted
from heedful.model.config import SentenceEmbedding
from heedful.tokenizer import Tokenizer
from heedful.untrusted_files import MAX_VALUES, check_inside, check_name, parse_json, read_bytes, size_limit
from tests.support.sentencepiece_models import train_sentencepiece
from tests.support.tiny_models import save_tiny
from tests.support.tokenizer_folders import ANGLE_BRACKET_TOKENS, wordpieces, write_byte_level, write_wordpiece


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved sentence embedding, with all the files that Heedful writes; not to be changed."""
    folder = tmp_path_factory.mktemp("folder")
    save_tiny(folder / "theirs", "bert", "BertModel", num_hidden_layers=1, vocab_size=200)
    loaded = heedful.load(folder / "theirs")
    heedful.save(loaded, folder / "model")
    sentence_transformers.write_modules(
        folder / "model", SentenceEmbedding(normalise=True, max_length=16, similarity="dot"), 32
    )
    (folder / "model" / "3_Empty").mkdir()
    Tokenizer.load(write_wordpiece(folder / "words", wordpieces())).save(folder / "model")
    return folder / "model"


def move_out(folder: Path, name: str, outside: Path) -> None:
    """Move a file or folder out of its folder, and put a link to it in its place."""
    shutil.move(folder / name, outside / "moved")
    os.symlink(outside / "moved", folder / name)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "heedful.json", "modules.json"),
        *("1_Pooling", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
        "model.safetensors",
    ],
)
def test_a_model_file_must_not_link_out_of_its_folder(name: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    heedful.load(folder)
    move_out(folder, name, tmp_path)
    with pytest.raises(HeedfulError, match="lies outside the folder") as error:
        heedful.load(folder)
    assert str(folder) in str(error.value)


def write_wordpiece_files(folder: Path) -> None:
    write_wordpiece(folder, wordpieces(), json.dumps({"do_lower_case": True}))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "added_tokens.json").write_text("{}")


def write_byte_level_files(folder: Path) -> None:
    write_byte_level(folder, ANGLE_BRACKET_TOKENS)


def write_sentencepiece_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "spiece.model").write_bytes(train_sentencepiece())


@pytest.mark.filterwarnings("ignore:.*does not name the special tokens")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        *(
            (write_wordpiece_files, name)
            for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        ),
        *((write_byte_level_files, name) for name in ("vocab.json", "merges.txt")),
        (write_sentencepiece_file, "spiece.model"),
    ],
)
def test_a_tokenizer_file_must_not_link_out_of_its_folder(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    make(tmp_path / "tokenizer")
    Tokenizer.load(tmp_path / "tokenizer")
    move_out(tmp_path / "tokenizer", name, tmp_path)
    with pytest.raises(HeedfulError, match="lies outside the folder"):
        Tokenizer.load(tmp_path / "tokenizer")


def test_targets_of_links_are_not_published(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("-----BEGIN KEY-----\nsecret\n")
    save_tiny(tmp_path / "model", "bert", "BertModel", num_hidden_layers=1)
    (tmp_path / "model" / "vocab.txt").symlink_to("../key")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"unk_token": "-----BEGIN KEY-----"}')
    with pytest.raises(HeedfulError, match=r"'vocab\.txt' lies outside the folder"):
        heedful.load(tmp_path / "model")


def test_links_inside_the_folder_and_into_the_hubs_blobs_are_followed(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        target = snapshot / path.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / f"blob{number}")
        target.symlink_to(os.path.relpath(blobs / f"blob{number}", target.parent))
    assert heedful.load(snapshot).config.head == heedful.load(model).config.head
    inside = Path(shutil.copytree(model, tmp_path / "inside"))
    (inside / "tokenizer.json").rename(inside / "renamed")
    (inside / "tokenizer.json").symlink_to("renamed")
    (tmp_path / "link").symlink_to("inside")
    assert heedful.load(tmp_path / "link").tokenizer is not None


@pytest.mark.parametrize(
    "path",
    ["a\0b", "\ud800", "a\nb", "a/../../b", "..", "/etc", "1_Pooling/" * 50, "x" * 300, "\x1b[2J", "\u202e"],
)
def test_a_module_path_outside_the_folder_is_refused(path: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(HeedfulError, match="the path of the pooling module cannot be used") as error:
        heedful.load(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1_000
    modules[0]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(HeedfulError, match="keeps the Transformer in") as error:
        heedful.load(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1_000


@pytest.mark.parametrize(
    "modules",
    [
        [{"type": "x" * 500_000, "path": ""}] * 2,
        [{"type": f"\x1b\ud800{number}", "path": ""} for number in range(10_000)],
        [3],
        3,
        {"type": "x"},
        None,
    ],
)
def test_an_invalid_modules_file_is_refused_briefly(modules: object, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(HeedfulError, match=r"modules\.json") as error:
        heedful.load(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1_200


@pytest.mark.parametrize(
    "pooling",
    [["mean"] * 100_000, ["mean", "mean"], ["mean", 3], [["mean"]], [], 3, "\ud800", "x" * 500_000, {"mean": True}],
)
def test_an_invalid_pooling_is_refused_briefly(pooling: object, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    with pytest.raises(HeedfulError, match=r"the pooling is .*expected some of .*, each of them once") as error:
        heedful.load(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1_000


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("config.json", {"model_type": "x" * 500_000}),
        ("config.json", {"architectures": ["x" * 500_000]}),
        ("config.json", {"\x1b" * 200_000: 1}),
        ("config.json", {f"key{number}" * 10: 1 for number in range(10_000)}),
        ("config.json", {"hidden_act": "x" * 500_000}),
        ("config.json", {"hidden_size": "x" * 500_000}),
        ("heedful.json", {"tokenizer": "x" * 500_000}),
        ("heedful.json", {"thresholds": "x" * 500_000}),
        ("tokenizer_config.json", {"pad_token": {"content": ["x" * 500_000]}}),
        ("tokenizer_config.json", {"model_max_length": "x" * 500_000}),
        ("tokenizer.json", {"model": {"type": "x" * 500_000}}),
    ],
)
def test_an_error_does_not_quote_a_whole_file(file: str, value: dict[str, object], model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(known | value))
    with pytest.raises(HeedfulError) as error:
        heedful.load(folder)
    assert len(str(error.value)) < 1.1 * MAX_MESSAGE


def test_messages_and_quotes_are_cut() -> None:
    message = str(HeedfulError("a" * 10_000 + "b" * 10_000))
    assert message.startswith("aaa") and message.endswith("bbb") and "[... 16000 characters left out ...]" in message
    assert str(HeedfulError("short")) == "short" and quoted("short") == "'short'"
    assert quoted("\x1b" * 10**6) == "'" + r"\x1b" * 19 + r"\x1" + "…"
    assert len(quoted(list(range(1000)))) == 81


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "../a", "/a", "./a", "a//b", "a/", "a\0", "\ud800", "x" * 201]
)
def test_names_outside_the_folder_are_refused(name: str, tmp_path: Path) -> None:
    for check in (check_name, check_inside, read_bytes):
        with pytest.raises(HeedfulError, match="lies outside the folder"):
            check(tmp_path, name)
    with pytest.raises(HeedfulError, match="lies outside the folder"):
        check_inside(tmp_path, "a/b")


def test_sizes_and_kinds_of_files_are_bounded(tmp_path: Path) -> None:
    limits = ("config.json", "any.json", "1_Pooling/config.json", "vocab.txt", "spiece.model")
    assert [size_limit(name) >> 20 for name in limits] == [1, 1, 1, 64, 64]
    (tmp_path / "config.json").write_bytes(b" " * (1 << 20))
    assert len(read_bytes(tmp_path, "config.json")) == 1 << 20
    with pytest.raises(HeedfulError, match="has 1048576 bytes; at most 9 are read"):
        read_bytes(tmp_path, "config.json", max_bytes=9)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path, "nothing.json")
    os.mkfifo(tmp_path / "vocab.txt")
    (tmp_path / "vocab.json").mkdir()
    for name in ("vocab.txt", "vocab.json"):
        with pytest.raises(HeedfulError, match="is no plain file"):
            read_bytes(tmp_path, name)
    with pytest.raises(HeedfulError, match="no tokenizer in"):
        Tokenizer.load(tmp_path)


def test_values_of_json_are_counted_before_it_is_parsed(tmp_path: Path) -> None:
    assert parse_json(b"[1, {}]", tmp_path) == [1, {}]
    with pytest.raises(HeedfulError, match=f"JSON values; at most {MAX_VALUES} are read"):
        parse_json(b"[" + b"0," * MAX_VALUES + b"0]", tmp_path)

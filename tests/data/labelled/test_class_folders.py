"""Labels that are names of files or folders, in the published layouts of SUBJ, IMDB and 20 Newsgroups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heedful.data import Dataset, DataSettings, LabelledExample, ScoredExample, Skip, check, read
from heedful.data.labelled.split_files import parse_data_arguments
from heedful.errors import HeedfulError
from heedful.runs.overrides import override

PLAIN = DataSettings(dev_fraction=0.0)


def write_files(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def rows(dataset: Dataset[Any], split: str = "train") -> list[tuple[str, str]]:
    return [(example.label, example.text) for example in dataset.examples(split)]


SUBJ = {
    "plot.tok.gt9.5000": "a cat finds a map .\nthe map is old .\n\n",
    "quote.tok.gt9.5000": "a fine film .\n",
}
SUBJ_ROWS = [("plot", "a cat finds a map ."), ("plot", "the map is old ."), ("quote", "a fine film .")]


@pytest.mark.parametrize("kind", [None, LabelledExample])
def test_a_file_for_each_class(tmp_path: Path, kind: Any) -> None:
    folder = write_files(tmp_path / "subj", SUBJ | {"README": "about"})
    for paths in (folder, [folder / name for name in SUBJ]):
        dataset = read(paths, kind, PLAIN)
        assert rows(dataset) == SUBJ_ROWS and dataset.labels == ("plot", "quote")
        assert "a text on each line, its label the name of the file (format=class-files)" in dataset.stated
    second = list(dataset.examples("train"))[1]
    assert (second.file, second.line) == (str(folder / "plot.tok.gt9.5000"), 2)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["rt-polarity.pos", "rt-polarity.neg"], ("neg", "pos")),
        (["alt.atheism.txt", "comp.graphics.txt"], ("alt.atheism", "comp.graphics")),
        (["spam.txt", "not-spam.txt"], ("not-spam", "spam")),
        (["pos-train.txt", "neg-train.txt", "pos-test.txt", "neg-test.txt"], ("neg", "pos")),
        (["train/pos.txt", "train/neg.txt", "test/pos.txt", "test/neg.txt"], ("neg", "pos")),
    ],
)
def test_the_label_is_the_part_that_differs_between_file_names(
    tmp_path: Path, names: list[str], labels: tuple[str, ...]
) -> None:
    folder = write_files(tmp_path / "data", {name: f"text of {name}\n" for name in names})
    dataset = read(folder, LabelledExample, PLAIN)
    assert dataset.labels == labels
    assert len(rows(dataset)) == 2
    if "test" in dataset.splits:
        assert sorted(label for label, _ in rows(dataset, "test")) == ["neg", "pos"]


def test_files_with_labels_or_columns_are_not_class_files(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "a", {"one.txt": "__label__x a\n", "two.txt": "__label__y b\n"})
    assert rows(read([folder / "one.txt", folder / "two.txt"], LabelledExample, PLAIN)) == [("x", "a"), ("y", "b")]
    folder = write_files(tmp_path / "b", {"one": "Ada B-PER\n\nhere O\n", "two": "Ada B-PER\n"})
    assert len(list(read([folder / "one", folder / "two"], None, PLAIN).examples("train"))) == 3
    with pytest.raises(HeedfulError, match="has no file for train"):
        read(write_files(tmp_path / "c", {"one.csv": "a,b\n", "two.csv": "c,d\n"}), None, PLAIN)


IMDB: dict[str, str | bytes] = {
    "README": "about",
    "imdb.vocab": "a\nfilm\n",
    "train/urls_pos.txt": "http://a\n",
    "train/unsup/0_0.txt": "nobody knows",
    "train/pos/0_9.txt": "a fine film<br />truly",
    "train/pos/1_7.txt": "good",
    "train/neg/0_3.txt": "bad",
    "test/urls_pos.txt": "http://b\n",
    "test/pos/0_10.txt": "better",
    "test/neg/0_2.txt": "worse\n",
}


def test_a_folder_for_each_class_in_folders_for_splits(tmp_path: Path) -> None:
    dataset = read(write_files(tmp_path / "aclImdb", IMDB), None, PLAIN)
    assert rows(dataset) == [("neg", "bad"), ("pos", "a fine film<br />truly"), ("pos", "good")]
    assert rows(dataset, "test") == [("neg", "worse"), ("pos", "better")]
    assert dataset.labels == ("neg", "pos")
    assert "a text in each file, its label the name of the folder (format=class-folders)" in dataset.stated
    assert any("not used: unsup, urls_pos.txt" in note for note in dataset.stated)
    assert any("not used: imdb.vocab" in note for note in dataset.stated)
    test_folder = read(tmp_path / "aclImdb" / "test", None, PLAIN)
    assert rows(test_folder) == rows(dataset, "test")
    arguments = [Path(f"{split}={tmp_path / 'aclImdb' / split}") for split in ("train", "test")]
    split_folders = read(parse_data_arguments(arguments), None, PLAIN)
    assert rows(split_folders) == rows(dataset)
    assert rows(split_folders, "test") == rows(dataset, "test")
    classes = [tmp_path / "aclImdb/train" / name for name in ("neg", "pos")]
    assert rows(read(classes, None, PLAIN)) == rows(dataset)


NEWS = {
    "20news-bydate-train/alt.atheism/49960": "From: a@b.c\nSubject: Re: tea\n\n> quoted\nAn answer.\r\n\n",
    "20news-bydate-train/comp.graphics/37261": "From: d\n\ncaf\u00e9\n".encode("latin-1"),
    "20news-bydate-test/alt.atheism/53068": "From: e\n\nwhy\n",
    "20news-bydate-test/comp.graphics/38758": "From: f\n\nhow\n",
}


def test_newsgroups_in_latin_1(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "news", NEWS)
    settings = DataSettings(dev_fraction=0.0, encoding="latin-1")
    dataset = read(folder, None, settings)
    assert rows(dataset) == [
        ("alt.atheism", "From: a@b.c\nSubject: Re: tea\n\n> quoted\nAn answer."),
        ("comp.graphics", "From: d\n\ncaf\u00e9"),
    ]
    assert dataset.splits == ("train", "test")
    split_folders = [folder / "20news-bydate-train", folder / "20news-bydate-test"]
    assert rows(read(split_folders, None, settings), "test") == rows(dataset, "test")
    assert read(folder, None, override(settings, ["label_until=."])).labels == ("alt", "comp")
    with pytest.raises(HeedfulError, match=r"37261:3:.* byte 0xe9 is not valid utf-8"):
        rows(read(folder, None, PLAIN))
    skipped = read(folder, None, PLAIN, on_bad_row=Skip())
    assert len(rows(skipped)) == 1 and sum(skipped.row_errors.bad.values()) == 1


def test_errors_of_class_folders(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "a", {"x/1.txt": "a", "x/deep/2.txt": "b", "y/1.txt": "c"})
    with pytest.raises(HeedfulError, match=r"x: holds the folder deep; expected only files"):
        rows(read(folder, None, PLAIN))
    with pytest.raises(
        HeedfulError, match="labels are the names of classes, but this task needs a text, or two, with a n"
    ):
        read(folder, ScoredExample, DataSettings(format="class-folders"))
    with pytest.raises(HeedfulError, match="has no files of classes: give their folder"):
        read(folder, None, DataSettings(format="class-files"))
    with pytest.raises(HeedfulError, match=r"no column for columns\.text"):
        read(folder, None, DataSettings(columns={"text": 1}))
    folder = write_files(tmp_path / "b", {"train/x/1": "a", "train/y/1": "b", "test/x/1": "c", "test/z/1": "d"})
    with pytest.raises(HeedfulError, match=r'z/1:1: the label "z" is not among those that come with train: "x", "y"'):
        rows(read(folder, None, PLAIN), "test")
    folder = write_files(tmp_path / "c", {"x/1": "a\nb\n", "x/2": "c d e f\0", "x/3": "", "y/1": "d" * 90})
    (folder / "y/2").write_bytes("a text".encode("utf-16-le"))
    dataset = read(folder, None, DataSettings(dev_fraction=0.0, max_row_bytes=80), on_bad_row=Skip())
    assert rows(dataset) == [("x", "a\nb"), ("x", "")]
    nul, too_long, utf_16 = (str(bad_row).rpartition("c/")[2] for bad_row in dataset.row_errors.first)
    assert nul == "x/2:1:8: holds a NUL character: the file is damaged or no text"
    assert too_long == "y/1:1: is longer than 80 bytes, the most that a row may have"
    assert utf_16.startswith("y/2:1: every few bytes are zero: if this is UTF-16")


def test_folders_that_do_not_look_like_classes(tmp_path: Path) -> None:
    for files in (
        {"model/config.json": "{}", "plots/a.png": "x"},
        {"a/b.csv": "text,label\n", "c/d.csv": "text\n"},
        {},
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with pytest.raises(HeedfulError, match="has no file for train, dev or test"):
            read(write_files(folder, files), None, PLAIN)


def test_a_folder_of_code_is_not_read_as_classes(tmp_path: Path) -> None:
    code = {"src/a.py": "a", "tests/b.py": "b", "Makefile": "all:", "setup.toml": "x"}
    with pytest.raises(HeedfulError, match=r"say --data\.format=class-folders or class-files"):
        read(write_files(tmp_path / "a", code), None, PLAIN)
    assert read(tmp_path / "a", None, DataSettings(format="class-folders", dev_fraction=0.0)).labels == ("src", "tests")
    assert read(tmp_path / "a", None, DataSettings(format="class-files", dev_fraction=0.0)).labels == (
        "Makefile",
        "setup.toml",
    )
    mail = write_files(tmp_path / "b", {"spam/0001.7c5": "a", "ham/0002.8d6": "b"})
    assert read(mail, None, DataSettings(format="class-folders", dev_fraction=0.0)).labels == ("ham", "spam")


def test_files_named_after_splits_take_precedence_over_folders(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "a", {"train.csv": "text,label\na,x\n", "x/1.txt": "b", "y/1.txt": "c"})
    assert rows(read(folder, None, PLAIN)) == [("x", "a")]
    assert rows(read(folder, None, DataSettings(dev_fraction=0.0, format="class-folders"))) == [("x", "b"), ("y", "c")]


def test_check_of_class_folders(tmp_path: Path) -> None:
    report = check(read(write_files(tmp_path / "aclImdb", IMDB), None, PLAIN))
    assert report.splits["train"].labels == {"neg": 1, "pos": 2}
    assert report.splits["train"].places["markup like <br /> or &amp;"] == ("pos/0_9.txt",)


GROWTH = """
import resource, sys
from pathlib import Path
from heedful.data import DataSettings, read
dataset = read(Path(sys.argv[1]), settings=DataSettings(dev_fraction=0.0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in dataset.examples("train"))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files_of_a_class(tmp_path: Path) -> None:
    for label in ("one", "two"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(10_000):
            (tmp_path / "data" / label / f"{number}.txt").write_text("a word " * 1000)
    result = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "data")], capture_output=True, text=True, check=True, timeout=300
    )
    count, growth_in_mb = map(int, result.stdout.split())
    assert count == 20_000 and growth_in_mb < 30, "the texts have 140 MB"

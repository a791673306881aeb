"""Tables in CSV, TSV, JSON, Parquet and in memory, and the ways in which a row can be bad."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from heedful.data import (
    Dataset,
    DataSettings,
    LabelledExample,
    MultiLabelExample,
    Quarantine,
    ScoredExample,
    Skip,
    read,
)
from heedful.errors import HeedfulError


def write_file(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def rows(dataset: Dataset[Any], split: str = "train") -> list[Any]:
    """The line, the texts and the target of every example of a split."""
    return [(example.line, *example.texts, example.target) for example in dataset.examples(split)]


def write_and_read(path: Path, content: str | bytes, **settings: Any) -> Dataset[Any]:
    """Write a file and read all of it as train, without its bad rows."""
    return read(write_file(path, content), settings=DataSettings(dev_fraction=0.0, **settings), on_bad_row=Skip())


def error_texts(dataset: Dataset[Any]) -> list[str]:
    """The errors of the bad rows, without the path of the file."""
    return [str(bad_row).removeprefix(f"{bad_row.file}:") for bad_row in dataset.row_errors.first]


TABLE = [(2, 'a, "b"', "x"), (3, "c\nd", "y"), (5, "", "x")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv(tmp_path: Path, end: str) -> None:
    dataset = write_and_read(tmp_path / "a.csv", f'text,label{end}"a, ""b""",x{end}"c{end}d",y{end},x{end}')
    assert rows(dataset) == [(line, text.replace("\n", end), label) for line, text, label in TABLE]
    assert dataset.kind is LabelledExample
    assert dataset.stated == (
        "each example is a text, or two, with one label",
        'columns: text="text", label="label"',
        'labels in order: "x", "y"',
    )


def test_quotes_in_tsv_are_literal(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.tsv", 'sentence\tlabel\n"open\t1\n\n a "" b\t0\n')
    assert rows(dataset) == [(2, '"open', "1"), (4, ' a "" b', "0")]
    assert "a.tsv: quotes are read literally" in dataset.stated
    dataset = write_and_read(tmp_path / "a.tsv", 'sentence\tlabel\n"a\tb"\t1\n', quoting="quoted")
    assert rows(dataset) == [(2, "a\tb", "1")]


def test_semicolons(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.csv", "text;label\na, b;1\n")
    assert rows(dataset) == [(2, "a, b", "1")]
    assert "a.csv: cells are separated by semicolons" in dataset.stated
    assert rows(write_and_read(tmp_path / "a.csv", "text|label\na, b|1\n", delimiter="|")) == [(2, "a, b", "1")]


def test_json_lines_and_lists(tmp_path: Path) -> None:
    values = [{"text": "a", "label": 1}, {"label": True, "text": "b"}, {"text": "c", "label": 2.0}]
    json_lines = "\n\n".join(map(json.dumps, values))
    expected = [("a", "1"), ("b", "true"), ("c", "2")]
    for name, data in [
        ("a.jsonl", json_lines),
        ("b.json", json_lines),
        ("c.json", json.dumps(values)),
        ("d.json", json.dumps({"version": 1, "data": values}, indent=1)),
    ]:
        assert [row[1:] for row in rows(write_and_read(tmp_path / name, data))] == expected


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["a", None, "c"] * 300, "label": [1, 0, 1] * 300})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = read(tmp_path / "a.parquet", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert rows(dataset)[:2] == [(1, "a", "1"), (3, "c", "1")]
    assert len(rows(dataset)) == 600
    assert error_texts(dataset)[0] == "2:text: is missing"
    features_metadata = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features_metadata)})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    dataset = read(tmp_path / "b.parquet", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert (rows(dataset)[0], dataset.labels) == ((1, "a", "pos"), ("neg", "pos"))
    with pytest.raises(HeedfulError, match=r"c\.parquet: is no Parquet file that can be read"):
        read(write_file(tmp_path / "c.parquet", "text,label"))
    (tmp_path / "d.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-40])
    with pytest.raises(HeedfulError, match=r"d\.parquet: is no Parquet file"):
        read(tmp_path / "d.parquet")


def test_parquet_bomb(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [str(number % 7) + "x" * 50_000 for number in range(500)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(HeedfulError, match="unpacks to more than 100 times its size"):
        read(tmp_path / "a.parquet")


def test_a_parquet_dictionary_that_expands_too_much_is_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    count = 20_000
    indices = pyarrow.array([0] * count, pyarrow.int32())  # every row is the one text of the dictionary
    text = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x y " * 2_500]))
    for name, column in (("a.parquet", text), ("b.parquet", text.cast(pyarrow.string()))):
        pyarrow.parquet.write_table(pyarrow.table({"text": column, "label": ["a"] * count}), tmp_path / name)
        dataset = read(tmp_path / name, settings=DataSettings(dev_fraction=0.0))
        with pytest.raises(HeedfulError, match=r"100 times its size \(10,\d+,\d+ characters up to row 1,\d+\)"):
            sum(1 for _ in dataset.examples("train"))


@pytest.mark.parametrize("line", ["\n", "a,b\n"])
def test_an_unclosed_quote_over_many_short_lines_is_refused(tmp_path: Path, line: str) -> None:
    with lzma.open(tmp_path / "a.csv.xz", "wb") as file:
        file.write(b'text,label\n"open' + line.encode() * 300_000)
    with pytest.raises(HeedfulError, match=r"a\.csv\.xz:2: has more than 100,000 lines: is a quote not closed"):
        read(tmp_path / "a.csv.xz", LabelledExample)


def test_plain_text(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.txt", "one\n\n  \ntwo\u2028 still two\r\n")
    assert [(example.line, example.text) for example in dataset.examples("train")] == [
        (1, "one"),
        (4, "two\u2028 still two"),
    ]
    assert "one text on each line; empty lines are left out" in dataset.stated


# ---------------------------------------------------------------------------------------------------- bad rows


@pytest.mark.parametrize(
    ("data", "message", "left"),
    [
        ("text,label\na,1\nb\nc,2\n", "3: has 1 cells, expected 2 as in line 1; a , inside a text needs quotes", "ac"),
        ("text,label\na,1\nb,c,2\nc,2", "3: has 3 cells, expected 2 as in line 1", "ac"),
        ('text,label\na,1\n"b,2\nc,2\n', "3: a quote that opens in this line is not closed before the file ends", "ac"),
        ('text,label\na,1\n"b"x,2\nc,2\n', "3: is not CSV: ',' expected after '\"' (a quote inside a quoted", "ac"),
        ('text,label\n"a\na"x,1\nc,2\n', "2: the row of the lines 2 to 3: is not CSV: ',' expected", "c"),
        ("text,label\na,1\nb\rb,2\nc,2\n", "3: is not CSV: new-line character seen in unquoted field", "ac"),
        (b"text,label\na,1\nb\0,2\nc,2\n", "3:2: holds a NUL character", "ac"),
        (b'text,label\na,1\n"b\nb\xff",2\nc,2\n', "3: the row of the lines 3 to 4: byte 0xff is not valid", "ac"),
        (b'text,label\na,1\n"b\xff\nb\n",2\nc,2\n', "3: the row of the lines 3 to 5: byte 0xff is not valid", "ac"),
        (b'text,label\na,1\n"b\0\nb",2\nc,2\n', "3: the row of the lines 3 to 4: holds a NUL character", "ac"),
        (b'text,label\na,1\n"\xff,2\nc,2\n', "3:2: byte 0xff is not valid utf-8", "ac"),
        (b"text,label\na,1\n\xe9,2\nc,2\n", "3:1: byte 0xe9 is not valid utf-8: invalid continuation byte; if", "ac"),
        ("text,label\na,1\nb,\nc,2\n", "3:label: is empty, expected a label", "ac"),
    ],
)
def test_bad_csv(tmp_path: Path, data: str | bytes, message: str, left: str) -> None:
    dataset = write_and_read(tmp_path / "a.csv", data)
    assert "".join(row[1] for row in rows(dataset)) == left
    assert len(error_texts(dataset)) == 1
    assert error_texts(dataset)[0].startswith(message)
    rows(dataset)
    assert dataset.row_errors.bad == {str(tmp_path / "a.csv"): 1}, "a bad row that is read again is counted once"
    with pytest.raises(HeedfulError) as error:
        rows(read(tmp_path / "a.csv", settings=DataSettings(dev_fraction=0.0)))
    assert str(error.value).startswith(f"{tmp_path / 'a.csv'}:{message}")
    assert str(error.value).endswith("(correct it, or skip such rows: --on-bad-row skip)")


def test_an_unclosed_quote_costs_one_row(tmp_path: Path) -> None:
    body = "".join(f"text {number},{number % 2}\n" for number in range(1000))
    dataset = write_and_read(tmp_path / "a.csv", 'text,label\n"open,1\n' + body, max_row_bytes=300)
    assert len(rows(dataset)) == 1000
    assert error_texts(dataset) == ["2: is longer than 300 characters: is a quote not closed?"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "b", "label": }', "2:24: is not valid JSON: Expecting value"),
        ('{"text": "b"', "2:13: is not valid JSON: Expecting ',' delimiter"),
        ('["b", 1]', '2: is ["b", 1], expected a JSON object'),
        ('{"text": 5, "label": 1}', "2:text: is 5, expected text"),
        ('{"text": null, "label": 1}', "2:text: is missing"),
        ('{"label": 1}', "2:text: is missing"),
        ('{"text": "b", "label": [1]}', "2:label: is [1], expected text"),
        ('{"text": "b", "label": NaN}', "2:label: is NaN, expected text"),
        ('{"text": "b \\ud83d", "label": 1}', "2:text: has half of a surrogate pair at character 3"),
        ("[" * 100_000, "2: is not valid JSON"),
        ('{"text": "b", "label": ' + "1" * 5000 + "}", "2: is not valid JSON: Exceeds the limit"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    good = '{"text": "a", "label": 1}\n'
    dataset = write_and_read(tmp_path / "a.jsonl", good + line + "\n" + good)
    assert [row[0] for row in rows(dataset)] == [1, 3]
    assert len(error_texts(dataset)) == 1
    assert error_texts(dataset)[0].startswith(message)


def test_bad_json_list(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.json", '[{"text": "a"}, 5, {"text": 6}, {"text": "b"}]')
    assert [example.text for example in dataset.examples("train")] == ["a", "b"]
    assert error_texts(dataset) == ["1:[1]: is 5, expected a JSON object", "1:text: is 6, expected text"]


def test_scores_and_several_labels(tmp_path: Path) -> None:
    data = "text,score\na,1.5\nb,high\nc,nan\nd, 2 \ne,\n"
    dataset = write_and_read(tmp_path / "a.csv", data)
    assert dataset.kind is ScoredExample
    assert [example.score for example in dataset.examples("train")] == [1.5, 2.0]
    assert error_texts(dataset) == [
        '3:score: is "high", expected a number',
        '4:score: is "nan", expected a number',
        '6:score: is "", expected a number',
    ]
    dataset = write_and_read(tmp_path / "b.jsonl", '{"text": "a", "labels": ["x", "y"]}\n{"text": "b", "labels": []}')
    assert dataset.kind is MultiLabelExample
    assert [example.labels for example in dataset.examples("train")] == [("x", "y"), ()]
    columns = {"labels": ("rude", "odd")}
    dataset = write_and_read(tmp_path / "c.csv", "text,rude,odd\na,1,0\nb,1,1\nc,2,0\n", columns=columns)
    assert [example.labels for example in dataset.examples("train")] == [("rude",), ("rude", "odd")]
    assert error_texts(dataset) == ['4:rude: is "2", expected 0 or 1']
    dataset = read(
        write_file(tmp_path / "d.csv", "text,labels\na,x|y\nb,\n"), MultiLabelExample, DataSettings(dev_fraction=0.0)
    )
    assert [example.labels for example in dataset.examples("train")] == [("x", "y"), ()]
    assert dataset.labels == ("x", "y")


def test_bad_rows_are_written_to_the_quarantine_file(tmp_path: Path) -> None:
    aside = tmp_path / "aside.jsonl"
    path = write_file(tmp_path / "a.csv", "text,label\na,1\nb\n" + "x" * 500 + "\nc,2\n")
    dataset = read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Quarantine(file=aside))
    assert len(rows(dataset)) == 2
    assert len(rows(dataset)) == 2, "the second reading must not write the bad rows again"
    bad_rows = [json.loads(line) for line in aside.read_text().splitlines()]
    assert [(error["line"], error["column"], error["text"]) for error in bad_rows] == [(3, "", "b"), (4, "", "x" * 200)]
    assert bad_rows[0]["file"] == str(tmp_path / "a.csv")
    assert bad_rows[0]["reason"].startswith("has 1 cells")
    with pytest.raises(HeedfulError, match=r"aside\.jsonl: exists already; give a new file for bad rows"):
        rows(read(tmp_path / "a.csv", on_bad_row=Quarantine(file=aside)))
    with pytest.raises(HeedfulError, match="bad rows cannot be written there: No such file or directory"):
        rows(read(tmp_path / "a.csv", on_bad_row=Quarantine(file=tmp_path / "no" / "aside.jsonl")))


def test_nothing_to_read(tmp_path: Path) -> None:
    for name, data, message in [
        ("a.csv", "", "is empty"),
        ("a.csv", "text,label\n", "has a header and no rows"),
        ("a.csv", "\n\n", "has no rows"),
        ("a.csv", "text,text,label\na,b,1\n", ':1: two columns are called "text"'),
        ("a.jsonl", "\n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '{"rows": 3}', "has no rows"),
        ("a.docx", "text", "the format is not known: the name should end in .csv"),
    ]:
        with pytest.raises(HeedfulError, match=message.replace(".", r"\.")):
            read(write_file(tmp_path / name, data))


class Features:
    """A stand-in for a feature of the `datasets` library, with the attributes that Heedful uses."""

    def __init__(self, names: list[str] | None = None, feature: Any = None) -> None:
        self.names, self.feature = names, feature


class Data:
    """A stand-in for a data set of the `datasets` library, with the attributes that Heedful uses."""

    def __init__(self, rows: list[Any], features: dict[str, Any] | None) -> None:
        self.rows, self.features = rows, features
        self.column_names = list(features or {})

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_data_sets_of_the_datasets_library(tmp_path: Path) -> None:
    features = {"text": Features(), "label": Features(["bad", "good"])}
    train = Data([{"text": "a", "label": 1}, {"text": "b", "label": 0}, {"text": "c", "label": 2}], features)
    hidden = Data([{"text": "a", "label": -1}], features)
    dataset = read({"train": train, "validation": train, "test": hidden}, on_bad_row=Skip())
    assert dataset.splits == ("train", "dev")
    assert dataset.labels == ("bad", "good"), "in the order of the features"
    assert rows(dataset) == [(1, "a", "good"), (2, "b", "bad")]
    assert error_texts(dataset) == ["3:label: is 2, expected 0 to 1"]
    assert "test: has no label, so it is left out" in dataset.stated
    assert 'the names of "label" come with the data' in dataset.stated
    tags = Features(feature=Features(["O", "B-PER", "I-PER"]))
    dataset = read(Data([{"tokens": ["Ada", "ran"], "ner_tags": [1, 0]}], {"tokens": Features(), "ner_tags": tags}))
    assert next(dataset.examples("train")).tags == ("B-PER", "O")
    dataset = read(Data([{"text": "a"}, 5], None), settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [example.text for example in dataset.examples("train")] == ["a"]
    assert error_texts(dataset) == ["2: is int, expected a mapping from columns to values"]
    with pytest.raises(HeedfulError, match="expected a folder, files, a frame"):
        read(5)


@pytest.mark.parametrize(
    "data",
    [
        '[{"text": "a", "label": "x"}]\n[{"text": "b", "label": "y"}]\n',
        '[{"text": "a", "label": "x"}] garbage',
        '{"data":\n[{"text": "a", "label": "x"}]}\n{"data": []}\n',
    ],
)
def test_text_after_the_json_value_is_an_error(tmp_path: Path, data: str) -> None:
    with pytest.raises(HeedfulError, match=r"a\.json:[123]:\d+: is not valid JSON: expected the end of the file"):
        list(write_and_read(tmp_path / "a.json", data, format="json").examples("train"))


def test_utf_16_without_a_byte_order_mark(tmp_path: Path) -> None:
    data = "text,label\na,x\n".encode("utf-16-le")
    with pytest.raises(HeedfulError, match=r"no byte order mark: say --data\.encoding=utf-16-le"):
        write_and_read(tmp_path / "a.csv", data, encoding="utf-16")
    assert len(list(write_and_read(tmp_path / "a.csv", data, encoding="utf-16-le").examples("train"))) == 1


def test_a_column_that_the_first_object_lacks(tmp_path: Path) -> None:
    data = '{"text": "a", "label": "x"}\n{"text": "b", "text2": "c", "label": "y"}\n'
    with pytest.raises(HeedfulError, match=r"a\.jsonl:1:text2: is missing"):
        list(read(write_file(tmp_path / "a.jsonl", data), settings=DataSettings(dev_fraction=0.0)).examples("train"))


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    """If it were accepted, one of its values would be lost without notice."""
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "a", "text": "b", "label": "x"}\n')
    with pytest.raises(HeedfulError, match=r'a.jsonl:2: .*an object has the key "text" twice'):
        list(read(tmp_path / "a.jsonl", settings=DataSettings(dev_fraction=0.0)).examples("train"))
    (tmp_path / "a.json").write_text('[{"text": "a", "label": "x", "label": "y"}]')
    with pytest.raises(HeedfulError, match='an object has the key "label" twice'):
        list(read(tmp_path / "a.json", settings=DataSettings(dev_fraction=0.0)).examples("train"))


def test_a_bad_byte_in_a_multi_line_row_makes_only_that_row_bad(tmp_path: Path) -> None:
    """The rest of that row, on the next line, is not read as another row."""
    dataset = write_and_read(tmp_path / "a.csv", b'text,label\n"caf\xe9 was\nthe rest",pos\n"ok",neg\n')
    assert rows(dataset) == [(4, "ok", "neg")]
    assert [bad_row.line for bad_row in dataset.row_errors.first] == [2]


def test_a_row_of_tsv_with_quoted_cells_says_how_to_read_it(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"a\tb"\tx\n')
    with pytest.raises(HeedfulError, match=r"if they wrap cells, say --data\.quoting=quoted"):
        rows(read(tmp_path / "a.tsv", settings=DataSettings(dev_fraction=0.0)))
    assert rows(write_and_read(tmp_path / "a.tsv", 'text\tlabel\n"a\tb"\tx\n', quoting="quoted")) == [(2, "a\tb", "x")]


def test_parquet_with_two_columns_of_one_name(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array([1])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text", "label"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(HeedfulError, match=r'a\.parquet: two columns are called "text"'):
        read(tmp_path / "a.parquet")


def test_a_number_with_underscores_is_not_a_number(tmp_path: Path) -> None:
    dataset = write_and_read(tmp_path / "a.csv", "text,score\na,1_000\nb,1000\n")
    assert [example.score for example in dataset.examples("train")] == [1000.0]
    assert error_texts(dataset) == ['2:score: is "1_000", expected a number']


def test_label_names_that_come_with_the_data(tmp_path: Path) -> None:
    """They must be the same set in every file, and the label of every row must be among them."""
    import pyarrow
    import pyarrow.parquet

    def write_parquet(name: str, *names: str) -> Path:
        about = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = pyarrow.table({"text": ["a", "b"], "label": [0, 1]})
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / f"{name}.parquet"
        )
        return tmp_path / f"{name}.parquet"

    path = write_parquet("a", "neg", "pos")
    other_names = write_parquet("b", "negative", "positive")
    other_order = write_parquet("c", "pos", "neg")
    with pytest.raises(
        HeedfulError, match=r'b\.parquet comes with the labels "negative", "positive", but .*a\.parquet'
    ):
        read([path, other_names])
    dataset = read([path, other_order], settings=DataSettings(dev_fraction=0.0))
    assert [example.label for example in dataset.examples("train")] == ["neg", "pos", "pos", "neg"]
    csv_path = write_file(tmp_path / "d.csv", "text,label\nc,pos\nd,good\n")
    for dev_fraction in (0.0, 1e-9):
        dataset = read([path, csv_path], settings=DataSettings(dev_fraction=dev_fraction), on_bad_row=Skip())
        assert [example.text for example in dataset.examples("train")] == ["a", "b", "c"]
        assert error_texts(dataset) == ['3: the label "good" is not among those that come with train: "neg", "pos"']

"""`heedful predict --file`: output, settings for reading files, errors, interruption, and several processes at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from heedful.cli import main, predict_files
from heedful.cli.predict_files import progress_line
from heedful.data import DataSettings
from heedful.data.inputs.input_files import settings_for_inputs
from heedful.infer.batch import BatchProgress
from tests.support.model_folders import make_model_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with three labels."""
    return make_model_dir(tmp_path_factory.mktemp("model"), "single")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `predict` in this process, in tmp_path, and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            main(["predict", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run_command


def write_rows(path: Path, count: int = 7) -> Path:
    """Write a CSV file with this number of rows, and return its path."""
    path.write_text("text,label\n" + "".join(f"the cat {number},x\n" for number in range(count)), encoding="utf-8")
    return path


def test_files_become_a_folder(run: Any, folder: Path, tmp_path: Path) -> None:
    one, two = write_rows(tmp_path / "one.csv"), write_rows(tmp_path / "two.csv", 3)
    with two.open("a") as file:
        file.write("a row with one cell\n")
    code, out, err = run(folder, "--file", one, two, "--rows", 4)
    assert code == 0 and "written" in out and "one-answers: 3 parts" in out
    assert '1 rows failed; see the column "error": two.csv:5: has 1 cells' in err
    assert 'one.csv: columns: text="text"; not used: "label"' in err
    table = pq.read_table(tmp_path / "one-answers")
    assert table.num_rows == 11 and table.column_names[:4] == ["file", "row", "line", "input"]
    code, out, err = run(folder, "--file", one, two, "--rows", 4)
    assert code == 0 and "(all existed already)" in out
    code, out, err = run(folder, "--file", one, "--rows", 4)
    assert code == 2 and "holds answers of another run: columns two.csv was" in err


def test_what_conll_output_lacks_is_printed(run: Any, tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tag", "tag")
    (tmp_path / "a.conll").write_text("Ada O\n\nb\0d O\n")
    code, _, err = run(model, "--file", "a.conll", "--output", "b.conll")
    assert code == 0 and '1 rows failed; their words have the tag "_": a.conll:3: 2: holds a NUL' in err
    assert "ends the file: a.conll:3-end" in err and (tmp_path / "b.conll").read_text().count("\n") == 2


def test_json_output_is_one_line(run: Any, folder: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.csv")
    arguments = ("--format", "jsonl", "--output", "out", "--without-inputs", "--data.columns.text=label", "--json")
    code, out, err = run(folder, "--file", file, *arguments)
    summary = json.loads(out)
    assert code == 0 and not err and (summary["rows"], summary["errors"], summary["folder"]) == (7, 0, "out")
    row = read_first_part(tmp_path / "out")[0]
    assert list(row) == ["file", "row", "line", "label", "probability", "probabilities", "windows", "error"]


def test_the_error_of_a_row_in_another_encoding_names_the_setting(run: Any, folder: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.csv", 2)
    file.write_bytes(file.read_bytes() + "café,x\n".encode("latin-1"))
    code, _, err = run(folder, "--file", file, "--format", "jsonl", "--output", "one")
    error = read_first_part(tmp_path / "one")[2]["error"]
    assert code == 0 and "say --data.encoding=cp1252, or iconv" in error and "--data.encoding=cp1252" in err
    assert run(folder, "--file", file, "--data.encoding=cp1252", "--output", "two")[0] == 0
    assert pq.read_table(tmp_path / "two").column("error").null_count == 3


def test_files_are_read_as_the_run_read_its_data(run: Any, folder: Path, tmp_path: Path) -> None:
    trained = shutil.copytree(folder, tmp_path / "trained")
    recipe = 'dev_fraction = 0.2\nencoding = "cp1252"\ndelimiter = ";"\ncolumns = {text = "body", label = "kind"}\n'
    (trained / "settings.toml").write_text(f'long_inputs = "truncate"\n[data]\n{recipe}')
    file, flags = tmp_path / "in.csv", ("--format", "jsonl")
    file.write_bytes("text;body;kind\nthe cat;café;x\n".encode("cp1252"))
    code, _, err = run(trained, "--file", file, *flags, "--output", "one")
    assert code == 0 and 'in.csv: columns: text="body"' in err
    used_settings = "data.columns.text=body, data.encoding=cp1252, data.delimiter=;"
    assert f"of the run are used: {used_settings}; change them with --data." in err
    (row,) = read_first_part(tmp_path / "one")
    assert row["error"] is None and row["input"]["body"] == "café"
    code, _, err = run(trained, "--file", file, *flags, "--output", "two", "--data.columns.text=text")
    assert code == 0 and 'in.csv: columns: text="text"' in err
    (tmp_path / "in.txt").write_text("the cat\n")  # plain text has no columns
    code, _, err = run(trained, "--file", tmp_path / "in.txt", *flags, "--output", "three")
    assert code == 0 and 'in.txt: columns: text="text"' in err


def test_columns_of_a_run_apply_to_tables_only(run: Any, folder: Path, tmp_path: Path) -> None:
    """A text file has no columns: those of the run apply to the CSV file beside it."""
    trained = shutil.copytree(folder, tmp_path / "trained")
    (trained / "settings.toml").write_text('[data]\ncolumns = {text = "body", label = "kind"}\n')
    inputs, flags = tmp_path / "inputs", ("--format", "jsonl", "--output")
    inputs.mkdir()
    (inputs / "a.txt").write_text("the cat\n")
    code, _, err = run(trained, "--file", inputs, *flags, "one")
    assert code == 0 and 'a.txt: columns: text="text"' in err and "of the run are used" not in err
    (inputs / "b.csv").write_text("text,body\nx,the cat\n")
    code, _, err = run(trained, "--file", inputs, *flags, "two")
    assert code == 0 and 'a.txt: columns: text="text"' in err and 'b.csv: columns: text="body"' in err
    code, _, err = run(trained, "--file", inputs / "b.csv", *flags, "three", "--data.format=text")
    assert code == 0 and 'b.csv: columns: text="text"' in err
    code, _, err = run(folder, "--file", inputs / "a.txt", *flags, "four", "--data.columns.text=body")
    assert code == 2 and 'has no column "body"' in err


NO_SETTINGS = DataSettings(dev_fraction=0.0)  # what remains if no setting of the run applies to the input files


def settings_for(run_settings: DataSettings, head: str, folder: Path, *names: str, **options: Any) -> DataSettings:
    """Return the settings with which prediction reads files.

    Args:
        run_settings: Data settings of the run.
        head: Kind of the model's head.
        folder: Folder of the files, which are created empty.
        names: Names of the files.
        options: Data settings from the command line.
    """
    for name in names:
        (folder / name).touch()
    return settings_for_inputs(run_settings, head, [folder / name for name in names], DataSettings(**options))


def test_only_columns_that_the_head_reads_are_taken_from_the_run(tmp_path: Path) -> None:
    pairs = DataSettings(columns={"anchor": "one", "positive": "two", "score": "how"}, seed=3)
    assert settings_for(pairs, "embedding", tmp_path, "x.csv").columns == {"anchor": "one", "positive": "two"}
    assert settings_for(pairs, "embedding", tmp_path, "x.csv", columns={"text": "x"}) == NO_SETTINGS


@pytest.mark.parametrize("more", [{"format": "conll", "encoding": "cp1252"}, {}], ids=["format", "suffix"])
def test_columns_of_conll_data_do_not_apply_to_other_formats(tmp_path: Path, more: dict[str, Any]) -> None:
    """A run on CoNLL data, by the setting or by the suffix of its files, does not say how a CSV file is read."""
    conll = DataSettings(columns={"words": 2}, **more)
    assert settings_for(conll, "token_classification", tmp_path, "x.csv") == NO_SETTINGS


def test_column_numbers_and_delimiters_of_a_run_apply_to_files_of_the_same_format(tmp_path: Path) -> None:
    head = "sequence_classification"
    trained = DataSettings(columns={"text": 2}, header=False, delimiter=";", quoting="literal", dev_fraction=0.0)
    assert settings_for(trained, head, tmp_path, "x.csv") == trained
    assert settings_for(trained, head, tmp_path, "x.csv.gz", "x.txt") == trained
    assert settings_for(trained, head, tmp_path, "x", format="csv") == trained
    without_delimiter = DataSettings(columns={"text": 2}, header=False, dev_fraction=0.0)
    assert settings_for(trained, head, tmp_path, "x.tsv") == without_delimiter
    assert settings_for(trained, head, tmp_path, "x.jsonl") == NO_SETTINGS
    assert settings_for(trained, head, tmp_path, "x.csv", "x.parquet") == NO_SETTINGS
    assert settings_for(trained, head, tmp_path, "x", format="jsonl") == NO_SETTINGS
    by_name = DataSettings(columns={"text": ("title", "body"), "text_pair": "2"}, dev_fraction=0.0)
    assert settings_for(by_name, head, tmp_path, "x.jsonl").columns == {"text": ("title", "body")}


AUTHORS_AND_QUESTIONS = [("Shakespeare", "Who wrote Hamlet?"), ("Ada", "Who wrote the first program?")]
QUESTIONS = [question for _, question in AUTHORS_AND_QUESTIONS]


def run_with_column_numbers(model: Path, folder: Path) -> Path:
    """Make a run whose data had no header, with labels in the first column and texts in the second one."""
    shutil.copytree(model, folder)
    (folder / "settings.toml").write_text('[data]\nencoding = "latin-1"\ncolumns = {text = 2, label = 1}\n')
    (folder / "data.json").write_text('{"files": {"train.tsv": ""}}')
    return folder


def read_first_part(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the first file in a folder of predictions."""
    return [json.loads(line) for line in (folder / "part-00000000.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("names", [("author", "text"), ("text", "author"), ("Text", "Label")])
def test_a_header_that_names_the_text_wins_over_the_column_number_of_a_run(
    run: Any, folder: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    trained = run_with_column_numbers(folder, tmp_path / "trained")
    text_column = [name.lower() for name in names].index("text")
    rows = [names, *(row if text_column == 1 else row[::-1] for row in AUTHORS_AND_QUESTIONS)]
    (tmp_path / "in.tsv").write_text("\n".join(map("\t".join, rows)))
    code, _, err = run(trained, "--file", tmp_path / "in.tsv", "--format", "jsonl", "--output", "out")
    assert code == 0 and f'columns: text="{names[text_column]}"' in err
    texts = [row["input"][names[text_column]] for row in read_first_part(tmp_path / "out")]
    assert texts == QUESTIONS


def test_a_column_number_of_a_run_applies_to_a_file_without_header_and_is_printed(
    run: Any, folder: Path, tmp_path: Path
) -> None:
    trained = run_with_column_numbers(folder, tmp_path / "trained")
    lines = "\n".join(map("\t".join, AUTHORS_AND_QUESTIONS)).encode()
    (tmp_path / "in.tsv").write_bytes(lines + b"\nx\tcaf\xe9\n")
    code, _, err = run(trained, "--file", tmp_path / "in.tsv", "--format", "jsonl", "--output", "out")
    assert code == 0 and 'in.tsv: text = column 2, "Who wrote Hamlet?"' in err
    assert read_first_part(tmp_path / "out")[2]["input"]["2"] == "café"


def test_a_header_without_known_names_is_never_answered(run: Any, folder: Path, tmp_path: Path) -> None:
    trained = run_with_column_numbers(folder, tmp_path / "trained")
    (tmp_path / "in.tsv").write_text("\n".join(map("\t".join, [("author", "phrase"), *AUTHORS_AND_QUESTIONS])))
    arguments = ("--file", tmp_path / "in.tsv", "--format", "jsonl", "--output", "out")
    code, _, err = run(trained, *arguments)
    assert code == 2 and '"author", "phrase", may name the columns: set --data.header=true' in err
    code, _, err = run(trained, *arguments, "--data.header=true", "--data.columns.text=phrase")
    phrases = [row["input"]["phrase"] for row in read_first_part(tmp_path / "out")]
    assert code == 0 and phrases == QUESTIONS
    (tmp_path / "in.tsv").write_text("author\tphrase\tlabel\nx\ty\tz\n")
    code, _, err = run(trained, *arguments)
    assert code == 2 and "which column is the text?" in err


def test_json_lines_are_utf8_whatever_encoding_a_run_read(run: Any, folder: Path, tmp_path: Path) -> None:
    trained = run_with_column_numbers(folder, tmp_path / "trained")
    (tmp_path / "in.jsonl").write_text('{"text": "café"}\n', encoding="utf-8")
    (tmp_path / "in.csv").write_text("text\ncafé\n", encoding="utf-8")
    (tmp_path / "in.tsv").write_text("text\ncafé\n", encoding="utf-8")
    for name in ("in.jsonl", "in.csv", "in.tsv"):
        code, _, err = run(trained, "--file", tmp_path / name, "--format", "jsonl", "--output", f"{name}-out")
        assert code == 0 and read_first_part(tmp_path / f"{name}-out")[0]["input"]["text"] == "café", err


def test_predict_file_errors(run: Any, folder: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.csv")
    for arguments, message in (
        (("a text", "--output", "x"), "--output needs files: name them with --file"),
        (("a text", "--rows", "3"), "--rows needs files"),
        (("--file", file, "--format", "parket"), 'did you mean "parquet"'),
        (("--file", file, "--rows", "0"), "rows is 0"),
        (("--file", file, "--pair", "x"), "--pair cannot be used with --file"),
        (("--file", file, "--data.columns.texd=label"), 'did you mean "text"'),
        (("--file", tmp_path / "none.csv"), "there is no such file"),
        (("--file", file, "--output", file), "exists already: give another file"),
        (("--file", file, "--output", tmp_path), 'holds "in.csv" and no answers'),
        (("--file", file, "--output", "answers.tsv"), "answers are not written as .tsv: give a folder, or a new file"),
        (("--file", file, "--output", "answers.csv", "--format", "jsonl"), "ends in .csv, and the format is jsonl"),
        (("--file", file, "--output", "/dev/full"), "is a file: give a folder"),
    ):
        code, out, err = run(folder, *arguments)
        assert code == 2 and message in err and not out, (arguments, err)


def test_progress_is_one_line_from_time_to_time(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert progress_line(BatchProgress(rows=1234, errors=2, share=0.25, speed=100.0, left=90.0)) == (
        "1,234 rows, 2 failed, 100 rows/s, 25 % of the input, about 1 min 30 s left"
    )
    assert progress_line(BatchProgress(waiting=3)) == "waiting for 3 parts of other processes"
    file = write_rows(tmp_path / "in.csv")
    assert "rows/s" not in run(folder, "--file", file, "--output", "a")[2]
    monkeypatch.setattr(predict_files, "LINE_INTERVAL", 0.0)
    assert "rows/s, 100 % of the input" in run(folder, "--file", file, "--output", "b")[2]
    monkeypatch.setenv("RANK", "1")
    assert run(folder, "--file", file, "--output", "c") == (0, "", "")


# a script that runs the command with one row in each chunk, prints a line for each chunk, and is slow after the third
SLOW = """
import sys, time
from heedful.infer.batch import file_prediction
from heedful.cli import main
file_prediction.CHUNK_ROWS = 1
answer_chunk = file_prediction.answer_encoded_each
chunks = []
def slowly(*arguments, **options):
    print("chunk", flush=True)
    chunks.append(1)
    time.sleep(0.2 if len(chunks) < 4 else 60)
    return answer_chunk(*arguments, **options)
file_prediction.answer_encoded_each = slowly
main(sys.argv[1:])
"""


def test_ctrl_c_keeps_what_is_finished(run: Any, folder: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.csv", 30)
    command = ["predict", folder, "--file", file, "--output", tmp_path / "out", "--rows", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for _ in range(4):
            assert process.stdout.readline() == "chunk\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "The same command resumes it" in err and "Traceback" not in err
    parts = len(list((tmp_path / "out").glob("part-*")))
    assert 1 <= parts < 15 and not list((tmp_path / "out").glob(".part-*"))
    assert run(*command[1:])[0] == 0
    assert len(list((tmp_path / "out").glob("part-*"))) == 15


@pytest.mark.slow
def test_torchrun_shares_the_work(folder: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "in.csv", 40)
    command = ["predict", folder, "--file", file, "--output", tmp_path / "out", "--rows", "2", "--json"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "heedful"]
    process = subprocess.run(
        [*launch, *map(str, command)], capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False
    )
    assert process.returncode == 0, process.stderr
    (summary,) = (json.loads(line) for line in process.stdout.splitlines() if line.startswith("{"))
    assert summary["rows"] == 40 and pq.read_table(tmp_path / "out").num_rows == 40

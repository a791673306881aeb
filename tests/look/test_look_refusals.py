"""`heedful look` on the command line: it writes a file, or refuses before it writes one."""

from __future__ import annotations

from pathlib import Path

import pytest

import heedful
from heedful.cli import main
from heedful.look import page
from heedful.look.page_api import PageAPI
from tests.support.model_folders import make_model_dir


def test_a_file_is_written_and_a_text_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_model_dir(tmp_path / "run", "single")
    with pytest.raises(SystemExit) as ended:
        main(["look", str(run), "the cat", "the dog", "--html", str(tmp_path / "a.html"), "--layer", "1"])
    assert not ended.value.code and "opens in any browser" in capsys.readouterr().err
    assert (tmp_path / "a.html").is_file()
    with pytest.raises(SystemExit) as ended:
        main(["look", str(run)])
    assert ended.value.code == 2 and "no text was given" in capsys.readouterr().err


def test_layers_and_heads_that_are_not_there_are_refused(
    tmp_path: Path, page_api: PageAPI, capsys: pytest.CaptureFixture[str]
) -> None:
    for layers, heads, message in (
        ([1, 99], None, r"layers \[99\] do not exist; give numbers from 0 to 1"),
        (None, [-1], r"heads \[-1\] do not exist; give numbers from 0 to 3"),
        ([], None, "layers is empty"),
    ):
        with pytest.raises(heedful.HeedfulError, match=message):
            page.render_html(page_api, layers=layers, heads=heads)
    run, file = str(make_model_dir(tmp_path / "run", "single")), tmp_path / "a.html"
    for more, message in (
        (["the cat", "--html", str(file), "--layer", "99"], "layers [99] do not exist; give numbers from 0 to 1"),
        (["the cat", "--html", str(file), "--head", "4"], "heads [4] do not exist; give numbers from 0 to 3"),
        (["the cat", "--layer", "0"], "--layer was given: "),
        (["the cat", "--json"], "--json was given: only for --heads DATA"),
        (["the cat", "--part", "encoder"], "--part was given: only for --figure"),
        (["the cat", "--figure", "a.svg", "--layer", "0", "--layer", "1"], "2 layers were given: a figure shows one"),
        (["the cat", "the dog", "--figure", "a.svg"], "2 texts were given: a figure shows one text"),
        (["the cat", "--figure", "a.svg", "--html", "a.html"], "--html was given: a figure shows one text"),
        (["the cat", "--figure", "a.gif"], "a.gif ends in '.gif': use one of .png, .svg, .pdf"),
        (
            ["--heads", "x.csv", "--pair", "a", "--word", "b"],
            "--pair and --word were given: the report of --heads takes",
        ),
        (["--heads", "x.csv", "the cat", "the dog"], "2 texts were given: the report of --heads takes a RUN"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["look", run, *more])
        assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not file.exists()


def test_what_cannot_be_shown_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = str(make_model_dir(tmp_path / "run", "single")), tmp_path / "a.html"
    for more, message in (
        (["the cat", "--html", str(tmp_path / "nowhere" / "a.html")], "cannot be written: give the name of a file"),
        (["the cat", "--html", str(tmp_path)], "cannot be written: give the name of a file"),
        (["the cat", "--html", str(file), "--word", "dog"], '"dog" occurs in none of the texts'),
        (["the cat", "the dog", "the mat", "--html", str(file)], "3 texts were given: give one or two"),
        (["the cat", "the dog", "--against", run, "--html", str(file)], "--against was given: "),
        (["the cat", "--html", str(file), "--port", "8000"], "--port was given: only the page that is served"),
        (["the cat", "--html", str(file), "--no-browser"], "--no-browser was given: only the page that is served"),
        (["the cat", "--megabytes", "4"], "--megabytes was given: "),
        (["the cat", "--max-texts", "9"], "--max-texts was given: only for --heads"),
        (["the cat", "--output", "x"], "--output was given: only for --heads"),
        (["--heads", str(file), "--port", "8000"], "--port was given: the report of --heads takes a RUN"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["look", run, *more])
        assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not file.exists()

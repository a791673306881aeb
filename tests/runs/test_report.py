"""report.html: its content, that it is one file without scripts, and that texts of the data are never read as HTML."""

from __future__ import annotations

import json
import os
import shlex
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest

from heedful.errors import HeedfulError
from heedful.runs.plots.figures import draw_run_plots
from heedful.runs.report import MAX_COMMAND_CHARS, look_command, write_report
from tests.support import run_folders
from tests.support.browser import browser
from tests.support.page_checks import axe_violations, layout_problems, set_window

HOSTILE_TEXTS = [
    "</p></article><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'; rm -rf ~ #",
    '$(rm -rf ~) `x` "y"',
    "&lt;b&gt;",
    "\u202egnirts \x1b[31m \ud800",
]


class Page(HTMLParser):
    """The tags of an HTML page with their attributes, its text, and the text of each <code> element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []  # (tag, attributes)
        self.text = ""
        self.codes: list[str] = []
        self._is_code = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_code = tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._is_code = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_code:
            self.codes.append(data)


def write_run(path: Path, texts: list[str], *, problems: tuple[str, ...] = ()) -> Path:
    """Write the folder of a run, and return its path.

    Args:
        path: The folder.
        texts: The inputs of the worst mistakes on test.
        problems: What `heedful check` reports about the data.
    """
    numbers, predictions = run_folders.classification_result(["bad", "good"], 60)
    mistakes = [prediction for prediction in predictions if not prediction["correct"]]
    for mistake, text in zip(mistakes, texts, strict=False):
        mistake["input"] = text
    results = run_folders.results_json("classify", "accuracy", {"test": numbers})
    verdict = f"{len(problems)} problems" if problems else "no problems found"
    results["data"] = {
        "splits": {"test": {"examples": 60}},
        "stated": ["each example is a text"],
        "check": {"verdict": verdict, "problems": list(problems)},
    }
    return run_folders.write_run_folder(path, results, test=predictions)


def test_scores_plots_mistakes_and_data(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run", ["when do you open?"], problems=("! leak: train and test share 2 texts",))
    draw_run_plots(folder)
    html = write_report(folder).read_text()
    page = Page(html)
    results = json.loads((folder / "results.json").read_text())
    accuracy = results["splits"]["test"]["numbers"]["accuracy"]
    assert f"{100 * accuracy:.1f} %" in page.text
    assert "my run: " in page.text
    image_sources = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    num_plots = len(list((folder / "plots").glob("*.svg")))
    assert len(image_sources) == num_plots >= 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in image_sources)
    assert page.codes[0] == f"heedful look '{folder}' 'when do you open?'"
    assert "1 problems" in page.text
    assert "leak: train and test share 2 texts" in page.text
    assert write_report(folder).read_text() == html, "the report is deterministic"


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", HOSTILE_TEXTS, problems=tuple(f"! odd text: {text}" for text in HOSTILE_TEXTS))
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "iframe", "object", "link", "form", "base"} & {tag for tag, _ in page.tags}
    event_handlers = [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert event_handlers == []
    assert all("data:" in str(attributes["src"]) for tag, attributes in page.tags if tag == "img")
    assert "default-src 'none'" in html
    assert "\u202e" not in html
    assert "\x1b" not in html
    for text in HOSTILE_TEXTS[:5]:  # the last one has characters that are not printable
        assert text in page.text
        (command,) = [code for code in page.codes if shlex.split(code)[-1] == text]
        assert shlex.split(command) == ["heedful", "look", str(folder), text]


@pytest.mark.parametrize(
    ("model_input", "arguments"),
    [
        ("a text", ["a text"]),
        (["one", "two"], ["one", "--pair", "two"]),
        (["one", "two", "three"], ["one two three"]),
        ({"question": "who?", "context": "she"}, ["she", "--question", "who?"]),
        ({"prompt": "p", "choices": ["a", "b"]}, ["p", "--choice", "a", "--choice", "b"]),
    ],
)
def test_commands_of_each_kind_of_input(model_input: object, arguments: list[str]) -> None:
    assert shlex.split(look_command(Path("run"), model_input)) == ["heedful", "look", "run", *arguments]


@pytest.mark.parametrize(
    "model_input",
    ["a\nb", "a" * MAX_COMMAND_CHARS, 3, " "],
    ids=["two lines", "too long", "a number", "a space"],
)
def test_no_command_for_inputs_that_are_not_one_printable_line(model_input: object) -> None:
    assert look_command(Path("run"), model_input) == ""


def test_two_words_of_a_tagger_are_no_pair() -> None:
    assert look_command(Path("run"), ["ada", "lives"], pairs=False) == "heedful look run 'ada lives'"


def test_a_run_without_results_and_a_run_without_evaluated_splits(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"has no results\.json"):
        write_report(tmp_path)
    folder = run_folders.write_run_folder(tmp_path / "run", run_folders.results_json("classify", "accuracy", {}))
    assert "Nothing was measured" in write_report(folder).read_text()


@pytest.mark.slow
def test_layout_in_a_browser(tmp_path: Path) -> None:
    words = "The cat sat on the mat in Paris and slept there. "
    texts = [
        words,
        30 * words,
        "-5 degrees",
        "جلس القط على الحصيرة لأنه كان متعبا.",
        "猫坐在垫子上，因为它累了。",
        "x" * 400,
    ]
    folder = write_run(tmp_path / "run", [*texts, *HOSTILE_TEXTS], problems=("! leak: train and test share 2 texts",))
    draw_run_plots(folder)
    path = write_report(folder)
    with browser(tmp_path) as chrome:
        for width, dark in product((390, 1280, 1920), (False, True)):
            set_window(chrome, width)
            chrome.dark(dark)
            chrome.driver.get(f"file://{path}")
            assert layout_problems(chrome) == [], width
            assert chrome.complaints() == []
            if screenshots := os.environ.get("HEEDFUL_SHOTS"):
                chrome.shot(Path(screenshots) / f"{width}-report-{'dark' if dark else 'light'}.png")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_axe_in_a_browser(tmp_path: Path, dark: bool) -> None:
    folder = write_run(tmp_path / "run", ["a text", *HOSTILE_TEXTS], problems=("! leak: train and test share 2 texts",))
    draw_run_plots(folder)
    path = write_report(folder)
    with browser(tmp_path) as chrome:
        chrome.dark(dark)
        chrome.driver.get(f"file://{path}")
        assert axe_violations(chrome) == []

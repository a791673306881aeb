"""Every view at the widths of a phone, a laptop and a projector, in both themes, with short, long and foreign texts.

HEEDFUL_SHOTS=FOLDER keeps a picture of each page, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import heedful
from heedful.look.inspection import Inspection
from heedful.look.local_server import serve_in_background
from heedful.look.page import render_html
from heedful.look.page_api import PageAPI
from tests.look.test_page import CONTRAST, inspections_of_every_kind
from tests.support.browser import Browser, browser
from tests.support.page_checks import axe_violations, layout_problems, lost_focus, set_window

SENTENCE = "The cat sat on the mat in Paris and slept there."
TEXTS = {
    "13": SENTENCE,
    "60": " ".join([SENTENCE] * 5),
    "362": " ".join([SENTENCE] * 33),
    "arabic": "جلس القط على الحصيرة in Paris لأنه كان متعبا.",
    "hebrew": "החתול ישב על השטיח in Paris כי הוא היה עייף.",
    "chinese": "猫坐在垫子上，因为它累了。東京は日本の首都です。안녕하세요",
}
WIDTHS = (390, 1280, 1920)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> heedful.ModelBundle:
    return heedful.load("heedful-mini-en", head="masked_lm")


def api_of(model: heedful.ModelBundle, text: str) -> PageAPI:
    """A page of the text, and of the same with one word changed."""
    second = text.replace("cat", "dog", 1)
    looks = [Inspection(model, text, name="heedful-mini-en")]
    return PageAPI([*looks, Inspection(model, second, name="heedful-mini-en")] if second != text else looks)


def each_view(chrome: Browser, url: str) -> Iterator[str]:
    """Open every view of a page, one after the other."""
    chrome.open(url)
    for view in chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)"):
        chrome.open(f"{url}#view={view}")
        yield view


def keep_picture(chrome: Browser, name: str) -> None:
    """Keep a picture of the window."""
    if folder := os.environ.get("HEEDFUL_SHOTS"):
        chrome.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def check_layout(chrome: Browser, url: str, name: str) -> dict[str, list[str]]:
    """Return the problems of each view that has some."""
    problems = {}
    for view in each_view(chrome, url):
        keep_picture(chrome, f"{name}-{view}")
        if found := [*layout_problems(chrome), *chrome.complaints()]:
            problems[view] = found
    return problems


def test_a_phone_shows_every_view(chrome: Browser, model: heedful.ModelBundle) -> None:
    set_window(chrome, 390)
    with serve_in_background(api_of(model, TEXTS["13"])) as server:
        assert check_layout(chrome, server.url, "390-13") == {}


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("text", TEXTS)
def test_layout(chrome: Browser, model: heedful.ModelBundle, width: int, text: str) -> None:
    set_window(chrome, width)
    chrome.dark(text in ("60", "hebrew"))
    with serve_in_background(api_of(model, TEXTS[text])) as server:
        assert check_layout(chrome, server.url, f"{width}-{text}") == {}
    chrome.dark(False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("width", WIDTHS)
def test_layout_of_every_kind_of_model(chrome: Browser, tmp_path: Path, width: int) -> None:
    set_window(chrome, width)
    problems = {}
    for kind, inspections in inspections_of_every_kind(tmp_path).items():
        with serve_in_background(PageAPI(inspections)) as server:
            if found := check_layout(chrome, server.url, f"{width}-{kind}"):
                problems[kind] = found
    assert problems == {}


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_layout_of_a_file(chrome: Browser, model: heedful.ModelBundle, tmp_path: Path, width: int) -> None:
    set_window(chrome, width)
    (tmp_path / "page.html").write_text(render_html(api_of(model, TEXTS["13"])), encoding="utf-8")
    assert check_layout(chrome, f"file://{tmp_path}/page.html", f"{width}-file") == {}


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("text", ["13", "hebrew"])
def test_axe_and_contrast(chrome: Browser, model: heedful.ModelBundle, text: str, dark: bool) -> None:
    set_window(chrome, 1280)
    chrome.dark(dark)
    problems = {}
    with serve_in_background(api_of(model, TEXTS[text])) as server:
        for view in each_view(chrome, server.url):
            if found := [*axe_violations(chrome), *chrome.js(CONTRAST)]:
                problems[view] = found
    chrome.dark(False)
    assert problems == {}


@pytest.mark.slow
def test_no_control_loses_the_focus(chrome: Browser, model: heedful.ModelBundle) -> None:
    set_window(chrome, 1280)
    lost = {}
    with serve_in_background(api_of(model, TEXTS["13"])) as server:
        for view in each_view(chrome, server.url):
            if found := lost_focus(chrome):
                lost[view] = found
    assert lost == {}

"""The try-it page at the widths of a phone, a laptop and a projector, in both themes, with answers of several kinds.

HEEDFUL_SHOTS=FOLDER keeps a picture of each page, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from heedful.serve.run import RunningServer, background
from tests.support.browser import Browser, browser
from tests.support.model_folders import make
from tests.support.page_checks import axe_violations, layout_problems, set_window

pytestmark = pytest.mark.slow
KINDS = ("single", "tag", "span", "choice", "masked", "next")
TEXTS = {
    "short": "The cat sat on the mat in Paris.",
    "long": "The cat sat on the mat in Paris. " * 30,
    "arabic": "جلس القط على الحصيرة in Paris لأنه كان متعبا.",
    "chinese": "猫坐在垫子上，因为它累了。",
}
FILL = """
for (const field of document.querySelectorAll("#inputs textarea, #inputs input")) {
  field.value = arguments[0];
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
const button = document.querySelector("button[type=submit]");
button.focus();
button.click();
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with background({kind: str(make(tmp_path_factory.mktemp(kind), kind)) for kind in KINDS}) as running:
        yield running


def open_page(chrome: Browser, server: RunningServer, kind: str, text: str) -> None:
    """Open the page, choose a model, and ask about a text."""
    chrome.driver.get(server.url + "/")
    chrome.until(lambda: chrome.js("return document.querySelector('#inputs textarea, #inputs input') !== null"))
    chrome.js(
        "const e = document.getElementById('model'); e.value = arguments[0]; e.dispatchEvent(new Event('change'))", kind
    )
    chrome.until(lambda: chrome.js("return document.querySelector('#inputs textarea, #inputs input') !== null"))
    chrome.js(FILL, text)
    chrome.until(lambda: " ms" in chrome.text("#status"))


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_layout(chrome: Browser, server: RunningServer, width: int) -> None:
    set_window(chrome, width)
    problems = {}
    for number, kind in enumerate(KINDS):
        for name, text in TEXTS.items():
            chrome.dark(number % 2 == 1)
            open_page(chrome, server, kind, text)
            if folder := os.environ.get("HEEDFUL_SHOTS"):
                chrome.driver.save_screenshot(f"{folder}/{width}-try-{kind}-{name}.png")
            if found := layout_problems(chrome):
                problems[kind, name] = found
    chrome.dark(False)
    assert problems == {}


@pytest.mark.parametrize("dark", [False, True])
def test_axe(chrome: Browser, server: RunningServer, dark: bool) -> None:
    set_window(chrome, 1280)
    chrome.dark(dark)
    problems = {}
    for kind in KINDS:
        open_page(chrome, server, kind, TEXTS["short"])
        if found := axe_violations(chrome):
            problems[kind] = found
        assert not chrome.js("return document.activeElement === document.body"), "the focus stays on the button"
    chrome.dark(False)
    assert problems == {}

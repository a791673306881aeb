"""The try-it page at the widths of a phone, a laptop and a projector, in both themes, with the form of every task.

HEEDFUL_SHOTS=FOLDER keeps a picture of each page, to be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from heedful.serve.run import RunningServer
from tests.support.browser import Browser, browser
from tests.support.page_checks import axe_violations, layout_problems, set_window

pytestmark = pytest.mark.slow
WIDTHS = (390, 1280, 1920)
TEXTS = {
    "short": "The cat sat on the mat in Paris.",
    "long": "The cat sat on the mat in Paris. " * 30,
    "arabic": "جلس القط على الحصيرة in Paris لأنه كان متعبا.",
    "chinese": "猫坐在垫子上，因为它累了。",
}
MASKED = "The cat sat on the [MASK]."  # what the form of /fill-mask needs
CHOOSE = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('change'))"
OPTIONS = "return [...document.querySelectorAll(`#${arguments[0]} option`)].map((option) => option.value)"
FILL = """
for (const field of document.querySelectorAll("#inputs textarea")) {
  field.value = field.name === "lines" ? `${arguments[0]}\nAnother: ${arguments[0]}` : arguments[0];
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
"""
ASK = """
document.getElementById("status").textContent = "";
const button = document.querySelector("button[type=submit]");
button.focus();
button.click();
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def each_form(chrome: Browser, served: RunningServer) -> Iterator[tuple[str, str]]:
    """Show the form of each route of each model, one after the other."""
    chrome.driver.get(served.url + "/")
    chrome.until(lambda: chrome.js(OPTIONS, "route"))
    for model in chrome.js(OPTIONS, "model"):
        chrome.js("document.getElementById('curl').textContent = ''")
        chrome.js(CHOOSE, "model", model)
        chrome.until(lambda: chrome.text("#curl") != "")
        for route in chrome.js(OPTIONS, "route"):
            chrome.js(CHOOSE, "route", route)
            yield model, route


def ask(chrome: Browser) -> str:
    """Send the request, and return the status that the page shows."""
    chrome.js(ASK)
    chrome.until(lambda: " ms" in chrome.text("#status"))
    return chrome.text("#status")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_layout(chrome: Browser, served: RunningServer, width: int, dark: bool) -> None:
    set_window(chrome, width)
    chrome.dark(dark)
    problems = {}
    for model, route in each_form(chrome, served):
        for name, text in TEXTS.items():
            chrome.js(FILL, MASKED if route == "/fill-mask" and name == "short" else text)
            status = ask(chrome)
            if folder := os.environ.get("HEEDFUL_SHOTS"):
                file = f"{width}-try-{model}{route.replace('/', '-')}-{name}-{'dark' if dark else 'light'}.png"
                chrome.driver.save_screenshot(f"{folder}/{file}")
            if layout_errors := layout_problems(chrome):
                problems[model, route, name] = layout_errors
            if name == "short" and not status.startswith("200"):
                problems[model, route, name] = [status, chrome.text("#answer")]
            if not chrome.js("return document.querySelector('#inputs textarea') !== null"):
                break  # the route has no form, and its example was sent
    chrome.dark(False)
    assert problems == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dark", [False, True])
def test_axe(chrome: Browser, served: RunningServer, dark: bool) -> None:
    set_window(chrome, 1280)
    chrome.dark(dark)
    problems = {}
    for model, route in each_form(chrome, served):
        ask(chrome)
        if violations := axe_violations(chrome):
            problems[model, route] = violations
        assert chrome.js("return document.activeElement === document.querySelector('button')"), (model, route)
    chrome.dark(False)
    assert problems == {}

"""Layout and accessibility of the try-it page on phone, laptop and projector widths, in both themes, for every task.

HEEDFUL_SHOTS=FOLDER saves a screenshot of each page.
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
TEXT_WITH_MASK = "The cat sat on the [MASK]."  # /fill-mask needs a mask
CHOOSE_OPTION = """
const select = document.getElementById(arguments[0]);
select.value = arguments[1];
select.dispatchEvent(new Event("change"));
"""
READ_OPTIONS = "return [...document.querySelectorAll(`#${arguments[0]} option`)].map((option) => option.value)"
FILL_FORM = """
for (const field of document.querySelectorAll("#inputs textarea")) {
  field.value = field.name === "lines" ? `${arguments[0]}\nAnother: ${arguments[0]}` : arguments[0];
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
"""
SUBMIT = """
document.getElementById("status").textContent = "";
const button = document.querySelector("button[type=submit]");
button.focus();
button.click();
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


def forms(chrome: Browser, served: RunningServer) -> Iterator[tuple[str, str]]:
    """Show the form of each route of each model in turn, and yield the model and the route."""
    chrome.driver.get(served.url + "/")
    chrome.until(lambda: chrome.js(READ_OPTIONS, "route"))
    for model in chrome.js(READ_OPTIONS, "model"):
        chrome.js("document.getElementById('curl').textContent = ''")
        chrome.js(CHOOSE_OPTION, "model", model)
        chrome.until(lambda: chrome.text("#curl") != "")
        for route in chrome.js(READ_OPTIONS, "route"):
            chrome.js(CHOOSE_OPTION, "route", route)
            yield model, route


def submit(chrome: Browser) -> str:
    """Send the request, and return the status that the page shows."""
    chrome.js(SUBMIT)
    chrome.until(lambda: " ms" in chrome.text("#status"))
    return chrome.text("#status")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_form_has_parts_that_are_too_wide_cut_or_empty(
    chrome: Browser, served: RunningServer, width: int, dark: bool
) -> None:
    set_window(chrome, width)
    chrome.dark(dark)
    problems = {}
    for model, route in forms(chrome, served):
        for name, text in TEXTS.items():
            chrome.js(FILL_FORM, TEXT_WITH_MASK if route == "/fill-mask" and name == "short" else text)
            status = submit(chrome)
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
def test_accessibility_rules_hold(chrome: Browser, served: RunningServer, dark: bool) -> None:
    set_window(chrome, 1280)
    chrome.dark(dark)
    problems = {}
    for model, route in forms(chrome, served):
        submit(chrome)
        if violations := axe_violations(chrome):
            problems[model, route] = violations
        assert chrome.js("return document.activeElement === document.querySelector('button')"), (model, route)
    chrome.dark(False)
    assert problems == {}

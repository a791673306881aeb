"""Checks of the layout of a page: overflow, cut text, empty panels, the focus, and the rules of axe-core."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser, Keys

AXE = "HEEDFUL_AXE"  # environment variable: path of axe.min.js, from `npm install axe-core`
SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
FOCUSABLE = ".controls select, .controls input, .body button, .body select, .body input, .body canvas[tabindex], .tab"


def set_window(chrome: Browser, width: int, height: int = 900) -> None:
    """Set the size of the window; a narrow one is that of a phone."""
    chrome.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def layout_problems(chrome: Browser) -> list[str]:
    """Return descriptions of elements on the open page that are too wide, cut off, empty or in error."""
    return list(chrome.js(SCRIPT + "return [...layoutProblems(), ...labelProblems()]"))


def low_contrast(chrome: Browser) -> list[str]:
    """Return the elements whose text has a contrast below 4.5 (WCAG AA), see `lowContrast` in page_checks.js."""
    return list(chrome.js(SCRIPT + "return lowContrast()"))


def relative_luminance(chrome: Browser, colours: list[list[int]]) -> list[float]:
    """Return the relative luminance, from 0 to 1, of sRGB colours with levels from 0 to 255."""
    return list(chrome.js(SCRIPT + "return arguments[0].map(relativeLuminance)", colours))


def lost_focus(chrome: Browser) -> list[str]:
    """Use one control of each kind, and return the kinds that lose the focus, which is on the body then."""
    kinds = []
    for kind in chrome.js(SCRIPT + "return kindsOfControls(arguments[0])", FOCUSABLE):
        if not chrome.js(SCRIPT + "return useControl(...arguments)", FOCUSABLE, kind):
            continue
        chrome.settle()
        if chrome.js("return document.activeElement === document.body"):
            kinds.append(kind)
    return kinds


def unreached_controls(chrome: Browser) -> list[str]:
    """Press arrow keys in each group of controls, then Tab until the end; return controls that never had the focus."""
    chrome.js(SCRIPT + "watchFocus()")
    for number, members in enumerate(chrome.js(SCRIPT + "return rovingGroups()")):
        if chrome.js(SCRIPT + "return focusGroup(arguments[0])", number):
            chrome.keys(Keys.HOME, *[Keys.ARROW_RIGHT] * (members - 1))
    chrome.js("document.activeElement.blur(); document.querySelector('h1').setAttribute('tabindex', -1)")
    chrome.focus("h1")
    tabbable = int(chrome.js("return [...document.querySelectorAll('*')].filter((e) => e.tabIndex >= 0).length"))
    chrome.keys(*[Keys.TAB] * tabbable)
    return list(chrome.js(SCRIPT + "return unreached()"))


@cache
def axe_source() -> str:
    """Return the source of axe-core; the test is skipped without it."""
    path = Path(os.environ.get(AXE, ""))
    if not path.is_file():
        pytest.skip(f"axe-core is not installed: npm install axe-core, and set {AXE} to the path of its axe.min.js")
    return path.read_text(encoding="utf-8")


def axe_violations(chrome: Browser) -> list[str]:
    """Return the violations that axe-core finds on the open page, with the element of each."""
    chrome.js(axe_source())
    violations: Any = chrome.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document, { resultTypes: ['violations'] }).then((r) => done(r.violations))"
    )
    return [f"{rule['id']}: {node['html'][:120]}" for rule in violations for node in rule["nodes"]]

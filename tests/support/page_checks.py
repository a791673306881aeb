"""Checks of a page as it is laid out: overflow, cut text, empty panels, the focus, and axe-core's rules."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser

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
    """Return what is too wide, cut, empty or in error on the open page."""
    return list(chrome.js(SCRIPT + "return [...layoutProblems(), ...labelProblems()]"))


def lost_focus(chrome: Browser) -> list[str]:
    """Use one control of each kind, and return those after which the focus is on the body of the page."""
    lost = []
    for kind in chrome.js(SCRIPT + "return kindsOfControls(arguments[0])", FOCUSABLE):
        if not chrome.js(SCRIPT + "return useControl(...arguments)", FOCUSABLE, kind):
            continue
        chrome.settle()
        if chrome.js("return document.activeElement === document.body"):
            lost.append(kind)
    return lost


@cache
def axe_source() -> str:
    """Return the source of axe-core; the test is skipped without it."""
    path = Path(os.environ.get(AXE, ""))
    if not path.is_file():
        pytest.skip(f"axe-core is not there: npm install axe-core, and set {AXE} to the path of its axe.min.js")
    return path.read_text(encoding="utf-8")


def axe_violations(chrome: Browser) -> list[str]:
    """Return the violations that axe-core finds on the open page, with the element of each."""
    chrome.js(axe_source())
    found: Any = chrome.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document, { resultTypes: ['violations'] }).then((r) => done(r.violations))"
    )
    return [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]]

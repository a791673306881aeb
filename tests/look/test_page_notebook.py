"""The page as a widget of a notebook."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import heedful
from heedful.look import page
from heedful.look.notebook import answer_message, make_widget
from heedful.look.page_api import PageAPI
from tests.support.browser import Browser
from tests.support.look_pages import STATUS_LINE, page_problems


def test_widget_and_its_messages(page_api: PageAPI) -> None:
    message = answer_message(page_api, {"number": 3, "name": "weights", "params": {"layer": 1, "head": 2}})
    assert (
        message["number"] == 3 and message["answer"]["weights"]["shape"] == [len(page_api.inspections[0].encoded)] * 2
    )
    assert (
        'part "x" does not exist'
        in answer_message(page_api, {"number": 4, "name": "weights", "params": {"part": "x"}})["error"]
    )
    assert answer_message(page_api, "nonsense")["error"]
    pytest.importorskip("anywidget")
    widget = make_widget(page_api)
    script = str(widget._esm)
    imports = re.compile(r"^import\b", re.MULTILINE)
    assert imports.search(page.read_asset("main.js"))
    assert "startWidget" in script and not imports.search(script), "the bundle needs no further module"
    assert callable(heedful.look)


def test_a_notebook_asks_its_kernel(chrome: Browser, tmp_path: Path, page_api: PageAPI) -> None:
    """The widget's module, with a model that passes questions and answers on, as anywidget's does."""
    place = {"side": "0", "part": "encoder", "layer": "0"}
    requests = [("about", {}), *(("weights", place | {"head": str(head)}) for head in range(4))]
    messages = [answer_message(page_api, {"number": 0, "name": name, "params": params}) for name, params in requests]
    answers = {
        page.question_key(name, params): message["answer"]
        for (name, params), message in zip(requests, messages, strict=True)
    }
    host = """
    const kept = JSON.parse(document.getElementById("kept").textContent);
    const model = { on(_, heard) { this.heard = heard; }, send({ number, name, params }) {
      const answer = kept[`${name}?${Object.keys(params).sort().map((key) => `${key}=${params[key]}`).join("&")}`];
      setTimeout(() => this.heard(answer ? { number, answer } : { number, error: `not kept: ${name}` })); } };
    startWidget({ model, el: document.body });
    """
    file = tmp_path / "host.html"
    data = json.dumps(answers)
    file.write_text(
        f'<!doctype html><meta charset="utf-8"><body><style>{page.read_asset(page.STYLE)}</style>'
        f'<script type="application/json" id="kept">{data}</script>'
        f'<script type="module">{page.bundled_script()}{host}</script>'
    )
    chrome.open(file.as_uri())
    chrome.js("document.body.dataset.jpThemeLight = 'false'")  # as JupyterLab tells that it is dark
    chrome.until(lambda: chrome.js("return document.querySelector('.heedful').dataset.theme") == "dark")
    chrome.click('[data-view="head"]')
    status = "return document.querySelector(arguments[0])?.textContent ?? ''"
    chrome.until(lambda: re.search(r"\d+ lines", chrome.js(status, STATUS_LINE)))  # first, that of the view before
    chrome.click('[data-view="neuron"]')
    chrome.until(lambda: page_problems(chrome) == "not kept: neuron")
    assert chrome.complaints() == []

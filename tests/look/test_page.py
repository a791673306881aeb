"""The page in a real browser: every view opens, says what Python says, and lets nothing in or out."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from tokenizers import models, pre_tokenizers

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.cli import main
from heedful.look import page
from heedful.look.head_patterns import telling_heads
from heedful.look.inspection import Inspection, inspect_choices
from heedful.look.local_server import LocalServer, serve_in_background
from heedful.look.notebook import answer_message, make_widget
from heedful.look.page_api import PageAPI
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import word_tokenizer
from tests.look.test_inspection import TEXT, WORDS, ending
from tests.support.browser import Browser, browser
from tests.support.classic_models import make_classic
from tests.support.model_folders import make_model_dir
from tests.support.page_checks import layout_problems, set_window
from tests.support.tiny_models import save_tiny

PAIR = ("The cat sat on the mat.", "A dog ran to the mat in Paris.")
HOSTILE = (
    *("</script><script>window.hit=1</script>", "<img/src=x/onerror=window.hit=1>", "\u202egnihtemos", "\u0000\u0007"),
    *("a" * 50_000, "&lt;b&gt;", "${window.hit=1}", "';window.hit=1;//"),
)
CONTRAST = """
const shade = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
  .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (c.startsWith("rgb(")) return c; } return "rgb(255,255,255)"; };
const found = [];
for (const e of document.querySelectorAll(".heedful *")) {
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.getClientRects().length) continue;
  const style = getComputedStyle(e);
  const [a, b] = [shade(e instanceof SVGElement ? style.fill : style.color), shade(behind(e))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push(`${e.className} ${e.textContent.slice(0, 20)} ${ratio}`);
}
return found;
"""

PROBLEMS = "return [...document.querySelectorAll('.body .problem')].map((e) => e.textContent).join('')"
LONGEST_TEXT = """
const walk = document.createTreeWalker(document.querySelector(".heedful"), NodeFilter.SHOW_TEXT);
let longest = 0;
while (walk.nextNode()) longest = Math.max(longest, walk.currentNode.data.length);
return longest;
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def page_with_report(folder: Path) -> PageAPI:
    """A page of two pairs of texts in a tiny model, of a word in three texts, and of a report on heads."""
    loaded = heedful.load(make_model_dir(folder, "single"))
    second = Inspection(loaded, (PAIR[0].replace("cat", "dog"), PAIR[1]))
    report = {
        "patterns": {"next": "the token that follows", "broad": "a bag of words"},
        "heads": [
            {"part": "encoder", "layer": layer, "head": head, "name": "next" if head else "broad",
             "patterns": {"next": {"score": 0.9, "chance": 0.1, "lift": 0.89, "z": 20.0, "rows": 9}}}
            for layer in range(2) for head in range(4)
        ],
        "summary": "told", "measure": "", "price": None,
    }  # fmt: skip
    return PageAPI([Inspection(loaded, PAIR), second], extra=[Inspection(loaded, PAIR[0])], word="mat", report=report)


@pytest.fixture(scope="module")
def asks(tmp_path_factory: pytest.TempPathFactory) -> PageAPI:
    return page_with_report(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def local(asks: PageAPI) -> Iterator[LocalServer]:
    with serve_in_background(asks) as server:
        yield server


def weights(asks: PageAPI, layer: int, head: int) -> np.ndarray:
    head_weights: np.ndarray = asks.inspections[0].weights("encoder", layer, [head])[0].numpy()
    return head_weights


VIEWS = (
    "head",
    "model",
    "neuron",
    "steps",
    "prediction",
    "change",
    "positions",
    "compare",
    "words",
    "similarity",
    "heads",
)


def test_every_view_opens_without_errors_or_foreign_requests(chrome: Browser, local: LocalServer) -> None:
    chrome.requests()
    chrome.dark(False)
    chrome.open(f"{local.url}#view=heads&layer=1&head=2")
    assert chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)") == list(VIEWS)
    for view in VIEWS:
        chrome.dark(False)
        chrome.click(f'[data-view="{view}"]')
        chrome.until(lambda view=view: chrome.js("return document.querySelector('.body').dataset.view") == view)
        assert chrome.js("return document.querySelectorAll('.body .problem:not(:empty)').length") == 0, view
        assert chrome.js(CONTRAST) == [], view
        chrome.dark(True)
        chrome.settle()
        assert chrome.js(CONTRAST) == [], (view, "dark")
    chrome.dark(False)
    assert chrome.complaints() == []
    asked = [
        url for url in chrome.requests() if not url.startswith(("about:", "data:", "chrome:", "chrome-untrusted:"))
    ]
    assert asked and all(url.startswith(local.url) for url in asked)


SAVE = """
const done = arguments[arguments.length - 1];
URL.createObjectURL = (blob) => { blob.arrayBuffer().then((b) => done([...new Uint8Array(b)])); return "data:,"; };
HTMLAnchorElement.prototype.click = () => {};
arguments[0].click();
"""


@pytest.mark.slow
def test_every_figure_is_saved_as_svg_and_png(chrome: Browser, local: LocalServer) -> None:
    """Files are whole, have a caption, and the SVG shows every label of the picture; the focus stays on the button."""
    chrome.open(f"{local.url}#view=head&layer=1&head=2")
    count = 0
    for view in VIEWS:
        chrome.click(f'[data-view="{view}"]')
        chrome.until(lambda view=view: chrome.js("return document.querySelector('.body').dataset.view") == view)
        for button in chrome.js("return [...document.querySelectorAll('.body .save button')]"):
            kind = button.text
            chrome.js("arguments[0].focus()", button)
            data = bytes(chrome.driver.execute_async_script(SAVE, button))
            assert chrome.js("return document.activeElement === arguments[0]", button), view
            if kind == "PNG":
                assert data.startswith(b"\x89PNG"), view
                continue
            drawing = fromstring(data.decode())
            assert drawing.tag == "{http://www.w3.org/2000/svg}svg", view
            texts = ["".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
            assert any(PAIR[0] in text for text in texts), (view, "the caption has the text")
            labels = "arguments[0].closest('.save').parentElement.querySelectorAll('bdi')"
            for name in chrome.js(f"return [...{labels}].map((e) => e.textContent)", button):
                assert any(name[:6] in text for text in texts), (view, name)
            count += 1
    assert count >= len(VIEWS) - 1 and chrome.complaints() == []


SAVING = """
const root = arguments[0].closest(".heedful");
root.classList.toggle("saving", arguments[1]);
const box = arguments[0].closest(".save").parentElement.getBoundingClientRect();
return { x: box.left + scrollX, y: box.top + scrollY, width: box.width, height: box.height, scale: 1 };
"""
GROUNDS = """
const style = getComputedStyle(document.querySelector(".heedful"));
const rgb = (name) => style.getPropertyValue(name).trim().slice(1).match(/../g).map((v) => parseInt(v, 16));
return ["--ground", "--panel"].map(rgb);
"""
MARGIN = 14  # pixels around a saved picture, as in save.js
BLOCK = 8  # pixels; pictures are compared by the mean colours of blocks


def screenshot(chrome: Browser, clip: dict[str, float]) -> np.ndarray:
    """Return a part of the open page as [height, width, 3] numbers from 0 to 255."""
    data = chrome.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=float)


def mean_difference(one: np.ndarray, two: np.ndarray) -> float:
    """Return the mean difference of the colours of two pictures, from 0 to 255, in blocks of their common size."""
    rows, columns = (min(a, b) // BLOCK for a, b in zip(one.shape[:2], two.shape[:2], strict=True))
    blocks = [
        picture[: rows * BLOCK, : columns * BLOCK].reshape(rows, BLOCK, columns, BLOCK, 3).mean((1, 3))
        for picture in (one, two)
    ]
    return float(abs(blocks[0] - blocks[1]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_saved_drawings_look_like_the_page(chrome: Browser, local: LocalServer, tmp_path: Path, dark: bool) -> None:
    """Each SVG, shown by a browser, differs from its figure by less than half as much as an empty picture does."""
    chrome.dark(dark)
    set_window(chrome, 1280, 3000)  # all of each view is visible
    page_tab = chrome.driver.current_window_handle
    compared = 0
    for view in VIEWS:
        chrome.open(f"{local.url}#view={view}&layer=1&head=2")
        ground, panel = map(np.array, chrome.js(GROUNDS))
        for number in range(chrome.js("return document.querySelectorAll('.body .save').length")):
            button = chrome.js(f"return document.querySelectorAll('.body .save')[{number}].querySelector('button')")
            drawing = bytes(chrome.driver.execute_async_script(SAVE, button)).decode()
            file = tmp_path / "picture.html"
            file.write_text(f'<!doctype html><meta charset="utf-8"><style>body {{ margin: 0 }}</style>{drawing}')
            root = fromstring(drawing)
            clip = chrome.js(SAVING, button, True)
            clip["width"] = min(clip["width"], float(root.attrib["width"]) - 2 * MARGIN)
            shown = screenshot(chrome, clip)
            chrome.js(SAVING, button, False)
            chrome.driver.switch_to.new_window("tab")
            set_window(chrome, 1280, 3000)
            chrome.driver.get(file.as_uri())
            saved = screenshot(chrome, clip | {"x": MARGIN, "y": MARGIN})
            chrome.driver.close()
            chrome.driver.switch_to.window(page_tab)
            expected = np.where((shown == ground).all(-1, keepdims=True), panel, shown)  # pictures are on a panel
            difference = mean_difference(expected, saved)
            empty = mean_difference(expected, np.broadcast_to(panel, expected.shape))
            assert difference < min(4, 0.5 * empty), (view, number, difference, empty)
            compared += 1
    chrome.dark(False)
    chrome.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert compared > len(VIEWS)


def test_the_head_view_is_a_drawing_up_to_3000_lines(chrome: Browser, local: LocalServer) -> None:
    chrome.open(f"{local.url}#view=head&layer=1&heads=0,2")
    lines = chrome.until(lambda: re.search(r"([\d,]+) lines", chrome.text(".told")))
    assert chrome.js("return document.querySelectorAll('.lines path').length") == int(lines[1].replace(",", ""))


def test_the_page_opens_on_a_head_that_tells_something(chrome: Browser) -> None:
    api = PageAPI([Inspection(heedful.load("heedful-mini-en"), "The cat sat on the mat because it was tired.")])
    first = telling_heads(api.inspections[0])[0]
    with serve_in_background(api) as server:
        chrome.open(server.url)
        assert f"layer={first['layer']}&head={first['head']}&" in chrome.js("return location.hash")
        where = f"Layer {first['layer']}, head {first['head']}: {first['name']} token. "
        assert chrome.text(".story b") == where
        assert chrome.js("return [...document.querySelectorAll('.chip[aria-pressed=true]')].length") == 1
        also = chrome.js("return document.querySelector('.story button').textContent")
        chrome.focus(".story button")
        chrome.keys("\ue007")
        assert also.split(":")[0] in chrome.text(".story b").lower()
        assert chrome.js("return document.activeElement.tagName") != "BODY"
        chrome.open(f"{server.url}#view=head&layer=0&head=1")
        assert "layer=0&head=1&" in chrome.js("return location.hash"), "an address that names a head is kept"


ACTIVE = """
const active = document.activeElement;
return active.getAttribute("aria-label") ?? active.closest("label")?.textContent ?? active.tagName;
"""


def test_keys_work_on_a_fresh_page_and_the_focus_stays(chrome: Browser, local: LocalServer) -> None:
    """Layers change before anything has the focus, and what has it keeps it when the page is drawn anew."""
    chrome.open(f"{local.url}#view=neuron&layer=0&head=0")
    chrome.until(lambda: chrome.js("return document.querySelector('.body').dataset.view") == "neuron")
    labels = "[...document.querySelectorAll('.controls label')]"
    find = f"const s = {labels}.find((l) => l.textContent.startsWith('Layer')).lastChild;"
    layer = f"{find} return s.value"
    assert chrome.js("return document.activeElement.tagName") == "BODY"
    for key, expected in (("]", "1"), ("[", "0"), ("]", "1")):
        chrome.keys(key)
        chrome.until(lambda expected=expected: chrome.js(layer) == expected)
    chrome.js(f"{find} s.focus()")
    before = chrome.js(ACTIVE)
    chrome.js(f"{find} s.value = '0'; s.dispatchEvent(new Event('change'))")
    chrome.until(
        lambda: chrome.js(layer) == "0" and chrome.js("return document.querySelector('.body').ariaBusy") == "false"
    )
    assert before.startswith("Layer") and chrome.js(ACTIVE) == before
    chrome.focus('[data-view="steps"]')
    chrome.keys("\ue007")  # Enter
    chrome.until(lambda: chrome.js("return document.querySelector('.body').dataset.view") == "steps")
    chrome.keys("]", "]")
    chrome.settle()
    assert chrome.js("return document.activeElement.dataset.view") == "steps"


def test_head_view_filters_and_merges_tokens(chrome: Browser, local: LocalServer, asks: PageAPI) -> None:
    inside = asks.inspections[0]
    segments = [0, *(s for s in inside.encoded.segments[1:])]
    last = 0
    sides = []
    for segment in segments:
        last = last if segment is None else segment
        sides.append(last)
    strong = np.stack([weights(asks, 1, head) for head in (0, 2)]) >= 0.03
    chrome.open(f"{local.url}#view=head&layer=1&heads=0,2&filter=01")
    expected = strong[:, np.isin(sides, 0)][:, :, np.isin(sides, 1)].sum()
    shown = chrome.until(lambda: re.search(r"([\d,]+) lines", chrome.text(".told")))
    assert abs(int(shown[1].replace(",", "")) - expected) <= 1  # a weight may be rounded across the bound
    chrome.open(f"{local.url}#view=head&layer=1&heads=2")
    chrome.focus('.tokens .token[data-place="3"]')
    chrome.keys("\ue015", "\ue007")  # arrow down, Enter
    assert chrome.js("return document.querySelector('.token[aria-pressed=true]').dataset.place") == "4"
    line = weights(asks, 1, 2)[4]
    best = int(line.argmax())
    token = inside.sides["source"][best]["text"]
    share = 100 * line[best]
    assert chrome.text(".told").startswith(f"on attends to {token} {share:.1f} %")
    chrome.keys("\ue00c")  # Escape
    assert chrome.js("return document.querySelector('.token[aria-pressed=true]')") is None
    names = chrome.js("return [...document.querySelectorAll('.head-grid > .tokens .token')].map((e) => e.textContent)")
    assert names == [token["text"] for token in inside.sides["source"]]
    pieces = {"\u2581the": False, "play": False, "##ing": True, ".": False}
    sides_of_words = [{"text": text, "continues": goes_on} for text, goes_on in pieces.items()]
    matrix = np.random.default_rng(0).dirichlet(np.ones(4), 4).astype(np.float32)
    answer = chrome.driver.execute_async_script(
        """const [side, values, done] = arguments; Promise.all([import('./numbers.js'), import('./tokens.js')]).then(
        ([m, t]) => { const g = m.wordsOf(side);
        const w = m.merged({ shape: [4, 4], values: Float32Array.from(values) }, g, g);
        done([w.shape, [...w.values], t.namesOf(side, g)]); });""",
        sides_of_words,
        matrix.flatten().tolist(),
    )
    keys_of = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]])
    rows_of = keys_of / keys_of.sum(0)
    assert answer[0] == [3, 3] and answer[2] == ["the", "playing", "."]
    assert np.abs(np.reshape(answer[1], (3, 3)) - rows_of.T @ matrix @ keys_of).max() < 1e-6


SHADES = """
const shares = document.querySelector(".shares");
const [box, list] = [shares, document.querySelector(".right > .tokens")].map((e) => e.getBoundingClientRect());
const data = shares.getContext("2d").getImageData(0, 0, shares.width, shares.height).data;
return { alpha: [...data].filter((_, i) => i % 4 === 3), size: [shares.height, shares.width],
  apart: Math.max(...["left", "top", "right", "bottom"].map((side) => Math.abs(box[side] - list[side]))) };
"""
LEAST_CONTRAST = """
const root = document.querySelector(".heedful");
const style = getComputedStyle(root);
const rgb = (name) => style.getPropertyValue(name).trim().slice(1).match(/../g).map((v) => parseInt(v, 16));
const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.05 + 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const most = Number(style.getPropertyValue("--shade"));
return Math.min(...[...Array(8).keys()].map((head) => {
  const shaded = rgb("--ground").map((v, i) => (1 - most) * v + most * rgb(`--head-${head}`)[i]);
  const [a, b] = [light(rgb("--ink")), light(shaded)];
  return Math.max(a, b) / Math.min(a, b);
}));
"""


def test_keys_of_a_chosen_token_are_shaded_behind_their_names(
    chrome: Browser, local: LocalServer, asks: PageAPI
) -> None:
    """One column for each head, by the square root of the weight; names can be read on a weight of 1 in both themes."""
    chrome.open(f"{local.url}#view=head&layer=1&heads=0,2")
    chrome.focus('.tokens .token[data-place="3"]')
    chrome.keys("\ue007")
    shades = chrome.js(SHADES)
    expected = np.stack([weights(asks, 1, head)[3] for head in (0, 2)], 1)
    assert tuple(shades["size"]) == expected.shape and shades["apart"] < 1
    most = chrome.js("return Number(getComputedStyle(document.querySelector('.shares')).getPropertyValue('--shade'))")
    assert np.abs(np.reshape(shades["alpha"], expected.shape) / 255 - most * expected**0.5).max() < 0.01
    for dark in (False, True):
        chrome.dark(dark)
        assert chrome.js(LEAST_CONTRAST) >= 4.5, dark
    chrome.dark(False)


COLUMNS = """
return [...document.querySelectorAll(".valued")].map((column) => {
  const canvas = column.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, 1, canvas.height).data;
  return { colours: [...Array(canvas.height).keys()].map((i) => [...data.slice(4 * i, 4 * i + 3)]),
    numbers: [...column.querySelectorAll(".cell")].map((e) => parseFloat(e.textContent.replace("−", "-"))),
    lines: column.parentElement.querySelector(".links path").getAttribute("d").split("M").length - 1 };
});
"""


def test_sums_scores_and_weights_of_the_neuron_view_are_colours_too(chrome: Browser, local: LocalServer) -> None:
    """Positive numbers are orange, negative ones blue, large weights dark; lines join the rows, a frame marks one."""
    chrome.open(f"{local.url}#view=neuron&layer=1&head=2&row=3&numbers=true")
    sums, scores, shares = chrome.js(COLUMNS)
    for column in (sums, scores):
        numbers = np.array(column["numbers"])
        red, _, blue = np.array(column["colours"]).T
        clear = np.abs(numbers) > 0.1 * np.abs(numbers).max()
        assert clear.sum() > 3 and ((red > blue) == (numbers > 0))[clear].all()
    brightness = np.array(shares["colours"]).sum(1)
    assert (np.diff(brightness[np.argsort(shares["numbers"])]) <= 0).all()
    assert {column["lines"] for column in (sums, scores, shares)} == {len(shares["numbers"])}
    chrome.focus('[aria-label="keys"]')
    chrome.keys("\ue015", "\ue015")  # row 2
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert chrome.js(top, ".columns-of > .cursor") == pytest.approx(chrome.js(top, ".names .cell:nth-child(3)"), abs=1)
    assert f"weight {shares['numbers'][2]:.1f} %" in chrome.text(".told")


PATTERN = """
const digits = [...document.querySelectorAll(".figures .cell, .weight .number")].filter((e) => e.checkVisibility());
const width = (e) => e.getBoundingClientRect().width;
const widths = (where) => [...document.querySelectorAll(where)].map(width);
return { digits: digits.length, fields: widths("canvas[aria-label]"), strips: widths(".valued canvas") };
"""
GAPS = """
const gaps = [];
const columns = [...document.querySelectorAll(".figures")];
for (const column of columns) {
  const strip = column.querySelector("canvas").getBoundingClientRect();
  const line = column.nextElementSibling.querySelector(".links").getBoundingClientRect();
  for (const cell of column.querySelectorAll(".cell")) {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const text = range.getBoundingClientRect();
    gaps.push([text.left - strip.right, line.left - text.right]);
  }
}
return gaps;
"""


def test_the_neuron_view_opens_on_the_pattern_and_numbers_are_a_switch(chrome: Browser, local: LocalServer) -> None:
    """Products are the widest picture; numbers, if shown, touch neither the lines nor the colours beside them."""
    set_window(chrome, 1280)
    chrome.open(f"{local.url}#view=neuron&layer=1&head=2&row=3")
    pattern = chrome.js(PATTERN)
    assert pattern["digits"] == 0 and min(pattern["strips"]) >= 24
    query, keys, products = pattern["fields"]
    assert products > 1.5 * query and products > 1.5 * keys
    assert re.match(r"sat attends to .+ \d+\.\d %, .+ \d+\.\d %, .+ \d+\.\d %\. Point at a row", chrome.text(".told"))
    chrome.focus('.neuron-view input[type="checkbox"]')
    chrome.keys(" ")
    assert "numbers=true" in chrome.js("return location.hash") and chrome.js(PATTERN)["digits"] > 0
    assert chrome.js("return document.activeElement.type") == "checkbox"
    left, right = np.array(chrome.js(GAPS)).T
    assert left.min() >= 6 and right.min() >= 8
    chrome.keys(" ")
    assert chrome.js(PATTERN)["digits"] == 0
    chrome.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


BARS = """
const colour = (name) => {
  const probe = document.querySelector(".heedful").appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};
const number = (track) => parseFloat(track.nextElementSibling.textContent.replace("−", "-"));
const rows = [...document.querySelectorAll(".step-card .bars .track")]
  .map((track) => [getComputedStyle(track.firstChild).backgroundColor, number(track)]);
return { rows, colours: ["--warm-2", "--cold-2", "--heat-2"].map(colour) };
"""


def test_bars_of_scores_have_the_colours_of_signs_and_weights_their_own(chrome: Browser, local: LocalServer) -> None:
    """In both themes: orange is positive, blue is negative, and a weight is neither."""
    for dark in (False, True):
        chrome.dark(dark)
        chrome.open(f"{local.url}#view=steps&layer=0&head=2&row=3&step=4")
        assert chrome.text(".step-card h3") == "Scores"
        shown = chrome.js(BARS)
        warm, cold, weight = shown["colours"]
        assert {number < 0 for _, number in shown["rows"]} == {True, False}
        assert all(colour == (cold if number < 0 else warm) for colour, number in shown["rows"])
        chrome.focus('.stage[aria-pressed="true"]')
        chrome.keys("\ue015")
        assert chrome.text(".step-card h3") == "Softmax"
        assert {colour for colour, _ in chrome.js(BARS)["rows"]} == {weight} and len({warm, cold, weight}) == 3
    chrome.dark(False)


SCALE = """
const [weights, done] = arguments;
import("./draw.js").then((draw) => {
  const root = document.querySelector(".heedful");
  const paint = (names, values, how) => {
    const canvas = document.createElement("canvas");
    draw.paint(canvas, values, 1, values.length, { ...how, lut: draw.colours(root, names) });
    const data = canvas.getContext("2d").getImageData(0, 0, values.length, 1).data;
    return values.map((_, i) => [...data.slice(4 * i, 4 * i + 3)]);
  };
  const signs = [...Array(201).keys()].map((i) => (i - 100) / 100);
  const strengths = weights.map((weight) => draw.strength(weight));
  done([paint(draw.HEAT, weights, {}), paint(draw.SIGNED, signs, { signed: 1 }), strengths]);
});
"""
LINES = """
const opacities = [...document.querySelectorAll(".lines path")].map((e) => Number(e.getAttribute("opacity")));
return opacities.sort((a, b) => a - b);
"""


def lightness(colours: list[list[int]]) -> np.ndarray:
    """Return CIE L* of sRGB colours."""
    values = np.array(colours) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    lightness: np.ndarray = 116 * np.cbrt(luminance) - 16
    return lightness


def test_small_weights_can_be_seen_and_do_not_look_decisive(chrome: Browser, local: LocalServer, asks: PageAPI) -> None:
    """One scale in every view: its colours by lightness, its lines by opacity; no colour of a weight means a sign."""
    shares = [0.0, 0.03, 0.05, 0.09, 0.5, 1.0]
    for dark in (False, True):
        chrome.dark(dark)
        chrome.open(f"{local.url}#view=head&layer=1&head=2")
        heat, signed, strengths = chrome.driver.execute_async_script(SCALE, shares)
        np.testing.assert_allclose(strengths, np.sqrt(shares))
        nothing, three, five, nine, half, full = lightness(heat)
        contrast = abs(full - nothing)
        assert abs(three - nothing) > 8 and abs(five - nothing) > 12, dark
        assert abs(nine - nothing) < 0.35 * contrast and abs(half - nine) > 0.3 * contrast, dark
        colourful = [np.array(colour) for colour in heat[3:]]
        signs = np.array([colour for number, colour in enumerate(signed) if abs(number - 100) > 30])
        assert min(np.linalg.norm(signs - colour, axis=1).min() for colour in colourful) > 30, dark
    chrome.dark(False)
    drawn = weights(asks, 1, 2)
    chrome.open(f"{local.url}#view=head&layer=1&head=2")
    opacities = chrome.until(lambda: chrome.js(LINES))
    strong = np.sort(drawn[drawn >= 0.03])
    assert abs(len(opacities) - len(strong)) <= 1
    assert opacities[-1] == pytest.approx(np.sqrt(strong[-1]), abs=0.01)
    chrome.focus('.head-view .switch input[type="checkbox"]:not(.bar-of *)')
    chrome.keys(" ")
    assert "relative=true" in chrome.js("return location.hash")
    opacities = chrome.until(lambda: chrome.js(LINES))
    assert opacities[-1] == 1 and opacities[0] == pytest.approx(np.sqrt(strong[0] / strong[-1]), abs=0.02)
    assert f" {100 * strong[-1]:.1f} %".replace(".0 %", " %") in chrome.text(".scale-of")


def test_a_view_is_drawn_again_for_another_width(chrome: Browser, local: LocalServer) -> None:
    set_window(chrome, 1280)
    for view in ("head", "model", "neuron"):
        set_window(chrome, 1280)
        chrome.open(f"{local.url}#view={view}&layer=1&head=2")
        chrome.js("document.querySelector('.body').firstElementChild.dataset.before = 'yes'")
        set_window(chrome, 390)
        before = "return document.querySelector('[data-before]') !== null"
        chrome.until(lambda before=before: not chrome.js(before))
        chrome.settle()
        assert layout_problems(chrome) == [], view
    chrome.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


MODEL_VIEW = """
const size = (where) => document.querySelector(where).getBoundingClientRect();
const [thumb, map] = [".thumb", ".large .heat"].map(size);
const page = document.documentElement.scrollHeight;
return { page, thumb: [thumb.width, thumb.height], map: [map.width, map.height] };
"""


def test_six_layers_of_twelve_heads_fit_into_a_window(chrome: Browser) -> None:
    """With a large map of 13 tokens, in 1280 x 860 pixels."""
    words = word_tokenizer(WORDS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=96, positions=Learned(count=64))
    stack = StackConfig(width=96, layers=6, heads=12, head_width=8, inner_width=96)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    loaded = create(config, words, seed=1).eval()
    loaded.tokenizer = ending(words)
    set_window(chrome, 1280, 860)
    with serve_in_background(PageAPI([Inspection(loaded, " ".join(WORDS[:11]))])) as server:
        chrome.open(f"{server.url}#view=model&layer=1&head=3")
        sizes = chrome.js(MODEL_VIEW)
    chrome.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert sizes["page"] <= 860
    assert sizes["thumb"][0] >= 64 and sizes["thumb"][1] >= 79
    assert min(sizes["map"]) >= 300


def test_keyboard_and_numbers(chrome: Browser, local: LocalServer, asks: PageAPI) -> None:
    chrome.open(f"{local.url}#view=model&layer=1&head=3")
    chrome.focus(".heat")
    chrome.keys("\ue015", "\ue015", "\ue014")  # down, down, right: row 2, key 1
    share = 100 * weights(asks, 1, 3)[2, 1]
    assert chrome.text(".told") == f"cat attends to the: {share:.1f} %"
    chrome.focus('.thumb[aria-pressed="true"]')
    chrome.keys("\ue012", "\ue007")  # left, Enter
    assert chrome.until(lambda: chrome.text(".large figcaption") == "Layer 1, head 2")
    chrome.focus('[role="tab"][aria-selected="true"]')
    chrome.keys("\ue014")
    assert chrome.js("return document.querySelector('.body').dataset.view") == "neuron"
    assert chrome.js("return document.activeElement.dataset.view") == "neuron"
    assert chrome.js("return document.querySelector('.neurons').dataset.exact") == "true"
    chrome.keys("[")
    assert "layer=0" in chrome.js("return location.hash")
    chrome.click(".theme")
    theme = chrome.js("return document.querySelector('.heedful').dataset.theme")
    assert theme in ("light", "dark")
    chrome.js("document.querySelector('.reading textarea').value = 'the dog'")
    chrome.click(".reading button")
    chrome.until(lambda: len(asks.inspections[0].sides["source"]) == 14)
    asks.inspections[0] = Inspection(asks.inspections[0].loaded, PAIR)


def test_the_header_follows_what_is_compared(chrome: Browser, asks: PageAPI) -> None:
    """Whichever text is changed, and from where."""
    with serve_in_background(
        PageAPI([Inspection(asks.inspections[0].loaded, "the cat"), Inspection(asks.inspections[0].loaded, "the dog")])
    ) as server:
        chrome.open(f"{server.url}#view=compare&side=1")
        field = "return document.querySelector('.reading textarea').value"
        assert chrome.js(field) == "the dog"
        chrome.js("document.querySelector('.compare-view textarea').value = 'the mat'")
        chrome.click(".compare-view form button")
        chrome.until(lambda: chrome.js(field) == "the mat")
        chrome.js("document.querySelector('.reading textarea').focus()")
        chrome.js("document.querySelector('.reading textarea').value = 'the cat sat'")
        chrome.click(".reading button")
        chrome.until(lambda: "the cat sat" in chrome.text(".sides"))
        assert chrome.js("return document.activeElement.tagName") == "TEXTAREA"


def test_a_word_is_marked_where_it_stands_behind_emoji(chrome: Browser, tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "single", "single"))
    texts = ["\U0001f600\U0001f600\U0001f600 the cat sat", "\U0001f600" * 70 + " the cat"]
    file = tmp_path / "look.html"
    first, *more = [Inspection(loaded, text) for text in texts]
    file.write_text(page.render_html(PageAPI([first], extra=more, word="cat"), layers=[0], heads=[0]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=words")
    assert chrome.js("return [...document.querySelectorAll('.texts mark')].map((e) => e.textContent)") == ["cat", "cat"]
    shown = chrome.js("return [...document.querySelectorAll('.texts li')].map((e) => e.textContent)")
    assert shown == [texts[0], "\U0001f600" * 55 + " the cat"]
    assert "⟨D83D⟩" not in chrome.js("return document.body.textContent")  # half an emoji


def hostile() -> heedful.ModelBundle:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, **{t: n + 1 for n, t in enumerate(HOSTILE)}}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]"])
    words = Tokenizer(backend, {"unk_token": "[UNK]"})
    embedding = EmbeddingConfig(vocabulary=words.size, width=8, positions=Learned(count=20))
    stack = StackConfig(width=8, layers=1, heads=2, head_width=4, inner_width=8)
    return create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), words).eval()


def test_hostile_tokens_are_inert_text_in_one_file(chrome: Browser, tmp_path: Path) -> None:
    text = " ".join(token for token in HOSTILE if "\u0000" not in token) + " \u0000\u0007"
    html = page.render_html(PageAPI([Inspection(hostile(), text)]))
    assert html.count("</script>") == 2 and "\u202e" not in html
    file = tmp_path / "look.html"
    file.write_text(html, encoding="utf-8")
    chrome.requests()
    for view in ("head", "steps", "prediction"):
        chrome.open(f"{file.as_uri()}#view={view}")
        assert chrome.js("return document.querySelector('.body').dataset.view") == view
        assert chrome.js("return document.querySelectorAll('.body .problem:not(:empty)').length") == 0, view
        assert chrome.js("return window.hit ?? null") is None
        assert chrome.js("return document.querySelectorAll('.heedful script, .heedful img').length") == 0
        longest = chrome.js(LONGEST_TEXT)
        assert longest <= 700
    assert "⟨202E⟩gnihtemos" in chrome.js("return document.body.textContent")
    assert chrome.complaints() == []
    assert {url.split(":")[0] for url in chrome.requests()} <= {"file", "about", "data", "chrome"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy and "connect-src 'none'" in policy[1] and "unsafe" not in policy[1]


def test_a_file_keeps_what_was_asked_for_and_tells_the_rest(asks: PageAPI) -> None:
    collected = page.collect_answers(asks, layers=[1], heads=[0, 3])
    weighed = [question for question in collected.answers if question.startswith("weights?")]
    assert weighed == [f"weights?head={h}&layer=1&part=encoder&side={s}" for s in (0, 1) for h in (0, 3)]
    small = page.collect_answers(asks, layers=[0], heads=[0], max_bytes=30_000)
    assert small.bytes <= 30_000 and small.left_out["steps"] > 0 and "about?" in small.answers


@pytest.mark.slow
def test_a_file_of_some_layers_and_heads_opens_on_them(chrome: Browser, tmp_path: Path, asks: PageAPI) -> None:
    """Each view shows what was kept, and offers nothing else to choose."""
    file = tmp_path / "look.html"
    options = "return [...document.querySelectorAll('.controls select')].map((e) => [...e.options].map((o) => o.value))"
    chips = "return [...document.querySelectorAll('.chip:enabled')].map((e) => e.textContent)"
    file.write_text(page.render_html(asks, layers=[1], heads=[2, 3]), encoding="utf-8")
    for view in VIEWS:
        chrome.open(f"{file.as_uri()}#view={view}&layer=0&head=0")
        chrome.until(lambda view=view: chrome.js("return document.querySelector('.body').dataset.view") == view)
        assert chrome.js(PROBLEMS) == "", view
        assert "&layer=1&head=2&" in chrome.js("return location.hash")
        if view == "neuron":
            assert chrome.js(options) == [["0", "1"], ["1"], ["2", "3"]]
    chrome.open(f"{file.as_uri()}#view=head")
    assert chrome.js(chips) == ["2", "3"] and "1 head:" in chrome.until(lambda: chrome.text(".told"))
    chrome.focus('.tab[aria-selected="true"]')
    chrome.keys("}", "}", "]", "[")
    assert "&layer=1&head=3&" in chrome.js("return location.hash") and chrome.js(PROBLEMS) == ""
    chrome.open(f"{file.as_uri()}#view=compare")
    assert chrome.js("return [...document.querySelectorAll('.bar-of option')].map((e) => e.value)") == [
        "mean",
        "2",
        "3",
    ]
    assert chrome.complaints() == []


@pytest.mark.slow
def test_a_file_of_one_head_shows_where_it_looked(chrome: Browser, tmp_path: Path) -> None:
    file = tmp_path / "look.html"
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = ending(word_tokenizer(WORDS))
    file.write_text(page.render_html(PageAPI([Inspection(loaded, TEXT)]), layers=[1], heads=[2]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=alignment")
    assert chrome.text(".alignment-view figcaption") == "Layer 1, head 2" and chrome.js(PROBLEMS) == ""
    chrome.open(f"{file.as_uri()}#view=decoder")
    assert "layer 1, head 2" in chrome.text(".decoder-view") and chrome.js(PROBLEMS) == ""


def test_a_file_offers_the_scores_that_it_holds(
    chrome: Browser, tmp_path: Path, asks: PageAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token of a tagger is none of them, nor is one of many classes."""
    file = tmp_path / "look.html"
    options = "return [...document.querySelectorAll('.bar-of option')].map((e) => e.value)"
    tagger = PageAPI([Inspection(heedful.load(make_model_dir(tmp_path / "tag", "tag")), "ada lives in paris")])
    monkeypatch.setattr(page, "MAX_SCORES", 2)
    usual = asks("prediction", {})["choices"]["label"]
    for shown, expected in ((tagger, set()), (asks, {"0", "1", str(usual)})):
        file.write_text(page.render_html(shown), encoding="utf-8")
        chrome.open(f"{file.as_uri()}#view=prediction")
        chrome.until(lambda: chrome.js("return document.querySelector('.prediction-view') !== null"))
        assert set(chrome.js(options)) == expected and chrome.js(PROBLEMS) == ""
    with serve_in_background(tagger) as server:
        chrome.open(f"{server.url}#view=prediction")
        assert len(chrome.until(lambda: chrome.js(options))) > 4


def test_only_its_reader_gets_in(local: LocalServer) -> None:
    here = local.url.rstrip("/").rsplit("/", 1)[0]

    def status(url: str, **headers: str) -> tuple[int, Any]:
        try:
            with urlopen(Request(url, headers=headers), timeout=10) as answer:
                return answer.status, answer.headers
        except HTTPError as error:
            return error.code, error.headers

    code, headers = status(local.url)
    assert code == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer" and "no-store" in headers["Cache-Control"]
    for path in (
        "/",
        "/about",
        "/ask/about",
        f"/{'x' * 32}/",
        f"/{local.token}/../local.py",
        f"/{local.token}/page.py",
    ):
        assert status(here + path)[0] == 404, path
    assert status(local.url, Host="evil.example")[0] == 403
    with socket.create_connection(("127.0.0.1", local.server_address[1]), timeout=10) as plain:
        plain.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
        assert b" 501 " in plain.recv(1000)


def test_notebook_and_command(tmp_path: Path, asks: PageAPI, capsys: pytest.CaptureFixture[str]) -> None:
    message = answer_message(asks, {"number": 3, "name": "weights", "params": {"layer": 1, "head": 2}})
    assert message["number"] == 3 and message["answer"]["weights"]["shape"] == [len(asks.inspections[0].encoded)] * 2
    assert (
        'part "x" does not exist'
        in answer_message(asks, {"number": 4, "name": "weights", "params": {"part": "x"}})["error"]
    )
    assert answer_message(asks, "nonsense")["error"]
    pytest.importorskip("anywidget")
    widget = make_widget(asks)
    assert "startWidget" in widget._esm and "import " not in re.sub(r'import\("', "", str(widget._esm)).split("/**")[0]
    assert callable(heedful.look)
    run = make_model_dir(tmp_path / "run", "single")
    with pytest.raises(SystemExit) as ended:
        main(["look", str(run), "the cat", "the dog", "--html", str(tmp_path / "a.html"), "--layer", "1"])
    assert not ended.value.code and "opens in any browser" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["look", str(run)])
    assert ended.value.code == 2 and "no text was given" in capsys.readouterr().err


def test_layers_and_heads_that_are_not_there_are_refused(
    tmp_path: Path, asks: PageAPI, capsys: pytest.CaptureFixture[str]
) -> None:
    for layers, heads, message in (
        ([1, 99], None, r"layers \[99\] do not exist; give numbers from 0 to 1"),
        (None, [-1], r"heads \[-1\] do not exist; give numbers from 0 to 3"),
        ([], None, "layers is empty"),
    ):
        with pytest.raises(heedful.HeedfulError, match=message):
            page.render_html(asks, layers=layers, heads=heads)
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


def test_a_question_is_written_as_the_page_writes_it() -> None:
    assert page.question_key("words", {"word": "don't (é) a/b"}) == "words?word=don't%20(%C3%A9)%20a%2Fb"


def test_a_notebook_asks_its_kernel(chrome: Browser, tmp_path: Path, asks: PageAPI) -> None:
    """The widget's module, with a model that passes questions and answers on, as anywidget's does."""
    place = {"side": "0", "part": "encoder", "layer": "0"}
    asked = [("about", {}), *(("weights", place | {"head": str(head)}) for head in range(4))]
    messages = [answer_message(asks, {"number": 0, "name": name, "params": params}) for name, params in asked]
    answers = {
        page.question_key(name, params): message["answer"]
        for (name, params), message in zip(asked, messages, strict=True)
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
    messages = "return document.querySelector('.told')?.textContent ?? ''"
    chrome.until(lambda: re.search(r"\d+ lines", chrome.js(messages)))  # the text of the previous view is there first
    chrome.click('[data-view="neuron"]')
    chrome.until(lambda: chrome.js(PROBLEMS) == "not kept: neuron")
    assert chrome.complaints() == []


@pytest.mark.slow
def test_alignment_has_what_was_written_down_its_side(chrome: Browser, tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = ending(word_tokenizer(WORDS))
    inside = Inspection(loaded, TEXT, target=TEXT[:11])
    with serve_in_background(PageAPI([inside])) as server:
        chrome.open(f"{server.url}#view=alignment&layer=1")
        names = chrome.js("return [...document.querySelectorAll('.map .rows span')].map((e) => e.textContent)")
        assert names == [side["text"] for side in inside.sides["generated"]]
        chrome.js(
            "const s = document.querySelector('.panel select'); s.value = '2'; s.dispatchEvent(new Event('change'))"
        )
        assert chrome.text(".alignment-view figcaption") == "Layer 1, head 2"
        chrome.focus(".heat")
        chrome.keys("\ue015")  # row 1, key 0
        share = 100 * float(inside.weights("cross", 1, [2])[0, 1, 0])
        assert chrome.text(".told") == f"{names[1]} from {inside.sides['source'][0]['text']}: {share:.1f} %"
        chrome.click('[data-view="decoder"]')
        assert chrome.js("return document.querySelectorAll('.decoder-view .table tr').length") == 6
    assert chrome.complaints() == []


def inspections_of_every_kind(folder: Path) -> dict[str, list[Inspection]]:
    """Tiny models of each head, classic kind and shape, with a text each; candidates where a head compares them."""
    texts: dict[str, Any] = {
        **{"masked": "the [MASK] sat", "pretraining": "the [MASK] sat", "tag": "ada lives in paris"},
        **{"multiple": PAIR[0], "regression": PAIR[0], "bare": PAIR[0]},
        **{"span": ("who wrote it", "ada wrote the program"), "next": PAIR},
    }
    shown = {name: Inspection(heedful.load(make_model_dir(folder / name, name)), text) for name, text in texts.items()}
    shown |= {
        name: Inspection(make_classic(name), "the film was not good . the end .")
        for name in ("structured", "hierarchical")
    }
    save_tiny(folder / "t5", "t5", "T5ForConditionalGeneration", vocab_size=96)
    save_tiny(folder / "gpt2", "gpt2", "GPT2LMHeadModel", vocab_size=96, bos_token_id=1, eos_token_id=1)
    for family in ("t5", "gpt2"):
        loaded = heedful.load(folder / family)
        loaded.tokenizer = ending(word_tokenizer(WORDS))
        shown[family] = Inspection(loaded, TEXT)
    seen = {name: [inside] for name, inside in shown.items()}
    seen["choice"] = inspect_choices(
        heedful.load(make_model_dir(folder / "choice", "choice")), PAIR[0], ["the cat", "a dog", "love"]
    )
    return seen


@pytest.mark.slow
def test_every_kind_of_model_has_its_views(chrome: Browser, tmp_path: Path) -> None:
    for name, insides in inspections_of_every_kind(tmp_path).items():
        with serve_in_background(PageAPI(insides)) as server:
            chrome.open(server.url)
            views = chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)")
            assert ("decoder" in views) == (name in ("t5", "gpt2")) and ("alignment" in views) == (name == "t5"), name
            for view in views:
                chrome.click(f'[data-view="{view}"]')
                chrome.until(lambda view=view: chrome.js("return document.querySelector('.body').dataset.view") == view)
                problems = chrome.js(PROBLEMS)
                assert problems == "", (name, view, problems)
    assert chrome.complaints() == []


@pytest.mark.slow
def test_large_view_is_quick_and_small(chrome: Browser) -> None:
    """512 tokens, 12 layers of 12 heads: interactive in 3 s, in less than 500 MB."""
    words = make_words()
    embedding = EmbeddingConfig(vocabulary=words.size, width=384, positions=Learned(count=512))
    stack = StackConfig(width=384, layers=12, heads=12, head_width=32, inner_width=768, score_scale=30.0)
    loaded = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), words).eval()
    torch.manual_seed(0)
    text = " ".join(f"w{number}" for number in torch.randint(0, 400, (512,)).tolist())
    with serve_in_background(PageAPI([Inspection(loaded, text)])) as server:
        for view in ("head", "model", "neuron"):
            times = []
            for _ in range(3):  # other processes may be in the way
                chrome.open(f"{server.url}#view={view}")
                times.append(chrome.js("return performance.now()") / 1000)
            seconds = min(times)
            used = chrome.memory() / 1e6
            print(f"{view}: {seconds:.2f} s, {used:.0f} MB")
            assert seconds < 3, (view, seconds)
            assert used < 400, (view, used)  # beside it the browser itself has some 260 MB
    assert chrome.complaints() == []


def make_words() -> Tokenizer:
    return word_tokenizer([f"w{number}" for number in range(400)])


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_said_in_their_place(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "single", "single"))
    with torch.no_grad():
        loaded.model.embedding.tokens.weight.fill_(float("nan"))
    collected = page.collect_answers(PageAPI([Inspection(loaded, "the cat")]))
    assert any("not finite" in answer.get("error", "") for answer in collected.answers.values())
    json.dumps(collected.answers, allow_nan=False)


def test_heads_are_switched_off_and_tokens_replaced_in_the_page(chrome: Browser, local: LocalServer) -> None:
    """By keyboard alone; what comes out is what Python says, and the focus stays where it was."""
    chrome.open(f"{local.url}#view=change")
    before = chrome.until(lambda: chrome.text(".changed"))
    assert "nothing changed yet" in before
    chrome.focus('.gate[data-place="encoder.1.2"]')
    chrome.keys("\ue007")
    chrome.until(lambda: "1 head off" in chrome.text(".changed"))
    active = "return document.activeElement.dataset.place"
    assert chrome.js(active) == "encoder.1.2"
    assert chrome.js("return document.activeElement.getAttribute('aria-pressed')") == "false"
    chrome.keys("\ue014")
    assert chrome.js(active) == "encoder.1.3"
    place = "[...document.querySelectorAll('.change-view input')].find((e) => e.value === 'cat')"
    chrome.js(f"const e = {place}; e.focus(); e.select();")
    chrome.keys("dog", "\ue007")
    chrome.until(lambda: "1 head off, 1 token replaced" in chrome.text(".changed"))
    assert chrome.complaints() == []


def test_a_file_says_why_it_changes_nothing(chrome: Browser, tmp_path: Path, asks: PageAPI) -> None:
    file = tmp_path / "look.html"
    file.write_text(page.render_html(PageAPI(asks.inspections[:1]), layers=[0], heads=[0]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=change")
    assert "A file cannot compute a new prediction" in chrome.text(".change-view > .note")
    assert chrome.js("return [...document.querySelectorAll('.gate, .change-view input')].every((e) => e.disabled)")


def test_arrow_keys_step_through_a_block(chrome: Browser, local: LocalServer) -> None:
    chrome.open(f"{local.url}#view=steps&layer=0&head=0&row=2&step=2")
    stages = chrome.js("return [...document.querySelectorAll('.stage')].map((e) => e.textContent)")
    assert len(stages) == 11 and stages[3] == "4Query, key and value"
    chrome.focus('.stage[aria-pressed="true"]')
    chrome.keys("\ue015")
    assert chrome.text(".step-card h3") == "Query, key and value"
    assert chrome.text(".law") == "q = x WQ + bQ    k = x WK + bK    v = x WV + bV"
    chrome.keys("\ue015")
    rows = chrome.js("return document.querySelectorAll('.step-card .bars .track').length")
    assert chrome.text(".step-card h3") == "Scores" and rows == len(
        chrome.js("return [...document.querySelectorAll('.steps-view .panel .token')]")
    )
    chrome.focus(".step-card button:last-of-type")
    chrome.keys("\ue007")
    assert chrome.text(".step-card h3") == "Softmax"
    assert chrome.js("return document.activeElement.className").startswith("stage")


def test_lecture_mode(chrome: Browser, local: LocalServer) -> None:
    chrome.open(f"{local.url}#view=head&layer=1&head=2")
    size = "return parseFloat(getComputedStyle(document.querySelector('.token')).fontSize)"
    small = chrome.js(size)
    chrome.keys("l")
    assert chrome.js(size) == pytest.approx(1.6 * small, rel=0.01) and "lecture=true" in chrome.js(
        "return location.hash"
    )
    assert chrome.js("return getComputedStyle(document.querySelector('.reading')).display") == "none"
    chrome.keys("L")
    assert chrome.js(size) == small


@pytest.mark.slow
def test_a_sentence_takes_less_than_two_megabytes(tmp_path: Path) -> None:
    """In the shape of all-MiniLM-L6-v2: six layers of twelve heads, 384 numbers for a token, 30,522 tokens."""
    stack = StackConfig(width=384, layers=6, heads=12, head_width=32, inner_width=1536)
    embedding = EmbeddingConfig(vocabulary=30_522, width=384, positions=Learned(count=512), types=2, norm="layer")
    loaded = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), seed=1)
    loaded.tokenizer = heedful.load("heedful-mini-en").tokenizer
    content = page.render_html(PageAPI([Inspection(loaded, "The cat sat on the mat because it was tired.")]))
    kept = json.loads(re.search(r'id="kept">(.*?)</script>', content)[1])
    assert len(content) < 2_000_000 and kept["left_out"] == {}
    assert sum(name.startswith("steps?") for name in kept["answers"]) == 6 * 13


def test_words_begin_with_those_of_the_text(chrome: Browser, tmp_path: Path) -> None:
    api = PageAPI([Inspection(heedful.load("heedful-mini-en"), "He sat on the bank of the river in Paris.")])
    with serve_in_background(api) as server:
        chrome.open(f"{server.url}#view=words")
        assert chrome.js("return document.querySelector('.another input').value") == "river"
        shown = chrome.js("return [...document.querySelectorAll('.scatter circle')].length")
        assert shown == len(api("scatter", {})["words"])  # type: ignore[arg-type]
        assert "kings" in chrome.text(".words-view > .panel:last-child .bars")
        field = "document.querySelector('input[aria-label=\"Words, with spaces between\"]')"
        chrome.js(f"{field}.value = 'one two three 天'; {field}.form.requestSubmit()")
        chrome.until(lambda: chrome.js("return document.querySelectorAll('.scatter circle').length") == 3)
        assert "Without a vector in this model: 天." in chrome.text(".body")
        chrome.js(f"{field}.value = 'one'; {field}.form.requestSubmit()")
        chrome.until(lambda: "give at least three" in chrome.text(".body"))
    (tmp_path / "page.html").write_text(page.render_html(api), encoding="utf-8")
    chrome.open(f"file://{tmp_path}/page.html#view=words")
    assert chrome.js("return document.querySelectorAll('.scatter circle').length") == shown
    assert chrome.js("return document.querySelectorAll('.words-view form').length") == 0
    assert chrome.complaints() == []

"""The head view, the neuron view and their colours in a browser: lines, shades, bars and strips are the numbers."""

from __future__ import annotations

import re
from itertools import accumulate

import numpy as np
import pytest

from heedful.checkpoint import BundleConfig, create
from heedful.look.inspection import Inspection
from heedful.look.local_server import LocalServer, serve_in_background
from heedful.look.page_api import PageAPI
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.tokenizer.words import word_tokenizer
from tests.support.browser import Browser, Keys
from tests.support.look_pages import (
    STATUS_LINE,
    WORDS,
    head_weights,
)
from tests.support.page_checks import SCRIPT, relative_luminance, set_window

MAX_DRAWN_LINES = 3000  # as DRAWN in head.js
# returns whether there is a canvas between the tokens on which something is painted
PAINTED = """
const canvas = document.querySelector(".lines canvas");
if (canvas === null) return false;
return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0);
"""


def test_the_head_view_is_a_drawing_up_to_3000_lines_and_a_canvas_beyond(chrome: Browser) -> None:
    """Ten tokens, with weights of about 0.1, have 100 lines for each head."""
    words = word_tokenizer(WORDS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=62, positions=Learned(count=16))
    stack = StackConfig(width=62, layers=1, heads=31, head_width=2, inner_width=16)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    api = PageAPI([Inspection(create(config, words, seed=1).eval(), " ".join(WORDS[:10]))])
    with serve_in_background(api) as server:
        for heads, lines in ((30, MAX_DRAWN_LINES), (31, MAX_DRAWN_LINES + 100)):
            chrome.open(f"{server.url}#view=head&layer=0&heads={','.join(map(str, range(heads)))}")
            chrome.until(lambda lines=lines: f"{lines:,} lines" in chrome.text(STATUS_LINE))
            is_drawing = lines <= MAX_DRAWN_LINES
            assert chrome.js("return document.querySelectorAll('.lines path').length") == (lines if is_drawing else 0)
            assert chrome.js(PAINTED) == (not is_drawing)


def test_head_view_filters_and_merges_tokens(chrome: Browser, server: LocalServer, page_api: PageAPI) -> None:
    inspection = page_api.inspections[0]
    # a special token belongs to the text before it, and the first token to the first text
    text_of_token = list(
        accumulate(inspection.encoded.segments[1:], lambda last, text: last if text is None else text, initial=0)
    )
    strong = np.stack([head_weights(page_api, 1, head) for head in (0, 2)]) >= 0.03
    chrome.open(f"{server.url}#view=head&layer=1&heads=0,2&filter=01")
    expected = strong[:, np.equal(text_of_token, 0)][:, :, np.equal(text_of_token, 1)].sum()
    line_count = chrome.until(lambda: re.search(r"([\d,]+) lines", chrome.text(STATUS_LINE)))
    assert abs(int(line_count[1].replace(",", "")) - expected) <= 1  # a weight may be rounded across the bound
    chrome.open(f"{server.url}#view=head&layer=1&heads=2")
    chrome.focus('.tokens .token[data-place="3"]')
    chrome.keys(Keys.ARROW_DOWN, Keys.ENTER)
    assert chrome.js("return document.querySelector('.token[aria-pressed=true]').dataset.place") == "4"
    line = head_weights(page_api, 1, 2)[4]
    best = int(line.argmax())
    token = inspection.sides["source"][best]["text"]
    share = 100 * line[best]
    assert chrome.text(STATUS_LINE).startswith(f"on attends to {token} {share:.1f} %")
    chrome.keys(Keys.ESCAPE)
    assert chrome.js("return document.querySelector('.token[aria-pressed=true]')") is None
    names = chrome.js("return [...document.querySelectorAll('.head-grid > .tokens .token')].map((e) => e.textContent)")
    assert names == [token["text"] for token in inspection.sides["source"]]
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


# returns the opacity of each pixel and [height, width] of the canvas behind the tokens on the right, and by how many
# pixels its sides are apart from those of the list of tokens
SHADES = """
const shares = document.querySelector(".shares");
const [box, list] = [shares, document.querySelector(".right > .tokens")].map((e) => e.getBoundingClientRect());
const data = shares.getContext("2d").getImageData(0, 0, shares.width, shares.height).data;
return { alpha: [...data].filter((_, i) => i % 4 === 3), size: [shares.height, shares.width],
  apart: Math.max(...["left", "top", "right", "bottom"].map((side) => Math.abs(box[side] - list[side]))) };
"""
# returns the lowest contrast between text and the shade of a weight of 1, of all eight colours of heads
LEAST_CONTRAST = (
    SCRIPT
    + """
const style = getComputedStyle(document.querySelector(".heedful"));
const rgb = (name) => style.getPropertyValue(name).trim().slice(1).match(/../g).map((v) => parseInt(v, 16));
const shades = [...Array(8).keys()].map((head) =>
  over([...rgb(`--head-${head}`), Number(style.getPropertyValue("--shade"))], rgb("--ground")));
return Math.min(...shades.map((shade) => contrastRatio(rgb("--ink"), shade)));
"""
)


def test_keys_of_a_chosen_token_are_shaded_behind_their_names(
    chrome: Browser, server: LocalServer, page_api: PageAPI
) -> None:
    """One column for each head, by the square root of the weight; names can be read on a weight of 1 in both themes."""
    chrome.open(f"{server.url}#view=head&layer=1&heads=0,2")
    chrome.focus('.tokens .token[data-place="3"]')
    chrome.keys(Keys.ENTER)
    shades = chrome.js(SHADES)
    expected = np.stack([head_weights(page_api, 1, head)[3] for head in (0, 2)], 1)
    assert tuple(shades["size"]) == expected.shape and shades["apart"] < 1
    most = chrome.js("return Number(getComputedStyle(document.querySelector('.shares')).getPropertyValue('--shade'))")
    assert np.abs(np.reshape(shades["alpha"], expected.shape) / 255 - most * expected**0.5).max() < 0.01
    for dark in (False, True):
        chrome.dark(dark)
        assert chrome.js(LEAST_CONTRAST) >= 4.5, dark


# returns for each column of numbers of the neuron view the colours [red, green, blue] and the numbers of its rows, and
# how many lines there are beside it
COLUMNS = """
return [...document.querySelectorAll(".valued")].map((column) => {
  const canvas = column.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, 1, canvas.height).data;
  return { colours: [...Array(canvas.height).keys()].map((i) => [...data.slice(4 * i, 4 * i + 3)]),
    numbers: [...column.querySelectorAll(".cell")].map((e) => parseFloat(e.textContent.replace("−", "-"))),
    lines: column.parentElement.querySelector(".links path").getAttribute("d").split("M").length - 1 };
});
"""


def test_sums_scores_and_weights_of_the_neuron_view_are_colours_too(chrome: Browser, server: LocalServer) -> None:
    """Positive numbers are orange, negative ones blue, large weights dark; lines join the rows, a frame marks one."""
    chrome.open(f"{server.url}#view=neuron&layer=1&head=2&row=3&numbers=true")
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
    chrome.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)  # row 2
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert chrome.js(top, ".columns-of > .cursor") == pytest.approx(chrome.js(top, ".names .cell:nth-child(3)"), abs=1)
    assert f"weight {shares['numbers'][2]:.1f} %" in chrome.text(STATUS_LINE)


# returns how many numbers the neuron view shows, and the widths of its pictures of vectors and of its columns
PATTERN = """
const digits = [...document.querySelectorAll(".figures .cell, .weight .number")].filter((e) => e.checkVisibility());
const width = (e) => e.getBoundingClientRect().width;
const widths = (where) => [...document.querySelectorAll(where)].map(width);
return { digits: digits.length, fields: widths("canvas[aria-label]"), strips: widths(".valued canvas") };
"""
# returns for each number of the neuron view the pixels between it and the colours on its left, and between it and the
# lines on its right
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


def test_the_neuron_view_opens_on_the_pattern_and_numbers_are_a_switch(chrome: Browser, server: LocalServer) -> None:
    """Products are the widest picture; numbers, if shown, touch neither the lines nor the colours beside them."""
    set_window(chrome, 1280)
    chrome.open(f"{server.url}#view=neuron&layer=1&head=2&row=3")
    pattern = chrome.js(PATTERN)
    assert pattern["digits"] == 0 and min(pattern["strips"]) >= 24
    query, keys, products = pattern["fields"]
    assert products > 1.5 * query and products > 1.5 * keys
    assert re.match(
        r"sat attends to .+ \d+\.\d %, .+ \d+\.\d %, .+ \d+\.\d %\. Point at a row", chrome.text(STATUS_LINE)
    )
    chrome.focus('.neuron-view input[type="checkbox"]')
    chrome.keys(" ")
    assert "numbers=true" in chrome.js("return location.hash") and chrome.js(PATTERN)["digits"] > 0
    assert chrome.js("return document.activeElement.type") == "checkbox"
    left, right = np.array(chrome.js(GAPS)).T
    assert left.min() >= 6 and right.min() >= 8
    chrome.keys(" ")
    assert chrome.js(PATTERN)["digits"] == 0


# returns [colour, number] of each bar of a step, and the colours of positive numbers, of negative ones and of weights
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


def test_bars_of_scores_have_the_colours_of_signs_and_weights_their_own(chrome: Browser, server: LocalServer) -> None:
    """In both themes: orange is positive, blue is negative, and a weight is neither."""
    for dark in (False, True):
        chrome.dark(dark)
        chrome.open(f"{server.url}#view=steps&layer=0&head=2&row=3&step=4")
        assert chrome.text(".step-card h3") == "Scores"
        bars = chrome.js(BARS)
        warm, cold, weight = bars["colours"]
        assert {number < 0 for _, number in bars["rows"]} == {True, False}
        assert all(colour == (cold if number < 0 else warm) for colour, number in bars["rows"])
        chrome.focus('.stage[aria-pressed="true"]')
        chrome.keys(Keys.ARROW_DOWN)
        assert chrome.text(".step-card h3") == "Softmax"
        assert {colour for colour, _ in chrome.js(BARS)["rows"]} == {weight} and len({warm, cold, weight}) == 3


# passes on the colours of some weights, of numbers from -1 to 1 in steps of 0.01, and the strengths of the weights
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
# returns the opacities of the lines of the head view, in ascending order
LINES = """
const opacities = [...document.querySelectorAll(".lines path")].map((e) => Number(e.getAttribute("opacity")));
return opacities.sort((a, b) => a - b);
"""


def lightness(chrome: Browser, colours: list[list[int]]) -> np.ndarray:
    """Return CIE L* of sRGB colours."""
    values: np.ndarray = 116 * np.cbrt(relative_luminance(chrome, colours)) - 16
    return values


def test_small_weights_can_be_seen_and_do_not_look_decisive(
    chrome: Browser, server: LocalServer, page_api: PageAPI
) -> None:
    """One scale in every view: its colours by lightness, its lines by opacity; no colour of a weight means a sign."""
    shares = [0.0, 0.03, 0.05, 0.09, 0.5, 1.0]
    for dark in (False, True):
        chrome.dark(dark)
        chrome.open(f"{server.url}#view=head&layer=1&head=2")
        heat, signed, strengths = chrome.driver.execute_async_script(SCALE, shares)
        np.testing.assert_allclose(strengths, np.sqrt(shares))
        nothing, three, five, nine, half, full = lightness(chrome, heat)
        contrast = abs(full - nothing)
        assert abs(three - nothing) > 8 and abs(five - nothing) > 12, dark
        assert abs(nine - nothing) < 0.35 * contrast and abs(half - nine) > 0.3 * contrast, dark
        colourful = [np.array(colour) for colour in heat[3:]]
        signs = np.array([colour for number, colour in enumerate(signed) if abs(number - 100) > 30])
        assert min(np.linalg.norm(signs - colour, axis=1).min() for colour in colourful) > 30, dark
    drawn = head_weights(page_api, 1, 2)
    chrome.open(f"{server.url}#view=head&layer=1&head=2")
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

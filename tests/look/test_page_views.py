"""The page in a real browser: every view opens, says what Python says, and follows keys and fields."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.look import page
from heedful.look.head_patterns import telling_heads
from heedful.look.inspection import Inspection
from heedful.look.local_server import LocalServer, serve_in_background
from heedful.look.page_api import PageAPI
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.tokenizer.words import word_tokenizer
from tests.support.browser import Browser, Keys
from tests.support.look_pages import (
    FORMULA,
    HEAD_SUMMARY,
    PAIR,
    STATUS_LINE,
    TEXT,
    VIEWS,
    WORDS,
    head_weights,
    inspections_of_every_kind,
    open_view,
    page_problems,
    shown_view,
    wait_for_view,
    with_special_tokens,
)
from tests.support.page_checks import layout_problems, low_contrast, set_window
from tests.support.tiny_models import save_tiny


def test_every_view_opens_without_errors_or_foreign_requests(chrome: Browser, server: LocalServer) -> None:
    chrome.requests()
    chrome.open(f"{server.url}#view=heads&layer=1&head=2")
    assert chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)") == list(VIEWS)
    for view in VIEWS:
        chrome.dark(False)
        open_view(chrome, view)
        assert page_problems(chrome) == "", view
        assert low_contrast(chrome) == [], view
        chrome.dark(True)
        chrome.settle()
        assert low_contrast(chrome) == [], (view, "dark")
    assert chrome.complaints() == []
    urls = [url for url in chrome.requests() if not url.startswith(("about:", "data:", "chrome:", "chrome-untrusted:"))]
    assert urls and all(url.startswith(server.url) for url in urls)


def test_low_contrast_counts_transparency(chrome: Browser) -> None:
    """Black on white is legible; the same as 30 % of its colour, or behind a translucent black background, is not."""
    chrome.driver.get(
        "data:text/html,<div class='heedful' style='background: white'><p class='legible'>a</p>"
        "<p class='pale' style='color: rgba(0, 0, 0, 0.3)'>b</p>"
        "<div style='background: rgba(0, 0, 0, 0.8)'><p class='covered'>c</p></div>"
        "<p class='mixed' style='background: color-mix(in srgb, black 80%25, white)'>d</p></div>"
    )
    assert [problem.split()[0] for problem in low_contrast(chrome)] == ["pale", "covered", "mixed"]


def test_the_page_opens_on_a_head_that_tells_something(chrome: Browser) -> None:
    api = PageAPI([Inspection(heedful.load("heedful-mini-en"), "The cat sat on the mat because it was tired.")])
    first = telling_heads(api.inspections[0])[0]
    with serve_in_background(api) as server:
        chrome.open(server.url)
        assert f"layer={first['layer']}&head={first['head']}&" in chrome.js("return location.hash")
        where = f"Layer {first['layer']}, head {first['head']}: {first['name']} token. "
        assert chrome.text(f"{HEAD_SUMMARY} b") == where
        assert chrome.js("return [...document.querySelectorAll('.chip[aria-pressed=true]')].length") == 1
        also = chrome.text(f"{HEAD_SUMMARY} button")
        chrome.focus(f"{HEAD_SUMMARY} button")
        chrome.keys(Keys.ENTER)
        assert also.split(":")[0] in chrome.text(f"{HEAD_SUMMARY} b").lower()
        assert chrome.js("return document.activeElement.tagName") != "BODY"
        chrome.open(f"{server.url}#view=head&layer=0&head=1")
        assert "layer=0&head=1&" in chrome.js("return location.hash"), "an address that names a head is kept"


# defines a function that returns the field with the number of the layer
LAYER_FIELD = """
function layerField() {
  return [...document.querySelectorAll(".controls label")].find((e) => e.textContent.startsWith("Layer")).lastChild;
}
"""
# returns what a screen reader would say of the element with the focus: its label, or else its tag
ACTIVE = """
const active = document.activeElement;
return active.getAttribute("aria-label") ?? active.closest("label")?.textContent ?? active.tagName;
"""


def test_keys_work_on_a_fresh_page_and_the_focus_stays(chrome: Browser, server: LocalServer) -> None:
    """Layers change before anything has the focus, and what has it keeps it when the page is drawn anew."""
    chrome.open(f"{server.url}#view=neuron&layer=0&head=0")
    wait_for_view(chrome, "neuron")
    layer = LAYER_FIELD + "return layerField().value"
    assert chrome.js("return document.activeElement.tagName") == "BODY"
    for key, expected in (("]", "1"), ("[", "0"), ("]", "1")):
        chrome.keys(key)
        chrome.until(lambda expected=expected: chrome.js(layer) == expected)
    chrome.js(LAYER_FIELD + "layerField().focus()")
    before = chrome.js(ACTIVE)
    chrome.js(LAYER_FIELD + "const e = layerField(); e.value = '0'; e.dispatchEvent(new Event('change'))")
    chrome.until(
        lambda: chrome.js(layer) == "0" and chrome.js("return document.querySelector('.body').ariaBusy") == "false"
    )
    assert before.startswith("Layer") and chrome.js(ACTIVE) == before
    chrome.focus('[data-view="steps"]')
    chrome.keys(Keys.ENTER)
    wait_for_view(chrome, "steps")
    chrome.keys("]", "]")
    chrome.settle()
    assert chrome.js("return document.activeElement.dataset.view") == "steps"


def test_a_view_is_drawn_again_for_another_width(chrome: Browser, server: LocalServer) -> None:
    set_window(chrome, 1280)
    for view in ("head", "model", "neuron"):
        set_window(chrome, 1280)
        chrome.open(f"{server.url}#view={view}&layer=1&head=2")
        chrome.js("document.querySelector('.body').firstElementChild.dataset.before = 'yes'")
        set_window(chrome, 390)
        before = "return document.querySelector('[data-before]') !== null"
        chrome.until(lambda before=before: not chrome.js(before))
        chrome.settle()
        assert layout_problems(chrome) == [], view


WINDOW = (1280, 860)  # pixels
LEAST_THUMB = (64, 79)  # pixels of a thumbnail of 13 x 13 weights; model.js allows 80, and a ratio of 1.4
LEAST_MAP = 300  # pixels of each side of the large map
# returns the height of the page, and [width, height] of a thumbnail and of the large map, in pixels
MODEL_VIEW = """
const size = (where) => document.querySelector(where).getBoundingClientRect();
const [thumb, map] = [".thumb", ".large .heat"].map(size);
const page = document.documentElement.scrollHeight;
return { page, thumb: [thumb.width, thumb.height], map: [map.width, map.height] };
"""


def test_six_layers_of_twelve_heads_fit_into_a_window(chrome: Browser) -> None:
    """With a large map of 13 tokens."""
    words = word_tokenizer(WORDS)
    embedding = EmbeddingConfig(vocabulary=words.size, width=96, positions=Learned(count=64))
    stack = StackConfig(width=96, layers=6, heads=12, head_width=8, inner_width=96)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack))
    loaded = create(config, words, seed=1).eval()
    loaded.tokenizer = with_special_tokens(words)
    set_window(chrome, *WINDOW)
    with serve_in_background(PageAPI([Inspection(loaded, " ".join(WORDS[:11]))])) as server:
        chrome.open(f"{server.url}#view=model&layer=1&head=3")
        sizes = chrome.js(MODEL_VIEW)
    assert sizes["page"] <= WINDOW[1]
    assert all(size >= least for size, least in zip(sizes["thumb"], LEAST_THUMB, strict=True))
    assert min(sizes["map"]) >= LEAST_MAP


def test_keyboard_and_numbers(chrome: Browser, server: LocalServer, page_api: PageAPI) -> None:
    chrome.open(f"{server.url}#view=model&layer=1&head=3")
    chrome.focus(".heat")
    chrome.keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)  # row 2, key 1
    share = 100 * head_weights(page_api, 1, 3)[2, 1]
    assert chrome.text(STATUS_LINE) == f"cat attends to the: {share:.1f} %"
    chrome.focus('.thumb[aria-pressed="true"]')
    chrome.keys(Keys.ARROW_LEFT, Keys.ENTER)
    assert chrome.until(lambda: chrome.text(".large figcaption") == "Layer 1, head 2")
    chrome.focus('[role="tab"][aria-selected="true"]')
    chrome.keys(Keys.ARROW_RIGHT)
    assert shown_view(chrome) == "neuron"
    assert chrome.js("return document.activeElement.dataset.view") == "neuron"
    assert chrome.js("return document.querySelector('.neurons').dataset.exact") == "true"
    chrome.keys("[")
    assert "layer=0" in chrome.js("return location.hash")
    chrome.click(".theme")
    theme = chrome.js("return document.querySelector('.heedful').dataset.theme")
    assert theme in ("light", "dark")


def test_another_text_is_read(chrome: Browser, page_api: PageAPI) -> None:
    """A new text replaces the first text of a pair; the second one stays."""
    loaded = page_api.inspections[0].loaded
    api = PageAPI([Inspection(loaded, PAIR)])
    expected = Inspection(loaded, ("the dog", PAIR[1])).sides["source"]
    with serve_in_background(api) as server:
        chrome.open(f"{server.url}#view=model&layer=1&head=3")
        chrome.fill(".reading textarea", "the dog")
        chrome.click(".reading button")
        chrome.until(lambda: api.inspections[0].sides["source"] == expected)


def test_the_header_follows_what_is_compared(chrome: Browser, page_api: PageAPI) -> None:
    """Whichever text is changed, and from where."""
    loaded = page_api.inspections[0].loaded
    with serve_in_background(PageAPI([Inspection(loaded, text) for text in ("the cat", "the dog")])) as server:
        chrome.open(f"{server.url}#view=compare&side=1")
        field = "return document.querySelector('.reading textarea').value"
        assert chrome.js(field) == "the dog"
        chrome.fill(".compare-view textarea", "the mat")
        chrome.click(".compare-view form button")
        chrome.until(lambda: chrome.js(field) == "the mat")
        chrome.focus(".reading textarea")
        chrome.fill(".reading textarea", "the cat sat")
        chrome.click(".reading button")
        chrome.until(lambda: "the cat sat" in chrome.text(".sides"))
        assert chrome.js("return document.activeElement.tagName") == "TEXTAREA"


@pytest.mark.slow
def test_alignment_has_what_was_written_down_its_side(chrome: Browser, tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", vocab_size=96)
    loaded = heedful.load(tmp_path)
    loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    inspection = Inspection(loaded, TEXT, target=TEXT[:11])
    with serve_in_background(PageAPI([inspection])) as server:
        chrome.open(f"{server.url}#view=alignment&layer=1")
        names = chrome.js("return [...document.querySelectorAll('.map .rows span')].map((e) => e.textContent)")
        assert names == [side["text"] for side in inspection.sides["generated"]]
        chrome.js(
            "const s = document.querySelector('.panel select'); s.value = '2'; s.dispatchEvent(new Event('change'))"
        )
        assert chrome.text(".alignment-view figcaption") == "Layer 1, head 2"
        chrome.focus(".heat")
        chrome.keys(Keys.ARROW_DOWN)  # row 1, key 0
        share = 100 * float(inspection.weights("cross", 1, [2])[0, 1, 0])
        assert chrome.text(STATUS_LINE) == f"{names[1]} from {inspection.sides['source'][0]['text']}: {share:.1f} %"
        chrome.click('[data-view="decoder"]')
        assert chrome.js("return document.querySelectorAll('.decoder-view .table tr').length") == 6
    assert chrome.complaints() == []


@pytest.mark.slow
def test_every_kind_of_model_has_its_views(chrome: Browser, tmp_path: Path) -> None:
    for name, inspections in inspections_of_every_kind(tmp_path).items():
        with serve_in_background(PageAPI(inspections)) as server:
            chrome.open(server.url)
            views = chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)")
            assert ("decoder" in views) == (name in ("t5", "gpt2")) and ("alignment" in views) == (name == "t5"), name
            for view in views:
                open_view(chrome, view)
                problems = page_problems(chrome)
                assert problems == "", (name, view, problems)
    assert chrome.complaints() == []


MAX_SECONDS = 3.0  # until a large view is complete
MAX_MEGABYTES = 400  # of the processes that show pages (`Browser.memory`); the browser itself has some 260 MB more


@pytest.mark.slow
def test_large_view_is_quick_and_small(chrome: Browser) -> None:
    """512 tokens, 12 layers of 12 heads."""
    words = word_tokenizer([f"w{number}" for number in range(400)])
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
            assert seconds < MAX_SECONDS, (view, seconds)
            assert used < MAX_MEGABYTES, (view, used)
    assert chrome.complaints() == []


def test_heads_are_switched_off_and_tokens_replaced_in_the_page(chrome: Browser, server: LocalServer) -> None:
    """By keyboard alone; what comes out is what Python says, and the focus stays where it was."""
    chrome.open(f"{server.url}#view=change")
    before = chrome.until(lambda: chrome.text(".changed"))
    assert "nothing changed yet" in before
    chrome.focus('.gate[data-place="encoder.1.2"]')
    chrome.keys(Keys.ENTER)
    chrome.until(lambda: "1 head off" in chrome.text(".changed"))
    active = "return document.activeElement.dataset.place"
    assert chrome.js(active) == "encoder.1.2"
    assert chrome.js("return document.activeElement.getAttribute('aria-pressed')") == "false"
    chrome.keys(Keys.ARROW_RIGHT)
    assert chrome.js(active) == "encoder.1.3"
    chrome.js(
        "const e = [...document.querySelectorAll('.change-view input')].find((e) => e.value === 'cat');"
        "e.focus(); e.select();"
    )
    chrome.keys("dog", Keys.ENTER)
    chrome.until(lambda: "1 head off, 1 token replaced" in chrome.text(".changed"))
    assert chrome.complaints() == []


def test_arrow_keys_step_through_a_block(chrome: Browser, server: LocalServer) -> None:
    chrome.open(f"{server.url}#view=steps&layer=0&head=0&row=2&step=2")
    stages = chrome.js("return [...document.querySelectorAll('.stage')].map((e) => e.textContent)")
    assert len(stages) == 11 and stages[3] == "4Query, key and value"
    chrome.focus('.stage[aria-pressed="true"]')
    chrome.keys(Keys.ARROW_DOWN)
    assert chrome.text(".step-card h3") == "Query, key and value"
    assert chrome.text(FORMULA) == "q = x WQ + bQ    k = x WK + bK    v = x WV + bV"
    chrome.keys(Keys.ARROW_DOWN)
    rows = chrome.js("return document.querySelectorAll('.step-card .bars .track').length")
    assert chrome.text(".step-card h3") == "Scores" and rows == len(
        chrome.js("return [...document.querySelectorAll('.steps-view .panel .token')]")
    )
    chrome.focus(".step-card button:last-of-type")
    chrome.keys(Keys.ENTER)
    assert chrome.text(".step-card h3") == "Softmax"
    assert chrome.js("return document.activeElement.className").startswith("stage")


def test_lecture_mode(chrome: Browser, server: LocalServer) -> None:
    chrome.open(f"{server.url}#view=head&layer=1&head=2")
    size = "return parseFloat(getComputedStyle(document.querySelector('.token')).fontSize)"
    small = chrome.js(size)
    chrome.keys("l")
    assert chrome.js(size) == pytest.approx(1.6 * small, rel=0.01) and "lecture=true" in chrome.js(
        "return location.hash"
    )
    assert chrome.js("return getComputedStyle(document.querySelector('.reading')).display") == "none"
    chrome.keys("L")
    assert chrome.js(size) == small


def test_words_begin_with_those_of_the_text(chrome: Browser, tmp_path: Path) -> None:
    api = PageAPI([Inspection(heedful.load("heedful-mini-en"), "He sat on the bank of the river in Paris.")])
    with serve_in_background(api) as server:
        chrome.open(f"{server.url}#view=words")
        assert chrome.js("return document.querySelector('.another input').value") == "river"
        num_circles = chrome.js("return [...document.querySelectorAll('.scatter circle')].length")
        assert num_circles == len(api("scatter", {})["words"])  # type: ignore[arg-type]
        assert "kings" in chrome.text(".words-view > .panel:last-child .bars")
        field = 'input[aria-label="Words, with spaces between"]'
        submit = "document.querySelector(arguments[0]).form.requestSubmit()"
        chrome.fill(field, "one two three 天")
        chrome.js(submit, field)
        chrome.until(lambda: chrome.js("return document.querySelectorAll('.scatter circle').length") == 3)
        assert "Without a vector in this model: 天." in chrome.text(".body")
        chrome.fill(field, "one")
        chrome.js(submit, field)
        chrome.until(lambda: "give at least three" in chrome.text(".body"))
    (tmp_path / "page.html").write_text(page.render_html(api), encoding="utf-8")
    chrome.open(f"file://{tmp_path}/page.html#view=words")
    assert chrome.js("return document.querySelectorAll('.scatter circle').length") == num_circles
    assert chrome.js("return document.querySelectorAll('.words-view form').length") == 0
    assert chrome.complaints() == []

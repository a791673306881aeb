"""Every view at the widths of a phone, a laptop and a projector, in both themes, with short, long and foreign texts.

A page is loaded once: at each width every view is drawn anew, from answers that the page remembers.
HEEDFUL_SHOTS=FOLDER keeps a picture of each view, to be looked at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.families import FAMILIES
from heedful.look.inspection import Inspection
from heedful.look.local_server import serve_in_background
from heedful.look.page import render_html
from heedful.look.page_api import PageAPI
from heedful.model.classic_config import (
    ClassicConfig,
    GlobalAttention,
    HardAttention,
    LocalM,
    LocalP,
    RecurrentSeq2Seq,
    SourceAttentionConfigs,
)
from heedful.model.config import EmbeddingConfig, NextToken
from heedful.tokenizer.words import word_tokenizer
from tests.support.browser import Browser
from tests.support.classic_models import READERS, make_classic
from tests.support.look_pages import (
    TEXT,
    WORDS,
    inspections_of_every_kind,
    page_with_report,
    wait_for_view,
    with_special_tokens,
)
from tests.support.page_checks import (
    axe_violations,
    layout_problems,
    lost_focus,
    low_contrast,
    set_window,
    unreached_controls,
)
from tests.support.tiny_models import TINY, save_tiny

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
OWN_PAGES = (
    "about:",
    "data:",
    "chrome:",
    "chrome-untrusted:",
    "blob:",
)  # beginnings of addresses that reach no network
REVIEW = "the film was not good . the end . "
REVIEWS = {"short": REVIEW, "long": REVIEW * 30, "one word": "film"}
SOURCE_ATTENTION: dict[str, SourceAttentionConfigs] = {
    "global": GlobalAttention(),
    "location": GlobalAttention(score="location"),
    "hard": HardAttention(),
    "local-m": LocalM(radius=2),
    "local-p": LocalP(radius=2),
}


@pytest.fixture(scope="module")
def model() -> heedful.ModelBundle:
    return heedful.load("heedful-mini-en", head="masked_lm")


def api_of(model: heedful.ModelBundle, text: str) -> PageAPI:
    """A page of the text, and of the same with one word changed."""
    second = text.replace("cat", "dog", 1)
    looks = [Inspection(model, text, name="heedful-mini-en")]
    return PageAPI([*looks, Inspection(model, second, name="heedful-mini-en")] if second != text else looks)


def recurrent_seq2seq(look: SourceAttentionConfigs) -> heedful.ModelBundle:
    """A random recurrent encoder and decoder with one kind of attention between them."""
    words = word_tokenizer(WORDS)
    reader = RecurrentSeq2Seq(width=8, look=look)
    config = ClassicConfig(embedding=EmbeddingConfig(vocabulary=words.size, width=6), reader=reader)
    bundle = create(BundleConfig(family="heedful-classic", model=config, head=NextToken()), words, seed=1).eval()
    bundle.tokenizer = with_special_tokens(words)
    return bundle


def family_inspection(folder: Path, family: str) -> Inspection:
    """A tiny random model of a family, with the family's first head."""
    save_tiny(folder / family, family, next(iter(FAMILIES[family].heads)))
    bundle = heedful.load(folder / family)
    bundle.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    return Inspection(bundle, TEXT)


def views_of(chrome: Browser) -> list[str]:
    """Return the names of the views of the open page."""
    return list(chrome.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)"))


def each_view(chrome: Browser, url: str) -> Iterator[str]:
    """Load the page anew for every view."""
    chrome.open(url)
    for view in views_of(chrome):
        chrome.open(f"{url}#view={view}")
        yield view


def keep_picture(chrome: Browser, name: str) -> None:
    """Keep a picture of the window, after thumbnails that are drawn when they become visible."""
    if folder := os.environ.get("HEEDFUL_SHOTS"):
        time.sleep(0.3)
        chrome.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def check_layout(chrome: Browser, url: str, name: str, widths: Sequence[int] = WIDTHS) -> dict[str, list[str]]:
    """Return the problems of each view that has some, by width and view."""
    problems = {}
    chrome.requests()
    set_window(chrome, widths[0])
    chrome.open(url)
    for width in widths:
        set_window(chrome, width)
        for view in views_of(chrome):
            chrome.click(f'[data-view="{view}"]')
            wait_for_view(chrome, view)
            assert width - 20 <= chrome.js("return document.documentElement.clientWidth") <= width
            keep_picture(chrome, f"{width}-{name}-{view}")
            if view_problems := [*layout_problems(chrome), *chrome.complaints()]:
                problems[f"{width} {view}"] = view_problems
    page = url.partition("#")[0]
    if foreign := [address for address in chrome.requests() if not address.startswith((page, *OWN_PAGES))]:
        problems["requests"] = foreign
    return problems


def test_a_phone_shows_every_view(chrome: Browser, model: heedful.ModelBundle) -> None:
    with serve_in_background(api_of(model, TEXTS["13"])) as server:
        assert check_layout(chrome, server.url, "13", widths=(390,)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_layout(chrome: Browser, model: heedful.ModelBundle, text: str) -> None:
    chrome.dark(text in ("60", "hebrew"))
    with serve_in_background(api_of(model, TEXTS[text])) as server:
        assert check_layout(chrome, server.url, text) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["numbers=true", "relative=true&heads=0,1,2,3", "lecture=true", "words=true&tall=true"]
)
def test_layout_of_other_states(chrome: Browser, model: heedful.ModelBundle, options: str) -> None:
    """Numbers in the neuron view, relative colours, lecture mode, whole words."""
    with serve_in_background(api_of(model, TEXTS["13"])) as server:
        assert check_layout(chrome, f"{server.url}#{options}&layer=1&head=2", options) == {}


def pages_of_every_kind(folder: Path) -> dict[str, PageAPI]:
    """Pages of tiny models of each head, classic kind and shape, and one with a report on heads."""
    pages = {kind: PageAPI(inspections) for kind, inspections in inspections_of_every_kind(folder).items()}
    return pages | {"report": page_with_report(folder / "report")}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_layout_of_every_kind_of_model(chrome: Browser, tmp_path: Path) -> None:
    problems = {}
    for kind, api in pages_of_every_kind(tmp_path).items():
        with serve_in_background(api) as server:
            if kind_problems := check_layout(chrome, server.url, kind):
                problems[kind] = kind_problems
    assert problems == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*READERS, *SOURCE_ATTENTION])
def test_layout_of_every_classic_model(chrome: Browser, kind: str) -> None:
    """Every pooling and every attention to a source, in both themes."""
    if kind in SOURCE_ATTENTION:
        inspections = {kind: Inspection(recurrent_seq2seq(SOURCE_ATTENTION[kind]), TEXT)}
    else:
        inspections = {f"{kind}-{length}": Inspection(make_classic(kind), text) for length, text in REVIEWS.items()}
    for number, (name, inspection) in enumerate(inspections.items()):
        chrome.dark((number + len(kind)) % 2 == 1)
        with serve_in_background(PageAPI([inspection])) as server:
            assert check_layout(chrome, server.url, name) == {}, name


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_layout_of_every_family(chrome: Browser, tmp_path: Path, family: str) -> None:
    chrome.dark(list(TINY).index(family) % 2 == 1)
    with serve_in_background(PageAPI([family_inspection(tmp_path, family)])) as server:
        assert check_layout(chrome, server.url, family) == {}


@pytest.mark.slow
def test_layout_of_a_file(chrome: Browser, model: heedful.ModelBundle, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(render_html(api_of(model, TEXTS["13"])), encoding="utf-8")
    assert check_layout(chrome, f"file://{tmp_path}/page.html", "file") == {}


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("text", ["13", "hebrew"])
def test_axe_and_contrast(chrome: Browser, model: heedful.ModelBundle, text: str, dark: bool) -> None:
    set_window(chrome, 1280)
    chrome.dark(dark)
    problems = {}
    with serve_in_background(api_of(model, TEXTS[text])) as server:
        for view in each_view(chrome, server.url):
            if violations := [*axe_violations(chrome), *low_contrast(chrome)]:
                problems[view] = violations
    assert problems == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_axe_and_contrast_of_every_kind_of_model(chrome: Browser, tmp_path: Path) -> None:
    """In both themes, for the views that only some models have."""
    set_window(chrome, 1280)
    problems = {}
    for kind, api in pages_of_every_kind(tmp_path).items():
        with serve_in_background(api) as server:
            for view in each_view(chrome, server.url):
                for dark in (False, True):
                    chrome.dark(dark)
                    chrome.settle()
                    if violations := [*axe_violations(chrome), *low_contrast(chrome)]:
                        problems[kind, view, dark] = violations
                chrome.dark(False)
    assert problems == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_control_loses_the_focus(chrome: Browser, tmp_path: Path) -> None:
    set_window(chrome, 1280)
    lost = {}
    for kind, api in pages_of_every_kind(tmp_path).items():
        with serve_in_background(api) as server:
            for view in each_view(chrome, server.url):
                if lost_elements := lost_focus(chrome):
                    lost[kind, view] = lost_elements
    assert lost == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("width", [390, 1280])
def test_the_keyboard_alone_reaches_every_control(chrome: Browser, tmp_path: Path, width: int) -> None:
    set_window(chrome, width)
    unreached = {}
    for kind, api in pages_of_every_kind(tmp_path).items():
        with serve_in_background(api) as server:
            for view in each_view(chrome, server.url):
                if controls := unreached_controls(chrome):
                    unreached[kind, view] = controls
    assert unreached == {}

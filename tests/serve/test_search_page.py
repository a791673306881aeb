"""The search page in Chromium: hits, keyboard, address, API key, and texts that look like HTML.

HEEDFUL_SHOTS=FOLDER saves screenshots of the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful import SearchIndex
from heedful.data.retrieval.documents import Document
from heedful.serve.run import RunningServer, background
from tests.support.browser import Browser, browser
from tests.support.http_client import ask
from tests.support.model_folders import make_model_dir
from tests.support.page_checks import axe_violations, layout_problems, set_window

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script> boats & <b>bold</b> \u202eboat'
LONG = "Nothing of interest happened on that day. " * 12 + "Then the boats left. " + "It rained again. " * 20
DOCUMENTS = [
    Document(id="notes/ship.md", text="The ship left the harbour at dawn.\nIt came back with fish."),
    Document(id="boat-1", text="A boat 🚤 came home before dark.", title="Boats of the <i>north</i>"),
    Document(id="<script>alert(3)</script>", text=HOSTILE, title="<b>hostile</b>"),
    Document(id="diary", text=LONG, title="A diary"),
    Document(id="arabic", text="عاد القارب boat إلى الميناء قبل حلول الظلام."),
    Document(id="bread", text="Bread is baked in a hot oven."),
    Document(id="long/" + "path/" * 30 + "file.txt", text="w" * 400 + " boat"),
]
READ_RESULTS = """
return [...document.querySelectorAll("#results > li")].map((result) => ({
  name: result.querySelector("h2").textContent,
  source: result.querySelector(".source").textContent,
  passage: result.querySelector(".passage")?.textContent ?? "",
  marks: [...result.querySelectorAll("mark")].map((mark) => mark.textContent),
}));
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    SearchIndex.create(folder / "index").add(DOCUMENTS)
    with background(
        {"docs": str(folder / "index"), "ranker": str(make_model_dir(folder / "ranker", "regression"))}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


@pytest.fixture
def page(chrome: Browser, server: RunningServer) -> Iterator[Browser]:
    chrome.driver.get("about:blank")
    chrome.driver.get(server.url)
    chrome.until(lambda: chrome.text("#facts") != "…")
    yield chrome
    messages = [line for line in chrome.complaints() if "favicon" not in line]
    assert not messages, messages  # no errors, and nothing that the content security policy blocks


def press(page: Browser, keys: str) -> None:
    """Type `keys` into the element that has the focus."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page.driver, duration=0).send_keys(keys).perform()


def results(page: Browser) -> list[dict[str, object]]:
    """Wait for the response, and return the results that the page shows."""
    page.until(lambda: " ms" in page.text("#status"))
    return list(page.js(READ_RESULTS))


def choose(page: Browser, select: str, value: str) -> list[dict[str, object]]:
    """Choose `value` in the select element with the id `select`, and return the new results."""
    page.js(
        "document.getElementById('status').textContent = ''; const select = document.getElementById(arguments[0]);"
        "select.value = arguments[1]; select.dispatchEvent(new Event('change'))",
        select,
        value,
    )
    return results(page)


def test_a_query_is_typed_and_its_hits_are_shown(page: Browser, server: RunningServer) -> None:
    assert page.text("#facts") == f"docs · {len(DOCUMENTS)} documents · {len(DOCUMENTS)} passages"
    press(page, "boats\n")  # the field has the focus
    rows = results(page)
    hits = ask(server.port, "/search", {"query": "boats"}).json
    assert [row["source"] for row in rows] == [
        f"{hit['id']} · score {hit['score']:.4f}" if hit["title"] else f"score {hit['score']:.4f}" for hit in hits
    ]
    assert page.text("#status").startswith(f"{len(hits)} documents · hybrid · ")
    by_name = {row["name"]: row for row in rows}
    north = by_name["Boats of the <i>north</i>"]
    assert north["passage"] == "A boat 🚤 came home before dark." and north["marks"] == ["Boats", "boat"]
    assert by_name["bread"]["marks"] == [] and by_name["arabic"]["marks"] == ["boat"]
    assert page.js("return document.activeElement.id") == "query"


def test_html_in_documents_is_shown_as_text(page: Browser) -> None:
    press(page, "boats <b>\n")
    row = next(row for row in results(page) if row["name"] == "<b>hostile</b>")
    assert row["passage"] == HOSTILE and str(row["source"]).startswith("<script>alert(3)</script> · ")
    assert row["marks"] == ["b", "b", "boats", "b", "b", "boat"]
    assert page.js("return document.querySelectorAll('main img, main script, main b, main i').length") == 0


def test_method_and_reranker_are_chosen_and_a_search_may_find_nothing(page: Browser, server: RunningServer) -> None:
    press(page, "boats\n")
    results(page)
    body = {"query": "boats", "method": "words"}
    rows = choose(page, "method", "words")
    assert len(rows) == len(ask(server.port, "/search", body).json) == 5 and "· words ·" in page.text("#status")
    rows = choose(page, "reranker", "ranker")
    hits = ask(server.port, "/search", body | {"reranker": "ranker"}).json
    assert [str(row["source"]).rpartition(" ")[2] for row in rows] == [f"{hit['score']:.4f}" for hit in hits]
    assert "· words, reranked by ranker ·" in page.text("#status")
    press(page, "xyzzy\n")
    page.until(lambda: page.text("#status").startswith("No documents"))
    assert page.js("return document.querySelectorAll('li').length") == 0
    assert (
        page.js("return [...document.querySelectorAll('label')].filter((label) => label.checkVisibility()).length") == 4
    )


def test_a_long_passage_is_an_excerpt_that_can_be_opened(page: Browser) -> None:
    press(page, "boats\n")
    diary = next(row for row in results(page) if row["name"] == "A diary")
    excerpt = str(diary["passage"])
    assert excerpt.startswith("… ") and excerpt.endswith(" …") and "the boats left" in excerpt and len(excerpt) < 330
    assert excerpt[2:-2] in LONG and f" {excerpt[2:-2]} " in LONG, "the excerpt cuts a word"
    button = (
        "[...document.querySelectorAll('li')].find((result) => result.querySelector('h2').textContent === 'A diary')"
    )
    button += ".querySelector('button')"
    page.js(f"{button}.focus()")
    for keys, text, is_expanded in ((" ", LONG, "true"), ("\n", excerpt, "false")):
        press(page, keys)
        assert page.js(f"return {button}.ariaExpanded") == is_expanded
        assert next(row["passage"] for row in page.js(READ_RESULTS) if row["name"] == "A diary") == text


def test_the_address_keeps_query_and_method(page: Browser, server: RunningServer) -> None:
    press(page, "bread\n")
    results(page)
    choose(page, "method", "vectors")
    page.driver.refresh()
    assert results(page)[0]["name"] == "bread" and "· vectors ·" in page.text("#status")
    page.driver.back()
    page.until(lambda: "· hybrid ·" in page.text("#status"))
    assert page.js("return document.getElementById('method').value") == "hybrid"


def test_the_page_asks_for_a_key(chrome: Browser, tmp_path: Path) -> None:
    key = b"0123456789abcdef-0123456789abcdef"
    SearchIndex.create(tmp_path / "index").add(DOCUMENTS[:2])
    with background({"docs": str(tmp_path / "index")}, keys=(key,)) as running:
        chrome.driver.get(running.url)
        chrome.until(lambda: chrome.text("#facts") == "This server needs a key.")
        chrome.js("document.getElementById('key').focus()")
        press(chrome, key.decode() + "\t")
        chrome.until(lambda: chrome.text("#facts") == "docs · 2 documents · 2 passages")
        chrome.focus("#query")
        press(chrome, "boats\n")
        assert len(results(chrome)) == 2
        assert ask(running.port, "/search", {"query": "boats"}).status == 401
    chrome.complaints()  # the refused requests are in the log


def test_the_page_of_a_server_without_an_index(chrome: Browser, tmp_path: Path) -> None:
    with background({"ranker": str(make_model_dir(tmp_path / "ranker", "regression"))}) as running:
        chrome.driver.get(running.url)
        chrome.until(lambda: "parameters" in chrome.text("#facts"))
        assert not chrome.js("return document.getElementById('search').checkVisibility()")
        chrome.driver.get(running.url + "/web/search.html")
        chrome.until(lambda: chrome.text("#facts").startswith("This server has no index"))
    chrome.complaints()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_too_wide_cut_or_empty(page: Browser, width: int, dark: bool) -> None:
    set_window(page, width)
    page.dark(dark)
    press(page, "when did the boats come back?\n")
    results(page)
    page.js("document.querySelector('li button').click()")
    problems = layout_problems(page)
    if folder := os.environ.get("HEEDFUL_SHOTS"):
        page.driver.save_screenshot(f"{folder}/{width}-search-{'dark' if dark else 'light'}.png")
    page.dark(False)
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_accessibility_rules_hold(page: Browser, dark: bool) -> None:
    page.dark(dark)
    press(page, "boats\n")
    results(page)
    violations = axe_violations(page)
    page.dark(False)
    assert violations == []

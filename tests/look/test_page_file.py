"""The page as one HTML file: what it keeps, what it says of the rest, and texts that are no scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.look import page
from heedful.look.inspection import Inspection
from heedful.look.local_server import serve_in_background
from heedful.look.page_api import PageAPI
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import word_tokenizer
from tests.support.browser import Browser
from tests.support.look_pages import (
    STATUS_LINE,
    TEXT,
    VIEWS,
    WORDS,
    page_problems,
    shown_view,
    wait_for_view,
    with_special_tokens,
)
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import save_tiny

HOSTILE = (  # tokens
    "</script><script>window.hit=1</script>",
    "<img/src=x/onerror=window.hit=1>",
    "\u202egnihtemos",
    "\u0000\u0007",
    "a" * 50_000,
    "&lt;b&gt;",
    "${window.hit=1}",
    "';window.hit=1;//",
)
MAX_TEXT_NODE = 700  # characters of the longest sentence of a page; names of tokens are cut after 200
# returns the number of characters of the longest text node
LONGEST_TEXT = """
const walk = document.createTreeWalker(document.querySelector(".heedful"), NodeFilter.SHOW_TEXT);
let longest = 0;
while (walk.nextNode()) longest = Math.max(longest, walk.currentNode.data.length);
return longest;
"""


def test_a_word_is_marked_where_it_stands_behind_emoji(chrome: Browser, tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "single", "single"))
    texts = ["\U0001f600\U0001f600\U0001f600 the cat sat", "\U0001f600" * 70 + " the cat"]
    file = tmp_path / "look.html"
    first, *more = [Inspection(loaded, text) for text in texts]
    file.write_text(page.render_html(PageAPI([first], extra=more, word="cat"), layers=[0], heads=[0]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=words")
    assert chrome.js("return [...document.querySelectorAll('.texts mark')].map((e) => e.textContent)") == ["cat", "cat"]
    listed_texts = chrome.js("return [...document.querySelectorAll('.texts li')].map((e) => e.textContent)")
    assert listed_texts == [texts[0], "\U0001f600" * 55 + " the cat"]
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
        assert shown_view(chrome) == view
        assert page_problems(chrome) == "", view
        assert chrome.js("return window.hit ?? null") is None
        assert chrome.js("return document.querySelectorAll('.heedful script, .heedful img').length") == 0
        assert chrome.js(LONGEST_TEXT) <= MAX_TEXT_NODE
    assert "⟨202E⟩gnihtemos" in chrome.js("return document.body.textContent")
    assert chrome.complaints() == []
    assert {url.split(":")[0] for url in chrome.requests()} <= {"file", "about", "data", "chrome"}
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy and "connect-src 'none'" in policy[1] and "unsafe" not in policy[1]


def test_a_file_keeps_what_was_asked_for_and_tells_the_rest(page_api: PageAPI) -> None:
    collected = page.collect_answers(page_api, layers=[1], heads=[0, 3])
    weighed = [question for question in collected.answers if question.startswith("weights?")]
    assert weighed == [f"weights?head={h}&layer=1&part=encoder&side={s}" for s in (0, 1) for h in (0, 3)]
    small = page.collect_answers(page_api, layers=[0], heads=[0], max_bytes=30_000)
    assert small.bytes <= 30_000 and small.left_out["steps"] > 0 and "about?" in small.answers


@pytest.mark.slow
def test_a_file_of_some_layers_and_heads_opens_on_them(chrome: Browser, tmp_path: Path, page_api: PageAPI) -> None:
    """Each view shows what was kept, and offers nothing else to choose."""
    file = tmp_path / "look.html"
    options = "return [...document.querySelectorAll('.controls select')].map((e) => [...e.options].map((o) => o.value))"
    chips = "return [...document.querySelectorAll('.chip:enabled')].map((e) => e.textContent)"
    file.write_text(page.render_html(page_api, layers=[1], heads=[2, 3]), encoding="utf-8")
    for view in VIEWS:
        chrome.open(f"{file.as_uri()}#view={view}&layer=0&head=0")
        wait_for_view(chrome, view)
        assert page_problems(chrome) == "", view
        assert "&layer=1&head=2&" in chrome.js("return location.hash")
        if view == "neuron":
            assert chrome.js(options) == [["0", "1"], ["1"], ["2", "3"]]
    chrome.open(f"{file.as_uri()}#view=head")
    assert chrome.js(chips) == ["2", "3"] and "1 head:" in chrome.until(lambda: chrome.text(STATUS_LINE))
    chrome.focus('.tab[aria-selected="true"]')
    chrome.keys("}", "}", "]", "[")
    assert "&layer=1&head=3&" in chrome.js("return location.hash") and page_problems(chrome) == ""
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
    loaded.tokenizer = with_special_tokens(word_tokenizer(WORDS))
    file.write_text(page.render_html(PageAPI([Inspection(loaded, TEXT)]), layers=[1], heads=[2]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=alignment")
    assert chrome.text(".alignment-view figcaption") == "Layer 1, head 2" and page_problems(chrome) == ""
    chrome.open(f"{file.as_uri()}#view=decoder")
    assert "layer 1, head 2" in chrome.text(".decoder-view") and page_problems(chrome) == ""


def test_a_file_offers_the_scores_that_it_holds(
    chrome: Browser, tmp_path: Path, page_api: PageAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token of a tagger is none of them, nor is one of many classes."""
    file = tmp_path / "look.html"
    options = "return [...document.querySelectorAll('.bar-of option')].map((e) => e.value)"
    tagger = PageAPI([Inspection(heedful.load(make_model_dir(tmp_path / "tag", "tag")), "ada lives in paris")])
    monkeypatch.setattr(page, "MAX_SCORES", 2)
    usual = page_api("prediction", {})["choices"]["label"]
    for shown, expected in ((tagger, set()), (page_api, {"0", "1", str(usual)})):
        file.write_text(page.render_html(shown), encoding="utf-8")
        chrome.open(f"{file.as_uri()}#view=prediction")
        chrome.until(lambda: chrome.js("return document.querySelector('.prediction-view') !== null"))
        assert set(chrome.js(options)) == expected and page_problems(chrome) == ""
    with serve_in_background(tagger) as server:
        chrome.open(f"{server.url}#view=prediction")
        assert len(chrome.until(lambda: chrome.js(options))) > 4


def test_a_file_says_why_it_changes_nothing(chrome: Browser, tmp_path: Path, page_api: PageAPI) -> None:
    file = tmp_path / "look.html"
    file.write_text(page.render_html(PageAPI(page_api.inspections[:1]), layers=[0], heads=[0]), encoding="utf-8")
    chrome.open(f"{file.as_uri()}#view=change")
    assert "A file cannot compute a new prediction" in chrome.text(".change-view > .note")
    assert chrome.js("return [...document.querySelectorAll('.gate, .change-view input')].every((e) => e.disabled)")


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_said_in_their_place(tmp_path: Path) -> None:
    loaded = heedful.load(make_model_dir(tmp_path / "single", "single"))
    with torch.no_grad():
        loaded.model.embedding.tokens.weight.fill_(float("nan"))
    collected = page.collect_answers(PageAPI([Inspection(loaded, "the cat")]))
    assert any("not finite" in answer.get("error", "") for answer in collected.answers.values())
    json.dumps(collected.answers, allow_nan=False)


@pytest.mark.slow
def test_a_sentence_takes_less_than_two_megabytes(tmp_path: Path) -> None:
    """In the shape of all-MiniLM-L6-v2: six layers of twelve heads, 384 numbers for a token, 30,522 tokens."""
    stack = StackConfig(width=384, layers=6, heads=12, head_width=32, inner_width=1536)
    embedding = EmbeddingConfig(vocabulary=30_522, width=384, positions=Learned(count=512), types=2, norm="layer")
    loaded = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), seed=1)
    loaded.tokenizer = heedful.load("heedful-mini-en").tokenizer
    inspection = Inspection(loaded, "The cat sat on the mat because it was tired.")
    content = page.render_html(PageAPI([inspection]))
    kept = json.loads(re.search(r'id="kept">(.*?)</script>', content)[1])
    assert len(content) < 2_000_000 and kept["left_out"] == {}
    rows = len(inspection.sides["source"])  # the steps of a block are kept for each layer and row
    assert sum(name.startswith("steps?") for name in kept["answers"]) == stack.layers * rows


def test_a_question_is_written_as_the_page_writes_it() -> None:
    assert page.question_key("words", {"word": "don't (é) a/b"}) == "words?word=don't%20(%C3%A9)%20a%2Fb"

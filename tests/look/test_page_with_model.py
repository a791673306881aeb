"""A page with the model in it: what it computes for a new text equals Python's answers, and is drawn offline."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.look import head_patterns
from heedful.look.head_patterns import ONE_TEXT_PATTERNS, pattern_targets
from heedful.look.inspection import Inspection, View, inspect_choices
from heedful.look.page import read_asset
from heedful.look.page_api import PageAPI
from heedful.look.page_with_model import PYTHON_QUESTIONS, live_script, render_html_with_model
from heedful.model.config import SentenceEmbedding
from heedful.page.assets import bundle_modules
from heedful.tokenizer.words import word_tokenizer
from tests.look.test_inspection import numbers
from tests.page.test_forward import MIXTURES, mixture
from tests.support.browser import Browser, Keys, browser
from tests.support.classic_models import make_classic
from tests.support.look_pages import WORDS
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import save_tiny

OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
BROWSER_PAGES = ("chrome://", "chrome-untrusted://", "data:", "about:")
FIRST = "the cat sat on the mat"
NEW = "Ada lives in Paris, and she wrote the program, the first program of zéq"
PAIR = ("the cat sat on a mat", "a dog ran to the mat in Paris.")
RUN = """
import { readFileSync } from "node:fs";
const { kept, calls, ...page } = JSON.parse(readFileSync("input.json"));
const document = {
  getElementById: (id) => ({ textContent: page[id], remove() {} }), querySelector: () => null,
};
"""
ASK = """
const source = modelSource(kept, openModelOfFile(engine), engine);
const answers = [];
for (const [name, params] of calls) {
  const answer = await source.ask(name, params).catch(({ message }) => ({ error: message }));
  answers.push({ keeps: source.keeps(name, params), ...answer });
}
console.log(JSON.stringify(answers));
"""
Call = tuple[str, dict[str, Any]]


def page_answers(folder: Path, content: str, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return the answers of a page to questions, one after the other, computed by node."""
    elements = {
        name: re.search(rf'id="{name}">(.*?)</script>', content)[1] for name in ("kept", "about", "code", "weights")
    }  # type: ignore[index]
    data = elements | {"kept": json.loads(elements["kept"]), "calls": calls}
    (folder / "input.json").write_text(json.dumps(data))
    script = live_script().rpartition("\nstartFileWithModel(")[0]
    (folder / "run.mjs").write_text(RUN + script + ASK)
    return run_node(folder)


def run_node(folder: Path) -> list[Any]:
    """Run run.mjs in a folder, and return what it prints."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed: apt-get install nodejs")
    done = subprocess.run(["node", "run.mjs"], cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout))


def assert_same(got: Any, expected: Any, where: str, tolerance: float = 1e-4) -> None:
    """Compare answers: tensors and numbers within the tolerance, everything else exactly."""
    if isinstance(expected, dict) and "kind" in expected:
        tolerance = 1 / 255 if expected["kind"] == "u1" else tolerance
        got, expected = numbers(got), numbers(expected)
        finite = np.isfinite(expected)
        assert got.shape == expected.shape and (np.isfinite(got) == finite).all(), where
        assert np.abs(got[finite] - expected[finite]).max(initial=0) <= tolerance * max(
            1, np.abs(expected[finite]).max(initial=0)
        ), where
    elif isinstance(expected, dict):
        assert expected.keys() <= got.keys(), where
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}.{key}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for number, (value, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(value, other, f"{where}[{number}]", tolerance)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), where
    else:
        assert got == expected, where


def questions(bundle: ModelBundle) -> list[Call]:
    """Return the questions about the first text whose answers the page computes."""
    stack = bundle.config.model.encoder
    assert stack is not None
    place = {"side": 0, "part": "encoder"}
    calls: list[Call] = [("about", {})]
    for layer in range(stack.layers):
        calls += [("thumbnails", {**place, "layer": layer}), ("steps", {**place, "layer": layer, "row": 1})]
        for head in range(stack.heads):
            calls += [(name, {**place, "layer": layer, "head": head}) for name in ("weights", "neuron")]
    return calls


def check(folder: Path, bundle: ModelBundle, first: Any, new: Any, more: Sequence[Call] = ()) -> list[dict[str, Any]]:
    """Compare the answers about a new text with Python's; returns those to `more`."""
    folder.mkdir(exist_ok=True)
    api = PageAPI([Inspection(bundle, first)])
    content = render_html_with_model(api, precision="float32")
    text, pair = (new, "") if isinstance(new, str) else new
    calls: list[Call] = [("look", {"side": 0, "text": text, "pair": pair}), *questions(bundle), *more]
    answers = page_answers(folder, content, calls)
    for (name, params), answer in zip(calls[: len(calls) - len(more)], answers, strict=False):
        expected = api(name, {key: str(value) for key, value in params.items()})
        assert_same(answer, expected, name)
    return answers[len(calls) - len(more) :]


@pytest.mark.parametrize("name", ["single", "tag", "bare"])
def test_a_new_text_is_computed_as_in_python(tmp_path: Path, name: str) -> None:
    check(tmp_path, heedful.load(make_model_dir(tmp_path / "model", name)), FIRST, NEW)


def test_a_new_pair_is_computed_as_in_python(tmp_path: Path) -> None:
    check(tmp_path, heedful.load(make_model_dir(tmp_path / "model", "single")), FIRST, PAIR)


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "albert", "nomic_bert"])
def test_other_kinds_of_blocks(tmp_path: Path, family: str) -> None:
    """Norms before a block, windows and rotations, buckets of distances, a projected embedding."""
    save_tiny(tmp_path / "model", family, next(iter(FAMILIES[family].heads)))
    bundle = heedful.load(tmp_path / "model")
    bundle.tokenizer = word_tokenizer(WORDS)
    check(tmp_path, bundle, " ".join(WORDS[:5]), " ".join([*WORDS[3:20], *WORDS[3:8]]))


@pytest.mark.parametrize("name", MIXTURES)
def test_configurations_that_no_family_has(tmp_path: Path, name: str) -> None:
    """Keys that heads share, gated and shared blocks, windows with two rotations, sinusoids."""
    bundle = mixture(name)
    words = WORDS[:40]
    bundle.tokenizer = word_tokenizer(words)
    longer = 13 if bundle.max_length else 60  # thumbnails of more than 48 tokens show tiles
    check(tmp_path, bundle, " ".join(words[:5]), " ".join((words[7:] * 2)[:longer]))


def test_heads_that_follow_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that were made for the patterns, in a layer where all keys are visible and in one with a window."""
    texts = ("The cats sat. Attention attended to (the) CAT", "Attention, the cat, the cats!")
    tokens = Inspection(heedful.load(make_model_dir(tmp_path / "model", "bare")), texts).sides["source"]
    n = len(tokens)
    targets = pattern_targets(tokens)
    gap = torch.arange(n)[None] - torch.arange(n)[:, None]
    visible = [torch.ones(n, n, dtype=torch.bool), gap.abs() <= 9]
    noise = torch.randn(2, 6, n, n, generator=torch.Generator().manual_seed(0))
    names = [*ONE_TEXT_PATTERNS, "itself"]
    scores = torch.stack([
        torch.stack([noise[layer, head] + 4.0 * targets[name] for head, name in enumerate(names)])
        .masked_fill(~visible[layer], -torch.inf)
        for layer in range(2)
    ])  # fmt: skip
    view = View(part="encoder", layers=2, heads=6, rows="source", keys="source")
    fake: Any = SimpleNamespace(
        views=[view], sides={"source": tokens}, weights=lambda part, layer: scores[layer].softmax(-1)
    )
    monkeypatch.setattr(head_patterns, "_visible_keys", lambda inspection, part, layer: visible[layer])
    expected = head_patterns.telling_heads(fake)
    assert {named["name"] for named in expected} == set(ONE_TEXT_PATTERNS)
    shown = [
        [[value if np.isfinite(value) else None for value in head.flatten().tolist()] for head in layer]
        for layer in scores
    ]
    (tmp_path / "input.json").write_text(json.dumps({"tokens": tokens, "scores": shown}))
    modules = bundle_modules(map(read_asset, ("numbers.js", "computed.js", "telling.js")))
    (tmp_path / "run.mjs").write_text(f"""{modules}
        import {{ readFileSync }} from "node:fs";
        const {{ tokens, scores }} = JSON.parse(readFileSync("input.json"));
        const filled = (score) => score ?? -Infinity;
        const trace = () => ({{ scores: (layer, head) => Float32Array.from(scores[layer][head], filled) }});
        console.log(JSON.stringify(tellingHeads({{ tokens, trace }}, {{ layers: 2, heads: 6 }})));
    """)
    assert_same(run_node(tmp_path), expected, "telling")


@pytest.mark.slow
def test_heads_of_the_encoder_that_ships(tmp_path: Path) -> None:
    bundle = heedful.load("heedful-mini-en", head="masked_lm")
    text = "Attention attends to the cat, and the cats attended to THE CAT."
    api = PageAPI([Inspection(bundle, FIRST)])
    calls = [("look", {"text": text}), ("look", {"side": 1, "text": FIRST})]
    answers = page_answers(tmp_path, render_html_with_model(api, precision="float32"), calls)
    for call, answer in zip(calls, answers, strict=True):
        expected = api(call[0], {name: str(value) for name, value in call[1].items()})
        assert len({named["name"] for look in expected["looks"] for named in look["telling"]}) >= 3  # type: ignore[attr-defined]
        assert_same(answer, expected, call[1]["text"])


NO_GRADIENTS = (
    "Integrated gradients are not computed in this page, which has no gradients: it shows those of the text that the "
    "file was written with. Start heedful look with this text to see them."
)
PREDICTIONS: dict[str, tuple[Any, Any]] = {
    "single": (FIRST, PAIR),
    "multiple": (FIRST, NEW),
    "regression": (FIRST, NEW),
    "tag": (FIRST, "ada lives in paris"),
    "span": (("who?", FIRST), ("who wrote it?", NEW)),
    "masked": ("the [MASK] sat", "a [MASK] sat on the [MASK] ."),
    "masked, without a mask": ("the [MASK] sat", "a dog sat on the mat ."),
    "bare": (FIRST, NEW),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_with_heads_off_and_tokens_replaced(tmp_path: Path, name: str) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", name.partition(",")[0]))
    first, new = PREDICTIONS[name]
    change = {"side": 0, "off": "encoder.0.1,encoder.1.3", "tokens": '{"2": "dog", "4": "\\u00e9"}'}
    more: list[Call] = [("prediction", {"side": 0}), ("changed", change)]
    prediction, changed = check(tmp_path, bundle, first, new, more)
    api = PageAPI([Inspection(bundle, new)])
    assert_same(changed, api("changed", {key: str(value) for key, value in change.items()}), "changed")
    expected = api("prediction", {"side": "0"})
    assert_same(prediction["answer"], expected["answer"], "answer")
    assert prediction["attribution"] is None
    assert prediction["why"] == (expected["why"] or NO_GRADIENTS)
    if name in ("single", "multiple", "regression", "masked", "bare"):
        assert_same(
            {key: prediction[key] for key in ("attention", "from")},
            {key: expected[key] for key in ("attention", "from")},
            "attention",
        )


def test_tokens_that_share_characters_are_not_replaced_together(tmp_path: Path) -> None:
    """The page and Python refuse the same replacements, with the same message."""
    script = live_script().rpartition("\nstartFileWithModel(")[0]
    (tmp_path / "input.json").write_text("{}")
    (tmp_path / "run.mjs").write_text(
        f"{RUN}{script}\n"
        'const tokens = ["<0xF0>", "<0x9F>"].map((text) => ({ text, segment: 0, start: 4, stop: 7 }));\n'
        'const replaced = (words) => replaceTokens({ item: "The cat sat.", tokens }, words);\n'
        "const refused = (words) => { try { return replaced(words); } catch ({ message }) { return message; } };\n"
        'console.log(JSON.stringify([replaced({ 1: "dog" }), refused({ 0: "a lion", 1: "dog" })]));\n'
    )
    message = "<0xF0> shares characters with another replaced token: replace one of them"
    assert run_node(tmp_path) == ["The dog sat.", message]


def similarity_alone(answer: Any) -> Any:
    """Return the engine's answer without the facts about its inputs, which the view does not show."""
    return answer and {key: value for key, value in answer.items() if key == "similarity"}


def test_embeddings(tmp_path: Path) -> None:
    bundle = with_head(heedful.load(make_model_dir(tmp_path / "model", "bare")), "embedding")
    api = PageAPI([Inspection(bundle, FIRST)])
    change = {"side": 0, "off": "encoder.1.1", "tokens": '{"2": "dog"}'}
    calls: list[Call] = [
        ("look", {"text": NEW}),
        ("prediction", {}),
        ("changed", change),
        ("look", {"text": PAIR[0], "pair": PAIR[1]}),
        ("prediction", {}),
    ]
    calls += [
        ("look", {"text": NEW}),
        ("look", {"side": 1, "text": FIRST}),
        ("prediction", {"side": 1}),
        ("changed", change),
    ]
    answers = page_answers(tmp_path, render_html_with_model(api, precision="float32"), calls)
    for (name, params), answer in zip(calls, answers, strict=True):
        expected = api(name, {key: str(value) for key, value in params.items()})
        if name == "prediction":
            why = expected["why"] or NO_GRADIENTS
            expected = {"answer": similarity_alone(expected["answer"]), "why": why}
        elif name == "changed":
            expected |= {key: similarity_alone(expected[key]) for key in ("before", "after")}
        assert_same(answer, expected, name)


def test_a_prompt_before_each_text(tmp_path: Path) -> None:
    bundle = with_head(heedful.load(make_model_dir(tmp_path / "model", "bare")), "embedding")
    head = bundle.config.head
    assert isinstance(head, SentenceEmbedding)
    prompted = replace(head, prompts=(("query", "who ran: "),), default_prompt="query")
    bundle.config = replace(bundle.config, head=prompted)
    assert bundle.default_prompt == "who ran: "
    check(tmp_path, bundle, FIRST, "a dog")


def test_two_texts_are_compared(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "single"))
    api = PageAPI([Inspection(bundle, FIRST)])
    texts = [PAIR[0], "a dog and the old cat ran on the mat in paris"]
    calls: list[Call] = [("look", {"side": side, "text": text}) for side, text in enumerate(texts)]
    for head, other in (("mean", "mean"), (1, 2)):
        calls.append(("compare", {"part": "encoder", "layer": 0, "other_layer": 1, "head": head, "other_head": other}))
    answers = page_answers(tmp_path, render_html_with_model(api, precision="float32"), calls)
    for (name, params), answer in zip(calls, answers, strict=True):
        assert_same(answer, api(name, {key: str(value) for key, value in params.items()}), name)
    assert len(answers[2]["rows"]) < len(answers[1]["looks"][1]["sides"]["source"])


def test_candidates(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "choice"))
    api = PageAPI(inspect_choices(bundle, FIRST, ["a dog", "paris"]))
    calls: list[Call] = [("look", {"side": 1, "text": "a cat", "pair": "the program"}), ("prediction", {"side": 1})]
    answers = page_answers(tmp_path, render_html_with_model(api, precision="float32"), calls)
    assert_same(answers[0], api("look", calls[0][1] | {"side": "1"}), "look")
    assert_same(answers[1]["answer"], api("prediction", {"side": "1"})["answer"], "prediction")


def test_what_only_python_computes_is_kept_for_the_first_text(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "single"))
    api = PageAPI([Inspection(bundle, FIRST)])
    content = render_html_with_model(api, precision="float32")
    asked: list[Call] = [
        ("prediction", {"side": 0, "label": 1}),
        ("suggested", {"side": 0}),
        ("positions", {"side": 0}),
    ]
    asked.append(("similarity", {"side": 0, "part": "encoder", "layer": 1, "head": 3}))
    again: list[Call] = [("look", {"side": 1, "text": NEW}), *((name, params | {"side": 1}) for name, params in asked)]
    back: list[Call] = [("look", {"side": 0, "text": "x " * 200}), ("writing", {}), ("about", {})]
    answers = page_answers(tmp_path, content, [*asked, *again, *back])
    for (name, params), answer in zip(asked, answers, strict=False):
        assert answer["keeps"] and "error" not in answer
        assert_same(answer, api(name, {key: str(value) for key, value in params.items()}), name, 1e-2)
    _, other_label, words, positions, similarity, too_long, writing, about = answers[len(asked) :]
    assert not other_label["keeps"] and other_label["attribution"] is None
    assert words["error"].startswith("Words as vectors are not computed in this page")
    assert positions == answers[2] and similarity == answers[3]
    assert too_long["error"] == "the text has 202 tokens, and this model reads 1 to 48 at once: give a shorter one"
    assert writing["error"] == "This is not computed in the page: start heedful look to see it."
    assert [look["item"] for look in about["looks"]] == [FIRST, NEW], "a text that is refused replaces none"
    kept = json.loads(re.search(r'id="kept">(.*?)</script>', content)[1])  # type: ignore[index]
    assert {name.partition("?")[0] for name in kept["answers"]} <= set(PYTHON_QUESTIONS)


# -- in a browser -----------------------------------------------------------------------------------------------------

HOOK = """
window.read = [];
const read = window.atob;
window.atob = (text) => { if (text.length < 100000) window.read.push(text); return read(text); };
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser"), flags=(OFFLINE,)) as opened:
        opened.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HOOK})
        yield opened


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> ModelBundle:
    return heedful.load(make_model_dir(tmp_path_factory.mktemp("models") / "single", "single"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, bundle: ModelBundle) -> str:
    file = tmp_path_factory.mktemp("page") / "look.html"
    file.write_text(render_html_with_model(PageAPI([Inspection(bundle, FIRST)]), precision="float32"), encoding="utf-8")
    return file.as_uri()


def open_page(chromium: Browser, url: str, view: str = "head") -> None:
    chromium.open(f"{url}#view={view}&layer=1&head=2&heads=2")
    chromium.until(lambda: chromium.js("return document.getElementById('look').dataset.model") == "ready")
    chromium.complaints()
    chromium.requests()


def type_text(chromium: Browser, text: str) -> None:
    """Write a text into the page's field and submit it, by the keyboard."""
    chromium.js(
        "window.read = []; const field = document.querySelector('.reading textarea'); field.focus(); field.select();"
    )
    chromium.keys(text, Keys.TAB, Keys.TAB, Keys.ENTER)  # over the second text to the button
    chromium.until(lambda: chromium.js("return document.querySelector('.reading textarea').value") == text)
    chromium.settle()


def read_last(chromium: Browser) -> np.ndarray:
    """Return the numbers that the page has decoded last, to draw them."""
    data = chromium.until(lambda: chromium.js("return window.read.at(-1) ?? null"))
    return np.frombuffer(base64.b64decode(data), "<f4")


def test_typed_text_is_drawn_from_what_the_page_computes(chromium: Browser, page: str, bundle: ModelBundle) -> None:
    open_page(chromium, page)
    type_text(chromium, NEW)
    expected = Inspection(bundle, NEW)
    weights = expected.weights("encoder", 1, [2])[0].numpy()
    assert np.abs(read_last(chromium).reshape(weights.shape) - weights).max() <= 1e-4
    names = chromium.js(
        "return [...document.querySelectorAll('.head-grid > .tokens .token')].map((e) => e.textContent)"
    )
    assert names == [token["text"] for token in expected.sides["source"]]
    assert chromium.js("return document.querySelectorAll('.lines path').length") == int((weights >= 0.03).sum())
    chromium.keys("]")  # the focus is in the field: a character, not another layer
    assert chromium.js("return document.querySelector('.reading textarea').value") == NEW + "]"
    assert not chromium.complaints()
    assert not [url for url in chromium.requests() if not url.startswith(BROWSER_PAGES)]


VIEWS = ("head", "model", "neuron", "steps", "prediction", "change", "positions", "compare", "words", "similarity")


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_view_is_drawn_anew(chromium: Browser, page: str, width: int, height: int) -> None:
    window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    try:
        open_page(chromium, page)
        assert chromium.js("return [...document.querySelectorAll('.tab')].map((e) => e.dataset.view)") == [*VIEWS]
        type_text(chromium, "a dog wrote the program")
        for view in VIEWS:
            chromium.click(f'[data-view="{view}"]')
            chromium.until(lambda view=view: chromium.js("return document.querySelector('.body').dataset.view") == view)
            body = chromium.text(".body")
            notice = chromium.js(
                "return [...document.querySelectorAll('.body .problem')].map((e) => e.textContent).join('')"
            )
            assert (
                notice.startswith("Words as vectors are not computed in this page") if view == "words" else notice == ""
            ), view
            if view not in ("model", "positions", "similarity", "words", "compare"):
                inputs = chromium.js(
                    "return [...document.querySelectorAll('.body input')].map((e) => e.value).join(' ')"
                )
                assert "program" in body + inputs and "mat" not in re.findall(r"\w+", body + inputs), view
            assert chromium.js("return document.documentElement.scrollWidth") <= width, view
        assert "Integrated gradients are not computed in this page" in (
            chromium.click('[data-view="prediction"]') or chromium.text(".body")
        )
        assert not chromium.complaints()
    finally:
        chromium.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_head_is_switched_off_in_the_page(chromium: Browser, page: str, bundle: ModelBundle) -> None:
    open_page(chromium, page, "change")
    type_text(chromium, NEW)
    chromium.focus('.gate[data-place="encoder.1.2"]')
    chromium.keys(Keys.ENTER)
    chromium.until(lambda: "1 head off" in chromium.text(".changed"))
    after = PageAPI([Inspection(bundle, NEW)])("changed", {"off": "encoder.1.2"})["after"]
    for probability in after["probabilities"].values():  # type: ignore[index]
        assert f"{100 * probability:.1f} %" in chromium.text(".changed .panel:last-child")


def test_a_text_that_is_too_long_is_refused_in_words(chromium: Browser, page: str) -> None:
    open_page(chromium, page)
    chromium.js(
        "document.querySelector('.reading textarea').value = 'cat '.repeat(60);"
        "document.querySelector('.reading button').click();"
    )
    problem = chromium.until(lambda: chromium.text(".reading .problem"))
    assert problem == "the text has 62 tokens, and this model reads 1 to 48 at once: give a shorter one"


def test_hostile_text_and_the_policy(chromium: Browser, page: str) -> None:
    open_page(chromium, page)
    policy = chromium.js("return document.querySelector('meta[http-equiv]').content")
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-\S+' 'wasm-unsafe-eval'; style-src 'sha256-\S+'; connect-src 'none'; "
        r"img-src data:; base-uri 'none'; form-action 'none'",
        policy,
    )
    type_text(chromium, "</script><img src=x onerror=window.hit=1> a cat")
    assert chromium.js("return document.querySelectorAll('img').length") == 0
    assert chromium.js("return window.hit ?? 0") == 0
    assert not chromium.complaints()


def test_weights_that_are_not_finite(chromium: Browser, tmp_path: Path) -> None:
    broken = heedful.load(make_model_dir(tmp_path / "model", "single"))
    api = PageAPI([Inspection(broken, FIRST)])
    broken.model.encoder.blocks[1].mlp.down.bias.data[0] = float("nan")  # type: ignore[union-attr,index]
    (tmp_path / "look.html").write_text(render_html_with_model(api, precision="float32"), encoding="utf-8")
    chromium.open(f"{(tmp_path / 'look.html').as_uri()}#view=head")
    problem = chromium.until(lambda: chromium.text(".body .problem"))
    assert problem == "the hidden states are not finite: the model has wrong weights"


# -- the command ------------------------------------------------------------------------------------------------------


def look(*arguments: object) -> int:
    """Return the exit code of `heedful look`."""
    with pytest.raises(SystemExit) as ended:
        main(["look", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = make_model_dir(tmp_path / "model", "single"), tmp_path / "look.html"
    assert look(model, FIRST, "--html", file, "--with-model") == 0
    small = file.read_text(encoding="utf-8")
    assert "'wasm-unsafe-eval'" in small
    assert look(model, FIRST, "--html", file, "--with-model", "--precision", "float32") == 0
    assert file.stat().st_size > len(small)
    assert look(model, FIRST, "--html", file) == 0
    assert "wasm" not in file.read_text(encoding="utf-8"), "without the option there is no model in the file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with-model"], "--with-model was given: only for --html"),
        (
            ["--positions", "--with-model"],
            "--with-model was given: --analogy and --positions take a RUN, --checkpoint and --json alone",
        ),
        (["--html", "x.html", "--precision", "int8"], "--precision was given: only for --with-model"),
        (["--html", "x", "--with-model", "--layer", "0", "--against", "m"], "--layer and --against were given: a file"),
    ],
)
def test_options_that_exclude_each_other(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert look("model", FIRST, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "architecture", "message"),
    [
        ("gpt2", "GPT2LMHeadModel", "gpt2.* is not an encoder alone: HTML export supports"),
        ("xlnet", "XLNetForSequenceClassification", 'xlnet.* relative positions of the kind "transformer_xl": HTML'),
    ],
)
def test_other_models_are_refused(tmp_path: Path, family: str, architecture: str, message: str) -> None:
    save_tiny(tmp_path / "model", family, architecture)
    loaded = heedful.load(tmp_path / "model")
    loaded.tokenizer = word_tokenizer(WORDS)
    with pytest.raises(HeedfulError, match=message):
        render_html_with_model(PageAPI([Inspection(loaded, WORDS[0])]))


def test_classic_models_and_second_models_are_refused(bundle: ModelBundle) -> None:
    structured = Inspection(make_classic("structured"), "the film was not good .")
    with pytest.raises(HeedfulError, match="has no Transformer encoder, which a page with the model in it computes"):
        render_html_with_model(PageAPI([structured]))
    with pytest.raises(HeedfulError, match="there are two models: a page with a model in it has one"):
        render_html_with_model(PageAPI([Inspection(bundle, FIRST), structured]))


def test_heads_whose_predictions_the_page_does_not_compute(tmp_path: Path) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "next"))
    (prediction,) = check(tmp_path, bundle, PAIR, (PAIR[1], PAIR[0]), [("prediction", {"side": 0})])
    assert prediction["told"].startswith("this page does not compute predictions of a next_sentence head")

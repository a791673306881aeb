"""A page with a model in it, in a browser without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import heedful
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.tuning.precision_gate import Tolerance
from heedful.page import html as module
from heedful.page.html import export_page, render_page
from tests.support.browser import Browser, browser
from tests.support.model_folders import make_model_dir
from tests.support.page_checks import axe_violations

LABELS = ["</script><img src=x onerror=alert(1)>", "javascript:alert(2)", "\u202egood\u200b <b>bold</b> {{weights}}"]
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
BROWSER_PAGES = ("chrome://", "chrome-untrusted://", "data:", "about:")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser"), flags=(OFFLINE,)) as opened:
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        yield opened


def open_page(chromium: Browser, path: Path) -> None:
    chromium.driver.get(path.as_uri())
    chromium.until(lambda: chromium.text("#status") == "ready")
    chromium.requests()
    chromium.complaints()


def ask(chromium: Browser, **fields: str) -> Any:
    """Fill in the form, and return the answer."""
    chromium.js(
        """for (const [name, value] of Object.entries(arguments[0])) {
            document.querySelector(`textarea[name=${name}]`).value = value;
        }
        document.querySelector("button").click();""",
        fields,
    )
    assert re.fullmatch(r"[\d.]+ ms", chromium.text("#status")), chromium.text("#status")
    return json.loads(chromium.text("#answer"))


FIELDS: dict[str, tuple[Any, dict[str, str]]] = {
    "single": ("the cat sat", {"text": "the cat sat"}),
    "multiple": (("a cat", "a dog"), {"text": "a cat", "second": "a dog"}),
    "regression": ("the cat sat", {"text": "the cat sat"}),
    "tag": ("ada lives in paris", {"text": "ada lives in paris"}),
    "span": ({"question": "who?", "context": "ada wrote it"}, {"question": "who?", "context": "ada wrote it"}),
    "choice": ({"prompt": "a cat", "choices": ["sat", "ran"]}, {"prompt": "a cat", "lines": "sat\n\nran\n"}),
    "masked": ("the [MASK] on [MASK]", {"text": "the [MASK] on [MASK]"}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_page_answers_offline(tmp_path: Path, chromium: Browser, name: str) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", name))
    export_page(bundle, tmp_path / "page.html", precision="float32")
    open_page(chromium, tmp_path / "page.html")
    engine_input, fields = FIELDS[name]
    answer, (expected,) = ask(chromium, **fields), BundleEngine(bundle)([engine_input])
    for key, value in expected.items():
        if isinstance(value, float):
            assert answer[key] == pytest.approx(value, abs=1e-5)
        elif isinstance(value, str | int):
            assert answer[key] == value
    assert chromium.js("return document.querySelectorAll('#shown tr').length") > 0
    assert chromium.js("return document.documentElement.scrollWidth") == 390
    assert not chromium.complaints()
    assert not [url for url in chromium.requests() if not url.startswith(BROWSER_PAGES)]


def test_keyboard_and_screen_reader(tmp_path: Path, chromium: Browser) -> None:
    """A text is typed and sent by keys alone; fields, rows and the answer have names, and the answer is announced."""
    export_page(heedful.load(make_model_dir(tmp_path / "model", "single")), tmp_path / "page.html")
    open_page(chromium, tmp_path / "page.html")
    actions = ActionChains(chromium.driver, duration=0).send_keys(Keys.TAB, "the cat sat", Keys.TAB, Keys.TAB)
    actions.send_keys(Keys.ENTER).perform()
    labels = list(json.loads(chromium.text("#answer"))["probabilities"])
    assert chromium.js("return document.activeElement.textContent") == "Ask"
    nodes = chromium.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    accessible = [
        (node["role"]["value"], node.get("name", {}).get("value"), {p["name"]: p["value"] for p in node["properties"]})
        for node in nodes
        if not node["ignored"]
    ]
    named = {(role, name) for role, name, _ in accessible}
    assert {("textbox", "Text"), ("button", "Ask"), ("region", "Answer"), ("table", "Answer")} <= named
    assert {name for role, name, _ in accessible if role == "rowheader"} == set(labels)
    live = {role for role, _, states in accessible if states.get("live", {}).get("value") == "polite"}
    assert live == {"status", "generic"}  # the time, and the element around the table


def test_no_rule_of_accessibility_is_violated(tmp_path: Path, chromium: Browser) -> None:
    export_page(heedful.load(make_model_dir(tmp_path / "model", "masked")), tmp_path / "page.html")
    open_page(chromium, tmp_path / "page.html")
    ask(chromium, text="the [MASK] on [MASK]")
    for dark in (False, True):
        chromium.dark(dark)
        assert not axe_violations(chromium)
    chromium.dark(False)


def test_labels_are_text(tmp_path: Path, chromium: Browser) -> None:
    """Labels, tokens and the title become text, whatever they contain."""
    model = make_model_dir(tmp_path / "model", "single")
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
    (model / "config.json").write_text(json.dumps(config))
    title = "</title><script>alert(3)</script>{{script}}"
    export_page(heedful.load(model), tmp_path / "page.html", title=title)
    open_page(chromium, tmp_path / "page.html")
    assert set(ask(chromium, text="</textarea><script>alert(4)</script> a cat")["probabilities"]) == set(LABELS)
    assert chromium.text("h1") == title
    names = chromium.js("return [...document.querySelectorAll('#shown bdi')].map(({ textContent }) => textContent)")
    assert sorted(names) == sorted(LABELS)
    assert chromium.js("return document.querySelectorAll('main img, main script, main b, title script').length") == 0
    assert not chromium.complaints()


def test_tokens_are_text(tmp_path: Path, chromium: Browser) -> None:
    model, hostile = make_model_dir(tmp_path / "model", "masked"), "<img/src=x/onerror=alert(5)>"
    vocabulary = (model / "vocab.txt").read_text().splitlines()
    words = [f"{hostile}{number}" if token.isalpha() else token for number, token in enumerate(vocabulary)]
    (model / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    export_page(heedful.load(model), tmp_path / "page.html")
    open_page(chromium, tmp_path / "page.html")
    (mask,) = ask(chromium, text="[MASK]")["masks"]
    assert any(candidate["text"].startswith(hostile) for candidate in mask["candidates"])
    assert chromium.js("return document.querySelectorAll('main img').length") == 0
    assert not chromium.complaints()


def test_weights_that_are_not_finite(tmp_path: Path, chromium: Browser) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", "single"))
    with torch.no_grad():
        bundle.head.out.bias[0] = torch.nan  # type: ignore[union-attr,index,operator]
    export_page(bundle, tmp_path / "page.html")
    open_page(chromium, tmp_path / "page.html")
    chromium.js("document.querySelector('button').click()")
    assert chromium.text("#status") == "the scores are not finite: the model has wrong weights"


def test_the_policy_blocks_scripts_styles_and_requests(tmp_path: Path, chromium: Browser) -> None:
    export_page(heedful.load(make_model_dir(tmp_path / "model", "single")), tmp_path / "page.html")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', (tmp_path / "page.html").read_text())
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-\S+' 'wasm-unsafe-eval'; style-src 'sha256-\S+'; base-uri 'none'; "
        "form-action 'none'",
        policy[1],
    )
    open_page(chromium, tmp_path / "page.html")
    chromium.js("""
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        new Image().src = "http://127.0.0.1:9/x";
        fetch("http://127.0.0.1:9/y").catch(() => {});
    """)
    assert chromium.js("return window.ran ?? false") is False
    complaints = chromium.complaints()
    assert len([line for line in complaints if "violates the following Content Security Policy" in line]) >= 3, (
        complaints
    )


def test_empty_lines_are_refused(tmp_path: Path, chromium: Browser) -> None:
    export_page(heedful.load(make_model_dir(tmp_path / "model", "choice")), tmp_path / "page.html")
    open_page(chromium, tmp_path / "page.html")
    chromium.js("document.querySelector('button').click()")
    assert chromium.text("#status") == "write at least one line"
    assert chromium.js("return document.getElementById('answer-section').hidden") is True


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    """Return the exit code of `heedful export`."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, page = make_model_dir(tmp_path / "model", "single"), tmp_path / "pages" / "page.html"
    capsys.readouterr()
    assert run(model, "--html", page, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["written"] == str(page) and facts["bytes"] == page.stat().st_size and facts["precision"] == "int8"
    assert run(model, "--html", page) == 2
    assert "exists: give another name, or overwrite=True (on the command line --overwrite)" in capsys.readouterr().err
    assert run(model, "--html", page, "--precision", "float32", "--overwrite") == 0
    assert page.stat().st_size > facts["bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give OUT for ONNX, or --html FILE for a page, and not both"),
        (["out.onnx", "--html", "page.html"], "give OUT for ONNX, or --html FILE for a page, and not both"),
        (["out.onnx", "--precision", "int8"], "--precision is for --html; ONNX is exported in float32"),
    ],
)
def test_options_that_exclude_each_other(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("model", *arguments) == 2
    assert message in capsys.readouterr().err


def test_int8_is_taken_where_it_changes_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, page = heedful.load(make_model_dir(tmp_path / "model", "single")), tmp_path / "page.html"
    exported = export_page(bundle, page)
    assert exported.precision == "int8" and 0 < exported.score_change <= 0.05  # type: ignore[operator]
    monkeypatch.setattr(module, "Tolerance", lambda: Tolerance(scores=exported.score_change / 2))  # type: ignore[operator]
    assert export_page(bundle, page, overwrite=True).precision == "float16"
    assert export_page(bundle, page, precision="float32", overwrite=True).score_change is None


def test_large_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PARAMETERS", 100)
    with pytest.raises(HeedfulError, match="parameters; a page has at most 100: distil a smaller model"):
        render_page(heedful.load(make_model_dir(tmp_path / "model", "single")))

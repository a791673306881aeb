"""The page in a real browser: what a model calls its labels is text there, whatever it says."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from heedful.serve.app import FILES
from heedful.serve.run import RunningServer, background
from tests.support.http_client import ask
from tests.support.model_folders import make

pytestmark = [
    pytest.mark.skipif(not (shutil.which("chromedriver") and shutil.which("chromium")), reason="no chromium is here"),
]
LABELS = ["</script><img src=x onerror=alert(1)>", "javascript:alert(2)", "\u202egood\u200b <b>bold</b>"]
ARGUMENTS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
ARGUMENTS += " disable-component-update disable-sync window-size=900,1000"


class Browser:
    """Chromium, by WebDriver over HTTP."""

    def __init__(self, folder: Path, dark: bool = False) -> None:
        self.process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        reply = None
        while reply is None:
            reply = re.search(r"on port (\d+)\.", self.process.stdout.readline())
        self.base = f"http://127.0.0.1:{reply[1]}/session"
        arguments = [f"--{word}" for word in ARGUMENTS.split()] + [f"--user-data-dir={folder}"]
        arguments += ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"args": arguments, "binary": shutil.which("chromium")}
        chosen = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.base += "/" + self.ask("", capabilities={"alwaysMatch": chosen})["sessionId"]

    def ask(self, path: str, method: str = "POST", **body: Any) -> Any:
        """One command."""
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["value"]

    def run(self, script: str) -> Any:
        """Run a script and return the value that it passes to its callback."""
        return self.ask("/execute/async", script=f"const done = arguments[0]; {script}", args=[])

    def text(self, name: str) -> str:
        """Return the text of an element, or what is chosen in it."""
        element = f"document.getElementById({json.dumps(name)})"
        return str(self.run(f"const at = {element}; done(at.value ?? at.textContent)"))

    def change(self, name: str, value: str) -> None:
        """Choose something."""
        self.run(
            f"const at = document.getElementById({json.dumps(name)}); at.value = {json.dumps(value)};"
            "at.dispatchEvent(new Event('change')); done()"
        )

    def asks(self, body: Any) -> None:
        """Send this body, and wait for the answer."""
        self.run(f"document.getElementById('body').value = {json.dumps(json.dumps(body))}; done()")
        self.run("document.querySelector('button').click(); done()")
        self.until(lambda: " ms" in self.text("status"))

    def until(self, true: Callable[[], bool]) -> None:
        """Wait for something."""
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.02)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("/screenshot", "GET")))

    def close(self) -> None:
        self.ask("", "DELETE")
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium_ = Browser(tmp_path_factory.mktemp("browser") / "profile", dark="HEEDFUL_DARK" in os.environ)
    yield chromium_
    chromium_.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """Show an empty page, and forget what the last one told."""
    chromium.ask("/url", url="about:blank")
    chromium.ask("/se/log", type="browser")
    return chromium


ASKED = """
const ready = setInterval(() => {
  if (!document.getElementById("body").value) return;
  clearInterval(ready);
  document.querySelector("#route").value = "/predict";
  document.querySelector("#route").dispatchEvent(new Event("change"));
  document.querySelector("button").click();
  const timer = setInterval(() => {
    if (document.getElementById("found").hidden) return;
    clearInterval(timer);
    done([...document.querySelectorAll("#shown bdi")].map((each) => each.textContent));
  }, 20);
}, 20);
"""


def test_labels_are_text(tmp_path: Path, browser: Browser) -> None:
    model = make(tmp_path / "model", "single")
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
    (model / "config.json").write_text(json.dumps(config))
    with background({"single": str(model)}) as running:
        browser.ask("/url", url=running.url + "/")
        assert sorted(browser.run(ASKED)) == sorted(LABELS)
        assert browser.run("done(document.querySelectorAll('main img, main script, main b').length)") == 0
        from_elsewhere = "done(performance.getEntriesByType('resource').map((each) => new URL(each.name).origin))"
        assert set(browser.run(from_elsewhere)) == {running.url}
        assert "200" in browser.run("done(document.getElementById('status').textContent)")
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.picture(Path(folder, f"page-{'dark' if 'HEEDFUL_DARK' in os.environ else 'light'}.png"))
    spoken = [entry for entry in browser.ask("/se/log", type="browser") if "favicon" not in entry["message"]]
    assert not spoken, spoken  # no breach of the content security policy, no error


FOLLOWED = """
const [key, link, status, text] = [%s, %s, %s, %s];
document.getElementById("key").value = key;
document.querySelector(`nav a[href="${link}"]`).click();
const timer = setInterval(() => {
  const [code, answer] = ["status", "answer"].map((each) => document.getElementById(each).textContent);
  if (code !== status || !answer.includes(text)) return;
  clearInterval(timer);
  done([document.getElementById("found").hidden, document.getElementById("whole").open, location.pathname]);
}, 20);
"""


def test_its_links_are_followed_with_the_key(tmp_path: Path, browser: Browser) -> None:
    """Links need the key, which the browser alone would not send."""
    key = b"a key of sixteen or more".replace(b" ", b"-")
    with background({"single": str(make(tmp_path / "model", "single"))}, keys=(key,)) as running:
        browser.ask("/url", url=running.url + "/")
        for text_, link, status, text in (
            ("", "/metrics", "401 · give a key above", "give a key: Authorization: Bearer KEY"),
            (key.decode(), "/metrics", "200", "heedful_requests_total"),
            (key.decode(), "/openapi.json", "200", '"openapi": "3.'),
        ):
            rows = browser.run(FOLLOWED % tuple(map(json.dumps, (text_, link, status, text))))
            assert rows == [False, True, "/"], link
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.picture(Path(folder, "page-openapi.png"))


# -- rows -----------------------------------------------------------------------------------------------------------

ROWS = """
done([...document.querySelectorAll("#shown tr")].map((row) => [...row.cells].map(
  (cell) => cell.firstElementChild?.localName === "progress" ? "bar" : cell.textContent)));
"""
Rows = list[list[str]]


def sure(name: str, share: float) -> list[str]:
    return [name, "bar", f"{100 * share:.1f} %"]


def labels(answer: Any) -> Rows:
    return [sure(label["label"], label["score"]) for label in answer]


def tagged(answer: Any) -> Rows:
    names = [(entity["text"], entity["label"], entity["probability"]) for entity in answer["entities"]]
    return [[text, label, "bar", f"{100 * share:.1f} %"] for text, label, share in names]


def filled(mask: Any) -> Rows:
    return [sure(token["text"] or token["token"], token["probability"]) for token in mask["candidates"]]


def filled_apart(answers: Any) -> Rows:
    (mask_one, two), (three,) = (answer["masks"] for answer in answers)
    first = [["text 1, mask 1"], *filled(mask_one), ["text 1, mask 2"], *filled(two)]
    return [*first, ["text 2"], *filled(three)]


SHOWN: list[tuple[str, str, dict[str, Any], Callable[[Any], Rows]]] = [
    ("single", "/predict", {"inputs": "a cat"}, labels),
    (
        "single",
        "/predict",
        {"inputs": [["a cat"], ["a dog"]]},
        lambda reply: [["text 1"], *labels(reply[0]), ["text 2"], *labels(reply[1])],
    ),
    ("multiple", "/predict", {"inputs": "a cat"}, labels),
    ("regression", "/predict", {"inputs": "a cat"}, lambda reply: [["stars", f"{reply[0]['score']:.4f}"]]),
    (
        "regression",
        "/rerank",
        {"query": "a cat", "texts": ["a dog", "a mat"]},
        lambda reply: [[f"text {entry['index'] + 1}", f"{entry['score']:.4f}"] for entry in reply],
    ),
    ("tag", "/token-classification", {"inputs": "ada lives in paris and she wrote it"}, tagged),
    (
        "span",
        "/question-answering",
        {"inputs": {"question": "who?", "context": "ada wrote it"}},
        lambda reply: [[reply["answer"], f"{reply['score']:.4f}"]],
    ),
    (
        "choice",
        "/multiple-choice",
        {"inputs": {"prompt": "a cat", "choices": ["sat", "ran"]}},
        lambda reply: [sure(reply["choice"], reply["probability"])],
    ),
    (
        "next",
        "/next-sentence",
        {"inputs": [["a cat", "it sat"]]},
        lambda reply: [sure("the second text follows the first", reply[0]["is_next_probability"])],
    ),
    ("masked", "/fill-mask", {"inputs": "the [MASK]", "top_k": 3}, lambda reply: filled(reply["masks"][0])),
    ("masked", "/fill-mask", {"inputs": ["the [MASK] on [MASK]", "[MASK]"], "top_k": 2}, filled_apart),
    (
        "embed",
        "/similarity",
        {"inputs": {"source_sentence": "a cat", "sentences": ["a dog", "a mat"]}},
        lambda reply: [[f"sentence {number + 1}", f"{score:.4f}"] for number, score in enumerate(reply)],
    ),
    (
        "embed",
        "/zero-shot-classification",
        {"inputs": "a cat", "parameters": {"candidate_labels": ["a dog", "a mat"]}},
        labels,
    ),
    ("write", "/generate", {"inputs": "a b", "max_new_tokens": 4}, lambda reply: [[reply["text"], "", ""]]),
    ("embed", "/embed", {"inputs": "a cat"}, lambda reply: []),
]


def test_rows_of_answers(served: RunningServer, browser: Browser) -> None:
    """A probability has a bar; any other number has none."""
    browser.ask("/url", url=served.url + "/")
    browser.until(lambda: browser.text("model") != "")
    for model, route, body, rows in SHOWN:
        browser.run("document.getElementById('body').value = ''; done()")
        browser.change("model", model)
        browser.until(lambda: browser.text("body") != "")
        browser.change("route", route)
        browser.asks(body)
        reply = ask(served.port, route, {**body, "model": model})
        assert browser.run(ROWS) == rows(reply.json), (model, route)
        assert browser.run("done(document.getElementById('whole').open)") == (route == "/embed")
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.picture(Path(folder, f"page-{model}{route.replace('/', '-')}.png"))


FIELDS = """
const areas = [...document.querySelectorAll("#inputs textarea")];
for (const [at, value] of %s.entries()) {
  areas[at].value = value;
  areas[at].dispatchEvent(new Event("input"));
}
done([areas.length, document.getElementById("body").value, document.getElementById("curl").textContent]);
"""


def test_fields_make_the_request(served: RunningServer, browser: Browser) -> None:
    """The fields fill in the JSON body; the page reports a pair, and the curl command has the same body."""
    browser.ask("/url", url=served.url + "/")
    browser.until(lambda: browser.text("model") != "")
    for model, route, values, expected in (
        ("single", "/predict", ["it's a cat"], {"inputs": "it's a cat"}),
        ("single", "/predict", ["a cat", "a dog"], {"inputs": {"text": "a cat", "text_pair": "a dog"}}),
        ("embed", "/embed", ["a cat\n\na dog\n"], {"inputs": ["a cat", "a dog"]}),
        ("span", "/question-answering", ["who?", "ada"], {"inputs": {"question": "who?", "context": "ada"}}),
        (
            "choice",
            "/multiple-choice",
            ["a cat", "sat\nran"],
            {"inputs": {"prompt": "a cat", "choices": ["sat", "ran"]}},
        ),
    ):
        browser.change("model", model)
        browser.until(lambda model=model: browser.text("model") == model and browser.text("body") != "")
        browser.change("route", route)
        count, body, curl = browser.run(FIELDS % json.dumps(values))
        assert json.loads(body) == expected and count >= len(values)
        done = subprocess.run(
            ["sh", "-c", f'set -- {curl}; printf %s "$6"'], capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout) == expected and curl.startswith(f"curl '{served.url}{route}' -H")
        assert (browser.text("pairs") == "The two texts are read as one pair.") == (
            len(values) > 1 and model == "single"
        )
        browser.run("document.querySelector('button').click(); done()")
        browser.until(lambda: "200" in browser.text("status"))


# -- a server that is made up -----------------------------------------------------------------------------------------


@contextmanager
def acting(answer: Callable[[str], tuple[int, Any]]) -> Iterator[str]:
    """The page, on a server with these answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in FILES:
                file, kind = FILES[self.path]
                return self.reply(200, kind, file.read_bytes())
            status, body = answer(self.path)
            if isinstance(body, str):
                return self.reply(status, "text/plain", body.encode())
            return self.reply(status, "application/json", json.dumps(body).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


FORM = {"summary": "asks", "requestBody": {"content": {"application/json": {"example": {"inputs": []}}}}}
DOCUMENT = {"paths": {path: {"post": FORM} for path in ("/question-answering", "/token-classification")}}
NAMES = ["first", "slow", "quick"]
NOTHING = {
    "answer": "",
    "start": 0,
    "end": 0,
    "score": 5.5,
    "no_answer_score": 7.25,
    "windows": 1,
    "best_answer": "ada",
}


def about(path: str) -> tuple[int, Any]:
    """Return the /info of the model that the path names, one of three."""
    name = parse_qs(urlsplit(path).query).get("model", NAMES)[0]
    known = {
        "model_id": name,
        "model_dtype": "float32",
        "model_type": {"question_answering": {}},
        "family": f"the family of {name}",
    }
    return 200, known | {
        "parameters": 1,
        "routes": ["/question-answering", "/token-classification"],
        "models": [*NAMES, "gone"],
    }


def test_a_server_that_loads_is_asked_again(browser: Browser) -> None:
    ready = Event()

    def answer(path: str) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, DOCUMENT
        return about(path) if ready.is_set() else (503, {"error": "the model is loading", "error_type": "unhealthy"})

    with acting(answer) as url:
        browser.ask("/url", url=url)
        browser.until(lambda: browser.text("facts") != "…")
        assert browser.text("facts") == "503 · the model is loading; asked again until it answers"
        ready.set()
        browser.until(lambda: "the family of first" in browser.text("facts"))
        assert browser.text("model") == "first" and browser.text("told") == "asks"


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (401, "Authorization: Bearer KEY", "401 · give a key"),
        (500, "something went wrong", "500 · something went wrong"),
    ],
)
def test_no_other_trouble_is_asked_again(browser: Browser, status: int, error: str, message: str) -> None:
    with acting(lambda path: (status, {"error": error})) as url:
        browser.ask("/url", url=url)
        browser.until(lambda: browser.text("facts") != "…")
        assert browser.text("facts") == message


def test_the_model_that_was_chosen_last_is_shown(browser: Browser) -> None:
    """Replies for a model chosen earlier are ignored; a model that cannot be shown is not chosen."""
    go = Event()

    def answer(path: str) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, DOCUMENT
        if "slow" in path:
            go.wait(20)
        return (404, {"error": "there is no model of this name"}) if "gone" in path else about(path)

    with acting(answer) as url:
        browser.ask("/url", url=url)
        browser.until(lambda: browser.text("model") == "first")
        browser.change("model", "slow")
        browser.change("model", "quick")
        browser.until(lambda: "of quick" in browser.text("facts"))
        go.set()
        came = f"done(performance.getEntriesByName('{url}/info?model=slow').length > 0)"
        browser.until(lambda: bool(browser.run(came)))
        assert browser.text("model") == "quick" and "of quick" in browser.text("facts")
        browser.change("model", "gone")
        browser.until(lambda: browser.text("status") != "")
        assert browser.text("status") == "404 · there is no model of this name"
        assert browser.text("model") == "quick" and "of quick" in browser.text("facts")


def test_no_answer_words_without_entities_and_the_end_of_a_long_answer(browser: Browser) -> None:
    word = {"start": 0, "end": 3}
    words = [word | {"text": "ada", "label": "O", "probability": 0.5}, word | {"text": "x", "label": None}]
    words[1]["probability"] = None
    answers = {
        "/openapi.json": DOCUMENT,
        "/question-answering": NOTHING,
        "/token-classification": {"words": words, "entities": [], "windows": 1},
        "/metrics": "x" * 101_234,
    }
    with acting(lambda path: (200, answers[path]) if path in answers else about(path)) as url:
        browser.ask("/url", url=url)
        browser.until(lambda: browser.text("model") == "first")
        browser.asks({})
        assert browser.run(ROWS) == [["(none)", "7.2500"]]
        browser.change("route", "/token-classification")
        browser.asks({})
        assert browser.run(ROWS) == [["ada", "O", "bar", "50.0 %"], ["x", "", "", ""]]
        browser.run("document.querySelector('nav a[href=\"/metrics\"]').click(); done()")
        browser.until(lambda: browser.text("answer").startswith("x"))
        assert browser.text("answer") == "x" * 100_000 + "\n… and 1,234 more characters"

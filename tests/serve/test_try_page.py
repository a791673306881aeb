"""The try-it page in Chromium: labels are shown as text, forms build requests, and answers become rows."""

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
from tests.support.model_folders import make_model_dir

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("chromedriver") and shutil.which("chromium")),
        reason="chromium or chromedriver is not installed",
    ),
]
LABELS = ["</script><img src=x onerror=alert(1)>", "javascript:alert(2)", "\u202egood\u200b <b>bold</b>"]
CHROMIUM_FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
CHROMIUM_FLAGS += " disable-component-update disable-sync window-size=900,1000"


class Browser:
    """Chromium, controlled with the WebDriver protocol over HTTP."""

    def __init__(self, folder: Path, dark: bool = False) -> None:
        self.process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = None
        while port is None:
            port = re.search(r"on port (\d+)\.", self.process.stdout.readline())
        self.base = f"http://127.0.0.1:{port[1]}/session"
        arguments = [f"--{flag}" for flag in CHROMIUM_FLAGS.split()] + [f"--user-data-dir={folder}"]
        arguments += ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"args": arguments, "binary": shutil.which("chromium")}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.base += "/" + self.command("", capabilities={"alwaysMatch": capabilities})["sessionId"]

    def command(self, path: str, method: str = "POST", **body: Any) -> Any:
        """Send one WebDriver command, and return the value of its response."""
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.base + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.load(reply)["value"]

    def run(self, script: str) -> Any:
        """Run JavaScript, and return the value that it passes to its callback."""
        return self.command("/execute/async", script=f"const done = arguments[0]; {script}", args=[])

    def text(self, name: str) -> str:
        """Return the value of the form element with the id `name`, or the text of another element."""
        element = f"document.getElementById({json.dumps(name)})"
        return str(self.run(f"const element = {element}; done(element.value ?? element.textContent)"))

    def change(self, name: str, value: str) -> None:
        """Choose `value` in the select element with the id `name`."""
        self.run(
            f"const element = document.getElementById({json.dumps(name)}); element.value = {json.dumps(value)};"
            "element.dispatchEvent(new Event('change')); done()"
        )

    def send_body(self, body: Any) -> None:
        """Send `body` with the button of the page, and wait until the response is shown."""
        self.run(f"document.getElementById('body').value = {json.dumps(json.dumps(body))}; done()")
        self.run("document.querySelector('button').click(); done()")
        self.until(lambda: " ms" in self.text("status"))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` returns true, for at most 20 seconds."""
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, "the condition did not become true"
            time.sleep(0.02)

    def save_screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.command("/screenshot", "GET")))

    def close(self) -> None:
        self.command("", "DELETE")
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of this module."""
    with_profile = Browser(tmp_path_factory.mktemp("browser") / "profile", dark="HEEDFUL_DARK" in os.environ)
    yield with_profile
    with_profile.close()


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """The browser with an empty page and an empty log."""
    chromium.command("/url", url="about:blank")
    chromium.command("/se/log", type="browser")
    return chromium


CLASSIFY_AND_READ_LABELS = """
const ready = setInterval(() => {
  if (!document.getElementById("body").value) return;
  clearInterval(ready);
  document.querySelector("#route").value = "/predict";
  document.querySelector("#route").dispatchEvent(new Event("change"));
  document.querySelector("button").click();
  const timer = setInterval(() => {
    if (document.getElementById("answer-section").hidden) return;
    clearInterval(timer);
    done([...document.querySelectorAll("#shown bdi")].map((label) => label.textContent));
  }, 20);
}, 20);
"""


def test_labels_are_text(tmp_path: Path, browser: Browser) -> None:
    model = make_model_dir(tmp_path / "model", "single")
    config = json.loads((model / "config.json").read_text())
    config |= {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
    (model / "config.json").write_text(json.dumps(config))
    with background({"single": str(model)}) as running:
        browser.command("/url", url=running.url + "/")
        assert sorted(browser.run(CLASSIFY_AND_READ_LABELS)) == sorted(LABELS)
        assert browser.run("done(document.querySelectorAll('main img, main script, main b').length)") == 0
        origins_script = "done(performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin))"
        assert set(browser.run(origins_script)) == {running.url}
        assert "200" in browser.run("done(document.getElementById('status').textContent)")
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.save_screenshot(Path(folder, f"page-{'dark' if 'HEEDFUL_DARK' in os.environ else 'light'}.png"))
    messages = [entry for entry in browser.command("/se/log", type="browser") if "favicon" not in entry["message"]]
    assert not messages, messages  # no errors, and nothing that the content security policy blocks


FOLLOW_LINK = """
const [key, link, status, text] = [%s, %s, %s, %s];
document.getElementById("key").value = key;
document.querySelector(`nav a[href="${link}"]`).click();
const timer = setInterval(() => {
  const [code, answer] = ["status", "answer"].map((id) => document.getElementById(id).textContent);
  if (code !== status || !answer.includes(text)) return;
  clearInterval(timer);
  // rows hidden, full response open, path
  done([document.getElementById("answer-section").hidden, document.getElementById("whole").open, location.pathname]);
}, 20);
"""


def test_links_of_the_page_are_followed_with_the_key(tmp_path: Path, browser: Browser) -> None:
    """The page sends the key with the links in its navigation bar; a browser by itself would not."""
    key = b"a key of sixteen or more".replace(b" ", b"-")
    with background({"single": str(make_model_dir(tmp_path / "model", "single"))}, keys=(key,)) as running:
        browser.command("/url", url=running.url + "/")
        for typed_key, link, status, text in (
            ("", "/metrics", "401 · give a key above", "give a key: Authorization: Bearer KEY"),
            (key.decode(), "/metrics", "200", "heedful_requests_total"),
            (key.decode(), "/openapi.json", "200", '"openapi": "3.'),
        ):
            page_state = browser.run(FOLLOW_LINK % tuple(map(json.dumps, (typed_key, link, status, text))))
            assert page_state == [False, True, "/"], link
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.save_screenshot(Path(folder, "page-openapi.png"))


# -- rows -----------------------------------------------------------------------------------------------------------

READ_ROWS = """
done([...document.querySelectorAll("#shown tr")].map((row) => [...row.cells].map(
  (cell) => cell.firstElementChild?.localName === "progress" ? "bar" : cell.textContent)));
"""
Rows = list[list[str]]


def probability_row(name: str, probability: float) -> list[str]:
    return [name, "bar", f"{100 * probability:.1f} %"]


def label_rows(answer: Any) -> Rows:
    return [probability_row(label["label"], label["score"]) for label in answer]


def entity_rows(answer: Any) -> Rows:
    entities = [(entity["text"], entity["label"], entity["probability"]) for entity in answer["entities"]]
    return [[text, label, "bar", f"{100 * probability:.1f} %"] for text, label, probability in entities]


def mask_rows(mask: Any) -> Rows:
    return [probability_row(token["text"] or token["token"], token["probability"]) for token in mask["candidates"]]


def mask_rows_of_two_texts(answers: Any) -> Rows:
    (first_mask, second_mask), (only_mask,) = (answer["masks"] for answer in answers)
    first_text = [["text 1, mask 1"], *mask_rows(first_mask), ["text 1, mask 2"], *mask_rows(second_mask)]
    return [*first_text, ["text 2"], *mask_rows(only_mask)]


ROWS_OF_ROUTES: list[tuple[str, str, dict[str, Any], Callable[[Any], Rows]]] = [
    ("single", "/predict", {"inputs": "a cat"}, label_rows),
    (
        "single",
        "/predict",
        {"inputs": [["a cat"], ["a dog"]]},
        lambda reply: [["text 1"], *label_rows(reply[0]), ["text 2"], *label_rows(reply[1])],
    ),
    ("multiple", "/predict", {"inputs": "a cat"}, label_rows),
    ("regression", "/predict", {"inputs": "a cat"}, lambda reply: [["stars", f"{reply[0]['score']:.4f}"]]),
    (
        "regression",
        "/rerank",
        {"query": "a cat", "texts": ["a dog", "a mat"]},
        lambda reply: [[f"text {entry['index'] + 1}", f"{entry['score']:.4f}"] for entry in reply],
    ),
    ("tag", "/token-classification", {"inputs": "ada lives in paris and she wrote it"}, entity_rows),
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
        lambda reply: [probability_row(reply["choice"], reply["probability"])],
    ),
    (
        "next",
        "/next-sentence",
        {"inputs": [["a cat", "it sat"]]},
        lambda reply: [probability_row("the second text follows the first", reply[0]["is_next_probability"])],
    ),
    ("masked", "/fill-mask", {"inputs": "the [MASK]", "top_k": 3}, lambda reply: mask_rows(reply["masks"][0])),
    ("masked", "/fill-mask", {"inputs": ["the [MASK] on [MASK]", "[MASK]"], "top_k": 2}, mask_rows_of_two_texts),
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
        label_rows,
    ),
    ("write", "/generate", {"inputs": "a b", "max_new_tokens": 4}, lambda reply: [[reply["text"], "", ""]]),
    ("embed", "/embed", {"inputs": "a cat"}, lambda reply: []),
]


def test_answers_are_shown_as_rows(served: RunningServer, browser: Browser) -> None:
    """Each answer is shown as rows; probabilities have a bar, and other numbers have none."""
    browser.command("/url", url=served.url + "/")
    browser.until(lambda: browser.text("model") != "")
    for model, route, body, rows in ROWS_OF_ROUTES:
        browser.run("document.getElementById('body').value = ''; done()")
        browser.change("model", model)
        browser.until(lambda: browser.text("body") != "")
        browser.change("route", route)
        browser.send_body(body)
        reply = ask(served.port, route, {**body, "model": model})
        assert browser.run(READ_ROWS) == rows(reply.json), (model, route)
        assert browser.run("done(document.getElementById('whole').open)") == (route == "/embed")
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.save_screenshot(Path(folder, f"page-{model}{route.replace('/', '-')}.png"))


FILL_FIELDS = """
const areas = [...document.querySelectorAll("#inputs textarea")];
for (const [index, value] of %s.entries()) {
  areas[index].value = value;
  areas[index].dispatchEvent(new Event("input"));
}
done([areas.length, document.getElementById("body").value, document.getElementById("curl").textContent]);
"""


def test_fields_make_the_request(served: RunningServer, browser: Browser) -> None:
    """The fields of the form fill the JSON body and the curl command; a note says that two texts form a pair."""
    browser.command("/url", url=served.url + "/")
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
        count, body, curl = browser.run(FILL_FIELDS % json.dumps(values))
        assert json.loads(body) == expected and count >= len(values)
        # the words of the command are: curl URL -H HEADER -d BODY, so that $6 is the body
        shell = subprocess.run(
            ["sh", "-c", f'set -- {curl}; printf %s "$6"'], capture_output=True, text=True, check=True
        )
        assert json.loads(shell.stdout) == expected and curl.startswith(f"curl '{served.url}{route}' -H")
        assert (browser.text("pairs") == "The two texts are read as one pair.") == (
            len(values) > 1 and model == "single"
        )
        browser.run("document.querySelector('button').click(); done()")
        browser.until(lambda: "200" in browser.text("status"))


# -- a server with scripted responses --------------------------------------------------------------------------------


@contextmanager
def scripted_server(answer: Callable[[str], tuple[int, Any]]) -> Iterator[str]:
    """Serve the page, and respond to its requests with what `answer` returns; yield the URL."""

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


OPERATION = {"summary": "asks", "requestBody": {"content": {"application/json": {"example": {"inputs": []}}}}}
OPENAPI = {"paths": {path: {"post": OPERATION} for path in ("/question-answering", "/token-classification")}}
NAMES = ["first", "slow", "quick"]
NO_ANSWER = {
    "answer": "",
    "start": 0,
    "end": 0,
    "score": 5.5,
    "no_answer_score": 7.25,
    "windows": 1,
    "best_answer": "ada",
}


def info(path: str) -> tuple[int, Any]:
    """Return the status and body of /info for the model that the query of `path` names."""
    name = parse_qs(urlsplit(path).query).get("model", NAMES)[0]
    model_info = {
        "model_id": name,
        "model_dtype": "float32",
        "model_type": {"question_answering": {}},
        "family": f"the family of {name}",
    }
    return 200, model_info | {
        "parameters": 1,
        "routes": ["/question-answering", "/token-classification"],
        "models": [*NAMES, "gone"],
    }


def test_info_is_requested_again_while_the_server_loads(browser: Browser) -> None:
    ready = Event()

    def answer(path: str) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, OPENAPI
        return info(path) if ready.is_set() else (503, {"error": "the model is loading", "error_type": "unhealthy"})

    with scripted_server(answer) as url:
        browser.command("/url", url=url)
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
def test_other_errors_are_shown_without_another_request(
    browser: Browser, status: int, error: str, message: str
) -> None:
    with scripted_server(lambda path: (status, {"error": error})) as url:
        browser.command("/url", url=url)
        browser.until(lambda: browser.text("facts") != "…")
        assert browser.text("facts") == message


def test_the_model_that_was_chosen_last_is_shown(browser: Browser) -> None:
    """A response for a model chosen earlier is ignored, and a model that the server does not have stays unselected."""
    slow_may_answer = Event()

    def answer(path: str) -> tuple[int, Any]:
        if path == "/openapi.json":
            return 200, OPENAPI
        if "slow" in path:
            slow_may_answer.wait(20)
        return (404, {"error": "there is no model of this name"}) if "gone" in path else info(path)

    with scripted_server(answer) as url:
        browser.command("/url", url=url)
        browser.until(lambda: browser.text("model") == "first")
        browser.change("model", "slow")
        browser.change("model", "quick")
        browser.until(lambda: "of quick" in browser.text("facts"))
        slow_may_answer.set()
        slow_answered = f"done(performance.getEntriesByName('{url}/info?model=slow').length > 0)"
        browser.until(lambda: bool(browser.run(slow_answered)))
        assert browser.text("model") == "quick" and "of quick" in browser.text("facts")
        browser.change("model", "gone")
        browser.until(lambda: browser.text("status") != "")
        assert browser.text("status") == "404 · there is no model of this name"
        assert browser.text("model") == "quick" and "of quick" in browser.text("facts")


def test_rows_without_an_answer_rows_of_words_and_a_long_response(browser: Browser) -> None:
    word = {"start": 0, "end": 3}
    words = [word | {"text": "ada", "label": "O", "probability": 0.5}, word | {"text": "x", "label": None}]
    words[1]["probability"] = None
    answers = {
        "/openapi.json": OPENAPI,
        "/question-answering": NO_ANSWER,
        "/token-classification": {"words": words, "entities": [], "windows": 1},
        "/metrics": "x" * 101_234,
    }
    with scripted_server(lambda path: (200, answers[path]) if path in answers else info(path)) as url:
        browser.command("/url", url=url)
        browser.until(lambda: browser.text("model") == "first")
        browser.send_body({})
        assert browser.run(READ_ROWS) == [["(none)", "7.2500"]]
        browser.change("route", "/token-classification")
        browser.send_body({})
        assert browser.run(READ_ROWS) == [["ada", "O", "bar", "50.0 %"], ["x", "", "", ""]]
        browser.run("document.querySelector('nav a[href=\"/metrics\"]').click(); done()")
        browser.until(lambda: browser.text("answer").startswith("x"))
        assert browser.text("answer") == "x" * 100_000 + "\n… and 1,234 more characters"

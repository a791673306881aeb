"""The page in a real browser: what a model calls its labels is text there, whatever it says (S21)."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import make

from heedful.serve.run import background

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
        found = None
        while found is None:
            found = re.search(r"on port (\d+)\.", self.process.stdout.readline())
        self.base = f"http://127.0.0.1:{found[1]}/session"
        arguments = [f"--{each}" for each in ARGUMENTS.split()] + [f"--user-data-dir={folder}"]
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
        """What a script gives that is called back."""
        return self.ask("/execute/async", script=f"const done = arguments[0]; {script}", args=[])

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("/screenshot", "GET")))

    def close(self) -> None:
        self.ask("", "DELETE")
        self.process.terminate()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path / "browser", dark="HEEDFUL_DARK" in os.environ)
    yield made
    made.close()


ASKED = """
const ready = setInterval(() => {
  if (!document.getElementById("body").value) return;
  clearInterval(ready);
  document.querySelector("#route").value = "/predict";
  document.querySelector("#route").dispatchEvent(new Event("change"));
  document.querySelector("button").click();
  const told = setInterval(() => {
    if (document.getElementById("found").hidden) return;
    clearInterval(told);
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
    spoken = [each for each in browser.ask("/se/log", type="browser") if "favicon" not in each["message"]]
    assert not spoken, spoken  # no breach of the content security policy, no error


FOLLOWED = """
const [given, link, status, text] = [%s, %s, %s, %s];
document.getElementById("key").value = given;
document.querySelector(`nav a[href="${link}"]`).click();
const told = setInterval(() => {
  const [code, found] = ["status", "answer"].map((each) => document.getElementById(each).textContent);
  if (code !== status || !found.includes(text)) return;
  clearInterval(told);
  done([document.getElementById("found").hidden, document.getElementById("whole").open, location.pathname]);
}, 20);
"""


def test_its_links_are_followed_with_the_key(tmp_path: Path, browser: Browser) -> None:
    """Both are behind the key, which the browser alone would not send."""
    key = b"a key of sixteen or more".replace(b" ", b"-")
    with background({"single": str(make(tmp_path / "model", "single"))}, keys=(key,)) as running:
        browser.ask("/url", url=running.url + "/")
        for given, link, status, text in (
            ("", "/metrics", "401 · give a key above", "give a key: Authorization: Bearer KEY"),
            (key.decode(), "/metrics", "200", "heedful_requests_total"),
            (key.decode(), "/openapi.json", "200", '"openapi": "3.'),
        ):
            found = browser.run(FOLLOWED % tuple(map(json.dumps, (given, link, status, text))))
            assert found == [False, True, "/"], link
        if folder := os.environ.get("HEEDFUL_PICTURES"):
            browser.picture(Path(folder, "page-openapi.png"))

"""Pages with the encoder that ships in them: their size, the time until they are ready, and the time for a sentence."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import RESULTS, ROOT, Spread, check_destination, grid, write

sys.path.insert(0, str(ROOT))

import heedful
from heedful.checkpoint import ModelBundle
from heedful.look.inspection import Inspection
from heedful.look.page_api import PageAPI
from heedful.look.page_with_model import render_html_with_model
from heedful.page.html import render_page
from tests.support.browser import Browser, browser

ABOUT = """heedful-mini-en ({parameters:,} parameters) with its masked language model in one HTML file, opened from the
disk in headless Chromium {version} with the network cut. `form` is the page of `heedful export --html`, `explorer` that
of `heedful look --html --with-model`. In each of {rounds} rounds each page is loaded anew: `ready` is the time from the
start of navigation until it takes a text, and `sentence` that from the click until the answer or the view of a text of
{tokens} tokens is in the document, the median of {calls} clicks after {warm} that are not counted. Tables show medians
over the rounds, and extremes."""
FIRST = "He opened the [MASK] and went inside."
SENTENCE = "The old man put the [MASK] on the table, closed the door and went to town."
TOKENS = 20  # of the sentence, with special tokens
CALLS, WARM = 20, 3
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
READY = {  # scripts that return whether a page takes a text
    "form": "document.getElementById('status')?.textContent === 'ready'",
    "explorer": "document.querySelector('[data-model=ready] .body[aria-busy=false]') !== null",
}
WATCH = """
new MutationObserver(() => {{
  if (window.readyAfter === undefined && ({ready})) window.readyAfter = performance.now();
}}).observe(document, {{ subtree: true, childList: true, attributes: true, characterData: true }});
"""
ASK = {  # scripts that answer a text, and call `done` with the milliseconds
    "form": """
const [text, done] = arguments;
document.querySelector("textarea").value = text;
const start = performance.now();
document.querySelector("button").click();
done(performance.now() - start);
""",
    "explorer": """
const [text, done] = arguments;
const start = performance.now();
new MutationObserver((_, observer) => {
  const field = document.querySelector(".reading textarea");
  if (field.dataset.old || document.querySelector(".body[aria-busy=true]")) return;
  observer.disconnect();
  done(performance.now() - start);
}).observe(document, { subtree: true, childList: true, attributes: true });
const field = document.querySelector(".reading textarea");
field.dataset.old = "true";
field.value = text;
document.querySelector(".reading button").click();
""",
}


def pages(bundle: ModelBundle) -> dict[str, str]:
    """Return the HTML of each page."""
    api = PageAPI([Inspection(bundle, FIRST, name="heedful-mini-en")])
    return {"form": render_page(bundle), "explorer": render_html_with_model(api, precision="int8")}


@contextmanager
def opened(kind: str) -> Iterator[Browser]:
    """A fresh browser without a network, in which pages record when they are ready."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder), flags=(OFFLINE,)) as chromium:
        source = WATCH.format(ready=READY[kind])
        chromium.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        yield chromium


def measure(kind: str, file: Path, calls: int) -> dict[str, Any]:
    """Return milliseconds until a page is ready and of each sentence, and the browser's version."""
    with opened(kind) as chromium:
        chromium.driver.get(file.as_uri())
        ready = chromium.until(lambda: chromium.js("return window.readyAfter ?? null"))
        texts = [f"{SENTENCE[:-1]}{end}" for _ in range(calls + WARM) for end in ".!"]  # the text changes each time
        times = [chromium.driver.execute_async_script(ASK[kind], text) for text in texts[: calls + WARM]]
        assert not chromium.complaints()
        version = chromium.driver.capabilities["browserVersion"]
    return {"ready": float(ready), "sentence": Spread.of(times[WARM:]).median, "version": version}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    check_destination(options.output)
    rounds, calls = (1, 3) if options.quick else (options.rounds, CALLS)
    bundle = heedful.load("heedful-mini-en", head="masked_lm")
    assert bundle.tokenizer is not None and len(bundle.tokenizer.encode(SENTENCE)) == TOKENS
    parameters = bundle.count()
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for kind, content in pages(bundle).items():
            files[kind] = Path(folder) / f"{kind}.html"
            files[kind].write_text(content, encoding="utf-8")
        sizes = {kind: file.stat().st_size for kind, file in files.items()}
        measured = [{kind: measure(kind, file, calls) for kind, file in files.items()} for _ in range(rounds)]
    spreads = {
        kind: {name: Spread.of([values[kind][name] for values in measured]) for name in ("ready", "sentence")}
        for kind in files
    }
    columns = ["page", "MB", "bytes a parameter", "ready, ms", "sentence, ms"]
    rows = [
        [
            kind,
            f"{sizes[kind] / 1e6:.2f}",
            f"{sizes[kind] / parameters:.2f}",
            spreads[kind]["ready"].text(0),
            spreads[kind]["sentence"].text(1),
        ]
        for kind in files
    ]
    print(grid(columns, rows))
    if not options.quick:
        about = ABOUT.format(
            parameters=parameters,
            version=measured[0]["form"]["version"],
            rounds=rounds,
            tokens=TOKENS,
            calls=calls,
            warm=WARM,
        )
        data = {
            kind: {"bytes": sizes[kind], "parameters": parameters}
            | {name: asdict(spread) for name, spread in spreads[kind].items()}
            for kind in files
        }
        print(write("page", about, [grid(columns, rows)], data, options.output))


if __name__ == "__main__":
    main()

"""Measure pages that contain the bundled encoder: their size, the time until they are ready, and a sentence's time.

With --transformers-js FOLDER, transformers.js runs the same model as a peer. FOLDER is the one in which
`npm install --ignore-scripts @huggingface/transformers` was run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from report import RESULTS, ROOT, Spread, check_destination, grid, write

sys.path.insert(0, str(ROOT))

import heedful
from heedful.checkpoint import ModelBundle
from heedful.infer.export import export
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
ABOUT_PEER = """

transformers.js {version} runs the same model, exported to ONNX by `heedful export`, in float32 or with the weights of
matrices in int8 (`quantize_dynamic` of onnxruntime), by WebAssembly on one thread. Its files come from a server on the
same machine, so that its time until it is ready includes no network; its size counts every file that the page fetched.
A sentence is from the call of the pipeline until its candidates are in the document."""
FIRST = "He opened the [MASK] and went inside."
SENTENCE = "The old man put the [MASK] on the table, closed the door and went to town."
TOKENS = 20  # tokens of SENTENCE, with special tokens
CALLS, WARM = 20, 3  # clicks that are timed, and clicks before them
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
PEERS = {"transformers.js int8": "q8", "transformers.js float32": "fp32"}  # and their dtypes in transformers.js
PEER_PAGE = """<!doctype html><html lang="en"><title>transformers.js</title><p id="answer"></p>
<script type="module">
import {{ env, pipeline }} from "./transformers.js";
Object.assign(env, {{ allowLocalModels: true, allowRemoteModels: false, localModelPath: "/", useBrowserCache: false }});
Object.assign(env.backends.onnx.wasm, {{ wasmPaths: "/", numThreads: 1 }});
const fill = await pipeline("fill-mask", "model", {{ device: "wasm", dtype: "{dtype}" }});
window.ask = async (text) => {{
  document.getElementById("answer").textContent = (await fill(text)).map((answer) => answer.token_str).join(" ");
}};
document.body.dataset.state = "ready";
</script></html>"""
READY = {  # scripts that return whether a page takes a text
    "form": "document.getElementById('status')?.textContent === 'ready'",
    "explorer": "document.querySelector('[data-model=ready] .body[aria-busy=false]') !== null",
    **dict.fromkeys(PEERS, "document.body?.dataset.state === 'ready'"),
}
FIRST_CANDIDATE = {  # scripts that return the most likely token of the last answer
    "form": "return JSON.parse(document.getElementById('answer').textContent).masks[0].candidates[0].text",
    **dict.fromkeys(PEERS, "return document.getElementById('answer').textContent.split(' ')[0]"),
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
    **dict.fromkeys(
        PEERS,
        """
const [text, done] = arguments;
const start = performance.now();
window.ask(text).then(() => done(performance.now() - start));
""",
    ),
}


def pages(bundle: ModelBundle) -> dict[str, str]:
    """Return the HTML of each page."""
    api = PageAPI([Inspection(bundle, FIRST, name="heedful-mini-en")])
    return {"form": render_page(bundle), "explorer": render_html_with_model(api, precision="int8")}


def peer_files(bundle: ModelBundle, node: Path, folder: Path) -> None:
    """Write the library, its WebAssembly, and the model in both precisions, as transformers.js looks for them."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    packages = node / "node_modules"
    shutil.copy(packages / "@huggingface/transformers/dist/transformers.min.js", folder / "transformers.js")
    for file in packages.glob("onnxruntime-web/dist/ort-*"):
        shutil.copy(file, folder)
    export(bundle, folder / "model")
    (folder / "model/onnx").mkdir()
    model = (folder / "model/model.onnx").rename(folder / "model/onnx/model.onnx")
    quantize_dynamic(model, folder / "model/onnx/model_quantized.onnx", weight_type=QuantType.QInt8)


class CountingHandler(SimpleHTTPRequestHandler):
    """A handler that serves a folder and records the sizes of the files that are fetched."""

    def __init__(self, *arguments: Any, fetched: dict[str, int], **options: Any) -> None:
        self.fetched = fetched
        super().__init__(*arguments, **options)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Record the file's size and send it."""
        self.fetched[self.path] = Path(self.translate_path(self.path)).stat().st_size
        super().copyfile(source, outputfile)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Serve a folder; yield the address, and a dict in which each fetched file gets its size."""
    fetched: dict[str, int] = {}
    handler = partial(CountingHandler, directory=str(folder), fetched=fetched)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
        server.shutdown()


@contextmanager
def opened(kind: str) -> Iterator[Browser]:
    """Yield a new browser without a network, in which pages record when they are ready."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder), flags=(OFFLINE,)) as chromium:
        source = WATCH.format(ready=READY[kind])
        chromium.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        yield chromium


def measure(kind: str, address: str, calls: int) -> dict[str, Any]:
    """Open a page and ask it sentences.

    Args:
        kind: The name of the page.
        address: Its URL.
        calls: The number of timed sentences.

    Returns:
        ready: Milliseconds from the start of navigation until the page takes a text.
        sentence: Median milliseconds until a sentence is answered.
        version: The browser's version.
        token: The most likely token of the last answer, or None for the explorer.
    """
    with opened(kind) as chromium:
        chromium.driver.get(address)
        ready = chromium.until(lambda: chromium.js("return window.readyAfter ?? null"))
        # the text changes each time, so that the page computes it again
        texts = [SENTENCE[:-1] + (".!"[call % 2]) for call in range(calls + WARM)]
        times = [chromium.driver.execute_async_script(ASK[kind], text) for text in texts]
        assert kind in PEERS or not chromium.complaints()
        version = chromium.driver.capabilities["browserVersion"]
        token = chromium.js(FIRST_CANDIDATE[kind]) if kind in FIRST_CANDIDATE else None
    return {"ready": float(ready), "sentence": Spread.of(times[WARM:]).median, "version": version, "token": token}


def write_pages(bundle: ModelBundle, folder: Path) -> dict[str, Path]:
    """Write the pages of Heedful into a folder, and return their files."""
    files = {}
    for kind, content in pages(bundle).items():
        files[kind] = folder / f"{kind}.html"
        files[kind].write_text(content, encoding="utf-8")
    return files


def measure_all(
    bundle: ModelBundle, node: Path | None, rounds: int, calls: int
) -> tuple[list[dict[str, dict[str, Any]]], dict[str, int]]:
    """Measure all pages in turn.

    Args:
        bundle: The model.
        node: The folder with node_modules of transformers.js, or None to measure no peer.
        rounds: The number of rounds.
        calls: The number of timed sentences in each round.

    Returns:
        For each round the measurements of each page, and the bytes of each page.
    """
    with tempfile.TemporaryDirectory() as name, served(folder := Path(name)) as (server, fetched):
        files = write_pages(bundle, folder)
        addresses = {kind: file.as_uri() for kind, file in files.items()}
        sizes = {kind: file.stat().st_size for kind, file in files.items()}
        if node:
            peer_files(bundle, node, folder)
            for kind, dtype in PEERS.items():
                (folder / f"{dtype}.html").write_text(PEER_PAGE.format(dtype=dtype), encoding="utf-8")
                addresses[kind] = f"{server}/{dtype}.html"
        measured: list[dict[str, dict[str, Any]]] = []
        for _ in range(rounds):
            measured.append({})
            for kind, address in addresses.items():
                fetched.clear()
                measured[-1][kind] = measure(kind, address, calls)
                if kind in PEERS:
                    sizes[kind] = sum(fetched.values())
                    assert measured[-1][kind]["token"] == measured[-1]["form"]["token"], measured[-1]
    return measured, sizes


def main() -> None:
    """Measure all pages, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="rehearse, without a record")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    parser.add_argument("--transformers-js", type=Path, help="the folder with node_modules of transformers.js")
    options = parser.parse_args()
    check_destination(options.output)
    rounds, calls = (1, 3) if options.quick else (options.rounds, CALLS)
    bundle = heedful.load("heedful-mini-en", head="masked_lm")
    assert bundle.tokenizer is not None and len(bundle.tokenizer.encode(SENTENCE)) == TOKENS
    parameters = bundle.count()
    measured, sizes = measure_all(bundle, options.transformers_js, rounds, calls)
    spreads = {
        kind: {name: Spread.of([values[kind][name] for values in measured]) for name in ("ready", "sentence")}
        for kind in sizes
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
        for kind in sizes
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
            for kind in sizes
        }
        if options.transformers_js:
            package = options.transformers_js / "node_modules/@huggingface/transformers/package.json"
            about += ABOUT_PEER.format(version=json.loads(package.read_text())["version"])
        print(write("page", about, [grid(columns, rows)], data, options.output))


if __name__ == "__main__":
    main()

"""Calls of the scripts of a page with a model in it, which node runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from heedful.checkpoint import ModelBundle
from heedful.page.assets import WEB, bundle_modules
from heedful.page.html import CODE, MODULES, page_facts
from heedful.page.serialize import serialize_model
from heedful.page.tokenizer_state import tokenizer_state
from heedful.tokenizer import Tokenizer

READ = """
import { readFileSync } from "node:fs";
const { about, calls } = JSON.parse(readFileSync("input.json"));
const page = { about };
if (about.tokenizer) page.tokenizer = makeTokenizer(about.tokenizer);
if (about.num_ops) {
  Object.assign(page, await openModel(readFileSync(process.argv[2]), readFileSync("model.bin"), about));
}
"""
WRITE = """
console.log(JSON.stringify(results, (_, value) => (value instanceof Float32Array ? [...value] : value)));
"""


def run_scripts(folder: Path, about: dict[str, Any], calls: list[Any], function: str) -> list[Any]:
    """Run a JavaScript function of (page, call) in node for each call, and return the results."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed: apt-get install nodejs")
    # without rows.js and try.js, which need a browser
    modules = bundle_modules((WEB / name).read_text() for name in MODULES[:-2])
    (folder / "run.mjs").write_text(
        f"{modules}{READ}const results = calls.map((call) => ({function})(page, call));{WRITE}"
    )
    (folder / "input.json").write_text(json.dumps({"about": about, "calls": calls}))
    command = ["node", "run.mjs", str(CODE)]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return list(json.loads(process.stdout))


def page_answers(folder: Path, bundle: ModelBundle, inputs: list[Any], precision: str = "float32") -> list[Any]:
    """Return the answers of a page to inputs; an input is a dict of the fields of the page's form."""
    model = serialize_model(bundle, precision)
    (folder / "model.bin").write_bytes(model.data)
    return run_scripts(
        folder, page_facts(bundle, model), inputs, "(page, input) => ANSWERS[page.about.head](page, input)"
    )


def page_rows(
    folder: Path,
    bundle: ModelBundle,
    ids: list[int],
    types: list[int],
    *,
    wanted: list[int],
    op_counts: list[int] | None = None,
    precision: str = "float32",
) -> list[Any]:
    """Return the rows that a page computes.

    Args:
        folder: Folder for files.
        bundle: The model.
        ids: Token ids.
        types: Token types.
        wanted: Numbers of the rows to return.
        op_counts: Numbers of operations after which the rows are returned. If None, they are returned after all.
        precision: Precision of the weights in the page.
    """
    model = serialize_model(bundle, precision)
    (folder / "model.bin").write_bytes(model.data)
    calls = [{"ids": ids, "types": types, "wanted": wanted, "most": most} for most in op_counts or [model.num_ops]]
    about = {"ops_offset": model.ops_offset, "num_ops": model.num_ops}
    return run_scripts(
        folder, about, calls, "(page, { most, wanted, ...encoding }) => page.score(encoding, wanted, most)"
    )


def page_encodings(folder: Path, tokenizer: Tokenizer, texts: list[Any]) -> list[Any]:
    """Return ids, types, segments, offsets and words of each text or pair."""
    encode = """(page, texts) => {
        const { ids, types, segments, offsets, words } = page.tokenizer.encode(...texts);
        return { ids, types, segments, offsets, words };
    }"""
    calls = [[text] if isinstance(text, str) else list(text) for text in texts]
    return run_scripts(folder, {"tokenizer": tokenizer_state(tokenizer)}, calls, encode)

"""The model card of a pre-trained model: its text, training and quality, and what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.atomic_io import atomic_path, write_synced
from heedful.checkpoint import RUN_MODEL
from heedful.checkpoint.sentence_transformers import MODULES
from heedful.runs.card.markdown import escape_markdown, hide_local_paths, markdown_table
from heedful.runs.card.verdict import verdict_section
from heedful.runs.overrides import flatten_settings
from heedful.runs.results import JsonObject, read_results

MAX_LINES = 20  # files, or sentences about how they were read
UNKNOWN = 0.001  # share of unknown tokens from which the card mentions them
CORPUS_KEYS = (
    "files",
    "counts",
    "repeated",
    "stated",
    "left_out",
    "cut",
    "bad_rows",
)  # of a manifest, in results
DROPPED = {  # reasons for which documents are left out
    "exact": "repeated",
    "near": "nearly repeated",
    "short": "too short",
    "empty": "without text",
}
CODE = """import heedful

loaded = heedful.load("path/to/model")
batch = loaded.tokenizer.pack(["a text"])
rows = loaded.model(batch)  # [rows, width]"""
SENTENCE_CODE = """import heedful

vectors = heedful.Engine("path/to/model").encode(["a text", "another"])  # [texts, width]
fill_mask = heedful.Engine("path/to/model", head="masked_lm")  # answers texts with the mask token"""


def corpus_notes(corpus: Mapping[str, Any]) -> list[str]:
    """Sentences about how a corpus was split into documents, and what was left out, cut or lost.

    `corpus` is its manifest, or the entry of results.json.
    """
    stated = list(corpus.get("stated", ()))
    notes = stated[:MAX_LINES]
    if stated[MAX_LINES:]:
        notes.append(f"and {len(stated) - MAX_LINES:,} more such sentences, which the corpus's manifest.json has")
    dropped = corpus.get("left_out", {})
    if several := [f"{dropped[name]:,} {what}" for name, what in DROPPED.items() if dropped.get(name)]:
        notes.append(f"documents that are left out: {', '.join(several)}")
    if corpus.get("cut"):
        notes.append(f"documents that were split because of their size: {corpus['cut']:,}")
    counts = corpus.get("counts", {})
    if (share := counts.get("unknown", 0) / max(counts.get("tokens", 0), 1)) >= UNKNOWN:
        notes.append(f"{100 * share:.1f} % of the tokens are unknown to the tokenizer, and lost")
    rows = corpus.get("bad_rows", {})
    return [*notes, *(f"bad rows of {Path(name).name} that are left out: {count:,}" for name, count in rows.items())]


def write_pretrained_card(folder: Path) -> Path:
    """Write folder/model/README.md from the results of the run."""
    text = "\n\n".join("\n".join(part) for part in _parts(folder, read_results(folder))) + "\n"
    path = folder / "model" / "README.md"
    with atomic_path(path) as part:
        write_synced(part, [text.encode("utf-8", "replace")])
    return path


def _parts(folder: Path, results: JsonObject) -> list[list[str]]:
    settings, counts, model = results["settings"], results["corpus"]["counts"], results["model"]
    base = f", further training of {escape_markdown(Path(results['base']).name)}" if results["base"] else ""
    numbers = results["splits"]["validation"]["numbers"]
    started = results.get("baseline", {"splits": {}})["splits"].get("validation", {}).get("numbers")
    heads, columns = ["", "validation"], [numbers]
    if started is not None:
        heads, columns = ["", "validation", "before training"], [numbers, started]
    rows = [
        [escape_markdown(name), *(f"{column[name]:.4f}" if name in column else "" for column in columns)]
        for name in numbers
        if name != "count"
    ]
    rows.append(["targets", *(f"{column['count']:,.0f}" for column in columns)])
    files = [
        [escape_markdown(file["name"]), f"{file['bytes']:,}", file["sha256"][:16]]
        for file in results["corpus"]["files"]
    ]
    times = [
        [length, f"{milliseconds['p50']:g}", f"{milliseconds['p99']:g}"]
        for length, milliseconds in results["latency"].items()
    ]
    code = SENTENCE_CODE if (folder / RUN_MODEL / MODULES).exists() else CODE
    hours, notes = results["seconds"] / 3600, corpus_notes(results["corpus"])
    shown_settings = [f"{name} = {value}" for name, value in flatten_settings(hide_local_paths(settings))]
    return [
        ["---", "library_name: transformers", "tags:", "- heedful", "---"],
        [
            "# A pre-trained model",
            "",
            f"Pre-trained with Heedful{base}: objective `{results['objective']}`, {results['steps']:,} steps over "
            f"{results['epochs']:.2f} epochs in {hours:.2f} h. It has {model['parameters']:,} parameters and takes "
            f"{model['bytes'] / 1e6:,.1f} MB on the disk.",
        ],
        ["## Quality on validation documents"],
        markdown_table(heads, rows),
        *verdict_section(folder),
        ["## Text", "", f"{counts['documents']:,} documents, {counts['tokens']:,} tokens."],
        markdown_table(["file", "bytes", "SHA-256 begins"], files[:MAX_LINES]),
        *([[f"- {escape_markdown(sentence, 400)}" for sentence in notes]] if notes else []),
        [
            "## Limits",
            "",
            "- It has learned from its texts, with their errors and prejudices.",
            "- It was evaluated on held-out documents of the same kind only: fine-tuning shows what it is worth for a "
            "task.",
        ],
        [
            "## Speed",
            "",
            f"Forward passes in float32 on {escape_markdown(results['machine'])}, without tokenizing, milliseconds:",
        ],
        markdown_table(["tokens", "p50", "p99"], times),
        ["## Use", "", "```python", *code.splitlines(), "```"],
        ["## Settings", "", "```", *shown_settings, "```"],
    ]

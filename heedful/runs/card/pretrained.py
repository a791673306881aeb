"""The model card of a pre-trained model: training, quality, text, limits, speed, use and settings."""

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

MAX_FILES = 20  # maximum files in the card
MAX_NOTES = 20  # maximum sentences about how files were read, in the card and in the log
MIN_UNKNOWN_SHARE = 0.001  # minimum share of unknown tokens that the card mentions
# keys of a corpus's manifest that are copied to results.json
CORPUS_KEYS = ("files", "counts", "repeated", "stated", "left_out", "cut", "bad_rows")
DROP_REASONS = {  # reason by key of "left_out" in the manifest of a corpus
    "exact": "repeated",
    "near": "nearly repeated",
    "short": "too short",
    "empty": "without text",
}
CODE = """import heedful

loaded = heedful.load("path/to/model")
batch = loaded.tokenizer.pack(["a text"])
hidden_states = loaded.model(batch)  # [tokens, hidden size]"""  # for a model without sentence vectors
SENTENCE_CODE = """import heedful

vectors = heedful.Engine("path/to/model").encode(["a text", "another"])  # [texts, embedding dimension]
fill_mask = heedful.Engine("path/to/model", head="masked_lm")  # answers texts with the mask token"""


def corpus_notes(corpus: Mapping[str, Any]) -> list[str]:
    """Return sentences about how files were split into documents, and about documents, rows and tokens left out.

    Args:
        corpus: The manifest of the corpus, or the entry "corpus" of results.json.
    """
    reading_notes = list(corpus.get("stated", ()))
    notes = reading_notes[:MAX_NOTES]
    if reading_notes[MAX_NOTES:]:
        num_omitted = len(reading_notes) - MAX_NOTES
        notes.append(f"and {num_omitted:,} more such sentences, which the corpus's manifest.json has")
    left_out = corpus.get("left_out", {})  # counts of documents by a key of DROP_REASONS
    if drop_counts := [f"{left_out[key]:,} {reason}" for key, reason in DROP_REASONS.items() if left_out.get(key)]:
        notes.append(f"documents that are left out: {', '.join(drop_counts)}")
    if corpus.get("cut"):
        notes.append(f"documents that were split because of their size: {corpus['cut']:,}")
    counts = corpus.get("counts", {})
    unknown_share = counts.get("unknown", 0) / max(counts.get("tokens", 0), 1)
    if unknown_share >= MIN_UNKNOWN_SHARE:
        notes.append(f"{100 * unknown_share:.1f} % of the tokens are unknown to the tokenizer, and lost")
    for name, count in corpus.get("bad_rows", {}).items():
        notes.append(f"bad rows of {Path(name).name} that are left out: {count:,}")
    return notes


def write_pretrained_card(folder: Path) -> Path:
    """Write folder/model/README.md from the results of the run, and return its path."""
    text = "\n\n".join("\n".join(lines) for lines in _card_parts(folder, read_results(folder))) + "\n"
    path = folder / "model" / "README.md"
    with atomic_path(path) as temporary:
        write_synced(temporary, [text.encode("utf-8", "replace")])
    return path


def _card_parts(folder: Path, results: JsonObject) -> list[list[str]]:
    """Return the paragraphs and tables of the card, each as a list of lines."""
    settings = [f"{name} = {value}" for name, value in flatten_settings(hide_local_paths(results["settings"]))]
    code = SENTENCE_CODE if (folder / RUN_MODEL / MODULES).exists() else CODE
    return [
        ["---", "library_name: transformers", "tags:", "- heedful", "---"],
        ["# A pre-trained model", "", _training_summary(results)],
        ["## Quality on validation documents"],
        _quality_table(results),
        *verdict_section(folder),
        *_corpus_section(results["corpus"]),
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
        _latency_table(results["latency"]),
        ["## Use", "", "```python", *code.splitlines(), "```"],
        ["## Settings", "", "```", *settings, "```"],
    ]


def _training_summary(results: JsonObject) -> str:
    """Return a paragraph with initial model, objective, steps, time and size."""
    base = f", further training of {escape_markdown(Path(results['base']).name)}" if results["base"] else ""
    hours = results["seconds"] / 3600
    model = results["model"]
    return (
        f"Pre-trained with Heedful{base}: objective `{results['objective']}`, {results['steps']:,} steps over "
        f"{results['epochs']:.2f} epochs in {hours:.2f} h. It has {model['parameters']:,} parameters and takes "
        f"{model['bytes'] / 1e6:,.1f} MB on the disk."
    )


def _quality_table(results: JsonObject) -> list[str]:
    """Return a table with a row per validation metric and a row for the count of targets.

    Scores before training, if there are any, are another column.
    """
    numbers = results["splits"]["validation"]["numbers"]
    baseline_splits = results.get("baseline", {"splits": {}})["splits"]
    numbers_before_training = baseline_splits.get("validation", {}).get("numbers")
    header, columns = ["", "validation"], [numbers]
    if numbers_before_training is not None:
        header, columns = [*header, "before training"], [*columns, numbers_before_training]
    rows = [
        [escape_markdown(name), *(f"{column[name]:.4f}" if name in column else "" for column in columns)]
        for name in numbers
        if name != "count"
    ]
    rows.append(["targets", *(f"{column['count']:,.0f}" for column in columns)])
    return markdown_table(header, rows)


def _corpus_section(corpus: JsonObject) -> list[list[str]]:
    """Return the section with the size of the corpus, its first files with hashes, and `corpus_notes`."""
    counts = corpus["counts"]
    notes = corpus_notes(corpus)
    file_rows = [
        [escape_markdown(file["name"]), f"{file['bytes']:,}", file["sha256"][:16]]
        for file in corpus["files"][:MAX_FILES]
    ]
    if len(corpus["files"]) > MAX_FILES:
        notes = [f"and {len(corpus['files']) - MAX_FILES} more files, in the corpus's manifest.json", *notes]
    return [
        ["## Text", "", f"{counts['documents']:,} documents, {counts['tokens']:,} tokens."],
        markdown_table(["file", "bytes", "SHA-256 begins"], file_rows),
        *([[f"- {escape_markdown(sentence, 400)}" for sentence in notes]] if notes else []),
    ]


def _latency_table(latency: JsonObject) -> list[str]:
    """Return a table of latencies by input length: median and 99th percentile of a forward pass in milliseconds."""
    rows = [[length, f"{time['p50']:g}", f"{time['p99']:g}"] for length, time in latency.items()]
    return markdown_table(["tokens", "p50", "p99"], rows)

"""The model card: what a fine-tuned model is, how good and how fast it was measured to be, and what is not known."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from heedful.atomic_io import put, whole
from heedful.checkpoint.folder_json import read_json
from heedful.errors import HeedfulError
from heedful.runs.card.baseline import baseline_lines, baseline_warning
from heedful.runs.card.markdown import (
    details,
    escape_markdown,
    format_number,
    hide_local_paths,
    markdown_table,
    without_directory,
)
from heedful.runs.card.usage import METRICS, usage
from heedful.runs.card.verdict import verdict_section
from heedful.runs.results import as_float, headline_split, read_predictions, read_results
from heedful.tasks.specs import SPECS

MISTAKES_HEADING = "## The worst mistakes on dev"  # of the section that quotes texts of the data
MISTAKES = 5  # that are shown
LONGEST = 240  # characters of a text that is quoted
MANY = 30  # rows of a table from which it is folded
FEW = 30  # examples below which a score of a class says little
PER_CLASS = {"classes": "class", "labels": "label", "types": "type of entity"}  # where results keep scores of each


def write_finetuned_card(folder: Path) -> Path:
    """Write folder/model/README.md from what the run found; the same run gives the same text."""
    results = read_results(folder)
    if not (folder / "model" / "config.json").is_file():
        raise HeedfulError(f"{folder} has no model/config.json: save the model before its card is written")
    text = "\n\n".join(["\n".join(part) for part in _parts(folder, results) if part]) + "\n"
    path = folder / "model" / "README.md"
    with whole(path) as part:
        put(part, [text.encode("utf-8", "replace")])
    return path


def _parts(folder: Path, results: dict[str, Any]) -> Iterator[list[str]]:
    config = read_json(folder / "model" / "config.json", most=1 << 26)
    kind, reads = config.get("model_type"), config.get("is_encoder_decoder") is True
    ours = isinstance(kind, str) and kind.split("-")[0] == "heedful"
    yield _front(results, ours)
    yield _what(results)
    yield from _quality(results)
    yield from _baseline(results)
    yield from _seeds(results)
    yield from verdict_section(folder)
    yield from _classes(results)
    yield from _mistakes(folder, results)
    yield from _calibration(results)
    yield ["## Limits"]
    yield [f"- {sentence}" for sentence in _limits(results)]
    yield from _data(results)
    yield from _speed(results)
    yield from usage(results["task"], ours=ours, pairs=learned_pairs(folder, results), reads=reads)
    yield from _settings(results)


# -- what it is -----------------------------------------------------------------------------------------------


def _front(results: dict[str, Any], ours: bool) -> list[str]:
    """YAML as the Hugging Face hub reads it; texts as JSON, which is YAML too."""
    task = SPECS[results["task"]].card
    found = headline_split(results)
    numbers = found[1] if found else {}
    metrics = list(dict.fromkeys(name for key, name in METRICS.items() if key in numbers))
    library = "heedful" if ours else task.library
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {task.pipeline}", "tags:", "- heedful"]
    if base := re.fullmatch(r"((?:[\w.-]+/)?[\w.-]+)@[0-9a-f]{7,40}", results.get("base", "")):
        lines.append(f"base_model: {json.dumps(base[1])}")
    if metrics:
        lines += ["metrics:", *(f"- {name}" for name in metrics)]
    return [*lines, "---"]


def _what(results: dict[str, Any]) -> list[str]:
    task, labels, model = SPECS[results["task"]].card, results.get("labels") or [], results.get("model", {})
    named = ""
    if labels:
        shown = ", ".join(escape_markdown(label, 60) for label in labels[:20])
        named = f" Its {len(labels)} labels: {shown}{', …' if len(labels) > 20 else ''}."
    size = ""
    if model:
        size = f" It has {model['parameters']:,} parameters and takes {model['bytes'] / 1e6:,.1f} MB on the disk."
    start = f" Trained with Heedful from {_base(results['base'])}." if results.get("base") else ""
    return [f"# {task.name}", "", f"{task.does}.{named}{start}{size}"]


def _base(base: str) -> str:
    return escape_markdown(without_directory(base), 120)


# -- how good it is -------------------------------------------------------------------------------------------


def _quality(results: dict[str, Any]) -> Iterator[list[str]]:
    yield ["## Quality"]
    splits, metric = results["splits"], results["metric"]
    if not splits:
        yield ["Nothing was measured: the data had neither dev nor test."]
        return
    names = list(dict.fromkeys(key for split in splits.values() for key in split["numbers"]))
    shown = [name for name in names if any(_is_score(split["numbers"].get(name)) for split in splits.values())]
    rows = []
    for name in sorted(shown, key=lambda name: name != metric):
        cells = [_with_interval(split, name) for split in splits.values()]
        rows.append([f"**{escape_markdown(name)}**" if name == metric else escape_markdown(name), *cells])
    rows.append(["examples", *(f"{split['numbers'].get('count', 0):,}" for split in splits.values())])
    yield markdown_table(["", *map(escape_markdown, splits)], rows)
    spreads = [each for split in splits.values() for each in split.get("intervals", {}).values()]
    about = []
    if spreads:
        level, replicates = spreads[0]["level"], spreads[0]["replicates"]
        about.append(f"In parentheses: {100 * level:g} % intervals from {replicates:,} bootstrap replicates.")
    yield [" ".join(about + _chosen(results))]


def _baseline(results: dict[str, Any]) -> Iterator[list[str]]:
    """The baseline of the scores, and a sentence where it is not beaten."""
    lines = [escape_markdown(line, 400) for line in baseline_lines(results)]
    if lines:
        how = results["baseline"]
        yield [f"### Beside {escape_markdown(how['name'])}" if "method" in how else "### Before and after training"]
        method = (
            f"By {escape_markdown(how['method'])} ({escape_markdown(how['library'])}), seed as in training."
            if "method" in how
            else ""
        )
        yield [*(f"- {line}" for line in lines), *(["", method] if method else [])]
        if sentence := baseline_warning(results):
            yield [f"{escape_markdown(sentence, 400)}."]


def _chosen(results: dict[str, Any]) -> list[str]:
    """What dev was used for."""
    seed = next((each for each in results.get("seeds", []) if each["seed"] == results.get("seed")), None)
    if seed is None or "dev" not in results["splits"]:
        return []
    best, fitted = _fit(results).get("load_best_at_end", True), _tuned(results)
    said = f"The weights are those after {seed['steps']:,} steps"
    if best:
        said = f"The weights are those of step {seed['best_step']:,} of {seed['steps']:,}, the best on dev"
    said += ", and thresholds were fitted on dev" if fitted else ""
    if best or fitted:
        test = ", and those of test are not" if "test" in results["splits"] else ""
        said += f"; so the numbers of dev are a little too good{test}"
    return [f"{said}."]


def _fit(results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = results.get("settings", {}).get("fit", {})
    return found


def _tuned(results: dict[str, Any]) -> bool:
    """Whether answers have thresholds that were fitted on dev; those of questions, where some have no answer."""
    task = results.get("settings", {}).get("task", {})
    may_lack_answer = "best_f1_threshold" in results["splits"].get("dev", {}).get("numbers", {})
    return task.get("thresholds") == "tuned" or (task.get("no_answer_threshold") == "tuned" and may_lack_answer)


def _is_score(value: Any) -> bool:
    return isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")


def _with_interval(split: dict[str, Any], name: str) -> str:
    value = split["numbers"].get(name)
    if value is None:
        return ""
    found = split.get("intervals", {}).get(name)
    return format_number(value) + (
        f" ({format_number(found['low'])} to {format_number(found['high'])})" if found else ""
    )


def _seeds(results: dict[str, Any]) -> Iterator[list[str]]:
    seeds, metric = results.get("seeds", []), results["metric"]
    if len(seeds) < 2:
        return
    each = [seed["splits"] for seed in seeds]
    splits = list(each[0])
    if not splits:
        return
    yield ["### Over seeds"]
    rows = [
        [str(seed["seed"]), *(format_number(scores[name]) for name in splits)]
        for seed, scores in zip(seeds, each, strict=True)
    ]
    columns = [[as_float(scores[name]) for scores in each] for name in splits]
    rows.append(
        [
            "mean ± deviation",
            *(f"{format_number(statistics.fmean(c))} ± {format_number(_deviation(c))}" for c in columns),
        ]
    )
    yield markdown_table(["seed", *(f"{escape_markdown(metric)} on {escape_markdown(name)}" for name in splits)], rows)
    chosen = f"the best of {len(seeds)} on dev" if "dev" in splits else f"the first of {len(seeds)}"
    yield [f"The model here is that of seed {results['seed']}, {chosen}; from a run with another seed expect the mean."]


def _deviation(values: list[float]) -> float:
    """Of a sample: sqrt(Σ (x - mean)² / (n - 1))."""
    mean = statistics.fmean(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)


def _classes(results: dict[str, Any]) -> Iterator[list[str]]:
    for split, what, found in _each_class(results):
        yield [f"### Each {what}, on {escape_markdown(split)}"]
        rows = [
            [
                escape_markdown(label, 60),
                *(format_number(row[name]) for name in ("precision", "recall", "f1")),
                f"{_count(row):,}",
            ]
            for label, row in found.items()
        ]
        heads = [what, "precision", "recall", "F1", "examples"]
        yield details(markdown_table(heads, rows), f"{len(rows)} rows", len(rows) > MANY)


def _each_class(results: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    found = headline_split(results)
    for key, what in PER_CLASS.items() if found else ():
        if rows := found and found[1].get(key):
            yield found[0], what, rows


def _count(row: dict[str, Any]) -> int:
    return int(row["count"] if "count" in row else row["gold"])  # of examples, or of entities


def _calibration(results: dict[str, Any]) -> Iterator[list[str]]:
    found = headline_split(results)
    if not found or not found[1].get("calibration"):
        return
    split, numbers = found
    rows = [
        [
            f"{as_float(row['low']):.2f} to {as_float(row['high']):.2f}",
            f"{row['count']:,}",
            format_number(row["confidence"]),
            format_number(row["accuracy"]),
        ]
        for row in numbers["calibration"]
    ]
    yield ["## Calibration"]
    yield [
        f"Expected calibration error on {escape_markdown(split)}: {format_number(numbers['ece'])}, the mean distance "
        "between how sure the model is and how often it is right."
    ]
    yield markdown_table(["confidence", "examples", "mean confidence", "right"], rows)


# -- mistakes -------------------------------------------------------------------------------------------------


def _mistakes(folder: Path, results: dict[str, Any]) -> Iterator[list[str]]:
    lines = read_predictions(folder, "dev") if "dev" in results["splits"] else iter(())
    wrong = (
        line for line in lines if line["correct"] is False or (line["correct"] is None and line["label"] is not None)
    )
    rows = [_mistake(line, results) for line in islice(wrong, MISTAKES)]
    if rows:
        yield [MISTAKES_HEADING]
        yield markdown_table(["text", "label", "prediction"], rows)
        yield ["They are quoted from the data. `heedful push` leaves them out unless --with-examples is given."]


def _mistake(line: dict[str, Any], results: dict[str, Any]) -> list[str]:
    about = SPECS[results["task"]].card
    shown = about.mistake(line, results, format_number)
    sure = line["answer"].get("probability") if isinstance(line.get("answer"), dict) else None
    sides = [escape_markdown(each, 80) for each in shown]
    return [
        escape_markdown(about.input_text(line["input"]), LONGEST),
        sides[0],
        sides[1] + (f" ({format_number(sure)})" if sure else ""),
    ]


def learned_pairs(folder: Path, results: dict[str, Any]) -> bool:
    """Whether the texts of a run's data came in pairs, by the predictions in its folder."""
    first = next(
        (line for name in results["splits"] for line in islice(read_predictions(folder, name), 1)), {"input": ""}
    )
    return isinstance(first["input"], list) and SPECS[results["task"]].card.takes_pairs


# -- limits, data, speed, settings ----------------------------------------------------------------------------


def _limits(results: dict[str, Any]) -> Iterator[str]:
    splits = results["splits"]
    where = " and ".join(map(escape_markdown, splits))
    yield (
        f"Measured on {where} of the data below and on nothing else: other sources, times and languages, and "
        "whether it treats groups of people alike, were not tested."
        if splits
        else "Not measured at all."
    )
    if splits and "test" not in splits:
        fit, several = _fit(results), len(results.get("seeds", [])) > 1
        chosen = fit.get("load_best_at_end", True) or fit.get("patience") or several
        used = ["by which the model was chosen"] if chosen else []
        used += ["on which its thresholds were fitted"] if _tuned(results) else []
        yield f"There is no test split: what is known comes from dev{', ' if used else ''}{' and '.join(used)}."
    if len(results.get("seeds", [])) < 2:
        yield "Trained with one seed: how much its numbers depend on the seed is not known."
    for split, what, rows in _each_class(results):
        rare = [label for label, row in rows.items() if _count(row) < FEW]
        if rare:
            shown = ", ".join(escape_markdown(label, 60) for label in rare[:10]) + (" and more" if rare[10:] else "")
            each = f"on {escape_markdown(split)} {len(rare)} of {len(rows)} have fewer than {FEW} examples"
            yield f"Scores of each {what} are rough where there are few: {each} ({shown})."
    notes: dict[str, list[str]] = {}
    for name, split in splits.items():
        for note in split["numbers"].get("notes", []):
            notes.setdefault(note, []).append(escape_markdown(name))
    for note, names in notes.items():
        yield f"On {' and '.join(names)}: {escape_markdown(note, 400)}."
    for note in results.get("notes", []):
        yield f"{escape_markdown(note, 400)}."


def _data(results: dict[str, Any]) -> Iterator[list[str]]:
    data = results.get("data")
    if not data:
        return
    yield ["## Data"]
    if splits := data.get("splits"):
        yield markdown_table(
            ["split", "examples"], [[escape_markdown(name), f"{each['examples']:,}"] for name, each in splits.items()]
        )
    if stated := data.get("stated"):
        yield [f"- {escape_markdown(sentence, 400)}" for sentence in stated]
    if files := data.get("files"):
        rows = [[escape_markdown(name, 120), f"`{re.sub('[^0-9a-f]', '', each)}`"] for name, each in files.items()]
        yield details(markdown_table(["file", "SHA-256"], rows), f"{len(rows)} files", len(rows) > MANY)


def _speed(results: dict[str, Any]) -> Iterator[list[str]]:
    times = results.get("latency")
    if not times:
        return
    yield ["## Speed"]
    machine = f" on {escape_markdown(results['machine'], 200)}" if results.get("machine") else ""
    many = f", and {results['throughput']:,.0f} tokens a second in packed batches" if "throughput" in results else ""
    one = SPECS[results["task"]].card.measured
    yield [f"Milliseconds for {one}{machine}, float32, without tokenizing{many}:"]
    rows = [[f"{int(length):,}", f"{each['p50']:.2f}", f"{each['p99']:.2f}"] for length, each in times.items()]
    yield markdown_table(["tokens", "median", "99th percentile"], rows)


def _settings(results: dict[str, Any]) -> Iterator[list[str]]:
    yield ["## How it was made"]
    seeds = results.get("seeds", [])
    if seeds:
        steps, seconds = (sum(each[name] for each in seeds) for name in ("steps", "seconds"))
        yield [f"{steps:,} steps in {seconds:,.0f} s" + (f", over {len(seeds)} seeds." if seeds[1:] else ".")]
    if versions := results.get("versions"):
        yield [", ".join(f"{escape_markdown(name)} {escape_markdown(each)}" for name, each in versions.items()) + "."]
    if settings := results.get("settings"):
        text = json.dumps(hide_local_paths(settings), indent=1, ensure_ascii=False)
        yield details(["```json", *text.splitlines(), "```"], "All settings", True)

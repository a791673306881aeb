"""The model card of a fine-tuned model: what it does, its quality, speed and limits, and how it was trained."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from heedful.atomic_io import atomic_path, make_folder, write_synced
from heedful.checkpoint.folder_json import read_folder_json
from heedful.errors import RunError
from heedful.runs.card.baseline import baseline_lines, baseline_warning
from heedful.runs.card.cascade import cascade_section
from heedful.runs.card.markdown import (
    details,
    escape_markdown,
    format_number,
    hide_local_paths,
    markdown_table,
    without_directory,
)
from heedful.runs.card.methods import HEADING, method_table
from heedful.runs.card.usage import METRICS, usage
from heedful.runs.card.verdict import verdict_section
from heedful.runs.results import (
    JsonObject,
    as_float,
    headline_split,
    read_predictions,
    read_results,
)
from heedful.tasks.metrics import format_metric
from heedful.tasks.specs import SPECS

MISTAKES_HEADING = "## The worst mistakes on dev"  # heading of the section that quotes the data
MISTAKES = 5
PICTURES = ("confusion", "calibration", "coverage")  # plots that the card shows
LONGEST = 240  # characters of a quoted text
MANY = 30  # rows above which a table is folded
SHOWN = 4  # metrics that are not folded: that of the run, then those of this list that it has
KEY_METRICS = (
    *("accuracy", "f1", "macro_f1", "exact", "spearman", "pearson", "bleu", "precision", "recall", "mrr"),
    *("matthews", "ece", "loss", "mse"),
)
FEW = 30  # examples below which the score of a class is rough
PER_CLASS = {"classes": "class", "labels": "label", "types": "type of entity"}  # keys of results


def write_finetuned_card(folder: Path) -> Path:
    """Write folder/model/README.md from the results of the run; the same run gets the same text.

    Raises:
        RunError: If the run has no results or no model.
    """
    results = read_results(folder)
    if not (folder / "model" / "config.json").is_file():
        raise RunError(f"{folder} has no model/config.json: save the model before its card is written")
    for name in PICTURES:
        if (folder / "plots" / f"{name}.png").is_file():
            make_folder(folder / "model" / "plots")
            with atomic_path(folder / "model" / "plots" / f"{name}.png") as part:
                write_synced(part, [(folder / "plots" / f"{name}.png").read_bytes()])
    text = "\n\n".join(["\n".join(part) for part in _parts(folder, results) if part]) + "\n"
    path = folder / "model" / "README.md"
    with atomic_path(path) as part:
        write_synced(part, [text.encode("utf-8", "replace")])
    return path


def _parts(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    config = read_folder_json(folder / "model" / "config.json", max_bytes=1 << 26)
    kind, has_encoder = config.get("model_type"), config.get("is_encoder_decoder") is True
    heedful_only = isinstance(kind, str) and kind.split("-")[0] == "heedful"
    yield _front(results, heedful_only)
    yield _what(results)
    yield from _quality(results)
    yield from _baseline(results)
    yield from _methods(results)
    yield from _seeds(results)
    yield from verdict_section(folder)
    yield from cascade_section(folder)
    yield from _picture(folder, "confusion", "Confusion matrix")
    yield from _classes(results)
    yield from _mistakes(folder, results)
    yield from _calibration(folder, results)
    yield from _coverage(folder, results)
    yield ["## Limits"]
    yield [f"- {sentence}" for sentence in _limits(results)]
    yield from _data(results)
    yield from _speed(results)
    yield from usage(
        results["task"], heedful_only=heedful_only, pairs=learned_pairs(folder, results), has_encoder=has_encoder
    )
    yield from _settings(results)


# -- what it is -----------------------------------------------------------------------------------------------


def _front(results: JsonObject, heedful_only: bool) -> list[str]:
    """Front matter for the Hugging Face hub: YAML, with texts as JSON, which is YAML too."""
    task = SPECS[results["task"]].card
    headline = headline_split(results)
    numbers = headline[1] if headline else {}
    metrics = list(dict.fromkeys(name for key, name in METRICS.items() if key in numbers))
    library = "heedful" if heedful_only else task.library
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {task.pipeline}", "tags:", "- heedful"]
    if base := re.fullmatch(r"((?:[\w.-]+/)?[\w.-]+)@[0-9a-f]{7,40}", results.get("base", "")):
        lines.append(f"base_model: {json.dumps(base[1])}")
    if metrics:
        lines += ["metrics:", *(f"- {name}" for name in metrics)]
    if headline:
        lines += _model_index(task.name, task.pipeline, *headline)
    return [*lines, "---"]


def _model_index(name: str, pipeline: str, split: str, numbers: JsonObject) -> list[str]:
    """The scores in the form that the hub shows beside a model; the data is not named, since it may be private."""
    scores: dict[str, float] = {}
    for key, metric in METRICS.items():
        value = as_float(numbers.get(key))
        if math.isfinite(value) and metric not in scores:
            scores[metric] = round(value, 6)
    if not scores:
        return []
    split_name = split if split in ("dev", "test") else "other"
    return [
        "model-index:",
        f"- name: {json.dumps(name)}",
        "  results:",
        "  - task:",
        f"      type: {pipeline}",
        "    dataset:",
        "      name: local data",
        "      type: local",
        f"      split: {split_name}",
        "    metrics:",
        *(line for metric, value in scores.items() for line in (f"    - type: {metric}", f"      value: {value}")),
    ]


def _what(results: JsonObject) -> list[str]:
    task, labels, model = SPECS[results["task"]].card, results.get("labels") or [], results.get("model", {})
    named = ""
    if labels:
        shown = ", ".join(escape_markdown(label, 60) for label in labels[:20])
        named = f" Its {len(labels)} labels: {shown}{', …' if len(labels) > 20 else ''}."
    size = ""
    if model:
        size = f" It has {model['parameters']:,} parameters and takes {model['bytes'] / 1e6:,.1f} MB on the disk."
    start = f" Trained with Heedful from {_base(results['base'])}." if results.get("base") else ""
    return [f"# {task.name}", "", f"{task.description}.{named}{start}{size}"]


def _base(base: str) -> str:
    return escape_markdown(without_directory(base), 120)


# -- how good it is -------------------------------------------------------------------------------------------


def _quality(results: JsonObject) -> Iterator[list[str]]:
    yield ["## Quality"]
    splits, metric = results["splits"], results["metric"]
    if not splits:
        yield ["Nothing was measured: the data had neither dev nor test."]
        return
    names = list(dict.fromkeys(key for split in splits.values() for key in split["numbers"]))
    shown = [name for name in names if any(_is_score(split["numbers"].get(name)) for split in splits.values())]
    key = [name for name in dict.fromkeys((metric, *KEY_METRICS, *shown)) if name in shown][:SHOWN]
    rows = {
        name: [
            f"**{escape_markdown(name)}**" if name == metric else escape_markdown(name),
            *(_with_interval(split, name) for split in splits.values()),
        ]
        for name in [*key, *(name for name in shown if name not in key)]
    }
    counts = ["examples", *(f"{split['numbers'].get('count', 0):,}" for split in splits.values())]
    header = ["", *map(escape_markdown, splits)]
    yield markdown_table(header, [*(rows[name] for name in key), counts])
    intervals = [interval for split in splits.values() for interval in split.get("intervals", {}).values()]
    about = []
    if intervals:
        level, replicates = intervals[0]["level"], intervals[0]["replicates"]
        about.append(f"In parentheses: {100 * level:g} % intervals from {replicates:,} bootstrap replicates.")
    yield [" ".join(about + _chosen(results))]
    if others := [row for name, row in rows.items() if name not in key]:
        yield details(markdown_table(header, others), "Further metrics")


def _methods(results: JsonObject) -> Iterator[list[str]]:
    """The methods that were compared on held-out examples."""
    head, rows = method_table(results)
    if rows:
        yield [f"### {HEADING}"]
        yield markdown_table(head, rows)


def _baseline(results: JsonObject) -> Iterator[list[str]]:
    """Scores of the baseline, and a sentence if the model does not beat it."""
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


def _chosen(results: JsonObject) -> list[str]:
    """Sentences about what dev was used for."""
    seed = next((entry for entry in results.get("seeds", []) if entry["seed"] == results.get("seed")), None)
    if seed is None or "dev" not in results["splits"]:
        return []
    best, fitted = _fit(results).get("load_best_at_end", True), _tuned(results)
    sentence = f"The weights are those after {seed['steps']:,} steps"
    if best:
        sentence = f"The weights are those of step {seed['best_step']:,} of {seed['steps']:,}, the best on dev"
    sentence += ", and thresholds were fitted on dev" if fitted else ""
    if best or fitted:
        test = ", and those of test are not" if "test" in results["splits"] else ""
        sentence += f"; so the numbers of dev are slightly optimistic{test}"
    return [f"{sentence}."]


def _fit(results: JsonObject) -> JsonObject:
    fit: JsonObject = results.get("settings", {}).get("fit", {})
    return fit


def _tuned(results: JsonObject) -> bool:
    """Whether thresholds were tuned on dev; for "no answer" that needs questions without one."""
    task = results.get("settings", {}).get("task", {})
    may_lack_answer = "best_f1_threshold" in results["splits"].get("dev", {}).get("numbers", {})
    return task.get("thresholds") == "tuned" or (task.get("no_answer_threshold") == "tuned" and may_lack_answer)


def _is_score(value: object) -> bool:
    return isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")


def _with_interval(split: JsonObject, name: str) -> str:
    value = split["numbers"].get(name)
    if value is None:
        return ""
    interval = split.get("intervals", {}).get(name)
    ends = " to ".join(_metric(name, interval[end]) for end in ("low", "high")) if interval else ""
    return _metric(name, value) + (f" ({ends})" if ends else "")


def _metric(name: str, value: object) -> str:
    return format_metric(name, as_float(value))


def _seeds(results: JsonObject) -> Iterator[list[str]]:
    seeds, metric = results.get("seeds", []), results["metric"]
    if len(seeds) < 2:
        return
    scores_of_seeds = [seed["splits"] for seed in seeds]
    splits = list(scores_of_seeds[0])
    if not splits:
        return
    yield ["### Over seeds"]
    rows = [
        [str(seed["seed"]), *(_metric(metric, scores[name]) for name in splits)]
        for seed, scores in zip(seeds, scores_of_seeds, strict=True)
    ]
    columns = [[as_float(scores[name]) for scores in scores_of_seeds] for name in splits]
    rows.append(
        [
            "mean ± deviation",
            *(f"{_metric(metric, statistics.fmean(c))} ± {_metric(metric, _deviation(c))}" for c in columns),
        ]
    )
    yield markdown_table(["seed", *(f"{escape_markdown(metric)} on {escape_markdown(name)}" for name in splits)], rows)
    chosen = f"the best of {len(seeds)} on dev" if "dev" in splits else f"the first of {len(seeds)}"
    yield [f"The model here is that of seed {results['seed']}, {chosen}; from a run with another seed expect the mean."]


def _deviation(values: list[float]) -> float:
    """Sample standard deviation, sqrt(Σ (x - mean)² / (n - 1)); NaN if a value is not finite."""
    mean = statistics.fmean(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)


def _classes(results: JsonObject) -> Iterator[list[str]]:
    for split, what, scores in _each_class(results):
        yield [f"### Each {what}, on {escape_markdown(split)}"]
        rows = [
            [
                escape_markdown(label, 60),
                *(_metric(name, row[name]) for name in ("precision", "recall", "f1")),
                f"{_count(row):,}",
            ]
            for label, row in scores.items()
        ]
        table = markdown_table([what, "precision", "recall", "F1", "examples"], rows)
        yield details(table, f"{len(rows)} rows") if len(rows) > MANY else table


def _each_class(results: JsonObject) -> Iterator[tuple[str, str, JsonObject]]:
    headline = headline_split(results)
    if headline is None:
        return
    split, numbers = headline
    for key, what in PER_CLASS.items():
        if rows := numbers.get(key):
            yield split, what, rows


def _count(row: JsonObject) -> int:
    return int(row["count"] if "count" in row else row["gold"])  # of examples, or of entities


def _picture(folder: Path, name: str, about: str) -> Iterator[list[str]]:
    """A plot of the run, which the folder of the model has too."""
    if (folder / "model" / "plots" / f"{name}.png").is_file():
        yield [f"![{about}](plots/{name}.png)"]


def _calibration(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    headline = headline_split(results)
    if not headline or not headline[1].get("calibration"):
        return
    split, numbers = headline
    rows = [
        [
            f"{100 * as_float(row['low']):.0f} % to {100 * as_float(row['high']):.0f} %",
            f"{row['count']:,}",
            _metric("probability", row["confidence"]),
            _metric("accuracy", row["accuracy"]),
        ]
        for row in numbers["calibration"]
    ]
    yield ["## Calibration"]
    yield [
        f"Expected calibration error on {escape_markdown(split)}: {_metric('ece', numbers['ece'])}, the mean distance "
        "between how sure the model is and how often it is right."
    ]
    table = markdown_table(["confidence", "examples", "mean confidence", "right"], rows)
    yield from _picture_and_table(folder, "calibration", "How often the model is right at each confidence", table)


def _coverage(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    headline = headline_split(results)
    if not headline or not headline[1].get("coverage"):
        return
    split, numbers = headline
    rows = [
        [
            f"{row['min_confidence']:.4g}",
            f"{100 * row['coverage']:.1f} %",
            f"{row['count']:,}",
            format_number(row["accuracy"]),
        ]
        for row in numbers["coverage"]
    ]
    yield ["## Accuracy over coverage"]
    yield [
        f"Accuracy on {escape_markdown(split)} of the answers above a confidence threshold, and their share. With "
        "`--min-confidence THRESHOLD`, `heedful predict` gives no label to texts below it."
    ]
    table = markdown_table(["least confidence", "coverage", "examples", "right"], rows)
    yield from _picture_and_table(folder, "coverage", "How often the model is right where it is most confident", table)


def _picture_and_table(folder: Path, name: str, caption: str, table: list[str]) -> Iterator[list[str]]:
    """A plot of the run, if it was drawn, and its numbers as a table, folded where there is the plot."""
    pictures = list(_picture(folder, name, caption))
    yield from pictures
    yield details(table, "As a table") if pictures else table


# -- mistakes -------------------------------------------------------------------------------------------------


def _mistakes(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    lines = read_predictions(folder, "dev") if "dev" in results["splits"] else iter(())
    wrong = (
        line for line in lines if line["correct"] is False or (line["correct"] is None and line["label"] is not None)
    )
    rows = [_mistake(line, results) for line in islice(wrong, MISTAKES)]
    if rows:
        yield [MISTAKES_HEADING]
        yield markdown_table(["text", "label", "prediction"], rows)
        yield ["They are quoted from the data. `heedful push` leaves them out unless --with-examples is given."]


def _mistake(line: JsonObject, results: JsonObject) -> list[str]:
    about = SPECS[results["task"]].card
    shown = about.describe_mistake(line, results, format_number)
    sure = line["answer"].get("probability") if isinstance(line.get("answer"), dict) else None
    sides = [escape_markdown(side, 80) for side in shown]
    return [
        escape_markdown(about.input_text(line["input"]), LONGEST),
        sides[0],
        sides[1] + (f" ({_metric('probability', sure)})" if sure else ""),
    ]


def learned_pairs(folder: Path, results: JsonObject) -> bool:
    """Whether the texts of a run's data are pairs, by the predictions in its folder."""
    first = next(
        (line for name in results["splits"] for line in islice(read_predictions(folder, name), 1)), {"input": ""}
    )
    return isinstance(first["input"], list) and SPECS[results["task"]].card.takes_pairs


# -- limits, data, speed, settings ----------------------------------------------------------------------------


def _limits(results: JsonObject) -> Iterator[str]:
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
            counts = f"on {escape_markdown(split)} {len(rare)} of {len(rows)} have fewer than {FEW} examples"
            yield f"Scores of each {what} are rough where examples are few: {counts} ({shown})."
    notes: dict[str, list[str]] = {}
    for name, split in splits.items():
        for note in split["numbers"].get("notes", []):
            notes.setdefault(note, []).append(escape_markdown(name))
    for note, names in notes.items():
        yield f"On {' and '.join(names)}: {escape_markdown(note, 400)}."
    for note in results.get("notes", []):
        yield f"{escape_markdown(note, 400)}."


def _data(results: JsonObject) -> Iterator[list[str]]:
    data = results.get("data")
    if not data:
        return
    yield ["## Data"]
    if splits := data.get("splits"):
        yield markdown_table(
            ["split", "examples"], [[escape_markdown(name), f"{split['examples']:,}"] for name, split in splits.items()]
        )
    if stated := data.get("stated"):
        yield [f"- {escape_markdown(sentence, 400)}" for sentence in stated]
    if files := data.get("files"):
        rows = [[escape_markdown(name, 120), f"`{re.sub('[^0-9a-f]', '', digest)}`"] for name, digest in files.items()]
        table = markdown_table(["file", "SHA-256"], rows)
        yield details(table, f"{len(rows)} files") if len(rows) > MANY else table


def _speed(results: JsonObject) -> Iterator[list[str]]:
    times = results.get("latency")
    if not times:
        return
    yield ["## Speed"]
    machine = f" on {escape_markdown(results['machine'], 200)}" if results.get("machine") else ""
    many = f", and {results['throughput']:,.0f} tokens a second in packed batches" if "throughput" in results else ""
    measured = SPECS[results["task"]].card.latency_input
    yield [f"Milliseconds for {measured}{machine}, float32, without tokenizing{many}:"]
    rows = [[f"{int(length):,}", f"{time['p50']:.2f}", f"{time['p99']:.2f}"] for length, time in times.items()]
    yield markdown_table(["tokens", "median", "99th percentile"], rows)


def _settings(results: JsonObject) -> Iterator[list[str]]:
    yield ["## How it was made"]
    seeds = results.get("seeds", [])
    if seeds:
        steps, seconds = (sum(seed[name] for seed in seeds) for name in ("steps", "seconds"))
        yield [f"{steps:,} steps in {seconds:,.0f} s" + (f", over {len(seeds)} seeds." if seeds[1:] else ".")]
    if versions := results.get("versions"):
        yield [
            ", ".join(f"{escape_markdown(name)} {escape_markdown(version)}" for name, version in versions.items()) + "."
        ]
    if settings := results.get("settings"):
        text = json.dumps(hide_local_paths(settings), indent=1, ensure_ascii=False)
        yield details(["```json", *text.splitlines(), "```"], "All settings")

"""The model card of a fine-tuned model: its task, quality, speed, limits and training.

Each private function yields the parts of one section. A part is a list of lines.
"""

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
from heedful.runs.card.methods import HEADING, method_table, unmeasured_note
from heedful.runs.card.usage import usage
from heedful.runs.card.verdict import verdict_section
from heedful.runs.results import (
    JsonObject,
    as_float,
    coverage_numbers,
    headline_split,
    read_predictions,
    read_results,
)
from heedful.tasks.metrics import format_metric
from heedful.tasks.specs import SPECS

HUB_METRIC_NAMES = {  # name of the metric on the Hugging Face hub, by name in results.json
    "accuracy": "accuracy",
    "f1": "f1",
    "macro_f1": "f1",
    "micro_f1": "f1",
    "matthews": "matthews_correlation",
    "ndcg@10": "ndcg@10",
    "map": "map",
    "mrr": "mrr",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "mse": "mse",
    "exact": "exact_match",
    "bleu": "sacrebleu",
}
MISTAKES_HEADING = "## The worst mistakes on dev"  # heading of the section that quotes the data
MAX_MISTAKES = 5  # maximum quoted mistakes
PLOTS = ("confusion", "calibration", "coverage")  # plots in the card
MAX_QUOTED_CHARS = 240  # maximum characters of a quoted text
MAX_UNFOLDED_ROWS = 30  # maximum rows of a table that is not folded
KEY_METRIC_COUNT = 4  # unfolded metrics: the metric of the run, then the first ones of KEY_METRICS
KEY_METRICS = (
    *("accuracy", "f1", "macro_f1", "exact", "spearman", "pearson", "bleu", "precision", "recall", "mrr"),
    *("matthews", "ece", "loss", "mse"),
)
MIN_CLASS_EXAMPLES = 30  # minimum examples of a class for scores that the card does not call rough
# key of scores by class in the metrics of a task -> what the card calls a class
PER_CLASS = {"classes": "class", "labels": "label", "types": "type of entity"}


def write_finetuned_card(folder: Path) -> Path:
    """Write folder/model/README.md from the results of the run. The text depends only on files of the run.

    Raises:
        RunError: If the run has no results or no model.
    """
    results = read_results(folder)
    if not (folder / "model" / "config.json").is_file():
        raise RunError(f"{folder} has no model/config.json: save the model before its card is written")
    for name in PLOTS:
        plot, copied_plot = (parent / "plots" / f"{name}.png" for parent in (folder, folder / "model"))
        if plot.is_file():
            make_folder(copied_plot.parent)
            with atomic_path(copied_plot) as temporary:
                write_synced(temporary, [plot.read_bytes()])
    text = "\n\n".join(["\n".join(lines) for lines in _card_parts(folder, results) if lines]) + "\n"
    path = folder / "model" / "README.md"
    with atomic_path(path) as temporary:
        write_synced(temporary, [text.encode("utf-8", "replace")])
    return path


def _card_parts(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    """Yield the paragraphs and tables of the card, each as a list of lines. A part that is left out is []."""
    config = read_folder_json(folder / "model" / "config.json", max_bytes=1 << 26)
    model_type = config.get("model_type")
    has_encoder = config.get("is_encoder_decoder") is True
    heedful_only = isinstance(model_type, str) and model_type.split("-")[0] == "heedful"
    yield _front_matter(results, heedful_only)
    yield _summary(results)
    yield from _quality(results)
    yield from _baseline(results)
    yield from _methods(results)
    yield from _seeds(results)
    yield from verdict_section(folder)
    yield from cascade_section(folder)
    yield from _plot(folder, "confusion", "Confusion matrix")
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


# -- front matter and summary ---------------------------------------------------------------------------------


def _front_matter(results: JsonObject, heedful_only: bool) -> list[str]:
    """Return the front matter for the Hugging Face hub, which is YAML with texts quoted as JSON."""
    task = SPECS[results["task"]].card
    headline = headline_split(results)
    numbers = headline[1] if headline else {}
    hub_metrics = list(dict.fromkeys(hub_name for name, hub_name in HUB_METRIC_NAMES.items() if name in numbers))
    library = "heedful" if heedful_only else task.library
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {task.pipeline}", "tags:", "- heedful"]
    if base := re.fullmatch(r"((?:[\w.-]+/)?[\w.-]+)@[0-9a-f]{7,40}", results.get("base", "")):
        lines.append(f"base_model: {json.dumps(base[1])}")
    if hub_metrics:
        lines += ["metrics:", *(f"- {hub_name}" for hub_name in hub_metrics)]
    if headline:
        lines += _model_index(task.name, task.pipeline, *headline)
    return [*lines, "---"]


def _model_index(name: str, pipeline: str, split: str, numbers: JsonObject) -> list[str]:
    """Return the scores as the `model-index` of the hub, which shows them beside a model.

    The data set is called "local data", since its name may be private.
    """
    hub_scores: dict[str, float] = {}
    for metric, hub_name in HUB_METRIC_NAMES.items():
        value = as_float(numbers.get(metric))
        if math.isfinite(value) and hub_name not in hub_scores:
            hub_scores[hub_name] = round(value, 6)
    if not hub_scores:
        return []
    metric_lines: list[str] = []
    for hub_name, value in hub_scores.items():
        metric_lines += [f"    - type: {hub_name}", f"      value: {value}"]
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
        *metric_lines,
    ]


def _summary(results: JsonObject) -> list[str]:
    """Return the title, and a paragraph with task, labels, initial model and size."""
    task = SPECS[results["task"]].card
    labels = results.get("labels") or []
    model = results.get("model", {})
    paragraph = f"{task.description}."
    if labels:
        names = ", ".join(escape_markdown(label, 60) for label in labels[:20])
        paragraph += f" Its {len(labels)} labels: {names}{', …' if len(labels) > 20 else ''}."
    if results.get("base"):
        base = escape_markdown(without_directory(results["base"]), 120)
        paragraph += f" Trained with Heedful from {base}."
    if model:
        paragraph += f" It has {model['parameters']:,} parameters and takes {model['bytes'] / 1e6:,.1f} MB on the disk."
    return [f"# {task.name}", "", paragraph]


# -- quality --------------------------------------------------------------------------------------------------


def _quality(results: JsonObject) -> Iterator[list[str]]:
    """Yield a table with the metrics of all splits, a sentence on the use of dev, and a folded table of the rest."""
    yield ["## Quality"]
    splits, main_metric = results["splits"], results["metric"]
    if not splits:
        yield [unmeasured_note(results)]
        return
    names = list(dict.fromkeys(name for split in splits.values() for name in split["numbers"]))
    metrics = [name for name in names if any(_is_score(split["numbers"].get(name)) for split in splits.values())]
    by_importance = [name for name in dict.fromkeys((main_metric, *KEY_METRICS, *metrics)) if name in metrics]
    key_metrics = by_importance[:KEY_METRIC_COUNT]
    further_metrics = [name for name in metrics if name not in key_metrics]

    def row(metric: str) -> list[str]:
        shown_name = f"**{escape_markdown(metric)}**" if metric == main_metric else escape_markdown(metric)
        return [shown_name, *(_with_interval(split, metric) for split in splits.values())]

    counts = ["examples", *(f"{split['numbers'].get('count', 0):,}" for split in splits.values())]
    header = ["", *map(escape_markdown, splits)]
    yield markdown_table(header, [*map(row, key_metrics), counts])
    intervals = [interval for split in splits.values() for interval in split.get("intervals", {}).values()]
    sentences = []
    if intervals:
        level = intervals[0]["level"]
        replicates = intervals[0]["replicates"]
        sentences.append(f"In parentheses: {100 * level:g} % intervals from {replicates:,} bootstrap replicates.")
    yield [" ".join([*sentences, *_use_of_dev(results)])]
    if further_metrics:
        yield details(markdown_table(header, map(row, further_metrics)), "Further metrics")


def _methods(results: JsonObject) -> Iterator[list[str]]:
    """Yield the table of training methods that were compared on held-out examples, and the reason for the choice."""
    header, rows = method_table(results)
    if rows:
        yield [f"### {HEADING}"]
        yield markdown_table(header, rows)
    if comparison := results.get("method_comparison"):
        reason = comparison["why"]
        yield [f"{escape_markdown(reason[:1].upper() + reason[1:], 400)}."]


def _baseline(results: JsonObject) -> Iterator[list[str]]:
    """Yield the scores of the baseline, and a warning if the model is not better."""
    lines = [f"- {escape_markdown(line, 400)}" for line in baseline_lines(results)]
    if not lines:
        return
    baseline = results["baseline"]
    if "method" in baseline:
        yield [f"### Compared with {escape_markdown(baseline['name'])}"]
        method, library = escape_markdown(baseline["method"]), escape_markdown(baseline["library"])
        yield [*lines, "", f"By {method} ({library}), seed as in training."]
    else:
        yield ["### Before and after training"]
        yield lines
    if sentence := baseline_warning(results):
        yield [f"{escape_markdown(sentence, 400)}."]


def _use_of_dev(results: JsonObject) -> list[str]:
    """Return a list of one sentence, on the weights and thresholds that were chosen on dev, or [] without dev."""
    chosen_run = next((run for run in results.get("seeds", []) if run["seed"] == results.get("seed")), None)
    if chosen_run is None or "dev" not in results["splits"]:
        return []
    loads_best = _fit_settings(results).get("load_best_at_end", True)
    tunes_thresholds = _has_tuned_thresholds(results)
    steps = chosen_run["steps"]
    sentence = f"The weights are those after {steps:,} steps"
    if loads_best:
        sentence = f"The weights are those of step {chosen_run['best_step']:,} of {steps:,}, the best on dev"
    if tunes_thresholds:
        sentence += ", and thresholds were fitted on dev"
    if loads_best or tunes_thresholds:
        sentence += "; so the numbers of dev are slightly optimistic"
        if "test" in results["splits"]:
            sentence += ", and those of test are not"
    return [f"{sentence}."]


def _fit_settings(results: JsonObject) -> JsonObject:
    fit: JsonObject = results.get("settings", {}).get("fit", {})
    return fit


def _has_tuned_thresholds(results: JsonObject) -> bool:
    """Whether thresholds were tuned on dev. The no-answer threshold is tuned if dev has unanswerable questions."""
    task = results.get("settings", {}).get("task", {})
    may_lack_answer = "best_f1_threshold" in results["splits"].get("dev", {}).get("numbers", {})
    return task.get("thresholds") == "tuned" or (task.get("no_answer_threshold") == "tuned" and may_lack_answer)


def _is_score(value: object) -> bool:
    return isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")


def _with_interval(split: JsonObject, name: str) -> str:
    """Format a metric of a split with its interval, if any, in parentheses, or return "" for a missing metric."""
    value = split["numbers"].get(name)
    if value is None:
        return ""
    interval = split.get("intervals", {}).get(name)
    if not interval:
        return _format(name, value)
    return f"{_format(name, value)} ({_format(name, interval['low'])} to {_format(name, interval['high'])})"


def _format(metric: str, value: object) -> str:
    return format_metric(metric, as_float(value))


def _seeds(results: JsonObject) -> Iterator[list[str]]:
    """Yield a table with the metric of each seed, mean and standard deviation, or nothing for a single seed."""
    runs = results.get("seeds", [])  # "seed", and the metric by split in "splits"
    metric = results["metric"]
    if len(runs) < 2:
        return
    splits = list(runs[0]["splits"])
    if not splits:
        return
    yield ["### Over seeds"]
    rows = [[str(run["seed"]), *(_format(metric, run["splits"][split]) for split in splits)] for run in runs]
    last_row = ["mean ± deviation"]
    for split in splits:
        values = [as_float(run["splits"][split]) for run in runs]
        mean = statistics.fmean(values)
        deviation = _standard_deviation(values)
        last_row.append(f"{_format(metric, mean)} ± {_format(metric, deviation)}")
    header = ["seed", *(f"{escape_markdown(metric)} on {escape_markdown(split)}" for split in splits)]
    yield markdown_table(header, [*rows, last_row])
    choice = f"the best of {len(runs)} on dev" if "dev" in splits else f"the first of {len(runs)}"
    yield [f"The model here is that of seed {results['seed']}, {choice}; from a run with another seed expect the mean."]


def _standard_deviation(values: list[float]) -> float:
    """Return the sample standard deviation, sqrt(Σ (x - mean)² / (n - 1)), or NaN if a value is not finite."""
    mean = statistics.fmean(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)


def _classes(results: JsonObject) -> Iterator[list[str]]:
    """Yield a table with precision, recall and F1 of each class, which is folded if it is long."""
    for split, class_word, scores_by_class in _scores_by_class(results):
        yield [f"### Each {class_word}, on {escape_markdown(split)}"]
        rows = [
            [
                escape_markdown(name, 60),
                *(_format(metric, scores[metric]) for metric in ("precision", "recall", "f1")),
                f"{_example_count(scores):,}",
            ]
            for name, scores in scores_by_class.items()
        ]
        table = markdown_table([class_word, "precision", "recall", "F1", "examples"], rows)
        yield details(table, f"{len(rows)} rows") if len(rows) > MAX_UNFOLDED_ROWS else table


def _scores_by_class(results: JsonObject) -> Iterator[tuple[str, str, JsonObject]]:
    """Yield (split, word for a class, scores by class). The word is "class", "label" or "type of entity"."""
    headline = headline_split(results)
    if headline is None:
        return
    split, numbers = headline
    for key, class_word in PER_CLASS.items():
        if scores_by_class := numbers.get(key):
            yield split, class_word, scores_by_class


def _example_count(scores: JsonObject) -> int:
    """Return how many examples a class has, or how many entities a type has, from the scores of the class or type."""
    return int(scores["count"] if "count" in scores else scores["gold"])


def _plot(folder: Path, name: str, caption: str) -> Iterator[list[str]]:
    """Yield a plot of the run, if the model folder has a copy of the plot."""
    if (folder / "model" / "plots" / f"{name}.png").is_file():
        yield [f"![{caption}](plots/{name}.png)"]


def _calibration(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    """Yield the calibration error, and plot and table of the accuracy in each range of confidence."""
    headline = headline_split(results)
    if not headline or not headline[1].get("calibration"):
        return
    split, numbers = headline
    rows = [
        [
            f"{100 * as_float(bucket['low']):.0f} % to {100 * as_float(bucket['high']):.0f} %",
            f"{bucket['count']:,}",
            _format("probability", bucket["confidence"]),
            _format("accuracy", bucket["accuracy"]),
        ]
        for bucket in numbers["calibration"]
    ]
    yield ["## Calibration"]
    yield [
        f"Expected calibration error on {escape_markdown(split)}: {_format('ece', numbers['ece'])}, the mean distance "
        "between how sure the model is and how often it is right."
    ]
    table = markdown_table(["confidence", "examples", "mean confidence", "right"], rows)
    yield from _plot_and_table(folder, "calibration", "How often the model is right at each confidence", table)


def _coverage(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    """Yield plot and table of the accuracy of the answers above each confidence threshold, and of their share."""
    covered = coverage_numbers(results)
    if covered is None:
        return
    split, numbers = covered
    rows = [
        [
            f"{point['min_confidence']:.4g}",
            f"{100 * point['coverage']:.1f} %",
            f"{point['count']:,}",
            format_number(point["accuracy"]),
        ]
        for point in numbers["coverage"]
    ]
    yield ["## Accuracy over coverage"]
    yield [
        f"Accuracy on {escape_markdown(split)} of the answers above a confidence threshold, and their share. With "
        "`--min-confidence THRESHOLD`, `heedful predict` gives no label to texts below it."
    ]
    table = markdown_table(["least confidence", "coverage", "examples", "right"], rows)
    yield from _plot_and_table(folder, "coverage", "How often the model is right where it is most confident", table)


def _plot_and_table(folder: Path, name: str, caption: str, table: list[str]) -> Iterator[list[str]]:
    """Yield a plot of the run with a folded table, or only the unfolded table if there is no plot."""
    plots = list(_plot(folder, name, caption))
    yield from plots
    yield details(table, "As a table") if plots else table


# -- mistakes -------------------------------------------------------------------------------------------------


def _mistakes(folder: Path, results: JsonObject) -> Iterator[list[str]]:
    """Yield a table of the worst mistakes on dev, which are the first ones in the file of predictions."""
    predictions = read_predictions(folder, "dev") if "dev" in results["splits"] else iter(())
    mistakes = (
        prediction
        for prediction in predictions
        # "correct" is None if the label is a number
        if prediction["correct"] is False or (prediction["correct"] is None and prediction["label"] is not None)
    )
    rows = [_mistake_row(prediction, results) for prediction in islice(mistakes, MAX_MISTAKES)]
    if rows:
        yield [MISTAKES_HEADING]
        yield markdown_table(["text", "label", "prediction"], rows)
        yield ["They are quoted from the data. `heedful push` leaves them out unless --with-examples is given."]


def _mistake_row(prediction: JsonObject, results: JsonObject) -> list[str]:
    """Return the input text, the correct label, and the predicted label with its probability, if there is one.

    Args:
        prediction: A line of predictions-SPLIT.jsonl.
        results: Contents of results.json.
    """
    task = SPECS[results["task"]].card
    described = task.describe_mistake(prediction, results, format_number)
    label, predicted = (escape_markdown(text, 80) for text in described)
    answer = prediction.get("answer")
    probability = answer.get("probability") if isinstance(answer, dict) else None
    if probability:
        predicted += f" ({_format('probability', probability)})"
    return [escape_markdown(task.input_text(prediction["input"]), MAX_QUOTED_CHARS), label, predicted]


def learned_pairs(folder: Path, results: JsonObject) -> bool:
    """Whether the inputs of a run are pairs of texts, judged by the first prediction in the run folder."""
    first_predictions = (
        prediction for split in results["splits"] for prediction in islice(read_predictions(folder, split), 1)
    )
    first = next(first_predictions, {"input": ""})
    return isinstance(first["input"], list) and SPECS[results["task"]].card.takes_pairs


# -- limits, data, speed, settings ----------------------------------------------------------------------------


def _limits(results: JsonObject) -> Iterator[str]:
    """Yield sentences on what was not tested, and on scores that are optimistic or rough."""
    splits = results["splits"]
    if splits:
        names = " and ".join(map(escape_markdown, splits))
        yield (
            f"Measured on {names} of the data below and on nothing else: other sources, times and languages, and "
            "whether it treats groups of people alike, were not tested."
        )
    elif method_table(results)[1]:
        yield "Not measured itself; only its method was, by cross-validation."
    else:
        yield "Not measured at all."
    if splits and "test" not in splits:
        yield _no_test_split(results)
    if len(results.get("seeds", [])) < 2:
        yield "Trained with one seed: how much its numbers depend on the seed is not known."
    yield from _rare_classes(results)
    splits_by_note: dict[str, list[str]] = {}
    for name, split in splits.items():
        for note in split["numbers"].get("notes", []):
            splits_by_note.setdefault(note, []).append(escape_markdown(name))
    for note, split_names in splits_by_note.items():
        yield f"On {' and '.join(split_names)}: {escape_markdown(note, 400)}."
    for note in results.get("notes", []):
        yield f"{escape_markdown(note, 400)}."


def _no_test_split(results: JsonObject) -> str:
    """Return a sentence that says that scores are on dev only, and what else dev was used for."""
    fit = _fit_settings(results)
    has_several_seeds = len(results.get("seeds", [])) > 1
    uses_of_dev = []
    if fit.get("load_best_at_end", True) or fit.get("patience") or has_several_seeds:
        uses_of_dev.append("by which the model was chosen")
    if _has_tuned_thresholds(results):
        uses_of_dev.append("on which its thresholds were fitted")
    uses = f", {' and '.join(uses_of_dev)}" if uses_of_dev else ""
    return f"There is no test split: what is known comes from dev{uses}."


def _rare_classes(results: JsonObject) -> Iterator[str]:
    """Yield a sentence that names the classes with fewer than MIN_CLASS_EXAMPLES examples, if there are any."""
    for split, class_word, scores_by_class in _scores_by_class(results):
        rare = [name for name, scores in scores_by_class.items() if _example_count(scores) < MIN_CLASS_EXAMPLES]
        if rare:
            names = ", ".join(escape_markdown(name, 60) for name in rare[:10]) + (" and more" if rare[10:] else "")
            shares = f"on {escape_markdown(split)} {len(rare)} of {len(scores_by_class)}"
            counts = f"{shares} have fewer than {MIN_CLASS_EXAMPLES} examples"
            yield f"Scores of each {class_word} are rough where examples are few: {counts} ({names})."


def _data(results: JsonObject) -> Iterator[list[str]]:
    """Yield sizes of the splits, shares of the labels, sentences on how files were read, and the files with hashes."""
    data = results.get("data")
    if not data:
        return
    yield ["## Data"]
    if splits := data.get("splits"):
        yield markdown_table(
            ["split", "examples"], [[escape_markdown(name), f"{split['examples']:,}"] for name, split in splits.items()]
        )
    yield from _label_shares(results)
    if stated := data.get("stated"):
        yield [f"- {escape_markdown(sentence, 400)}" for sentence in stated]
    if files := data.get("files"):
        rows = [[escape_markdown(name, 120), f"`{re.sub('[^0-9a-f]', '', digest)}`"] for name, digest in files.items()]
        table = markdown_table(["file", "SHA-256"], rows)
        yield details(table, f"{len(rows)} files") if len(rows) > MAX_UNFOLDED_ROWS else table


def _label_shares(results: JsonObject) -> Iterator[list[str]]:
    """Yield a table of how many training examples have each label, which is folded if it is long."""
    counts = results.get("label_counts")
    if not counts:
        return
    total = results["data"]["splits"]["train"]["examples"]
    rows = [
        [escape_markdown(label, 60), f"{count:,}", f"{100 * count / max(1, total):.1f} %"]
        for label, count in counts.items()
    ]
    table = markdown_table(["label", "examples of train", "share"], rows)
    yield details(table, f"{len(rows)} labels") if len(rows) > MAX_UNFOLDED_ROWS else table


def _speed(results: JsonObject) -> Iterator[list[str]]:
    """Yield a table of latencies by input length, and the throughput."""
    latency = results.get("latency")
    if not latency:
        return
    yield ["## Speed"]
    machine = f" on {escape_markdown(results['machine'], 200)}" if results.get("machine") else ""
    throughput = ""
    if "throughput" in results:
        throughput = f", and {results['throughput']:,.0f} tokens a second in packed batches"
    latency_input = SPECS[results["task"]].card.latency_input
    yield [f"Milliseconds for {latency_input}{machine}, float32, without tokenizing{throughput}:"]
    rows = [[f"{int(length):,}", f"{time['p50']:.2f}", f"{time['p99']:.2f}"] for length, time in latency.items()]
    yield markdown_table(["tokens", "median", "99th percentile"], rows)


def _settings(results: JsonObject) -> Iterator[list[str]]:
    """Yield steps and seconds of the training, versions of libraries, and all settings, folded."""
    yield ["## How it was made"]
    runs = results.get("seeds", [])
    if runs:
        steps = sum(run["steps"] for run in runs)
        seconds = sum(run["seconds"] for run in runs)
        yield [f"{steps:,} steps in {seconds:,.0f} s" + (f", over {len(runs)} seeds." if len(runs) > 1 else ".")]
    if versions := results.get("versions"):
        yield [
            ", ".join(f"{escape_markdown(name)} {escape_markdown(version)}" for name, version in versions.items()) + "."
        ]
    if settings := results.get("settings"):
        text = json.dumps(hide_local_paths(settings), indent=1, ensure_ascii=False)
        yield details(["```json", *text.splitlines(), "```"], "All settings")

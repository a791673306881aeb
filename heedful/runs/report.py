"""report.html of a run: scores, plots, the worst mistakes and facts about the data, in one file without scripts.

Every run calls `write_report` at its end.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from heedful.atomic_io import atomic_path, write_synced
from heedful.command_line import command_line
from heedful.runs.card.baseline import baseline_lines, baseline_warning
from heedful.runs.card.cascade import CASCADE, cascade_table
from heedful.runs.card.methods import HEADING, method_table, unmeasured_note
from heedful.runs.card.verdict import VERDICT, verdict_table
from heedful.runs.results import JsonObject, as_float, headline_split, read_predictions, read_results
from heedful.runs.run_folder import read_run_json
from heedful.tasks.metrics import format_metric
from heedful.tasks.spec import Card
from heedful.tasks.specs import SPECS

REPORT = "report.html"
MAX_MISTAKES = 20  # maximum mistakes in the report
MAX_TEXT_CHARS = 600  # maximum characters of a quoted text
MAX_COMMAND_CHARS = 2000  # maximum characters of a command; longer commands are left out
PLOTS = {  # description by name of the plot, in the order of the report; other plots follow in alphabetical order
    "verdict": "Quality over latency, beside the teacher",
    "curves": "Loss, score on dev and learning rate over the steps",
    "confusion": "Which labels are taken for which",
    "calibration": "How often the model is right at each confidence",
    "coverage": "How often the model is right where it is most confident",
    "scores": "Precision, recall and F1 of each label",
    "numbers": "Predictions over labels",
    "alignments": "Where the decoder looked",
}
STYLE = """
:root { color-scheme: light dark; --ground: #f7f7f5; --panel: #fff; --ink: #1c2126; --soft: #596069; --line: #dddfe2; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171a; --panel: #1b1f23; --ink: #e7eaed; --soft: #a2abb5; --line: #343a41; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 64rem; font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif;
  color: var(--ink); background: var(--ground); }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft, th, figcaption { color: var(--soft); }
.scrolled { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1rem .25rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); } tr.main td { font-weight: 700; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); }
article { margin: .7rem 0; padding: .6rem .9rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
article p { overflow-wrap: anywhere; }
code { font: .85rem/1.4 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
pre { margin: .4rem 0 0; padding: .45rem .6rem; border-radius: 6px; background: var(--ground); white-space: pre-wrap;
  overflow-wrap: anywhere; user-select: all; max-height: 8rem; overflow-y: auto; }
@media print { body { max-width: none; padding: 0; } article, figure { break-inside: avoid; } }
"""


def write_report(folder: Path) -> Path:
    """Write folder/report.html from the files of the run, deterministically.

    Raises:
        RunError: If the run has no results.
    """
    results = read_results(folder)
    style_hash = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'"
    title = _title(folder, results)
    body = "\n".join(_body(folder, results))
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
    path = folder / REPORT
    with atomic_path(path) as temporary:
        write_synced(temporary, [page.encode("utf-8", "replace")])
    return path


def _body(folder: Path, results: JsonObject) -> Iterator[str]:
    """Yield the HTML of the page: its title, and the sections that have content."""
    yield f"<h1>{_text(_title(folder, results))}</h1>"
    yield f'<p class="soft">{_text(_subtitle(results))}</p>'
    yield from _scores(results)
    yield from _baseline(results)
    yield from _methods(results)
    yield from _verdict(folder)
    yield from _cascade(folder)
    yield from _plots(folder)
    yield from _mistakes(folder, results)
    yield from _data(results)


def _title(folder: Path, results: JsonObject) -> str:
    """Return the name of the run folder and of the task."""
    task = SPECS[results["task"]].card.name if results["task"] in SPECS else "A pre-trained model"
    return f"{folder.absolute().name}: {task}"


def _subtitle(results: JsonObject) -> str:
    """Return the initial model, size, duration and machine on one line."""
    facts = [f"from {Path(results['base']).name}"] if results.get("base") else []
    if model := results.get("model"):
        facts.append(f"{model['parameters']:,} parameters, {model['bytes'] / 1e6:,.1f} MB")
    if seeds := results.get("seeds"):
        steps = sum(seed["steps"] for seed in seeds)
        seconds = sum(seed["seconds"] for seed in seeds)
        facts.append(f"{steps:,} steps in {seconds:,.0f} s")
    if machine := results.get("machine"):
        facts.append(machine)
    return " · ".join(facts)


def _scores(results: JsonObject) -> Iterator[str]:
    """Yield the table of scores, with a row per metric, the main metric first, and two columns per split."""
    yield "<h2>Scores</h2>"
    splits, metric = results["splits"], results["metric"]
    if not splits:
        yield f"<p>{_text(unmeasured_note(results))}</p>"
        return
    all_names = dict.fromkeys(name for split in splits.values() for name in split["numbers"])
    metric_names = [
        name for name in all_names if any(_is_metric_value(split["numbers"].get(name)) for split in splits.values())
    ]
    rows = []
    for name in sorted(metric_names, key=lambda name: name != metric):  # the main metric first
        cells = [name]
        for split in splits.values():
            cells += _score_cells(split, name)
        rows.append((cells, name == metric))
    count_cells = ["examples"]
    for split in splits.values():
        count_cells += [f"{split['numbers'].get('count', 0):,}", ""]
    rows.append((count_cells, False))
    head = [cell for split in splits for cell in (split, "95 % interval")]
    yield _table(["", *head], rows)


def _score_cells(split: JsonObject, name: str) -> tuple[str, str]:
    """Return the cells for the value of a metric on a split and for its 95 % interval. A missing one is empty."""
    value = split["numbers"].get(name)
    value_cell = "" if value is None else format_metric(name, as_float(value))
    interval = split.get("intervals", {}).get(name)
    if not interval:
        return value_cell, ""
    return value_cell, f"{format_metric(name, interval['low'])} to {format_metric(name, interval['high'])}"


def _is_metric_value(value: object) -> bool:
    """Whether a JSON value is a float, or the text of a float that JSON cannot represent. Counts are not metrics."""
    return isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity")


def _baseline(results: JsonObject) -> Iterator[str]:
    """Yield the comparison with the baseline, if the run has one."""
    lines = baseline_lines(results)
    if lines:
        yield "<h2>Baseline</h2>"
        yield from (f"<p>{_text(line)}</p>" for line in lines)
        if warning := baseline_warning(results):
            yield f"<p><strong>{_text(warning)}.</strong></p>"


def _methods(results: JsonObject) -> Iterator[str]:
    """Yield the table of the methods between which the run chose, if it chose."""
    head, rows = method_table(results)
    if rows:
        yield f"<h2>{HEADING}</h2>"
        yield _table(head, [(row, row[0] == results["settings"]["method"]) for row in rows])


def _verdict(folder: Path) -> Iterator[str]:
    """Yield the comparison of a student with its teacher, if the run has one."""
    if (folder / VERDICT).is_file():
        verdict = read_run_json(folder / VERDICT)
        head, rows = verdict_table(verdict)
        yield "<h2>Comparison with the teacher</h2>"
        yield _table(head, [(row, row[0] == "student") for row in rows])
        yield f"<p>{_text(verdict['sentence'])}</p>"


def _cascade(folder: Path) -> Iterator[str]:
    """Yield the measurements of the cascade of student and teacher, if the run has one."""
    if (folder / CASCADE).is_file():
        report = read_run_json(folder / CASCADE)
        head, rows = cascade_table(report)
        yield "<h2>The cascade</h2>"
        yield _table(head, [(row, row[0] == "cascade") for row in rows])
        yield f"<p>{_text(report['sentence'])}</p>"


def _plots(folder: Path) -> Iterator[str]:
    """Yield the plots of the run as images inside the page, in the order of PLOTS."""
    paths = sorted((folder / "plots").glob("*.svg")) if (folder / "plots").is_dir() else []
    paths.sort(key=lambda path: [*PLOTS].index(path.stem) if path.stem in PLOTS else len(PLOTS))
    if paths:
        yield "<h2>Plots</h2>"
    for path in paths:
        description = PLOTS.get(path.stem, path.stem)
        image = base64.b64encode(path.read_bytes()).decode()
        caption = f"{description} (plots/{path.stem}.svg)"
        yield (
            f'<figure><img alt="{_text(description)}" src="data:image/svg+xml;base64,{image}">'
            f"<figcaption>{_text(caption)}</figcaption></figure>"
        )


def _mistakes(folder: Path, results: JsonObject) -> Iterator[str]:
    """Yield the predictions with the largest losses on test or dev, among the labelled examples with a wrong answer."""
    headline = headline_split(results)
    if headline is None or results["task"] not in SPECS:
        return
    split, card = headline[0], SPECS[results["task"]].card
    mistakes = (
        prediction
        for prediction in read_predictions(folder, split)
        if prediction["correct"] is not True and prediction["label"] is not None
    )
    worst = list(islice(mistakes, MAX_MISTAKES))  # the file has the worst mistakes first
    if not worst:
        return
    yield f"<h2>The worst mistakes on {_text(split)}</h2>"
    yield "<p>The command below each shows what the prediction rests on.</p>"
    for mistake in worst:
        yield _mistake(folder, card, results, mistake)


def _mistake(folder: Path, card: Card, results: JsonObject, mistake: JsonObject) -> str:
    """Return the HTML of one mistake: input, label, prediction with its probability, and the command to explain it.

    Args:
        folder: The run folder.
        card: How the task describes its inputs and mistakes.
        results: Content of results.json.
        mistake: A line of the file of predictions.
    """
    label, predicted = card.describe_mistake(mistake, results, _format_number)
    probability = mistake["answer"].get("probability") if isinstance(mistake.get("answer"), dict) else None
    confidence = f" ({format_metric('probability', as_float(probability))})" if probability else ""
    command = look_command(folder, mistake["input"], pairs=card.takes_pairs)
    command_block = f'<pre tabindex="0"><code>{_text(command)}</code></pre>' if command else ""
    return (
        f"<article><p><bdi>{_text(_shorten(card.input_text(mistake['input'])))}</bdi></p>"
        f'<p><span class="soft">label</span> {_text(_shorten(str(label)))} · '
        f'<span class="soft">prediction</span> {_text(_shorten(str(predicted)))}{_text(confidence)}</p>'
        f"{command_block}</article>"
    )


def look_command(folder: Path, model_input: object, *, pairs: bool = True) -> str:
    """Return the command that shows an input in the explorer, or "" if the input is empty, too long or not printable.

    Args:
        folder: The run folder.
        model_input: A text, a pair, words, a question with its context, or a prompt with its choices.
        pairs: Whether a list of two texts is a pair of texts. If false, it is a list of two words.

    >>> look_command(Path("run"), ["one text", "its pair"])
    "heedful look run 'one text' --pair 'its pair'"
    """
    options: list[tuple[str, str]] = []
    match model_input:
        case str(text):
            pass
        case [str(text), str(pair)] if pairs:
            options = [("--pair", pair)]
        case {"question": str(question), "context": str(text)}:
            options = [("--question", question)]
        case {"prompt": str(text), "choices": list(choices)}:
            options = [("--choice", str(choice)) for choice in choices]
        case list(words):
            text = " ".join(map(str, words))
        case _:
            return ""
    command = command_line("heedful look", [str(folder), text], options)
    is_printable = all(value.isprintable() for value in (text, *(value for _, value in options)))
    return command if text.strip() and is_printable and len(command) <= MAX_COMMAND_CHARS else ""


def _data(results: JsonObject) -> Iterator[str]:
    """Yield the number of examples of each split, how the data was read, and the problems found in it."""
    data = results.get("data") or {}
    if not data.get("splits"):
        return
    yield "<h2>Data</h2>"
    rows = [([name, f"{split['examples']:,}"], False) for name, split in data["splits"].items()]
    yield _table(["split", "examples"], rows)
    if stated := data.get("stated"):
        yield f"<ul>{''.join(f'<li>{_text(sentence)}</li>' for sentence in stated)}</ul>"
    check = data.get("check")
    if check is None:
        yield "<p>The data was not checked for problems: <code>heedful check DATA</code> does it.</p>"
        return
    yield f"<p><strong>{_text(check['verdict'])}</strong></p>"
    if check["problems"]:
        problems = [line.removeprefix("! ") for line in check["problems"]]
        yield f"<ul>{''.join(f'<li>{_text(problem)}</li>' for problem in problems)}</ul>"


def _table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> str:
    """Return a table in HTML. All columns except the first one contain numbers.

    Args:
        head: Cells of the head. An empty cell has no heading.
        rows: (cells, whether the row is emphasised) for each row.
    """
    attributes = ["", *['class="number"'] * (len(head) - 1)]  # HTML attribute of each cell in a row
    head_cells = "".join(
        f'<th scope="col" {attribute}>{_text(cell)}</th>' if cell else "<td></td>"
        for attribute, cell in zip(attributes, head, strict=True)
    )
    body = ""
    for cells, is_emphasised in rows:
        emphasis = ' class="main"' if is_emphasised else ""
        columns = [f"<td {attribute}>{_text(cell)}</td>" for attribute, cell in zip(attributes, cells, strict=True)]
        body += f"<tr{emphasis}>{''.join(columns)}</tr>"
    return f'<div class="scrolled"><table><thead><tr>{head_cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _format_number(value: object) -> str:
    """Format a number of a prediction, such as a score, with four digits."""
    return f"{as_float(value):.4g}"


def _shorten(text: str) -> str:
    """Return a text, cut after MAX_TEXT_CHARS characters. A text that is cut has its number of characters added."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]} … ({len(text):,} characters)"


def _text(text: object) -> str:
    """Return a text as escaped HTML on one line. Characters that are not printable are written as \\uXXXX.

    They include control characters and changes of the writing direction.
    """
    printable = "".join(
        character if character.isprintable() or character in "\n\t" else f"\\u{ord(character):04x}"
        for character in str(text)
    )
    return html.escape(re.sub(r"\s+", " ", printable))

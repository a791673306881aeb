"""Terminal output of all commands: predictions and tables on stdout, notes and warnings on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from heedful.errors import HeedfulError, HeedfulWarning

if TYPE_CHECKING:
    from heedful.checkpoint import ModelBundle
    from heedful.data import DataSettings
    from heedful.tasks.answering import Answer


MAX_INPUT_CHARS = 500  # longer inputs are cut
MAX_CELL_CHARS = 100  # longer texts in a table are cut
MAX_WIDTH = 100  # maximum width of prose on a terminal, in columns
MAX_UNBROKEN = 24  # maximum width of a word that a narrow table does not break, in columns
# lines that begin with one of these are commands to copy, which a line break would damage, so they are not wrapped
COMMANDS = ("heedful ", "python ", "pip ", ". ", "import ", "print(")
EngineInput: TypeAlias = str | tuple[str, str] | dict[str, Any]  # a text, a pair, or a dict with a question or choices


def show_answer(item: EngineInput, answer: Answer, top_k: int) -> None:
    """Print an input, and below it a table of its prediction.

    Texts of the input and of the model folder (labels, tokens, notes) are escaped, since both may be untrusted.

    Args:
        item: Input of the engine.
        answer: The engine's answer.
        top_k: Number of classes to list. All predicted classes and the whole prediction set are listed in any case.
    """
    match item:
        case {"question": question, "context": _}:
            print_text(_shorten(question))
        case {"prompt": prompt, "choices": _}:
            print_text(_shorten(prompt))
        case _:
            print_text(_shorten(item) if isinstance(item, str) else " | ".join(map(_shorten, item)))
    if rows := list(_answer_rows(item, answer, top_k)):
        print_table(rows, indent=2)
    if answer.get("label") == "":
        print("  (no label: the most probable one is below --min-confidence)")
    if stage := answer.get("stage"):
        print(f"  (answered by stage {stage} of the cascade)")
    if answer_note := answer.get("note"):
        print(f"  ({escape(answer_note)})")
    if answer.get("windows", 1) > 1:
        print(f"  (split into {answer['windows']} windows: the text is longer than the model's maximum)")
    if answer.get("truncated_tokens"):
        print(f"  (truncated by {answer['truncated_tokens']} tokens: the text is longer than the model's maximum)")
    print("")


def _shorten(text: str) -> str:
    """Escape a text for the terminal, and cut it if it is long."""
    if len(text) <= MAX_INPUT_CHARS:
        return escape(text)
    return f"{escape(text[:MAX_INPUT_CHARS])} ... ({len(text):,} characters)"


def text_cell(text: str, text_pair: str | None) -> str:
    """Return the beginning of a text or pair, for a table."""
    joined = text if text_pair is None else f"{text} | {text_pair}"
    return escape(joined if len(joined) <= MAX_CELL_CHARS else joined[: MAX_CELL_CHARS - 1] + "…")


def _answer_rows(item: EngineInput, answer: Answer, top_k: int) -> Iterator[list[str]]:
    """Yield the rows of a table for an answer of any kind of head. See `show_answer` for the arguments."""
    match answer:
        case {"masks": masks}:
            for mask_number, mask in enumerate(masks, start=1):
                for token in mask["candidates"]:
                    row = [percent(token["probability"]), escape(token["text"] or token["token"])]
                    yield [str(mask_number), *row] if len(masks) > 1 else row
        case {"is_next_probability": probability}:
            yield [percent(probability), "the second text follows the first"]
        case {"entities": entities, "words": words}:
            for entity in entities or words:
                yield [percent(entity["probability"]), escape(entity["label"] or ""), escape(entity["text"])]
        case {"choice": _, "probabilities": list(probabilities)} if isinstance(item, dict):
            ranked = sorted(zip(probabilities, item["choices"], strict=True), key=lambda pair: -pair[0])
            yield from ([percent(probability), escape(choice)] for probability, choice in ranked)
        case {"probabilities": dict(probabilities)}:
            yield from _class_rows(answer, probabilities, top_k)
        case {"values": values}:
            yield from ([f"{value:.4f}", escape(label)] for label, value in values.items())
        case {"answer": text, "score": score, "no_answer_score": no_answer}:
            yield ["answer", escape(text) or "(none)"]
            yield ["score", "none" if score is None else f"{score:.3f}", f"(no answer: {no_answer:.3f})"]
        case {"text": _, "complete": _}:
            for generated in (answer, *answer.get("alternatives", [])):
                end = "" if generated["complete"] else "(not finished)"
                yield [escape(generated["text"]) or "(nothing)", f"{generated['log_probability']:.2f}", end]
        case {"similarity": similarity}:
            yield [f"{similarity:.4f}", "cosine similarity"]
        case {"vector": vector, "tokens": tokens}:
            yield [f"{len(vector)} numbers", " ".join(f"{x:.4f}" for x in vector[:6]) + " ...", f"{tokens} tokens"]
        case _:
            for name, value in answer.items():
                yield [f"{value:.4f}" if isinstance(value, float) else escape(str(value)), escape(name)]


def _class_rows(answer: Answer, probabilities: dict[str, float], top_k: int) -> Iterator[list[str]]:
    """Yield rows of classes: the predicted classes, the rest of the prediction set, then others by probability.

    Predicted classes come first, since with a threshold for each class they need not be the most probable ones.
    """
    predicted = answer.get("labels", [answer.get("label")])
    prediction_set = answer.get("prediction_set", [])
    remarks = dict.fromkeys(prediction_set, "in the prediction set") | dict.fromkeys(predicted, "predicted")
    order = ("predicted", "in the prediction set", "")
    rows = [(label, probability, remarks.get(label, "")) for label, probability in probabilities.items()]
    rows.sort(key=lambda row: (order.index(row[2]), -row[1]))
    for label, probability, remark in rows[: max(top_k, sum(bool(remark) for _, _, remark in rows))]:
        yield [percent(probability), escape(label), remark]


def model_facts(bundle: ModelBundle) -> dict[str, object]:
    """Return the source, the family, the head and the parameter count of a model."""
    head = bundle.config.head
    return {
        "read": bundle.source,
        "family": bundle.config.family,
        "head": f"{head.kind} head" if head else "no head",
        "parameters": bundle.count(),
    }


def print_table(
    rows: Sequence[Sequence[str]],
    *,
    head: Sequence[str] | None = None,
    right: Collection[int] = (),
    indent: int = 0,
) -> None:
    """Print rows as a table.

    Args:
        rows: Cells of each row. Rows may have different lengths, and may be longer than `head`.
        head: Titles of the first columns. If None, the table has no line of titles.
        right: Indices of right-aligned columns.
        indent: Number of spaces before each line.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=head is not None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in range(max(map(len, [*rows, head or []]), default=0)):
        title = Text(head[column], style="bold") if head and column < len(head) else ""
        cells = [row[column] for row in (*rows, head or ()) if column < len(row)]
        longest_word = max((len(word) for cell in cells for word in cell.split()), default=0)
        table.add_column(
            title,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column in right,
            min_width=min(longest_word, MAX_UNBROKEN),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    # a pipe has no width; by default rich would fit the table to another terminal, or to 80 columns
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def percent(share: float | None) -> str:
    """Format a probability in percent; None is "".

    >>> percent(0.985), percent(0.05)
    (' 98.5 %', '  5.0 %')
    """
    return "" if share is None else f"{100 * share:5.1f} %"


def escape(text: str) -> str:
    r"""Escape control characters, so that untrusted text cannot control the terminal.

    >>> print(escape("a\x1bb"))
    a\x1bb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units.

    >>> format_duration(42.0), format_duration(150.0), format_duration(9000.0)
    ('42 s', '2 min 30 s', '2 h 30 min')
    """
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def print_json(value: object) -> None:
    """Print a value as JSON on one line, in ASCII, which every encoding of stdout can represent.

    Raises:
        HeedfulError: If a number is not finite.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        raise HeedfulError("the result has a number that is not finite, which JSON cannot represent") from None
    print(text)


def note(text: str) -> None:
    """Print a message on stderr. See `print_text`."""
    print_text(text, file=sys.stderr)


def print_text(text: str, *, file: TextIO | None = None, mark: str | None = None) -> None:
    """Print prose. On a terminal, lines are wrapped at words, except for lines that begin with a command.

    Args:
        text: Lines of prose.
        file: The stream. If None, stdout.
        mark: Beginning of the lines that are warnings. Warnings are coloured on a terminal, unless NO_COLOR is set. If
            None, no line is a warning.
    """
    stream = sys.stdout if file is None else file
    if stream is None or not stream.isatty():  # stdout is None in a process without a console
        print(text, file=stream)
        return
    width = min(MAX_WIDTH, shutil.get_terminal_size().columns)
    colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for line in text.split("\n"):
        wrapped = wrap_line(line, width)
        is_coloured = colours and mark is not None and line.startswith(mark)
        print(f"\x1b[33m{wrapped}\x1b[0m" if is_coloured else wrapped, file=stream)


def wrap_line(line: str, width: int) -> str:
    """Wrap a line at words, and indent every part like the whole line. Commands are not wrapped.

    >>> print(wrap_line("  two texts of this data are equal", 20))
      two texts of this
      data are equal
    """
    text = line.lstrip(" ")
    if len(line) <= width or text.startswith(COMMANDS):
        return line
    indent = line[: len(line) - len(text)]
    parts = textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(parts)


def note_data_settings(settings: DataSettings) -> None:
    """Print the names of a run's data settings that differ from the defaults."""
    from heedful.data import DataOptions, DataSettings
    from heedful.runs.overrides import changed_settings

    if names := changed_settings(DataOptions(data=settings), DataOptions(data=DataSettings(dev_fraction=0.0))):
        note(escape(f"data settings of the run are used: {', '.join(names)}; change them with --data.NAME=VALUE"))


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on stderr, without the code line of a HeedfulWarning. Replaces `warnings.showwarning`."""
    if issubclass(category, HeedfulWarning):
        note(f"note: {message}")
    else:
        note(warnings.formatwarning(message, category, filename, lineno).rstrip())

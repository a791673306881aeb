"""What the command line shows: answers and tables on stdout, notes and warnings on stderr."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from heedful.errors import HeedfulError, HeedfulWarning

if TYPE_CHECKING:
    from heedful.checkpoint import Loaded
    from heedful.data import DataSettings


MOST = 500  # characters of an input that are shown again


def show_answer(given: Any, answer: dict[str, Any], top_k: int) -> None:
    """An answer for a person: the input, and below it what was found."""
    match given:
        case {"question": question, "context": _}:
            print(_input(question))
        case {"prompt": prompt, "choices": _}:
            print(_input(prompt))
        case _:
            print(_input(given) if isinstance(given, str) else " | ".join(map(_input, given)))
    if rows := list(_rows(given, answer, top_k)):
        print_table(rows, indent=2)
    if remark := answer.get("note"):
        print(f"  ({remark})")
    if answer.get("windows", 1) > 1:
        print(f"  (read in {answer['windows']} windows: it is longer than the model reads at once)")
    if answer.get("cut"):
        print(f"  ({answer['cut']} tokens at its end were cut off: it is longer than the model reads)")
    print("")


def _input(text: str) -> str:
    return escape(text) if len(text) <= MOST else f"{escape(text[:MOST])} ... ({len(text):,} characters)"


def _rows(given: Any, answer: dict[str, Any], top_k: int) -> Iterator[list[str]]:
    match answer:
        case {"masks": masks}:
            for number, mask in enumerate(masks, start=1):
                for each in mask["tokens"]:
                    row = [_percent(each["probability"]), escape(each["text"] or each["token"])]
                    yield [str(number), *row] if len(masks) > 1 else row
        case {"follows": probability}:
            yield [_percent(probability), "the second text follows the first"]
        case {"entities": entities, "words": words}:
            for each in entities or words:
                yield [_percent(each["probability"]), each["label"] or "", escape(each.get("text", each.get("word")))]
        case {"choice": _, "probabilities": list(probabilities)}:
            for probability, choice in sorted(zip(probabilities, given["choices"], strict=True), key=lambda p: -p[0]):
                yield [_percent(probability), escape(choice)]
        case {"probabilities": dict(probabilities)}:
            chosen = answer.get("labels", [answer.get("label")])
            for label, probability in sorted(probabilities.items(), key=lambda pair: -pair[1])[
                : max(top_k, len(chosen))
            ]:
                yield [_percent(probability), escape(label), "*" if label in chosen else ""]
        case {"numbers": numbers}:
            for label, value in numbers.items():
                yield [f"{value:.4f}", escape(label)]
        case {"answer": text, "score": score, "no_answer_score": nothing}:
            yield ["answer", escape(text) or "(none)"]
            yield ["score", "none" if score is None else f"{score:.3f}", f"(no answer: {nothing:.3f})"]
        case {"text": _, "complete": _}:
            for each in (answer, *answer.get("others", [])):
                end = "" if each["complete"] else "(not finished)"
                yield [escape(each["text"]) or "(nothing)", f"{each['log_probability']:.2f}", end]
        case {"similarity": similarity}:
            yield [f"{similarity:.4f}", "cosine of both vectors"]
        case {"vector": vector, "tokens": tokens}:
            yield [f"{len(vector)} numbers", " ".join(f"{x:.4f}" for x in vector[:6]) + " ...", f"{tokens} tokens"]
        case _:
            for name, value in answer.items():
                yield [f"{value:.4f}" if isinstance(value, float) else escape(str(value)), name]


def model_facts(loaded: Loaded) -> dict[str, Any]:
    head = loaded.config.head
    return {
        "read": loaded.source,
        "family": loaded.config.family,
        "head": f"{head.kind} head" if head else "no head",
        "parameters": loaded.count(),
    }


def print_table(
    rows: list[list[str]], *, head: list[str] | None = None, right: Iterable[int] = (), indent: int = 0
) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=head is not None, padding=(0, 2, 0, 0), pad_edge=False)
    for number in range(max(map(len, [*rows, head or []]), default=0)):
        title = Text(head[number], style="bold") if head else ""
        table.add_column(title, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:6.1%}"


def escape(text: str) -> str:
    """Control characters written out, so that no text steers the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_duration(seconds: float) -> str:
    """In words.

    >>> duration(42.0), duration(150.0), duration(9000.0)
    ('42 s', '2 min 30 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def write_json(value: Any) -> None:
    """Print a JSON document on one line, in ASCII whatever the encoding of stdout."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        raise HeedfulError("the result holds a number that is not finite, which JSON has no form for") from None
    print(text)


def note(text: str) -> None:
    print(text, file=sys.stderr)


def note_data_settings(usual: DataSettings) -> None:
    """How data are read since a run read its own so."""
    from heedful.data import DataOptions, DataSettings
    from heedful.runs.finetune.settings import changed_settings

    if kept := changed_settings(DataOptions(data=usual), DataOptions(data=DataSettings(dev_fraction=0.0))):
        note(escape(f"data are read as the run read its own: {', '.join(kept)}; change that by --data.NAME=VALUE"))


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if issubclass(category, HeedfulWarning):
        note(f"note: {message}")
    else:
        note(warnings.formatwarning(message, category, filename, lineno).rstrip())

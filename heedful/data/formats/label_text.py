"""Files with a label and a text on each line: `LABEL text` (TREC), or fastText's `__label__x __label__y text`."""

from __future__ import annotations

import re
from collections import Counter

from heedful.data.bad_rows import BadRow, RowErrors, Skip
from heedful.data.formats.tables import Rows, Table
from heedful.data.formats.text_files import NoRowsError, TextFile, read_head, read_text_lines

PREFIX = "__label__"
PREFIXED = re.compile(rf"\s*{PREFIX}(\S+)")
COARSE_AND_FINE = re.compile(r"([A-Za-z]\w*):\w+\Z")


def read_table(file: TextFile, row_errors: RowErrors, several: bool | None) -> Table:
    """Open a file as a table with the columns label and text, or labels (a list) and text.

    Args:
        file: the file.
        row_errors: handles bad rows.
        several: whether a line may have any number of labels; None: yes if some line has more than one.
    """
    top = _head(file)
    prefixed = has_prefix(top)
    if several is None:
        several = prefixed and any(len(_prefixed(line)[0]) > 1 for _, line in read_text_lines(file, RowErrors(Skip())))

    def rows(row_errors: RowErrors) -> Rows:
        for number, line in read_text_lines(file, row_errors):
            if not line.strip():
                continue
            labels, text = _prefixed(line) if prefixed else _first_word(line)
            if reason := _wrong(labels, text, prefixed, several):
                row_errors.reject(
                    BadRow(file=file.display_name, line=number, column="", reason=reason, text=line[:200])
                )
            else:
                yield number, {"labels": labels, "text": text} if several else {"label": labels[0], "text": text}

    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{file.display_name}: has no rows")
    notes = [f"{file.path.name}: {_form(prefixed, several)}, then its text (format=label-text)"]
    if fine := next((match for line in top if (match := COARSE_AND_FINE.match(_first_word(line)[0][0]))), None):
        notes.append(f'labels are kept whole; label_until=":" makes "{fine[0]}" the coarse label "{fine[1]}"')
    return Table(
        display_name=file.display_name,
        names=("labels" if several else "label", "text"),
        first_row=first[1],
        rows=rows,
        notes=tuple(notes),
    )


def _form(prefixed: bool, several: bool) -> str:
    if not prefixed:
        return "each line has a label"
    labels = "any number of labels that begin" if several else "a label that begins"
    return f"each line has {labels} with {PREFIX}"


def _wrong(labels: list[str], text: str, prefixed: bool, several: bool) -> str:
    if not several and len(labels) != 1:
        more = ": --data.columns.labels=labels reads any number" if labels else f" that begins with {PREFIX}"
        return f"has {len(labels) or 'no'} label{'s' if labels else ''}, expected one{more}"
    return (
        "" if text else f"has {'labels' if prefixed else 'one word'} and no text, expected a label, a space and a text"
    )


def _first_word(line: str) -> tuple[list[str], str]:
    """Split a line into its first word, the label, and the rest, the text.

    >>> _first_word("DESC:manner How did it begin ?")
    (['DESC:manner'], 'How did it begin ?')
    """
    label, *rest = line.split(maxsplit=1) or [""]
    return [label], rest[0].strip() if rest else ""


def _prefixed(line: str) -> tuple[list[str], str]:
    """Split a line of fastText into its labels and its text.

    >>> _prefixed("__label__tea __label__milk How hot ?")
    (['tea', 'milk'], 'How hot ?')
    """
    labels: dict[str, None] = {}
    start = 0
    while match := PREFIXED.match(line, start):
        labels[match[1]] = None
        start = match.end()
    return list(labels), line[start:].strip()


# ---------------------------------------------------------------------------------------------------- detection


def _head(file: TextFile) -> list[str]:
    head = read_head(file)
    lines = head.split("\n")
    return [line.strip() for line in (lines[:-1] if len(lines) > 1 and len(head) > 1000 else lines) if line.strip()]


def has_prefix(top: list[str]) -> bool:
    """Whether most lines begin with `__label__`."""
    return 2 * sum(line.startswith(PREFIX) for line in top) > len(top)


def is_label_text(file: TextFile, *, strict: bool) -> bool:
    """Whether each line at the beginning of a file has a label and a text.

    Args:
        file: the file.
        strict: accept only labels like `__label__x` and `ABBR:exp`; else any first words that all occur repeatedly.
    """
    top = _head(file)
    if not top or has_prefix(top):
        return bool(top)
    split = [_first_word(line) for line in top]
    if not all(text for _, text in split):
        return False
    counts = Counter(labels[0] for labels, _ in split)
    if len(counts) > 1 and all(COARSE_AND_FINE.match(label) for label in counts):
        return True
    return not strict and len(counts) > 1 and min(counts.values()) > 1


def is_tab_separated(file: TextFile) -> bool:
    """Whether all lines at the beginning of a file have the same number of tabs, one or more."""
    tabs = {line.count("\t") for line in _head(file)}
    return len(tabs) == 1 and tabs != {0}

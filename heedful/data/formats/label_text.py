"""Files with a label and a text on each line: `LABEL text` (TREC), or fastText's `__label__x __label__y text`."""

from __future__ import annotations

import re
from collections import Counter

from heedful.data.bad_rows import BadRow, RowErrors, Skip
from heedful.data.formats.tables import Rows, Table
from heedful.data.formats.text_files import NoRowsError, TextFile, read_head, read_text_lines

LABEL_PREFIX = "__label__"
PREFIXED_LABEL = re.compile(rf"\s*{LABEL_PREFIX}(\S+)")
COARSE_AND_FINE = re.compile(r"([A-Za-z]\w*):\w+\Z")


def read_table(file: TextFile, row_errors: RowErrors, multi_label: bool | None) -> Table:
    """Open a file as a table with the columns label and text, or labels (a list) and text.

    Args:
        file: the file.
        row_errors: handles bad rows.
        multi_label: whether a line may have any number of labels. If None, it may if some line has several.

    Raises:
        NoRowsError: If the file has no rows.
    """
    head = _head_lines(file)
    prefixed = has_prefix(head)
    if multi_label is None:
        all_lines = read_text_lines(file, RowErrors(Skip()))
        multi_label = prefixed and any(len(_split_prefixed(line)[0]) > 1 for _, line in all_lines)

    def rows(row_errors: RowErrors) -> Rows:
        for line_number, line in read_text_lines(file, row_errors):
            if not line.strip():
                continue
            labels, text = _split_prefixed(line) if prefixed else _split_first_word(line)
            if reason := _line_problem(labels, text, prefixed, multi_label):
                bad = BadRow(file=file.display_name, line=line_number, column="", reason=reason, text=line[:200])
                row_errors.reject(bad)
            elif multi_label:
                yield line_number, {"labels": labels, "text": text}
            else:
                yield line_number, {"label": labels[0], "text": text}

    first = next(rows(row_errors), None)
    if first is None:
        raise NoRowsError(f"{file.display_name}: has no rows")
    notes = [f"{file.path.name}: {_describe_format(prefixed, multi_label)}, then its text (format=label-text)"]
    fine_labels = (COARSE_AND_FINE.match(_split_first_word(line)[0][0]) for line in head)
    if fine := next(filter(None, fine_labels), None):
        notes.append(f'labels are kept whole; label_until=":" makes "{fine[0]}" the coarse label "{fine[1]}"')
    return Table(
        display_name=file.display_name,
        names=("labels" if multi_label else "label", "text"),
        first_row=first[1],
        rows=rows,
        notes=tuple(notes),
    )


def _describe_format(prefixed: bool, multi_label: bool) -> str:
    if not prefixed:
        return "each line has a label"
    labels = "any number of labels that begin" if multi_label else "a label that begins"
    return f"each line has {labels} with {LABEL_PREFIX}"


def _line_problem(labels: list[str], text: str, prefixed: bool, multi_label: bool) -> str:
    """Return why a line cannot be used, or "" if it can."""
    if not multi_label and not labels:
        return f"has no label, expected one that begins with {LABEL_PREFIX}"
    if not multi_label and len(labels) > 1:
        return f"has {len(labels)} labels, expected one: --data.columns.labels=labels reads any number"
    if not text:
        return f"has {'labels' if prefixed else 'one word'} and no text, expected a label, a space and a text"
    return ""


def _split_first_word(line: str) -> tuple[list[str], str]:
    """Split a line into a list with its label, which is the first word, and the text after it.

    >>> _split_first_word("DESC:manner How did it begin ?")
    (['DESC:manner'], 'How did it begin ?')
    """
    label, *rest = line.split(maxsplit=1) or [""]
    return [label], rest[0].strip() if rest else ""


def _split_prefixed(line: str) -> tuple[list[str], str]:
    """Split a line of fastText into its labels and its text.

    >>> _split_prefixed("__label__tea __label__milk How hot ?")
    (['tea', 'milk'], 'How hot ?')
    """
    labels: dict[str, None] = {}
    start = 0
    while match := PREFIXED_LABEL.match(line, start):
        labels[match[1]] = None
        start = match.end()
    return list(labels), line[start:].strip()


# ---------------------------------------------------------------------------------------------------- detection


def _head_lines(file: TextFile) -> list[str]:
    """Return the lines at the beginning of a file that are not blank."""
    head = read_head(file)
    lines = head.split("\n")
    if len(lines) > 1 and len(head) > 1000:
        del lines[-1]  # may be cut off
    return [line.strip() for line in lines if line.strip()]


def has_prefix(lines: list[str]) -> bool:
    """Whether most lines begin with `__label__`."""
    return 2 * sum(line.startswith(LABEL_PREFIX) for line in lines) > len(lines)


def is_label_text(file: TextFile, *, strict: bool) -> bool:
    """Whether each line at the beginning of a file has a label and a text.

    Args:
        file: the file.
        strict: whether labels must look like `__label__x` or `ABBR:exp`. If false, first words are also accepted as
            labels if each of them occurs in several lines.
    """
    head = _head_lines(file)
    if not head or has_prefix(head):
        return bool(head)
    split = [_split_first_word(line) for line in head]
    if not all(text for _, text in split):
        return False
    counts = Counter(labels[0] for labels, _ in split)
    if len(counts) > 1 and all(COARSE_AND_FINE.match(label) for label in counts):
        return True
    return not strict and len(counts) > 1 and min(counts.values()) > 1


def is_tab_separated(file: TextFile) -> bool:
    """Whether all lines at the beginning of a file have equally many tabs, at least one."""
    tab_counts = {line.count("\t") for line in _head_lines(file)}
    return len(tab_counts) == 1 and tab_counts != {0}

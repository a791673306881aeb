"""CoNLL files: one word with its tag per line, a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from heedful.data.bad_rows import BadRow, RowErrors, shown
from heedful.data.examples import TaggedExample
from heedful.data.formats.text_files import TextFile, all_lines
from heedful.data.tag_schemes import OUTSIDE
from heedful.errors import DataError

BORDER = "-DOCSTART-"
TAG = re.compile(r"(?:O|[BIESLUM]-.+)\Z")
MANY = 10_000  # different tags, at most
WORDS = {"word", "words", "token", "tokens", "form"}  # names of the word column in a header, compared without case
TAGS = {"tag", "tags", "label", "labels", "pos", "upos", "xpos", "pos_tag", "pos_tags"}
TAGS |= {"ner", "ner_tag", "ner_tags", "entity", "chunk", "chunk_tag", "chunk_tags"}


def read_sentences(
    file: TextFile, row_errors: RowErrors, word: int = 1, tag: int = 0, *, header: bool = False
) -> Iterator[TaggedExample]:
    """Yield the sentences of a file; a sentence with a bad line is a bad row, a -DOCSTART- line separates documents.

    Args:
        file: the file.
        row_errors: handles bad rows.
        word: number of the word column, from 1.
        tag: number of the tag column, from 1; 0: the last column.
        header: whether the first line names the columns.
    """
    words: list[str] = []
    tags: list[str] = []
    start = width = size = 0
    bad: BadRow | None = None
    for number, text, wrong in all_lines(file):
        line = text.strip(" \t\r\n\v\f") if wrong is None else "?"
        cells = split_columns(line)
        if not line or cells[0] == BORDER:
            yield from _sentence(file, start, words, tags, bad, row_errors)
            words, tags, size, bad = [], [], 0, None
            continue
        if header:
            header = False
            continue
        start = start if words or bad else number
        width = width or (len(cells) if wrong is None and len(cells) > 1 else 0)
        size += len(line)
        reason = _reason(cells, width, word, tag) if size <= file.max_row_bytes // 10 else missing_blank_line(file)
        if wrong is not None or reason:
            bad = bad or wrong or BadRow(file=file.display_name, line=number, column="", reason=reason, text=line[:200])
        elif bad is None:
            words.append(cells[word - 1])
            tags.append(cells[tag - 1])
    yield from _sentence(file, start, words, tags, bad, row_errors)


def split_columns(line: str) -> list[str]:
    """Split a line at tabs, or at spaces if it has no tab; other white space belongs to a word."""
    if "\t" in line:
        return [cell.strip(" ") for cell in line.split("\t")]
    return [cell for cell in line.split(" ") if cell] or [""]


def _reason(cells: list[str], width: int, word: int, tag: int) -> str:
    if len(cells) < 2:
        return "has one column, expected a word and its tag"
    if len(cells) != width:
        return f"has {len(cells)} columns, expected {width} as in the lines before"
    if max(word, tag) > width:
        return f"has {width} columns, and column {max(word, tag)} was asked for"
    return "" if all((cells[word - 1], cells[tag - 1])) else "has an empty word or tag"


def missing_blank_line(file: TextFile) -> str:
    return (
        f"a sentence of more than {file.max_row_bytes // 10:,} characters: is a blank line missing between sentences?"
    )


def _sentence(
    file: TextFile, start: int, words: list[str], tags: list[str], bad: BadRow | None, row_errors: RowErrors
) -> Iterator[TaggedExample]:
    if bad is not None:
        row_errors.reject(bad)
    elif words:
        yield TaggedExample(file=file.display_name, line=start, words=tuple(words), tags=tuple(tags))


def _rows(lines: Iterable[str]) -> list[list[str]]:
    rows = [split_columns(line) for raw_line in lines if (line := raw_line.strip(" \t\r\v\f"))]
    return [cells for cells in rows if cells[0] != BORDER]


def has_header(head: str, word: int = 1, tag: int = 0, *, blank_lines: bool = False) -> bool:
    """Whether the first line names the columns: known names, and no later line has the last one as its tag.

    Args:
        head: beginning of the file.
        word: number of the word column, from 1.
        tag: number of the tag column; 0: the last column.
        blank_lines: require blank lines, which separate sentences and are rare in tables.
    """
    lines = head.strip().split("\n")
    first, *others = _rows(lines) or [[""]]
    if not others or len(first) < max(2, word, tag) or (blank_lines and all(line.strip() for line in lines)):
        return False
    tags = {cells[tag - 1] for cells in others if len(cells) == len(first)}
    named = first[word - 1].casefold() in WORDS and first[tag - 1].casefold() in TAGS
    return named and first[tag - 1] not in tags and not any(" " in cell for cell in tags)


def is_conll(head: str) -> bool:
    """Whether the beginning of a file has columns of words whose last column has tags like B-x."""
    rows = _rows(head.split("\n")[:400][:-1])[has_header(head, blank_lines=True) :]
    return len(rows) > 1 and all(len(cells) == len(rows[0]) > 1 and TAG.match(cells[-1]) for cells in rows)


# ---------------------------------------------------------------------------------------------------- schemes


@dataclass(frozen=True, kw_only=True, slots=True)
class TagScheme:
    """Scheme and labels of a file's tags."""

    name: str  # IOB1, IOB2, IOBES, BILOU, IO; "": the tags are plain labels
    labels: tuple[str, ...]  # O, then B and I of each type; or the plain labels, sorted
    malformed_entities: int  # entities that begin with I-, E- or L- in a scheme with B-

    @property
    def note(self) -> str:
        """Sentence for the user."""
        if not self.name:
            return f"tags are plain labels: {len(self.labels)} of them"
        text = f"tags are {self.name}" + ("" if self.name == "IOB2" else ", read as IOB2")
        if self.malformed_entities:
            text += (
                f"; {self.malformed_entities} entities do not begin as they should and are read as conlleval reads them"
            )
        return text


def detect_scheme(examples: Iterable[TaggedExample]) -> TagScheme:
    """Detect the scheme of all tags, in constant memory.

    IOB1 has B-x only after another x; in IOB2 every entity begins with B-x; IOBES has S- and E-, BILOU U- and L-.

    Raises:
        DataError: If there are too many different tags, or only some of them are marked like B-x.
    """
    seen: dict[str, str] = {}  # tag to its first file:line
    parts: dict[str, tuple[str, str]] = {}  # tag to (mark, type); ("", "") outside entities
    late = bare = 0  # B- tags that IOB1 would write I-; entities that begin with I-, E- or L-
    for example in examples:
        before, open_ = "", False
        for tag in example.tags:
            if tag not in seen:
                seen[tag] = f"{example.file}:{example.line}"
                parts[tag] = (tag[0], tag[2:]) if tag != OUTSIDE and TAG.match(tag) else ("", "")
                if len(seen) > MANY:
                    raise DataError(f"{seen[tag]}: more than {MANY:,} different tags: is this the column of tags?")
            mark, kind = parts[tag]
            if not mark:
                before, open_ = "", False
                continue
            same = open_ and before == kind
            late += mark == "B" and not same
            bare += mark in "IELM" and not same
            before, open_ = kind, mark in "BIM"
    plain = {tag for tag in seen if not TAG.match(tag)}
    if plain and len(plain) < len(seen.keys() - {OUTSIDE}) and any(tag in plain for tag in seen):
        tag = min(plain)
        raise DataError(f"{seen[tag]}: the tag {shown(tag)} is neither O nor of a form like B-x, but others are")
    kinds = sorted({tag[2:] for tag in seen if tag != OUTSIDE})
    if plain or not kinds:
        return TagScheme(name="", labels=tuple(sorted(seen)), malformed_entities=0)
    name = _name({tag[0] for tag in seen if tag != OUTSIDE}, late, bare)
    labels = (OUTSIDE, *(f"{mark}-{kind}" for kind in kinds for mark in "BI"))
    return TagScheme(name=name, labels=labels, malformed_entities=bare if name in ("IOB2", "IOBES", "BILOU") else 0)


def _name(marks: set[str], late: int, bare: int) -> str:
    if marks & set("ESM") and marks & set("LU"):
        raise DataError(f"tags with the marks {', '.join(sorted(marks))}: neither IOBES nor BILOU")
    if marks & set("ESM"):
        return "IOBES"
    if marks & set("LU"):
        return "BILOU"
    if "B" not in marks:
        return "IO or IOB1"
    return "IOB1" if bare and not late else "IOB2"

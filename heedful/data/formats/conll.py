"""CoNLL files, with a word and its tag on each line and blank lines between sentences: reading and detection.

Also the detection of the tagging scheme of a data set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from heedful.data.bad_rows import BadRow, RowErrors, shown
from heedful.data.examples import TaggedExample
from heedful.data.formats.text_files import TextFile, all_lines
from heedful.data.tag_schemes import OUTSIDE
from heedful.errors import DataError

DOCUMENT_BORDER = "-DOCSTART-"  # word of a line between documents
TAG = re.compile(r"(?:O|[BIESLUM]-.+)\Z")  # tag of an entity scheme
MAX_TAGS = 10_000  # maximum different tags
# names of the columns in a header, compared without case
WORD_COLUMN_NAMES = {"word", "words", "token", "tokens", "form"}
TAG_COLUMN_NAMES = {
    *("tag", "tags", "label", "labels", "pos", "upos", "xpos", "pos_tag", "pos_tags"),
    *("ner", "ner_tag", "ner_tags", "entity", "chunk", "chunk_tag", "chunk_tags"),
}


def read_sentences(
    file: TextFile, row_errors: RowErrors, word: int = 1, tag: int = 0, *, header: bool = False
) -> Iterator[TaggedExample]:
    """Yield the sentences of a file. A sentence with a bad line is a bad row.

    Blank lines and -DOCSTART- lines separate sentences.

    Args:
        file: the file.
        row_errors: handles bad rows.
        word: position of the word column, from 1.
        tag: position of the tag column, from 1, or 0 for the last column.
        header: whether the first line names the columns.
    """
    words: list[str] = []
    tags: list[str] = []
    start = 0  # first line of the sentence
    num_columns = 0  # columns of the first line with several columns
    size = 0  # characters of the sentence
    bad: BadRow | None = None  # the first bad line of the sentence
    for line_number, text, bad_line in all_lines(file):
        line = text.strip(" \t\r\n\v\f") if bad_line is None else "?"  # any text, so that the line is not blank
        cells = split_columns(line)
        if not line or cells[0] == DOCUMENT_BORDER:
            yield from _sentence(file, start, words, tags, bad, row_errors)
            words, tags, size, bad = [], [], 0, None
            continue
        if header:
            header = False
            continue
        start = start if words or bad else line_number
        num_columns = num_columns or (len(cells) if bad_line is None and len(cells) > 1 else 0)
        size += len(line)
        if size > max_sentence_chars(file):
            reason = missing_blank_line(file)
        else:
            reason = _line_problem(cells, num_columns, word, tag)
        if bad_line is not None or reason:
            reported = BadRow(file=file.display_name, line=line_number, column="", reason=reason, text=line[:200])
            bad = bad or bad_line or reported
        elif bad is None:
            words.append(cells[word - 1])
            tags.append(cells[tag - 1])
    yield from _sentence(file, start, words, tags, bad, row_errors)


def split_columns(line: str) -> list[str]:
    """Split a line at tabs, or at spaces if it has no tab. Other white space belongs to a word."""
    if "\t" in line:
        return [cell.strip(" ") for cell in line.split("\t")]
    return [cell for cell in line.split(" ") if cell] or [""]


def _line_problem(cells: list[str], num_columns: int, word: int, tag: int) -> str:
    """Return why the cells of a line are not a word with its tag, or "" if they are."""
    if len(cells) < 2:
        return "has one column, expected a word and its tag"
    if len(cells) != num_columns:
        return f"has {len(cells)} columns, expected {num_columns} as in the lines before"
    if max(word, tag) > num_columns:
        return f"has {num_columns} columns, and column {max(word, tag)} was asked for"
    return "" if all((cells[word - 1], cells[tag - 1])) else "has an empty word or tag"


def max_sentence_chars(file: TextFile) -> int:
    """Return the maximum characters in a sentence."""
    return file.max_row_bytes // 10


def missing_blank_line(file: TextFile) -> str:
    """Return the reason why a sentence that is too long is a bad row."""
    limit = max_sentence_chars(file)
    return f"a sentence of more than {limit:,} characters: is a blank line missing between sentences?"


def _sentence(
    file: TextFile, start: int, words: list[str], tags: list[str], bad: BadRow | None, row_errors: RowErrors
) -> Iterator[TaggedExample]:
    """Yield the example of a sentence if the sentence has words, or reject the sentence if it has a bad line."""
    if bad is not None:
        row_errors.reject(bad)
    elif words:
        yield TaggedExample(file=file.display_name, line=start, words=tuple(words), tags=tuple(tags))


def _split_lines(lines: Iterable[str]) -> list[list[str]]:
    """Split lines into cells, without blank lines and document borders."""
    rows = [split_columns(line) for raw_line in lines if (line := raw_line.strip(" \t\r\v\f"))]
    return [cells for cells in rows if cells[0] != DOCUMENT_BORDER]


def has_header(head: str, word: int = 1, tag: int = 0, *, blank_lines: bool = False) -> bool:
    """Whether the first line names the columns, with known names that do not occur as tags below.

    Args:
        head: beginning of the file.
        word: position of the word column, from 1.
        tag: position of the tag column, from 1, or 0 for the last column.
        blank_lines: whether blank lines are required, which separate sentences and are rare in tables.
    """
    lines = head.strip().split("\n")
    first, *below = _split_lines(lines) or [[""]]
    if not below or len(first) < max(2, word, tag) or (blank_lines and all(line.strip() for line in lines)):
        return False
    tags = {cells[tag - 1] for cells in below if len(cells) == len(first)}
    has_names = first[word - 1].casefold() in WORD_COLUMN_NAMES and first[tag - 1].casefold() in TAG_COLUMN_NAMES
    return has_names and first[tag - 1] not in tags and not any(" " in cell for cell in tags)


def is_conll(head: str) -> bool:
    """Whether all lines at the beginning of a file have equally many columns, the last one with tags like B-x."""
    lines = head.split("\n")[:400][:-1]  # the last line may be cut off
    rows = _split_lines(lines)
    if has_header(head, blank_lines=True):
        rows = rows[1:]
    if len(rows) < 2 or len(rows[0]) < 2:
        return False
    return all(len(cells) == len(rows[0]) and TAG.match(cells[-1]) for cells in rows)


# ---------------------------------------------------------------------------------------------------- schemes


@dataclass(frozen=True, kw_only=True, slots=True)
class TagScheme:
    """The tagging scheme of a data set, and its labels in IOB2."""

    name: str  # IOB1, IOB2, IOBES, BILOU or "IO or IOB1"; "": the tags are plain labels, such as parts of speech
    labels: tuple[str, ...]  # O, then B-x and I-x for each type x; or the plain labels, sorted
    malformed_entities: int  # entities that begin with I-, E- or L- although the scheme has B-

    @property
    def note(self) -> str:
        """A sentence for the user about the scheme."""
        if not self.name:
            return f"tags are plain labels: {len(self.labels)} of them"
        text = f"tags are {self.name}" + ("" if self.name == "IOB2" else ", read as IOB2")
        if self.malformed_entities:
            text += f"; {self.malformed_entities} entities do not begin as they should and are read as in conlleval"
        return text


def detect_scheme(examples: Iterable[TaggedExample]) -> TagScheme:
    """Detect the scheme of all tags, in constant memory.

    In IOB1, B-x occurs only directly after another entity of type x. In IOB2, every entity begins with B-x. IOBES has
    S- and E-, BILOU has U- and L-.

    Raises:
        DataError: If there are too many different tags, if only some of them are marked like B-x, or if marks of IOBES
            and BILOU are mixed.
    """
    positions: dict[str, str] = {}  # tag to its first file:line
    parts: dict[str, tuple[str, str]] = {}  # tag to (mark, type); ("", "") outside entities
    b_begins = 0  # entities that begin with B- where IOB1 would write I-
    other_begins = 0  # entities that begin with I-, E- or L-
    for example in examples:
        last_kind, is_open = "", False  # type of the last tag's entity, and whether the entity may continue
        for tag in example.tags:
            if tag not in positions:
                positions[tag] = f"{example.file}:{example.line}"
                parts[tag] = (tag[0], tag[2:]) if tag != OUTSIDE and TAG.match(tag) else ("", "")
                if len(positions) > MAX_TAGS:
                    raise DataError(
                        f"{positions[tag]}: more than {MAX_TAGS:,} different tags: is this the column of tags?"
                    )
            mark, kind = parts[tag]
            if not mark:
                last_kind, is_open = "", False
                continue
            follows_same_kind = is_open and last_kind == kind
            b_begins += mark == "B" and not follows_same_kind
            other_begins += mark in "IELM" and not follows_same_kind
            last_kind, is_open = kind, mark in "BIM"
    plain = {tag for tag in positions if not TAG.match(tag)}
    if plain and len(plain) < len(positions.keys() - {OUTSIDE}):
        tag = min(plain)
        raise DataError(f"{positions[tag]}: the tag {shown(tag)} is neither O nor of a form like B-x, but others are")
    kinds = sorted({tag[2:] for tag in positions if tag != OUTSIDE})
    if plain or not kinds:
        return TagScheme(name="", labels=tuple(sorted(positions)), malformed_entities=0)
    name = _scheme_name({tag[0] for tag in positions if tag != OUTSIDE}, b_begins, other_begins)
    labels = (OUTSIDE, *(f"{mark}-{kind}" for kind in kinds for mark in "BI"))
    malformed_entities = other_begins if name in ("IOB2", "IOBES", "BILOU") else 0
    return TagScheme(name=name, labels=labels, malformed_entities=malformed_entities)


def _scheme_name(marks: set[str], b_begins: int, other_begins: int) -> str:
    """Return the name of the scheme with these marks. The counts are explained in `detect_scheme`."""
    if marks & set("ESM") and marks & set("LU"):
        raise DataError(f"tags with the marks {', '.join(sorted(marks))}: neither IOBES nor BILOU")
    if marks & set("ESM"):
        return "IOBES"
    if marks & set("LU"):
        return "BILOU"
    if "B" not in marks:
        return "IO or IOB1"
    return "IOB1" if other_begins and not b_begins else "IOB2"

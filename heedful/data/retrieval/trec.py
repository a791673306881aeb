"""Reading and writing of relevance judgments (qrels) and rankings (runs) in TREC's formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from heedful.atomic_io import atomic_path, write_synced
from heedful.data.bad_rows import Raise, RowErrors, shown
from heedful.data.formats.text_files import detect_encoding, read_text_lines
from heedful.errors import DataError

BEIR_HEADER = ("query-id", "corpus-id", "score")  # columns of BEIR's tables of judgments


def read_judgments(path: Path) -> dict[str, dict[str, int]]:
    """Read relevance judgments, in TREC's format or BEIR's.

    Lines are QUERY 0 DOCUMENT RELEVANCE, or below a header QUERY, DOCUMENT and RELEVANCE separated by tabs.

    Returns:
        The relevance of documents, by query id and document id.

    Raises:
        DataError: If a line has another form, or if a document has two different judgments for a query.
    """
    judgments: dict[str, dict[str, int]] = {}
    for line_number, line in _lines(path):
        has_tabs = line.count("\t") == 2
        match line.split("\t") if has_tabs else line.split():
            case [*cells] if tuple(cells) == BEIR_HEADER and not judgments:
                continue
            case [query, document, relevance] if has_tabs:
                pass
            case [query, _, document, relevance]:
                pass
            case _:
                raise _error(path, line_number, line, "QUERY 0 DOCUMENT RELEVANCE, or the three columns of BEIR")
        try:
            value = int(relevance)
        except ValueError:
            raise _error(path, line_number, line, "a whole number as relevance") from None
        if judgments.setdefault(query, {}).setdefault(document, value) != value:
            expected = f"one relevance of document {shown(document)} for query {shown(query)}"
            raise _error(path, line_number, line, expected)
    if not judgments:
        raise DataError(f"{path}: has no relevance judgments; expected lines of QUERY 0 DOCUMENT RELEVANCE")
    return judgments


def ranking_file_of(run: str | Path) -> Path | None:
    """Return the path of a TREC run, which is a file, or None for a folder or the name of a model on the hub."""
    return Path(run) if Path(run).is_file() else None


def read_rankings(path: Path) -> dict[str, dict[str, float]]:
    """Read a TREC run, with lines of QUERY Q0 DOCUMENT RANK SCORE TAG.

    Ranks are ignored. Documents are ranked by their scores, as in trec_eval.

    Returns:
        The scores of documents, by query id and document id.

    Raises:
        DataError: If a line has another form, or if a query has a document twice.
    """
    rankings: dict[str, dict[str, float]] = {}
    for line_number, line in _lines(path):
        match line.split():
            case [query, _, document, _, score, _]:
                pass
            case _:
                raise _error(path, line_number, line, "QUERY Q0 DOCUMENT RANK SCORE TAG")
        try:
            value = float(score)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise _error(path, line_number, line, "a number as score")
        ranking = rankings.setdefault(query, {})
        if document in ranking:
            raise _error(path, line_number, line, f"document {shown(document)} once for query {shown(query)}")
        ranking[document] = value
    if not rankings:
        raise DataError(f"{path}: has no ranking; expected lines of QUERY Q0 DOCUMENT RANK SCORE TAG")
    return rankings


def write_rankings(path: Path, rankings: Iterable[tuple[str, Mapping[str, float]]], tag: str) -> None:
    """Write a TREC run with the documents of each query, best first. The file appears complete or not at all.

    Args:
        path: the file.
        rankings: (query id, scores of documents by document id) for each query.
        tag: name of the system that ranked the documents.

    Raises:
        DataError: If an id has white space, which the format cannot represent, or if the file cannot be written.
    """

    def lines() -> Iterator[bytes]:
        for query, ranking in rankings:
            documents = sorted(ranking, key=lambda document: (ranking[document], document), reverse=True)
            for rank, document in enumerate(documents, start=1):
                for field in (query, document, tag):
                    if len(field.split()) != 1:
                        raise DataError(f"{path}: the id {shown(field)} has white space, which a TREC run cannot have")
                yield f"{query} Q0 {document} {rank} {ranking[document]!r} {tag}\n".encode()

    try:
        with atomic_path(path) as temporary_path:
            write_synced(temporary_path, lines())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Return (line number from 1, text) for each line of a file that is not blank."""
    file, _ = detect_encoding(path)
    lines = read_text_lines(file, RowErrors(Raise()))
    return ((line_number, line) for line_number, line in lines if line.strip())


def _error(path: Path, line_number: int, line: str, expected: str) -> DataError:
    return DataError(f"{path}:{line_number}: {shown(line)}: expected {expected}")

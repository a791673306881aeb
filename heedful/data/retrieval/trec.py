"""Files of relevance judgments (qrels) and rankings (runs) in TREC's formats."""

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
        DataError: If a line has another form, or a document has two different judgments for a query.
    """
    judgments: dict[str, dict[str, int]] = {}
    for number, line in _lines(path):
        tabs = line.count("\t") == 2
        match line.split("\t") if tabs else line.split():
            case [*cells] if tuple(cells) == BEIR_HEADER and not judgments:
                continue
            case [query, document, relevance] if tabs:
                pass
            case [query, _, document, relevance]:
                pass
            case _:
                raise _error(path, number, line, "QUERY 0 DOCUMENT RELEVANCE, or the three columns of BEIR")
        try:
            value = int(relevance)
        except ValueError:
            raise _error(path, number, line, "a whole number as relevance") from None
        if judgments.setdefault(query, {}).setdefault(document, value) != value:
            raise _error(path, number, line, f"one relevance of document {shown(document)} for query {shown(query)}")
    if not judgments:
        raise DataError(f"{path}: has no relevance judgments; expected lines of QUERY 0 DOCUMENT RELEVANCE")
    return judgments


def ranking_file_of(run: str | Path) -> Path | None:
    """Return the path of a TREC run, which is a file; None for a folder or the name of a model on the hub."""
    return Path(run) if Path(run).is_file() else None


def read_rankings(path: Path) -> dict[str, dict[str, float]]:
    """Read a TREC run, with lines of QUERY Q0 DOCUMENT RANK SCORE TAG.

    The rank is ignored: scores rank the documents, as in trec_eval.

    Returns:
        The scores of documents, by query id and document id.

    Raises:
        DataError: If a line has another form, or a query has a document twice.
    """
    rankings: dict[str, dict[str, float]] = {}
    for number, line in _lines(path):
        match line.split():
            case [query, _, document, _, score, _]:
                pass
            case _:
                raise _error(path, number, line, "QUERY Q0 DOCUMENT RANK SCORE TAG")
        try:
            value = float(score)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise _error(path, number, line, "a number as score")
        ranking = rankings.setdefault(query, {})
        if document in ranking:
            raise _error(path, number, line, f"document {shown(document)} once for query {shown(query)}")
        ranking[document] = value
    if not rankings:
        raise DataError(f"{path}: has no ranking; expected lines of QUERY Q0 DOCUMENT RANK SCORE TAG")
    return rankings


def write_rankings(path: Path, rankings: Iterable[tuple[str, Mapping[str, float]]], tag: str) -> None:
    """Write a TREC run with the documents of each query, the best first; the file appears complete or not at all.

    Args:
        path: the file.
        rankings: id of each query, and the scores of its documents by document id.
        tag: name of the system that ranked them.

    Raises:
        DataError: If an id has white space, which the format cannot represent, or the file cannot be written.
    """

    def lines() -> Iterator[bytes]:
        for query, ranking in rankings:
            ranks = sorted(ranking, key=lambda document: (ranking[document], document), reverse=True)
            for rank, document in enumerate(ranks, start=1):
                for field in (query, document, tag):
                    if len(field.split()) != 1:
                        raise DataError(f"{path}: the id {shown(field)} has white space, which a TREC run cannot have")
                yield f"{query} Q0 {document} {rank} {ranking[document]!r} {tag}\n".encode()

    try:
        with atomic_path(path) as part:
            write_synced(part, lines())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Return the lines of a file that are not blank, with their numbers from 1."""
    file, _ = detect_encoding(path)
    return ((number, line) for number, line in read_text_lines(file, RowErrors(Raise())) if line.strip())


def _error(path: Path, number: int, line: str, expected: str) -> DataError:
    return DataError(f"{path}:{number}: {shown(line)}: expected {expected}")

"""BeirFolder: retrieval data in BEIR's layout, which is corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from heedful.data.retrieval.documents import BEIR_CORPUS, BEIR_QUERIES, Document, read_documents
from heedful.data.retrieval.trec import read_judgments
from heedful.errors import DataError

QRELS = "qrels"  # folder of the relevance judgments
PREFERRED_SPLITS = ("test", "dev")  # splits that are listed first


@dataclass(frozen=True, kw_only=True, slots=True)
class BeirFolder:
    """A folder in BEIR's layout (Thakur et al. 2021)."""

    folder: Path

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits with relevance judgments, test and dev first."""
        names = sorted(path.stem for path in (self.folder / QRELS).glob("*.tsv"))
        return tuple(sorted(names, key=lambda name: (*PREFERRED_SPLITS, name).index(name)))

    def documents(self) -> Iterator[Document]:
        """Yield the documents of the corpus."""
        return read_documents([self.folder / BEIR_CORPUS])

    def judgments(self, split: str) -> dict[str, dict[str, int]]:
        """Return the relevance judgments of a split: the relevance of documents by query id and document id.

        Raises:
            DataError: If there is no such split.
        """
        if split not in self.splits:
            raise DataError(f'{self.folder}: has no split "{split}"; expected one of {", ".join(self.splits)}')
        return read_judgments(self.folder / QRELS / f"{split}.tsv")

    def queries(self, split: str) -> dict[str, str]:
        """Return the texts of the queries with judgments in a split, by query id.

        Raises:
            DataError: If the text of a query with judgments is missing.
        """
        texts = {query.id: query.text for query in read_documents([self.folder / BEIR_QUERIES])}
        judged = self.judgments(split)
        if missing := next((query for query in judged if query not in texts), None):
            raise DataError(f'{self.folder}: query "{missing}" is judged in {split}, but not in {BEIR_QUERIES}')
        return {query: texts[query] for query in judged}


def beir_folder(data: object) -> BeirFolder | None:
    """Return the folder at a path if it has BEIR's layout, or None for anything else."""
    if not isinstance(data, str | Path):
        return None
    folder = Path(data)
    files = (folder / BEIR_CORPUS, folder / BEIR_QUERIES)
    dataset = BeirFolder(folder=folder)
    return dataset if all(file.is_file() for file in files) and dataset.splits else None

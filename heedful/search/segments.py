"""Segments of a search index: documents with their passages and embeddings, in files that never change."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

from heedful.atomic_io import write_synced
from heedful.data.retrieval.documents import Document
from heedful.errors import HeedfulError
from heedful.search.passages import Span
from heedful.search.store import IndexSettings, SegmentFacts
from heedful.search.vectors import VectorFormat, VectorTable, mapped_array, write_tables

if TYPE_CHECKING:
    import pyarrow

DOCUMENTS, PASSAGES = "documents.arrow", "passages.bin"
BATCH = 1024  # documents in a record batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Some documents with their passages and vectors, memory-mapped or in memory."""

    documents: pyarrow.Table  # columns id, title, text
    passages: Int64[np.ndarray, "passages 3"]  # index of the document; start and end in its content, in characters
    vectors: VectorTable  # the embedding of each passage

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        spans: Sequence[Sequence[Span]],
        vectors: NDArray[np.float32],
        vector_format: VectorFormat,
    ) -> Segment:
        """Return a segment of new documents.

        Args:
            documents: The documents.
            spans: The passages of each document.
            vectors: Unit vectors of all passages, [passages, dim].
            vector_format: Format in which the vectors are stored.
        """
        import pyarrow

        columns = {
            name: pyarrow.array([getattr(document, name) for document in documents], pyarrow.large_string())
            for name in ("id", "title", "text")
        }
        passages = [(index, *span) for index, document_spans in enumerate(spans) for span in document_spans]
        return cls(
            documents=pyarrow.table(columns),
            passages=np.array(passages, np.int64).reshape(-1, 3),
            vectors=VectorTable.of(vectors, vector_format),
        )

    @classmethod
    def open(cls, folder: Path, facts: SegmentFacts, settings: IndexSettings) -> Segment:
        """Memory-map the files of a segment.

        Raises:
            HeedfulError: If a file is missing or damaged.
        """
        import pyarrow

        segment_folder = folder / facts.name
        path = segment_folder / DOCUMENTS
        try:
            documents = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise HeedfulError(f"{path} cannot be read: {error}; build the index again") from None
        if len(documents) != facts.documents:
            raise HeedfulError(
                f"{path} has {len(documents)} documents, expected {facts.documents}: it is damaged; build the index "
                "again"
            )
        passages = mapped_array(segment_folder / PASSAGES, (facts.passages, 3), np.int64)
        vectors = VectorTable.open(segment_folder, facts.passages, settings.width, settings.vectors)
        return cls(documents=documents, passages=passages, vectors=vectors)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def ids(self) -> list[str]:
        """The ids of the documents."""
        ids: list[str] = self.documents["id"].to_pylist()
        return ids

    def document(self, index: int) -> Document:
        """Return a document by its index in the segment."""
        id, title, text = (self.documents[name][index].as_py() for name in ("id", "title", "text"))
        return Document(id=id, title=title, text=text)

    def contents(self) -> Iterator[str]:
        """Yield the content of each document."""
        return (self.document(index).content for index in range(len(self)))

    def passage_rows(self, index: int) -> NDArray[np.int64]:
        """Return the rows of `passages` and `vectors` that belong to a document."""
        first, stop = np.searchsorted(self.passages[:, 0], [index, index + 1])
        return np.arange(first, stop)

    def selected(self, alive: NDArray[np.bool_]) -> Segment:
        """Copy the documents that `alive` marks, [documents], into a new segment in memory."""
        import pyarrow

        rows = np.flatnonzero(alive[self.passages[:, 0]])
        passages = self.passages[rows]
        passages[:, 0] = np.cumsum(alive)[passages[:, 0]] - 1
        return Segment(
            documents=self.documents.filter(pyarrow.array(alive)),
            passages=passages,
            vectors=self.vectors.at(rows),
        )


def write_segment(folder: Path, segments: Sequence[Segment]) -> SegmentFacts:
    """Concatenate segments, and write the result as a new segment into an empty folder."""
    document_count = 0
    passage_tables = []
    for segment in segments:
        passage_tables.append(segment.passages + np.array([document_count, 0, 0]))
        document_count += len(segment)
    passages = np.concatenate(passage_tables)
    write_synced(folder / DOCUMENTS, _stream(segments))
    write_synced(folder / PASSAGES, [passages.tobytes()])
    write_tables(folder, [segment.vectors for segment in segments])
    return SegmentFacts(name=folder.name, documents=document_count, passages=len(passages))


def _stream(segments: Sequence[Segment]) -> Iterator[bytes]:
    """Yield the documents of segments in Arrow's streaming format, one record batch at a time."""
    import pyarrow

    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, segments[0].documents.schema) as writer:
        for segment in segments:
            for batch in segment.documents.to_batches(max_chunksize=BATCH):
                writer.write_batch(batch)
                yield sink.getvalue()
                sink.seek(0)
                sink.truncate()
    yield sink.getvalue()

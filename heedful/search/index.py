"""`SearchIndex`: an index of documents on disk, which can be searched by words, by vectors, or by both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heedful.atomic_io import atomic_path
from heedful.bundled import BUNDLED_ENCODER
from heedful.data.retrieval.documents import Document
from heedful.errors import DataError, HeedfulError, did_you_mean
from heedful.infer.batch.file_prediction import fingerprint
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine import Engine
from heedful.search.fusion import reciprocal_rank_fusion
from heedful.search.passages import PassageSplitter
from heedful.search.rerank import rerank_scores
from heedful.search.segments import Segment, write_segment
from heedful.search.store import (
    IndexSettings,
    IndexState,
    commit_state,
    is_index,
    locked_for_writing,
    read_state,
    remove_unnamed,
)
from heedful.search.vectors import VectorFormat, check_vector_format, nearest_in_tables, normalized_rows
from heedful.search.words import WordIndex, check_language, write_words

SearchMethod = Literal["hybrid", "words", "vectors"]
METHODS: tuple[SearchMethod, ...] = ("hybrid", "words", "vectors")
COMMIT = 4096  # documents in a commit; committed documents remain if the process is killed
# minimum documents of each ranking that hybrid search fuses: as many as an evaluation ranks, so that it measures what a
# search returns
CANDIDATES = 1000
RERANKED = 50  # minimum documents that a reranker scores
PASSAGE_TOKENS = 256  # maximum tokens of a passage, unless the model reads fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchHit:
    """A result of a search: a document with its best passage."""

    id: str
    score: float  # higher is better; comparable only within one search
    title: str
    passage: str
    start: int  # first character of the passage in the document's content, whose first line is the title
    end: int  # end of the passage, exclusive

    def to_dict(self) -> dict[str, object]:
        """Return the hit as data for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedDocuments:
    """Counts of the documents that were passed to `SearchIndex.add`."""

    added: int = 0  # documents with new ids
    replaced: int = 0  # documents whose id was in the index with another text
    unchanged: int = 0  # documents that were in the index


class SearchIndex:
    """Documents in a folder, searched by BM25 over words, by vectors of passages, or by both.

    A change is made completely or not at all, even if the process is killed. One process at a time may change an index.
    Other processes search the state that they opened until they call `refresh`.

    Methods refer to a document by its id or by its index: its position among all documents of the state, from 0.
    """

    def __init__(self, folder: str | Path, *, engine: BundleEngine | None = None, device: str = "auto") -> None:
        """Open the last complete state of an index.

        Args:
            folder: The folder.
            engine: The model of the index. If None, it is loaded when it is first needed.
            device: "cpu", "cuda", or "auto" for a GPU if there is one.

        Raises:
            HeedfulError: If the folder holds no index, or a part is damaged.
        """
        self.folder = Path(folder)
        self._device = device
        if engine is not None:
            self.__dict__["engine"] = engine
        self._open(_read_stable(self.folder, self._load))

    @classmethod
    def create(
        cls,
        folder: str | Path,
        *,
        model: str | Path = BUNDLED_ENCODER,
        vectors: VectorFormat = "int8",
        language: str = "english",
        passage_tokens: int | None = None,
        device: str = "auto",
    ) -> SearchIndex:
        """Create an index without documents.

        Args:
            folder: A new or empty folder.
            model: A sentence embedding model: a run, a folder, or NAME[@REVISION] on the hub.
            vectors: "float32", "int8", or "binary" (signs, with int8 for rescoring).
            language: Language for the stemming and the stop words of BM25, or "none" to use neither.
            passage_tokens: Maximum tokens of a passage. If None, 256, or the model's limit if that is smaller.
            device: "cpu", "cuda", or "auto" for a GPU if there is one.

        Raises:
            HeedfulError: If the folder is not empty, the model does not return sentence embeddings, or a value is
                unknown.
        """
        path = Path(folder)
        if is_index(path):
            raise HeedfulError(f"{path} holds an index already: open it, or give another folder")
        if path.exists() and (not path.is_dir() or any(child.name[0] != "." for child in path.iterdir())):
            raise HeedfulError(f"{path} exists and is no index: give another folder")
        check_vector_format(vectors)
        WordIndex(None, check_language(language))
        engine = Engine(model, precision="float32", device=device)
        name = str(Path(model).absolute()) if Path(model).exists() else str(model)
        settings = IndexSettings(
            model=name,
            fingerprint=fingerprint(engine),
            width=engine.encode("width").shape[0],
            vectors=vectors,
            language=language,
            passage_tokens=_passage_tokens(engine, passage_tokens),
        )
        with locked_for_writing(path):
            if is_index(path):
                raise HeedfulError(f"{path} holds an index already: open it, or give another folder")
            commit_state(path, IndexState(settings=settings))
        return cls(path, engine=engine, device=device)

    # -- reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._state.documents - len(self._state.deleted)

    def __contains__(self, id: object) -> bool:
        """Return whether a document has this id."""
        return id in self._index_of_id

    @property
    def passages(self) -> int:
        """The number of passages."""
        return int(sum(alive.sum() for alive in self._alive))

    @property
    def settings(self) -> IndexSettings:
        """The settings with which the index was created."""
        return self._state.settings

    @cached_property
    def engine(self) -> BundleEngine:
        """The model of the index, loaded when it is first used.

        Raises:
            HeedfulError: If the model cannot be loaded, or has changed since it computed the vectors.
        """
        engine = Engine(self.settings.model, precision="float32", device=self._device)
        if fingerprint(engine) != self.settings.fingerprint:
            raise HeedfulError(
                f"{self.settings.model} is not the model that made the vectors of {self.folder}: it has changed since; "
                "put the old one back, or build the index again"
            )
        return engine

    def refresh(self) -> bool:
        """Open the last complete state; return whether another process has changed the index."""
        if read_state(self.folder).generation == self._state.generation:
            return False
        self._open(_read_stable(self.folder, self._load))
        return True

    def search(
        self,
        query: str,
        top_k: int = 10,
        *,
        method: SearchMethod = "hybrid",
        reranker: str | Path | BundleEngine | None = None,
        vector: NDArray[np.float32] | None = None,
    ) -> list[SearchHit]:
        """Return the best documents for a query, each with its best passage.

        Args:
            query: The text to search for.
            top_k: Maximum documents to return.
            method: "words" (BM25), "vectors" (cosine), or "hybrid" (both rankings, fused by reciprocal ranks).
            reranker: A cross-encoder that ranks the best `RERANKED` documents again. If None, their order remains.
            vector: Embedding of the query, [dim]. If None, the model of the index encodes the query.

        Raises:
            HeedfulError: If the query is empty, or an argument is unknown.
        """
        if not query.strip():
            raise HeedfulError("the query is empty; expected a text to search for")
        depth = top_k if reranker is None else max(top_k, RERANKED)
        _check_search(method, depth)
        vectors = None
        if method != "words":
            vectors = self._query_vectors([query]) if vector is None else normalized_rows(vector[None])
        (ranking,) = self._rank([query], vectors, depth, method)
        hits = list(self.hits(query, ranking, vectors))
        if reranker is not None:
            model = reranker if isinstance(reranker, BundleEngine) else Engine(reranker, device=self._device)
            hits = rescored(hits, rerank_scores(model, query, [hit.passage for hit in hits]))
        return hits[:top_k]

    def matches(self, query: str, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) characters of each word of a text whose stem is in the query."""
        return self._words.matches(query, text)

    def rank(
        self, queries: Sequence[str], depth: int, *, method: SearchMethod = "hybrid"
    ) -> list[list[tuple[int, float]]]:
        """Return the best `depth` documents of each query as (document index, score), best first."""
        _check_search(method, depth)
        return self._rank(queries, None if method == "words" else self._query_vectors(queries), depth, method)

    def _rank(
        self, queries: Sequence[str], vectors: NDArray[np.float32] | None, depth: int, method: SearchMethod
    ) -> list[list[tuple[int, float]]]:
        """Rank documents for each query; see `rank`.

        Args:
            queries: The queries.
            vectors: Unit vectors of the queries, [queries, dim]; None if the method is "words".
            depth: Number of documents for each query.
            method: As in `search`.
        """
        count = max(depth, CANDIDATES) if method == "hybrid" else depth
        by_words = [] if method == "vectors" else [self._words.search(query, count) for query in queries]
        by_vectors = [] if vectors is None else self.rank_by_vectors(vectors, count)
        if method != "hybrid":
            return by_words or by_vectors
        return [
            reciprocal_rank_fusion([[document for document, _ in ranking] for ranking in rankings])[:depth]
            for rankings in zip(by_words, by_vectors, strict=True)
        ]

    def document(self, index: int) -> Document:
        """Return a document by its index."""
        segment, index_in_segment = self._locate(index)
        return segment.document(index_in_segment)

    def rank_by_vectors(self, vectors: NDArray[np.float32], count: int) -> list[list[tuple[int, float]]]:
        """Return the best `count` documents for each unit vector, as (document index, cosine of the best passage).

        Since a document may have several passages, passages are searched again with a larger count until they come
        from enough documents. Vectors of the index are read in blocks.
        """
        all_passages = len(self._document_of_passage)
        tables = [segment.vectors for segment in self._segments]
        passage_count = 2 * count
        while True:
            scores, rows = nearest_in_tables(tables, vectors, min(passage_count, all_passages), self._alive)
            rankings = []
            for query_scores, query_rows in zip(scores, rows, strict=True):
                best: dict[int, float] = {}  # score by document; the first passage of a document is its best
                alive_rows = query_rows[np.isfinite(query_scores)].tolist()  # deleted passages are last, with -inf
                for row, score in zip(alive_rows, query_scores.tolist(), strict=False):
                    best.setdefault(int(self._document_of_passage[row]), score)
                rankings.append(list(best.items())[:count])
            if passage_count >= all_passages or all(len(ranking) == count for ranking in rankings):
                return rankings
            passage_count *= 4

    def _query_vectors(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """Encode queries as unit vectors, [queries, dim]."""
        return normalized_rows(self.engine.encode_query(list(queries)))

    def hits(
        self, query: str, ranking: Iterable[tuple[int, float]], vector: NDArray[np.float32] | None
    ) -> Iterator[SearchHit]:
        """Yield ranked documents with their best passages.

        Args:
            query: The query.
            ranking: (document index, score) pairs.
            vector: Unit vector of the query, [1, dim]; the passage with the largest inner product is the best. If None,
                the passage with the most words of the query is the best.
        """
        for index, score in ranking:
            segment, index_in_segment = self._locate(index)
            document, rows = segment.document(index_in_segment), segment.passage_rows(index_in_segment)
            spans = segment.passages[rows, 1:].tolist()
            if len(rows) == 1:
                best = 0
            elif vector is None:
                best = self._words.best_passage(query, [document.content[start:end] for start, end in spans])
            else:
                best = int(segment.vectors.at(rows).scores(vector, 0, len(rows)).argmax())
            start, end = spans[best]
            yield SearchHit(
                id=document.id,
                score=score,
                title=document.title,
                passage=document.content[start:end],
                start=start,
                end=end,
            )

    # -- changing -----------------------------------------------------------------------------------------------

    def add(
        self, documents: Iterable[Document], *, on_progress: Callable[[AddedDocuments], None] | None = None
    ) -> AddedDocuments:
        """Add documents. A document whose id is in the index replaces the document with that id.

        Documents are committed in groups of `COMMIT`. After an interruption the same call resumes, since documents that
        are already in the index are skipped.

        Args:
            documents: The documents.
            on_progress: Called after each commit with the counts so far.

        Raises:
            HeedfulError: If an id is given twice, or another process changes the index.
        """
        done = AddedDocuments()
        seen: set[str] = set()  # ids
        with locked_for_writing(self.folder):
            self._begin_change()
            for chunk in _chunks(documents, COMMIT):
                for document in chunk:
                    if document.id in seen:
                        raise DataError(
                            f'the id "{document.id}" is given twice; expected an id of its own for each document'
                        )
                    seen.add(document.id)
                new: list[Document] = []
                replaced: list[int] = []  # indices of documents that a new one with the same id replaces
                for document in chunk:
                    index = self._index_of_id.get(document.id)
                    if index is None or self.document(index) != document:
                        new.append(document)
                        if index is not None:
                            replaced.append(index)
                if new:
                    self._commit(new, replaced)
                done = AddedDocuments(
                    added=done.added + len(new) - len(replaced),
                    replaced=done.replaced + len(replaced),
                    unchanged=done.unchanged + len(chunk) - len(new),
                )
                if on_progress is not None:
                    on_progress(done)
        return done

    def delete(self, ids: Iterable[str]) -> int:
        """Delete documents by their ids; return how many were deleted.

        Raises:
            HeedfulError: If an id is not in the index. Nothing is deleted in that case.
        """
        with locked_for_writing(self.folder):
            self._begin_change()
            unique_ids = dict.fromkeys(ids)
            if missing := next((id for id in unique_ids if id not in self._index_of_id), None):
                raise HeedfulError(f'no document has the id "{missing}"; nothing was deleted')
            if unique_ids:
                self._commit([], [self._index_of_id[id] for id in unique_ids])
        return len(unique_ids)

    def rebuild(self) -> None:
        """Write the index anew without the files and the BM25 word counts of deleted documents."""
        with locked_for_writing(self.folder):
            self._begin_change()
            state, generation = self._state, self._state.generation + 1
            alive = np.ones(state.documents, bool)
            alive[list(state.deleted)] = False
            bounds = np.cumsum([0, *(len(segment) for segment in self._segments)])
            alive_segments = [
                segment.selected(alive[start:stop])
                for segment, start, stop in zip(self._segments, bounds[:-1], bounds[1:], strict=True)
            ]
            state = replace(state, generation=generation, segments=(), words="", deleted=())
            if alive.any():
                state = self._with_segment(state, alive_segments)
                texts = enumerate(content for segment in alive_segments for content in segment.contents())
                state = self._with_words(state, None, texts, ())
            self._commit_state(state)

    def _begin_change(self) -> None:
        """Open the last complete state, and remove the files of interrupted changes. The caller holds the lock."""
        self.refresh()
        remove_unnamed(self.folder, self._state)

    def _commit(self, documents: Sequence[Document], deleted: Sequence[int]) -> None:
        """Commit a state with new documents and without deleted ones.

        The new segment is merged with the last segment as long as that has at most twice as many documents. The number
        of segments therefore grows logarithmically.

        Args:
            documents: New documents.
            deleted: Indices of deleted or replaced documents.
        """
        previous = self._state
        all_deleted = tuple(sorted({*previous.deleted, *deleted}))
        state = replace(previous, generation=previous.generation + 1, deleted=all_deleted)
        if documents:
            merged = [self._segment(documents)]
            size = len(documents)
            while state.segments and state.segments[-1].documents <= 2 * size:
                size += state.segments[-1].documents
                merged.insert(0, self._segments[len(state.segments) - 1])
                state = replace(state, segments=state.segments[:-1])
            state = self._with_segment(state, merged)
        contents = enumerate((document.content for document in documents), start=previous.documents)
        self._commit_state(self._with_words(state, previous.words, contents, deleted))

    def _segment(self, documents: Sequence[Document]) -> Segment:
        """Split documents into passages, encode these, and return a segment in memory."""
        contents = [document.content for document in documents]
        spans = PassageSplitter(self.engine, self.settings.passage_tokens).split(contents)
        passages = [text[start:end] for text, parts in zip(contents, spans, strict=True) for start, end in parts]
        vectors = normalized_rows(self.engine.encode_document(passages))
        return Segment.of(documents, spans, vectors, self.settings.vectors)

    def _with_segment(self, state: IndexState, merged: Sequence[Segment]) -> IndexState:
        """Merge segments into a new one on disk; return the state with the new segment appended."""
        target = self.folder / f"segment-{state.generation:06}"
        with atomic_path(target, folder=True) as part:
            facts = replace(write_segment(part, merged), name=target.name)
        return replace(state, segments=(*state.segments, facts))

    def _with_words(
        self, state: IndexState, previous: str | None, added: Iterable[tuple[int, str]], deleted: Iterable[int]
    ) -> IndexState:
        """Write a new word index; return the state that names it. See `write_words` for the arguments."""
        target = self.folder / f"words-{state.generation:06}"
        with atomic_path(target, folder=True) as part:
            write_words(
                part,
                self.settings.language,
                previous=self.folder / previous if previous else None,
                added=added,
                deleted=deleted,
            )
        return replace(state, words=target.name)

    def _commit_state(self, state: IndexState) -> None:
        """Make a state the last complete one, and open it."""
        commit_state(self.folder, state)
        self._open(self._load(state))

    # -- opening ------------------------------------------------------------------------------------------------

    def _load(self, state: IndexState) -> tuple[IndexState, list[Segment], WordIndex]:
        """Open the files of a state; raise a HeedfulError if one is missing or damaged."""
        segments = [Segment.open(self.folder, facts, state.settings) for facts in state.segments]
        return state, segments, WordIndex(self.folder / state.words if state.words else None, state.settings.language)

    def _open(self, loaded: tuple[IndexState, list[Segment], WordIndex]) -> None:
        """Make a loaded state the current one."""
        self._state, self._segments, self._words = loaded
        # index of the first document of each segment, and the number of all documents
        self._bounds = np.cumsum([0, *(len(segment) for segment in self._segments)])
        documents_by_segment = [
            segment.passages[:, 0] + start for segment, start in zip(self._segments, self._bounds[:-1], strict=True)
        ]
        self._document_of_passage = np.concatenate([np.zeros(0, np.int64), *documents_by_segment])
        deleted = np.zeros(self._state.documents, bool)
        deleted[list(self._state.deleted)] = True
        # for each segment, marks the passages of documents that are not deleted
        self._alive = [~deleted[indices] for indices in documents_by_segment]
        self.__dict__.pop("_index_of_id", None)

    @cached_property
    def _index_of_id(self) -> dict[str, int]:
        """Index of each document by its id, without deleted and replaced documents."""
        deleted = set(self._state.deleted)
        ids = (id for segment in self._segments for id in segment.ids)
        return {id: index for index, id in enumerate(ids) if index not in deleted}

    def _locate(self, index: int) -> tuple[Segment, int]:
        """Return the segment of a document, and the document's index in the segment."""
        segment_index = int(np.searchsorted(self._bounds, index, side="right")) - 1
        return self._segments[segment_index], index - int(self._bounds[segment_index])


def rescored(hits: Iterable[SearchHit], scores: Iterable[float]) -> list[SearchHit]:
    """Replace the scores of hits, and sort the hits by their new scores, best first."""
    return sorted(
        (replace(hit, score=score) for hit, score in zip(hits, scores, strict=True)), key=lambda hit: -hit.score
    )


def _read_stable(
    folder: Path, load: Callable[[IndexState], tuple[IndexState, list[Segment], WordIndex]]
) -> tuple[IndexState, list[Segment], WordIndex]:
    """Load the last complete state; try again if another process replaced it and removed its files meanwhile."""
    while True:
        state = read_state(folder)
        try:
            return load(state)
        except HeedfulError:
            if read_state(folder).generation == state.generation:
                raise


def _check_search(method: str, depth: int) -> None:
    """Raise a HeedfulError if the method is unknown, or if `depth`, the number of results, is below 1."""
    if method not in METHODS:
        raise HeedfulError(f"method is {method!r}{did_you_mean(method, METHODS)}: use one of {', '.join(METHODS)}")
    if depth < 1:
        raise HeedfulError(f"top_k is {depth}: give how many documents to return, from 1")


def _passage_tokens(engine: BundleEngine, tokens: int | None) -> int:
    """Return the maximum tokens of a passage: `tokens`, or the default if that is None.

    Raises:
        HeedfulError: If `tokens` is out of the model's range.
    """
    limit = engine.limit or PASSAGE_TOKENS
    if tokens is None:
        return min(PASSAGE_TOKENS, limit)
    if not 8 <= tokens <= limit:
        raise HeedfulError(f"passage_tokens is {tokens}; expected a number from 8 to {limit}, which this model reads")
    return tokens


def _chunks(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Yield lists of up to `size` documents."""
    source = iter(documents)
    while chunk := list(islice(source, size)):
        yield chunk

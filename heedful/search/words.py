"""`WordIndex`: full-text search by BM25 (Robertson and Zaragoza 2009; k1 = 1.2, b = 0.75), computed by tantivy.

`SearchIndex` keeps one word index per state. The files of a tantivy index never change once they are written, except
for meta.json and .managed.json. A new state is therefore a new folder with hard links to the old files, plus the files
of the change. The old folder remains a complete index.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING
from weakref import finalize

from heedful.atomic_io import sync_folder
from heedful.errors import HeedfulError, did_you_mean

if TYPE_CHECKING:
    import tantivy

LANGUAGES = (
    "arabic",
    "danish",
    "dutch",
    "english",
    "finnish",
    "french",
    "german",
    "greek",
    "hungarian",
    "italian",
    "norwegian",
    "portuguese",
    "romanian",
    "russian",
    "spanish",
    "swedish",
    "tamil",
    "turkish",
)
WITHOUT_STOP_WORDS = ("arabic", "greek", "romanian", "tamil", "turkish")  # tantivy has no stop words for these
NO_LANGUAGE = "none"  # disables stemming and stop words
MAX_WORD_BYTES = 80  # longer words are not indexed
WRITER_BYTES = 50_000_000  # memory of tantivy's writer
MUTABLE_FILES = ("meta.json", ".managed.json")  # files that tantivy rewrites
META_LOCK = ".tantivy-meta.lock"
WRITER_LOCK = ".tantivy-writer.lock"


def check_language(language: str) -> str:
    """Return the language, or raise a HeedfulError if it is unknown."""
    if language in (*LANGUAGES, NO_LANGUAGE):
        return language
    raise HeedfulError(
        f"language is {language!r}{did_you_mean(language, LANGUAGES)}: use one of {', '.join(LANGUAGES)}; or none, "
        "for no stemming and no stop words"
    )


def require_tantivy() -> None:
    """Raise a HeedfulError if tantivy is not installed."""
    try:
        import tantivy  # noqa: F401
    except ImportError:
        raise HeedfulError("an index of words needs tantivy: pip install 'heedful[search]'") from None


class WordIndex:
    """An inverted index of words. A document is identified by its index among all documents of the `SearchIndex`."""

    def __init__(self, folder: Path | None, language: str) -> None:
        """Open a word index.

        Args:
            folder: Folder of the index. If None, the index has no documents.
            language: Language of the words, see `check_language`.

        Raises:
            HeedfulError: If tantivy is not installed, or the index cannot be opened.
        """
        require_tantivy()
        self._analyzer = _analyzer(language)
        if folder is not None and not _can_lock(folder):
            folder = _lockable_copy(folder)
            finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._index = None if folder is None else _open(folder, language)

    def terms(self, text: str) -> list[str]:
        """Return the words of a text, stemmed and without stop words."""
        terms: list[str] = self._analyzer.analyze(text)
        return terms

    def search(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the `count` documents with the highest BM25 scores for a query, as (document index, score)."""
        terms = self.terms(query)
        if self._index is None or not terms:
            return []
        import tantivy

        schema = self._index.schema
        any_word = tantivy.Query.boolean_query(
            [(tantivy.Occur.Should, tantivy.Query.term_query(schema, "text", term, "freq")) for term in terms]
        )
        searcher = self._index.searcher()
        hits = searcher.search(any_word, limit=count, count=False).hits
        documents: list[int] = searcher.fast_field_values("number", [address for _, address in hits])  # type: ignore[assignment]
        ranked = [(document, float(score)) for document, (score, _) in zip(documents, hits, strict=True)]
        return sorted(ranked, key=lambda hit: (-hit[1], hit[0]))

    def matches(self, query: str, text: str) -> list[tuple[int, int]]:
        """Return the (start, end) characters of each word of a text whose stem is in the query."""
        query_terms = set(self.terms(query))
        words: list[str] = _words_as_written().analyze(text)
        matching = {word for word in set(words) if not query_terms.isdisjoint(self.terms(word))}
        spans = []
        end = 0
        for word in words:
            start = text.index(word, end)  # finds this word, since there are no letters between two words
            end = start + len(word)
            if word in matching:
                spans.append((start, end))
        return spans

    def best_passage(self, query: str, passages: Sequence[str]) -> int:
        """Return the index of the passage that contains the most distinct words of the query."""
        query_terms = set(self.terms(query))
        return max(range(len(passages)), key=lambda index: len(query_terms & set(self.terms(passages[index]))))


def write_words(
    folder: Path,
    language: str,
    *,
    previous: Path | None,
    added: Iterable[tuple[int, str]],
    deleted: Iterable[int] = (),
) -> None:
    """Write a word index into an empty folder.

    Args:
        folder: The folder.
        language: Language of the words.
        previous: Folder of the previous state, which is not changed. If None, the previous state is empty.
        added: Index and text of each document to add.
        deleted: Indices of the documents to delete.
    """
    if previous is not None:
        for path in previous.iterdir():
            if path.name in MUTABLE_FILES:
                shutil.copyfile(path, folder / path.name)
            elif not path.name.endswith(".lock"):
                _link_or_copy(path, folder / path.name)
    import tantivy

    index = _open(folder, language) if previous is not None else _create(folder, language)
    writer = index.writer(heap_size=WRITER_BYTES, num_threads=1)
    if deleted_documents := list(deleted):
        writer.delete_documents_by_query(tantivy.Query.term_set_query(index.schema, "number", deleted_documents))
    for document, text in added:
        writer.add_document(tantivy.Document.from_dict({"number": document, "text": text}, index.schema))
    writer.commit()
    writer.wait_merging_threads()
    for name in MUTABLE_FILES:  # tantivy creates these files readable by the owner only
        shutil.copymode(folder / WRITER_LOCK, folder / name)
    sync_folder(folder)


def _can_lock(folder: Path) -> bool:
    """Return whether this process may write the lock file that tantivy needs to open an index."""
    lock = folder / META_LOCK
    return os.access(lock if lock.exists() else folder, os.W_OK)


def _lockable_copy(folder: Path) -> Path:
    """Return a temporary folder with symbolic links to the files of a read-only index."""
    links = Path(mkdtemp(prefix="heedful-words-"))
    for path in folder.iterdir():
        if path.name in MUTABLE_FILES:
            shutil.copyfile(path, links / path.name)
        elif not path.name.endswith(".lock"):
            (links / path.name).symlink_to(path.absolute())
    return links


def _link_or_copy(path: Path, target: Path) -> None:
    """Make a hard link to a file, or copy it if the file system has no hard links."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def _words_as_written() -> tantivy.TextAnalyzer:
    """Return an analyzer that splits a text into words, without stemming or lowercasing."""
    import tantivy

    return tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).build()


def _analyzer(language: str) -> tantivy.TextAnalyzer:
    """Return an analyzer that splits a text into lowercased, stemmed words and drops the stop words of a language."""
    import tantivy

    filters = tantivy.Filter
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(filters.remove_long(MAX_WORD_BYTES))
    builder = builder.filter(filters.lowercase())
    if language != NO_LANGUAGE and language not in WITHOUT_STOP_WORDS:
        builder = builder.filter(filters.stopword(language))
    if language != NO_LANGUAGE:
        builder = builder.filter(filters.stemmer(language))
    return builder.build()


def _create(folder: Path, language: str) -> tantivy.Index:
    """Create an empty tantivy index in a folder."""
    import tantivy

    schema = tantivy.SchemaBuilder()
    schema.add_unsigned_field("number", indexed=True, fast=True)
    schema.add_text_field("text", tokenizer_name="words", index_option="freq")
    index = tantivy.Index(schema.build(), path=str(folder))
    index.register_tokenizer("words", _analyzer(language))
    index.config_reader("manual")  # no reloading: the files of a folder do not change
    return index


def _open(folder: Path, language: str) -> tantivy.Index:
    """Open the tantivy index of a folder; raise a HeedfulError if it cannot be opened."""
    import tantivy

    try:
        index = tantivy.Index.open(str(folder))
    except (OSError, ValueError) as error:
        raise HeedfulError(f"{folder} cannot be opened: {error}; build the index again") from None
    index.register_tokenizer("words", _analyzer(language))
    index.config_reader("manual")  # no reloading: the files of a folder do not change
    return index

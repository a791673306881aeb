"""`SearchIndex`: results equal those of plain formulas, and a change is complete or absent if the process is killed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from heedful import SearchIndex, atomic_io
from heedful.bundled import BUNDLED_ENCODER
from heedful.data.retrieval.documents import Document
from heedful.errors import DataError, HeedfulError
from heedful.search import index as module
from heedful.search.store import IndexState, read_state
from heedful.search.vectors import VECTOR_FORMATS, VectorFormat
from heedful.search.words import WordIndex
from tests.support.model_folders import make_model_dir
from tests.support.other_user import OTHER_USER, needs_root, run_as_user, shared_folder

TEXTS = {
    "ship": "The ship left the harbour at dawn.",
    "bread": "Bread is baked in a hot oven.",
    "boat": "A boat came home before dark.",
    "snow": "Snow fell on the hills all night.",
    "cake": "The baker made a cake with apples.",
    "train": "The train to the coast was late.",
}
DOCUMENTS = [Document(id=name, text=text) for name, text in TEXTS.items()]


@pytest.fixture(scope="module")
def engine() -> heedful.Engine:
    return heedful.Engine(BUNDLED_ENCODER)


@pytest.fixture(scope="module")
def built_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "index"
    SearchIndex.create(folder, vectors="float32").add(DOCUMENTS)
    return folder


@pytest.fixture
def index(built_index: Path, tmp_path: Path, engine: heedful.Engine) -> SearchIndex:
    shutil.copytree(built_index, tmp_path / "index")
    return SearchIndex(tmp_path / "index", engine=engine)


def ids(index: SearchIndex, query: str, **options: Any) -> list[str]:
    """Return the ids of the documents that a search finds, best first."""
    return [hit.id for hit in index.search(query, **options)]


def file_names(folder: Path) -> list[str]:
    """Return the names of the files and folders in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def named_files(state: IndexState) -> list[str]:
    """Return the names of all files and folders of an index with this state, sorted."""
    return sorted(["index.json", "index.lock", state.words, *(segment.name for segment in state.segments)])


def test_vectors_rank_by_cosines(index: SearchIndex, engine: heedful.Engine) -> None:
    query = "sailing on the sea"
    query_vector, vectors = engine.encode(query), engine.encode(list(TEXTS.values()))
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query_vector)
    cosines = dict(zip(TEXTS, vectors @ query_vector / lengths, strict=True))
    hits = index.search(query, method="vectors")
    assert [hit.id for hit in hits] == sorted(cosines, key=lambda name: -cosines[name])
    assert [hit.score for hit in hits] == pytest.approx([cosines[hit.id] for hit in hits], abs=1e-5)
    assert {hit.id: hit.passage for hit in hits} == TEXTS
    assert (hits[0].start, hits[0].end) == (0, len(hits[0].passage))


def test_words_are_stemmed_and_not_parsed_as_a_query(index: SearchIndex) -> None:
    assert ids(index, "baking", method="words") == ["bread"]
    assert set(ids(index, 'boats: AND "(baked* -ship', method="words")) == {"boat", "bread", "ship"}
    assert ids(index, "the of and", method="words") == []  # stop words


@pytest.mark.parametrize(
    ("language", "query", "text", "words"),
    [
        ("english", "baking a boat", "Boats' bakers: BOAT-baking, sailboat", ["Boats", "BOAT", "baking"]),
        ("english", "the of and", "the boat", []),  # stop words
        ("none", "boat", "boats, boat_boat", ["boat", "boat"]),
        ("tamil", "வீடு", "ஒரு 🚤 வீடு", ["வீடு"]),  # its vowel signs are no letters in Python
    ],
)
def test_matches_are_words_with_a_stem_of_the_query(language: str, query: str, text: str, words: list[str]) -> None:
    spans = WordIndex(None, language).matches(query, text)
    assert [text[start:end] for start, end in spans] == words
    assert spans == sorted(spans) and all(end <= start for (_, end), (start, _) in pairwise(spans))


@needs_root
def test_a_read_only_index_is_searched(built_index: Path) -> None:
    """The index belongs to another user. Searching it leaves no temporary folder behind."""

    def temporary_folders() -> list[str]:
        return [str(path) for path in Path(tempfile.gettempdir()).glob("heedful-words-*")]

    with shared_folder(OTHER_USER) as shared:
        folder = shared / "index"
        shutil.copytree(built_index, folder)
        assert ids(SearchIndex(folder), "baking a boat", method="words") == ["bread", "boat"]

        def search() -> tuple[list[str], list[str]]:
            with pytest.raises(PermissionError):
                (folder / "file").touch()
            return ids(SearchIndex(folder), "baking a boat", method="words"), temporary_folders()

        folders_before = set(temporary_folders())
        result = run_as_user(OTHER_USER, search)
        assert isinstance(result, list), result  # the text of an error
        document_ids, folders_after = result
        assert document_ids == ["bread", "boat"]
        assert set(folders_after) <= folders_before


def test_hybrid_adds_reciprocal_ranks(index: SearchIndex) -> None:
    query = "a ship at sea"
    expected: dict[str, float] = {}
    for method in ("words", "vectors"):
        for rank, hit in enumerate(index.search(query, 100, method=method), start=1):
            expected[hit.id] = expected.get(hit.id, 0) + 1 / (60 + rank)
    hits = index.search(query)
    assert {hit.id: pytest.approx(hit.score) for hit in hits} == expected
    assert [hit.score for hit in hits] == sorted(expected.values(), reverse=True)
    assert ids(index, query, top_k=2) == [hit.id for hit in hits[:2]]


def test_bm25_is_that_of_the_formula(tmp_path: Path, engine: heedful.Engine) -> None:
    """k1 is 1.2 and b is 0.75. Texts are so short that the lengths, which tantivy rounds, are exact."""
    texts = {"a": "wing wing lift", "b": "wing drag", "c": "heat flow plate shock"}
    index = SearchIndex.create(tmp_path / "index", language="none")
    index.add(Document(id=name, text=text) for name, text in texts.items())
    frequencies = {"a": 2, "b": 1}  # of "wing"
    mean_length = (3 + 2 + 4) / 3
    idf = np.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    hits = index.search("wing", method="words")
    assert {hit.id for hit in hits} == {"a", "b"}
    for hit in hits:
        tf, length = frequencies[hit.id], len(texts[hit.id].split())
        expected = idf * tf * (1.2 + 1) / (tf + 1.2 * (1 - 0.75 + 0.75 * length / mean_length))
        assert hit.score == pytest.approx(expected, rel=1e-5)


def test_documents_are_added_replaced_and_deleted(index: SearchIndex) -> None:
    assert index.add(DOCUMENTS) == module.AddedDocuments(unchanged=len(TEXTS))
    changed = Document(id="bread", text="Rolls are sold at the harbour.", title="Rolls")
    new = Document(id="sun", text="The sun rose.")
    assert index.add([changed, new]) == module.AddedDocuments(added=1, replaced=1)
    assert len(index) == len(TEXTS) + 1
    assert "sun" in index and "moon" not in index
    assert ids(index, "oven", method="words") == [], "the old text is gone"
    assert set(ids(index, "harbour", method="words")) == {"ship", "bread"}
    assert index.delete(["ship", "sun"]) == 2
    assert len(index) == len(TEXTS) - 1
    assert ids(index, "harbour", method="words") == ["bread"]
    assert not {"ship", "sun"} & set(ids(index, "sea", method="vectors", top_k=100))


def test_a_rebuilt_index_has_the_same_documents_in_one_segment(index: SearchIndex) -> None:
    index.add([Document(id="bread", text="Rolls are sold at the harbour."), Document(id="sun", text="The sun rose.")])
    index.delete(["ship", "sun"])
    hits_before = [(hit.id, pytest.approx(hit.score, abs=1e-6)) for hit in index.search("the sea", method="vectors")]
    index.rebuild()
    state = read_state(index.folder)
    assert state.deleted == () and len(state.segments) == 1
    for opened in (index, SearchIndex(index.folder)):
        assert [(hit.id, hit.score) for hit in opened.search("the sea", method="vectors")] == hits_before
        assert ids(opened, "rolls", method="words") == ["bread"]
        assert len(opened) == len(TEXTS) - 1


def test_all_documents_can_be_deleted(index: SearchIndex) -> None:
    index.delete(["ship"])
    index.delete(set(TEXTS) - {"ship"})
    index.rebuild()
    assert len(index) == 0 and ids(index, "the sea") == []
    assert index.add(DOCUMENTS).added == len(TEXTS)


@pytest.mark.parametrize("vectors", VECTOR_FORMATS)
def test_segments_are_merged_and_searched_as_one(
    tmp_path: Path, built_index: Path, monkeypatch: pytest.MonkeyPatch, vectors: VectorFormat
) -> None:
    monkeypatch.setattr(module, "COMMIT", 1)
    index = SearchIndex.create(tmp_path / "index", vectors=vectors)
    index.add(DOCUMENTS)
    state = read_state(index.folder)
    assert [segment.documents for segment in state.segments] == [5, 1] and state.generation == len(TEXTS)
    for method in ("words", "hybrid", "vectors"):
        expected = SearchIndex(built_index).search("a boat at sea", method=method)
        hits = index.search("a boat at sea", method=method)
        assert [hit.id for hit in hits] == [hit.id for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=5e-3)
    assert file_names(index.folder) == named_files(state)


def test_a_long_document_is_found_by_its_best_passage(tmp_path: Path) -> None:
    sentences = [f"Sentence number {n} is about nothing at all." for n in range(60)]
    sentences[40] = "A submarine dived under the arctic ice."
    text = " ".join(sentences)
    index = SearchIndex.create(tmp_path / "index", passage_tokens=40)
    index.add([*DOCUMENTS, Document(id="long", text=text, title="Report")])
    assert index.passages > len(index) + 10
    for method in ("words", "vectors", "hybrid"):
        hit = next(hit for hit in index.search(sentences[40], method=method) if hit.id == "long")
        assert "submarine" in hit.passage and len(hit.passage) < 300
        assert f"Report\n{text}"[hit.start : hit.end] == hit.passage
    passages = [hit.passage for hit in index.search("nothing", 100, method="vectors")]
    assert max(len(index.engine.tokenizer.encode(passage)) for passage in passages) <= 40


def test_hits_are_sorted_by_the_scores_of_the_reranker(index: SearchIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores_for_baked(engine: Any, query: str, texts: list[str]) -> list[float]:
        return [float("baked" in text) + len(text) / 1e3 for text in texts]

    monkeypatch.setattr(module, "rerank_scores", scores_for_baked)
    hits = index.search("a ship at sea", 2, reranker=index.engine)
    assert hits[0].id == "bread" and hits[0].score > 1 and len(hits) == 2


def test_a_cross_encoder_reranks(index: SearchIndex, tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "cross-encoder", "regression")
    hits = index.search("a cat", 3, reranker=folder)
    (answer,) = heedful.Engine(folder)([("a cat", hits[0].passage)])
    assert hits[0].score == pytest.approx(1 / (1 + np.exp(-answer["values"]["stars"])))
    all_hits = index.search("a cat", 6, reranker=heedful.Engine(folder))
    scores = [hit.score for hit in all_hits]
    assert scores == sorted(scores, reverse=True)
    assert hits == all_hits[:3]
    with pytest.raises(HeedfulError, match="has a embedding head; results are reranked by a model that scores pairs"):
        index.search("a ship", reranker=index.engine)


def test_another_process_may_change_an_opened_index(index: SearchIndex) -> None:
    second = SearchIndex(index.folder, engine=index.engine)
    assert not second.refresh()
    index.delete(["ship"])
    index.rebuild()
    assert "ship" in ids(second, "ship", method="words"), "it searches the state that it opened"
    assert second.document(0).id == "ship"
    assert second.refresh()
    assert "ship" not in ids(second, "ship", method="words")
    with module.locked_for_writing(index.folder), pytest.raises(HeedfulError, match="another process, pid"):
        second.delete(["boat"])


def test_a_full_disk_changes_nothing(index: SearchIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    content_before = content(index)

    def write_to_full_disk(handle: int, rest: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = "could not be changed: No space left on device; its last complete state is"
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io, "_write", write_to_full_disk)
        with pytest.raises(HeedfulError, match=message):
            index.add([Document(id="new", text="new text")])
    assert content(index) == content_before
    assert content(SearchIndex(index.folder, engine=index.engine)) == content_before
    assert index.add([Document(id="new", text="new text")]).added == 1


# -- killed processes -----------------------------------------------------------------------------------------------

# A script that changes copies of an index, and is killed meanwhile: the n-th copy before the n-th file operation, until
# a change is complete; and four further copies after 0 to 60 ms. CHANGE is replaced by one of CHANGES.
KILL_SCRIPT = """
import os, shutil, signal, sys, time
from heedful import SearchIndex, atomic_io
from heedful.data.retrieval.documents import Document
from heedful.search import index as module

module.COMMIT = 2
source, target = sys.argv[1:3]
engine = SearchIndex(source).engine
operations = 0  # file operations of this process so far
fatal_operation = 0  # the operation before which the process is killed, from 1; 0: none

def counted(original):
    def operation(*arguments):
        global operations
        operations += 1
        if operations == fatal_operation:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    return operation

for name in ("_open", "_write", "_mkdir", "_rename", "_remove"):
    setattr(atomic_io, name, counted(getattr(atomic_io, name)))
atomic_io._fsync = counted(lambda handle: None)

def in_child(name, delay=None):
    folder = shutil.copytree(source, f"{target}/{name}")
    if not (child := os.fork()):
        index = SearchIndex(folder, engine=engine)
        CHANGE
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

code = -9
while code == -9:  # until the change is complete
    fatal_operation += 1
    code = in_child(f"operation-{fatal_operation}")
    assert code in (0, -9), code
fatal_operation = 0
for number in range(4):
    in_child(f"moment-{number}", 0.02 * number)
"""
CHANGES = {
    "add": "index.add([Document(id=f'new{n}', text=f'new text {n} at sea') for n in range(3)])",
    "replace": "index.add([Document(id='ship', text='The ship sank at sea.')])",
    "delete": "index.delete(['boat', 'cake'])",
    "rebuild": "index.rebuild()",
}


def content(index: SearchIndex) -> tuple[object, ...]:
    """Return what a user sees of an index: its size, and the results of two searches."""
    rankings = [index.search("new ships at sea", 100, method=method) for method in ("words", "vectors")]
    return (
        len(index),
        index.passages,
        [[(hit.id, hit.passage, round(hit.score, 4)) for hit in hits] for hits in rankings],
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("change", CHANGES)
def test_a_killed_change_is_complete_or_not_there(
    change: str, index: SearchIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a process was killed, an index has one of the states that it has between the commits of a whole change.

    The same change can then be made again, and leaves no files of the killed process.
    """
    index.delete(["train"])
    source = shutil.copytree(index.folder, tmp_path / "source")
    states = [content(index)]  # content before the change, and after each of its commits
    commit_state = module.commit_state

    def commit_and_record(folder: Path, state: Any) -> None:
        commit_state(folder, state)
        states.append(content(SearchIndex(folder, engine=index.engine)))

    monkeypatch.setattr(module, "COMMIT", 2)
    with monkeypatch.context() as patch:
        patch.setattr(module, "commit_state", commit_and_record)
        exec(CHANGES[change], {"Document": Document, "index": index})
    script = KILL_SCRIPT.replace("CHANGE", CHANGES[change])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    (tmp_path / "copies").mkdir()
    subprocess.run([sys.executable, "-c", script, source, tmp_path / "copies"], check=True, env=environment)
    copies = sorted((tmp_path / "copies").iterdir())
    assert len(copies) > 8 + 4
    reached_states = set()
    for number, folder in enumerate(copies):
        killed = SearchIndex(folder, engine=index.engine)
        state = content(killed)
        assert state in states, folder.name
        reached_states.add(states.index(state))
        is_repeatable = change != "delete" or "boat" in killed
        if number % 4 == 0 and is_repeatable:
            exec(CHANGES[change], {"Document": Document, "index": killed})
            assert content(killed) == states[-1], folder.name
            assert file_names(folder) == named_files(read_state(folder))
    assert reached_states == set(range(len(states)))


def test_invalid_searches_and_changes_are_errors(index: SearchIndex) -> None:
    with pytest.raises(HeedfulError, match="the query is empty"):
        index.search(" ")
    with pytest.raises(HeedfulError, match="top_k is 0"):
        index.search("a", 0)
    with pytest.raises(HeedfulError, match=r"method is .bm25.: use one of hybrid, words, vectors"):
        index.search("a", method="bm25")  # type: ignore[arg-type]
    with pytest.raises(DataError, match='the id "x" is given twice'):
        index.add([Document(id="x", text="a"), Document(id="x", text="b")])
    with pytest.raises(HeedfulError, match='no document has the id "y"; nothing was deleted'):
        index.delete(["ship", "y"])
    assert "ship" in index


def test_folders_and_settings_of_a_new_index_are_checked(
    index: SearchIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeedfulError, match=r"holds no index: it has no index\.json; make one with heedful index"):
        SearchIndex(tmp_path)
    with pytest.raises(HeedfulError, match="holds an index already"):
        SearchIndex.create(index.folder)
    with pytest.raises(HeedfulError, match="exists and is no index"):
        SearchIndex.create(tmp_path)
    with pytest.raises(HeedfulError, match=r"language is 'englsh' \(did you mean \"english\"\?\): use one of arabic"):
        SearchIndex.create(tmp_path / "new", language="englsh")
    with pytest.raises(HeedfulError, match="passage_tokens is 1000; expected a number from 8 to 512"):
        SearchIndex.create(tmp_path / "new", passage_tokens=1000)
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(HeedfulError, match=r"needs tantivy: pip install 'heedful\[search\]'"):
        SearchIndex.create(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_damaged_files_are_errors(index: SearchIndex) -> None:
    (index.folder / read_state(index.folder).segments[0].name / "passages.bin").write_bytes(b"")
    with pytest.raises(HeedfulError, match=r"passages.bin has 0 bytes, expected \d+: it is damaged"):
        SearchIndex(index.folder)
    (index.folder / "index.json").write_text('{"version": 2}')
    with pytest.raises(HeedfulError, match="has version 2, expected 1: build the index again"):
        SearchIndex(index.folder)


def test_a_model_that_changed_is_refused(index: SearchIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fingerprint", lambda engine: "sha256:other")
    opened = SearchIndex(index.folder)
    assert ids(opened, "ship", method="words") == ["ship"], "a search by words needs no model"
    with pytest.raises(HeedfulError, match="heedful-mini-en is not the model that made the vectors"):
        opened.search("ship")

"""build_corpus: the kinds of input files, equal results with any number of processes, and resuming after a crash."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from heedful import settings
from heedful.data.bad_rows import Quarantine, Skip
from heedful.data.corpus import build as module
from heedful.data.corpus import documents, shards
from heedful.data.corpus.build import Corpus, CorpusProgress, CorpusSettings, build_corpus, contains_corpus
from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

WORDS = [
    *("rain", "fell", "on", "the", "quiet", "harbour", "boats", "came", "home", "before", "dark", "nobody", "waited"),
    *("for", "ferry", "at", "noon", "light", "house", "keeper", "wrote", "letters", "about", "storm", "and", "sea"),
]
ROOT = Path(__file__).parents[3]


def random_documents(count: int, seed: int = 0, paragraphs: int = 3) -> list[str]:
    """Documents of 1 to `paragraphs` paragraphs, of random sentences."""
    rng = random.Random(seed)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(3, 12))).capitalize() + rng.choice(".!?")

    def paragraph() -> str:
        return " ".join(sentence() for _ in range(rng.randint(1, 5)))

    return ["\n\n".join(paragraph() for _ in range(rng.randint(1, paragraphs))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(random_documents(200), TokenizerSettings(vocab_size=200))


def decoded_documents(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """The text of every document, decoded from its tokens."""
    token_edges = corpus.segments[corpus.documents].tolist()
    return [tokenizer.decode(corpus.tokens(start, stop).tolist()) for start, stop in pairwise(token_edges)]


def round_trip(tokenizer: Tokenizer, *texts: str) -> list[str]:
    """The texts encoded and decoded again."""
    return [tokenizer.decode(tokenizer.ids([text])[0].tolist()) for text in texts]


def file_contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a corpus, by relative path; the manifest without the seconds that the build took."""
    content_by_path = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    about = json.loads(content_by_path.pop("manifest.json"))
    about.pop("seconds")
    return content_by_path | {"manifest.json": json.dumps(about).encode()}


# ---------------------------------------------------------------------------------------------------- files


def test_every_kind_of_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    a, b, c, d, e, f, g = random_documents(7, paragraphs=1)
    (folder / "a.txt").write_text(f"{a}\n{b}\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"id": 1, "text": c}).encode()))
    write_table(pyarrow.table({"text": [d]}), folder / "c.parquet")
    (folder / "d.txt.xz").write_bytes(lzma.compress(e.encode()))
    (folder / "more" / "e.txt.bz2").write_bytes(bz2.compress(f.encode()))
    (folder / "more" / "f.unknown").write_bytes(b"\0")
    (folder / "more" / "g.txt").write_bytes(b"")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints" / "a.txt").write_bytes(a.encode())  # in a hidden folder, so it is not read
    with zipfile.ZipFile(tmp_path / "last.txt.zip", "w") as file:
        file.writestr("last.txt", g)
    corpus = build_corpus([folder, tmp_path / "last.txt.zip"], tokenizer, tmp_path / "out")
    assert decoded_documents(corpus, tokenizer) == round_trip(tokenizer, a, b, c, d, e, f, g)
    names = ["a.txt", "b.jsonl.gz", "c.parquet", "d.txt.xz", "more/e.txt.bz2", "more/g.txt", "last.txt.zip"]
    assert [file["name"] for file in corpus.about["files"]] == names
    stated = corpus.about["stated"]
    assert stated[0] == "data: 1 files of unknown kinds are not used"
    assert "a.txt: has no blank lines, so each line is a document" in stated
    assert 'b.jsonl.gz: columns: text="text"; not used: "id"' in stated
    assert "g.txt: is empty" in stated


LAYOUT = "One came.\nTwo came.\n\nThree came.\n\n\nFour\nFive came.\n"


@pytest.mark.parametrize(
    ("form", "documents", "paragraphs", "segments"),
    [("line", 5, 5, 5), ("paragraph", 3, 3, 5), ("auto", 3, 3, 5), ("document", 1, 3, 4)],
)
def test_layouts_of_text(
    tmp_path: Path, tokenizer: Tokenizer, form: Any, documents: int, paragraphs: int, segments: int
) -> None:
    (tmp_path / "a.txt").write_text(LAYOUT)
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out", CorpusSettings(sample_by=form))
    counts = (len(corpus), int(corpus.paragraphs.sum()), len(corpus.paragraphs))
    assert counts == (documents, paragraphs, segments)
    if form == "auto":
        assert corpus.about["stated"] == ["a.txt: lines are sentences, and blank lines separate documents"]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("one\ntwo\nthree", "line"),
        ("one", "line"),
        ("\n\none\n\n\n", "document"),
        ("A line that goes on\nto the next.\n\nAnd one more that\ngoes on too.\n", "document"),
        ("A paragraph. On one line.\n\nAnother. Paragraph.\n\nAnd one.", "document"),
        ("A.\nB!\nC?\n\nD.\n“E.”\n", "paragraph"),
        ("One.\x85\nTwo.\nThree.\n", "line"),
        ("One.\x0cOne\u2028One.\r\nTwo.\x1c\r\n", "line"),
        ("A.\u2028B.\n\u2028\nD.\nE.\n", "paragraph"),
    ],
)
def test_detect_layout(head: str, expected: str) -> None:
    assert documents.detect_layout(head) == expected


def test_only_newlines_separate_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """NEL, LINE SEPARATOR and form feed, at which str.splitlines splits, stay inside a line."""
    (tmp_path / "a.txt").write_text("Rain fell.\x85\nBoats came.\u2028\nThe storm and the sea.\x0c\n", encoding="utf-8")
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out")
    assert len(corpus) == 3
    assert corpus.about["stated"] == ["a.txt: has no blank lines, so each line is a document"]


def test_files_of_tagged_words_are_not_read_as_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "data").mkdir()
    for name, text in (("a.txt", "Rain fell.\n"), ("train.conll", "EU NNP B-ORG\n"), ("dev.iob.gz", "")):
        (tmp_path / "data" / name).write_text(text)
    corpus = build_corpus([tmp_path / "data"], tokenizer, tmp_path / "out")
    assert [file["name"] for file in corpus.about["files"]] == ["a.txt"]
    assert corpus.about["stated"][0] == "data: 2 files of unknown kinds are not used"
    message = r"train\.conll: \.conll files hold words with tags, not text: write their text to a \.txt file"
    with pytest.raises(HeedfulError, match=message):
        build_corpus([tmp_path / "data" / "train.conll"], tokenizer, tmp_path / "other")
    (tmp_path / "data" / "a.txt").unlink()
    with pytest.raises(
        HeedfulError, match=r"data: holds no file of text: expected \.csv, .*\.label, compressed or not"
    ):
        build_corpus([tmp_path / "data"], tokenizer, tmp_path / "other")


def test_an_overlong_document_is_cut_and_the_cut_is_counted(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_ROW_BYTES", 1000)
    (tmp_path / "a.txt").write_text("Rain fell on the harbour.\n" * 100)
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out", CorpusSettings(sample_by="document"))
    assert corpus.about["cut"] == 7 and len(corpus) == 8
    assert corpus.about["counts"]["segments"] == 100


def test_an_overlong_line_is_a_bad_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Rain fell.\n" + "x" * 10_000_001 + "\nBoats came.\n")
    with pytest.raises(HeedfulError, match=r"a.txt:2: is longer than 10,000,000 bytes, the most that a row may have"):
        build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out")
    corpus = build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out", on_bad_row=Skip())
    assert len(corpus) == 2 and list(corpus.about["bad_rows"].values()) == [1]


def test_bad_rows_are_set_aside_once(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", random_documents(4))
    file.write_text('{"text": 5}\n' + file.read_text() + "{\n")
    policy = Quarantine(file=tmp_path / "bad.jsonl")
    with pytest.raises(HeedfulError, match=r"a\.jsonl:1:text: is 5, expected text"):
        build_corpus([file], tokenizer, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_corpus([file], tokenizer, tmp_path / "out", on_bad_row=policy)
    assert len(build_corpus([file], tokenizer, tmp_path / "out", on_bad_row=policy)) == 4
    assert [json.loads(line)["line"] for line in policy.file.read_text().splitlines()] == [1, 6]


def test_a_corpus_is_the_same_however_its_paths_are_spelled(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", random_documents(4))
    file.write_text(file.read_text() + "{\n")
    monkeypatch.chdir(tmp_path)
    spellings = file, Path("a.jsonl"), Path("..") / tmp_path.name / "a.jsonl"
    corpora = [
        build_corpus([spelling], tokenizer, tmp_path / str(index), on_bad_row=Skip())
        for index, spelling in enumerate(spellings)
    ]
    assert [corpus.about["bad_rows"] for corpus in corpora] == [{"a.jsonl": 1}] * 3
    assert len({corpus.digest for corpus in corpora}) == 1


def raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_contains_corpus(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """True of unfinished and damaged corpora too; false of folders with the manifest.json of something else."""
    (tmp_path / "text").mkdir()
    file = write_jsonl(tmp_path / "text" / "a.jsonl", random_documents(4))
    (tmp_path / "text" / "manifest.json").write_text('{"made": "by hand"}')
    (tmp_path / "text" / "parts").mkdir()
    assert not contains_corpus(tmp_path / "text")
    assert not contains_corpus(file)
    assert not contains_corpus(tmp_path / "none")
    with pytest.raises(
        HeedfulError, match=r"manifest\.json: has no rows: .*: if it is no text, give the other files by name"
    ):
        build_corpus([tmp_path / "text"], tokenizer, tmp_path / "refused")
    assert contains_corpus(tmp_path / "refused"), "the build began before it failed"
    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_corpus([file], tokenizer, tmp_path / "out")
    assert contains_corpus(tmp_path / "out")
    build_corpus([file], tokenizer, tmp_path / "out")
    for name in ("manifest.json", "tokens-00000.bin", "segments.bin"):
        assert contains_corpus(tmp_path / "out")
        (tmp_path / "out" / name).unlink()
    assert contains_corpus(tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no files were given"),
        ({"none.txt": None}, "none.txt: there is no such file"),
        ({"a.txt": " \n \n"}, r"a.txt: no document is left: 0 are too short, 0 have no text, 0 are bad rows"),
        ({"a.jsonl": '{"text": " "}'}, r"a.jsonl: no document is left: 0 are too short, 1 have no text, 0 are bad"),
        (
            {"a.jsonl": '{"body": "x"}'},
            'a.jsonl: which column is the text.*say --corpus.text_column=NAME, one of "body"',
        ),
        ({"a.txt": "a\0" * 99}, "if this is UTF-16, say iconv -f utf-16le -t utf-8"),
    ],
)
def test_inputs_that_cannot_be_built(tmp_path: Path, tokenizer: Tokenizer, files: dict[str, Any], message: str) -> None:
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(HeedfulError, match=message):
        build_corpus([tmp_path / name for name in files], tokenizer, tmp_path / "out")


def test_the_text_column_can_be_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    documents = random_documents(2)
    corpus = build_corpus(
        [write_jsonl(tmp_path / "a.jsonl", documents, "body")],
        tokenizer,
        tmp_path / "out",
        CorpusSettings(text_column="body"),
    )
    assert decoded_documents(corpus, tokenizer) == round_trip(tokenizer, *documents)


def test_settings_are_settings() -> None:
    corpus_settings = CorpusSettings(dedup="near", min_document_chars=3)
    assert settings.from_mapping(CorpusSettings, settings.to_mapping(corpus_settings), source="test") == corpus_settings
    for name, value in {"jaccard_threshold": 0.1, "min_document_chars": -1, "shard_chars": 0}.items():
        with pytest.raises(HeedfulError, match=f"^{name} is "):
            CorpusSettings(**{name: value})


# ---------------------------------------------------------------------------------------------------- documents


def test_duplicate_and_short_documents_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    originals = random_documents(40, paragraphs=8)
    near_duplicates = [text + " Rain fell." for text in originals if len(text) > 700]
    assert near_duplicates
    exact_duplicates = [*originals[:5], "  " + originals[7]]
    documents = [*originals, "Rain.", "", *near_duplicates, *exact_duplicates]
    file = write_jsonl(tmp_path / "a.jsonl", documents)
    short = 1 + sum(len(text) < 20 for text in originals)  # "Rain." is short too
    for dedup, exact, near in (("none", 0, 0), ("exact", 6, 0), ("near", 6, len(near_duplicates))):
        chosen = CorpusSettings(dedup=dedup, min_document_chars=20, shard_chars=2000)
        updates: list[CorpusProgress] = []
        corpus = build_corpus([file], tokenizer, tmp_path / dedup, chosen, on_progress=updates.append)
        left_out = corpus.about["left_out"]
        assert left_out["exact"] == exact
        assert left_out["near"] == near
        assert left_out["short"] == short
        assert left_out["empty"] == 1
        assert len(corpus) == len(documents) - 1 - short - exact - near
        duplicates_in_corpus = 6 if dedup == "none" else 0
        assert len(set(corpus.hashes.tolist())) == len(corpus) - duplicates_in_corpus
        repeated = corpus.about["repeated"]["documents"]
        assert repeated == pytest.approx(duplicates_in_corpus / len(corpus))
        last = updates[-1]
        assert (last.documents, last.tokens, last.duplicates) == (len(corpus), corpus.count, exact + near)
        assert last.short == short + 1, "the empty document is counted as short"
        assert last.characters == corpus.about["counts"]["characters"]
        assert last.share == 1 and last.seconds > 0
        shares = [update.share for update in updates]
        assert shares == sorted(shares)


def test_the_share_of_repeated_lines_is_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("Rain fell on the quiet harbour.\nThe boats came home before dark.\n" * 50)
    about = build_corpus([tmp_path / "a.txt"], tokenizer, tmp_path / "out").about
    assert about["repeated"] == {"documents": 0.98, "segments": 0.98}


# ---------------------------------------------------------------------------------------------------- equal results


@pytest.fixture
def corpus_files(tmp_path: Path) -> list[Path]:
    """Three files; the second and third repeat documents of the first."""
    documents = random_documents(150, seed=7)
    first = write_jsonl(tmp_path / "a.jsonl", documents)
    lines = random_documents(60, seed=8, paragraphs=1) + [documents[3].replace("\n", " ")] * 3
    (tmp_path / "b.txt").write_text("\n".join(lines))
    return [
        first,
        tmp_path / "b.txt",
        write_jsonl(tmp_path / "c.jsonl", documents[100:120] + random_documents(40, seed=9)),
    ]


@pytest.mark.parametrize("dedup", ["none", "near"])
def test_processes_make_no_difference(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, dedup: Any
) -> None:
    chosen = CorpusSettings(dedup=dedup, shard_chars=6000)
    expected = build_corpus(corpus_files, tokenizer, tmp_path / "one_process", chosen)
    assert len(expected.about["shards"]) > 5
    monkeypatch.setattr(module, "SMALL_INPUT_BYTES", 0)
    build_corpus(corpus_files, tokenizer, tmp_path / "three_processes", chosen, processes=3)
    assert file_contents(tmp_path / "three_processes") == file_contents(tmp_path / "one_process")
    assert not [path for path in (tmp_path / "three_processes").rglob("*") if path.name.endswith(".part")]
    one_shard = build_corpus(corpus_files, tokenizer, tmp_path / "one_shard", CorpusSettings(dedup=dedup))
    assert one_shard.tokens(0, one_shard.count).tolist() == expected.tokens(0, expected.count).tolist()
    for name in ("documents", "segments", "paragraphs", "hashes"):
        assert (getattr(one_shard, name) == getattr(expected, name)).all(), name


@pytest.mark.parametrize("writes_before", range(0, 26, 3))
def test_an_interrupted_build_is_resumed(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, writes_before: int
) -> None:
    """The build is interrupted in the middle of a file, after `writes_before` complete ones."""
    chosen = CorpusSettings(dedup="near", shard_chars=8000)
    expected = build_corpus(corpus_files, tokenizer, tmp_path / "whole", chosen)
    original_atomic_file = shards.atomic_file
    writes = 0

    @contextmanager
    def interrupted_atomic_file(path: Path) -> Any:
        nonlocal writes
        with original_atomic_file(path) as file:
            writes += 1
            if writes > writes_before:
                file.write(b"half")
                raise KeyboardInterrupt
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(shards, "atomic_file", interrupted_atomic_file)
        try:
            build_corpus(corpus_files, tokenizer, tmp_path / "out", chosen)
        except KeyboardInterrupt:
            with pytest.raises(HeedfulError, match=r"is not finished|is no corpus"):
                Corpus.open(tmp_path / "out")
    again = build_corpus(corpus_files, tokenizer, tmp_path / "out", chosen)
    assert file_contents(tmp_path / "out") == file_contents(tmp_path / "whole")
    assert again.count == expected.count


def test_a_finished_corpus_is_reused_and_a_different_one_refused(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, chosen = tmp_path / "out", CorpusSettings(shard_chars=8000)

    def assert_refused(message: str, **changes: Any) -> None:
        options = {"files": corpus_files, "tokenizer": tokenizer, "settings": chosen} | changes
        with pytest.raises(HeedfulError, match=message):
            build_corpus(options["files"], options["tokenizer"], out, options["settings"])

    for state in ("a different, unfinished corpus", "a different corpus"):
        with monkeypatch.context() as patch:
            if state == "a different, unfinished corpus":
                patch.setattr(module, "finish", raise_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    build_corpus(corpus_files, tokenizer, out, chosen)
            else:
                build_corpus(corpus_files, tokenizer, out, chosen)
        start = f"out: holds {state}: "
        both = (
            'its setting dedup is "none", not "exact"; its setting shard_chars is 8000, not 9000. Give another folder'
        )
        assert_refused(start + both, settings=CorpusSettings(shard_chars=9000, dedup="exact"))
        assert_refused(
            start + r'its files are \["a.jsonl", "b.txt", "c.jsonl"\], not \["a.jsonl"\]', files=corpus_files[:1]
        )
        other_tokenizer = train_tokenizer(random_documents(50), TokenizerSettings(vocab_size=150))
        assert_refused(start + "its tokenizer gives other ids", tokenizer=other_tokenizer)
        text_before = corpus_files[1].read_text()
        corpus_files[1].write_text(text_before + "More.\n")
        assert_refused(start + '"b.txt" has other bytes now')
        corpus_files[1].write_text(text_before)
    written_at = (out / "manifest.json").stat().st_mtime_ns
    assert build_corpus(corpus_files, tokenizer, out, chosen).count > 0
    assert (out / "manifest.json").stat().st_mtime_ns == written_at


def test_the_output_folder_is_not_read_as_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "text.txt").write_text("One boat.\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text("{}")
    corpus = build_corpus([tmp_path], tokenizer, tmp_path / "run" / "corpus", exclude=tmp_path / "run")
    assert [file["name"] for file in corpus.about["files"]] == ["text.txt"]
    assert len(build_corpus([tmp_path], tokenizer, tmp_path / "run" / "corpus", exclude=tmp_path / "run")) == 1


def test_a_folder_with_something_else_is_left_alone(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(HeedfulError, match=r'holds "a.jsonl" and no corpus: give a new or an empty folder'):
        build_corpus(corpus_files, tokenizer, tmp_path)


def test_one_build_at_a_time(corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer) -> None:
    def build_again(_: CorpusProgress) -> None:
        with pytest.raises(HeedfulError, match="out: another process builds a corpus there"):
            build_corpus(corpus_files, tokenizer, tmp_path / "out")

    build_corpus(corpus_files, tokenizer, tmp_path / "out", on_progress=build_again)


# ---------------------------------------------------------------------------------------------------- processes

CHILD = """
import sys, time
from pathlib import Path
from heedful.data.corpus import build as corpus
from heedful.tokenizer import Tokenizer

corpus.SMALL_INPUT_BYTES = 0
folder, *files = map(Path, sys.argv[1:])

def report_progress(progress):
    if progress.documents:
        print("going", flush=True)

settings = corpus.CorpusSettings(shard_chars=20_000, dedup="exact")
tokenizer = Tokenizer.load(folder / "tokenizer")
corpus.build_corpus(files, tokenizer, folder / "out", settings, processes=2, on_progress=report_progress)
print("done", flush=True)
"""


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def have_ended(pids: list[int]) -> bool:
    """A process that has ended has no cmdline file, or, as a zombie, an empty one."""
    command_lines = [Path(f"/proc/{pid}/cmdline") for pid in pids]
    return not any(path.is_file() and path.read_bytes() for path in command_lines)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_leaves_nothing_behind_and_goes_on(tmp_path: Path, tokenizer: Tokenizer, sent: int) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    documents = random_documents(1500, seed=5)
    files = [write_jsonl(tmp_path / "a.jsonl", documents), write_jsonl(tmp_path / "b.jsonl", documents[:100])]
    command = [sys.executable, "-c", CHILD, str(tmp_path), *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "going\n"
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(sent)
        assert process.wait(60) == -sent
        errors = process.stderr.read()
    deadline = time.monotonic() + 30
    while not have_ended(workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert have_ended(workers)
    assert errors.count("Traceback") == (1 if sent == signal.SIGINT else 0), errors
    out = tmp_path / "out"
    assert not (out / "manifest.json").exists()
    assert list((out / "parts").glob("*.npz"))
    chosen = CorpusSettings(shard_chars=20_000, dedup="exact")
    build_corpus(files, tokenizer, out, chosen, processes=1)
    build_corpus(files, tokenizer, tmp_path / "whole", chosen, processes=1)
    assert file_contents(out) == file_contents(tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_the_death_of_a_worker_is_an_error(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL_INPUT_BYTES", 0)
    before = children(os.getpid())

    def kill_workers(progress: CorpusProgress) -> None:
        if not progress.documents:
            return
        for pid in children(os.getpid()):
            if pid not in before:
                os.kill(pid, signal.SIGKILL)

    message = (
        "a worker was killed by signal 9, at shard [0-9]+: there may be too little memory, so give fewer processes"
    )
    with pytest.raises(HeedfulError, match=message):
        build_corpus(
            corpus_files,
            tokenizer,
            tmp_path / "out",
            CorpusSettings(shard_chars=3000),
            processes=2,
            on_progress=kill_workers,
        )
    assert children(os.getpid()) == before


def test_an_error_in_a_worker_is_raised_in_the_parent(
    corpus_files: list[Path], tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL_INPUT_BYTES", 0)

    def block_the_output_file(_: CorpusProgress) -> None:
        if not (tmp_path / "out" / "tokens-00000.bin").exists():
            (tmp_path / "out" / "tokens-00000.bin").mkdir()

    with pytest.raises(HeedfulError, match=r"tokens-00000.bin: cannot be written: "):
        build_corpus(corpus_files, tokenizer, tmp_path / "out", processes=2, on_progress=block_the_output_file)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """The peak memory of the main process and of its workers is about the same for an input ten times as large."""
    train_tokenizer(random_documents(200), TokenizerSettings(vocab_size=200)).save(tmp_path / "tokenizer")
    documents = random_documents(3000, paragraphs=12)

    def peak_kilobytes(repetitions: int) -> list[int]:
        """The peak of the main process and the largest peak of its workers."""
        with (tmp_path / f"{repetitions}.jsonl").open("w") as file:
            for repetition in range(repetitions):
                file.writelines(json.dumps({"text": f"{repetition} {text}"}) + "\n" for text in documents)
        code = CHILD.replace("20_000", "1_000_000").replace('"out"', f'"out{repetitions}"')
        code += "import resource\nprint(*(resource.getrusage(who).ru_maxrss for who in (0, -1)))\n"
        command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / f"{repetitions}.jsonl")]
        result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return [int(word) for word in result.stdout.splitlines()[-1].split()]

    small, large = peak_kilobytes(6), peak_kilobytes(60)
    assert (tmp_path / "60.jsonl").stat().st_size > 60_000_000
    for small_peak, large_peak in zip(small, large, strict=True):
        assert large_peak < small_peak + 40_000


def test_a_file_name_that_is_not_utf_8(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "data").mkdir()
    path = os.fsencode(tmp_path / "data") + b"/caf\xe9.txt"
    with open(path, "wb") as file:
        file.write(b"one two\n\nthree\n")
    corpus = build_corpus([tmp_path / "data"], tokenizer, tmp_path / "out")
    assert len(corpus.documents) >= 2
    assert Corpus.open(tmp_path / "out").about["files"][0]["name"] == "caf\udce9.txt"

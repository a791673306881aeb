"""Measure how fast, and with how much memory, text becomes a corpus of token shards; `tokenizers` is the peer."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path

import lengths
from harness import Arm, Bound, Prepared, Values, measure, serve
from report import RESULTS, check_destination, grid, write

from heedful.data.bad_rows import RowErrors, Skip
from heedful.data.corpus.build import CorpusSettings, build_corpus
from heedful.data.corpus.documents import DocumentReader, list_files
from heedful.data.corpus.sentence_split import clean_text
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

ABOUT = """{megabytes} MB of {what} with a vocabulary of {vocabulary:,} word pieces learnt from it. `tokenizers` has the
documents in memory, each cleaned and as one text, and makes encodings without offsets on all cores, a batch at a time,
which it drops.
`heedful` reads them from a JSON lines file, cleans them, cuts them into sentences, tokenises those in {processes}
processes, and writes and syncs a corpus in shards of {shard} MB; its processes start anew in each round. Both find the
same tokens; a real token is one of them. Each arm is a process of its own, one runs at a time, and ratios are taken in
each round. What the processes of the build take counts below as taken by others. Memory is the largest resident
set of the process that reads and of any that works, for inputs of two sizes (a small one needs no worker)."""
SHARD = 4_000_000  # characters of a shard; small enough that all processes work to the end
SAMPLE = 64  # documents whose tokens are compared
BATCH = 1000  # documents of a call of encode_batch_fast
WORDS = 20_000  # vocabulary of invented documents


def invented(characters: int, seed: int = 0) -> Iterator[str]:
    """Yield documents of invented words, few of them frequent, until they have `characters` characters."""
    generator = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(generator.choices(letters, range(22, 0, -1), k=generator.randint(2, 11))) for _ in range(WORDS)]
    weights = list(accumulate(1 / rank for rank in range(2, WORDS + 2)))
    while characters > 0:
        paragraphs = []
        for _ in range(generator.randint(1, 8)):
            sentences = (generator.choices(words, cum_weights=weights, k=generator.randint(4, 30)) for _ in range(4))
            paragraphs.append(" ".join(" ".join(sentence).capitalize() + "." for sentence in sentences))
        text = "\n\n".join(paragraphs)
        characters -= len(text)
        yield text


def documents_of(folder: Path, characters: int) -> Iterator[str]:
    """Yield the documents of a folder's files until they have `characters` characters."""
    files, bad_files = list_files([folder])
    for chunk in DocumentReader([path for path, _ in files], CorpusSettings(), RowErrors(Skip()), bad_files).chunks():
        for text, _ in chunk or ():
            characters -= len(text)
            yield text
            if characters <= 0:
                return


def write_inputs(folder: Path, texts: Iterator[str]) -> Tokenizer:
    """Write the cleaned documents and a tokenizer that is trained on the first of them; return the tokenizer."""
    train_texts: list[str] = []
    with (folder / "texts.jsonl").open("w", encoding="utf-8") as file:
        for text in texts:
            text = clean_text(text)
            if text:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                train_texts += [text] if len(train_texts) < 3000 else []
    tokenizer = train_tokenizer(train_texts, TokenizerSettings())
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def prepare(engine: str, folder: Path, processes: int) -> Prepared:
    """Prepare an arm, whose work returns the number of tokens, and the tokens of the first SAMPLE documents."""
    with (folder / "texts.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    count = len(texts)
    digest = lengths.digest([list(map(ord, text)) for text in texts[:SAMPLE]])
    if engine == "tokenizers":
        run, settings = tokenizers_run(folder, texts), f"encode_batch_fast, batches of {BATCH:,}"
    else:
        texts.clear()  # Heedful reads them from the file
        run, settings = heedful_run(folder, processes), "build"
    tokens, _ = run()
    return Prepared(
        run=run, sample=lambda result: result[1], tokens=tokens, sequences=count, inputs=digest, settings=settings
    )


def tokenizers_run(folder: Path, texts: list[str]) -> Callable[[], tuple[int, Values]]:
    """Return a function that encodes the texts with `tokenizers`."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def run() -> tuple[int, Values]:
        sample: Values = []
        tokens = 0
        for start in range(0, len(texts), BATCH):
            encodings = backend.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False)
            tokens += sum(map(len, encodings))
            sample += [list(map(float, encoding.ids)) for encoding in encodings[: SAMPLE - len(sample)]]
        return tokens, sample

    return run


def heedful_run(folder: Path, processes: int) -> Callable[[], tuple[int, Values]]:
    """Return a function that builds a corpus of the texts with Heedful."""
    tokenizer = Tokenizer.load(folder / "tokenizer")
    settings = CorpusSettings(shard_chars=SHARD)

    def run() -> tuple[int, Values]:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            corpus = build_corpus([folder / "texts.jsonl"], tokenizer, Path(out), settings, processes=processes)
            bounds = corpus.segments[corpus.documents[: SAMPLE + 1]]
            sample = [corpus.tokens(int(start), int(stop)).astype(float).tolist() for start, stop in pairwise(bounds)]
            return corpus.count, sample

    return run


def print_peaks(folder: Path, processes: int) -> None:
    """Build a corpus; print its characters and the peak memory of this process and of its largest worker, as JSON."""
    tokenizer = Tokenizer.load(folder / "tokenizer")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        settings = CorpusSettings(shard_chars=SHARD)
        corpus = build_corpus([folder / "texts.jsonl"], tokenizer, Path(out), settings, processes=processes)
        own_peak, child_peak = map(_peak_mib, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(json.dumps([corpus.about["counts"]["characters"], own_peak, child_peak]))


def _peak_mib(who: int) -> float:
    """Return the largest resident set, in MiB, of this process (RUSAGE_SELF) or of its largest child."""
    return resource.getrusage(who).ru_maxrss / 1024


def memory(folder: Path, sizes: tuple[int, int], processes: int) -> str:
    """Measure the peak memory for inputs of two sizes; return it as a Markdown table."""
    rows = []
    for size in sizes:
        write_inputs(folder, invented(size))
        command = [sys.executable, __file__, "--arm", "peak", "--folder", str(folder), "--processes", str(processes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        characters, reader, worker = json.loads(done.stdout.splitlines()[-1])
        rows.append([f"{characters / 1e6:,.0f}", f"{reader:,.0f}", f"{worker:,.0f}"])
    return "## Memory\n\n" + grid(["MB of text", "MB of the reader", "MB of the largest worker"], rows)


def main() -> None:
    """Measure speed and memory, print the tables and write the record."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a folder of text; without it, words are invented")
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--processes", type=int, default=cores)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help="rehearse on 1 MB, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm == "peak":
        return print_peaks(options.folder, options.processes)
    if options.arm:
        return serve(lambda: prepare(options.arm, options.folder, options.processes))
    if options.rounds < 1 or (options.rounds < 5 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 5")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    megabytes = 1 if options.quick else options.megabytes
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = megabytes * 1_000_000
        texts = documents_of(options.data, size) if options.data else invented(size)
        tokenizer = write_inputs(folder, texts)
        command = (sys.executable, __file__, "--folder", temporary, "--processes", str(options.processes))
        arms = [
            Arm(
                name=name,
                command=(*command, "--arm", name),
                is_heedful=name == "heedful",
                bound=Bound(difference=0.0, cosine=0.999999),
            )
            for name in ("tokenizers", "heedful")
        ]
        table = measure("Tokens", arms, options.rounds)
        print(table.text(), flush=True)
        memory_text = memory(folder, (size // 4, size * 10 // 4), options.processes)
        print(memory_text, flush=True)
    if options.output or not options.quick:
        about = ABOUT.format(
            megabytes=megabytes,
            what="documents of a folder" if options.data else "invented words",
            vocabulary=tokenizer.size,
            processes=options.processes,
            shard=SHARD // 1_000_000,
        )
        print(write("corpus", about, [table.text(), memory_text], [asdict(table)], options.output or RESULTS))


if __name__ == "__main__":
    main()

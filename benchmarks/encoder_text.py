"""Prepare the text on which the bundled encoder is trained, and the probe sets by which it is judged.

HEEDFUL_DATA=folder python benchmarks/encoder_text.py OUT

The script writes OUT/text/*.jsonl, OUT/probe/ and OUT/counts.json. A sentence of the corpora is dropped if it also
occurs, apart from case and punctuation, in a train, dev or test file of a data set that is used for measuring. Direct
speech of the novels is added as separate documents, and half of the longer sentences are cut into clauses, since most
texts that people classify and compare are short and plain. Probe sets are cut from train files.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import random
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from heedful.data.corpus.sentence_split import clean_text, split_sentences

CORPORA = ("wikipedia-2014-1", "wikipedia-2014-2", "wikipedia-2014-3", "wikipedia-2021", "novels")
LEFT_OUT = {"Harvard University", "Yuan Dynasty", "Yuan dynasty", "Rain"}  # they hold passages of SQuAD's dev sets
SPEECH = re.compile(r"[“\"]([^“”\"]{12,400})[”\"]")
CLAUSE_END = re.compile(r"(?:[,;:] | (?:–|—|--) | (?=(?:and|but|which|who|while|because|when|where|after|before) ))")
CLAUSE_SHARE = 0.5  # share of the longer sentences that are cut into clauses
CLAUSE_SEED = 12
SHORTEST_CUT_SENTENCE, SHORTEST_CLAUSE = 9, 4  # words
PROBE_SEED = 11
PROBE_PAIRS, PROBE_TEXTS, PROBE_SENTENCES = 1_000, 2_000, 1_000


def sentence_digest(sentence: str) -> bytes:
    """Return a digest of the sentence without case and punctuation, or b"" if it has no letter or digit."""
    words = " ".join(re.findall(r"[^\W_]+", sentence.lower()))
    return blake2b(words.encode(), digest_size=8).digest() if words else b""


def measured_texts(tasks: Path) -> Iterator[str]:
    """Yield all texts of the data sets. Labels and other columns are yielded too, which does no harm."""
    for path in sorted(tasks.rglob("*")):
        if (
            not path.is_file()
            or path.name.lower().startswith(("readme", "license"))
            or path.parent.name == "predictions"
        ):
            continue
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield from strings(json.loads(line))
        elif path.suffix == ".json":
            yield from strings(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8", errors="replace", newline="") as file:
                for row in csv.reader(file):
                    yield from row
        elif path.parent.name == "conll2003":
            words: list[str] = []
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip():
                    words.append(line.split()[0])
                elif words:
                    yield " ".join(words)
                    words = []
        else:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                yield from line.split("\t")


def strings(value: Any) -> Iterator[str]:
    """Yield all strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a corpus file."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def clauses(sentence: str) -> list[str]:
    """Cut a sentence into clauses of at least SHORTEST_CLAUSE words, written as sentences.

    >>> clauses("The old harbour was quiet at night, and the fishermen who had come home slept until noon.")
    ['The old harbour was quiet at night and the fishermen.', 'Who had come home slept until noon.']
    """
    pieces: list[str] = []
    for piece in CLAUSE_END.split(sentence.strip()):
        if pieces and min(len(pieces[-1].split()), len(piece.split())) < SHORTEST_CLAUSE:
            pieces[-1] += " " + piece
        else:
            pieces.append(piece)
    return [(piece[0].upper() + piece[1:]).rstrip(" ,;:.") + "." for piece in pieces if piece.strip(" ,;:.")]


def with_clauses(sentences: list[str], generator: random.Random) -> str:
    """Join sentences to a paragraph, in which CLAUSE_SHARE of the longer ones are cut into clauses."""
    parts = []
    for sentence in sentences:
        is_cut = len(sentence.split()) >= SHORTEST_CUT_SENTENCE and generator.random() < CLAUSE_SHARE
        parts.append(" ".join(clauses(sentence)) if is_cut else sentence.strip())
    return " ".join(parts)


def write_text(data: Path, out: Path) -> dict[str, int]:
    """Write the filtered corpora, and return the counts of counts.json."""
    measured: set[bytes] = set()  # digests of the sentences of the data sets
    for text in measured_texts(data / "tasks"):
        measured.add(sentence_digest(text))
        sentences, _ = split_sentences(clean_text(text.replace("<br />", " ")))
        measured.update(map(sentence_digest, sentences))
    measured.discard(b"")
    counts = {"measured sentences": len(measured), "documents": 0, "sentences": 0, "dropped sentences": 0, "speech": 0}
    generator = random.Random(CLAUSE_SEED)
    (out / "text").mkdir(parents=True, exist_ok=True)
    for name in CORPORA:
        with (out / "text" / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for document in documents(data / "corpus" / f"{name}.jsonl.xz"):
                if document["title"] in LEFT_OUT:
                    continue
                paragraphs = []
                for paragraph in clean_text(document["text"]).split("\n\n"):
                    sentences, _ = split_sentences(paragraph)
                    unmeasured = [sentence for sentence in sentences if sentence_digest(sentence) not in measured]
                    counts["sentences"] += len(sentences)
                    counts["dropped sentences"] += len(sentences) - len(unmeasured)
                    if unmeasured:
                        paragraphs.append(with_clauses(unmeasured, generator))
                if not paragraphs:
                    continue
                counts["documents"] += 1
                file.write(json.dumps({"text": "\n\n".join(paragraphs)}, ensure_ascii=False) + "\n")
                speech = [match for paragraph in paragraphs for match in SPEECH.findall(paragraph)]
                if name == "novels" and len(speech) >= 4:
                    unmeasured = [utterance for utterance in speech if sentence_digest(utterance) not in measured]
                    counts["speech"] += len(unmeasured)
                    file.write(json.dumps({"text": "\n\n".join(unmeasured)}, ensure_ascii=False) + "\n")
    return counts


def write_probes(data: Path, out: Path) -> None:
    """Cut probe sets from train files: pairs of STS-B, texts of SST-2, sentences of CoNLL-2003."""
    folder = out / "probe"
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(PROBE_SEED)
    rows = [line.split("\t") for line in (data / "tasks/glue/STS-B/train.tsv").read_text("utf-8").splitlines()[1:]]
    with (folder / "similarity.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "pair", "score"])
        writer.writerows([row[7], row[8], row[9]] for row in generator.sample(rows, PROBE_PAIRS))
    rows = [line.split("\t") for line in (data / "tasks/glue/SST-2/train.tsv").read_text("utf-8").splitlines()[1:]]
    with (folder / "sentiment.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        sampled = generator.sample([row for row in rows if len(row[0].split()) >= 6], PROBE_TEXTS)
        writer.writerows([row[0].strip(), row[1]] for row in sampled)
    blocks = (data / "tasks/conll2003/eng.train").read_text("utf-8").split("\n\n")
    sentences = [block for block in blocks if block.strip() and "-DOCSTART-" not in block]
    sampled_sentences = generator.sample(sentences, PROBE_SENTENCES)
    (folder / "entities.conll").write_text("\n\n".join(sampled_sentences) + "\n", encoding="utf-8")


def main() -> None:
    """Write the probe sets and the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    data = Path(os.environ.get("HEEDFUL_DATA", "absent"))
    if not (data / "tasks").is_dir():
        raise SystemExit("set HEEDFUL_DATA to the folder of the data sets")
    write_probes(data, options.out)
    counts = write_text(data, options.out)
    (options.out / "counts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    print(counts)


if __name__ == "__main__":
    main()

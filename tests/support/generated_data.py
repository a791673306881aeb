"""Small invented data for every task, and runs on them that take about a second."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from heedful.runs.finetune.run import finetune
from heedful.runs.results import RunResult

WORDS = [
    *("the", "a", "cat", "dog", "sat", "on", "mat", "ran", "to", "is", "in", "of", "capital"),
    *("he", "she", "lives", "here", "wrote", "it", "program", "first", "who", "where", "and"),
]
NAMES = {"ada": "PER", "zed": "PER", "paris": "LOC", "france": "LOC"}  # words that are named, and as what
SIZES = {"train": 24, "dev": 8, "test": 8}
SMALL = {  # settings of a run that takes about a second
    "init.kind": "scratch",
    "init.layers": 1,
    "init.width": 32,
    "init.tokenizer.vocab_size": 200,
    "train.epochs": 2,
    "train.precision": "float32",
}
DURATION = {"train.epochs", "train.max_steps", "train.time_budget"}  # one of these is given
SCRATCH = ("init.kind", "init.layers", "init.width", "init.tokenizer.vocab_size")  # no settings of other models
Row = dict[str, Any]


def tune(task: str, data: Any, out: Path, settings: Row | None = None, **more: Any) -> RunResult:
    """A run of SMALL settings, with some that go over them."""
    return finetune(task, data, out, assignments=assignments(settings, bool(more.get("model"))), **more)


def assignments(settings: Row | None = None, named: bool = False) -> tuple[str, ...]:
    """Return settings as assignments; a named model has its own size."""
    settings = settings or {}
    usual = {name: value for name, value in SMALL.items() if name not in DURATION or not settings.keys() & DURATION}
    merged = usual | settings
    if named or settings.get("init.kind", "scratch") != "scratch" or "init.model" in settings:
        merged = {name: value for name, value in merged.items() if name not in SCRATCH or name in settings}
    return tuple(f"{name}={value}" for name, value in merged.items())


def sentence(draw: random.Random, length: int = 6) -> list[str]:
    """Words without a name among them."""
    return draw.choices(WORDS, k=length)


# -- rows -------------------------------------------------------------------------------------------------------


def classified(count: int, seed: int = 0, labels: Sequence[str] = ("bad", "good"), pairs: bool = False) -> list[Row]:
    """Texts of one label each; the first is the most frequent one, and a word gives each away."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        place = number % len(labels) if number < 2 * len(labels) else draw.randrange(len(labels)) // 2
        words = [*sentence(draw), [*NAMES, "love", "cat"][place]]
        draw.shuffle(words)
        pair = {"pair": " ".join(sentence(draw))} if pairs else {}
        rows.append({"text": " ".join(words), **pair, "label": labels[place]})
    return rows


def long_rows(count: int, seed: int = 0) -> list[Row]:
    """Texts of 24 to 35 words with one of three labels each, which have nothing to do with the texts."""
    draw, labels = random.Random(seed), ("bad", "fair", "good")
    return [
        {"text": " ".join(sentence(draw, 24 + number % 12)), "label": labels[number % 3]} for number in range(count)
    ]


def labelled(count: int, seed: int = 0) -> list[Row]:
    """Texts of any number of labels: a name in the text is one."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        names = [name for name in NAMES if draw.random() < 0.4] if number else list(NAMES)
        rows.append({"text": " ".join([*sentence(draw), *names]), "labels": names})
    return rows


def scored(count: int, seed: int = 0) -> list[Row]:
    """Pairs of texts with a number from 0 to 5: how many words they share."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        words, shared = sentence(draw), number % 6
        second_words = words[:shared] + sentence(draw, 6 - shared)
        rows.append({"a": " ".join(words), "b": " ".join(second_words), "score": shared})
    return rows


def sentences(count: int, seed: int = 0) -> list[list[tuple[str, str]]]:
    """Words with the type of entity that they are, or ""."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = [*sentence(draw), draw.choice(list(NAMES)), draw.choice(list(NAMES))]
        draw.shuffle(words)
        rows.append([(word, NAMES.get(word, "")) for word in words])
    return rows


def questions(count: int, seed: int = 0, impossible: bool = False) -> dict[str, Any]:
    """Make SQuAD's JSON, with questions for the name in a text; with `impossible`, every third text has no name."""
    draw, paragraphs = random.Random(seed), []
    for number in range(count):
        name = draw.choice(list(NAMES))
        missing = impossible and number % 3 == 0
        words = sentence(draw, 8) if missing else [*sentence(draw, 4), name, *sentence(draw, 3)]
        context = " ".join(words)
        answers = [] if missing else [{"text": name, "answer_start": context.index(name)}]
        more = {"is_impossible": missing} if impossible else {}
        asked = {"id": f"{seed}-{number}", "question": "who is it ?", "answers": answers, **more}
        paragraphs.append({"context": context, "qas": [asked]})
    return {"version": "v2.0" if impossible else "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}


def chosen(count: int, seed: int = 0, candidates: int = 2) -> list[Row]:
    """Prompts with candidates, of which the one that names someone is right."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        choices = [" ".join(sentence(draw, 3)) for _ in range(candidates)]
        choices[number % candidates] += " " + draw.choice(list(NAMES))
        rows.append({"prompt": " ".join(sentence(draw)), "choices": choices, "answer": number % candidates})
    return rows


def ranked(count: int, seed: int = 0) -> list[Row]:
    """Queries that name a person, each with four documents; the document with that name is relevant."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        name = draw.choice(list(NAMES))
        documents = [" ".join(sentence(draw, 3)) for _ in range(4)]
        documents[0] += f" {name}"
        rows.append({"query": f"who is {name} ?", "positive": documents[0], "negatives": documents[1:]})
    return rows


# -- files ------------------------------------------------------------------------------------------------------


def as_csv(path: Path, rows: Sequence[Row]) -> Path:
    """A table with a header."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return path


def as_lines(path: Path, rows: Iterable[Row]) -> Path:
    """JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def as_iob1(path: Path, tagged: Iterable[list[tuple[str, str]]]) -> Path:
    """CoNLL's columns; B- only where two entities of one type touch."""
    text = ""
    for words in tagged:
        before = ""
        for word, kind in words:
            text += f"{word} {'B' if kind and kind == before else 'I'}-{kind}\n" if kind else f"{word} O\n"
            before = kind
        text += "\n"
    path.write_text(text, encoding="utf-8")
    return path


def as_plain(path: Path, tagged: Iterable[list[tuple[str, str]]]) -> Path:
    """CoNLL's columns with a class of word for each."""
    rows = ("".join(f"{word} {kind or 'WORD'}\n" for word, kind in words) for words in tagged)
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def data(kind: str, folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """A folder with splits of those sizes; for the kinds see MADE."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(sizes.items()):
        MADE[kind](folder / split, count, seed)
    return folder


MADE: dict[str, Any] = {
    "single": lambda path, n, seed: as_csv(path.with_suffix(".csv"), classified(n, seed)),
    "pair": lambda path, n, seed: as_csv(path.with_suffix(".csv"), classified(n, seed, pairs=True)),
    "classes": lambda path, n, seed: as_csv(path.with_suffix(".csv"), classified(n, seed, ("x", "y", "z"))),
    "multiple": lambda path, n, seed: as_lines(path.with_suffix(".jsonl"), labelled(n, seed)),
    "regress": lambda path, n, seed: as_csv(
        path.with_suffix(".csv"), [{"text": r["a"], "pair": r["b"], "score": r["score"]} for r in scored(n, seed)]
    ),
    "tag": lambda path, n, seed: as_iob1(path.with_suffix(".conll"), sentences(n, seed)),
    "plain": lambda path, n, seed: as_plain(path.with_suffix(".conll"), sentences(n, seed)),
    "qa": lambda path, n, seed: path.with_suffix(".json").write_text(json.dumps(questions(n, seed))),
    "impossible": lambda path, n, seed: path.with_suffix(".json").write_text(json.dumps(questions(n, seed, True))),
    "choose 2": lambda path, n, seed: as_lines(path.with_suffix(".jsonl"), chosen(n, seed)),
    "choose 4": lambda path, n, seed: as_lines(path.with_suffix(".jsonl"), chosen(n, seed, 4)),
    "rank": lambda path, n, seed: as_lines(path.with_suffix(".jsonl"), ranked(n, seed)),
    "embed": lambda path, n, seed: as_lines(path.with_suffix(".jsonl"), scored(n, seed)),
    "together": lambda path, n, seed: as_lines(
        path.with_suffix(".jsonl"), [{"a": row["a"], "b": row["b"]} for row in scored(n, seed)]
    ),
}

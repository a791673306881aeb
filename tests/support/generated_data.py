"""Small generated data for every task, and fine-tuning runs on it that take about a second."""

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
ENTITY_TYPES = {  # entity type of each word that is an entity
    "ada": "PER",
    "zed": "PER",
    "paris": "LOC",
    "france": "LOC",
}
SIZES = {"train": 24, "dev": 8, "test": 8}  # examples of each split
SMALL = {  # settings of a run that takes about a second
    "init.kind": "scratch",
    "init.layers": 1,
    "init.width": 32,
    "init.tokenizer.vocab_size": 200,
    "train.epochs": 2,
    "train.precision": "float32",
}
DURATION = {"train.epochs", "train.max_steps", "train.time_budget"}  # at most one of these settings may be set
SCRATCH = ("init.kind", "init.layers", "init.width", "init.tokenizer.vocab_size")  # settings of new models only
Row = dict[str, Any]


def finetune_tiny(task: str, data: Any, out: Path, settings: Row | None = None, **arguments: Any) -> RunResult:
    """Fine-tune with the settings of SMALL, overridden by `settings`."""
    return finetune(task, data, out, assignments=assignments(settings, bool(arguments.get("model"))), **arguments)


def assignments(settings: Row | None = None, named: bool = False) -> tuple[str, ...]:
    """Return the settings of SMALL, overridden by `settings`, as assignments.

    Args:
        settings: Settings by path.
        named: Whether a pretrained model is named; settings of a new model are left out then.
    """
    settings = settings or {}
    defaults = {name: value for name, value in SMALL.items() if name not in DURATION or not settings.keys() & DURATION}
    merged = defaults | settings
    if named or settings.get("init.kind", "scratch") != "scratch" or "init.model" in settings:
        merged = {name: value for name, value in merged.items() if name not in SCRATCH or name in settings}
    return tuple(f"{name}={value}" for name, value in merged.items())


def sentence(rng: random.Random, length: int = 6) -> list[str]:
    """Return random words without entities."""
    return rng.choices(WORDS, k=length)


# -- rows -------------------------------------------------------------------------------------------------------


def classification_rows(
    count: int, seed: int = 0, labels: Sequence[str] = ("bad", "good"), pairs: bool = False
) -> list[Row]:
    """Return texts with one label each, which a word of the text decides; the first label is the most frequent."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        place = number % len(labels) if number < 2 * len(labels) else rng.randrange(len(labels)) // 2
        words = [*sentence(rng), [*ENTITY_TYPES, "love", "cat"][place]]
        rng.shuffle(words)
        pair = {"pair": " ".join(sentence(rng))} if pairs else {}
        rows.append({"text": " ".join(words), **pair, "label": labels[place]})
    return rows


def long_rows(count: int, seed: int = 0) -> list[Row]:
    """Return texts of 24 to 35 words, with one of three labels each that does not depend on the text."""
    rng, labels = random.Random(seed), ("bad", "fair", "good")
    return [{"text": " ".join(sentence(rng, 24 + number % 12)), "label": labels[number % 3]} for number in range(count)]


def multilabel_rows(count: int, seed: int = 0) -> list[Row]:
    """Return texts whose labels are the entities in them."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        names = [name for name in ENTITY_TYPES if rng.random() < 0.4] if number else list(ENTITY_TYPES)
        rows.append({"text": " ".join([*sentence(rng), *names]), "labels": names})
    return rows


def similarity_rows(count: int, seed: int = 0) -> list[Row]:
    """Return pairs of texts, with the number of words that they share as a score from 0 to 5."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        words, shared = sentence(rng), number % 6
        second_words = words[:shared] + sentence(rng, 6 - shared)
        rows.append({"a": " ".join(words), "b": " ".join(second_words), "score": shared})
    return rows


def tagged_sentences(count: int, seed: int = 0) -> list[list[tuple[str, str]]]:
    """Return sentences as lists of words and their entity types, which are "" for other words."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words = [*sentence(rng), rng.choice(list(ENTITY_TYPES)), rng.choice(list(ENTITY_TYPES))]
        rng.shuffle(words)
        rows.append([(word, ENTITY_TYPES.get(word, "")) for word in words])
    return rows


def squad_json(count: int, seed: int = 0, impossible: bool = False) -> dict[str, Any]:
    """Return SQuAD's JSON with questions for the entity in a text; with `impossible`, every third text has none."""
    rng, paragraphs = random.Random(seed), []
    for number in range(count):
        name = rng.choice(list(ENTITY_TYPES))
        missing = impossible and number % 3 == 0
        words = sentence(rng, 8) if missing else [*sentence(rng, 4), name, *sentence(rng, 3)]
        context = " ".join(words)
        answers = [] if missing else [{"text": name, "answer_start": context.index(name)}]
        unanswerable_field = {"is_impossible": missing} if impossible else {}
        question = {"id": f"{seed}-{number}", "question": "who is it ?", "answers": answers, **unanswerable_field}
        paragraphs.append({"context": context, "qas": [question]})
    return {"version": "v2.0" if impossible else "1.1", "data": [{"title": "x", "paragraphs": paragraphs}]}


def multiple_choice_rows(count: int, seed: int = 0, candidates: int = 2) -> list[Row]:
    """Return prompts with candidates; the candidate with an entity is correct."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        choices = [" ".join(sentence(rng, 3)) for _ in range(candidates)]
        choices[number % candidates] += " " + rng.choice(list(ENTITY_TYPES))
        rows.append({"prompt": " ".join(sentence(rng)), "choices": choices, "answer": number % candidates})
    return rows


def ranking_rows(count: int, seed: int = 0) -> list[Row]:
    """Return queries for an entity with four documents each; the document with the entity is relevant."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        name = rng.choice(list(ENTITY_TYPES))
        documents = [" ".join(sentence(rng, 3)) for _ in range(4)]
        documents[0] += f" {name}"
        rows.append({"query": f"who is {name} ?", "positive": documents[0], "negatives": documents[1:]})
    return rows


# -- files ------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows to a CSV file with a header; returns the path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows to a JSON lines file; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_iob1(path: Path, tagged: Iterable[list[tuple[str, str]]]) -> Path:
    """Write sentences in CoNLL's format with IOB1 tags: B- only between adjacent entities of one type."""
    text = ""
    for words in tagged:
        previous = ""
        for word, kind in words:
            text += f"{word} {'B' if kind and kind == previous else 'I'}-{kind}\n" if kind else f"{word} O\n"
            previous = kind
        text += "\n"
    path.write_text(text, encoding="utf-8")
    return path


def write_word_tags(path: Path, tagged: Iterable[list[tuple[str, str]]]) -> Path:
    """Write sentences in CoNLL's format with an entity type, or WORD, as the tag of each word."""
    rows = ("".join(f"{word} {kind or 'WORD'}\n" for word, kind in words) for words in tagged)
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def write_splits(kind: str, folder: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Write a folder with splits of these sizes; `kind` is a key of WRITERS."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(sizes.items()):
        WRITERS[kind](folder / split, count, seed)
    return folder


WRITERS: dict[str, Any] = {  # kind -> function of path without suffix, number of examples and seed
    "single": lambda path, n, seed: write_csv(path.with_suffix(".csv"), classification_rows(n, seed)),
    "pair": lambda path, n, seed: write_csv(path.with_suffix(".csv"), classification_rows(n, seed, pairs=True)),
    "classes": lambda path, n, seed: write_csv(path.with_suffix(".csv"), classification_rows(n, seed, ("x", "y", "z"))),
    "multiple": lambda path, n, seed: write_jsonl(path.with_suffix(".jsonl"), multilabel_rows(n, seed)),
    "regress": lambda path, n, seed: write_csv(
        path.with_suffix(".csv"),
        [{"text": r["a"], "pair": r["b"], "score": r["score"]} for r in similarity_rows(n, seed)],
    ),
    "tag": lambda path, n, seed: write_iob1(path.with_suffix(".conll"), tagged_sentences(n, seed)),
    "plain": lambda path, n, seed: write_word_tags(path.with_suffix(".conll"), tagged_sentences(n, seed)),
    "qa": lambda path, n, seed: path.with_suffix(".json").write_text(json.dumps(squad_json(n, seed))),
    "impossible": lambda path, n, seed: path.with_suffix(".json").write_text(json.dumps(squad_json(n, seed, True))),
    "choose 2": lambda path, n, seed: write_jsonl(path.with_suffix(".jsonl"), multiple_choice_rows(n, seed)),
    "choose 4": lambda path, n, seed: write_jsonl(path.with_suffix(".jsonl"), multiple_choice_rows(n, seed, 4)),
    "rank": lambda path, n, seed: write_jsonl(path.with_suffix(".jsonl"), ranking_rows(n, seed)),
    "embed": lambda path, n, seed: write_jsonl(path.with_suffix(".jsonl"), similarity_rows(n, seed)),
    "together": lambda path, n, seed: write_jsonl(
        path.with_suffix(".jsonl"), [{"a": row["a"], "b": row["b"]} for row in similarity_rows(n, seed)]
    ),
}

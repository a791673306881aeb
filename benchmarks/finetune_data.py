"""The data sets of the benchmarks of fine-tuning, and the hyper-parameters of each.

finetune.py (Heedful) and finetune_peer.py (transformers) train on the same examples with the same hyper-parameters;
other benchmarks load data sets from here too. The data are in the folder that the environment variable HEEDFUL_DATA
names; nothing is downloaded.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from heedful.data import DataSettings, LabelledExample, QuestionExample, ScoredExample, TaggedExample, read
from heedful.data.labelled.phrases import MAX_CONTAINING, containing_texts, join_phrases, phrase_words

GLUE = ("SST-2", "MRPC", "STS-B", "RTE", "CoLA")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The hyper-parameters of a task; those that all tasks share are in the docstring of finetune_peer.py."""

    epochs: int
    rate: float  # peak of the learning rate
    batch: int  # examples of a step
    longest: int  # maximum tokens of a sequence, special tokens included


PLANS = {
    "SST-2": Plan(epochs=2, rate=3e-5, batch=32, longest=128),
    "MRPC": Plan(epochs=5, rate=5e-5, batch=16, longest=256),
    "STS-B": Plan(epochs=5, rate=5e-5, batch=16, longest=256),
    "CoNLL-2003": Plan(epochs=4, rate=5e-5, batch=16, longest=256),
    "RTE": Plan(epochs=5, rate=5e-5, batch=16, longest=512),
    "CoLA": Plan(epochs=5, rate=5e-5, batch=16, longest=128),
    "AG News": Plan(epochs=3, rate=5e-5, batch=32, longest=256),
    "IMDB": Plan(epochs=1, rate=3e-5, batch=16, longest=512),
    "SQuAD": Plan(epochs=1, rate=5e-5, batch=16, longest=384),  # finetune_peer.py has no such task
}


Example = LabelledExample | ScoredExample | TaggedExample | QuestionExample


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A data set: examples for training, and held-out examples by which models are scored."""

    kind: Literal["classify", "regress", "tag", "qa"]
    labels: tuple[str, ...]  # empty for regression and question answering
    train: Sequence[Example]
    held: Sequence[Example]  # never used for training or for choosing anything
    about: str  # where the examples come from, and which were left out


def load(name: str) -> Task:
    """Load the data set of one of `PLANS` from the folder HEEDFUL_DATA."""
    folder = os.environ.get("HEEDFUL_DATA")
    if not folder or not Path(folder, "tasks").is_dir():
        raise SystemExit("set HEEDFUL_DATA to the folder of the data sets")
    tasks = Path(folder, "tasks")
    if name in GLUE:
        return _glue(tasks / "glue" / name)
    return {"CoNLL-2003": _conll, "AG News": _ag_news, "IMDB": _imdb, "SQuAD": _squad}[name](tasks)


def sample(examples: Sequence[Item], count: int | None) -> list[Item]:
    """Return `count` of the examples in their order, always the same ones, or all if `count` is None."""
    if count is None or count >= len(examples):
        return list(examples)
    indices = random.Random(f"sample {count}").sample(range(len(examples)), count)
    return [examples[index] for index in sorted(indices)]


def hold_out(examples: Sequence[Example], count: int) -> tuple[list[LabelledExample], list[LabelledExample]]:
    """Hold rows out of the training rows of a classification task, always the same ones.

    A sentence and its phrases are on the same side (see `join_phrases`). No text that is held out occurs in a training
    text: phrases that occur in texts of several groups, or in very many texts, are never held out.

    Args:
        examples: The training rows.
        count: How many rows to hold out, but at most a quarter of all. The last group may exceed it.

    Returns:
        The training rows that are left, and the rows that are held out, both in their order.
    """
    rows = [row for row in examples if isinstance(row, LabelledExample)]
    groups = join_phrases([row.text for row in rows], np.arange(len(rows))).tolist()
    first_by_words: dict[tuple[str, ...], int] = {}
    for index, row in enumerate(rows):
        first_by_words.setdefault(phrase_words(row.text), index)
    common = {  # phrases that are not in the group of every text with them
        phrase
        for phrase, containing in containing_texts(first_by_words).items()
        if len(containing) > MAX_CONTAINING or any(groups[index] != groups[phrase] for index in containing)
    }
    members: dict[int, list[int]] = {}  # rows of each group that may be held out
    for index, row in enumerate(rows):
        if first_by_words[phrase_words(row.text)] not in common:
            members.setdefault(groups[index], []).append(index)
    order = list(members)
    random.Random("hold out").shuffle(order)
    chosen: set[int] = set()
    for group in order:
        if len(chosen) >= min(count, len(rows) // 4):
            break
        chosen.update(members[group])
    return [row for i, row in enumerate(rows) if i not in chosen], [row for i, row in enumerate(rows) if i in chosen]


def _glue(folder: Path) -> Task:
    """Load a task of GLUE, whose dev split is held out."""
    source = read(folder)
    kind: Literal["classify", "regress"] = "regress" if source.kind is ScoredExample else "classify"
    return Task(
        kind=kind,
        labels=source.labels,
        train=_of((LabelledExample, ScoredExample), source.examples("train")),
        held=_of((LabelledExample, ScoredExample), source.examples("dev")),
        about=f"GLUE's {folder.name}, train and dev",
    )


def _conll(tasks: Path) -> Task:
    """Load CoNLL-2003, whose test split is held out."""
    files = {"train": "eng.train", "dev": "eng.testa", "test": "eng.testb"}
    source = read({split: tasks / "conll2003" / name for split, name in files.items()}, TaggedExample)
    return Task(
        kind="tag",
        labels=source.labels,
        train=list(source.examples("train")),
        held=list(source.examples("test")),
        about="CoNLL-2003, eng.train and eng.testb, tags as IOB2",
    )


def _ag_news(tasks: Path) -> Task:
    """Load a subset of AG News for training; the official test is held out.

    The subset's train.csv has 5,000 rows. The 1,000 rows of its dev.csv are all in train.csv too, and are left out, as
    are rows with a description of the official test.
    """
    settings = DataSettings(columns={"text": 1, "label": 2}, dev_fraction=0.0)
    subset = tasks / "ag_news" / "subset_7k"
    rows = list(read(subset / "train.csv", LabelledExample, settings).examples("train"))
    dev_texts = {row.text for row in read(subset / "dev.csv", LabelledExample, settings).examples("train")}
    official_test = tasks / "ag_news" / "ag_news_csv" / "test.csv"
    description_only = DataSettings(columns={"text": 3, "label": 1}, dev_fraction=0.0)
    descriptions = {
        _words(row.text) for row in read(official_test, LabelledExample, description_only).examples("train")
    }
    title_and_description = DataSettings(columns={"text": (2, 3), "label": 1}, dev_fraction=0.0)
    held = list(read(official_test, LabelledExample, title_and_description).examples("train"))
    not_in_dev = [row for row in rows if row.text not in dev_texts]
    train = [row for row in not_in_dev if not _ends(_words(row.text), descriptions)]
    return Task(
        kind="classify",
        labels=("0", "1", "2", "3"),
        train=train,
        held=[replace(row, label=str(int(row.label) - 1)) for row in held],  # the official file counts from 1
        about=f"AG News, train.csv of the 7k subset without the {len(rows) - len(not_in_dev):,} rows of its dev.csv "
        f"and {len(not_in_dev) - len(train)} whose description is in the official test, and that test",
    )


def _imdb(tasks: Path) -> Task:
    """Load IMDB, whose test split is held out; rows of train with a text of test are left out.

    `read` splits a tenth off train as a dev split, which is not used. All positive reviews precede all negative ones,
    so training needs a random order.
    """
    source = read({split: tasks / "imdb" / f"{split}.jsonl.xz" for split in ("train", "test")}, LabelledExample)
    held = list(source.examples("test"))
    test_texts = {row.text for row in held}
    rows = list(source.examples("train"))
    train = [row for row in rows if row.text not in test_texts]
    return Task(
        kind="classify",
        labels=source.labels,
        train=train,
        held=held,
        about=f"IMDB, nine tenths of train without {len(rows) - len(train)} rows whose text is in test, and test",
    )


def _squad(tasks: Path) -> Task:
    """Load SQuADShifts for training; the dev split of SQuAD 1.1 is held out.

    SQuADShifts has questions about new articles, reviews and posts. Those about paragraphs of SQuAD's dev split are
    left out.
    """
    held = list(read({"dev": tasks / "squad" / "dev-v1.1.json"}, QuestionExample).examples("dev"))
    contexts = {question.context for question in held}
    rows: list[QuestionExample] = []
    for name in ("new_wiki", "amazon_reviews", "reddit"):
        file = tasks / "squadshifts" / f"{name}_v1.0.json"
        rows += read({"train": file}, QuestionExample).examples("train")
    train = [row for row in rows if row.context not in contexts]
    return Task(
        kind="qa",
        labels=(),
        train=train,
        held=held,
        about=f"SQuADShifts (new_wiki, amazon_reviews, reddit) without {len(rows) - len(train)} questions on "
        "paragraphs of dev, and SQuAD v1.1 dev: not trained on SQuAD",
    )


def _of(
    kinds: tuple[type[LabelledExample], type[ScoredExample]], examples: Iterable[object]
) -> list[LabelledExample | ScoredExample]:
    """Return the examples as a list; assert that they are of these types."""
    result = []
    for example in examples:
        assert isinstance(example, kinds)
        result.append(example)
    return result


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case, without punctuation."""
    return tuple(re.findall(r"[a-z0-9]+", text.casefold()))


def _ends(words: tuple[str, ...], endings: set[tuple[str, ...]]) -> bool:
    """Return whether the words after a title of at least one word are one of the endings."""
    return any(words[start:] in endings for start in range(1, len(words)))

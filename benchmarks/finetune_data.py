"""Data of both arms of the fine-tuning benchmark: the same examples in the same order, and the same plan.

The data lie in the folder that the environment variable HEEDFUL_DATA names; nothing is downloaded.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from heedful.data import DataSettings, LabelledExample, QuestionExample, ScoredExample, TaggedExample, read

GLUE = ("SST-2", "MRPC", "STS-B", "RTE", "CoLA")
Each = TypeVar("Each")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The hyper-parameters of a task; what they are not for is in finetune_peer.py."""

    epochs: int
    rate: float
    batch: int
    longest: int  # tokens of a sequence, with the special ones


PLANS = {
    "SST-2": Plan(epochs=2, rate=3e-5, batch=32, longest=128),
    "MRPC": Plan(epochs=5, rate=5e-5, batch=16, longest=256),
    "STS-B": Plan(epochs=5, rate=5e-5, batch=16, longest=256),
    "CoNLL-2003": Plan(epochs=4, rate=5e-5, batch=16, longest=256),
    "RTE": Plan(epochs=5, rate=5e-5, batch=16, longest=512),
    "CoLA": Plan(epochs=5, rate=5e-5, batch=16, longest=128),
    "AG News": Plan(epochs=3, rate=5e-5, batch=32, longest=256),
    "IMDB": Plan(epochs=1, rate=3e-5, batch=16, longest=512),
    "SQuAD": Plan(epochs=1, rate=5e-5, batch=16, longest=384),  # Heedful alone: the peer has no such task
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Examples to learn from and the labelled ones on which the result is measured."""

    kind: Literal["classify", "regress", "tag", "qa"]
    labels: tuple[str, ...]  # in order; none of a regression, or of questions
    train: Sequence[LabelledExample | ScoredExample | TaggedExample | QuestionExample]
    held: Sequence[
        LabelledExample | ScoredExample | TaggedExample | QuestionExample
    ]  # never trained on, and nothing is chosen by it
    about: str  # where they come from and what was left out


def load(name: str) -> Task:
    """The examples of one of `PLANS`, from the folder HEEDFUL_DATA."""
    folder = os.environ.get("HEEDFUL_DATA")
    if not folder or not Path(folder, "tasks").is_dir():
        raise SystemExit("set HEEDFUL_DATA to the folder of the data sets")
    tasks = Path(folder, "tasks")
    if name in GLUE:
        return _glue(tasks / "glue" / name)
    return {"CoNLL-2003": _conll, "AG News": _ag_news, "IMDB": _imdb, "SQuAD": _squad}[name](tasks)


def sample(examples: Sequence[Each], count: int | None) -> list[Each]:
    """That many of them in their order, always the same ones; None: all."""
    if count is None or count >= len(examples):
        return list(examples)
    return [examples[number] for number in sorted(random.Random(f"sample {count}").sample(range(len(examples)), count))]


def _glue(folder: Path) -> Task:
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
    """The 5,000 rows without the 1,000 of its dev.csv, which are all in it, and without what the official test has."""
    settings = DataSettings(columns={"text": 1, "label": 2}, dev_fraction=0.0)
    small = tasks / "ag_news" / "subset_7k"
    rows = list(read(small / "train.csv", LabelledExample, settings).examples("train"))
    kept_back = {row.text for row in read(small / "dev.csv", LabelledExample, settings).examples("train")}
    official = tasks / "ag_news" / "ag_news_csv" / "test.csv"
    separate = DataSettings(columns={"text": 3, "label": 1}, dev_fraction=0.0)
    descriptions = {_words(row.text) for row in read(official, LabelledExample, separate).examples("train")}
    joined = DataSettings(columns={"text": (2, 3), "label": 1}, dev_fraction=0.0)
    held = list(read(official, LabelledExample, joined).examples("train"))
    left = [row for row in rows if row.text not in kept_back]
    train = [row for row in left if not _ends(_words(row.text), descriptions)]
    return Task(
        kind="classify",
        labels=("0", "1", "2", "3"),
        train=train,
        held=[replace(row, label=str(int(row.label) - 1)) for row in held],  # the official file counts from 1
        about=f"AG News, train.csv of the 7k subset without the {len(rows) - len(left):,} rows of its dev.csv and "
        f"{len(left) - len(train)} whose description is in the official test, and that test",
    )


def _imdb(tasks: Path) -> Task:
    """Load IMDB. All pos precede all neg, so the order has to be random; texts of the test are left out of train.

    A tenth of train is kept back, as Heedful does of data without a dev split.
    """
    source = read({split: tasks / "imdb" / f"{split}.jsonl.xz" for split in ("train", "test")}, LabelledExample)
    held = list(source.examples("test"))
    tested = {row.text for row in held}
    rows = list(source.examples("train"))
    train = [row for row in rows if row.text not in tested]
    return Task(
        kind="classify",
        labels=source.labels,
        train=train,
        held=held,
        about=f"IMDB, nine tenths of train without {len(rows) - len(train)} rows whose text is in test, and test",
    )


def _squad(tasks: Path) -> Task:
    """Version 1.1's dev, which was never trained on, after questions that were made as test sets of other texts.

    Paragraphs of new_wiki that are in dev too are left out.
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
    result = []
    for example in examples:
        assert isinstance(example, kinds)
        result.append(example)
    return result


def _words(text: str) -> tuple[str, ...]:
    """Without case and punctuation."""
    return tuple(re.findall(r"[a-z0-9]+", text.casefold()))


def _ends(words: tuple[str, ...], endings: set[tuple[str, ...]]) -> bool:
    """Return whether the words after a title of at least one word are one of the endings."""
    return any(words[start:] in endings for start in range(1, len(words)))

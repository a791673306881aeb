"""The published counts of public data sets; these tests need the data sets in the folder HEEDFUL_DATA."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from heedful.data import ChoiceExample, Dataset, DataSettings, QuestionExample, Skip, check, read

WHOLE = DataSettings(dev_fraction=0.0)


COUNT = """
import json, sys
from heedful.data import read
dataset = read(sys.argv[1])
examples, words, entities = {}, {}, {}
for split in dataset.splits:
    examples[split] = words[split] = entities[split] = 0
    for example in dataset.examples(split):
        tags = getattr(example, "tags", ())
        examples[split] += 1
        words[split] += len(tags)
        entities[split] += sum(tag[0] == "B" for tag in tags)
json.dump([examples, dataset.stated, words, entities], sys.stdout)
"""


def count_in_subprocess(path: Path) -> Any:
    """The number of examples by split, the notes, and the numbers of tagged words and of entities by split.

    They are counted in another process because the tests check argument types at run time, which would be slow here.
    """
    result = subprocess.run([sys.executable, "-c", COUNT, str(path)], capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def counts(dataset: Dataset[Any]) -> dict[str, int]:
    return {split: sum(1 for _ in dataset.examples(split)) for split in dataset.splits}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("SST-2", {"train": 67_349, "dev": 872}),
        ("CoLA", {"train": 8_551, "dev": 1_043}),
        ("MRPC", {"train": 3_668, "dev": 408, "test": 1_725}),
        ("RTE", {"train": 2_490, "dev": 277}),
        ("STS-B", {"train": 5_749, "dev": 1_500, "test": 1_379}),
    ],
)
def test_glue(data_dir: Path, task: str, expected: dict[str, int]) -> None:
    counts, stated, _, _ = count_in_subprocess(data_dir / "tasks/glue" / task)
    assert counts == expected
    assert any("2750203 / 2750153" in note for note in stated) == (task == "MRPC")


def test_tags(data_dir: Path) -> None:
    counts, stated, words, entities = count_in_subprocess(data_dir / "tasks/conll2003")
    assert "tags are IOB1, read as IOB2" in stated
    assert counts == {"train": 14_041, "dev": 3_250, "test": 3_453}
    assert words == {"train": 203_621, "dev": 51_362, "test": 46_435}
    assert entities == {"train": 23_499, "dev": 5_942, "test": 5_648}


@pytest.mark.parametrize(
    ("name", "questions", "impossible", "contexts", "answers"),
    [
        ("squad/dev-v1.1.json", 10_570, 0, 2_067, 34_726),
        ("squad/dev-v2.0.json", 11_873, 5_945, 1_204, None),
        ("squad/train-sample-800.json", 4_000, 0, 800, 4_000),
        ("squadshifts/new_wiki_v1.0.json", 7_938, 0, None, None),
        ("squadshifts/amazon_reviews_v1.0.json", 9_885, 0, None, None),
        ("squadshifts/reddit_v1.0.json", 9_803, 0, None, None),
    ],
)
def test_questions(
    data_dir: Path, name: str, questions: int, impossible: int, contexts: int | None, answers: int | None
) -> None:
    dataset = read({"test": data_dir / "tasks" / name}, QuestionExample)
    read_examples = list(dataset.examples("test"))
    assert len(read_examples) == questions
    assert sum(example.impossible for example in read_examples) == impossible
    if contexts is not None:
        assert len({example.context for example in read_examples}) == contexts
    if answers is not None:
        assert sum(len(example.answers) for example in read_examples) == answers
    assert not dataset.row_errors.repairs


def test_topics(data_dir: Path) -> None:
    folder = data_dir / "tasks/ag_news"
    dataset = read(
        folder / "ag_news_csv/test.csv", settings=DataSettings(dev_fraction=0.0, columns={"text": (2, 3), "label": 1})
    )
    label_counts = Counter(example.label for example in dataset.examples("train"))  # type: ignore[attr-defined]
    assert label_counts == dict.fromkeys("1234", 1_900)
    report = check(read(folder / "subset_7k", settings=DataSettings(columns={"text": 1, "label": 2})))
    assert {name: split.examples for name, split in report.splits.items()} == {
        "train": 5_000,
        "dev": 1_000,
        "test": 1_000,
    }
    assert [(leak.splits, leak.texts) for leak in report.leaks] == [(("train", "dev"), 1_000)]


def test_choices(data_dir: Path) -> None:
    folder = data_dir / "tasks/race"
    dataset = read({"test": folder / "test.jsonl.xz"}, ChoiceExample)
    assert all(len(example.candidates) == 4 for example in dataset.examples("test"))


def test_choices_of_train(data_dir: Path) -> None:
    assert count_in_subprocess(data_dir / "tasks/race")[0] == {"train": 49_424, "dev": 2_747, "test": 1_977}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reviews(data_dir: Path) -> None:
    report = check(read(data_dir / "tasks/imdb", settings=WHOLE, on_bad_row=Skip()))
    train, test = report.splits["train"], report.splits["test"]
    assert dict(train.labels) == dict(test.labels) == {"neg": 12_500, "pos": 12_500}
    assert (train.repeated, test.repeated) == (96, 199)
    assert [leak.texts for leak in report.leaks] == [123]
    assert not report.bad


@pytest.mark.slow
def test_repeats(data_dir: Path) -> None:
    assert check(read(data_dir / "tasks/glue/SST-2")).splits["train"].repeated == 371


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_corpus(data_dir: Path) -> None:
    assert counts(read(data_dir / "corpus/novels.jsonl.xz", settings=WHOLE)) == {"train": 3_970}

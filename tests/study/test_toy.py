"""The toy world: seeded, nothing leaks between splits, and a bag of words knows nothing of the parts that are hard."""

from __future__ import annotations

import csv
import errno
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heedful.data import LabelledExample, Seq2SeqExample, read
from heedful.errors import DataError, HeedfulError
from heedful.study.toy import files as toy_files
from heedful.study.toy.files import write_toy_files
from heedful.study.toy.language import NOUNS, VERBS, translations
from heedful.study.toy.order import BAD, GOOD, HARD, PARTS, bag_of_words, texts
from heedful.study.toy.split import Sampled, Sizes, sample_splits, split_of
from heedful.study.toy.stories import stories

SIZES = Sizes(train=2000, dev=200, test=200)


def test_translations() -> None:
    splits = translations(SIZES, seed=3)
    assert splits == translations(SIZES, seed=3) != translations(SIZES, seed=4)
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 2000, "dev": 200, "test": 200}
    pairs = [pair for split in splits.values() for pair in split]
    assert len({pair.source for pair in pairs}) == len({pair.target for pair in pairs}) == len(pairs)
    other_seed = translations(SIZES, seed=4)
    assert not {p.source for p in splits["train"]} & {p.source for p in (*other_seed["test"], *other_seed["dev"])}
    assert all(split_of(pair.source) == split for split in splits for pair in splits[split])


def test_the_language_agrees_and_moves_words() -> None:
    stems = {noun.stem: noun for noun in NOUNS}
    assert len(stems) == len(NOUNS) and len({verb.stem for verb in VERBS}) == len(VERBS)
    for source, target in translations(SIZES, clauses=1)["test"]:
        *rest, end = source.split()
        verb = rest[-2] if rest[-1] == "ne" else rest[-1]
        assert end == "." and (rest[-1] == "ne") == (" not " in target)
        whom = next(word for word in rest if word.endswith("n") and word[:3] in stems and word not in ("un",))
        who = next(word for word in rest if word[:3] in stems and not word.endswith("n"))
        several = who.endswith("r")
        assert verb.endswith("r") == several, "the verb agrees with who does it, whatever is between"
        noun = stems[who[:3]]
        assert f" {noun.plural if several else noun.singular} " in f" {target} "
        assert rest.index(who) < rest.index(whom) < rest.index(verb), "whom precedes the verb"
        after = rest[rest.index(who) + 1]
        if after not in ("ta", "un"):
            assert after.endswith(noun.kind + "r" * several), "adjectives agree in class and number"


def test_a_bag_of_words_knows_nothing_of_the_hard_parts() -> None:
    split_texts = texts(SIZES, seed=1)
    assert split_texts == texts(SIZES, seed=1) != texts(SIZES, seed=2)
    seen: dict[str, set[str]] = defaultdict(set)
    for split, several in split_texts.items():
        assert Counter(example.part for example in several) == dict.fromkeys(PARTS, SIZES.__getattribute__(split) // 4)
        labels: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for example in several:
            seen[example.text].add(split)
            if example.part in HARD:
                labels[bag_of_words(example.text)].append(example.label)
        assert all(sorted(twins) == [BAD, GOOD] for twins in labels.values()), "each bag has both classes, once"
    assert sum(map(len, split_texts.values())) == len(seen) and all(len(splits) == 1 for splits in seen.values())


def test_asking_for_too_many_samples_is_refused() -> None:
    with pytest.raises(HeedfulError, match="more than there is to sample: 9"):
        sample_splits(lambda random: Sampled(str(random.randrange(9)), 0), Sizes(train=20, dev=9, test=9), 0)


def test_stories_are_of_one_opinion() -> None:
    assert stories(3, 5) == stories(3, 5) != stories(3, 6)
    assert all(4 <= len(story.splitlines()) <= 8 for story in stories(20))


def test_files_that_others_read(tmp_path: Path) -> None:
    files = write_toy_files(tmp_path / "toy", train=800)
    assert len(files) == 6
    for name, kind in (("order", LabelledExample), ("translation", Seq2SeqExample)):
        source = read(tmp_path / "toy" / name, kind)
        counts = {split: len(list(source.examples(split))) for split in source.splits}
        assert counts == {"train": 800, "dev": 80, "test": 80}
    with (tmp_path / "toy" / "order" / "test.csv").open() as file:
        assert {row["part"] for row in csv.DictReader(file)} == set(PARTS)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(DataError, match="file is not a folder: give another path"):
        write_toy_files(tmp_path / "file", train=80)
    with pytest.raises(DataError, match=f"{tmp_path} exists and is not empty: give another folder"):
        write_toy_files(tmp_path, train=80)
    with pytest.raises(HeedfulError, match="train is 3; expected 80"):
        write_toy_files(tmp_path / "small", train=3)

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "locked").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(DataError, match="locked cannot be written: Permission denied: give another folder"):
            write_toy_files(tmp_path / "locked", train=80)


def test_toy_files_are_removed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the last file leaves an empty folder, to which the same call can write."""
    write_table = toy_files._write_table

    def fail_at_the_end(path: Path, *arguments: Any) -> Path:
        if path.name == "test.csv":
            raise OSError("no space left")  # has no strerror
        return write_table(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(toy_files, "_write_table", fail_at_the_end)
        with pytest.raises(DataError, match="toy cannot be written: no space left: give another folder"):
            write_toy_files(tmp_path / "toy", train=80)
    assert not list((tmp_path / "toy").iterdir())
    assert len(write_toy_files(tmp_path / "toy", train=80)) == 6

"""Toy data: equal seeds give equal data, no text is in two splits, and a bag of words is at chance on hard parts."""

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


def test_translations_depend_on_the_seed_and_are_in_one_split() -> None:
    splits = translations(SIZES, seed=3)
    assert splits == translations(SIZES, seed=3)
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 2000, "dev": 200, "test": 200}
    pairs = [pair for pairs_of_split in splits.values() for pair in pairs_of_split]
    assert len({pair.source for pair in pairs}) == len(pairs), "no sentence is repeated"
    assert len({pair.target for pair in pairs}) == len(pairs), "different sentences have different translations"
    for split, pairs_of_split in splits.items():
        assert {split_of(pair.source) for pair in pairs_of_split} == {split}
    other_splits = translations(SIZES, seed=4)
    assert splits != other_splits
    train_sources = {pair.source for pair in splits["train"]}
    held_out_sources = {pair.source for pair in (*other_splits["dev"], *other_splits["test"])}
    assert not train_sources & held_out_sources, "also with another seed"


def test_words_of_the_language_have_different_stems() -> None:
    assert len({noun.stem for noun in NOUNS}) == len(NOUNS)
    assert len({verb.stem for verb in VERBS}) == len(VERBS)


def test_the_language_has_its_word_order_and_agreement() -> None:
    noun_of_stem = {noun.stem: noun for noun in NOUNS}  # stems of nouns have three letters
    for source, target in translations(SIZES, clauses=1)["test"]:
        *words, period = source.split()
        assert period == "."
        is_negated = words[-1] == "ne"
        assert is_negated == (" not " in target)
        verb = words[-2] if is_negated else words[-1]
        nouns = [word for word in words if word[:3] in noun_of_stem]
        subject = next(word for word in nouns if not word.endswith("n"))
        object_ = next(word for word in nouns if word.endswith("n"))
        assert words.index(subject) < words.index(object_) < words.index(verb)
        is_plural = subject.endswith("r")
        assert verb.endswith("r") == is_plural, "the verb agrees with its subject"
        noun = noun_of_stem[subject[:3]]
        translation = noun.plural if is_plural else noun.singular
        assert f" {translation} " in f" {target} "
        next_word = words[words.index(subject) + 1]
        if next_word not in ("ta", "un"):  # an adjective, not an article
            assert next_word.endswith(noun.kind + ("r" if is_plural else "")), "it agrees in class and number"


def test_texts_depend_on_the_seed_and_are_in_one_split() -> None:
    splits = texts(SIZES, seed=1)
    assert splits == texts(SIZES, seed=1)
    assert splits != texts(SIZES, seed=2)
    for split, examples in splits.items():
        part_counts = Counter(example.part for example in examples)
        assert part_counts == dict.fromkeys(PARTS, getattr(SIZES, split) // 4)
    all_texts = [example.text for examples in splits.values() for example in examples]
    assert len(set(all_texts)) == len(all_texts)


def test_a_bag_of_words_is_at_chance_on_the_hard_parts() -> None:
    """Each bag of words has two texts, one of each class."""
    for examples in texts(SIZES, seed=1).values():
        labels_of_bag: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for example in examples:
            if example.part in HARD:
                labels_of_bag[bag_of_words(example.text)].append(example.label)
        assert all(sorted(labels) == [BAD, GOOD] for labels in labels_of_bag.values())


def test_asking_for_too_many_samples_is_refused() -> None:
    with pytest.raises(HeedfulError, match="more than there is to sample: 9"):
        sample_splits(lambda random: Sampled(str(random.randrange(9)), 0), Sizes(train=20, dev=9, test=9), 0)


def test_stories_depend_on_the_seed_and_have_four_to_eight_sentences() -> None:
    assert stories(3, seed=5) == stories(3, seed=5)
    assert stories(3, seed=5) != stories(3, seed=6)
    assert all(4 <= len(story.splitlines()) <= 8 for story in stories(20))


def test_the_files_can_be_read_as_data(tmp_path: Path) -> None:
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

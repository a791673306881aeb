"""Texts with an opinion whose class depends on word order and negation, so that a bag of words is at chance.

The class is "good" or "bad" by two rules: the clause after "but" decides, and "not" negates the word that follows it.
There are four parts of equal size:

    plain   one clause, no negation                i think the music is very good             a bag of words is enough
    but     two clauses                            the end is very bad but what a great music
    not     one opinion twice, once negated        the plot is good , not bad
    both    two clauses, one of them negated       the cast is not dull but the end is weak

Each text of the last three parts has a twin: the same words in another order, and the other class. Any prediction from
a bag of words is right for exactly one of the two. Twins are in the same split.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from random import Random
from typing import NamedTuple

from heedful.study.toy.split import SPLITS, Sampled, Sizes, sample_splits

GOOD, BAD = "good", "bad"  # the classes
LABELS = (BAD, GOOD)
POSITIVE = ["good", "great", "lovely", "brilliant", "charming", "clever", "funny", "moving", "fresh", "superb"]
NEGATIVE = ["bad", "awful", "boring", "weak", "dull", "clumsy", "silly", "cold", "stale", "dreadful"]
ASPECTS = [
    "music",
    "end",
    "plot",
    "cast",
    "story",
    "film",
    "dialogue",
    "photography",
    "beginning",
    "idea",
    "joke",
    "hero",
    "scene",
    "pace",
]
DEGREES = ("", "", "very ", "really ", "so ", "quite ")  # "" is here twice, so that it is more frequent
OPENINGS = ("", "", "i think ", "we found that ", "they say ", "to me ", "honestly , ")


class OrderText(NamedTuple):
    """A text, its class, and its part."""

    text: str
    label: str  # GOOD or BAD
    part: str  # key of PARTS


def bag_of_words(text: str) -> tuple[str, ...]:
    """Return the sorted words of a text: all that a bag of words knows about it.

    >>> bag_of_words("good , not bad") == bag_of_words("bad , not good")
    True
    """
    return tuple(sorted(text.split()))


def texts(sizes: Sizes, seed: int = 0) -> dict[str, list[OrderText]]:
    """Return random texts for each split. Each part has a fourth of the texts, and twins are adjacent.

    Args:
        sizes: Number of texts of each split, rounded down to multiples of eight.
        seed: Random seed.
    """
    pairs_per_part = Sizes(**{name: getattr(sizes, name) // 8 for name in SPLITS})
    parts = [
        sample_splits(sample, pairs_per_part, seed * len(PARTS) + index) for index, sample in enumerate(PARTS.values())
    ]  # twins of each part, by split
    texts_by_split: dict[str, list[OrderText]] = {}
    for split in SPLITS:
        twins = chain.from_iterable(zip(*(part[split] for part in parts), strict=True))  # the parts take turns
        texts_by_split[split] = list(chain.from_iterable(twins))
    return texts_by_split


def clause(random: Random, label: str) -> str:
    """Return a random clause without negation, whose opinion is that of a label."""
    word = random.choice(POSITIVE if label == GOOD else NEGATIVE)
    if random.random() < 0.3:
        return f"what a {word} {random.choice(ASPECTS)}"
    return f"the {random.choice(ASPECTS)} is {random.choice(DEGREES)}{word}"


def _twins(first: str, second: str, labels: tuple[str, str], part: str) -> Sampled[tuple[OrderText, OrderText]]:
    """Return two texts as one sample, so that both are in one split. The key is the bag of words of the first text."""
    twins = OrderText(first, labels[0], part), OrderText(second, labels[1], part)
    return Sampled(" ".join(bag_of_words(first)), twins)


def _plain(random: Random) -> Sampled[tuple[OrderText, OrderText]]:
    """Return two clauses that differ in the opinion word."""
    opening = random.choice(OPENINGS)
    aspect = random.choice(ASPECTS)
    degree = random.choice(DEGREES)
    antonyms = list(zip(POSITIVE, NEGATIVE, strict=True))  # each word has one antonym, so that each text has one twin
    positive, negative = random.choice(antonyms)
    if random.random() < 0.3:
        first, second = (f"{opening}what a {word} {aspect}" for word in (positive, negative))
    else:
        first, second = (f"{opening}the {aspect} is {degree}{word}" for word in (positive, negative))
    return _twins(first, second, (GOOD, BAD), "plain")


def _but(random: Random) -> Sampled[tuple[OrderText, OrderText]]:
    """Return two clauses of different opinions in both orders."""
    opening = random.choice(OPENINGS)
    positive, negative = clause(random, GOOD), clause(random, BAD)
    return _twins(f"{opening}{negative} but {positive}", f"{opening}{positive} but {negative}", (GOOD, BAD), "but")


def _not(random: Random) -> Sampled[tuple[OrderText, OrderText]]:
    """Return two texts with the same two opinion words, one good and one bad. Each text negates a different one."""
    opening = random.choice(OPENINGS)
    aspect = random.choice(ASPECTS)
    positive = random.choice(POSITIVE)
    negative = random.choice(NEGATIVE)
    form = random.choice(("the {a} is {x} , not {y}", "the {a} is not {y} , it is {x}", "{x} , not {y} : the {a}"))
    first, second = (
        f"{opening}{form.format(a=aspect, x=x, y=y)}" for x, y in ((positive, negative), (negative, positive))
    )
    return _twins(first, second, (GOOD, BAD), "not")


def _both(random: Random) -> Sampled[tuple[OrderText, OrderText]]:
    """Return two texts of the same two clauses, which have the same opinion. Each text negates a different clause."""
    opening = random.choice(OPENINGS)
    aspects = random.sample(ASPECTS, 2)
    is_positive = random.random() < 0.5
    opinions = POSITIVE if is_positive else NEGATIVE
    words = random.choice(opinions), random.choice(opinions)
    first = f"{opening}the {aspects[0]} is not {words[0]} but the {aspects[1]} is {words[1]}"
    second = f"{opening}the {aspects[0]} is {words[0]} but the {aspects[1]} is not {words[1]}"
    return _twins(first, second, (GOOD, BAD) if is_positive else (BAD, GOOD), "both")


# function that samples twins of each part
PARTS: dict[str, Callable[[Random], Sampled[tuple[OrderText, OrderText]]]] = {
    "plain": _plain,
    "but": _but,
    "not": _not,
    "both": _both,
}
HARD = ("but", "not", "both")  # parts on which a bag of words is at chance

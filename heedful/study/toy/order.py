"""Texts of which order and negation decide the class, so that a bag of words is at chance on them by construction.

Two rules: what is said after "but" counts, and "not" turns the word that follows it. Four parts, as many of each:

    plain   one clause, nothing denied             i think the music is very good             a bag of words will do
    but     two clauses                            the end is very bad but what a great music
    not     the same said twice, once denied       the plot is good , not bad
    both    two clauses, one of them denied        the cast is not dull but the end is weak

Each text of the last three parts has a twin: the same words in another order, and the other class. Twins are in one
split, so whatever a bag of words predicts is right for exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from heedful.study.toy.split import Sampled, Sizes, sample_splits

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
DEGREES = ("", "", "very ", "really ", "so ", "quite ")
OPENINGS = ("", "", "i think ", "we found that ", "they say ", "to me ", "honestly , ")


class Text(NamedTuple):
    """A text, its class, and its part."""

    text: str
    label: str
    part: str


def bag_of_words(text: str) -> tuple[str, ...]:
    """All that a bag of words sees.

    >>> words_of("good , not bad") == words_of("bad , not good")
    True
    """
    return tuple(sorted(text.split()))


def texts(sizes: Sizes, seed: int = 0) -> dict[str, list[Text]]:
    """So many texts for each split, a fourth of each part, twins side by side; sizes that eight divides come out."""
    quarter = Sizes(**{name: getattr(sizes, name) // 8 for name in ("train", "dev", "test")})
    parts = [sample_splits(draw, quarter, seed * len(PARTS) + number) for number, draw in enumerate(PARTS.values())]
    return {
        split: [text for four in zip(*(part[split] for part in parts), strict=True) for two in four for text in two]
        for split in ("train", "dev", "test")
    }


def clause(random: Random, label: str) -> str:
    """One clause that says so, nothing denied."""
    word = random.choice(POSITIVE if label == GOOD else NEGATIVE)
    if random.random() < 0.3:
        return f"what a {word} {random.choice(ASPECTS)}"
    return f"the {random.choice(ASPECTS)} is {random.choice(DEGREES)}{word}"


def _drawn(one: str, other: str, labels: tuple[str, str], part: str) -> Sampled[tuple[Text, Text]]:
    """Two texts that stay together; what is said with the words of one is said once."""
    both = Text(one, labels[0], part), Text(other, labels[1], part)
    return Sampled(" ".join(bag_of_words(one)), both)


def _plain(random: Random) -> Sampled[tuple[Text, Text]]:
    opening, aspect, degree = (random.choice(each) for each in (OPENINGS, ASPECTS, DEGREES))
    fine, poor = random.choice(list(zip(POSITIVE, NEGATIVE, strict=True)))  # so that a text has one twin, here too
    if random.random() < 0.3:
        one, other = (f"{opening}what a {word} {aspect}" for word in (fine, poor))
    else:
        one, other = (f"{opening}the {aspect} is {degree}{word}" for word in (fine, poor))
    return _drawn(one, other, (GOOD, BAD), "plain")


def _but(random: Random) -> Sampled[tuple[Text, Text]]:
    opening = random.choice(OPENINGS)
    fine, poor = clause(random, GOOD), clause(random, BAD)
    return _drawn(f"{opening}{poor} but {fine}", f"{opening}{fine} but {poor}", (GOOD, BAD), "but")


def _not(random: Random) -> Sampled[tuple[Text, Text]]:
    opening, aspect = random.choice(OPENINGS), random.choice(ASPECTS)
    fine, poor = random.choice(POSITIVE), random.choice(NEGATIVE)
    form = random.choice(("the {a} is {x} , not {y}", "the {a} is not {y} , it is {x}", "{x} , not {y} : the {a}"))
    one, other = (f"{opening}{form.format(a=aspect, x=x, y=y)}" for x, y in ((fine, poor), (poor, fine)))
    return _drawn(one, other, (GOOD, BAD), "not")


def _both(random: Random) -> Sampled[tuple[Text, Text]]:
    opening = random.choice(OPENINGS)
    first, last = random.sample(ASPECTS, 2)
    end = random.random() < 0.5
    words = random.choice(POSITIVE if end else NEGATIVE), random.choice(POSITIVE if end else NEGATIVE)
    one = f"{opening}the {first} is not {words[0]} but the {last} is {words[1]}"
    other = f"{opening}the {first} is {words[0]} but the {last} is not {words[1]}"
    return _drawn(one, other, (GOOD, BAD) if end else (BAD, GOOD), "both")


PARTS: dict[str, Callable[[Random], Sampled[tuple[Text, Text]]]] = {
    "plain": _plain,
    "but": _but,
    "not": _not,
    "both": _both,
}
HARD = ("but", "not", "both")  # a bag of words is at chance

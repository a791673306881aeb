"""Toy stories for pre-training: film reviews of several sentences with one opinion, an opening and an ending."""

from __future__ import annotations

from random import Random

from heedful.study.toy.order import ASPECTS, BAD, GOOD, NEGATIVE, POSITIVE, clause

OPENINGS = (
    "yesterday i saw a {w} film .",
    "my friends took me to a {w} evening .",
    "last week we watched something {w} .",
    "this is the first time i write about a {w} film .",
)
ENDINGS = (
    "in the end i would call it {w} .",
    "all in all it stays {w} .",
    "so my verdict is that it was {w} .",
    "we left and everybody said how {w} it was .",
)


def stories(count: int, seed: int = 0) -> list[str]:
    """Return random stories, each of one opinion, with one sentence per line."""
    random = Random(seed)
    return ["\n".join(_story(random)) for _ in range(count)]


def _story(random: Random) -> list[str]:
    """Return the sentences of a random story: an opening, two to six sentences, and an ending, all of one opinion."""
    label = random.choice((GOOD, BAD))
    words = POSITIVE if label == GOOD else NEGATIVE
    sentences = [_sentence(random, label) for _ in range(random.randint(2, 6))]
    first, last = random.choice(OPENINGS), random.choice(ENDINGS)
    return [first.format(w=random.choice(words)), *sentences, last.format(w=random.choice(words))]


def _sentence(random: Random, label: str) -> str:
    """Return a random sentence with the opinion of a label.

    Most sentences have three opinion words that agree, so that a model can learn the meaning of a word from the others.
    """
    opposite_label = BAD if label == GOOD else GOOD
    agreeing, opposite = (POSITIVE, NEGATIVE) if label == GOOD else (NEGATIVE, POSITIVE)
    match random.randrange(10):
        case 0:
            return f"{clause(random, opposite_label)} but {clause(random, label)} ."
        case 1:
            return f"the {random.choice(ASPECTS)} is {random.choice(agreeing)} , not {random.choice(opposite)} ."
        case 2 | 3:
            return f"{clause(random, label)} ."
    first, second, third = random.sample(agreeing, 3)
    return f"the {random.choice(ASPECTS)} is {first} , {second} and {third} ."

"""Documents to read first: reviews of several sentences that agree with each other, in an order that tells."""

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
    """So many documents, a sentence on each line; each is of one opinion."""
    random = Random(seed)
    return ["\n".join(_story(random)) for _ in range(count)]


def _story(random: Random) -> list[str]:
    label = random.choice((GOOD, BAD))
    words = POSITIVE if label == GOOD else NEGATIVE
    inner = [_sentence(random, label) for _ in range(random.randint(2, 6))]
    first, last = random.choice(OPENINGS), random.choice(ENDINGS)
    return [first.format(w=random.choice(words)), *inner, last.format(w=random.choice(words))]


def _sentence(random: Random, label: str) -> str:
    """Mostly three words that agree, side by side: what a word says can be read off its neighbours."""
    other = BAD if label == GOOD else GOOD
    mine, theirs = (POSITIVE, NEGATIVE) if label == GOOD else (NEGATIVE, POSITIVE)
    match random.randrange(10):
        case 0:
            return f"{clause(random, other)} but {clause(random, label)} ."
        case 1:
            return f"the {random.choice(ASPECTS)} is {random.choice(mine)} , not {random.choice(theirs)} ."
        case 2 | 3:
            return f"{clause(random, label)} ."
    one, two, three = random.sample(mine, 3)
    return f"the {random.choice(ASPECTS)} is {one} , {two} and {three} ."

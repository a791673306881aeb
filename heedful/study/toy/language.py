"""Melu, a made-up language, and its English translation: word order, agreement and case.

In Melu, time and place are first, then the subject and the object, and the verb is last. Adjectives and articles follow
their noun. Nouns have two classes, "o" and "i". Adjectives agree with their noun in class and number, and the verb
agrees with its subject in number. The object ends in -n. "ne" after the verb negates it. A subordinate clause precedes
the main clause, and ends with its conjunction.

    vesta rum el kalor vemor ta mirin sudi un tirar ne
    the old sailors do not see a red bird near the river today

Each sentence has exactly one meaning. There are about 8 * 10^9 sentences of one clause.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from heedful.study.toy.split import Sampled, Sizes, sample_splits


class Noun(NamedTuple):
    """A noun of Melu with its English translation, singular and plural."""

    stem: str
    kind: str  # noun class, "o" or "i"
    singular: str
    plural: str


class Verb(NamedTuple):
    """A verb of Melu with its English translation: base form, third person singular and past."""

    stem: str
    base: str
    third_person: str
    past: str


def _nouns() -> tuple[Noun, ...]:
    """Return all nouns."""
    regular = (
        "kal o sailor,mir i bird,dov o dog,tas i cat,bel o baker,rin i queen,gor o farmer,lum i lamp,fen o boy,"
        "sib i girl,nak o king,pel i boat,rov o painter,zim i apple,hul o teacher,vil i letter,tum o drum,jas i house,"
        "mok o hunter,lis i flower,bro o stone,tel i table,kur o soldier,sef i song"
    )
    nouns = []
    for words in regular.split(","):
        stem, kind, singular = words.split()
        nouns.append(Noun(stem, kind, singular, f"{singular}s"))
    irregular = ("dan o child children", "wam i woman women", "ras o man men", "nib i mouse mice", "gan o goose geese")
    return (*nouns, *(Noun(*words.split()) for words in irregular))


def _verbs() -> tuple[Verb, ...]:
    """Return all verbs."""
    regular = ["paint", "call", "follow", "help", "visit", "clean", "want", "push", "remember"]
    stems = ["vor", "kesh", "lupt", "hamb", "nez", "jom", "dal", "purg", "mend"]
    verbs = [Verb(stem, word, f"{word}s", f"{word}ed") for stem, word in zip(stems, regular, strict=True)]
    irregular = (
        "tir see sees saw", "gab give_up gives_up gave_up", "sol hear hears heard", "brun find finds found",
        "hok take takes took", "fil draw draws drew", "mar buy buys bought", "ket lose loses lost",
        "wend carry carries carried", "zar hold holds held",
    )  # fmt: skip
    return (*verbs, *(Verb(*(word.replace("_", " ") for word in words.split())) for words in irregular))


NOUNS, VERBS = _nouns(), _verbs()
ADJECTIVES = dict(  # English adjective by the stem in Melu
    zip(
        ["vem", "sud", "lan", "kip", "bor", "ask", "hin", "yel", "drem", "fos", "gul", "tav"],
        ["old", "red", "small", "big", "young", "quiet", "happy", "green", "strange", "tired", "empty", "unusual"],
        strict=True,
    )
)
PLACES = dict(  # English noun by the noun in Melu
    zip(["rum", "holt", "brig", "pas", "mon"], ["river", "forest", "bridge", "market", "mountain"], strict=True)
)
SIDES = {"el": "near", "av": "behind", "ot": "in front of"}  # English preposition by the postposition in Melu
PRESENT = {"vesta": "today", "ilta": "every evening", "": ""}  # English time by that in Melu; "" for no time
PAST = {"hesta": "yesterday", "noxa": "last night", "": ""}  # times of the past; "" for no time
CONJUNCTIONS = {"perka": "because", "quama": "when", "etsi": "although"}  # English conjunction by that in Melu


@dataclass(frozen=True, kw_only=True, slots=True)
class NounPhrase:
    """A noun with adjective, number and article."""

    noun: Noun
    adjective: str  # key of ADJECTIVES, or "" for no adjective
    plural: bool
    definite: bool

    def melu(self, *, is_object: bool) -> str:
        """Return noun, adjective and article in Melu.

        Args:
            is_object: Whether the noun is the object of its clause.
        """
        ending = self.noun.kind + ("r" if self.plural else "")
        words = [self.noun.stem + ending + ("n" if is_object else "")]
        if self.adjective:
            words.append(self.adjective + ending)
        words.append("ta" if self.definite else "un")
        return " ".join(words)

    def english(self) -> str:
        """Return article, adjective and noun in English."""
        words = [ADJECTIVES[self.adjective]] if self.adjective else []
        words.append(self.noun.plural if self.plural else self.noun.singular)
        if self.definite:
            article = "the"
        elif self.plural:
            article = "some"
        else:
            article = "an" if words[0][0] in "aeiou" else "a"
        return " ".join([article, *words])


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """Subject, verb, object and place."""

    subject: NounPhrase
    verb: Verb
    object: NounPhrase
    past: bool
    negated: bool
    place: str  # key of PLACES, or "" for no place
    side: str  # key of SIDES, or "" for no place

    def melu(self) -> str:
        """Return place, subject, object and verb in Melu."""
        place = f"{self.place} {self.side} " if self.place else ""
        ending = ("ud" if self.past else "a") + ("r" if self.subject.plural else "")
        verb = self.verb.stem + ending + (" ne" if self.negated else "")
        return f"{place}{self.subject.melu(is_object=False)} {self.object.melu(is_object=True)} {verb}"

    def english(self) -> str:
        """Return subject, verb, object and place in English."""
        if self.past:
            auxiliary, verb = "did", self.verb.past
        elif self.subject.plural:
            auxiliary, verb = "do", self.verb.base
        else:
            auxiliary, verb = "does", self.verb.third_person
        if self.negated:
            verb = f"{auxiliary} not {self.verb.base}"
        place = f" {SIDES[self.side]} the {PLACES[self.place]}" if self.place else ""
        return f"{self.subject.english()} {verb} {self.object.english()}{place}"


class Translation(NamedTuple):
    """A sentence in both languages."""

    source: str  # in Melu
    target: str  # in English


def translations(sizes: Sizes, seed: int = 0, *, clauses: int = 2) -> dict[str, list[Translation]]:
    """Return random sentences for each split. No sentence is in two splits.

    Args:
        sizes: Number of sentences of each split.
        seed: Random seed.
        clauses: Maximum clauses of a sentence, 1 or 2.
    """
    return sample_splits(lambda random: _sentence(random, clauses), sizes, seed)


def _sentence(random: Random, clauses: int) -> Sampled[Translation]:
    """Return a random sentence with its translation, of at most `clauses` clauses. Its key is the sentence in Melu."""
    past = random.random() < 0.5
    melu_time, english_time = random.choice(list((PAST if past else PRESENT).items()))
    main = _clause(random, past)
    melu_prefix = f"{melu_time} " if melu_time else ""
    english_suffix = f" {english_time}" if english_time else ""
    if clauses > 1 and random.random() < 0.3:
        melu_conjunction, english_conjunction = random.choice(list(CONJUNCTIONS.items()))
        subordinate = _clause(random, past)
        source = f"{melu_prefix}{subordinate.melu()} {melu_conjunction} {main.melu()} ."
        target = f"{main.english()}{english_suffix} {english_conjunction} {subordinate.english()} ."
    else:
        source = f"{melu_prefix}{main.melu()} ."
        target = f"{main.english()}{english_suffix} ."
    return Sampled(source, Translation(source, target))


def _clause(random: Random, past: bool) -> Clause:
    """Return a random clause, in the past or the present."""
    has_place = random.random() < 0.4
    return Clause(
        subject=_noun_phrase(random),
        verb=random.choice(VERBS),
        object=_noun_phrase(random),
        past=past,
        negated=random.random() < 0.25,
        place=random.choice(list(PLACES)) if has_place else "",
        side=random.choice(list(SIDES)) if has_place else "",
    )


def _noun_phrase(random: Random) -> NounPhrase:
    """Return a random noun phrase."""
    return NounPhrase(
        noun=random.choice(NOUNS),
        adjective=random.choice(list(ADJECTIVES)) if random.random() < 0.5 else "",
        plural=random.random() < 0.4,
        definite=random.random() < 0.6,
    )

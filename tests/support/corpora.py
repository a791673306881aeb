"""Invented documents to pre-train on, and corpora of them that are made in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from heedful.data.corpus.build import Corpus, build_corpus
from heedful.data.corpus.documents import CorpusSettings
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer

PLACES = ["harbour", "garden", "library", "kitchen", "station", "market", "mill", "school"]
THINGS = ["boat", "rose", "book", "kettle", "train", "apple", "wheel", "lesson"]
DEEDS = ["waits", "falls", "turns", "shines", "rests", "sings", "grows", "ends"]
WHEN = ["today", "at dawn", "in spring", "before noon", "after the rain", "once more", "every year", "by night"]
BLANK = CorpusSettings(sample_by="paragraph")
Document = list[str]  # of sentences


def documents(count: int, seed: int = 0, sentences: tuple[int, int] = (1, 9)) -> list[Document]:
    """Documents of sentences that are hardly ever repeated."""
    draw = random.Random(seed)

    def sentence() -> str:
        place, thing, other = draw.choice(PLACES), draw.choice(THINGS), draw.choice(THINGS)
        long = f", and the {other} {draw.choice(DEEDS)} {draw.choice(WHEN)}" if draw.random() < 0.7 else ""
        return f"In the {place} a {thing} {draw.choice(DEEDS)} {draw.choice(WHEN)}{long}."

    return [[sentence() for _ in range(draw.randint(*sentences))] for _ in range(count)]


def write(path: Path, found: Sequence[Document]) -> Path:
    """A sentence on each line, and a blank line between documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join("\n".join(each) for each in found) + "\n", encoding="utf-8")
    return path


def trained(found: Sequence[Document], **settings: object) -> Tokenizer:
    """A tokenizer of these."""
    lines = [sentence for each in found for sentence in each]
    return train_tokenizer(lines, TokenizerSettings(**{"vocab_size": 200, **settings}))  # type: ignore[arg-type]


def corpus_of(folder: Path, found: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """A corpus in folder/corpus."""
    return build_corpus([write(folder / "text.txt", found)], tokenizer, folder / "corpus", BLANK)

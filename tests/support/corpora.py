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
        place, thing, object_ = draw.choice(PLACES), draw.choice(THINGS), draw.choice(THINGS)
        long = f", and the {object_} {draw.choice(DEEDS)} {draw.choice(WHEN)}" if draw.random() < 0.7 else ""
        return f"In the {place} a {thing} {draw.choice(DEEDS)} {draw.choice(WHEN)}{long}."

    return [[sentence() for _ in range(draw.randint(*sentences))] for _ in range(count)]


def write(path: Path, documents_: Sequence[Document]) -> Path:
    """A sentence on each line, and a blank line between documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join("\n".join(document) for document in documents_) + "\n", encoding="utf-8")
    return path


def trained(documents_: Sequence[Document], **settings: object) -> Tokenizer:
    """A tokenizer of these."""
    lines = [sentence for document in documents_ for sentence in document]
    return train_tokenizer(lines, TokenizerSettings(**{"vocab_size": 200, **settings}))  # type: ignore[arg-type]


def corpus_of(folder: Path, documents_: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """A corpus in folder/corpus."""
    return build_corpus([write(folder / "text.txt", documents_)], tokenizer, folder / "corpus", BLANK)

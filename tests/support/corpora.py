"""Generated documents for pre-training, and corpora of them that are built in milliseconds."""

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
PARAGRAPHS = CorpusSettings(sample_by="paragraph")
Document = list[str]  # sentences


def make_documents(count: int, seed: int = 0, sentences: tuple[int, int] = (1, 9)) -> list[Document]:
    """Return documents of random sentences, with few repetitions.

    Args:
        count: Number of documents.
        seed: Seed of the random choices.
        sentences: Smallest and largest number of sentences in a document.
    """
    draw = random.Random(seed)

    def sentence() -> str:
        place, thing, object_ = draw.choice(PLACES), draw.choice(THINGS), draw.choice(THINGS)
        long = f", and the {object_} {draw.choice(DEEDS)} {draw.choice(WHEN)}" if draw.random() < 0.7 else ""
        return f"In the {place} a {thing} {draw.choice(DEEDS)} {draw.choice(WHEN)}{long}."

    return [[sentence() for _ in range(draw.randint(*sentences))] for _ in range(count)]


def write_documents(path: Path, documents: Sequence[Document]) -> Path:
    """Write documents to a file, with a sentence on each line and a blank line between documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join("\n".join(document) for document in documents) + "\n", encoding="utf-8")
    return path


def train_on(documents: Sequence[Document], **settings: object) -> Tokenizer:
    """Train a tokenizer on documents."""
    lines = [sentence for document in documents for sentence in document]
    return train_tokenizer(lines, TokenizerSettings(**{"vocab_size": 200, **settings}))  # type: ignore[arg-type]


def make_corpus(folder: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """Write documents to folder/text.txt, and build a corpus of them in folder/corpus."""
    return build_corpus([write_documents(folder / "text.txt", documents)], tokenizer, folder / "corpus", PARAGRAPHS)

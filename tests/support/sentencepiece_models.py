"""SentencePiece models for tests, trained by the sentencepiece library."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import sentencepiece

TEXTS = [
    f"{who} {does} the {what}, {when}."
    for who in ("Ada", "The librarian", "Nobody", "My neighbour", "A child")
    for does in ("reads", "has lost", "borrowed", "is looking for", "brought back")
    for what in ("blue book", "map of Spain", "first volume", "café guide", "photographs")
    for when in ("today", "at 9:30", "again", "in winter", "on the 3rd of May")
]


@cache
def train_sentencepiece(**options: Any) -> bytes:
    """Train a model on TEXTS with the sentencepiece library; return the bytes of its file."""
    out = io.BytesIO()
    settings = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=out, **settings)
    return out.getvalue()

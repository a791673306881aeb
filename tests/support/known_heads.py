"""A model whose attention heads follow known patterns, with queries and keys set by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.tokenizer import Tokenizer
from tests.support.model_folders import VOCABULARY

MAX_POSITIONS = 40
HEAD_PATTERNS = ("next", "previous", "same", "other", "predictive", "delimiters", "itself", "broad")
PREDICTS = {"ada": "program", "paris": "france", "cat": "mat"}
SCORE_FACTOR = 30.0  # factor of attention scores, with which a softmax is nearly one-hot


def tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of `model_folders`, which is saved to `folder`."""
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": MAX_POSITIONS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def model_with_known_heads(folder: Path) -> heedful.ModelBundle:
    """Return a model with one layer, whose heads follow HEAD_PATTERNS.

    Its embeddings are one-hot codes of token, position and segment, and a flag of delimiters.
    """
    words = tokenizer(folder)
    size = words.size
    width = size + MAX_POSITIONS + 3  # one-hot token, position and segment, and a delimiter flag
    embedding = EmbeddingConfig(vocabulary=size, width=width, positions=Learned(count=MAX_POSITIONS), types=2)
    stack = StackConfig(
        width=width,
        layers=1,
        heads=len(HEAD_PATTERNS),
        head_width=width,
        inner_width=4,
        attention_bias=False,
        score_scale=1.0,
    )
    loaded = create(BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), words)
    model = loaded.model
    assert model.encoder is not None
    ends = [words.id(token) for token in ("[CLS]", "[SEP]", ".")]
    with torch.no_grad():
        table = torch.zeros(size, width)
        table[:, :size] = torch.eye(size)
        table[ends, -1] = 1
        model.embedding.tokens.weight.copy_(table)
        places = torch.zeros(MAX_POSITIONS, width)
        places[:, size : size + MAX_POSITIONS] = torch.eye(MAX_POSITIONS)
        model.embedding.positions.weight.copy_(places)
        model.embedding.types.weight.copy_(torch.eye(width)[size + MAX_POSITIONS : size + MAX_POSITIONS + 2])
        q, k = (torch.zeros(len(HEAD_PATTERNS), width, width) for _ in range(2))
        k[:] = torch.eye(width)
        token, place = slice(0, size), slice(size, size + MAX_POSITIONS)
        segment = slice(size + MAX_POSITIONS, size + MAX_POSITIONS + 2)
        q[0, place, place] = torch.eye(MAX_POSITIONS).roll(1, 0)  # row i attends to row i + 1
        q[1, place, place] = torch.eye(MAX_POSITIONS).roll(-1, 0)
        for head, sign in ((2, 1.0), (3, -1.0)):
            q[head, token, token] = torch.eye(size)
            q[head, place, place] = -2 * torch.eye(MAX_POSITIONS)
            q[head, segment, segment] = 0.6 * sign * torch.eye(2)
            q[head, -1, -1] = -2.0
        for a, b in PREDICTS.items():
            for first, second in ((a, b), (b, a)):
                q[4, words.id(second), words.id(first)] = 1.0
        q[5, -1, token] = 1.0
        q[6, place, place] = torch.eye(MAX_POSITIONS)
        weight = model.encoder.blocks[0].attention.qkv.weight
        weight.zero_()
        inner = len(HEAD_PATTERNS) * width
        weight[:inner] = SCORE_FACTOR * q.flatten(0, 1)
        weight[inner : 2 * inner] = k.flatten(0, 1)
    return loaded.eval()


def sentence_pairs(count: int = 60, seed: int = 0) -> list[tuple[str, str]]:
    """Return pairs of sentences that share words; in half of them, the first has a key of PREDICTS and its value."""
    rng = random.Random(seed)
    plain = ["the", "dog", "sat", "on", "ran", "to", "is", "in", "of", "he", "she", "lives", "here", "wrote", "it"]
    pairs = []
    for number in range(count):
        shared = rng.sample(plain, 3)
        sides = []
        for _ in range(2):
            words = [*shared, *rng.sample(plain, 3)]
            rng.shuffle(words)
            sides.append([*words, rng.choice(shared)])
        if number % 2:
            a, b = rng.choice(list(PREDICTS.items()))
            sides[0].insert(1, a)
            sides[0].insert(4, b)
        first, second = (" ".join(words) + "." for words in sides)
        pairs.append((first, second))
    return pairs

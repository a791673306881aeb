"""A model with heads of which it is known what they do: queries and keys written by hand."""

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

PLACES = 40
KNOWN = ("next", "previous", "same", "other", "predictive", "delimiters", "itself", "broad")
PREDICTS = {"ada": "program", "paris": "france", "cat": "mat"}
SURE = 30.0  # what scores are multiplied with, so that a softmax is nearly one place


def tokenizer(folder: Path) -> Tokenizer:
    """That of the tiny folders."""
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": PLACES}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def known(folder: Path) -> heedful.ModelBundle:
    """One layer of eight heads, of `KNOWN`, over rows that spell out token, place, segment and delimiter."""
    words = tokenizer(folder)
    size = words.size
    width = size + PLACES + 3  # token, place, two segments, delimiter
    embedding = EmbeddingConfig(vocabulary=size, width=width, positions=Learned(count=PLACES), types=2)
    stack = StackConfig(
        width=width, layers=1, heads=len(KNOWN), head_width=width, inner_width=4, attention_bias=False, score_scale=1.0
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
        places = torch.zeros(PLACES, width)
        places[:, size : size + PLACES] = torch.eye(PLACES)
        model.embedding.positions.weight.copy_(places)
        model.embedding.types.weight.copy_(torch.eye(width)[size + PLACES : size + PLACES + 2])
        q, k = (torch.zeros(len(KNOWN), width, width) for _ in range(2))
        k[:] = torch.eye(width)
        token, place = slice(0, size), slice(size, size + PLACES)
        segment = slice(size + PLACES, size + PLACES + 2)
        q[0, place, place] = torch.eye(PLACES).roll(1, 0)  # row i looks for i + 1
        q[1, place, place] = torch.eye(PLACES).roll(-1, 0)
        for head, sign in ((2, 1.0), (3, -1.0)):
            q[head, token, token] = torch.eye(size)
            q[head, place, place] = -2 * torch.eye(PLACES)
            q[head, segment, segment] = 0.6 * sign * torch.eye(2)
            q[head, -1, -1] = -2.0
        for a, b in PREDICTS.items():
            for first, second in ((a, b), (b, a)):
                q[4, words.id(second), words.id(first)] = 1.0
        q[5, -1, token] = 1.0
        q[6, place, place] = torch.eye(PLACES)
        weight = model.encoder.blocks[0].attention.qkv.weight
        weight.zero_()
        inner = len(KNOWN) * width
        weight[:inner] = SURE * q.flatten(0, 1)
        weight[inner : 2 * inner] = k.flatten(0, 1)
    return loaded.eval()


def pairs(count: int = 60, seed: int = 0) -> list[tuple[str, str]]:
    """Two sentences that share words; some words bring another one with them, never beside it."""
    draws = random.Random(seed)
    plain = ["the", "dog", "sat", "on", "ran", "to", "is", "in", "of", "he", "she", "lives", "here", "wrote", "it"]
    items = []
    for number in range(count):
        shared = draws.sample(plain, 3)
        sides = []
        for _ in range(2):
            words = [*shared, *draws.sample(plain, 3)]
            draws.shuffle(words)
            sides.append([*words, draws.choice(shared)])
        if number % 2:
            a, b = draws.choice(list(PREDICTS.items()))
            sides[0].insert(1, a)
            sides[0].insert(4, b)
        first, second = (" ".join(words) + "." for words in sides)
        items.append((first, second))
    return items

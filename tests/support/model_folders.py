"""Tiny model folders with a head and a vocabulary, as transformers saves them."""

from __future__ import annotations

import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from heedful.tokenizer import Tokenizer
from tests.support.tiny_models import randomise

NAMES = [*"OX", "B-PER", "I-PER", "B-LOC", "I-LOC"]
HEADS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> class of transformers, values of its config
    "masked": ("BertForMaskedLM", {}),
    "next": ("BertForNextSentencePrediction", {}),
    "pretraining": ("BertForPreTraining", {}),
    "single": ("BertForSequenceClassification", {"id2label": {0: "bad", 1: "fair", 2: "good"}}),
    "multiple": (
        "BertForSequenceClassification",
        {"id2label": {0: "bad", 1: "fair", 2: "good"}, "problem_type": "multi_label_classification"},
    ),
    "regression": ("BertForSequenceClassification", {"id2label": {0: "stars"}}),
    "tag": ("BertForTokenClassification", {"id2label": dict(enumerate(NAMES))}),
    "span": ("BertForQuestionAnswering", {}),
    "choice": ("BertForMultipleChoice", {}),
    "bare": ("BertModel", {}),
}
WORDS = (
    "the a cat dog sat on mat ran to paris is in france of capital he she lives here wrote it program first who where "
    "##ed ##ing ada and love"
)
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *dict.fromkeys([*WORDS.split(), *string.ascii_lowercase, *string.digits, *".,?!'"]),
    *(f"##{letter}" for letter in string.ascii_lowercase + string.digits),
]
LIMIT = 48  # maximum tokens of a sequence
SPARE = 3  # embedding rows without a token


def make_model_dir(folder: Path, name: str) -> Path:
    """Save the model of HEADS with this name, and its tokenizer, to a folder; returns the folder."""
    architecture, settings = HEADS[name]
    if "id2label" in settings:
        settings = settings | {"label2id": {label: number for number, label in settings["id2label"].items()}}
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY) + SPARE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LIMIT,
        **settings,
    )
    torch.manual_seed(len(name))
    model = getattr(transformers, architecture)(config)
    randomise(model)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": LIMIT})
    )
    return folder


def make_decoder(folder: Path) -> Path:
    """Save a tiny decoder whose tokens are letters; returns the folder."""
    letters = tokenizers.Tokenizer(
        models.WordLevel(
            {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *"abcdefgh"])}, unk_token="<unk>"
        )
    )
    letters.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens(["<pad>", "</s>", "<unk>"])
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    randomise(model)
    model.save_pretrained(folder)
    Tokenizer(letters, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}).save(folder)
    return folder


@cache
def load_reference(folder: Path) -> tuple[Any, Any]:
    """Load a folder with transformers: the model in eval mode, and its tokenizer."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder).eval()
    return model, transformers.BertTokenizer.from_pretrained(folder)


@torch.no_grad()
def reference_logits(folder: Path, *texts: Any, **arguments: Any) -> Any:
    """Return the outputs of transformers for one text, pair or list of words."""
    model, tokenizer = load_reference(folder)
    batch = [[text] for text in texts]  # in lists, since an empty second text by itself would count as missing
    return model(**tokenizer(*batch, return_tensors="pt", **arguments))


def long_text(words: int = 2_000) -> str:
    """Return a text of this number of words, which have one to three tokens each."""
    cycle = ["ada", "lives", "in", "paris", "and", "zed", "wrote", "the", "first", "program", "of", "it"]
    return " ".join(cycle[number % len(cycle)] for number in range(words))

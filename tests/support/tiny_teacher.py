"""A random encoder of sentence-transformers' form with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.support.corpora import make_documents, train_on


def make_teacher(folder: Path, width: int) -> Path:
    """Save a BERT of one layer; its vectors are the means of its rows."""
    own = train_on(make_documents(30, seed=8), vocab_size=120)
    own.save(folder)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=own.size, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder

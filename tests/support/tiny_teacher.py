"""A random encoder with a tokenizer that is trained for it, as a teacher for distillation."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.support.corpora import make_documents, train_on


def make_teacher(folder: Path, width: int) -> Path:
    """Save a BERT of one layer and its tokenizer to a folder; returns the folder."""
    tokenizer = train_on(make_documents(30, seed=8), vocab_size=120)
    tokenizer.save(folder)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=tokenizer.size, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder

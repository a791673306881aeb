"""Builds the model of a configuration; `ModelBundle` calls it."""

from __future__ import annotations

from heedful.model.classic import ClassicModel
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import ModelConfig
from heedful.model.recurrent_seq2seq import RecurrentSeq2SeqModel
from heedful.model.stack import Transformer


def make_model(config: ModelConfig) -> Transformer:
    """Make a Transformer, or a classic model for a ClassicConfig, with uninitialised weights."""
    if not isinstance(config, ClassicConfig):
        return Transformer(config)
    return RecurrentSeq2SeqModel(config) if config.has_decoder else ClassicModel(config)

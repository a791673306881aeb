"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): no types, no pooler, no dropout after attention's projection."""

from __future__ import annotations

from typing import Any

from heedful.families.table import (
    JOIN,
    Family,
    HeadEntry,
    Keys,
    Table,
    activation_name,
    read_activation,
    read_classes,
    read_tokens,
    rows,
    write_labels,
)
from heedful.model.config import (
    Choice,
    Classes,
    EmbeddingConfig,
    Learned,
    MaskedTokens,
    ModelConfig,
    Normal,
    Span,
    StackConfig,
    TokenClasses,
)


def read(keys: Keys) -> ModelConfig:
    """Their config.json; the eps of the norms, 1e-12, is not in it."""
    width, heads = keys.integer("dim"), keys.integer("n_heads")
    keys.divides("n_heads", heads, "dim", width)
    dropout = keys.number("dropout", 0.1)
    vocabulary = keys.integer("vocab_size")
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            positions=Learned(count=keys.integer("max_position_embeddings")),
            padding=keys.integer("pad_token_id", None, least=0, most=vocabulary - 1),
            norm="layer",
            dropout=dropout,
        ),
        encoder=StackConfig(
            width=width,
            layers=keys.integer("n_layers", most=1024),
            heads=heads,
            head_width=width // heads,
            inner_width=keys.integer("hidden_dim"),
            activation=read_activation(keys, "activation"),
            dropout=dropout,
            attention_out_dropout=0.0,
            attention_dropout=keys.number("attention_dropout", 0.1),
        ),
        initialisation=Normal(std=keys.number("initializer_range", 0.02)),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """The same as their config.json."""
    embedding, encoder, positions = model.embedding, model.encoder, model.embedding.positions
    assert encoder is not None and isinstance(positions, Learned)
    return {
        "vocab_size": embedding.vocabulary,
        "dim": encoder.width,
        "n_layers": encoder.layers,
        "n_heads": encoder.heads,
        "hidden_dim": encoder.inner_width,
        "activation": activation_name(encoder.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "max_position_embeddings": positions.count,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": embedding.padding,
    }


def _masked(head: MaskedTokens) -> Table:
    named = rows(("vocab_transform", "head.dense"), ("vocab_layer_norm", "head.norm"), ("vocab_projector", "head.decoder"))
    tied = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
    return Table(rows=named, tied=tied if head.tied else {})


_LAYER, _BLOCK = "distilbert.transformer.layer.{}.", "encoder.blocks.{}."
_FIRST = rows(("pre_classifier", "head.first.dense"), ("classifier", "head.out"))

FAMILY = Family(
    prefix="distilbert.",
    read=read,
    write=write,
    irrelevant=frozenset({"sinusoidal_pos_embds", "tie_weights_", "qa_dropout", "seq_classif_dropout"}),
    body=Table(
        rows=rows(
            ("distilbert.embeddings.word_embeddings", "embedding.tokens"),
            ("distilbert.embeddings.position_embeddings", "embedding.positions"),
            ("distilbert.embeddings.LayerNorm", "embedding.norm"),
            (tuple(f"{_LAYER}attention.{x}_lin" for x in "qkv"), f"{_BLOCK}attention.qkv", JOIN),
            (f"{_LAYER}attention.out_lin", f"{_BLOCK}attention.out"),
            (f"{_LAYER}sa_layer_norm", f"{_BLOCK}attention_norm"),
            (f"{_LAYER}ffn.lin1", f"{_BLOCK}mlp.up"),
            (f"{_LAYER}ffn.lin2", f"{_BLOCK}mlp.down"),
            (f"{_LAYER}output_layer_norm", f"{_BLOCK}mlp_norm"),
        ),
        ignored=frozenset({"distilbert.embeddings.position_ids"}),
    ),
    heads={
        "DistilBertModel": HeadEntry(head=type(None), read=lambda keys, model: None),
        "DistilBertForMaskedLM": HeadEntry(
            head=MaskedTokens,
            read=lambda keys, model: MaskedTokens(
                activation=read_activation(keys, "activation"), tied=keys.flag("tie_word_embeddings", True)
            ),
            write=lambda head: {"tie_word_embeddings": head.tied},
            table=_masked,
        ),
        "DistilBertForSequenceClassification": HeadEntry(
            head=Classes,
            read=lambda keys, model: read_classes(
                keys, dropout=keys.number("seq_classif_dropout", 0.2), activation="relu"
            ),
            write=lambda head: write_labels(head) | {"seq_classif_dropout": head.dropout},
            table=lambda head: Table(rows=_FIRST),
        ),
        "DistilBertForTokenClassification": HeadEntry(
            head=TokenClasses,
            read=lambda keys, model: read_tokens(keys, dropout=model.embedding.dropout),
            write=write_labels,
            table=lambda head: Table(rows=rows(("classifier", "head.out"))),
        ),
        "DistilBertForMultipleChoice": HeadEntry(
            head=Choice,
            read=lambda keys, model: Choice(activation="relu", dropout=keys.number("seq_classif_dropout", 0.2)),
            write=lambda head: {"seq_classif_dropout": head.dropout},
            table=lambda head: Table(rows=_FIRST),
        ),
        "DistilBertForQuestionAnswering": HeadEntry(
            head=Span,
            read=lambda keys, model: Span(dropout=keys.number("qa_dropout", 0.1)),
            write=lambda head: {"qa_dropout": head.dropout},
            table=lambda head: Table(rows=rows(("qa_outputs", "head.out"))),
        ),
    },
    sizes={
        name: {
            "vocab_size": vocabulary,
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "activation": "gelu",
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        }
        for name, vocabulary in (("distilbert-base-uncased", 30_522), ("distilbert-base-cased", 28_996))
    },
)

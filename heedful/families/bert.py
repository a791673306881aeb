"""BERT (Devlin et al. 2019, arXiv:1810.04805), as google-research/bert and Hugging Face publish it."""

from __future__ import annotations

from typing import Any

from heedful.families.table import (
    IRRELEVANT,
    JOIN,
    Family,
    HeadEntry,
    Keys,
    Row,
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
    NextSentence,
    Normal,
    Pooled,
    Pretraining,
    Span,
    StackConfig,
    TokenClasses,
)

PICKED_BY_TASK = frozenset({"classifier_dropout"})
IRRELEVANT_HERE = (
    IRRELEVANT
    | PICKED_BY_TASK
    | {"pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"}
)


def read(keys: Keys, *, offset: int = 0) -> ModelConfig:
    """Their config.json; RoBERTa's positions start later, by `offset`."""
    keys.only("position_embedding_type", "absolute", why="relative positions are not built yet")
    width, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    keys.divides("num_attention_heads", heads, "hidden_size", width)
    dropout = keys.number("hidden_dropout_prob", 0.1)
    eps = keys.number("layer_norm_eps", 1e-12)
    vocabulary = keys.integer("vocab_size")
    padding = keys.integer("pad_token_id", None, least=0, most=vocabulary - 1)
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            positions=Learned(
                count=keys.integer("max_position_embeddings"), offset=offset, padding=padding if offset else None
            ),
            types=keys.integer("type_vocab_size"),
            padding=padding,
            norm="layer",
            norm_eps=eps,
            dropout=dropout,
        ),
        encoder=StackConfig(
            width=width,
            layers=keys.integer("num_hidden_layers", most=1024),
            heads=heads,
            head_width=width // heads,
            inner_width=keys.integer("intermediate_size"),
            activation=read_activation(keys, "hidden_act"),
            norm_eps=eps,
            dropout=dropout,
            attention_dropout=keys.number("attention_probs_dropout_prob", 0.1),
        ),
        initialisation=Normal(std=keys.number("initializer_range", 0.02)),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    """The same as their config.json."""
    embedding, encoder, positions = model.embedding, model.encoder, model.embedding.positions
    assert encoder is not None and isinstance(positions, Learned)
    return {
        "vocab_size": embedding.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.inner_width,
        "hidden_act": activation_name(encoder.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "max_position_embeddings": positions.count,
        "type_vocab_size": embedding.types,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "layer_norm_eps": encoder.norm_eps,
        "pad_token_id": embedding.padding,
    }


def body(prefix: str) -> Table:
    """Names of embedding and encoder."""
    layer, block = f"{prefix}encoder.layer.{{}}.", "encoder.blocks.{}."
    return Table(
        rows=rows(
            (f"{prefix}embeddings.word_embeddings", "embedding.tokens"),
            (f"{prefix}embeddings.position_embeddings", "embedding.positions"),
            (f"{prefix}embeddings.token_type_embeddings", "embedding.types"),
            (f"{prefix}embeddings.LayerNorm", "embedding.norm"),
            (tuple(f"{layer}attention.self.{x}" for x in ("query", "key", "value")), f"{block}attention.qkv", JOIN),
            (f"{layer}attention.output.dense", f"{block}attention.out"),
            (f"{layer}attention.output.LayerNorm", f"{block}attention_norm"),
            (f"{layer}intermediate.dense", f"{block}mlp.up"),
            (f"{layer}output.dense", f"{block}mlp.down"),
            (f"{layer}output.LayerNorm", f"{block}mlp_norm"),
        ),
        ignored=frozenset({f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids"}),
    )


def masked_table(head: MaskedTokens | Pretraining, *, lm: str, dense: str, norm: str, tokens: str, ours: str) -> Table:
    """Names of a vocabulary head whose decoder is tied to the embedding, or not.

    Its bias has two names; untied, only the decoder's own is read.
    """
    named = rows((lm + dense, f"{ours}.dense"), (lm + norm, f"{ours}.norm"))
    weight, bias = f"{lm}decoder.weight", f"{lm}decoder.bias"
    if head.tied:
        bias_row = Row((f"{lm}bias",), f"{ours}.decoder.bias")
        return Table(rows=(*named, bias_row), tied={weight: f"{tokens}.weight", bias: f"{lm}bias"})
    return Table(rows=(*named, Row((f"{lm}decoder",), f"{ours}.decoder")), copied={f"{lm}bias": bias})


POOLER = ("bert.pooler.dense", "head.first.dense")
NEXT = (("bert.pooler.dense", "head.next.first.dense"), ("cls.seq_relationship", "head.next.out"))


def _masked(head: MaskedTokens | Pretraining, ours: str) -> Table:
    return masked_table(
        head,
        lm="cls.predictions.",
        dense="transform.dense",
        norm="transform.LayerNorm",
        tokens="bert.embeddings.word_embeddings",
        ours=ours,
    )


def _pretraining(head: Pretraining) -> Table:
    masked = _masked(head, "head.masked")
    return Table(rows=masked.rows + rows(*NEXT), tied=masked.tied, copied=masked.copied)


def read_tied(keys: Keys) -> bool:
    """Whether the vocabulary head shares the embedding's weights."""
    tied: bool = keys.flag("tie_word_embeddings", True)
    return tied


def write_tied(head: MaskedTokens | Pretraining) -> dict[str, Any]:
    """The same as their config.json."""
    return {"tie_word_embeddings": head.tied}


def _dropout(keys: Keys, model: ModelConfig) -> float:
    given: float | None = keys.number("classifier_dropout", None)
    return model.embedding.dropout if given is None else given


def _write_classifier(head: Classes | TokenClasses) -> dict[str, Any]:
    return write_labels(head) | {"classifier_dropout": head.dropout}


_OUT = rows(("classifier", "head.out"))

def size(vocabulary: int, layers: int, width: int, heads: int | None = None, inner: int | None = None) -> dict[str, Any]:
    """A published configuration; heads are 64 wide and the MLP four times as wide as the model unless given."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads or width // 64,
        "intermediate_size": inner or 4 * width,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }


SIZES = {
    "bert-tiny": size(30_522, 2, 128),
    "bert-mini": size(30_522, 4, 256),
    "bert-small": size(30_522, 4, 512),
    "bert-medium": size(30_522, 8, 512),
    "bert-base-uncased": size(30_522, 12, 768),
    "bert-base-cased": size(28_996, 12, 768),
    "bert-base-multilingual-cased": size(119_547, 12, 768),
    "bert-large-uncased": size(30_522, 24, 1024),
    "bert-large-cased": size(28_996, 24, 1024),
    "minilm-l6-h384-uncased": size(30_522, 6, 384, heads=12),
    "minilm-l12-h384-uncased": size(30_522, 12, 384, heads=12),
    "tinybert-4l-312d": size(30_522, 4, 312, heads=12, inner=1200),
}

FAMILY = Family(
    prefix="bert.",
    read=read,
    write=write,
    body=body("bert."),
    irrelevant=IRRELEVANT_HERE,
    sizes=SIZES,
    heads={
        "BertModel": HeadEntry(
            head=Pooled, read=lambda keys, model: Pooled(), table=lambda head: Table(rows=rows(POOLER))
        ),
        "BertForPreTraining": HeadEntry(
            head=Pretraining,
            read=lambda keys, model: Pretraining(
                activation=read_activation(keys, "hidden_act"),
                norm_eps=model.embedding.norm_eps,
                tied=read_tied(keys),
            ),
            write=write_tied,
            table=_pretraining,
        ),
        "BertForMaskedLM": HeadEntry(
            head=MaskedTokens,
            read=lambda keys, model: MaskedTokens(
                activation=read_activation(keys, "hidden_act"),
                norm_eps=model.embedding.norm_eps,
                tied=read_tied(keys),
            ),
            write=write_tied,
            table=lambda head: _masked(head, "head"),
        ),
        "BertForNextSentencePrediction": HeadEntry(
            head=NextSentence,
            read=lambda keys, model: NextSentence(),
            table=lambda head: Table(rows=rows(POOLER, ("cls.seq_relationship", "head.out"))),
        ),
        "BertForSequenceClassification": HeadEntry(
            head=Classes,
            read=lambda keys, model: read_classes(keys, dropout=_dropout(keys, model)),
            write=_write_classifier,
            table=lambda head: Table(rows=rows(POOLER) + _OUT),
        ),
        "BertForTokenClassification": HeadEntry(
            head=TokenClasses,
            read=lambda keys, model: read_tokens(keys, dropout=_dropout(keys, model)),
            write=_write_classifier,
            table=lambda head: Table(rows=_OUT),
        ),
        "BertForMultipleChoice": HeadEntry(
            head=Choice,
            read=lambda keys, model: Choice(dropout=_dropout(keys, model)),
            write=lambda head: {"classifier_dropout": head.dropout},
            table=lambda head: Table(rows=rows(POOLER) + _OUT),
        ),
        "BertForQuestionAnswering": HeadEntry(
            head=Span,
            read=lambda keys, model: Span(),
            table=lambda head: Table(rows=rows(("qa_outputs", "head.out"))),
        ),
    },
)

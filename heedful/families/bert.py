"""BERT (Devlin et al. 2019, arXiv:1810.04805), as google-research/bert and Hugging Face publish it."""

from __future__ import annotations

from collections.abc import Mapping

from heedful.families import head_maps, tokenizer_defaults
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family
from heedful.families.names import CONCAT, REVERSE, NameTable, name_rows
from heedful.model.config import (
    EmbeddingConfig,
    Learned,
    MaskedTokens,
    ModelConfig,
    Normal,
    Pretraining,
    Shaw,
    StackConfig,
)

NAMES = {  # our name -> key of config.json
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "inner_width": "intermediate_size",
    "activation": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "eps": "layer_norm_eps",
    "std": "initializer_range",
    "padding": "pad_token_id",
}
ABSOLUTE = {"absolute": "absolute"}
POSITIONS = {**ABSOLUTE, "relative_key": "relative_key"}  # relative_key_query is not supported
IGNORED_KEYS = frozenset(
    {
        "classifier_dropout",  # unused without a classifier
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    }
)


def read(
    reader: ConfigReader,
    names: Mapping[str, str] = NAMES,
    *,
    offset: int = 0,
    default_dropout: float = 0.1,
    attention_out_dropout: float | None = None,
    relative: bool = True,
) -> ModelConfig:
    """Read config.json.

    Relative positions replace absolute ones: transformers 4 saves the table of absolute positions, but does not use it.

    Args:
        names: A mapping from our names, as in NAMES, to the family's keys, without those that the family lacks.
        offset: Rows of the position table before position 0.
        default_dropout: Dropout if config.json has none.
        attention_out_dropout: Dropout after the projection of attention. If None, that of config.json.
        relative: Whether position_embedding_type may be "relative_key".
    """
    kind = reader.choice("position_embedding_type", POSITIONS if relative else ABSOLUTE, "absolute")
    shaw = Shaw(reach=reader.integer(names["positions"]) - 1, values=False) if kind == "relative_key" else None
    width, heads = reader.integer(names["width"]), reader.integer(names["heads"])
    reader.divides(names["heads"], heads, names["width"], width)
    vocabulary = reader.integer(names["vocabulary"])
    dropout = reader.number(names["dropout"], default_dropout)
    padding = reader.integer(names["padding"], None, minimum=0, maximum=vocabulary - 1)
    eps = reader.number(names["eps"], 1e-12) if "eps" in names else 1e-12
    positions = reader.integer(names["positions"])
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            positions=None if shaw else Learned(count=positions, offset=offset, padding=padding if offset else None),
            types=reader.integer(names["types"]) if "types" in names else 0,
            padding=padding,
            norm="layer",
            norm_eps=eps,
            dropout=dropout,
        ),
        encoder=StackConfig(
            width=width,
            layers=reader.integer(names["layers"], maximum=1024),
            heads=heads,
            head_width=width // heads,
            inner_width=reader.integer(names["inner_width"]),
            activation=read_activation(reader, names["activation"]),
            norm_eps=eps,
            dropout=dropout,
            attention_out_dropout=attention_out_dropout,
            attention_dropout=reader.number(names["attention_dropout"], default_dropout),
            relation=shaw,
        ),
        initialisation=Normal(std=reader.number(names["std"], 0.02)),
    )


def write(model: ModelConfig, names: Mapping[str, str] = NAMES) -> dict[str, object]:
    """Write the values of config.json."""
    embedding, encoder, positions = model.embedding, model.encoder, model.embedding.positions
    assert encoder is not None
    count = encoder.relation.reach + 1 if isinstance(encoder.relation, Shaw) else 0
    if not count:
        assert isinstance(positions, Learned)
        count = positions.count
    values = {
        "vocabulary": embedding.vocabulary,
        "width": encoder.width,
        "layers": encoder.layers,
        "heads": encoder.heads,
        "inner_width": encoder.inner_width,
        "activation": activation_name(encoder.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "positions": count,
        "types": embedding.types,
        "eps": encoder.norm_eps,
        "std": getattr(model.initialisation, "std", 0.02),
        "padding": embedding.padding,
    }
    kind = {"position_embedding_type": "relative_key"} if isinstance(encoder.relation, Shaw) else {}
    return {key: values[name] for name, key in names.items()} | kind


def body(model: ModelConfig, prefix: str) -> NameTable:
    """Return the names of embedding and encoder."""
    encoder = model.encoder
    relative = isinstance(encoder and encoder.relation, Shaw)
    layer, block = f"{prefix}encoder.layer.{{}}.", "encoder.blocks.{}."
    return NameTable(
        rows=name_rows(
            (f"{prefix}embeddings.word_embeddings", "embedding.tokens"),
            (f"{prefix}embeddings.position_embeddings", "embedding.positions"),
            (f"{prefix}embeddings.token_type_embeddings", "embedding.types"),
            (f"{prefix}embeddings.LayerNorm", "embedding.norm"),
            (tuple(f"{layer}attention.self.{x}" for x in ("query", "key", "value")), f"{block}attention.qkv", CONCAT),
            (f"{layer}attention.output.dense", f"{block}attention.out"),
            (f"{layer}attention.output.LayerNorm", f"{block}attention_norm"),
            (f"{layer}intermediate.dense", f"{block}mlp.up"),
            (f"{layer}output.dense", f"{block}mlp.down"),
            (f"{layer}output.LayerNorm", f"{block}mlp_norm"),
            *(
                [(f"{layer}attention.self.distance_embedding", "encoder.relations.{}.keys", REVERSE)]
                if relative
                else []
            ),
        ),
        ignored=frozenset(
            f"{prefix}embeddings.{name}"
            for name in ("position_ids", "token_type_ids", *(["position_embeddings"] if relative else []))
        ),
    )


def _masked_table(head: MaskedTokens | Pretraining, module: str = "head") -> NameTable:
    """Return the names of the masked-language-modelling head."""
    return head_maps.masked_table(
        head,
        lm="cls.predictions.",
        dense="transform.dense",
        norm="transform.LayerNorm",
        tokens="bert.embeddings.word_embeddings",
        module=module,
    )


def _pretraining_table(head: Pretraining) -> NameTable:
    """Return the names of the heads for masked language modelling and next-sentence prediction."""
    masked = _masked_table(head, "head.masked")
    next_sentence = name_rows(("bert.pooler.dense", "head.next.first.dense"), ("cls.seq_relationship", "head.next.out"))
    return NameTable(rows=masked.rows + next_sentence, tied=masked.tied, copied=masked.copied)


def size(
    vocabulary: int, layers: int, width: int, heads: int | None = None, inner: int | None = None
) -> dict[str, object]:
    """Return a published configuration. By default, heads have 64 dimensions, and the MLP's inner layer 4 * width."""
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


_POOLER, _OUT = ("bert.pooler.dense", "head.first.dense"), ("classifier", "head.out")

FAMILY = Family(
    prefix="bert.",
    read=read,
    write=write,
    body=lambda model: body(model, "bert."),
    ignored_keys=IGNORED_KEYS,
    tokenizer_defaults=tokenizer_defaults.XLM_ROBERTA,  # for multilingual models with BERT's body
    heads={
        "BertModel": head_maps.pooled(_POOLER),
        "BertForPreTraining": head_maps.masked(_pretraining_table, "hidden_act", Pretraining),
        "BertForMaskedLM": head_maps.masked(_masked_table, "hidden_act"),
        "BertForNextSentencePrediction": head_maps.next_sentence(_POOLER, ("cls.seq_relationship", "head.out")),
        "BertForSequenceClassification": head_maps.classes(_POOLER, _OUT),
        "BertForTokenClassification": head_maps.token_classes(_OUT),
        "BertForMultipleChoice": head_maps.choice(_POOLER, _OUT),
        "BertForQuestionAnswering": head_maps.span(),
    },
    sizes={
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
        "multilingual-minilm-l12-h384": size(250_037, 12, 384, heads=12),
        "tinybert-4l-312d": size(30_522, 4, 312, heads=12, inner=1200),
    },
)

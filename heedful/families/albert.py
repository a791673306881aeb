"""ALBERT (Lan et al. 2020, arXiv:1909.11942): BERT with one block that all layers share, and narrow embeddings.

It is pre-trained on masked language modelling and sentence order prediction.
"""

from __future__ import annotations

from dataclasses import replace

from heedful.families import bert, head_maps
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import CONCAT, NameTable, name_rows
from heedful.model.config import MaskedTokens, ModelConfig, Pretraining

MEMORY = "the published models were trained without memory blocks and gaps"


def read(reader: ConfigReader) -> ModelConfig:
    """Read BERT's config with shared blocks, projected embeddings and no dropout after the MLP."""
    reader.only("inner_group_num", 1, why="several blocks in a group are not supported")
    for name, value in (("net_structure_type", 0), ("gap_size", 0), ("num_memory_blocks", 0), ("down_scale_factor", 1)):
        reader.only(name, value, why=MEMORY)
    model = bert.read(
        reader, default_dropout=0.0, relative=False, attention_out_dropout=reader.number("hidden_dropout_prob", 0.0)
    )
    assert model.encoder is not None
    blocks = reader.integer("num_hidden_groups", 1, maximum=model.encoder.layers)
    return replace(
        model,
        embedding=replace(model.embedding, width=reader.integer("embedding_size", 128), always_project=True),
        encoder=replace(model.encoder, blocks=blocks, dropout=0.0),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    assert model.encoder is not None
    return bert.write(model) | {
        "embedding_size": model.embedding.width,
        "num_hidden_groups": model.encoder.blocks,
        "hidden_dropout_prob": model.embedding.dropout,
    }


def _masked_table(head: MaskedTokens | Pretraining, module: str = "head") -> NameTable:
    """Return the names of the masked-language-modelling head."""
    tokens = "albert.embeddings.word_embeddings"
    return head_maps.masked_table(
        head, lm="predictions.", dense="dense", norm="LayerNorm", tokens=tokens, module=module
    )


def _pretraining_table(head: Pretraining) -> NameTable:
    """Return the names of the heads for masked language modelling and sentence order prediction."""
    order = name_rows(("albert.pooler", "head.next.first.dense"), ("sop_classifier.classifier", "head.next.out"))
    return _masked_table(head, "head.masked").merged_with(NameTable(rows=order))


def size(layers: int, width: int, heads: int) -> dict[str, object]:
    """Return a published configuration, version 2."""
    return bert.size(30_000, layers, width, heads) | {
        "embedding_size": 128,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


_LAYER, _OUR_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0.", "encoder.blocks.{}."
_POOLER, _OUT = ("albert.pooler", "head.first.dense"), ("classifier", "head.out")
_KEY = ("classifier_dropout_prob", 0.1)
_DROPOUT: head_maps.Arguments = {"key": _KEY[0], "default": _KEY[1]}

FAMILY = Family(
    prefix="albert.",
    read=read,
    write=write,
    ignored_keys=bert.IGNORED_KEYS | {"classifier_dropout_prob"},
    body=lambda model: NameTable(
        rows=name_rows(
            ("albert.embeddings.word_embeddings", "embedding.tokens"),
            ("albert.embeddings.position_embeddings", "embedding.positions"),
            ("albert.embeddings.token_type_embeddings", "embedding.types"),
            ("albert.embeddings.LayerNorm", "embedding.norm"),
            ("albert.encoder.embedding_hidden_mapping_in", "embedding.project"),
            (tuple(f"{_LAYER}attention.{x}" for x in ("query", "key", "value")), f"{_OUR_LAYER}attention.qkv", CONCAT),
            (f"{_LAYER}attention.dense", f"{_OUR_LAYER}attention.out"),
            (f"{_LAYER}attention.LayerNorm", f"{_OUR_LAYER}attention_norm"),
            (f"{_LAYER}ffn", f"{_OUR_LAYER}mlp.up"),
            (f"{_LAYER}ffn_output", f"{_OUR_LAYER}mlp.down"),
            (f"{_LAYER}full_layer_layer_norm", f"{_OUR_LAYER}mlp_norm"),
        ),
        ignored=frozenset({"albert.embeddings.position_ids", "albert.embeddings.token_type_ids"}),
    ),
    heads={
        "AlbertModel": head_maps.pooled(_POOLER),
        "AlbertForPreTraining": head_maps.with_settings(
            head_maps.masked(
                _pretraining_table, "hidden_act", Pretraining, lambda reader: {"dropout": reader.number(*_KEY)}
            ),
            lambda head: {_KEY[0]: head.dropout},
        ),
        "AlbertForMaskedLM": head_maps.masked(_masked_table, "hidden_act"),
        "AlbertForSequenceClassification": head_maps.classes(_POOLER, _OUT, **_DROPOUT),
        "AlbertForTokenClassification": head_maps.token_classes(_OUT, **_DROPOUT),
        "AlbertForMultipleChoice": head_maps.choice(_POOLER, _OUT, **_DROPOUT),
        "AlbertForQuestionAnswering": head_maps.span(),
    },
    tokenizer_defaults={
        "single": "[CLS]:0 $A:0 [SEP]:0",
        "pair": "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        "special": {"pad_token": "<pad>", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
        "do_lower_case": True,
        "keep_accents": False,
        "quotes": True,
    },
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep"},
    sizes={
        "albert-base-v2": size(12, 768, 12),
        "albert-large-v2": size(24, 1024, 16),
        "albert-xlarge-v2": size(24, 2048, 16),
        "albert-xxlarge-v2": size(12, 4096, 64),
    },
)

"""DistilBERT (Sanh et al. 2019, arXiv:1910.01108): BERT without token types, pooler and dropout after attention."""

from __future__ import annotations

from functools import partial

from heedful.families import bert, head_maps
from heedful.families.family import Family
from heedful.families.names import CONCAT, NameTable, name_rows
from heedful.model.config import MaskedTokens

NAMES = {  # our name -> key of config.json, which lacks the eps of the norms, 1e-12
    "vocabulary": "vocab_size",
    "width": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "inner_width": "hidden_dim",
    "activation": "activation",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "positions": "max_position_embeddings",
    "std": "initializer_range",
    "padding": "pad_token_id",
}


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the masked-language-modelling head."""
    named = name_rows(
        ("vocab_transform", "head.dense"), ("vocab_layer_norm", "head.norm"), ("vocab_projector", "head.decoder")
    )
    tied = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
    return NameTable(rows=named, tied=tied if head.tied else {})


def size(vocabulary: int) -> dict[str, object]:
    """Return a published configuration."""
    shape = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu"}
    return shape | {"vocab_size": vocabulary, "max_position_embeddings": 512, "pad_token_id": 0}


_LAYER, _OUR_LAYER = "distilbert.transformer.layer.{}.", "encoder.blocks.{}."
_FIRST = (("pre_classifier", "head.first.dense"), ("classifier", "head.out"))

FAMILY = Family(
    prefix="distilbert.",
    read=partial(bert.read, names=NAMES, attention_out_dropout=0.0, relative=False),
    write=partial(bert.write, names=NAMES),
    ignored_keys=frozenset({"sinusoidal_pos_embds", "tie_weights_", "qa_dropout", "seq_classif_dropout"}),
    body=lambda model: NameTable(
        rows=name_rows(
            ("distilbert.embeddings.word_embeddings", "embedding.tokens"),
            ("distilbert.embeddings.position_embeddings", "embedding.positions"),
            ("distilbert.embeddings.LayerNorm", "embedding.norm"),
            (tuple(f"{_LAYER}attention.{x}_lin" for x in "qkv"), f"{_OUR_LAYER}attention.qkv", CONCAT),
            (f"{_LAYER}attention.out_lin", f"{_OUR_LAYER}attention.out"),
            (f"{_LAYER}sa_layer_norm", f"{_OUR_LAYER}attention_norm"),
            (f"{_LAYER}ffn.lin1", f"{_OUR_LAYER}mlp.up"),
            (f"{_LAYER}ffn.lin2", f"{_OUR_LAYER}mlp.down"),
            (f"{_LAYER}output_layer_norm", f"{_OUR_LAYER}mlp_norm"),
        ),
        ignored=frozenset({"distilbert.embeddings.position_ids"}),
    ),
    heads={
        "DistilBertModel": head_maps.bare(),
        "DistilBertForMaskedLM": head_maps.masked(_masked_table, "activation"),
        "DistilBertForSequenceClassification": head_maps.classes(
            *_FIRST, key="seq_classif_dropout", default=0.2, read_settings=lambda reader: {"activation": "relu"}
        ),
        "DistilBertForTokenClassification": head_maps.token_classes(("classifier", "head.out"), key=None),
        "DistilBertForMultipleChoice": head_maps.choice(
            *_FIRST, key="seq_classif_dropout", default=0.2, read_settings=lambda reader: {"activation": "relu"}
        ),
        "DistilBertForQuestionAnswering": head_maps.span(key="qa_dropout", default=0.1),
    },
    sizes={"distilbert-base-uncased": size(30_522), "distilbert-base-cased": size(28_996)},
)

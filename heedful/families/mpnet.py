"""MPNet (Song et al. 2020, arXiv:2004.09297): BERT's blocks with learned positions and a bias for each distance.

As in RoBERTa, positions start at 2, so a table of 514 rows is for 512 tokens. All layers share the biases, which are
added to scaled scores. There are no token types.
"""

from __future__ import annotations

from dataclasses import replace

from heedful.families import bert, head_maps
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import CONCAT, NameTable, name_rows
from heedful.model.config import Buckets, MaskedTokens, ModelConfig

NAMES = {name: key for name, key in bert.NAMES.items() if name != "types"}
RELATION = Buckets(count=32, reach=128)
_FIXED = "transformers computes the same whatever this key says"


def read(reader: ConfigReader) -> ModelConfig:
    """Read BERT's keys; raises ModelError for a value that differs from one that transformers fixes."""
    reader.number("layer_norm_eps")  # required, since the default of transformers is not the published value
    reader.only("relative_attention_num_buckets", RELATION.count, why=_FIXED)
    reader.integer("pad_token_id", minimum=1, maximum=1)
    model = bert.read(reader, NAMES, offset=2, relative=False)
    assert model.encoder is not None
    return replace(model, encoder=replace(model.encoder, relation=RELATION))


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    return bert.write(model, NAMES) | {"relative_attention_num_buckets": RELATION.count}


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the masked-language-modelling head."""
    tokens = "mpnet.embeddings.word_embeddings"
    return head_maps.masked_table(head, lm="lm_head.", dense="dense", norm="layer_norm", tokens=tokens, module="head")


def _dropout_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Return the dropout of the model for the classifier, before and after its dense layer."""
    dropout = reader.number("hidden_dropout_prob", 0.1)
    return {"dropout": dropout, "dropout_first": dropout}


def size(vocabulary: int, layers: int, width: int) -> dict[str, object]:
    """Return a published configuration."""
    values = bert.size(vocabulary, layers, width)
    del values["type_vocab_size"]
    return values | {"max_position_embeddings": 514, "layer_norm_eps": 1e-5, "pad_token_id": 1}


_LAYER, _OUR_LAYER = "mpnet.encoder.layer.{}.", "encoder.blocks.{}."
_POOLER, _OUT = ("mpnet.pooler.dense", "head.first.dense"), ("classifier", "head.out")
_CLASSES = (("classifier.dense", "head.first.dense"), ("classifier.out_proj", "head.out"))

FAMILY = Family(
    prefix="mpnet.",
    read=read,
    write=write,
    body=lambda model: NameTable(
        rows=name_rows(
            ("mpnet.embeddings.word_embeddings", "embedding.tokens"),
            ("mpnet.embeddings.position_embeddings", "embedding.positions"),
            ("mpnet.embeddings.LayerNorm", "embedding.norm"),
            ("mpnet.encoder.relative_attention_bias", "encoder.relations.0.table"),
            (tuple(f"{_LAYER}attention.attn.{x}" for x in "qkv"), f"{_OUR_LAYER}attention.qkv", CONCAT),
            (f"{_LAYER}attention.attn.o", f"{_OUR_LAYER}attention.out"),
            (f"{_LAYER}attention.LayerNorm", f"{_OUR_LAYER}attention_norm"),
            (f"{_LAYER}intermediate.dense", f"{_OUR_LAYER}mlp.up"),
            (f"{_LAYER}output.dense", f"{_OUR_LAYER}mlp.down"),
            (f"{_LAYER}output.LayerNorm", f"{_OUR_LAYER}mlp_norm"),
        ),
        ignored=frozenset({"mpnet.embeddings.position_ids"}),
    ),
    ignored_keys=bert.IGNORED_KEYS,
    tokenizer_defaults={
        "model": "wordpiece",
        "single": "<s>:0 $A:0 </s>:0",
        "pair": "<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0",
        "special": {
            **{"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"},
            "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True},
        },
    },
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep"},
    heads={
        "MPNetModel": head_maps.pooled(_POOLER),
        "MPNetForMaskedLM": head_maps.masked(_masked_table, None),
        "MPNetForSequenceClassification": head_maps.classes(*_CLASSES, key=None, read_settings=_dropout_settings),
        "MPNetForTokenClassification": head_maps.token_classes(_OUT, key=None),
        "MPNetForMultipleChoice": head_maps.choice(_POOLER, _OUT, key=None),
        "MPNetForQuestionAnswering": head_maps.span(),
    },
    sizes={"mpnet-base": size(30_527, 12, 768)},
)

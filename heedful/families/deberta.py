"""DeBERTa-v2 and v3, and mDeBERTa (He et al. 2021, arXiv:2006.03654; 2023, arXiv:2111.09543).

They have BERT's blocks with disentangled attention and, in v3, no learned positions. The masked-language-modelling head
is `lm_predictions` of the published files; transformers initialises another head instead, unless `legacy` is false.
"""

from __future__ import annotations

from dataclasses import replace

from heedful.errors import ModelError
from heedful.families import bert, head_maps
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family
from heedful.families.names import CONCAT, NameTable, name_rows
from heedful.model.config import Choice, Classes, Disentangled, Learned, MaskedTokens, ModelConfig

NAMES = {name: key for name, key in bert.NAMES.items() if name != "types"}
BOTH = ("c2p", "p2c")  # values of pos_att_type: content with distance, distance with content


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json; raises ModelError for attention that the published base and large models do not have."""
    width, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    _check_attention(reader)
    reader.only("conv_kernel_size", 0, None, why="the convolution after the first layer is not supported")
    reader.only("z_steps", 0, 1, None, why="a last layer that is computed again is not supported")
    reader.only("embedding_size", width, None, why="narrow embeddings are not supported")
    reader.only("attention_head_size", width // heads, None, why="heads of another width are not supported")
    reader.only("pooler_hidden_size", width, None, why="a pooler of another width is not supported")
    eps = reader.number("layer_norm_eps", 1e-7)
    model = bert.read(reader, NAMES, relative=False)
    positions = model.embedding.positions
    assert model.encoder is not None and isinstance(positions, Learned)
    reach = reader.integer("max_relative_positions", -1, minimum=-1)
    norm = reader.choice("norm_rel_ebd", {"none": "none", "layer_norm": "layer_norm"}, "none")
    relation = Disentangled(
        buckets=reader.integer("position_buckets", minimum=4),
        reach=positions.count if reach < 1 else reach,
        norm=norm == "layer_norm",
    )
    scale = (3 * model.encoder.head_width) ** -0.5  # since scores are sums of three products
    embedding = replace(
        model.embedding,
        positions=positions if reader.flag("position_biased_input", True) else None,
        types=reader.integer("type_vocab_size", 0, minimum=0),
        norm_eps=eps,
    )
    encoder = replace(model.encoder, relation=relation, score_scale=scale, norm_eps=eps)
    return replace(model, embedding=embedding, encoder=encoder)


def _check_attention(reader: ConfigReader) -> None:
    """Raise ModelError unless attention is disentangled, both ways, by the query and key matrices of each layer."""
    value = reader.values.get("pos_att_type")
    kinds = [kind.strip() for kind in value.lower().split("|")] if isinstance(value, str) else value
    has_both = isinstance(kinds, list) and len(kinds) == 2 and all(kind in kinds for kind in BOTH)
    reader.only("pos_att_type", value, why="")  # marks the key as read
    flags = {name: reader.flag(name, False) for name in ("relative_attention", "share_att_key")}
    if not has_both or not all(flags.values()):
        raise ModelError(
            f"{reader.source}: relative_attention is {flags['relative_attention']}, share_att_key "
            f"{flags['share_att_key']} and pos_att_type {str(value)[:80]!r}; only true, true and "
            '"p2c|c2p" can be loaded: other attention of this kind is not supported'
        )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    embedding, encoder, positions = model.embedding, model.encoder, model.embedding.positions
    assert encoder is not None and isinstance(encoder.relation, Disentangled)
    relation = encoder.relation
    count = positions.count if isinstance(positions, Learned) else relation.reach
    return {
        "vocab_size": embedding.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.inner_width,
        "hidden_act": activation_name(encoder.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "max_position_embeddings": count,
        "type_vocab_size": embedding.types,
        "layer_norm_eps": encoder.norm_eps,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": embedding.padding,
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": list(BOTH),
        "position_buckets": relation.buckets,
        "max_relative_positions": relation.reach,
        "norm_rel_ebd": "layer_norm" if relation.norm else "none",
        "position_biased_input": positions is not None,
    }


def _masked_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the masked-language-modelling head, whose decoder is always the token embedding."""
    reader.only("legacy", False, None, why="that is another head, with other names; the published one is not legacy")
    return {"tied": True}


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the masked-language-modelling head."""
    lm = "lm_predictions.lm_head."
    named = ((f"{lm}dense", "head.dense"), (f"{lm}LayerNorm", "head.norm"), (f"{lm}bias", "head.decoder.bias"))
    return NameTable(rows=name_rows(*named))


def _pooler_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the pooler before a classifier."""
    return {
        "activation": read_activation(reader, "pooler_hidden_act", "gelu"),
        "dropout_first": reader.number("pooler_dropout", 0.0),
    }


def _write_pooler(head: Classes | Choice) -> dict[str, object]:
    """Write the settings that `_pooler_settings` reads."""
    assert head.activation is not None
    return {"pooler_hidden_act": activation_name(head.activation), "pooler_dropout": head.dropout_first}


def body(model: ModelConfig) -> NameTable:
    """Return the names of embedding and encoder."""
    layer, block = "deberta.encoder.layer.{}.", "encoder.blocks.{}."
    learned = isinstance(model.embedding.positions, Learned)
    positions = "deberta.embeddings.position_embeddings"  # published files have them even if the model does not
    return NameTable(
        rows=name_rows(
            ("deberta.embeddings.word_embeddings", "embedding.tokens"),
            *([(positions, "embedding.positions")] if learned else []),
            ("deberta.embeddings.token_type_embeddings", "embedding.types"),
            ("deberta.embeddings.LayerNorm", "embedding.norm"),
            ("deberta.encoder.rel_embeddings", "encoder.relations.0.table"),
            ("deberta.encoder.LayerNorm", "encoder.relations.0.norm"),
            (
                tuple(f"{layer}attention.self.{x}_proj" for x in ("query", "key", "value")),
                f"{block}attention.qkv",
                CONCAT,
            ),
            (f"{layer}attention.output.dense", f"{block}attention.out"),
            (f"{layer}attention.output.LayerNorm", f"{block}attention_norm"),
            (f"{layer}intermediate.dense", f"{block}mlp.up"),
            (f"{layer}output.dense", f"{block}mlp.down"),
            (f"{layer}output.LayerNorm", f"{block}mlp_norm"),
        ),
        ignored=frozenset(
            {
                "deberta.embeddings.position_ids",
                "mask_predictions.{any}",  # the discriminator that v3 was pre-trained with
                *([] if learned else [positions]),
            }
        ),
    )


def size(vocabulary: int, layers: int, width: int) -> dict[str, object]:
    """Return a published configuration of v3."""
    return bert.size(vocabulary, layers, width) | {
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_buckets": 256,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }


_FIRST, _OUT = ("pooler.dense", "head.first.dense"), ("classifier", "head.out")

FAMILY = Family(
    prefix="deberta.",
    read=read,
    write=write,
    body=body,
    ignored_keys=frozenset(
        {
            *("classifier_dropout", "cls_dropout", "legacy", "pooler_dropout", "pooler_hidden_act"),
            *("conv_act", "conv_groups", "position_embedding_type", "use_cache"),
        }
    ),
    heads={
        "DebertaV2Model": head_maps.bare(),
        "DebertaV2ForMaskedLM": head_maps.with_settings(
            head_maps.masked(_masked_table, "hidden_act", read_settings=_masked_settings),
            lambda head: {"legacy": False},
        ),
        "DebertaV2ForSequenceClassification": head_maps.with_settings(
            head_maps.classes(_FIRST, _OUT, key="cls_dropout", read_settings=_pooler_settings), _write_pooler
        ),
        "DebertaV2ForTokenClassification": head_maps.token_classes(_OUT, key=None),
        "DebertaV2ForMultipleChoice": head_maps.with_settings(
            head_maps.choice(_FIRST, _OUT, key="cls_dropout", read_settings=_pooler_settings), _write_pooler
        ),
        "DebertaV2ForQuestionAnswering": head_maps.span(),
    },
    tokenizer_defaults={
        "single": "[CLS]:0 $A:0 [SEP]:0",
        "pair": "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        "special": {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
        "appended": ["[MASK]"],
    },
    sizes={
        "deberta-v3-xsmall": size(128_100, 12, 384),
        "deberta-v3-small": size(128_100, 6, 768),
        "deberta-v3-base": size(128_100, 12, 768),
        "deberta-v3-large": size(128_100, 24, 1024),
        "mdeberta-v3-base": size(251_000, 12, 768),
    },
)

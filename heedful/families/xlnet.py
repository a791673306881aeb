"""XLNet (Yang et al. 2019, arXiv:1906.08237): Transformer-XL's relative positions, and two-stream attention.

Classifiers read the last token, which is <cls>.
"""

from __future__ import annotations

from heedful.families import head_maps
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family
from heedful.families.names import FLATTEN, NameRow, NameTable, merge_input_heads, merge_output_heads, name_rows
from heedful.model.config import EmbeddingConfig, ModelConfig, Normal, PermutedTokens, StackConfig, TransformerXl


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json."""
    reader.only("attn_type", "bi", why="causal attention is Transformer-XL's")
    reader.only("bi_data", False, why="reading half a batch backwards was for pre-training")
    reader.only("same_length", False, why="it is for causal attention")
    reader.only("untie_r", True, why="the published models have query biases in each layer")
    width, heads = reader.integer("d_model"), reader.integer("n_head")
    reader.divides("n_head", heads, "d_model", width)
    reader.only("d_head", None, width // heads, why="n_head * d_head must be d_model")
    dropout = reader.number("dropout", 0.1)
    max_distance = reader.integer("clamp_len", -1, minimum=-1)  # 0 or -1: unlimited
    return ModelConfig(
        embedding=EmbeddingConfig(vocabulary=reader.integer("vocab_size"), width=width, dropout=dropout, query=True),
        encoder=StackConfig(
            width=width,
            layers=reader.integer("n_layer", maximum=1024),
            heads=heads,
            head_width=width // heads,
            inner_width=reader.integer("d_inner"),
            activation=read_activation(reader, "ff_activation"),
            attention_bias=False,
            norm_eps=reader.number("layer_norm_eps", 1e-12),
            relation=TransformerXl(reach=max_distance if max_distance > 0 else None),
            dropout=dropout,
            attention_dropout=dropout,
            inner_dropout=dropout,
            final_dropout=dropout,
        ),
        initialisation=Normal(std=reader.number("initializer_range", 0.02)),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    encoder = model.encoder
    assert encoder is not None and isinstance(encoder.relation, TransformerXl)
    return {
        "vocab_size": model.embedding.vocabulary,
        "d_model": encoder.width,
        "n_layer": encoder.layers,
        "n_head": encoder.heads,
        "d_head": encoder.head_width,
        "d_inner": encoder.inner_width,
        "ff_activation": activation_name(encoder.activation),
        "layer_norm_eps": encoder.norm_eps,
        "dropout": encoder.dropout,
        "clamp_len": encoder.relation.reach or -1,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
    }


def body(model: ModelConfig) -> NameTable:
    """Return the names of the body. In HF's tensors of projections, heads are a separate dimension."""
    assert model.encoder is not None
    heads, layer, block = model.encoder.heads, "transformer.layer.{}.", "encoder.blocks.{}."
    attention, relation = f"{layer}rel_attn.", "encoder.relations.{}."
    relation_names = {
        "r_w_bias": "content_bias",
        "r_r_bias": "position_bias",
        "r_s_bias": "type_bias",
        "seg_embed": "same_type",
    }
    return NameTable(
        rows=(
            NameRow(("transformer.mask_emb",), "embedding.query", FLATTEN),
            NameRow(tuple(f"{attention}{x}" for x in "qkv"), f"{block}attention.qkv.weight", merge_input_heads(heads)),
            NameRow((f"{attention}o",), f"{block}attention.out.weight", merge_output_heads(heads)),
            NameRow((f"{attention}r",), f"{relation}position.weight", merge_input_heads(heads)),
            *(NameRow((f"{attention}{hf}",), f"{relation}{name}") for hf, name in relation_names.items()),
            *name_rows(
                ("transformer.word_embedding", "embedding.tokens"),
                (f"{attention}layer_norm", f"{block}attention_norm"),
                (f"{layer}ff.layer_1", f"{block}mlp.up"),
                (f"{layer}ff.layer_2", f"{block}mlp.down"),
                (f"{layer}ff.layer_norm", f"{block}mlp_norm"),
            ),
        )
    )


def _summary_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the summary: the last hidden state, through a dense layer."""
    for name, value in (("summary_type", "last"), ("summary_use_proj", True), ("summary_activation", "tanh")):
        reader.only(name, value, why="it is the published value")
    return {"pooling": "last", "activation": "tanh", "dropout": reader.number("summary_last_dropout", 0.1)}


def size(layers: int, width: int, inner: int) -> dict[str, object]:
    """Return a published configuration."""
    shape = {"d_model": width, "n_layer": layers, "n_head": width // 64, "d_inner": inner}
    return shape | {"vocab_size": 32_000, "ff_activation": "gelu", "layer_norm_eps": 1e-12}


_SUMMARY = ("sequence_summary.summary", "head.first.dense")
_SUMMARY_DROPOUT: head_maps.Arguments = {
    "key": "summary_last_dropout",
    "default": 0.1,
    "read_settings": _summary_settings,
}

FAMILY = Family(
    prefix="transformer.",
    read=read,
    write=write,
    body=body,
    ignored_keys=frozenset(
        {
            *("mem_len", "reuse_len", "use_mems", "use_mems_eval", "use_mems_train", "n_token", "pad_token_id"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout", "start_n_top"),
            *("end_n_top", "max_position_embeddings"),
        }
    ),
    heads={
        "XLNetModel": head_maps.bare(),
        "XLNetLMHeadModel": head_maps.vocabulary(PermutedTokens, lm="lm_loss", tokens="transformer.word_embedding"),
        "XLNetForSequenceClassification": head_maps.classes(_SUMMARY, ("logits_proj", "head.out"), **_SUMMARY_DROPOUT),
        "XLNetForTokenClassification": head_maps.token_classes(
            ("classifier", "head.out"), key=None, read_settings=lambda reader: {"dropout": 0.0}
        ),
        "XLNetForMultipleChoice": head_maps.choice(_SUMMARY, ("logits_proj", "head.out"), **_SUMMARY_DROPOUT),
        "XLNetForQuestionAnsweringSimple": head_maps.span(),
    },
    tokenizer_defaults={
        "single": "$A:0 <sep>:0 <cls>:2",
        "pair": "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        "special": {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"},
        "keep_accents": False,
        "quotes": True,
    },
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep", "pad_token_id": "pad"},
    sizes={"xlnet-base-cased": size(12, 768, 3072), "xlnet-large-cased": size(24, 1024, 4096)},
)

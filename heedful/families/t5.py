"""T5 (Raffel et al. 2020, arXiv:1910.10683), versions 1.0 and 1.1.

T5 has an encoder and a decoder with bucketed relative positions, unscaled scores, and RMS norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from heedful.families import head_maps
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family, HeadMap
from heedful.families.names import CONCAT, NameRow, NameTable, name_rows
from heedful.model.config import Activation, Buckets, EmbeddingConfig, FanIn, ModelConfig, NextToken, StackConfig

MLPS: dict[str, tuple[Activation, bool]] = {  # value of feed_forward_proj -> activation, gated
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-relu": ("relu", True),
    "gated-silu": ("silu", True),
}


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json."""
    reader.only("is_encoder_decoder", True, False, why="the head decides whether the decoder is read")
    width = reader.integer("d_model")
    dropout = reader.number("dropout_rate", 0.1)
    activation, gated = MLPS[reader.choice("feed_forward_proj", {word: word for word in MLPS}, "relu")]
    layers = reader.integer("num_layers", maximum=1024)
    count = reader.integer("relative_attention_num_buckets", 32, minimum=4)
    # the first half of a decoder's buckets have one distance each
    max_distance = reader.integer("relative_attention_max_distance", 128, minimum=count // 2 + 1)
    encoder = StackConfig(
        layers=layers,
        width=width,
        heads=reader.integer("num_heads"),
        head_width=reader.integer("d_kv"),
        inner_width=reader.integer("d_ff"),
        activation=activation,
        gated=gated,
        attention_bias=False,
        mlp_bias=False,
        norm="rms",
        norm_at="pre",
        norm_eps=reader.number("layer_norm_epsilon", 1e-6),
        final_norm=True,
        relation=Buckets(count=count, reach=max_distance),
        score_scale=1.0,
        dropout=dropout,
        attention_dropout=dropout,
        inner_dropout=dropout,
        final_dropout=dropout,
    )
    vocabulary = reader.integer("vocab_size")
    padding = reader.integer("pad_token_id", 0, minimum=0, maximum=vocabulary - 1)
    decoder_layers = reader.integer("num_decoder_layers", None, maximum=1024)
    return ModelConfig(
        embedding=EmbeddingConfig(vocabulary=vocabulary, width=width, dropout=dropout),
        encoder=encoder,
        decoder=replace(encoder, layers=decoder_layers or layers, causal=True, cross=True),
        start=reader.integer("decoder_start_token_id", padding, minimum=0, maximum=vocabulary - 1),
        initialisation=FanIn(factor=reader.number("initializer_factor", 1.0, maximum=100.0)),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    encoder = model.encoder
    assert encoder is not None and isinstance(encoder.relation, Buckets)
    words = {mlp: word for word, mlp in MLPS.items()}
    return {
        "vocab_size": model.embedding.vocabulary,
        "d_model": encoder.width,
        "d_kv": encoder.head_width,
        "d_ff": encoder.inner_width,
        "num_layers": encoder.layers,
        "num_heads": encoder.heads,
        "feed_forward_proj": words[encoder.activation, encoder.gated],
        "relative_attention_num_buckets": encoder.relation.count,
        "relative_attention_max_distance": encoder.relation.reach,
        "layer_norm_epsilon": encoder.norm_eps,
        "dropout_rate": encoder.dropout,
        "initializer_factor": getattr(model.initialisation, "factor", 1.0),
    } | (
        {}
        if model.decoder is None
        else {"num_decoder_layers": model.decoder.layers, "decoder_start_token_id": model.start}
    )


def _part_rows(part: str, mlp_index: int, gated: bool) -> tuple[NameRow, ...]:
    """Return the names of encoder or decoder; `mlp_index` is the index of the MLP among a block's sublayers."""
    layer, block = f"{part}.block.{{}}.layer.", f"{part}.blocks.{{}}."
    attention, inner = f"{layer}0.SelfAttention.", f"{layer}{mlp_index}.DenseReluDense."
    return name_rows(
        (f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{part}.relations.0.table"),
        (tuple(attention + x for x in "qkv"), f"{block}attention.qkv", CONCAT),
        (f"{attention}o", f"{block}attention.out"),
        (f"{layer}0.layer_norm", f"{block}attention_norm"),
        (tuple(inner + x for x in ("wi_0", "wi_1")) if gated else f"{inner}wi", f"{block}mlp.up", CONCAT),
        (f"{inner}wo", f"{block}mlp.down"),
        (f"{layer}{mlp_index}.layer_norm", f"{block}mlp_norm"),
        (f"{part}.final_layer_norm", f"{part}.norm"),
    )


_CROSS = name_rows(
    ("decoder.block.{}.layer.1.EncDecAttention.q", "decoder.blocks.{}.cross.q"),
    (tuple(f"decoder.block.{{}}.layer.1.EncDecAttention.{x}" for x in "kv"), "decoder.blocks.{}.cross.kv", CONCAT),
    ("decoder.block.{}.layer.1.EncDecAttention.o", "decoder.blocks.{}.cross.out"),
    ("decoder.block.{}.layer.1.layer_norm", "decoder.blocks.{}.cross_norm"),
)


def body(model: ModelConfig) -> NameTable:
    """Return the names of the embedding, the encoder, and the decoder if there is one."""
    assert model.encoder is not None
    tokens = name_rows(("shared", "embedding.tokens"))
    gated = model.encoder.gated
    tied = {"encoder.embed_tokens.weight": "shared.weight"}
    if model.decoder is None:
        return NameTable(rows=(*tokens, *_part_rows("encoder", 1, gated)), tied=tied)
    return NameTable(
        rows=(*tokens, *_part_rows("encoder", 1, gated), *_part_rows("decoder", 2, gated), *_CROSS),
        tied=tied | {"decoder.embed_tokens.weight": "shared.weight"},
        ignored=frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias"}),
    )


_LM = head_maps.vocabulary(NextToken, lm="lm_head", tokens="shared")


def _read_next_token(reader: ConfigReader, model: ModelConfig) -> NextToken:
    """Read the output layer's settings.

    Version 1.0 ties the layer to the embedding and scales hidden states by d_model^-0.5; version 1.1 does neither.
    """
    tied = reader.flag("tie_word_embeddings", True)
    scaled = reader.flag("scale_decoder_outputs", tied)
    return NextToken(tied=tied, scale=model.width**-0.5 if scaled else 1.0)


def _write_next_token(head: NextToken) -> dict[str, object]:
    """Write the settings that `_read_next_token` reads."""
    return {"tie_word_embeddings": head.tied, "scale_decoder_outputs": head.scale != 1.0}


def _untied_tensors(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of embedding and output layer of version 1.1.

    transformers 5 saves two different tensors, although config.json ties them.
    """
    return ("shared.weight", "lm_head.weight") if values.get("scale_decoder_outputs") is False else ()


def size(layers: int, width: int, heads: int, inner: int, head_width: int = 64) -> dict[str, object]:
    """Return a published configuration, version 1.0."""
    shape = {"d_model": width, "num_layers": layers, "num_heads": heads, "d_ff": inner, "d_kv": head_width}
    return shape | {"vocab_size": 32_128, "feed_forward_proj": "relu", "decoder_start_token_id": 0, "pad_token_id": 0}


def size_1_1(layers: int, width: int, heads: int, inner: int) -> dict[str, object]:
    """Return a published configuration, version 1.1."""
    return size(layers, width, heads, inner) | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


FAMILY = Family(
    prefix="",
    read=read,
    write=write,
    body=body,
    ignored_keys=frozenset(
        {
            "n_positions",
            "dense_act_fn",
            "is_gated_act",
            "classifier_dropout",
            "scale_decoder_outputs",
            "tie_encoder_decoder",
        }
    ),
    heads={
        "T5Model": head_maps.bare(),
        "T5EncoderModel": HeadMap(head=type(None), read=lambda reader, model: None, encoder_only=True, name="encoder"),
        "T5ForConditionalGeneration": HeadMap(
            head=NextToken, read=_read_next_token, write=_write_next_token, table=_LM.table
        ),
        "T5ForSequenceClassification": head_maps.classes(
            ("classification_head.dense", "head.first.dense"),
            ("classification_head.out_proj", "head.out"),
            default=0.0,
            dropout_first=True,
            read_settings=lambda reader: {"pooling": "last"},
            prefix="transformer.",
        ),
        "T5ForTokenClassification": head_maps.token_classes(
            ("classifier", "head.out"), default=0.0, prefix="transformer.", encoder_only=True
        ),
        "T5ForQuestionAnswering": head_maps.span(),
    },
    special_token_ids={"eos_token_id": "eos_or_sep", "pad_token_id": "pad"},
    untied_tensors=_untied_tensors,
    tokenizer_defaults={
        "single": "$A:0 </s>:0",
        "pair": "$A:0 </s>:0 $B:0 </s>:0",
        "special": {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        "extra_ids": 100,
    },
    sizes={
        "t5-small": size(6, 512, 8, 2048),
        "t5-base": size(12, 768, 12, 3072),
        "t5-large": size(24, 1024, 16, 4096),
        "t5-3b": size(24, 1024, 32, 16_384, 128),
        "t5-11b": size(24, 1024, 128, 65_536, 128),
        "t5-v1_1-small": size_1_1(8, 512, 6, 1024),
        "t5-v1_1-base": size_1_1(12, 768, 12, 2048),
        "t5-v1_1-large": size_1_1(24, 1024, 16, 2816),
        "t5-v1_1-xl": size_1_1(24, 2048, 32, 5120),
        "t5-v1_1-xxl": size_1_1(24, 4096, 64, 10_240),
    },
)

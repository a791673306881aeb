"""BART (Lewis et al. 2020, arXiv:1910.13461) and mBART (Liu et al. 2020, arXiv:2001.08210): encoder and decoder.

Encoder, decoder and output layer share the token vectors. Encoder and decoder each have a table of learned positions,
where position p is row p + 2, and a norm after the sum of tokens and positions. BART is post-norm. mBART is pre-norm,
with a norm after the last block; its texts have language codes. Marian (marian.py) is BART with other positions and
without the norm of the embedding: it uses `read_parts`, `write`, `body` and `language_model`.
"""

from __future__ import annotations

from dataclasses import replace

from heedful.families import head_maps, tokenizer_defaults
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family, HeadMap
from heedful.families.head_maps import ReadSettings
from heedful.families.names import CONCAT, ROW_VECTOR, Named, NameRow, NameTable, name_rows
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, NextToken, Normal, Sinusoidal, StackConfig

PARTS = ("encoder", "decoder")
POSITION_OFFSET = 2  # rows of the position table before position 0
NORM_EPS = 1e-5
IGNORED_KEYS = frozenset(
    {
        "classifier_dropout",  # read by the classification head alone
        "force_bos_token_to_be_generated",  # replaced by forced_bos_token_id
        # in published folders, and unused by transformers
        "classif_dropout",
        "extra_pos_embeddings",
        "save_step",
        "replacing_rate",
        "student_encoder_layers",
        "student_decoder_layers",
    }
)


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json of BART."""
    return read_parts(reader, positions=_learned_positions(reader), embedding_norm=True, default_start=2)


def _read_mbart(reader: ConfigReader) -> ModelConfig:
    """Read config.json of mBART."""
    return read_parts(
        reader,
        positions=_learned_positions(reader),
        embedding_norm=True,
        pre_norm=True,
        final_norm=True,
        starts_with_last=True,
    )


def _learned_positions(reader: ConfigReader) -> Learned:
    """Read how many learned positions there are."""
    count = reader.integer("max_position_embeddings", 1024)
    return Learned(count=count + POSITION_OFFSET, offset=POSITION_OFFSET)


def read_parts(
    reader: ConfigReader,
    *,
    positions: Learned | Sinusoidal,
    embedding_norm: bool = False,
    pre_norm: bool = False,
    final_norm: bool = False,
    default_start: int | None = None,
    starts_with_last: bool = False,
) -> ModelConfig:
    """Read config.json of a family with BART's keys.

    Args:
        positions: Positions of encoder and decoder.
        embedding_norm: Whether a norm follows the sum of tokens and positions.
        pre_norm: Whether norms are before each sublayer, instead of after each residual sum.
        final_norm: Whether a norm follows the last block.
        default_start: Token that decoder inputs begin with, if config.json has no decoder_start_token_id.
        starts_with_last: Whether decoder inputs made by shifting the source begin with its last token, which is the
            language code in mBART.
    """
    legacy_keys = {
        "normalize_before": pre_norm,
        "normalize_embedding": embedding_norm,
        "add_final_layer_norm": final_norm,
        "static_position_embeddings": isinstance(positions, Sinusoidal),
        "add_bias_logits": False,
        "do_blenderbot_90_layernorm": False,
    }
    for key, value in legacy_keys.items():
        reader.only(key, value, None, why="transformers computes the same whatever this key says")
    reader.only("is_encoder_decoder", True, why="this is an encoder-decoder model")
    reader.only("tie_word_embeddings", True, why="encoder, decoder and output layer share one matrix of token vectors")
    vocabulary = reader.integer("vocab_size")
    width = reader.integer("d_model", 1024)
    embedding = EmbeddingConfig(
        vocabulary=vocabulary,
        width=width,
        positions=positions,
        padding=reader.integer("pad_token_id", None, minimum=0, maximum=vocabulary - 1),
        scale=width**0.5 if reader.flag("scale_embedding", False) else 1.0,
        norm="layer" if embedding_norm else None,
        norm_eps=NORM_EPS,
        dropout=reader.number("dropout", 0.1),
    )
    encoder, decoder = (_read_stack(reader, part, width, pre_norm, final_norm) for part in PARTS)
    reader.only("num_hidden_layers", encoder.layers, None, why="it is another name of encoder_layers")
    return ModelConfig(
        embedding=embedding,
        encoder=encoder,
        decoder=decoder,
        decoder_embedding=embedding,
        shared_tokens=True,
        start=reader.integer("decoder_start_token_id", default_start, minimum=0, maximum=vocabulary - 1),
        starts_with_last=starts_with_last,
        initialisation=Normal(std=reader.number("init_std", 0.02)),
    )


def _read_stack(reader: ConfigReader, part: str, width: int, pre_norm: bool, final_norm: bool) -> StackConfig:
    """Read the encoder or the decoder."""
    reader.only(f"{part}_layerdrop", 0, None, why="LayerDrop is not supported")
    heads = reader.integer(f"{part}_attention_heads", 16)
    reader.divides(f"{part}_attention_heads", heads, "d_model", width)
    return StackConfig(
        width=width,
        layers=reader.integer(f"{part}_layers", 12, maximum=1024),
        heads=heads,
        head_width=width // heads,
        inner_width=reader.integer(f"{part}_ffn_dim", 4096),
        activation=read_activation(reader, "activation_function", "gelu"),
        norm_at="pre" if pre_norm else "post",
        norm_eps=NORM_EPS,
        final_norm=final_norm,
        causal=part == "decoder",
        cross=part == "decoder",
        dropout=reader.number("dropout", 0.1),
        attention_dropout=reader.number("attention_dropout", 0.0),
        inner_dropout=reader.number("activation_dropout", 0.0),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    embedding, encoder, decoder = model.embedding, model.encoder, model.decoder
    assert encoder is not None and decoder is not None and embedding.positions is not None
    values: dict[str, object] = {}
    for part, stack in zip(PARTS, (encoder, decoder), strict=True):
        values[f"{part}_layers"] = stack.layers
        values[f"{part}_attention_heads"] = stack.heads
        values[f"{part}_ffn_dim"] = stack.inner_width
    return values | {
        "vocab_size": embedding.vocabulary,
        "d_model": embedding.width,
        "max_position_embeddings": embedding.positions.limit,
        "scale_embedding": embedding.scale != 1.0,
        "activation_function": activation_name(encoder.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.inner_dropout,
        "init_std": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": embedding.padding,
        "decoder_start_token_id": model.start,
    }


def _part_rows(part: str, embedding: str) -> tuple[NameRow, ...]:
    """Return the names of encoder or decoder, and of its embedding without token vectors."""
    layer, block = f"model.{part}.layers.{{}}.", f"{part}.blocks.{{}}."
    cross = f"{layer}encoder_attn."
    return name_rows(
        (f"model.{part}.embed_positions", f"{embedding}.positions"),
        (f"model.{part}.layernorm_embedding", f"{embedding}.norm"),
        (tuple(f"{layer}self_attn.{x}_proj" for x in "qkv"), f"{block}attention.qkv", CONCAT),
        (f"{layer}self_attn.out_proj", f"{block}attention.out"),
        (f"{layer}self_attn_layer_norm", f"{block}attention_norm"),
        (f"{cross}q_proj", f"{block}cross.q"),
        (tuple(f"{cross}{x}_proj" for x in "kv"), f"{block}cross.kv", CONCAT),
        (f"{cross}out_proj", f"{block}cross.out"),
        (f"{layer}encoder_attn_layer_norm", f"{block}cross_norm"),
        (f"{layer}fc1", f"{block}mlp.up"),
        (f"{layer}fc2", f"{block}mlp.down"),
        (f"{layer}final_layer_norm", f"{block}mlp_norm"),
        (f"model.{part}.layer_norm", f"{part}.norm"),
    )


def body(model: ModelConfig) -> NameTable:
    """Return the names of embeddings, encoder and decoder."""
    tokens: Named = ("model.shared", "embedding.tokens")
    return NameTable(
        rows=(*name_rows(tokens), *_part_rows("encoder", "embedding"), *_part_rows("decoder", "decoder_embedding")),
        tied={f"model.{part}.embed_tokens.weight": "model.shared.weight" for part in PARTS},
        ignored=frozenset(f"model.{part}.version" for part in PARTS),  # in files converted from fairseq
    )


def language_model() -> HeadMap:
    """Return the output layer, which shares the token vectors and has a bias that is not trained."""
    bias = "final_logits_bias"
    table = NameTable(
        rows=(NameRow((bias,), "head.decoder.bias", ROW_VECTOR),),
        tied={"lm_head.weight": "model.shared.weight"},
        zero_if_missing=frozenset({bias}),
    )
    return HeadMap(
        head=NextToken,
        read=lambda reader, model: NextToken(bias=True, bias_is_trained=False),
        table=lambda head: table,
    )


def size(vocabulary: int, layers: int, width: int) -> dict[str, object]:
    """Return a published configuration."""
    values: dict[str, object] = {"vocab_size": vocabulary, "d_model": width, "max_position_embeddings": 1024}
    for part in PARTS:
        values[f"{part}_layers"] = layers
        values[f"{part}_attention_heads"] = width // 64
        values[f"{part}_ffn_dim"] = 4 * width
    return values | {"pad_token_id": 1}


def _classification_head(read_pooling: ReadSettings) -> HeadMap:
    """Return the classifier of one hidden state of the decoder, which the settings of `read_pooling` select."""
    return head_maps.classes(
        ("classification_head.dense", "head.first.dense"),
        ("classification_head.out_proj", "head.out"),
        default=0.0,
        dropout_first=True,
        read_settings=read_pooling,
    )


def _pool_last(reader: ConfigReader) -> head_maps.Arguments:
    """Return the settings that pool the last hidden state, that of the end-of-text token."""
    return {"pooling": "last"}


def _pool_last_eos(reader: ConfigReader) -> head_maps.Arguments:
    """Return the settings that pool the hidden state of the last end-of-text token, which precedes a language code."""
    return {"pooling": "last", "pooled_token": reader.integer("eos_token_id", 2, minimum=0)}


BART = Family(
    prefix="model.",
    read=read,
    write=write,
    body=body,
    needs_decoder=True,
    ignored_keys=IGNORED_KEYS,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    special_token_ids={
        "bos_token_id": "bos_or_cls",
        "eos_token_id": "eos_or_sep",
        "pad_token_id": "pad",
        "forced_eos_token_id": "eos_or_sep",
    },
    heads={
        "BartModel": head_maps.bare(),
        "BartForConditionalGeneration": language_model(),
        "BartForSequenceClassification": _classification_head(_pool_last),
        "BartForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "bart-base": size(50_265, 6, 768),
        "bart-large": size(50_265, 12, 1024),
        "bart-large-cnn": size(50_264, 12, 1024),
    },
)
MBART = replace(
    BART,
    read=_read_mbart,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2},
    tokenizer_defaults=tokenizer_defaults.MBART,
    heads={
        "MBartModel": head_maps.bare(),
        "MBartForConditionalGeneration": language_model(),
        "MBartForSequenceClassification": head_maps.with_settings(
            _classification_head(_pool_last_eos), lambda head: {"eos_token_id": head.pooled_token}
        ),
        "MBartForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "mbart-large-cc25": size(250_027, 12, 1024) | {"scale_embedding": True},
        "mbart-large-50": size(250_054, 12, 1024) | {"scale_embedding": True},
    },
)

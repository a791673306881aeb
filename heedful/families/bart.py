"""BART (Lewis et al. 2020, arXiv:1910.13461): an encoder and a decoder, post-norm, with learned positions; mBART.

Encoder, decoder and output layer share the token vectors. Encoder and decoder have positions of their own, where
position p is row p + 2 of the table, and a norm after the sum. mBART (Liu et al. 2020, arXiv:2001.08210) is pre-norm,
with a norm after the last block; its texts have language codes.
"""

from __future__ import annotations

from collections.abc import Callable

from heedful.families import head_maps, tokenizer_defaults
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family, HeadMap
from heedful.families.names import CONCAT, ROW_VECTOR, Named, NameRow, NameTable, name_rows
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, NextToken, Normal, Sinusoidal, StackConfig

SIDES = ("encoder", "decoder")
OFFSET = 2  # rows of the position table before position 0
NORM_EPS = 1e-5
IGNORED_KEYS = frozenset(
    {
        "classifier_dropout",  # unused without a classifier
        "classif_dropout",
        "extra_pos_embeddings",
        "force_bos_token_to_be_generated",  # transformers reads forced_bos_token_id alone
        "save_step",
        "replacing_rate",
        "student_encoder_layers",
        "student_decoder_layers",
    }
)
_SHARED = "encoder, decoder and output layer share one matrix of token vectors"


def read(reader: ConfigReader, *, pre_norm: bool = False) -> ModelConfig:
    """Read config.json; `pre_norm`: mBART's."""
    return read_parts(
        reader,
        positions=Learned(count=reader.integer("max_position_embeddings", 1024) + OFFSET, offset=OFFSET),
        layout={"normalize_before": pre_norm, "normalize_embedding": True, "add_final_layer_norm": pre_norm},
        default_start=None if pre_norm else 2,
        starts_with_last=pre_norm,
    )


def read_parts(
    reader: ConfigReader,
    *,
    positions: Learned | Sinusoidal,
    layout: dict[str, bool],
    default_start: int | None,
    starts_with_last: bool = False,
) -> ModelConfig:
    """Read config.json, for a family with these positions.

    Args:
        layout: Keys of older versions, and their values for the family: "normalize_before" (pre-norm),
            "normalize_embedding" (a norm after the embedding), "add_final_layer_norm".
        default_start: Token that the decoder starts with, unless decoder_start_token_id is another.
        starts_with_last: Whether a decoder that reads the encoder's text starts with that text's last token.
    """
    old_keys = layout | {
        "static_position_embeddings": isinstance(positions, Sinusoidal),
        "add_bias_logits": False,
        "do_blenderbot_90_layernorm": False,
    }
    for key, value in old_keys.items():
        reader.only(key, value, None, why="transformers computes the same whatever this key says")
    reader.only("is_encoder_decoder", True, why="it has an encoder and a decoder")
    reader.only("tie_word_embeddings", True, why=_SHARED)
    for side in SIDES:
        reader.only(f"{side}_layerdrop", 0, None, why="whole layers are never dropped in training")
    width, dropout = reader.integer("d_model", 1024), reader.number("dropout", 0.1)
    vocabulary = reader.integer("vocab_size")
    embedding = EmbeddingConfig(
        vocabulary=vocabulary,
        width=width,
        positions=positions,
        padding=reader.integer("pad_token_id", None, least=0, most=vocabulary - 1),
        scale=width**0.5 if reader.flag("scale_embedding", False) else 1.0,
        norm="layer" if layout["normalize_embedding"] else None,
        norm_eps=NORM_EPS,
        dropout=dropout,
    )

    def stack(side: str) -> StackConfig:
        heads = reader.integer(f"{side}_attention_heads", 16)
        reader.divides(f"{side}_attention_heads", heads, "d_model", width)
        return StackConfig(
            width=width,
            layers=reader.integer(f"{side}_layers", 12, most=1024),
            heads=heads,
            head_width=width // heads,
            inner_width=reader.integer(f"{side}_ffn_dim", 4096),
            activation=read_activation(reader, "activation_function", "gelu"),
            norm_at="pre" if layout["normalize_before"] else "post",
            norm_eps=NORM_EPS,
            final_norm=layout["add_final_layer_norm"],
            causal=side == "decoder",
            cross=side == "decoder",
            dropout=dropout,
            attention_dropout=reader.number("attention_dropout", 0.0),
            inner_dropout=reader.number("activation_dropout", 0.0),
        )

    encoder = stack("encoder")
    reader.only("num_hidden_layers", encoder.layers, None, why="it is another name of encoder_layers")
    return ModelConfig(
        embedding=embedding,
        encoder=encoder,
        decoder=stack("decoder"),
        decoder_embedding=embedding,
        shared_tokens=True,
        start=reader.integer("decoder_start_token_id", default_start, least=0, most=vocabulary - 1),
        starts_with_last=starts_with_last,
        initialisation=Normal(std=reader.number("init_std", 0.02)),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    embedding, encoder, decoder, positions = model.embedding, model.encoder, model.decoder, model.embedding.positions
    assert encoder is not None and decoder is not None and positions is not None
    sides = {"encoder": encoder, "decoder": decoder}
    keys = {"layers": "layers", "attention_heads": "heads", "ffn_dim": "inner_width"}
    return {f"{side}_{key}": getattr(stack, name) for side, stack in sides.items() for key, name in keys.items()} | {
        "vocab_size": embedding.vocabulary,
        "d_model": embedding.width,
        "max_position_embeddings": positions.limit,
        "scale_embedding": embedding.scale != 1.0,
        "activation_function": activation_name(encoder.activation),
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "activation_dropout": encoder.inner_dropout,
        "init_std": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": embedding.padding,
        "decoder_start_token_id": model.start,
    }


def _side(side: str, embedding: str) -> tuple[NameRow, ...]:
    """Return the names of encoder or decoder, and of its embedding without the tokens."""
    layer, block = f"model.{side}.layers.{{}}.", f"{side}.blocks.{{}}."
    cross = f"{layer}encoder_attn."
    return name_rows(
        (f"model.{side}.embed_positions", f"{embedding}.positions"),
        (f"model.{side}.layernorm_embedding", f"{embedding}.norm"),
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
        (f"model.{side}.layer_norm", f"{side}.norm"),
    )


def body(model: ModelConfig) -> NameTable:
    """Return the names of embeddings, encoder and decoder."""
    tokens: Named = ("model.shared", "embedding.tokens")
    return NameTable(
        rows=(*name_rows(tokens), *_side("encoder", "embedding"), *_side("decoder", "decoder_embedding")),
        tied={f"model.{side}.embed_tokens.weight": "model.shared.weight" for side in SIDES},
        ignored=frozenset({"model.encoder.version", "model.decoder.version"}),
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
    shape = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    values: dict[str, object] = {"vocab_size": vocabulary, "d_model": width, "max_position_embeddings": 1024}
    sides = {f"{side}_{key}": value for side in SIDES for key, value in shape.items()}
    return values | sides | {"pad_token_id": 1}


def _classes(fixed: Callable[[ConfigReader], head_maps.Arguments]) -> HeadMap:
    """Return the classifier of a decoder's row."""
    return head_maps.classes(
        ("classification_head.dense", "head.first.dense"),
        ("classification_head.out_proj", "head.out"),
        default=0.0,
        dropout_first=True,
        fixed=fixed,
    )


def _end_row(reader: ConfigReader) -> head_maps.Arguments:
    """Read the token whose last row is classified: texts have a language code behind it."""
    return {"pooling": "last", "pooled_token": reader.integer("eos_token_id", 2, least=0)}


SPECIAL_TOKEN_IDS = {
    **{"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep", "pad_token_id": "pad"},
    "forced_eos_token_id": "eos_or_sep",
}
BART = Family(
    prefix="model.",
    read=read,
    write=write,
    body=body,
    needs_decoder=True,
    ignored_keys=IGNORED_KEYS,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    special_token_ids=SPECIAL_TOKEN_IDS,
    heads={
        "BartModel": head_maps.bare(),
        "BartForConditionalGeneration": language_model(),
        "BartForSequenceClassification": _classes(lambda reader: {"pooling": "last"}),
        "BartForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "bart-base": size(50_265, 6, 768),
        "bart-large": size(50_265, 12, 1024),
        "bart-large-cnn": size(50_264, 12, 1024),
    },
)
MBART = Family(
    prefix="model.",
    read=lambda reader: read(reader, pre_norm=True),
    write=write,
    body=body,
    needs_decoder=True,
    ignored_keys=IGNORED_KEYS,
    generation_defaults={"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2},
    special_token_ids=SPECIAL_TOKEN_IDS,
    tokenizer_defaults=tokenizer_defaults.MBART,
    heads={
        "MBartModel": head_maps.bare(),
        "MBartForConditionalGeneration": language_model(),
        "MBartForSequenceClassification": head_maps.with_settings(
            _classes(_end_row), lambda head: {"eos_token_id": head.pooled_token}
        ),
        "MBartForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "mbart-large-cc25": size(250_027, 12, 1024) | {"scale_embedding": True},
        "mbart-large-50": size(250_054, 12, 1024) | {"scale_embedding": True},
    },
)

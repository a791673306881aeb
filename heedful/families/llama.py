"""Llama's block as encoder and decoder: EuroBERT, Llama and Qwen3.

The block has RMS norms before each sublayer, rotary positions, gated MLPs, and key and value heads that groups of query
heads share (Ainslie et al. 2023, arXiv:2305.13245); an RMS norm follows the last block. EuroBERT (Boizard et al. 2025,
arXiv:2503.05500) is an encoder. Llama (Touvron et al. 2023, arXiv:2302.13971) and Qwen3 (Yang et al. 2025,
arXiv:2505.09388) are decoders, whose sentence embeddings and classifiers read the last token. Qwen3 also normalises
queries and keys.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from heedful.families import head_maps
from heedful.families.config_reader import (
    FULL,
    ConfigReader,
    activation_name,
    layer_types,
    read_activation,
    read_global_layers,
)
from heedful.families.family import Family, HeadMap
from heedful.families.names import CONCAT, NameTable, concat, name_rows
from heedful.families.rope import read_rotary, write_rotary
from heedful.model.config import (
    Classes,
    EmbeddingConfig,
    MaskedTokens,
    ModelConfig,
    NextToken,
    Normal,
    Pooling,
    Rotary,
    StackConfig,
)


def read(
    reader: ConfigReader,
    *,
    causal: bool = True,
    eps: float = 1e-6,
    head_width: int | None = None,
    qk_norm: bool = False,
) -> ModelConfig:
    """Read config.json.

    Args:
        causal: Whether the model is a decoder; otherwise it is an encoder.
        eps: eps of the norms, if config.json has none.
        head_width: Dimension of a head, if config.json has none. If None, hidden_size / num_attention_heads.
        qk_norm: Whether queries and keys are normalised; then the MLPs have no biases.
    """
    width, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if head_width is None:
        reader.divides("num_attention_heads", heads, "hidden_size", width)
    head_width = reader.integer("head_dim", None) or head_width or width // heads
    kv_heads = reader.integer("num_key_value_heads", None) or heads
    reader.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    vocabulary = reader.integer("vocab_size")
    layers = reader.integer("num_hidden_layers", maximum=1024)
    reader.only("rope_interleaved", False, None, why="dimensions are rotated in halves here")
    stack = StackConfig(
        width=width,
        layers=layers,
        heads=heads,
        head_width=head_width,
        kv_heads=None if kv_heads == heads else kv_heads,
        qk_norm=qk_norm,
        inner_width=reader.integer("intermediate_size"),
        activation=read_activation(reader, "hidden_act", "silu"),
        gated=True,
        attention_bias=reader.flag("attention_bias", False),
        mlp_bias=False if qk_norm else reader.flag("mlp_bias", False),
        norm="rms",
        norm_at="pre",
        norm_eps=reader.number("rms_norm_eps", eps),
        final_norm=True,
        relation=read_rotary(reader, 10_000.0, head_width),
        causal=causal,
        attention_dropout=reader.number("attention_dropout", 0.0),
    )
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            padding=reader.integer("pad_token_id", None, minimum=0, maximum=vocabulary - 1),
        ),
        encoder=None if causal else stack,
        decoder=stack if causal else None,
        initialisation=Normal(std=reader.number("initializer_range", 0.02)),
    )


def read_eurobert(reader: ConfigReader) -> ModelConfig:
    """Read config.json, with the keys of transformers or of the first publication."""
    reader.only("hidden_dropout", 0.0, None, why="the published models have none")
    return read(reader, causal=False, eps=1e-5)


def read_qwen3(reader: ConfigReader) -> ModelConfig:
    """Read config.json. A sliding window of n tokens is a query's own position and the n - 1 before it."""
    model = read(reader, head_width=128, qk_norm=True)
    decoder = model.decoder
    assert decoder is not None
    window: int | None = reader.integer("sliding_window", None) if "sliding_window" in reader.values else 4096
    first_local = reader.integer("max_window_layers", 28, minimum=0)
    if not reader.flag("use_sliding_window", False) or window is None:
        reader.only(
            "layer_types", [FULL] * decoder.layers, None, why="use_sliding_window and sliding_window are not set"
        )
        return model
    global_layers = read_global_layers(reader, decoder.layers)
    if global_layers is None:
        global_layers = tuple(range(min(first_local, decoder.layers)))
    if len(global_layers) == decoder.layers:
        return model
    return replace(model, decoder=replace(decoder, window=window - 1, global_layers=global_layers))


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    stack = model.encoder or model.decoder
    assert stack is not None and isinstance(stack.relation, Rotary)
    return {
        "vocab_size": model.embedding.vocabulary,
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "num_key_value_heads": stack.kv_heads or stack.heads,
        "head_dim": stack.head_width,
        "intermediate_size": stack.inner_width,
        "hidden_act": activation_name(stack.activation),
        "attention_bias": stack.attention_bias,
        **({} if stack.qk_norm else {"mlp_bias": stack.mlp_bias}),
        "rms_norm_eps": stack.norm_eps,
        "attention_dropout": stack.attention_dropout,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": model.embedding.padding,
        **write_rotary(stack.relation),
        **_write_window(stack),
    }


def _write_window(stack: StackConfig) -> dict[str, object]:
    """Write the settings of a sliding window."""
    if stack.window is None:
        return {}
    return {"use_sliding_window": True, "sliding_window": stack.window + 1, "layer_types": layer_types(stack)}


def _body(model: ModelConfig) -> NameTable:
    """Return the names of the embedding and of the encoder or decoder."""
    stack, stack_name = (model.encoder, "encoder") if model.encoder else (model.decoder, "decoder")
    assert stack is not None
    layer, block = "model.layers.{}.", f"{stack_name}.blocks.{{}}."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    normed = ((f"{attention}{x}_norm", f"{block}attention.{x}_norm") for x in "qk" if stack.qk_norm)
    rows = name_rows(
        ("model.embed_tokens", "embedding.tokens"),
        (tuple(f"{attention}{x}_proj" for x in "qkv"), f"{block}attention.qkv", concat(*stack.qkv_sizes)),
        (f"{attention}o_proj", f"{block}attention.out"),
        *normed,
        (f"{layer}input_layernorm", f"{block}attention_norm"),
        (f"{layer}post_attention_layernorm", f"{block}mlp_norm"),
        ((f"{mlp}gate_proj", f"{mlp}up_proj"), f"{block}mlp.up", CONCAT),
        (f"{mlp}down_proj", f"{block}mlp.down"),
        ("model.norm", f"{stack_name}.norm"),
    )
    return NameTable(rows=rows, ignored=frozenset({f"{attention}rotary_emb.inv_freq", "model.rotary_emb.inv_freq"}))


_NEXT_TOKEN = head_maps.vocabulary(NextToken, lm="lm_head", tokens="model.embed_tokens", default_tied=False)
_IGNORED = frozenset({"max_position_embeddings", "pretraining_tp", "is_llama_config", "classifier_dropout"})

# -- EuroBERT -------------------------------------------------------------------------------------------------------

_POOLINGS: dict[str, tuple[Pooling, bool]] = {"bos": ("first", False), "mean": ("mean", False), "late": ("mean", True)}


def _masked_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the linear layer over the vocabulary."""
    tied = reader.flag("tie_word_embeddings", False)
    return {"dense": False, "bias": reader.flag("mlp_bias", False), "tied": tied}


def _summary_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read a classifier's pooling.

    "late" is the mean of the scores of all tokens. Since the last layer is linear, these are the scores of the mean
    vector.
    """
    name = reader.choice("classifier_pooling", {name: name for name in _POOLINGS}, "late")
    why = "transformers reads classifier_pooling and not clf_pooling: rename the key"
    reader.only("clf_pooling", name, None, why=why)
    pooling, pools_last = _POOLINGS[name]
    return {"pooling": pooling, "pools_last": pools_last, "activation": "gelu"}


def _write_pooling(head: Classes) -> dict[str, object]:
    """Write the setting that `_summary_settings` reads."""
    names = {pooling: name for name, pooling in _POOLINGS.items()}
    return {"classifier_pooling": names[head.pooling, head.pools_last]}


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the linear layer over the vocabulary."""
    return _NEXT_TOKEN.table(head)


def size(layers: int, width: int, inner: int, heads: tuple[int, int], **more: object) -> dict[str, object]:
    """Return a published configuration.

    Args:
        heads: How many query heads there are, and how many key and value heads.
    """
    shape = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
    counts = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return shape | counts | {"rms_norm_eps": 1e-5} | more


_EUROBERT: dict[str, object] = {"vocab_size": 128_256, "rope_theta": 250_000.0, "pad_token_id": 128_001}
_OUT = ("classifier", "head.out")

EUROBERT = Family(
    prefix="model.",
    read=read_eurobert,
    write=write,
    body=_body,
    ignored_keys=_IGNORED | {"bos_token", "eos_token", "pad_token", "mask_token", "classifier_pooling", "clf_pooling"},
    special_token_ids={
        "bos_token_id": "bos_or_cls",
        "eos_token_id": "eos_or_sep",
        "mask_token_id": "mask",
    },
    heads={
        "EuroBertModel": head_maps.bare(),
        "EuroBertForMaskedLM": head_maps.masked(_masked_table, None, read_settings=_masked_settings),
        "EuroBertForSequenceClassification": head_maps.with_settings(
            head_maps.classes(("dense", "head.first.dense"), _OUT, key=None, read_settings=_summary_settings),
            _write_pooling,
        ),
        "EuroBertForTokenClassification": head_maps.token_classes(_OUT, key=None),
    },
    sizes={
        "eurobert-210m": size(12, 768, 3072, (12, 12), **_EUROBERT),
        "eurobert-610m": size(26, 1152, 4096, (18, 6), **_EUROBERT),
        "eurobert-2.1b": size(32, 2304, 6144, (18, 6), **_EUROBERT),
    },
)

# -- decoders -------------------------------------------------------------------------------------------------------


def _heads(name: str) -> dict[str, HeadMap]:
    """Return the heads of a decoder, which pool the last token."""
    score = ("score", "head.out")
    pooling: head_maps.Arguments = {"pooling": "last", "dense": False, "bias": False}
    span = head_maps.span(read_settings=lambda reader: {"no_answer": "last"})  # the first token attends only to itself
    return {
        f"{name}Model": head_maps.bare(),
        f"{name}ForCausalLM": _NEXT_TOKEN,
        f"{name}ForSequenceClassification": head_maps.classes(score, key=None, read_settings=lambda reader: pooling),
        f"{name}ForTokenClassification": head_maps.token_classes(score, default=0.1),
        f"{name}ForQuestionAnswering": replace(span, prefix="transformer."),
    }


_decoder = partial(
    Family,
    prefix="model.",
    write=write,
    body=_body,
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep", "pad_token_id": "pad"},
)
_SMOLLM2: dict[str, object] = {"vocab_size": 49_152, "rope_theta": 100_000.0, "tie_word_embeddings": True}
_QWEN3: dict[str, object] = {
    "rope_theta": 1_000_000.0,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

LLAMA = _decoder(
    read=read,
    ignored_keys=_IGNORED,
    heads=_heads("Llama"),
    sizes={
        "smollm2-135m": size(30, 576, 1536, (9, 3), **_SMOLLM2),
        "smollm2-360m": size(32, 960, 2560, (15, 5), **_SMOLLM2),
        "tinyllama-1.1b": size(22, 2048, 5632, (32, 4), vocab_size=32_000),
    },
)
QWEN3 = _decoder(
    read=read_qwen3,
    ignored_keys=_IGNORED,
    heads=_heads("Qwen3"),
    sizes={
        "qwen3-embedding-0.6b": size(28, 1024, 3072, (16, 8), vocab_size=151_669, **_QWEN3),
        "qwen3-0.6b": size(28, 1024, 3072, (16, 8), vocab_size=151_936, **_QWEN3),
    },
)

"""Nomic BERT, GTE and Jina embeddings v3: BERT's post-norm blocks with rotary positions instead of learned ones.

Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669) have gated MLPs, and
Nomic BERT has no biases in attention and MLP. Jina embeddings v3 (Sturua et al. 2024, arXiv:2409.10173) has
XLM-RoBERTa's blocks; its adapters are not loaded. Tensors have the names of the published files, which transformers
writes too. config.json has the keys of transformers, or, for Nomic BERT and GTE, those of the first publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from heedful.families import bert, head_maps, tokenizer_defaults
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family
from heedful.families.names import CONCAT, SWAP_HALVES, Named, NameTable, name_rows
from heedful.families.rope import read_rotary, write_rotary
from heedful.model.config import (
    Activation,
    EmbeddingConfig,
    MaskedTokens,
    ModelConfig,
    Normal,
    Rotary,
    StackConfig,
)

NAMES = {  # our name -> key of config.json
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "head_width": "head_dim",
    "inner_width": "intermediate_size",
    "dropout": "hidden_dropout_prob",
    "embedding_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "eps": "layer_norm_eps",
    "base": "rope_theta",
}


def read(
    reader: ConfigReader,
    names: Mapping[str, str] = NAMES,
    activation: Activation | None = None,
    *,
    base: float,
    eps: float = 1e-12,
    default_dropout: float = 0.1,
    attention_dropout: float = 0.0,
    gated: bool = True,
    attention_bias: bool = True,
    up_bias: bool = False,
    down_bias: bool = True,
    inner_dropout: bool = False,
) -> ModelConfig:
    """Read config.json.

    Args:
        names: A mapping from our names, as in NAMES, to the keys of config.json.
        activation: Activation of the MLP. If None, that of hidden_act.
        base: Base of the rotary positions, if config.json has none.
        eps: eps of the norms, if config.json has none.
        default_dropout: Dropout, if config.json has none.
        attention_dropout: Dropout of attention weights, if config.json has none.
        gated: Whether the MLP is gated.
        attention_bias: Whether attention's linear layers have biases.
        up_bias: Whether the first layer of the MLP has a bias.
        down_bias: Whether the last layer of the MLP has a bias.
        inner_dropout: Whether the MLP has its dropout after the activation too.
    """
    width, heads = reader.integer(names["width"]), reader.integer(names["heads"])
    reader.divides(names["heads"], heads, names["width"], width)
    head_width = reader.integer(names["head_width"], None) or width // heads
    vocabulary = reader.integer(names["vocabulary"])
    norm_eps = reader.number(names["eps"], eps)
    dropout = reader.number(names["dropout"], default_dropout)
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            types=reader.integer("type_vocab_size", minimum=0),
            padding=reader.integer("pad_token_id", None, minimum=0, maximum=vocabulary - 1),
            norm="layer",
            norm_eps=norm_eps,
            dropout=reader.number(names["embedding_dropout"], default_dropout),
        ),
        encoder=StackConfig(
            width=width,
            layers=reader.integer(names["layers"], maximum=1024),
            heads=heads,
            head_width=head_width,
            inner_width=reader.integer(names["inner_width"]),
            activation=activation or read_activation(reader, "hidden_act"),
            gated=gated,
            attention_bias=attention_bias,
            mlp_bias=down_bias,
            up_bias=up_bias,
            norm_eps=norm_eps,
            relation=read_rotary(reader, base, head_width, names["base"]),
            dropout=dropout,
            attention_dropout=reader.number(names["attention_dropout"], attention_dropout),
            inner_dropout=dropout if inner_dropout else 0.0,
        ),
        initialisation=Normal(std=reader.number("initializer_range", 0.02)),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json, under the keys of transformers."""
    embedding, encoder = model.embedding, model.encoder
    assert encoder is not None and isinstance(encoder.relation, Rotary)
    head_dim = {} if encoder.head_width * encoder.heads == encoder.width else {"head_dim": encoder.head_width}
    return {
        "vocab_size": embedding.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.inner_width,
        "hidden_act": activation_name(encoder.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "type_vocab_size": embedding.types,
        "layer_norm_eps": encoder.norm_eps,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "pad_token_id": embedding.padding,
        **write_rotary(encoder.relation),
        **head_dim,
    }


# -- Nomic BERT -----------------------------------------------------------------------------------------------------

_HUB_NAMES = NAMES | {  # keys of the first publication
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "inner_width": "n_inner",
    "dropout": "resid_pdrop",
    "embedding_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop",
    "eps": "layer_norm_epsilon",
    "base": "rotary_emb_base",
}
_GATES: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu"}
_FIXED: dict[str, tuple[object, ...]] = {  # key of the first publication -> supported values
    **dict.fromkeys(("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved"), (False, None)),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), (False,)),
    **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), (None,)),
    **dict.fromkeys(("moe_every_n_layers", "num_experts"), (0, None)),
    "rotary_emb_fraction": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
_UNUSED = frozenset(  # keys of the first publication that other models use, or that change only the speed
    {
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions", "n_positions"),
        *("pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn", "use_flash_attn"),
        *("use_xentropy", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
        *("summary_use_proj", "expert_choice_router", "ffn_div", "moe_impl", "moe_normalize_expert_weights"),
        *("moe_resid_pdrop", "moe_top_k", "num_shared_experts", "router_aux_loss_coef"),
    }
)
# keys that change no outputs of Nomic BERT, GTE and Jina embeddings
_IGNORED = frozenset({"classifier_dropout", "max_position_embeddings", "use_cache", "position_embedding_type"})


def read_nomic(reader: ConfigReader) -> ModelConfig:
    """Read config.json, with the keys of transformers or of the first publication."""
    nomic = partial(read, base=1_000.0, default_dropout=0.0, attention_bias=False, down_bias=False)
    if NAMES["width"] in reader.values:
        return nomic(reader)
    for key, values in _FIXED.items():
        reader.only(key, *values, why="it is not supported")
    return nomic(reader, _HUB_NAMES, reader.choice("activation_function", _GATES))


def _nomic_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the activation of a config.json with the keys of the first publication; otherwise return no settings."""
    has_hub_keys = NAMES["width"] not in reader.values
    return {"activation": reader.choice("activation_function", _GATES)} if has_hub_keys else {}


def _nomic_masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of Nomic BERT's masked-language-modelling head."""
    return head_maps.masked_table(
        head,
        lm="cls.predictions.",
        dense="transform.dense",
        norm="transform.layer_norm",
        tokens="nomic_bert.embeddings.word_embeddings",
        module="head",
    )


def _body(prefix: str, *named: Named) -> Callable[[ModelConfig], NameTable]:
    """Return a function that makes the name table of the body: the names that all three families share, and `named`."""
    shared = (
        (f"{prefix}embeddings.word_embeddings", "embedding.tokens"),
        (f"{prefix}embeddings.token_type_embeddings", "embedding.types"),
    )
    ignored = frozenset({f"{prefix}embeddings.position_ids", f"{prefix}rotary_emb.inv_freq"})
    return lambda model: NameTable(rows=name_rows(*shared, *named), ignored=ignored)


_OUR_LAYER = "encoder.blocks.{}."
_OUT = ("classifier", "head.out")

_LAYER = "nomic_bert.encoder.layers.{}."
NOMIC_BERT = Family(
    prefix="nomic_bert.",
    read=read_nomic,
    write=write,
    body=_body(
        "nomic_bert.",
        ("nomic_bert.emb_ln", "embedding.norm"),
        (f"{_LAYER}attn.Wqkv", f"{_OUR_LAYER}attention.qkv"),
        (f"{_LAYER}attn.out_proj", f"{_OUR_LAYER}attention.out"),
        (f"{_LAYER}norm1", f"{_OUR_LAYER}attention_norm"),
        ((f"{_LAYER}mlp.fc12", f"{_LAYER}mlp.fc11"), f"{_OUR_LAYER}mlp.up", CONCAT),
        (f"{_LAYER}mlp.fc2", f"{_OUR_LAYER}mlp.down"),
        (f"{_LAYER}norm2", f"{_OUR_LAYER}mlp_norm"),
    ),
    ignored_keys=_IGNORED | _UNUSED | _FIXED.keys() | set(_HUB_NAMES.values()) | {"activation_function"},
    heads={
        "NomicBertModel": head_maps.bare(),
        "NomicBertForMaskedLM": head_maps.masked(_nomic_masked_table, "hidden_act", read_settings=_nomic_settings),
        "NomicBertForSequenceClassification": head_maps.classes(("nomic_bert.pooler.dense", "head.first.dense"), _OUT),
        "NomicBertForTokenClassification": head_maps.token_classes(_OUT),
    },
    sizes={
        "nomic-embed-text-v1.5": {
            **bert.size(30_528, 12, 768),
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
        }
    },
)


# -- GTE ------------------------------------------------------------------------------------------------------------


def read_gte(reader: ConfigReader) -> ModelConfig:
    """Read config.json; raises ModelError for models that scale scores by the logarithm of the length."""
    reader.only("logn_attention_scale", False, why="scores that are scaled by the length are not supported")
    reader.only("layer_norm_type", "layer_norm", why="it is not supported")
    reader.only("pack_qkv", True, why="separate tensors of q, k and v are not read")
    reader.only("position_embedding_type", "rope", None, why="other positions are not supported")
    return read(reader, base=160_000.0, inner_dropout=True)


def _gte_masked_table(prefix: str) -> Callable[[MaskedTokens], NameTable]:
    """Return a function that makes the name table of GTE's masked-language-modelling head."""
    tokens = f"{prefix}embeddings.word_embeddings.weight"

    def table(head: MaskedTokens) -> NameTable:
        named = name_rows(("lm_head.dense", "head.dense"), ("lm_head.norm", "head.norm"))
        if not head.tied:
            return NameTable(rows=(*named, *name_rows(("lm_head.decoder", "head.decoder"))))
        bias = name_rows(("lm_head.decoder.bias", "head.decoder.bias"))
        return NameTable(rows=(*named, *bias), tied={"lm_head.decoder.weight": tokens})

    return table


def _gte(prefix: str, name: str, sizes: dict[str, dict[str, object]]) -> Family:
    """Return the family whose tensor names begin with `prefix` and whose architectures begin with `name`."""
    layer = f"{prefix}encoder.layer.{{}}."
    pooler = (f"{prefix}pooler.dense", "head.first.dense")
    return Family(
        prefix=prefix,
        read=read_gte,
        write=write,
        body=_body(
            prefix,
            (f"{prefix}embeddings.LayerNorm", "embedding.norm"),
            (f"{layer}attention.qkv_proj", f"{_OUR_LAYER}attention.qkv"),
            (f"{layer}attention.o_proj", f"{_OUR_LAYER}attention.out"),
            (f"{layer}attn_ln", f"{_OUR_LAYER}attention_norm"),
            (f"{layer}mlp.up_gate_proj", f"{_OUR_LAYER}mlp.up", SWAP_HALVES),
            (f"{layer}mlp.down_proj", f"{_OUR_LAYER}mlp.down"),
            (f"{layer}mlp_ln", f"{_OUR_LAYER}mlp_norm"),
        ),
        ignored_keys=_IGNORED | {"logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention"},
        heads={
            f"{name}Model": head_maps.bare(),
            f"{name}ForMaskedLM": head_maps.masked(_gte_masked_table(prefix), None),
            f"{name}ForSequenceClassification": head_maps.classes(pooler, _OUT),
            f"{name}ForTokenClassification": head_maps.token_classes(_OUT),
        },
        sizes=sizes,
        tokenizer_defaults=tokenizer_defaults.XLM_ROBERTA,
    )


GTE_HUB = _gte("new.", "New", {})
GTE_NATIVE = _gte(
    "gte.",
    "Gte",
    {
        "gte-multilingual-base": bert.size(250_048, 12, 768)
        | {"max_position_embeddings": 8192, "type_vocab_size": 1, "pad_token_id": 1},
        "gte-base-en-v1.5": bert.size(30_528, 12, 768) | {"max_position_embeddings": 8192, "type_vocab_size": 0},
        "gte-large-en-v1.5": bert.size(30_528, 24, 1024) | {"max_position_embeddings": 8192, "type_vocab_size": 2},
    },
)


# -- Jina embeddings v3 -----------------------------------------------------------------------------------------------


def _jina_masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of Jina's masked-language-modelling head."""
    tokens = "roberta.embeddings.word_embeddings"
    return head_maps.masked_table(head, lm="lm_head.", dense="dense", norm="layer_norm", tokens=tokens, module="head")


_LAYER = "roberta.encoder.layers.{}."
JINA_EMBEDDINGS_V3 = Family(
    prefix="roberta.",
    read=partial(read, base=20_000.0, eps=1e-5, attention_dropout=0.1, gated=False, up_bias=True),
    write=write,
    body=_body(
        "roberta.",
        ("roberta.emb_ln", "embedding.norm"),
        (f"{_LAYER}mixer.Wqkv", f"{_OUR_LAYER}attention.qkv"),
        (f"{_LAYER}mixer.out_proj", f"{_OUR_LAYER}attention.out"),
        (f"{_LAYER}norm1", f"{_OUR_LAYER}attention_norm"),
        (f"{_LAYER}mlp.fc1", f"{_OUR_LAYER}mlp.up"),
        (f"{_LAYER}mlp.fc2", f"{_OUR_LAYER}mlp.down"),
        (f"{_LAYER}norm2", f"{_OUR_LAYER}mlp_norm"),
    ),
    ignored_keys=_IGNORED,
    tokenizer_defaults=tokenizer_defaults.XLM_ROBERTA,
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep"},
    heads={
        "JinaEmbeddingsV3Model": head_maps.pooled(("roberta.pooler.dense", "head.first.dense")),
        "JinaEmbeddingsV3ForMaskedLM": head_maps.masked(_jina_masked_table, None),
        "JinaEmbeddingsV3ForSequenceClassification": head_maps.classes(
            ("classifier.dense", "head.first.dense"), ("classifier.out_proj", "head.out"), dropout_first=True
        ),
        "JinaEmbeddingsV3ForTokenClassification": head_maps.token_classes(_OUT),
        "JinaEmbeddingsV3ForQuestionAnswering": head_maps.span(),
    },
    sizes={
        "jina-embeddings-v3": bert.size(250_002, 24, 1024)
        | {"max_position_embeddings": 8194, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    },
)

"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): rotary positions, gated MLPs, local and global layers."""

from __future__ import annotations

from heedful.errors import ModelError
from heedful.families import head_maps
from heedful.families.config_reader import (
    FULL,
    LOCAL,
    ConfigReader,
    activation_name,
    layer_types,
    read_activation,
    read_global_layers,
)
from heedful.families.family import Family
from heedful.families.names import NameTable, name_rows
from heedful.families.rope import read_scaling, write_scaling
from heedful.model.config import (
    DynamicNtk,
    EmbeddingConfig,
    MaskedTokens,
    ModelConfig,
    Rotary,
    Rowwise,
    StackConfig,
    Summary,
    TruncatedNormal,
    Yarn,
)


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json, with the published keys or those of transformers 5."""
    width = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    reader.divides("num_attention_heads", heads, "hidden_size", width)
    vocabulary = reader.integer("vocab_size")
    layers = reader.integer("num_hidden_layers", maximum=1024)
    eps = reader.number("norm_eps", 1e-5)
    norm_bias = reader.flag("norm_bias", False)
    attention_dropout = reader.number("attention_dropout", 0.0)
    period_or_layers = _read_period_or_layers(reader, layers)
    rotary = _read_rotary(reader, width // heads)
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=vocabulary,
            width=width,
            padding=reader.integer("pad_token_id", None, minimum=0, maximum=vocabulary - 1),
            norm="layer",
            norm_eps=eps,
            norm_bias=norm_bias,
            dropout=reader.number("embedding_dropout", 0.0),
        ),
        encoder=StackConfig(
            width=width,
            layers=layers,
            heads=heads,
            head_width=width // heads,
            inner_width=reader.integer("intermediate_size"),
            activation=read_activation(reader, "hidden_activation"),
            gated=True,
            attention_bias=reader.flag("attention_bias", False),
            mlp_bias=reader.flag("mlp_bias", False),
            norm_at="pre",
            norm_eps=eps,
            norm_bias=norm_bias,
            first_norm=False,  # transformers: attn_norm of layer 0 is Identity
            final_norm=True,
            relation=rotary,
            window=reader.integer("local_attention", 128) // 2,
            global_every=period_or_layers if isinstance(period_or_layers, int) else None,
            global_layers=None if isinstance(period_or_layers, int) else period_or_layers,
            dropout=0.0,  # transformers: the output of the MLP has none
            attention_out_dropout=attention_dropout,  # transformers: out_drop uses attention_dropout
            attention_dropout=attention_dropout,
            inner_dropout=reader.number("mlp_dropout", 0.0),
        ),
        initialisation=TruncatedNormal(
            std=reader.number("initializer_range", 0.02),
            cut=reader.number("initializer_cutoff_factor", 2.0, minimum=0.5, maximum=100.0),
            outputs=(2 * layers) ** -0.5,  # factor of std for matrices that end a residual branch
        ),
    )


def _read_rotary(reader: ConfigReader, head_width: int) -> Rotary:
    """Read the rotary positions of global and of local layers; rope_scaling applies to both."""
    bases = {
        FULL: reader.number("global_rope_theta", 160_000.0, minimum=1.0, maximum=1e9),
        LOCAL: reader.number("local_rope_theta", 10_000.0, minimum=1.0, maximum=1e9),
    }
    rope_values: dict[str, dict[str, object]] = {
        kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
    }
    for kind, parameters in _mapping_or_empty(reader, "rope_parameters").items():
        if kind not in rope_values or not isinstance(parameters, dict | None):
            raise ModelError(
                f"{reader.source}: rope_parameters.{kind} cannot be read; expected objects under {FULL} and {LOCAL}"
            )
        rope_values[kind] |= parameters or {}
    common_values = _mapping_or_empty(reader, "rope_scaling")
    for values in rope_values.values():
        values |= common_values
        rope_reader = ConfigReader(values, f"{reader.source}: rope_parameters or rope_scaling")
        why = "for ModernBERT, transformers reads rope_type and not type: rename the key"
        rope_reader.only("type", values["rope_type"], why=why)
        why = "for ModernBERT, transformers would ignore truncate=False, so the outputs would differ"
        rope_reader.only("truncate", True, None, why=why)
    base, scaling = read_scaling(reader, rope_values[FULL], bases[FULL], head_width)
    local_base, local_scaling = read_scaling(reader, rope_values[LOCAL], bases[LOCAL], head_width)
    return Rotary(base=base, local_base=local_base, scaling=scaling, local_scaling=local_scaling)


def _mapping_or_empty(reader: ConfigReader, name: str) -> dict[str, object]:
    """Read an object; returns an empty one if the key is missing or null."""
    return {} if reader.values.get(name) is None else reader.mapping(name)


def _read_period_or_layers(reader: ConfigReader, layers: int) -> int | tuple[int, ...]:
    """Read which layers are global: returns n if every n-th layer is, otherwise the indices of the global layers."""
    # read even if layer_types overrides it, which marks the key as read
    stated_period: int = reader.integer("global_attn_every_n_layers", 3)
    global_layers = read_global_layers(reader, layers)
    if global_layers is None:
        return stated_period
    # the distance of the first two global layers if layer 0 is global; `layers` if at most one layer is
    period = global_layers[1] if len(global_layers) > 1 else layers
    return period if global_layers == tuple(range(0, layers, period)) else global_layers


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json, under the published keys."""
    embedding, encoder = model.embedding, model.encoder
    assert encoder is not None and isinstance(encoder.relation, Rotary) and encoder.window is not None
    return {
        "vocab_size": embedding.vocabulary,
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.inner_width,
        "hidden_activation": activation_name(encoder.activation),
        "pad_token_id": embedding.padding,
        "norm_eps": encoder.norm_eps,
        "norm_bias": encoder.norm_bias,
        "attention_bias": encoder.attention_bias,
        "mlp_bias": encoder.mlp_bias,
        "local_attention": 2 * encoder.window,
        **_write_layers(encoder),
        **_write_rotary(encoder.relation),
        "embedding_dropout": embedding.dropout,
        "attention_dropout": encoder.attention_dropout,
        "mlp_dropout": encoder.inner_dropout,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
        "initializer_cutoff_factor": getattr(model.initialisation, "cut", 2.0),
    }


def _write_layers(encoder: StackConfig) -> dict[str, object]:
    """Write the settings that `_read_period_or_layers` reads."""
    if encoder.global_layers is None:
        return {"global_attn_every_n_layers": encoder.global_every}
    # any value is possible: layer_types decides
    return {"global_attn_every_n_layers": 1, "layer_types": layer_types(encoder)}


def _write_rotary(relation: Rotary) -> dict[str, object]:
    """Write the bases under their published keys, or, if positions are scaled, rope_parameters."""
    local_base = relation.base if relation.local_base is None else relation.local_base
    if relation.scaling is None and relation.local_scaling is None:
        return {"global_rope_theta": relation.base, "local_rope_theta": local_base}
    values: dict[str, object] = {
        "rope_parameters": {
            FULL: write_scaling(relation.base, relation.scaling),
            LOCAL: write_scaling(local_base, relation.local_scaling),
        }
    }
    scalings = (relation.scaling, relation.local_scaling)
    if any(isinstance(scaling, Yarn) and not scaling.truncate for scaling in scalings):
        raise ModelError(
            "the YaRN scaling of the positions has truncate=False, which transformers would ignore for this family: "
            "save the model with the family heedful"
        )
    lengths = [scaling.trained for scaling in scalings if isinstance(scaling, DynamicNtk)]
    if len(set(lengths)) > 1:
        raise ModelError(
            f"the global layers were trained with {lengths[0]} positions and the local layers with {lengths[1]} (their "
            "dynamic scaling), but config.json of this family has one max_position_embeddings for both: give both the "
            "same number, or save the model with the family heedful"
        )
    if lengths:
        values["max_position_embeddings"] = lengths[0]
    return values


def _dense_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the dense layer and the norm before a head's last layer."""
    return {
        "dense": True,
        "dense_bias": reader.flag("classifier_bias", False),
        "activation": read_activation(reader, "classifier_activation", "gelu"),
        "norm_eps": reader.number("norm_eps", 1e-5),
        "norm_bias": reader.flag("norm_bias", False),
    }


def _summary_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the dense layer and the norm, and the pooling."""
    return _dense_settings(reader) | {
        "pooling": reader.choice("classifier_pooling", {"cls": "first", "mean": "mean"}, "cls")
    }


def _masked_table(head: MaskedTokens) -> NameTable:
    """Return the names of the masked-language-modelling head."""
    named = name_rows(("head.dense", "head.dense"), ("head.norm", "head.norm"))
    if not head.tied:
        return NameTable(rows=(*named, *name_rows(("decoder", "head.decoder"))))
    bias = name_rows(("decoder.bias", "head.decoder.bias")) if head.bias else ()
    return NameTable(rows=(*named, *bias), tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"})


def _masked_settings(reader: ConfigReader) -> head_maps.Arguments:
    """Read the settings of the masked-language-modelling head."""
    settings = {name: value for name, value in _dense_settings(reader).items() if name != "dense"}
    return settings | {"bias": reader.flag("decoder_bias", True)}


def _write_head(head: MaskedTokens | Summary | Rowwise) -> dict[str, object]:
    """Write the settings that `_dense_settings`, `_summary_settings` and `_masked_settings` read."""
    assert head.activation is not None
    values = {"classifier_bias": head.dense_bias, "classifier_activation": activation_name(head.activation)}
    if isinstance(head, MaskedTokens):
        return values | {"decoder_bias": head.bias}
    if isinstance(head, Summary):
        values["classifier_pooling"] = "cls" if head.pooling == "first" else head.pooling
    return values


def size(layers: int, width: int, inner: int) -> dict[str, object]:
    """Return a published configuration. Heads have 64 dimensions."""
    return {
        "vocab_size": 50_368,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": inner,
        "hidden_activation": "gelu",
        "pad_token_id": 50_283,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
    }


_MULTILINGUAL: dict[str, object] = {"vocab_size": 256_000, "pad_token_id": 0, "local_rope_theta": 160_000.0}
_LAYER, _OUR_LAYER = "model.layers.{}.", "encoder.blocks.{}."
_HEAD_NAMES = (("head.dense", "head.first.dense"), ("head.norm", "head.first.norm"), ("classifier", "head.out"))
_DROPOUT: head_maps.Arguments = {"key": "classifier_dropout", "default": 0.0}

FAMILY = Family(
    prefix="model.",
    read=read,
    write=write,
    ignored_keys=frozenset(
        {
            *("max_position_embeddings", "deterministic_flash_attn", "sparse_prediction"),
            *("sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "position_embedding_type"),
            # read by the heads that have them; other heads ignore them
            *("classifier_pooling", "classifier_dropout", "classifier_bias", "classifier_activation", "decoder_bias"),
            *("gradient_checkpointing", "layer_norm_eps"),
        }
    ),
    body=lambda model: NameTable(
        rows=name_rows(
            ("model.embeddings.tok_embeddings", "embedding.tokens"),
            ("model.embeddings.norm", "embedding.norm"),
            (f"{_LAYER}attn.Wqkv", f"{_OUR_LAYER}attention.qkv"),
            (f"{_LAYER}attn.Wo", f"{_OUR_LAYER}attention.out"),
            (f"{_LAYER}attn_norm", f"{_OUR_LAYER}attention_norm"),
            (f"{_LAYER}mlp.Wi", f"{_OUR_LAYER}mlp.up"),
            (f"{_LAYER}mlp.Wo", f"{_OUR_LAYER}mlp.down"),
            (f"{_LAYER}mlp_norm", f"{_OUR_LAYER}mlp_norm"),
            ("model.final_norm", "encoder.norm"),
        )
    ),
    heads={
        "ModernBertModel": head_maps.bare(),
        **{
            f"ModernBertFor{name}": head_maps.with_settings(head_map, _write_head)
            for name, head_map in {
                "MaskedLM": head_maps.masked(_masked_table, activation=None, read_settings=_masked_settings),
                "SequenceClassification": head_maps.classes(*_HEAD_NAMES, **_DROPOUT, read_settings=_summary_settings),
                "TokenClassification": head_maps.token_classes(*_HEAD_NAMES, **_DROPOUT, read_settings=_dense_settings),
                "MultipleChoice": head_maps.choice(*_HEAD_NAMES, **_DROPOUT, read_settings=_summary_settings),
                "QuestionAnswering": head_maps.span(*_HEAD_NAMES, **_DROPOUT, read_settings=_dense_settings),
            }.items()
        },
    },
    special_token_ids={
        "bos_token_id": "bos_or_cls",
        "eos_token_id": "eos_or_sep",
        "cls_token_id": "bos_or_cls",
        "sep_token_id": "eos_or_sep",
    },
    sizes={
        "modernbert-base": size(22, 768, 1152),
        "modernbert-large": size(28, 1024, 2624),
        "ettin-encoder-17m": size(7, 256, 384),
        "ettin-encoder-32m": size(10, 384, 576),
        "ettin-encoder-68m": size(19, 512, 768),
        # ettin-encoder-150m and ettin-encoder-400m have the sizes of modernbert-base and modernbert-large
        "ettin-encoder-1b": size(28, 1792, 3840),
        "mmbert-small": size(22, 384, 1152) | _MULTILINGUAL,
        "mmbert-base": size(22, 768, 1152) | _MULTILINGUAL,
    },
)

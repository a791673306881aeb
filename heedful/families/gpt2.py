"""GPT-2 (Radford et al. 2019): a pre-norm decoder with learned positions, whose output layer is tied.

HF saves the matrices of its linear layers transposed.
"""

from __future__ import annotations

from heedful.families import head_maps
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family, HeadMap
from heedful.families.names import TRANSPOSE, NameRow, NameTable, name_rows
from heedful.model.config import (
    EmbeddingConfig,
    Learned,
    ModelConfig,
    NextToken,
    NextTokenAndChoice,
    Normal,
    StackConfig,
)


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json."""
    why = "the published models scale by the head's width alone"
    reader.only("scale_attn_weights", True, why=why)
    reader.only("scale_attn_by_inverse_layer_idx", False, why=why)
    width, heads = reader.integer("n_embd"), reader.integer("n_head")
    layers = reader.integer("n_layer", maximum=1024)
    reader.divides("n_head", heads, "n_embd", width)
    inner = reader.integer("n_inner", None)
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=reader.integer("vocab_size"),
            width=width,
            positions=Learned(count=reader.integer("n_positions")),
            dropout=reader.number("embd_pdrop", 0.1),
        ),
        decoder=StackConfig(
            width=width,
            layers=layers,
            heads=heads,
            head_width=width // heads,
            inner_width=inner or 4 * width,
            activation=read_activation(reader, "activation_function"),
            norm_at="pre",
            norm_eps=reader.number("layer_norm_epsilon", 1e-5),
            final_norm=True,
            causal=True,
            dropout=reader.number("resid_pdrop", 0.1),
            attention_dropout=reader.number("attn_pdrop", 0.1),
        ),
        initialisation=Normal(std=reader.number("initializer_range", 0.02), outputs=(2 * layers) ** -0.5),
    )


def write(model: ModelConfig) -> dict[str, object]:
    """Write the values of config.json."""
    embedding, decoder, positions = model.embedding, model.decoder, model.embedding.positions
    assert decoder is not None and isinstance(positions, Learned)
    return {
        "vocab_size": embedding.vocabulary,
        "n_positions": positions.count,
        "n_embd": decoder.width,
        "n_layer": decoder.layers,
        "n_head": decoder.heads,
        "n_inner": decoder.inner_width,
        "activation_function": activation_name(decoder.activation),
        "layer_norm_epsilon": decoder.norm_eps,
        "embd_pdrop": embedding.dropout,
        "resid_pdrop": decoder.dropout,
        "attn_pdrop": decoder.attention_dropout,
        "initializer_range": getattr(model.initialisation, "std", 0.02),
    }


def _read_double_heads(reader: ConfigReader, model: ModelConfig) -> NextTokenAndChoice:
    """Read the settings of GPT2DoubleHeadsModel, which scores a choice from the last hidden state."""
    reader.only("summary_type", "cls_index", "last", why="Heedful reads the last row")
    reader.only("summary_use_proj", True, why="it is the published value")
    reader.only("summary_proj_to_labels", True, why="it is the published value")
    reader.only("summary_activation", None, why="it is the published value")
    dropout = reader.number("summary_first_dropout", 0.1)
    tied = reader.flag("tie_word_embeddings", True)
    return NextTokenAndChoice(pooling="last", dense=False, dropout=dropout, tied=tied)


def _double_heads_table(head: NextTokenAndChoice) -> NameTable:
    """Return the tensor names of GPT2DoubleHeadsModel."""
    tokens = head_maps.vocabulary(NextToken, lm="lm_head", tokens="transformer.wte", module="head.tokens").table(head)
    return tokens.merged_with(NameTable(rows=name_rows(("multiple_choice_head.summary", "head.choice.out"))))


def size(layers: int, width: int) -> dict[str, object]:
    """Return a published configuration."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "activation_function": "gelu_new"}
    return shape | {"vocab_size": 50_257, "n_positions": 1024, "layer_norm_epsilon": 1e-5}


_LAYER, _OUR_LAYER = "transformer.h.{}.", "decoder.blocks.{}."
_LINEAR = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

FAMILY = Family(
    prefix="transformer.",
    read=read,
    write=write,
    ignored_keys=frozenset(
        {
            *("pad_token_id", "n_ctx", "reorder_and_upcast_attn", "classifier_dropout", "hidden_dropout"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            "summary_first_dropout",
        }
    ),
    body=lambda model: NameTable(
        rows=(
            *name_rows(
                ("transformer.wte", "embedding.tokens"),
                ("transformer.wpe", "embedding.positions"),
                (f"{_LAYER}ln_1", f"{_OUR_LAYER}attention_norm"),
                (f"{_LAYER}ln_2", f"{_OUR_LAYER}mlp_norm"),
                ("transformer.ln_f", "decoder.norm"),
            ),
            *(NameRow((f"{_LAYER}{hf}",), f"{_OUR_LAYER}{name}", TRANSPOSE) for hf, name in _LINEAR.items()),
        ),
        ignored=frozenset({f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"}),
    ),
    heads={
        "GPT2Model": head_maps.bare(),
        "GPT2LMHeadModel": head_maps.vocabulary(NextToken, lm="lm_head", tokens="transformer.wte"),
        "GPT2DoubleHeadsModel": HeadMap(
            head=NextTokenAndChoice,
            read=_read_double_heads,
            write=lambda head: {"tie_word_embeddings": head.tied, "summary_first_dropout": head.dropout},
            table=_double_heads_table,
        ),
        "GPT2ForSequenceClassification": head_maps.classes(
            ("score", "head.out"),
            key=None,
            read_settings=lambda reader: {"pooling": "last", "dense": False, "bias": False},
        ),
        "GPT2ForTokenClassification": head_maps.token_classes(("classifier", "head.out"), default=0.1),
        # the last token means "no answer", because the first one attends only to itself
        "GPT2ForQuestionAnswering": head_maps.span(read_settings=lambda reader: {"no_answer": "last"}),
    },
    special_token_ids={"bos_token_id": "bos_or_cls", "eos_token_id": "eos_or_sep", "pad_token_id": "pad"},
    sizes={
        "gpt2": size(12, 768),
        "gpt2-medium": size(24, 1024),
        "gpt2-large": size(36, 1280),
        "gpt2-xl": size(48, 1600),
        "distilgpt2": size(6, 768),
    },
)

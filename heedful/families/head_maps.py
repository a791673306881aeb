"""Heads that several families publish: their settings in config.json and their tensor names.

Each function returns a `HeadMap` for the `heads` of a `Family`. Its `named` arguments are rows of the name table of the
head: (HF name, our name).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heedful.errors import ModelError
from heedful.families.config_reader import ConfigReader, read_activation
from heedful.families.family import HeadMap
from heedful.families.names import Named, NameRow, NameTable, name_rows
from heedful.model.config import (
    Choice,
    Classes,
    Head,
    MaskedTokens,
    ModelConfig,
    NextSentenceScores,
    NextToken,
    NextTokenAndChoice,
    PermutedTokens,
    Pooled,
    Pretraining,
    ScoreActivation,
    SpanScores,
    TokenClasses,
)

Arguments = dict[str, Any]  # keyword arguments of a head's configuration, or of a function of this module
ReadSettings = Callable[[ConfigReader], Arguments]  # reads settings that a family fixes or names differently


CROSS_ENCODER, ACTIVATION = "sentence_transformers", "activation_fn"  # keys of sentence-transformers since version 4
OLD_ACTIVATION = "sbert_ce_default_activation_function"  # key before version 4
CROSS_ENCODER_KEYS = {CROSS_ENCODER, OLD_ACTIVATION}
SCORE_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def with_score_activation(head: Classes, reader: ConfigReader, key: str = ACTIVATION) -> Classes:
    """Return a head with the activation of a cross-encoder of sentence-transformers, if config.json has one.

    Args:
        key: Key of the activation.

    Raises:
        ModelError: If the activation is neither Identity nor Sigmoid, or does not fit the problem.
    """
    activation = reader.choice(key, SCORE_ACTIVATIONS, None)
    if activation == "sigmoid" and head.problem_type == "single_label_classification":
        raise ModelError(
            f"{reader.source}: {key} is Sigmoid, but with problem_type {head.problem_type}, Heedful takes the softmax "
            f'of {len(head.labels)} labels: set problem_type to "multi_label_classification" for the sigmoid of each'
        )
    return replace(head, score_activation=activation)


def _with_cross_encoder_keys(reader: ConfigReader, head: Classes) -> Classes:
    """Return a head with a cross-encoder's activation, from the key of any version of sentence-transformers."""
    if isinstance(values := reader.values.get(CROSS_ENCODER), dict) and ACTIVATION in values:
        inner_reader = ConfigReader({ACTIVATION: values[ACTIVATION]}, f"{reader.source}: {CROSS_ENCODER}")
        return with_score_activation(head, inner_reader)
    return with_score_activation(head, reader, OLD_ACTIVATION)


def bare() -> HeadMap:
    """Return a model without a head."""
    return HeadMap(head=type(None), read=lambda reader, model: None)


def pooled(*named: Named) -> HeadMap:
    """Return a model with its pooler."""
    return HeadMap(
        head=Pooled, read=lambda reader, model: Pooled(), table=lambda head: NameTable(rows=name_rows(*named))
    )


def next_sentence(*named: Named) -> HeadMap:
    """Return a next-sentence prediction head."""
    return HeadMap(
        head=NextSentenceScores,
        read=lambda reader, model: NextSentenceScores(),
        table=lambda head: NameTable(rows=name_rows(*named)),
    )


def masked(
    table: Callable[[Any], NameTable],
    activation: str | None,
    head: type = MaskedTokens,
    read_settings: ReadSettings = lambda reader: {},
) -> HeadMap:
    """Return a masked-language-modelling head.

    Args:
        table: Tensor names of the head.
        activation: Key of the activation. If None, `read_settings` reads it, or else it is GELU.
        head: Class of the head's configuration.
        read_settings: Reads settings that the family fixes or names differently.
    """

    def read(reader: ConfigReader, model: ModelConfig) -> MaskedTokens | Pretraining:
        settings = read_settings(reader)
        if "activation" not in settings:
            settings["activation"] = read_activation(reader, activation) if activation else "gelu"
        tied = reader.flag("tie_word_embeddings", True)
        config: MaskedTokens | Pretraining = head(**({"norm_eps": model.embedding.norm_eps, "tied": tied} | settings))
        return config

    return HeadMap(head=head, read=read, write=lambda head: {"tie_word_embeddings": head.tied}, table=table)


def masked_table(
    head: MaskedTokens | Pretraining, *, lm: str, dense: str, norm: str, tokens: str, module: str
) -> NameTable:
    """Return the names of a masked-language-modelling head, whose decoder may be tied to the embedding.

    The bias of the decoder has two names. If the decoder is not tied, only the one with "decoder" in it is read.

    Args:
        lm: Prefix of the head's names.
        dense: Name of the dense layer, after the prefix.
        norm: Name of the norm, after the prefix.
        tokens: Name of the token embedding.
        module: Our name of the head.
    """
    named = name_rows((lm + dense, f"{module}.dense"), (lm + norm, f"{module}.norm"))
    weight, bias = f"{lm}decoder.weight", f"{lm}decoder.bias"
    if head.tied:
        bias_row = NameRow((f"{lm}bias",), f"{module}.decoder.bias")
        return NameTable(rows=(*named, bias_row), tied={weight: f"{tokens}.weight", bias: f"{lm}bias"})
    return NameTable(rows=(*named, NameRow((f"{lm}decoder",), f"{module}.decoder")), copied={f"{lm}bias": bias})


def classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    dropout_first: bool = False,
    read_settings: ReadSettings = lambda reader: {},
    prefix: str | None = None,
) -> HeadMap:
    """Return a sequence classification head.

    Args:
        key: Key of the dropout. If None, there is no dropout.
        default: Dropout if the key is missing. If None, that of the model.
        dropout_first: Whether the same dropout is applied before the dense layer too.
        read_settings: Reads settings that the family fixes or names differently.
        prefix: Prefix of the body's tensor names. If None, that of the family.
    """

    def read(reader: ConfigReader, model: ModelConfig) -> Classes:
        dropout = _dropout(reader, model, key, default) if key else 0.0
        first = {"dropout_first": dropout} if dropout_first else {}
        settings: Arguments = {"dropout": dropout, **first} | read_settings(reader)
        head = Classes(labels=reader.labels(), problem_type=reader.problem_type(), **settings)
        return _with_cross_encoder_keys(reader, head)

    def write(head: Classes) -> dict[str, object]:
        names = {activation: name for name, activation in SCORE_ACTIVATIONS.items()}
        cross_encoder = (
            {} if head.score_activation is None else {CROSS_ENCODER: {ACTIVATION: names[head.score_activation]}}
        )
        values = _write_labels(head) | {"problem_type": head.problem_type} | ({key: head.dropout} if key else {})
        return values | cross_encoder

    return HeadMap(
        head=Classes, read=read, write=write, table=lambda head: NameTable(rows=name_rows(*named)), prefix=prefix
    )


def token_classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    read_settings: ReadSettings = lambda reader: {},
    prefix: str | None = None,
    encoder_only: bool = False,
) -> HeadMap:
    """Return a token classification head; arguments are those of `classes`."""

    def read(reader: ConfigReader, model: ModelConfig) -> TokenClasses:
        settings: Arguments = {"dropout": _dropout(reader, model, key, default)} | read_settings(reader)
        return TokenClasses(labels=reader.labels(), **settings)

    return HeadMap(
        head=TokenClasses,
        read=read,
        write=lambda head: _write_labels(head) | ({key: head.dropout} if key else {}),
        table=lambda head: NameTable(rows=name_rows(*named)),
        prefix=prefix,
        encoder_only=encoder_only,
    )


def choice(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    read_settings: ReadSettings = lambda reader: {},
) -> HeadMap:
    """Return a multiple choice head; arguments are those of `classes`."""

    def read(reader: ConfigReader, model: ModelConfig) -> Choice:
        settings: Arguments = {"dropout": _dropout(reader, model, key, default)} | read_settings(reader)
        return Choice(**settings)

    return HeadMap(
        head=Choice,
        read=read,
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: NameTable(rows=name_rows(*named)),
    )


def span(
    *named: Named, key: str | None = None, default: float | None = None, read_settings: ReadSettings = lambda reader: {}
) -> HeadMap:
    """Return a head for extractive question answering; arguments are those of `classes`."""

    def read(reader: ConfigReader, model: ModelConfig) -> SpanScores:
        settings: Arguments = {"dropout": reader.number(key, default) if key else 0.0} | read_settings(reader)
        return SpanScores(**settings)

    return HeadMap(
        head=SpanScores,
        read=read,
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: NameTable(rows=name_rows(*(named or (("qa_outputs", "head.out"),)))),
    )


def with_settings(head_map: HeadMap, write: Callable[[Any], dict[str, object]]) -> HeadMap:
    """Return a head map that writes more settings to config.json."""
    return replace(head_map, write=lambda head: head_map.write(head) | write(head))


def vocabulary(
    head: type, *, lm: str, tokens: str, module: str = "head", default_tied: bool = True, **fixed: object
) -> HeadMap:
    """Return a head of one linear layer over the vocabulary.

    Args:
        head: Class of the head's configuration.
        lm: Name of the layer.
        tokens: Name of the token embedding.
        module: Our name of the head.
        default_tied: Whether the layer is tied to the embedding, if config.json does not say.
        fixed: Other settings of the head.
    """

    def read(reader: ConfigReader, model: ModelConfig) -> Head:
        config: Head = head(tied=reader.flag("tie_word_embeddings", default_tied), **fixed)
        return config

    def table(config: NextToken | NextTokenAndChoice | PermutedTokens | MaskedTokens) -> NameTable:
        if not config.tied:
            return NameTable(rows=name_rows((lm, f"{module}.decoder")))
        bias = name_rows((f"{lm}.bias", f"{module}.decoder.bias")) if config.bias else ()
        return NameTable(rows=bias, tied={f"{lm}.weight": f"{tokens}.weight"})

    return HeadMap(head=head, read=read, write=lambda config: {"tie_word_embeddings": config.tied}, table=table)


def _dropout(reader: ConfigReader, model: ModelConfig, key: str | None, default: float | None) -> float:
    """Read the dropout of a head. Without a key or a value, it is that of the model."""
    dropout: float | None = reader.number(key, default) if key else None
    return model.embedding.dropout if dropout is None else dropout


def _write_labels(head: Classes | TokenClasses) -> dict[str, object]:
    """Write the labels of a head."""
    return {
        "id2label": {str(index): name for index, name in enumerate(head.labels)},
        "label2id": {name: index for index, name in enumerate(head.labels)},
    }

"""The published heads that families share, and how their settings are called there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heedful.families.config_reader import ConfigReader, read_activation
from heedful.families.family import HeadMap
from heedful.families.names import NameMap, NameTable, name_maps
from heedful.model.config import (
    Choice,
    Classes,
    MaskedTokens,
    ModelConfig,
    NextSentence,
    Pooled,
    Pretraining,
    Span,
    TokenClasses,
)

Named = tuple[Any, ...]  # (their name, our name)
Fixed = Callable[[ConfigReader], dict[str, Any]]  # settings of a head that a family fixes, or reads by keys of its own


def bare() -> HeadMap:
    """The model alone."""
    return HeadMap(head=type(None), read=lambda keys, model: None)


def pooled(*named: Named) -> HeadMap:
    """The model with its pooler."""
    return HeadMap(head=Pooled, read=lambda keys, model: Pooled(), table=lambda head: NameTable(rows=name_maps(*named)))


def next_sentence(*named: Named) -> HeadMap:
    """Whether the second segment follows."""
    return HeadMap(
        head=NextSentence, read=lambda keys, model: NextSentence(), table=lambda head: NameTable(rows=name_maps(*named))
    )


def masked(
    table: Callable[[Any], NameTable],
    activation: str | None,
    head: type = MaskedTokens,
    fixed: Fixed = lambda keys: {},
) -> HeadMap:
    """A vocabulary head; `activation` is the key that names its activation, None: always GELU."""

    def read(keys: ConfigReader, model: ModelConfig) -> MaskedTokens | Pretraining:
        more = fixed(keys)
        if "activation" not in more:
            more["activation"] = read_activation(keys, activation) if activation else "gelu"
        tied = keys.flag("tie_word_embeddings", True)
        found: MaskedTokens | Pretraining = head(**({"norm_eps": model.embedding.norm_eps, "tied": tied} | more))
        return found

    return HeadMap(head=head, read=read, write=lambda head: {"tie_word_embeddings": head.tied}, table=table)


def masked_table(
    head: MaskedTokens | Pretraining, *, lm: str, dense: str, norm: str, tokens: str, ours: str
) -> NameTable:
    """Names of a vocabulary head whose decoder is tied to the embedding, or not.

    Its bias has two names; untied, only the decoder's own is read.
    """
    named = name_maps((lm + dense, f"{ours}.dense"), (lm + norm, f"{ours}.norm"))
    weight, bias = f"{lm}decoder.weight", f"{lm}decoder.bias"
    if head.tied:
        bias_row = NameMap((f"{lm}bias",), f"{ours}.decoder.bias")
        return NameTable(rows=(*named, bias_row), tied={weight: f"{tokens}.weight", bias: f"{lm}bias"})
    return NameTable(rows=(*named, NameMap((f"{lm}decoder",), f"{ours}.decoder")), copied={f"{lm}bias": bias})


def classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    dropout_first: bool = False,
    fixed: Fixed = lambda keys: {},
    prefix: str | None = None,
) -> HeadMap:
    """Labels for sequences; `dropout_first`: the same dropout before the dense layer too; key None: no dropout."""

    def read(keys: ConfigReader, model: ModelConfig) -> Classes:
        dropout = _dropout(keys, model, key, default) if key else 0.0
        given = _settings(fixed(keys), dropout=dropout, **({"dropout_first": dropout} if dropout_first else {}))
        return Classes(labels=keys.labels(), problem_type=keys.problem_type(), **given)

    def write(head: Classes) -> dict[str, Any]:
        return _labels(head) | {"problem_type": head.problem_type} | ({key: head.dropout} if key else {})

    return HeadMap(
        head=Classes, read=read, write=write, table=lambda head: NameTable(rows=name_maps(*named)), prefix=prefix
    )


def token_classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    fixed: Fixed = lambda keys: {},
    **more: Any,
) -> HeadMap:
    """Labels for rows."""

    def read(keys: ConfigReader, model: ModelConfig) -> TokenClasses:
        return TokenClasses(labels=keys.labels(), **_settings(fixed(keys), dropout=_dropout(keys, model, key, default)))

    return HeadMap(
        head=TokenClasses,
        read=read,
        write=lambda head: _labels(head) | ({key: head.dropout} if key else {}),
        table=lambda head: NameTable(rows=name_maps(*named)),
        **more,
    )


def choice(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    fixed: Fixed = lambda keys: {},
) -> HeadMap:
    """One score for each candidate."""
    return HeadMap(
        head=Choice,
        read=lambda keys, model: Choice(**_settings(fixed(keys), dropout=_dropout(keys, model, key, default))),
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: NameTable(rows=name_maps(*named)),
    )


def span(
    *named: Named, key: str | None = None, default: float | None = None, fixed: Fixed = lambda keys: {}
) -> HeadMap:
    """Start and end of an answer."""
    return HeadMap(
        head=Span,
        read=lambda keys, model: Span(**_settings(fixed(keys), dropout=keys.number(key, default) if key else 0.0)),
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: NameTable(rows=name_maps(*(named or (("qa_outputs", "head.out"),)))),
    )


def with_settings(entry: HeadMap, said: Callable[[Any], dict[str, Any]]) -> HeadMap:
    """The same, which writes more of its settings to their config.json."""
    return replace(entry, write=lambda head: entry.write(head) | said(head))


def vocabulary(head: type, *, lm: str, tokens: str, ours: str = "head", **fixed: Any) -> HeadMap:
    """One linear layer over the vocabulary, tied to the embedding or not."""

    def read(keys: ConfigReader, model: ModelConfig) -> Any:
        return head(tied=keys.flag("tie_word_embeddings", True), **fixed)

    def table(given: Any) -> NameTable:
        if not given.tied:
            return NameTable(rows=name_maps((lm, f"{ours}.decoder")))
        bias = name_maps((f"{lm}.bias", f"{ours}.decoder.bias")) if given.bias else ()
        return NameTable(rows=bias, tied={f"{lm}.weight": f"{tokens}.weight"})

    return HeadMap(head=head, read=read, write=lambda given: {"tie_word_embeddings": given.tied}, table=table)


def _settings(fixed: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """What a family fixes comes before what is usual."""
    return usual | fixed


def _dropout(keys: ConfigReader, model: ModelConfig, key: str | None, default: float | None) -> float:
    """The task's own dropout; where it is not given, the model's."""
    given: float | None = keys.number(key, default) if key else None
    return model.embedding.dropout if given is None else given


def _labels(head: Classes | TokenClasses) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(head.labels)},
        "label2id": {name: number for number, name in enumerate(head.labels)},
    }

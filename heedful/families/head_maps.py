"""The published heads that families share, and how their settings are called there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heedful.families.config_reader import Keys, read_activation
from heedful.families.family import HeadEntry
from heedful.families.names import Row, Table, rows
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
Fixed = Callable[[Keys], dict[str, Any]]  # settings of a head that a family fixes, or reads by keys of its own


def bare() -> HeadEntry:
    """The model alone."""
    return HeadEntry(head=type(None), read=lambda keys, model: None)


def pooled(*named: Named) -> HeadEntry:
    """The model with its pooler."""
    return HeadEntry(head=Pooled, read=lambda keys, model: Pooled(), table=lambda head: Table(rows=rows(*named)))


def next_sentence(*named: Named) -> HeadEntry:
    """Whether the second segment follows."""
    return HeadEntry(
        head=NextSentence, read=lambda keys, model: NextSentence(), table=lambda head: Table(rows=rows(*named))
    )


def masked(
    table: Callable[[Any], Table],
    activation: str | None,
    head: type = MaskedTokens,
    fixed: Fixed = lambda keys: {},
) -> HeadEntry:
    """A vocabulary head; `activation` is the key that names its activation, None: always GELU."""

    def read(keys: Keys, model: ModelConfig) -> MaskedTokens | Pretraining:
        more = fixed(keys)
        if "activation" not in more:
            more["activation"] = read_activation(keys, activation) if activation else "gelu"
        tied = keys.flag("tie_word_embeddings", True)
        found: MaskedTokens | Pretraining = head(**({"norm_eps": model.embedding.norm_eps, "tied": tied} | more))
        return found

    return HeadEntry(head=head, read=read, write=lambda head: {"tie_word_embeddings": head.tied}, table=table)


def masked_table(head: MaskedTokens | Pretraining, *, lm: str, dense: str, norm: str, tokens: str, ours: str) -> Table:
    """Names of a vocabulary head whose decoder is tied to the embedding, or not.

    Its bias has two names; untied, only the decoder's own is read.
    """
    named = rows((lm + dense, f"{ours}.dense"), (lm + norm, f"{ours}.norm"))
    weight, bias = f"{lm}decoder.weight", f"{lm}decoder.bias"
    if head.tied:
        bias_row = Row((f"{lm}bias",), f"{ours}.decoder.bias")
        return Table(rows=(*named, bias_row), tied={weight: f"{tokens}.weight", bias: f"{lm}bias"})
    return Table(rows=(*named, Row((f"{lm}decoder",), f"{ours}.decoder")), copied={f"{lm}bias": bias})


def classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    dropout_first: bool = False,
    fixed: Fixed = lambda keys: {},
    prefix: str | None = None,
) -> HeadEntry:
    """Labels for sequences; `dropout_first`: the same dropout before the dense layer too; key None: no dropout."""

    def read(keys: Keys, model: ModelConfig) -> Classes:
        dropout = _dropout(keys, model, key, default) if key else 0.0
        given = _settings(fixed(keys), dropout=dropout, **({"dropout_first": dropout} if dropout_first else {}))
        return Classes(labels=keys.labels(), problem_type=keys.problem_type(), **given)

    def write(head: Classes) -> dict[str, Any]:
        return _labels(head) | {"problem_type": head.problem_type} | ({key: head.dropout} if key else {})

    return HeadEntry(head=Classes, read=read, write=write, table=lambda head: Table(rows=rows(*named)), prefix=prefix)


def token_classes(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    fixed: Fixed = lambda keys: {},
    **more: Any,
) -> HeadEntry:
    """Labels for rows."""

    def read(keys: Keys, model: ModelConfig) -> TokenClasses:
        return TokenClasses(labels=keys.labels(), **_settings(fixed(keys), dropout=_dropout(keys, model, key, default)))

    return HeadEntry(
        head=TokenClasses,
        read=read,
        write=lambda head: _labels(head) | ({key: head.dropout} if key else {}),
        table=lambda head: Table(rows=rows(*named)),
        **more,
    )


def choice(
    *named: Named,
    key: str | None = "classifier_dropout",
    default: float | None = None,
    fixed: Fixed = lambda keys: {},
) -> HeadEntry:
    """One score for each candidate."""
    return HeadEntry(
        head=Choice,
        read=lambda keys, model: Choice(**_settings(fixed(keys), dropout=_dropout(keys, model, key, default))),
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: Table(rows=rows(*named)),
    )


def span(
    *named: Named, key: str | None = None, default: float | None = None, fixed: Fixed = lambda keys: {}
) -> HeadEntry:
    """Start and end of an answer."""
    return HeadEntry(
        head=Span,
        read=lambda keys, model: Span(**_settings(fixed(keys), dropout=keys.number(key, default) if key else 0.0)),
        write=lambda head: {key: head.dropout} if key else {},
        table=lambda head: Table(rows=rows(*(named or (("qa_outputs", "head.out"),)))),
    )


def saying(entry: HeadEntry, said: Callable[[Any], dict[str, Any]]) -> HeadEntry:
    """The same, which writes more of its settings to their config.json."""
    return replace(entry, write=lambda head: entry.write(head) | said(head))


def vocabulary(head: type, *, lm: str, tokens: str, ours: str = "head", **fixed: Any) -> HeadEntry:
    """One linear layer over the vocabulary, tied to the embedding or not."""

    def read(keys: Keys, model: ModelConfig) -> Any:
        return head(tied=keys.flag("tie_word_embeddings", True), **fixed)

    def table(given: Any) -> Table:
        if not given.tied:
            return Table(rows=rows((lm, f"{ours}.decoder")))
        bias = rows((f"{lm}.bias", f"{ours}.decoder.bias")) if given.bias else ()
        return Table(rows=bias, tied={f"{lm}.weight": f"{tokens}.weight"})

    return HeadEntry(head=head, read=read, write=lambda given: {"tie_word_embeddings": given.tied}, table=table)


def _settings(fixed: dict[str, Any], **usual: Any) -> dict[str, Any]:
    """What a family fixes comes before what is usual."""
    return usual | fixed


def _dropout(keys: Keys, model: ModelConfig, key: str | None, default: float | None) -> float:
    """The task's own dropout; where it is not given, the model's."""
    given: float | None = keys.number(key, default) if key else None
    return model.embedding.dropout if given is None else given


def _labels(head: Classes | TokenClasses) -> dict[str, Any]:
    return {
        "id2label": {str(number): name for number, name in enumerate(head.labels)},
        "label2id": {name: number for number, name in enumerate(head.labels)},
    }

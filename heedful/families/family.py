"""A family as data: how its config.json reads as ours, and the table of its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from heedful.errors import HeedfulError
from heedful.families.config_reader import ConfigReader
from heedful.families.names import NameTable, claims
from heedful.model.config import Head, ModelConfig, SentenceEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMap:
    """One of their architectures: our head, and how its settings and tensors are called there."""

    head: type
    read: Callable[[ConfigReader, ModelConfig], Head | None]
    write: Callable[[Any], dict[str, Any]] = lambda head: {}
    table: Callable[[Any], NameTable] = lambda head: NameTable(rows=())
    encoder_only: bool = False  # of a family with encoder and decoder: it has no decoder
    prefix: str | None = None  # before the names of the body, where it is not the family's
    name: str | None = None  # our name for it, where the head's kind is not enough

    @property
    def kind(self) -> str:
        """Our name for it."""
        if self.name or self.head is type(None):
            return self.name or "none"
        return next(str(each.default) for each in fields(self.head) if each.name == "kind")

    def used_config(self, model: ModelConfig) -> ModelConfig:
        """What it uses of the whole model."""
        return replace(model, decoder=None, start=None) if self.encoder_only else model


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model_type: how its config.json reads and is written, what its tensors are called, its published sizes."""

    prefix: str  # before the names of the body, except in folders of the bare model
    read: Callable[[ConfigReader], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    body: Callable[[ModelConfig], NameTable]
    heads: Mapping[str, HeadMap]  # by their architecture; the first is the bare model
    ignored_keys: frozenset[str] = frozenset()
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # published name -> config.json
    sentencepiece_format: Mapping[str, Any] | None = (
        None  # what its SentencePiece models do not say (see tokenizer/pieces.py)
    )
    special_token_ids: Mapping[str, str] = field(
        default_factory=dict
    )  # ids that a fresh config.json names -> what they are for
    untied_tensors: Callable[[Mapping[str, Any]], tuple[str, ...]] = (
        lambda values: ()
    )  # two tied tensors that may yet differ

    @property
    def bare(self) -> str:
        """Their name of the model without a task."""
        return next(iter(self.heads))

    def architecture(self, model: ModelConfig, head: Head | None) -> str:
        """Their name of the model with that head; sentence embeddings are read off the model without a task."""
        none = isinstance(head, SentenceEmbedding) or head is None
        fitting = [name for name, entry in self.heads.items() if entry.head is (type(None) if none else type(head))]
        if none and not fitting:
            return self.bare  # it has a pooler
        if not fitting:
            assert head is not None
            raise HeedfulError(f'this family has no published head "{head.kind}"; it has {", ".join(self.kinds())}')
        if any(entry.encoder_only for entry in self.heads.values()):
            fitting = [name for name in fitting if self.heads[name].encoder_only == (model.decoder is None)]
        if not fitting:
            assert head is not None
            raise HeedfulError(f'the head "{head.kind}" of this family reads the decoder, and this model has none')
        return fitting[0]

    def ids(self, special: object) -> dict[str, int]:
        """The special tokens of a fresh model, which transformers would take for the published ones' else."""
        found = {key: getattr(special, role) for key, role in self.special_token_ids.items()}
        return {key: id for key, id in found.items() if id is not None}

    def kinds(self) -> dict[str, str]:
        """Our name of each head -> their architecture."""
        return {entry.kind: name for name, entry in self.heads.items()}

    def table(self, model: ModelConfig, head: Head | None) -> NameTable:
        """The names of the body and of that head, as in a folder with a task."""
        body = self.body(model)
        if head is None or (isinstance(head, SentenceEmbedding) and not head.keeps_pooler):
            return body
        return body.joined(self.heads[self.architecture(model, head)].table(head))

    def inner_name(self, name: str, bare: bool) -> str:
        """The name that the table has for a name in a folder; bare: none of its names has the family's prefix."""
        for entry in self.heads.values():
            if entry.prefix and name.startswith(entry.prefix):
                return name.removeprefix(entry.prefix)
        return self.prefix + name if bare else name

    def outer_names(self, model: ModelConfig, head: Head | None, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors by the names that they have in a folder of that model with that head."""
        architecture = self.architecture(model, head)
        if architecture == self.bare:
            return {name.removeprefix(self.prefix): tensor for name, tensor in theirs.items()}
        prefix, body = self.heads[architecture].prefix or "", self.body(model)
        return {prefix + name if claims(body, name) else name: tensor for name, tensor in theirs.items()}

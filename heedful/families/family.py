"""A family as data: how its config.json is read as ours, and the tables of its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from heedful.errors import ModelError
from heedful.families.config_reader import ConfigReader
from heedful.families.names import NameTable, claims, name_rows
from heedful.model.config import Head, ModelConfig, SentenceEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadMap:
    """One HF architecture: our head, and how its settings and tensors are named there."""

    head: type
    read: Callable[[ConfigReader, ModelConfig], Head | None]
    write: Callable[[Any], dict[str, object]] = lambda head: {}
    table: Callable[[Any], NameTable] = lambda head: NameTable(rows=())
    encoder_only: bool = False  # in a family with encoder and decoder: the architecture has no decoder
    prefix: str | None = None  # before the names of the body; None: the family's
    name: str | None = None  # our name for it; None: the head's kind

    @property
    def kind(self) -> str:
        """Our name for the architecture."""
        if self.name or self.head is type(None):
            return self.name or "none"
        return next(str(head_field.default) for head_field in fields(self.head) if head_field.name == "kind")

    def used_config(self, model: ModelConfig) -> ModelConfig:
        """Return the part of the model's configuration that the architecture uses."""
        return replace(model, decoder=None, start=None) if self.encoder_only else model


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model_type: how its config.json is read and written, its tensor names, and its published sizes."""

    prefix: str  # before the names of the body, except in folders of the bare model
    read: Callable[[ConfigReader], ModelConfig]
    write: Callable[[ModelConfig], dict[str, object]]
    body: Callable[[ModelConfig], NameTable]
    heads: Mapping[str, HeadMap]  # by HF architecture; the first is the bare model
    needs_decoder: bool = False  # no architecture has the encoder alone
    ignored_keys: frozenset[str] = frozenset()  # of config.json, that do not change the outputs
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # published name -> config.json
    tokenizer_defaults: Mapping[str, object] | None = (
        None  # what SentencePiece models lack, or vocab.txt (with model: wordpiece)
    )
    generation_defaults: Mapping[str, object] = field(default_factory=dict)  # where a folder has no generation settings
    special_token_ids: Mapping[str, str] = field(default_factory=dict)  # keys of a fresh config.json -> their role
    # names of two tensors that a config.json may tie although they differ
    untied_tensors: Callable[[Mapping[str, object]], tuple[str, ...]] = lambda values: ()

    @property
    def bare(self) -> str:
        """The HF architecture without a task."""
        return next(iter(self.heads))

    def architecture(self, model: ModelConfig, head: Head | None) -> str:
        """Return the HF architecture of a model with a head; sentence embeddings have the bare model's.

        Raises:
            ModelError: If the family publishes no such head, or the head needs a decoder that the model lacks.
        """
        bare = isinstance(head, SentenceEmbedding) or head is None
        wanted = type(None) if bare else type(head)
        fitting = [name for name, head_map in self.heads.items() if head_map.head is wanted]
        if bare and not fitting:
            return self.bare  # it has a pooler
        if not fitting:
            assert head is not None
            raise ModelError(f'this family has no published head "{head.kind}"; it has {", ".join(self.kinds())}')
        if any(head_map.encoder_only for head_map in self.heads.values()):
            fitting = [name for name in fitting if self.heads[name].encoder_only == (model.decoder is None)]
        if not fitting:
            assert head is not None
            raise ModelError(f'the head "{head.kind}" of this family reads the decoder, but this model has none')
        return fitting[0]

    def fresh_token_ids(self, special: object) -> dict[str, int]:
        """Return the special token ids of a fresh config.json; transformers takes the published ones for missing keys.

        Args:
            special: The tokenizer's special ids.
        """
        ids = {key: getattr(special, role) for key, role in self.special_token_ids.items()}
        return {key: id for key, id in ids.items() if id is not None}

    def kinds(self) -> dict[str, str]:
        """Return our name of each head -> its HF architecture."""
        return {head_map.kind: name for name, head_map in self.heads.items()}

    def table(self, model: ModelConfig, head: Head | None) -> NameTable:
        """Return the names of body and head, as in a folder with a task."""
        body = self.body(model)
        if isinstance(head, SentenceEmbedding) and head.dense and not claims(body, "head.dense.0.weight"):
            body = body.merged_with(NameTable(rows=name_rows(("head.dense.{}", "head.dense.{}"))))
        if head is None or (isinstance(head, SentenceEmbedding) and not head.keeps_pooler):
            return body
        return body.merged_with(self.heads[self.architecture(model, head)].table(head))

    def is_bare(self, names: Iterable[str]) -> bool:
        """Return whether no name in a folder has the prefix of the family or of one of its architectures."""
        prefixes = (self.prefix, *(head_map.prefix for head_map in self.heads.values() if head_map.prefix))
        return not any(name.startswith(prefixes) for name in names)

    def table_name(self, name: str, bare: bool) -> str:
        """Return the table's name for a name in a folder; `bare`: as `is_bare` says of the folder."""
        for head_map in self.heads.values():
            if head_map.prefix and name.startswith(head_map.prefix):
                return self.prefix + name.removeprefix(head_map.prefix)
        return self.prefix + name if bare else name

    def folder_names(self, model: ModelConfig, head: Head | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the table's names under the names that they have in a folder."""
        architecture = self.architecture(model, head)
        if architecture == self.bare:
            dtype = next(iter(tensors.values())).dtype
            constants = {name: tensor.to(dtype) for name, tensor in self.body(model).constants.items()}
            return {name.removeprefix(self.prefix): tensor for name, tensor in {**tensors, **constants}.items()}
        prefix, body = self.heads[architecture].prefix, self.body(model)
        if prefix is None:
            return dict(tensors)
        return {
            prefix + name.removeprefix(self.prefix) if claims(body, name) else name: tensor
            for name, tensor in tensors.items()
        }

"""A family as data: functions that read and write its config.json, and tables of its tensor names.

Each module of `families` defines a `Family`, and `checkpoint` calls it.
"""

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
    """One HF architecture: our head for it, its settings in config.json, and its tensor names."""

    head: type  # class of our head's configuration, or NoneType for no head
    read: Callable[[ConfigReader, ModelConfig], Head | None]  # reads the head's configuration
    write: Callable[[Any], dict[str, object]] = lambda head: {}  # values of config.json for the head
    table: Callable[[Any], NameTable] = lambda head: NameTable(rows=())  # names of the head's tensors
    encoder_only: bool = False  # whether the architecture has no decoder, although other ones of the family have one
    prefix: str | None = None  # prefix of the body's tensor names (default: the family's)
    name: str | None = None  # our name for the architecture (default: the head's kind)

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
    """A model_type: reading and writing of its config.json, its tensor names, and its published sizes."""

    prefix: str  # prefix of the body's tensor names, which folders of the bare model lack
    read: Callable[[ConfigReader], ModelConfig]
    write: Callable[[ModelConfig], dict[str, object]]  # values of config.json
    body: Callable[[ModelConfig], NameTable]  # names of the tensors of the model without its head
    heads: Mapping[str, HeadMap]  # by HF architecture; the first is the bare model
    needs_decoder: bool = False  # whether every architecture has the decoder
    ignored_keys: frozenset[str] = frozenset()  # keys of config.json that do not change the outputs
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # published name -> config.json
    # settings that the file of a SentencePiece model lacks, or a vocab.txt (then with "model": "wordpiece")
    tokenizer_defaults: Mapping[str, object] | None = None
    generation_defaults: Mapping[str, object] = field(default_factory=dict)  # for folders without generation settings
    special_token_ids: Mapping[str, str] = field(default_factory=dict)  # key of config.json -> role of its token
    # values of config.json -> names of the two tensors that it ties although they differ, or ()
    untied_tensors: Callable[[Mapping[str, object]], tuple[str, ...]] = lambda values: ()

    @property
    def bare(self) -> str:
        """The HF architecture without a task."""
        return next(iter(self.heads))

    def architecture(self, model: ModelConfig, head: Head | None) -> str:
        """Return the HF architecture of a model with a head. Sentence embeddings have that of the bare model.

        Raises:
            ModelError: If the family publishes no such head, or the head needs a decoder that the model lacks.
        """
        is_bare = isinstance(head, SentenceEmbedding) or head is None
        head_type = type(None) if is_bare else type(head)
        names = [name for name, head_map in self.heads.items() if head_map.head is head_type]
        if is_bare and not names:
            return self.bare  # the bare model of this family has a pooler
        if not names:
            assert head is not None
            raise ModelError(f'this family has no published head "{head.kind}"; it has {", ".join(self.kinds())}')
        if any(head_map.encoder_only for head_map in self.heads.values()):
            names = [name for name in names if self.heads[name].encoder_only == (model.decoder is None)]
        if not names:
            assert head is not None
            raise ModelError(f'the head "{head.kind}" of this family reads the decoder, but this model has none')
        return names[0]

    def fresh_token_ids(self, special: object) -> dict[str, int]:
        """Return the special token ids for a new config.json; without them, transformers uses the published ids.

        Args:
            special: Special token ids of the tokenizer, by role.
        """
        ids = {key: getattr(special, role) for key, role in self.special_token_ids.items()}
        return {key: id for key, id in ids.items() if id is not None}

    def kinds(self) -> dict[str, str]:
        """Return the HF architectures by our names for them."""
        return {head_map.kind: name for name, head_map in self.heads.items()}

    def table(self, model: ModelConfig, head: Head | None) -> NameTable:
        """Return the name table of a model with a head: the names of the body and of the head."""
        body = self.body(model)
        # the tables of Heedful's own formats claim every name, also those of the head
        if isinstance(head, SentenceEmbedding) and head.dense and not claims(body, "head.dense.0.weight"):
            body = body.merged_with(NameTable(rows=name_rows(("head.dense.{}", "head.dense.{}"))))
        if head is None or (isinstance(head, SentenceEmbedding) and not head.keeps_pooler):
            return body
        return body.merged_with(self.heads[self.architecture(model, head)].table(head))

    def is_bare(self, names: Iterable[str]) -> bool:
        """Return whether these are the tensor names of a bare model: none has a prefix of this family."""
        prefixes = (self.prefix, *(head_map.prefix for head_map in self.heads.values() if head_map.prefix))
        return not any(name.startswith(prefixes) for name in names)

    def table_name(self, name: str, bare: bool) -> str:
        """Return the name in the table for a tensor name in a folder.

        Args:
            bare: Whether it is the folder of a bare model.
        """
        for head_map in self.heads.values():
            if head_map.prefix and name.startswith(head_map.prefix):
                return self.prefix + name.removeprefix(head_map.prefix)
        return self.prefix + name if bare else name

    def folder_names(self, model: ModelConfig, head: Head | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names in a folder.

        Args:
            tensors: Tensors by their names in the table.
        """
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

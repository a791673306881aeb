"""Writes a model folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from heedful.checkpoint import sentence_transformers
from heedful.checkpoint.atomic_folder import atomic_folder
from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.config import write_config
from heedful.checkpoint.safetensors_files import WEIGHTS
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.families.names import to_hf_names
from heedful.model.config import SentenceEmbedding
from heedful.nn.inference_linear import Int8Linear

NOTES = "heedful.json"  # what transformers has no place for: the tokenizer's fingerprint, and what FACTS are
FACTS = ("thresholds", "label_scaling", "text_suffix", "pairs")  # of Loaded
UNSET: tuple[Any, ...] = ({}, "", None)


def save(loaded: ModelBundle, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write a Hugging Face folder that transformers (and, for sentence embeddings, sentence-transformers) loads.

    It appears whole or not at all. A model_type of "heedful" is read by Heedful alone. A model that answers in int8 is
    refused: its weights are rounded.
    """
    if any(isinstance(each, Int8Linear) for each in loaded.modules()):
        raise HeedfulError(f"{loaded.source} answers in int8, its weights are rounded: load it anew, and save that")
    config, family = loaded.config, FAMILIES[loaded.config.family]
    table = family.table(config.model, config.head)
    theirs = to_hf_names(table, {name: tensor.detach() for name, tensor in loaded.named_tensors().items()})
    theirs = family.outer_names(config.model, config.head, theirs)
    dtype = next(iter(theirs.values())).dtype
    with atomic_folder(Path(folder), overwrite=overwrite) as temporary:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in theirs.items()},
            temporary / WEIGHTS,
            metadata={"format": "pt"},
        )
        ids = {} if config.hf_config or loaded.tokenizer is None else family.ids(loaded.tokenizer.special)
        written = ids | write_config(config) | {"dtype": str(dtype).removeprefix("torch.")}
        _write_json(temporary / "config.json", written)
        notes: dict[str, Any] = {}
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(temporary, types=config.model.uses_token_types)
            notes["tokenizer"] = loaded.tokenizer.fingerprint
        if isinstance(config.head, SentenceEmbedding):
            sentence_transformers.write_modules(temporary, config.head, config.model.width)
        notes |= {name: fact for name in FACTS if (fact := getattr(loaded, name)) not in UNSET}
        _write_json(temporary / NOTES, notes)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

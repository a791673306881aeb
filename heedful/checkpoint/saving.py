"""`save`: a `ModelBundle` written as a model folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from heedful.checkpoint import sentence_transformers
from heedful.checkpoint.atomic_folder import atomic_folder
from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.config import GENERATION, write_config
from heedful.checkpoint.notes import NOTES, Notes, stage_folder
from heedful.checkpoint.safetensors_files import WEIGHTS
from heedful.errors import ModelError
from heedful.families import FAMILIES
from heedful.families.names import to_hf_names
from heedful.model.config import Pooling, SentenceEmbedding
from heedful.nn.inference_linear import Int8Linear


def save(bundle: ModelBundle, folder: str | Path, *, overwrite: bool = False, pooling: Pooling | None = None) -> None:
    """Write a model folder that transformers, and for sentence embeddings sentence-transformers, can load.

    The folder appears complete or not at all. Only Heedful reads the model_type "heedful". The early stages of a
    cascade are subfolders, which other libraries ignore.

    Args:
        overwrite: Whether to replace an existing model folder.
        pooling: Pooling of sentence embeddings, for a model with another head: the folder gets the files of
            sentence-transformers too and is loaded as a sentence encoder; `load(..., head=...)` loads the other head.

    Raises:
        ModelError: If the weights are rounded to int8; if the folder is not empty and `overwrite` is False, or is not a
            model folder; if it cannot be written.
    """
    if any(isinstance(module, Int8Linear) for module in bundle.modules()):
        raise ModelError(f"{bundle.source} computes in int8, its weights are rounded: load it again, and save that")
    config, family = bundle.config, FAMILIES[bundle.config.family]
    table = family.table(config.model, config.head)
    tensors = to_hf_names(table, {name: tensor.detach() for name, tensor in bundle.named_tensors().items()})
    tensors = family.folder_names(config.model, config.head, tensors)
    dtype = next(iter(tensors.values())).dtype
    sentence_head = config.head if pooling is None else SentenceEmbedding(pooling=(pooling,))
    dense: dict[str, Tensor] = {}
    if isinstance(config.head, SentenceEmbedding):
        dense = {name: tensors.pop(name) for name in list(tensors) if name.startswith(sentence_transformers.DENSE)}
    with atomic_folder(Path(folder), overwrite=overwrite) as temporary:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            temporary / WEIGHTS,
            metadata={"format": "pt"},
        )
        ids: dict[str, int] = {}
        if not config.hf_config and bundle.tokenizer is not None:
            ids = family.fresh_token_ids(bundle.tokenizer.special)
        values = ids | write_config(config) | {"dtype": str(dtype).removeprefix("torch.")}
        _write_json(temporary / "config.json", values)
        if config.generation is not None:
            _write_json(temporary / GENERATION, config.generation)
        if bundle.tokenizer is not None:
            bundle.tokenizer.save(temporary, types=config.model.uses_token_types)
        if isinstance(sentence_head, SentenceEmbedding):
            sentence_transformers.write_modules(temporary, sentence_head, config.model.width, dense)
        notes = Notes(
            tokenizer=None if bundle.tokenizer is None else bundle.tokenizer.fingerprint,
            thresholds=bundle.thresholds,
            label_scaling=bundle.label_scaling,
            calibration=bundle.calibration,
            text_suffix=bundle.text_suffix,
            pairs=bundle.pairs,
            stage_thresholds=tuple(stage.threshold for stage in bundle.early_stages),
            token_pruning=bundle.token_pruning,
            training_vectors=bundle.training_vectors,
        )
        for index, stage in enumerate(bundle.early_stages, start=1):
            save(stage.bundle, temporary / stage_folder(index))
        _write_json(temporary / NOTES, notes.to_dict())


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

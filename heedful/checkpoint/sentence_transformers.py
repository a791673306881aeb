"""Folders in the format of sentence-transformers 2 to 6: modules.json, its modules and prompts, and cross-encoders.

`loading.py` reads them, and `saving.py` writes them for models of sentence embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from heedful.checkpoint.folder_json import read_folder_json, read_value
from heedful.checkpoint.safetensors_files import WEIGHTS, TensorEntry, find_module_tensors
from heedful.errors import ModelError, quoted
from heedful.families.config_reader import ConfigReader
from heedful.families.head_maps import with_score_activation
from heedful.model.config import Activation, Classes, DenseLayer, Pooling, SentenceEmbedding
from heedful.tokenizer import Tokenizer
from heedful.untrusted_files import check_name

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
DENSE = "head.dense."  # prefix of our names for tensors of dense layers

_POOLINGS: dict[str, Pooling] = {  # value of pooling_mode in version 6 -> pooling
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "lasttoken": "last",
}
_FLAG = "pooling_mode_"
_FLAGS: dict[str, Pooling] = {  # key of earlier versions, without the prefix _FLAG -> pooling, in the order of vectors
    "cls_token": "first",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "lasttoken": "last",
}
_PACKAGE = "sentence_transformers.models"
_IDENTITY = "torch.nn.modules.linear.Identity"
_ACTIVATIONS: dict[str, Activation | None] = {  # activation_function of a dense layer -> activation
    _IDENTITY: None,
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
}
_VECTOR = "sentence_embedding"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Modules:
    """The modules that modules.json lists; folders are relative to it."""

    pooling: str | None = None  # folder of the Pooling module, if there is one
    dense: tuple[str, ...] = ()  # folders of the Dense modules
    normalise: bool = False  # whether there is a Normalize module


def _read_module_list(folder: Path) -> _Modules:
    """Read modules.json: a Transformer, alone or followed by one Pooling, Dense layers, and optionally Normalize."""
    path = folder / MODULES
    try:
        listed = [(str(module["type"]).rpartition(".")[2].lower(), str(module["path"])) for module in read_value(path)]
    except (TypeError, KeyError):
        raise ModelError(f"{path}: expected a list of modules with type and path") from None
    kinds = [kind for kind, _ in listed]
    dense = [name for kind, name in listed if kind == "dense"]
    encoder_kinds = ["transformer", "pooling", *["dense"] * len(dense)]
    if kinds not in (["transformer"], encoder_kinds, [*encoder_kinds, "normalize"]):
        names = ", ".join(kind if kind.isidentifier() and len(kind) < 80 else quoted(kind) for kind in kinds[:8])
        raise ModelError(
            f"{path} names the modules {names}{', ...' if len(kinds) > 8 else ''}; Heedful reads Transformer, Pooling, "
            "any number of Dense and, last, Normalize"
        )
    folders = dict(listed)
    if folders["transformer"]:
        raise ModelError(f"{path} keeps the Transformer in {quoted(folders['transformer'])}; expected beside {MODULES}")
    for kind, name in listed[1:]:
        try:
            check_name(folder, str(Path(name, "config.json")))
        except ModelError as error:
            raise ModelError(f"{path}: the path of the {kind} module cannot be used: {error}") from None
    return _Modules(pooling=folders.get("pooling"), dense=tuple(dense), normalise="normalize" in kinds)


def read_modules(folder: Path, head: object, *, keeps_pooler: bool) -> SentenceEmbedding | Classes:
    """Read the head that modules.json describes: sentence embeddings, or a cross-encoder if it lists no pooling.

    Args:
        head: Head of config.json.
        keeps_pooler: Whether the folder has a pooler.

    Raises:
        ModelError: If Heedful would compute other vectors or scores than sentence-transformers.
    """
    path, modules = folder / MODULES, _read_module_list(folder)
    if modules.pooling is None and isinstance(head, Classes):
        return _read_cross_encoder(folder, head)
    if modules.pooling is None:
        raise ModelError(
            f"{path} names a Transformer alone, which is a cross-encoder if config.json names a classifier, and it "
            "does not: expected a Pooling after it"
        )
    embedding = SentenceEmbedding(
        normalise=modules.normalise, max_length=_max_length(folder), keeps_pooler=keeps_pooler
    )
    embedding = _read_prompts(embedding, folder / PROMPTS)
    pooling, pools_prompt = _read_pooling(folder, str(Path(modules.pooling, "config.json")))
    dense = tuple(_read_dense(folder, str(Path(name, "config.json"))) for name in modules.dense)
    return replace(embedding, pooling=pooling, pools_prompt=pools_prompt, dense=dense)


def dense_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the Dense modules by our names."""
    entries = {}
    for index, name in enumerate(_read_module_list(folder).dense):
        for key, entry in find_module_tensors(folder, name).items():
            if key not in ("linear.weight", "linear.bias"):
                raise ModelError(f"{entry.file} holds {quoted(key)}; expected linear.weight and linear.bias")
            entries[f"{DENSE}{index}.{key.removeprefix('linear.')}"] = entry
    return entries


def _read_dense(folder: Path, name: str) -> DenseLayer:
    """Read the config.json of a Dense module, `name` in the folder."""
    reader = ConfigReader(read_folder_json(folder / name, folder=folder), str(folder / name))
    reader.integer("in_features")  # the shape of the weight is checked later
    reader.only("module_input_name", _VECTOR, why="dense layers are computed after the pooling")
    reader.only("module_output_name", _VECTOR, None, why="dense layers are computed after the pooling")
    reader.only("use_residual", False, why="a residual around a dense layer is not supported")
    activation = reader.choice("activation_function", {name: name for name in _ACTIVATIONS}, None)
    layer = DenseLayer(
        width=reader.integer("out_features"),
        bias=reader.flag("bias", True),
        activation="tanh" if activation is None else _ACTIVATIONS[activation],
    )
    reader.check_all_read(frozenset())
    return layer


def _read_cross_encoder(folder: Path, head: Classes) -> Classes:
    """Return the head of config.json with the activation of a cross-encoder."""
    path = folder / PROMPTS
    values = read_folder_json(path) if path.exists() else {}
    if (name := values.get("default_prompt_name")) is not None:
        raise ModelError(f"{path}: default_prompt_name is {name!r:.80}, but cross-encoders read no prompts here")
    if values.get("activation_fn") is None or head.score_activation is not None:
        return head
    return with_score_activation(head, ConfigReader({"activation_fn": values["activation_fn"]}, str(path)))


def _read_pooling(folder: Path, name: str) -> tuple[tuple[Pooling, ...], bool]:
    """Read the config.json of a Pooling module, `name` in the folder.

    Returns:
        The poolings, and whether they include the tokens of prompts.
    """
    path = folder / name
    values = read_folder_json(path, folder=folder)
    pools_prompt = values.get("include_prompt", True)
    if not isinstance(pools_prompt, bool):
        raise ModelError(f"{path}: include_prompt is {pools_prompt!r:.80}; expected true or false")
    known, names = _POOLINGS, values.get("pooling_mode")
    if names is None:
        set_flags = {name.removeprefix(_FLAG) for name, value in values.items() if name.startswith(_FLAG) and value}
        known, names = _FLAGS, [*(name for name in _FLAGS if name in set_flags), *sorted(set_flags - _FLAGS.keys())]
    elif isinstance(names, str):
        names = [names]
    is_list = isinstance(names, list) and 0 < len(names) <= len(known)
    are_known = is_list and all(isinstance(name, str) and name in known for name in names)
    if not are_known or len(set(names)) < len(names):
        raise ModelError(
            f"{path}: the pooling is {quoted(names)}; expected some of {', '.join(known)}, each of them once"
        )
    return tuple(known[name] for name in names), pools_prompt


def _read_prompts(head: SentenceEmbedding, path: Path) -> SentenceEmbedding:
    """Return the head with prompts, the name of the default prompt, the similarity, and the dimensions to return."""
    values = read_folder_json(path) if path.exists() else {}
    prompts, similarity = values.get("prompts") or {}, values.get("similarity_fn_name")
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is {prompts!r:.80}; expected an object of names and texts")
    name = values.get("default_prompt_name")
    dimensions = values.get("truncate_dim")
    if name is not None and name not in (names := list(prompts)):
        raise ModelError(f"{path}: default_prompt_name is {name!r:.80}, none of {names!r:.80}: set it to null")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise ModelError(f"{path}: truncate_dim is {dimensions!r:.80}; expected a whole number from 1, or null")
    return replace(
        head,
        prompts=tuple(prompts.items()),
        default_prompt=name,
        dimensions=dimensions,
        similarity=similarity if isinstance(similarity, str) else None,
    )


def check_case(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Raise ModelError if sentence-transformers lower-cases texts for a tokenizer that keeps their case."""
    path = folder / "sentence_bert_config.json"
    if tokenizer is None or not path.exists() or not read_folder_json(path).get("do_lower_case"):
        return
    if tokenizer.encode("Aa").ids != tokenizer.encode("aa").ids:
        raise ModelError(
            f"{path} sets do_lower_case, but the tokenizer distinguishes Aa from aa: give lower-cased texts and set "
            "it to false"
        )


def _max_length(folder: Path) -> int | None:
    """Read the maximum number of tokens in a text, or return None if no file has it."""
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).exists():
            value = read_folder_json(folder / file).get(key)
            if isinstance(value, int) and 0 < value < 1 << 20:
                return value
    return None


def write_modules(
    folder: Path, head: SentenceEmbedding, width: int, tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write modules.json and the files of its modules, in a form that every version since 2 reads.

    Only version 6 reads several poolings in another order than that of the flags.

    Args:
        width: Hidden size of the model.
        tensors: Tensors of the dense layers, by our names.
    """
    pooling: dict[str, object] = {_FLAG + name: mode in head.pooling for name, mode in _FLAGS.items()}
    if head.pooling != tuple(mode for mode in _FLAGS.values() if mode in head.pooling):
        names = {mode: name for name, mode in _POOLINGS.items()}
        pooling = {"pooling_mode": [names[mode] for mode in head.pooling]}
    if not head.pools_prompt:
        pooling["include_prompt"] = False
    dense = ["Dense"] * len(head.dense)
    kinds = ["Transformer", "Pooling", *dense, *(["Normalize"] if head.normalise else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"{_PACKAGE}.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(folder / MODULES, modules)
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **pooling})
    _write_dense(folder, head, width * len(head.pooling), tensors or {})
    if head.max_length is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": head.max_length, "do_lower_case": False})
    if head.prompts or head.similarity is not None or head.dimensions is not None:
        prompts = {
            "prompts": dict(head.prompts),
            "default_prompt_name": head.default_prompt,
            "similarity_fn_name": head.similarity,
        }
        dimensions = {} if head.dimensions is None else {"truncate_dim": head.dimensions}
        _write(folder / PROMPTS, prompts | dimensions)


def _write_dense(folder: Path, head: SentenceEmbedding, width: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the folders of the Dense modules; `width` is the dimension of the pooled vectors."""
    words = {activation: word for word, activation in _ACTIVATIONS.items()}
    for index, layer in enumerate(head.dense):
        path, prefix = folder / f"{index + 2}_Dense", f"{DENSE}{index}."
        values = {"in_features": width, "out_features": layer.width, "bias": layer.bias}
        _write(path / "config.json", {**values, "activation_function": words[layer.activation]})
        layer_tensors = {
            f"linear.{name.removeprefix(prefix)}": tensor.cpu().contiguous()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        save_file(layer_tensors, path / WEIGHTS)
        width = layer.width


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")

"""Sentence-transformers folders: modules.json, pooling, normalisation and prompts, as versions 2 to 6 write them."""

from __future__ import annotations

import json
from pathlib import Path

from heedful.checkpoint.folder_json import read_folder_json, read_value
from heedful.errors import ModelError, quoted
from heedful.model.config import Pooling, SentenceEmbedding
from heedful.tokenizer import Tokenizer
from heedful.untrusted_files import check_name

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"

_KINDS = ["transformer", "pooling"]
_POOLINGS: dict[str, Pooling] = {  # names in version 6
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "lasttoken": "last",
}
_FLAG = "pooling_mode_"
_FLAGS: dict[str, Pooling] = {  # earlier versions, with _FLAG before them: their vectors are in this order
    "cls_token": "first",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "lasttoken": "last",
}
_PACKAGE = "sentence_transformers.models"


def read_modules(folder: Path, *, keeps_pooler: bool) -> SentenceEmbedding:
    """Read the head that modules.json describes: a Transformer, one Pooling, and optionally Normalize.

    Args:
        keeps_pooler: Whether the folder has a pooler.

    Raises:
        ModelError: If Heedful would compute other vectors.
    """
    path = folder / MODULES
    modules = read_value(path)
    try:
        kinds = {str(module["type"]).rpartition(".")[2].lower(): str(module["path"]) for module in modules}
    except (TypeError, KeyError):
        raise ModelError(f"{path}: expected a list of modules with type and path") from None
    if len(kinds) != len(modules) or list(kinds) not in (_KINDS, [*_KINDS, "normalize"]):
        names = ", ".join(kind if kind.isidentifier() and len(kind) < 80 else quoted(kind) for kind in list(kinds)[:8])
        raise ModelError(
            f"{path} names the modules {names}{', ...' if len(kinds) > 8 else ''}; Heedful reads Transformer, Pooling "
            "and, last, Normalize"
        )
    if kinds["transformer"]:
        raise ModelError(f"{path} keeps the Transformer in {quoted(kinds['transformer'])}; expected beside {MODULES}")
    pooling = str(Path(kinds["pooling"], "config.json"))
    try:
        check_name(folder, pooling)
    except ModelError as error:
        raise ModelError(f"{path}: the path of the pooling module cannot be used: {error}") from None
    prompts, similarity = _prompts(folder / PROMPTS)
    return SentenceEmbedding(
        pooling=_pooling(folder, pooling),
        normalise="normalize" in kinds,
        max_length=_max_length(folder),
        keeps_pooler=keeps_pooler,
        prompts=prompts,
        similarity=similarity,
    )


def _pooling(folder: Path, name: str) -> tuple[Pooling, ...]:
    path = folder / name
    values = read_folder_json(path, folder=folder)
    if not values.get("include_prompt", True):
        raise ModelError(
            f"{path}: include_prompt is false, but Heedful cannot tell a prompt from the text after it: "
            "if your texts have none, set it to true"
        )
    known, names = _POOLINGS, values.get("pooling_mode")
    if names is None:
        on = {name.removeprefix(_FLAG) for name, value in values.items() if name.startswith(_FLAG) and value}
        known, names = _FLAGS, [*(name for name in _FLAGS if name in on), *sorted(on - _FLAGS.keys())]
    elif isinstance(names, str):
        names = [names]
    listed = isinstance(names, list) and 0 < len(names) <= len(known)
    if not listed or not all(isinstance(name, str) and name in known for name in names) or len(set(names)) < len(names):
        raise ModelError(
            f"{path}: the pooling is {quoted(names)}; expected some of {', '.join(known)}, each of them once"
        )
    return tuple(known[name] for name in names)


def _prompts(path: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Read prompts by name and the similarity, which saving keeps; refuse settings that change all vectors."""
    values = read_folder_json(path) if path.exists() else {}
    prompts, similarity = values.get("prompts") or {}, values.get("similarity_fn_name")
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{path}: prompts is {prompts!r:.80}; expected an object of names and texts")
    name, width = values.get("default_prompt_name"), values.get("truncate_dim")
    if name is not None and name not in (names := list(prompts)):
        raise ModelError(f"{path}: default_prompt_name is {name!r:.80}, none of {names!r:.80}: set it to null")
    if name is not None and (text := prompts[name]):
        raise ModelError(
            f"{path}: default_prompt_name is {name!r:.80}, so sentence-transformers puts {text!r:.80} before every "
            "text, and Heedful does not: put it before your texts, and set default_prompt_name to null"
        )
    if width is not None:
        raise ModelError(
            f"{path}: truncate_dim is {width!r:.80}, but Heedful returns whole vectors: truncate them, and set it to "
            "null"
        )
    return tuple(prompts.items()), similarity if isinstance(similarity, str) else None


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
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).exists():
            value = read_folder_json(folder / file).get(key)
            if isinstance(value, int) and 0 < value < 1 << 20:
                return value
    return None


def write_modules(folder: Path, head: SentenceEmbedding, width: int) -> None:
    """Write modules.json and what it points to, in the form that every version since 2 reads.

    Several poolings in another order than that of the flags need version 6.
    """
    pooling: dict[str, object] = {_FLAG + name: mode in head.pooling for name, mode in _FLAGS.items()}
    if head.pooling != tuple(mode for mode in _FLAGS.values() if mode in head.pooling):
        names = {mode: name for name, mode in _POOLINGS.items()}
        pooling = {"pooling_mode": [names[mode] for mode in head.pooling]}
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalise else [])]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"{_PACKAGE}.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    _write(folder / MODULES, modules)
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **pooling})
    if head.max_length is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": head.max_length, "do_lower_case": False})
    if head.prompts or head.similarity is not None:
        prompts = {"prompts": dict(head.prompts), "default_prompt_name": None, "similarity_fn_name": head.similarity}
        _write(folder / PROMPTS, prompts)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")

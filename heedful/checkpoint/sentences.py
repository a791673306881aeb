"""Sentence-transformers folders: modules.json, pooling and normalisation, as versions 2 to 6 write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from heedful.checkpoint.files import read_json, read_value
from heedful.errors import HeedfulError
from heedful.model.config import Pooling, SentenceEmbedding
from heedful.tokenizer import Tokenizer

MODULES = "modules.json"

_KINDS = ["transformer", "pooling"]
_POOLINGS: dict[str, Pooling] = {  # their names in version 6 and, with pooling_mode_ before them, earlier
    "cls": "first",
    "cls_token": "first",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "lasttoken": "last",
}


def read(folder: Path, *, keeps_pooler: bool) -> SentenceEmbedding:
    """The head that modules.json describes: a Transformer, one Pooling, and perhaps Normalize."""
    path = folder / MODULES
    modules = read_value(path)
    try:
        kinds = {str(module["type"]).rpartition(".")[2].lower(): str(module["path"]) for module in modules}
    except (TypeError, KeyError):
        raise HeedfulError(f"{path}: expected a list of modules with type and path") from None
    if len(kinds) != len(modules) or list(kinds) not in (_KINDS, [*_KINDS, "normalize"]):
        raise HeedfulError(
            f"{path} names the modules {', '.join(kinds)}; Heedful reads Transformer, Pooling and, last, Normalize"
        )
    if kinds["transformer"]:
        raise HeedfulError(f"{path} keeps the Transformer in {kinds['transformer']!r}; expected beside {MODULES}")
    where = Path(kinds["pooling"])
    if where.is_absolute() or ".." in where.parts:
        raise HeedfulError(f"{path}: the pooling module lies outside the folder, at {kinds['pooling']!r}")
    return SentenceEmbedding(
        pooling=_pooling(folder / where / "config.json"),
        normalise="normalize" in kinds,
        max_length=_max_length(folder),
        keeps_pooler=keeps_pooler,
    )


def _pooling(path: Path) -> tuple[Pooling, ...]:
    values = read_json(path)
    given = values.get("pooling_mode")
    if given is None:
        given = [name.removeprefix("pooling_mode_") for name, on in values.items() if "pooling_mode_" in name and on]
    elif isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given or not all(str(name) in _POOLINGS for name in given):
        raise HeedfulError(f"{path}: the pooling is {given}; expected some of {', '.join(sorted(_POOLINGS))}")
    return tuple(_POOLINGS[name] for name in given)


def check_case(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse texts that sentence-transformers would lower-case first where the tokenizer keeps their case."""
    path = folder / "sentence_bert_config.json"
    if tokenizer is None or not path.exists() or not read_json(path).get("do_lower_case"):
        return
    if tokenizer.encode("Aa").ids != tokenizer.encode("aa").ids:
        raise HeedfulError(
            f"{path} says do_lower_case, but the tokenizer tells Aa from aa: give lower-cased texts and set it to false"
        )


def _max_length(folder: Path) -> int | None:
    for file, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / file).exists():
            value = read_json(folder / file).get(key)
            if isinstance(value, int) and 0 < value < 1 << 20:
                return value
    return None


def write(folder: Path, head: SentenceEmbedding, width: int) -> None:
    """Write modules.json and what it points to, in the form that every version since 2 reads."""
    names = {ours: theirs for theirs, ours in _POOLINGS.items() if theirs.endswith("token") or "_tokens" in theirs}
    flags = {f"pooling_mode_{theirs}": ours in head.pooling for ours, theirs in names.items()}
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalise else [])]
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"{_PACKAGE}.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    _write(folder / MODULES, modules)
    for module in modules[1:]:
        (folder / str(module["path"])).mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **flags})
    if head.max_length is not None:
        _write(folder / "sentence_bert_config.json", {"max_seq_length": head.max_length, "do_lower_case": False})


_PACKAGE = "sentence_transformers.models"


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

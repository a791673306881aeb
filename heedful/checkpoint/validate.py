"""Checks that config.json and the weights of a folder belong together, by names and shapes only.

`load` calls these checks, and the warnings about tokenizers that do not fit a classifier.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path

from torch import Tensor

from heedful.checkpoint.safetensors_files import TensorEntry
from heedful.errors import HeedfulWarning, ModelError
from heedful.families.names import NameTable
from heedful.model.config import Classes, Head, ModelConfig
from heedful.tokenizer import Tokenizer


def check_depth(
    model: ModelConfig, entries: Mapping[str, TensorEntry], values: Mapping[str, object], folder: Path
) -> None:
    """Raise ModelError if config.json asks for far more or fewer layers than there are tensors.

    This is checked before the model is built, so that a wrong number of layers cannot take all memory.
    """
    layers = sum(stack.blocks or stack.layers for stack in (model.encoder, model.decoder) if stack is not None)
    too_few = layers > len(entries)
    if too_few or len(entries) > 64 * (layers + 4):
        raise ModelError(
            f"{folder}: config.json asks for {layers} layers{_keys_with(values, {layers})}, but the weights hold "
            f"{'only ' if too_few else ''}{len(entries)} tensors: {', '.join(list(entries)[:4]) or 'none'}"
            f"{', ...' * (len(entries) > 4)}"
        )


def check_names(
    table: NameTable,
    expected: Mapping[str, Tensor],
    entries: Mapping[str, TensorEntry],
    values: Mapping[str, object],
    folder: Path,
) -> None:
    """Raise ModelError unless the weights have the names and shapes that config.json implies.

    Args:
        table: Tensor names of the model.
        expected: Tensors that config.json implies, by HF name, without memory.
        entries: Tensors of the folder, by HF name.
        values: Values of config.json.
        folder: Folder, for error messages.
    """
    problems = []
    for name, tensor in expected.items():
        if name in entries and entries[name].shape != tuple(tensor.shape):
            sizes = {size for size, actual in zip_longest(tensor.shape, entries[name].shape) if size != actual}
            problems.append(
                f"{name} has the shape {list(entries[name].shape)}, but config.json implies {list(tensor.shape)}"
                f"{_keys_with(values, sizes)}"
            )
    missing = [name for name in expected if name not in entries and not table.may_lack(name)]
    unexpected = [name for name in entries if _is_unexpected(name, expected, table)]
    for problem, names in (("missing", missing), ("not expected", unexpected)):
        if names:
            and_more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            problems.append(f"{problem}: {', '.join(names[:6])}{and_more}")
    expected_depth, actual_depth = _depth(expected), _depth(entries)
    if problems and expected_depth != actual_depth:
        keys = _keys_with(values, {expected_depth})
        problems.insert(0, f"config.json asks for {expected_depth} layers{keys}, but the weights have {actual_depth}")
    if problems:
        raise ModelError(f"{folder}: config.json and the weights do not belong together. " + "; ".join(problems[:6]))


def _depth(names: Iterable[str]) -> int:
    """Return the count of layers: 1 + the greatest index in the names of tensors."""
    return 1 + max((int(index) for name in names for index in re.findall(r"\.(\d+)\.", name)), default=-1)


def _keys_with(values: Mapping[str, object], sizes: set[int | None]) -> str:
    """Return " (see KEYS)" with the keys of config.json whose value, or number of entries, is one of these sizes."""
    actual_sizes = {key: len(value) if isinstance(value, dict) else value for key, value in values.items()}
    keys = [key for key, size in actual_sizes.items() if type(size) is int and size in sizes]
    return f" (see {', '.join(keys)})" if keys else ""


def _is_unexpected(name: str, expected: Mapping[str, Tensor], table: NameTable) -> bool:
    """Return whether a tensor of a folder does not belong to the model, such as a bias that the model lacks."""
    return not (name in expected or name in table.tied or table.skips(name))


def warn_if_pooled_token_is_missing(head: Head | None, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Warn if a classifier reads the hidden state of a token that its tokenizer puts into no text.

    transformers cannot classify such texts; Heedful reads their last hidden state.
    """
    token = head.pooled_token if isinstance(head, Classes) else None
    if token is not None and tokenizer is not None and token not in tokenizer.encode("a").ids:
        warnings.warn(
            f"{folder}: its classifier reads the row of the token {token}, eos_token_id in config.json, which its "
            "tokenizer puts into no text: the last row is read instead; set eos_token_id to the token that ends texts",
            HeedfulWarning,
            stacklevel=4,
        )


def warn_if_padding_ends_texts(
    head: Head | None, tokenizer: Tokenizer | None, values: Mapping[str, object], folder: Path
) -> None:
    """Warn if the tokenizer ends texts with `pad_token_id`.

    transformers then classifies by the hidden state of another token, the last one that is not this one.
    """
    pad = values.get("pad_token_id")
    if not isinstance(head, Classes) or head.pooling != "last" or tokenizer is None or not isinstance(pad, int):
        return
    ids = tokenizer.encode("a").ids
    if ids and ids[-1] == pad:
        end = tokenizer.name(pad)
        warnings.warn(
            f"{folder}: its tokenizer ends texts with {end}, which is pad_token_id in config.json too, so transformers "
            f"classifies by the row before {end} and Heedful by the row of {end}: scores differ. For the scores of "
            f"transformers, remove {end} from the end of texts in tokenizer.json (post_processor)",
            HeedfulWarning,
            stacklevel=4,
        )

"""Whether config.json and the weights of a folder belong together, by names and shapes alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.checkpoint.safetensors_files import Slot
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.families.names import NameTable
from heedful.model.config import Classes, Head, ModelConfig
from heedful.tokenizer import Tokenizer


def check_depth(model: ModelConfig, slots: Mapping[str, Slot], values: Mapping[str, Any], folder: Path) -> None:
    """Before anything is built: no more layers than tensors, and no more tensors than layers can have."""
    layers = sum(stack.blocks or stack.layers for stack in (model.encoder, model.decoder) if stack is not None)
    few = layers > len(slots)
    if few or len(slots) > 64 * (layers + 4):
        raise HeedfulError(
            f"{folder}: config.json asks for {layers} layers{_see(values, {layers})}, but the weights hold "
            f"{'only ' if few else ''}{len(slots)} tensors: {', '.join(list(slots)[:4]) or 'none'}"
            f"{', ...' * (len(slots) > 4)}"
        )


def check_names(
    table: NameTable, expected: Mapping[str, Tensor], slots: Mapping[str, Slot], values: Mapping[str, Any], folder: Path
) -> None:
    """Names and shapes in the headers equal what config.json implies, before anything is allocated."""
    wrong = []
    for name, tensor in expected.items():
        if name in slots and slots[name].shape != tuple(tensor.shape):
            sizes = {size for size, held in zip_longest(tensor.shape, slots[name].shape) if size != held}
            wrong.append(
                f"{name} has the shape {list(slots[name].shape)}, but config.json implies {list(tensor.shape)}"
                f"{_see(values, sizes)}"
            )
    for what, names in (
        ("missing", [name for name in expected if name not in slots and name not in table.copied]),
        ("not expected", [name for name in slots if _beyond(name, expected, table)]),
    ):
        if names:
            wrong.append(f"{what}: {', '.join(names[:6])}" + (f" and {len(names) - 6} more" if names[6:] else ""))
    asked, held = _depth(expected), _depth(slots)
    if wrong and asked != held:
        wrong.insert(0, f"config.json asks for {asked} layers{_see(values, {asked})}, but the weights have {held}")
    if wrong:
        raise HeedfulError(f"{folder}: config.json and the weights do not belong together. " + "; ".join(wrong[:6]))


def _depth(names: Iterable[str]) -> int:
    return 1 + max((int(number) for name in names for number in re.findall(r"\.(\d+)\.", name)), default=-1)


def _see(values: Mapping[str, Any], sizes: set[int | None]) -> str:
    """The fields of config.json that say such a size."""
    said = {key: len(value) if isinstance(value, dict) else value for key, value in values.items()}
    fields = [key for key, value in said.items() if type(value) is int and value in sizes]
    return f" (see {', '.join(fields)})" if fields else ""


def _beyond(name: str, expected: Mapping[str, Tensor], table: NameTable) -> bool:
    """Not part of this model: unknown, a layer too many, a bias where there is none."""
    return not (name in expected or name in table.tied or table.skips(name))


def warn_if_padding_ends_texts(
    head: Head | None, tokenizer: Tokenizer | None, values: Mapping[str, Any], folder: Path
) -> None:
    """Warn where transformers classifies by another row: the last one whose token is not `pad_token_id`."""
    pad = values.get("pad_token_id")
    if not isinstance(head, Classes) or head.pooling != "last" or tokenizer is None or pad is None:
        return
    ids = tokenizer.encode("a").ids
    if ids and ids[-1] == pad:
        end = tokenizer.name(pad)
        warnings.warn(
            f"{folder}: its tokenizer ends texts with {end}, which is pad_token_id in config.json too, so transformers "
            f"classifies by the row before {end} and Heedful by the row of {end}: scores differ. For the scores of "
            f"transformers, remove {end} from the end of texts in tokenizer.json (post_processor)",
            HeedfulWarning,
            stacklevel=3,
        )

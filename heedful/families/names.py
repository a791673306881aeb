"""Maps the tensor names of Hugging Face's checkpoints to ours and back.

A table has one row for each name: (HF name or names, our name, operation). Names are those of modules, ".weight" and
".bias" follow along; {} is a layer number; several HF names that are concatenated into one of ours are a tuple. Every
tensor is claimed by exactly one row, in both directions; nothing is matched by substring.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.errors import ModelError


class TensorOp(NamedTuple):
    """A reversible operation between HF tensors and one of ours."""

    load: Callable[[list[Tensor]], Tensor]  # from HF's tensors
    save: Callable[[Tensor, int], list[Tensor]]  # to that many HF tensors


IDENTITY = TensorOp(lambda hf: hf[0], lambda tensor, count: [tensor])
CONCAT = TensorOp(torch.cat, lambda tensor, count: list(tensor.chunk(count)))  # one below the other: q, k, v
TRANSPOSE = TensorOp(  # a matrix [in, out]; vectors stay
    lambda hf: hf[0].T if hf[0].ndim == 2 else hf[0],
    lambda tensor, count: [tensor.T if tensor.ndim == 2 else tensor],
)
REVERSE = TensorOp(lambda hf: hf[0].flip(0), lambda tensor, count: [tensor.flip(0)])  # rows from last to first
RESHAPE = TensorOp(lambda hf: hf[0].flatten(), lambda tensor, count: [tensor[None, None]])  # a vector as [1, 1, width]


def split_heads_in(heads: int) -> TensorOp:
    """Return the operation from projections to heads, [width, heads, head width] each, to [heads x head width, width]
    matrices, one below the other."""
    return TensorOp(
        lambda hf: torch.cat([projection.flatten(1).T for projection in hf]),
        lambda tensor, count: [projection.T.unflatten(1, (heads, -1)) for projection in tensor.chunk(count)],
    )


def split_heads_out(heads: int) -> TensorOp:
    """Return the operation from a projection of heads, [width, heads, head width], to [width, heads x head width]."""
    return TensorOp(lambda hf: hf[0].flatten(1), lambda tensor, count: [tensor.unflatten(1, (heads, -1))])


class NameMap(NamedTuple):
    """One row of a table: HF names, our name, and the operation between the tensors."""

    hf: tuple[str, ...]
    name: str
    op: TensorOp = IDENTITY


@dataclass(frozen=True, kw_only=True, slots=True)
class NameTable:
    """The names of one model with one head."""

    rows: tuple[NameMap, ...]
    tied: Mapping[str, str] = field(default_factory=dict)  # second name -> the name it always equals; not saved
    copied: Mapping[str, str] = field(default_factory=dict)  # unused name -> the name it is saved as a copy of
    ignored: frozenset[str] = frozenset()  # buffers that older versions saved; {} is a layer number here too

    def skips(self, name: str) -> bool:
        """Return whether an HF tensor of that name is not read."""
        return name in self.copied or any(name_pattern(template).fullmatch(name) for template in self.ignored)

    def joined(self, more: NameTable) -> NameTable:
        """Return the rows of both tables."""
        return NameTable(
            rows=self.rows + more.rows,
            tied={**self.tied, **more.tied},
            copied={**self.copied, **more.copied},
            ignored=self.ignored | more.ignored,
        )


def name_maps(*rows: tuple[Any, ...]) -> tuple[NameMap, ...]:
    """Make rows from plain tuples; a single HF name needs no tuple of its own."""
    return tuple(NameMap((row[0],) if isinstance(row[0], str) else row[0], *row[1:]) for row in rows)


@cache
def name_pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the names that match a template."""
    escaped = re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)").replace(r"\{any\}", "(.+?)")
    return re.compile(escaped + r"(\.weight|\.bias)?")


OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, before 2019


def modern_name(name: str) -> str:
    """Return a name with .gamma and .beta written as .weight and .bias."""
    stem, dot, last = name.rpartition(".")
    return stem + OLD_SUFFIXES.get(dot + last, dot + last)


def claims(table: NameTable, name: str) -> bool:
    """Return whether a table knows an HF name."""
    if name in table.tied or table.skips(name):
        return True
    return any(name_pattern(template).fullmatch(name) for row in table.rows for template in row.hf)


def to_our_names(table: NameTable, hf_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return HF tensors under our names; raises ModelError for a tensor that no single row claims."""
    parts_of: dict[tuple[int, tuple[str, ...]], dict[int, Tensor]] = defaultdict(dict)
    unclaimed = []
    for name, tensor in hf_tensors.items():
        if name in table.tied or table.skips(name):
            continue
        matches = [
            (number, part, match.groups(""))
            for number, row in enumerate(table.rows)
            for part, template in enumerate(row.hf)
            if (match := name_pattern(template).fullmatch(name))
        ]
        if len(matches) != 1:
            unclaimed.append(f"{name} (claimed {len(matches)} times)")
            continue
        number, part, groups = matches[0]
        parts_of[number, groups][part] = tensor
    if unclaimed:
        raise ModelError(f"tensors that no single row of the name table claims: {_shortened(unclaimed)}")
    tensors = {}
    for (number, (*layers, suffix)), parts in parts_of.items():
        row = table.rows[number]
        name = _fill(row.name, layers) + suffix
        if missing := [hf_name for part, hf_name in enumerate(row.hf) if part not in parts]:
            raise ModelError(f"{name} lacks its parts {_shortened(missing)}")
        tensors[name] = row.op.load([parts[part] for part in range(len(parts))]).contiguous()
    return tensors


def to_hf_names(table: NameTable, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under their HF names."""
    hf_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        matches = [(row, match.groups("")) for row in table.rows if (match := name_pattern(row.name).fullmatch(name))]
        assert len(matches) == 1, f"{name} is claimed by {len(matches)} rows"
        row, (*layers, suffix) = matches[0]
        for template, part in zip(row.hf, row.op.save(tensor, len(row.hf)), strict=True):
            hf_tensors[_fill(template, layers) + suffix] = part
    return hf_tensors | {copy: hf_tensors[name].clone() for copy, name in table.copied.items()}


def _fill(template: str, layers: Iterable[str]) -> str:
    return template.replace("{any}", "{}").format(*layers)


def _shortened(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Tensor names of a checkpoint, mapped both ways between Hugging Face's and ours.

A family is data: rows of (HF name, our name[, operation]). Names stand for
modules, ".weight" and ".bias" follow along; {} is a layer number; several of their names joined into one of ours
stand in a tuple. Every key is claimed by exactly one row, in both directions; nothing is matched by substring.
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

from heedful.errors import HeedfulError


class TensorOp(NamedTuple):
    """A reversible way to make our tensor of theirs."""

    load: Callable[[list[Tensor]], Tensor]
    save: Callable[[Tensor, int], list[Tensor]]  # ours, and how many of theirs


IDENTITY = TensorOp(lambda theirs: theirs[0], lambda ours, count: [ours])
CONCAT = TensorOp(torch.cat, lambda ours, count: list(ours.chunk(count)))  # one below the other: q, k, v
TRANSPOSE = TensorOp(  # a matrix [in, out]; vectors stay
    lambda theirs: theirs[0].T if theirs[0].ndim == 2 else theirs[0],
    lambda ours, count: [ours.T if ours.ndim == 2 else ours],
)
REVERSE = TensorOp(lambda theirs: theirs[0].flip(0), lambda ours, count: [ours.flip(0)])  # rows from last to first
RESHAPE = TensorOp(
    lambda theirs: theirs[0].flatten(), lambda ours, count: [ours[None, None]]
)  # a vector as [1, 1, width]


def split_heads_in(heads: int) -> TensorOp:
    """Projections to heads, [width, heads, head width] each, one below the other as [heads x head width, width]."""
    return TensorOp(
        lambda theirs: torch.cat([each.flatten(1).T for each in theirs]),
        lambda ours, count: [each.T.unflatten(1, (heads, -1)) for each in ours.chunk(count)],
    )


def split_heads_out(heads: int) -> TensorOp:
    """A projection from heads, [width, heads, head width], as [width, heads x head width]."""
    return TensorOp(lambda theirs: theirs[0].flatten(1), lambda ours, count: [ours.unflatten(1, (heads, -1))])


class NameMap(NamedTuple):
    """Their name or names, our name, and how."""

    hf: tuple[str, ...]
    ours: str
    op: TensorOp = IDENTITY


@dataclass(frozen=True, kw_only=True, slots=True)
class NameTable:
    """The names of one model with one head."""

    rows: tuple[NameMap, ...]
    tied: Mapping[str, str] = field(default_factory=dict)  # a second name -> the name it always equals; not saved
    copied: Mapping[str, str] = field(default_factory=dict)  # a name nobody reads -> the name it is saved as a copy of
    ignored: frozenset[str] = frozenset()  # buffers that older versions saved; {} is a layer number here too

    def skips(self, name: str) -> bool:
        """Whether their tensor of that name is not read."""
        return name in self.copied or any(name_pattern(template).fullmatch(name) for template in self.ignored)

    def joined(self, other: NameTable) -> NameTable:
        """The rows of both."""
        return NameTable(
            rows=self.rows + other.rows,
            tied={**self.tied, **other.tied},
            copied={**self.copied, **other.copied},
            ignored=self.ignored | other.ignored,
        )


def name_maps(*given: tuple[Any, ...]) -> tuple[NameMap, ...]:
    """Rows from plain tuples; a single name needs no tuple of its own."""
    return tuple(NameMap((row[0],) if isinstance(row[0], str) else row[0], *row[1:]) for row in given)


@cache
def name_pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)").replace(r"\{any\}", "(.+?)")
    return re.compile(escaped + r"(\.weight|\.bias)?")


OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, before 2019


def modern_name(name: str) -> str:
    """The name with .gamma and .beta written as .weight and .bias."""
    stem, dot, last = name.rpartition(".")
    return stem + OLD_SUFFIXES.get(dot + last, dot + last)


def claims(table: NameTable, name: str) -> bool:
    """Whether the table knows their name."""
    if name in table.tied or table.skips(name):
        return True
    return any(name_pattern(template).fullmatch(name) for row in table.rows for template in row.hf)


def to_our_names(table: NameTable, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    found: dict[tuple[int, tuple[str, ...]], dict[int, Tensor]] = defaultdict(dict)
    unclaimed = []
    for name, tensor in theirs.items():
        if name in table.tied or table.skips(name):
            continue
        claims = [
            (number, part, match.groups(""))
            for number, row in enumerate(table.rows)
            for part, template in enumerate(row.hf)
            if (match := name_pattern(template).fullmatch(name))
        ]
        if len(claims) != 1:
            unclaimed.append(f"{name} (claimed {len(claims)} times)")
            continue
        number, part, groups = claims[0]
        found[number, groups][part] = tensor
    if unclaimed:
        raise HeedfulError(f"tensors that no single row of the name table claims: {_some(unclaimed)}")
    ours = {}
    for (number, (*numbers, suffix)), parts in found.items():
        row = table.rows[number]
        if missing := [name for part, name in enumerate(row.hf) if part not in parts]:
            raise HeedfulError(f"{_fill(row.ours, numbers)}{suffix} lacks its parts {_some(missing)}")
        ours[_fill(row.ours, numbers) + suffix] = row.op.load([parts[part] for part in range(len(parts))]).contiguous()
    return ours


def to_hf_names(table: NameTable, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        claims = [(row, match.groups("")) for row in table.rows if (match := name_pattern(row.ours).fullmatch(name))]
        assert len(claims) == 1, f"{name} is claimed by {len(claims)} rows"
        row, (*numbers, suffix) = claims[0]
        for template, part in zip(row.hf, row.op.save(tensor, len(row.hf)), strict=True):
            theirs[_fill(template, numbers) + suffix] = part
    return theirs | {copy: theirs[name].clone() for copy, name in table.copied.items()}


def _fill(template: str, numbers: Iterable[str]) -> str:
    return template.replace("{any}", "{}").format(*numbers)


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

"""Maps the tensor names of Hugging Face's checkpoints to ours and back.

A table has a row for each module or tensor: (HF name or names, our name, operation). Several HF names mean that several
HF tensors become one of ours. In a name, {} is the index of a layer, and {any} is any text; all names of a row
have the same placeholders. A row for a module covers its ".weight" and ".bias". In both directions, exactly one row
claims a tensor; names are matched as a whole. `checkpoint` uses the tables to load and save model folders.
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

    load: Callable[[list[Tensor]], Tensor]  # HF tensors -> our tensor
    save: Callable[[Tensor, int], list[Tensor]]  # our tensor, count of HF tensors -> HF tensors


IDENTITY = TensorOp(lambda hf: hf[0], lambda tensor, count: [tensor])
# equal parts along dimension 0, such as q, k and v
CONCAT = TensorOp(torch.cat, lambda tensor, count: list(tensor.chunk(count)))
# a matrix [in, out], as in GPT-2's Conv1D; vectors are unchanged
TRANSPOSE = TensorOp(
    lambda hf: hf[0].T if hf[0].ndim == 2 else hf[0],
    lambda tensor, count: [tensor.T if tensor.ndim == 2 else tensor],
)
# GTE's gated MLP, in which the gate comes second
SWAP_HALVES = TensorOp(
    lambda hf: torch.cat(hf[0].chunk(2)[::-1]), lambda tensor, count: [torch.cat(tensor.chunk(2)[::-1])]
)
# rows in reverse order, for BERT's relative distances
REVERSE = TensorOp(lambda hf: hf[0].flip(0), lambda tensor, count: [tensor.flip(0)])
# a vector that is saved as [1, width]
ROW_VECTOR = TensorOp(lambda hf: hf[0][0], lambda tensor, count: [tensor[None]])
# a vector that is saved as [1, 1, width], XLNet's query
FLATTEN = TensorOp(lambda hf: hf[0].flatten(), lambda tensor, count: [tensor[None, None]])


def concat(*sizes: int) -> TensorOp:
    """Return the operation that concatenates parts of these sizes along dimension 0, such as q and smaller k and v."""
    return TensorOp(torch.cat, lambda tensor, count: list(tensor.split(sizes)))


def merge_input_heads(heads: int) -> TensorOp:
    """Return the operation that joins XLNet's q, k and v into one matrix.

    Each projection [hidden size, heads, head dimension] becomes a matrix [heads * head dimension, hidden size]; these
    are concatenated along dimension 0.
    """
    return TensorOp(
        lambda hf: torch.cat([projection.flatten(1).T for projection in hf]),
        lambda tensor, count: [projection.T.unflatten(1, (heads, -1)) for projection in tensor.chunk(count)],
    )


def merge_output_heads(heads: int) -> TensorOp:
    """Return the operation that flattens XLNet's output [hidden size, heads, head dimension] to a matrix."""
    return TensorOp(lambda hf: hf[0].flatten(1), lambda tensor, count: [tensor.unflatten(1, (heads, -1))])


Named = tuple[Any, ...]  # HF name or tuple of HF names; our name; a TensorOp, if it is not IDENTITY


class NameRow(NamedTuple):
    """One row of a table: HF names, our name, and the operation between the tensors."""

    hf: tuple[str, ...]
    name: str
    op: TensorOp = IDENTITY


@dataclass(frozen=True, kw_only=True, slots=True)
class NameTable:
    """The names of one model with one head."""

    rows: tuple[NameRow, ...]
    tied: Mapping[str, str] = field(default_factory=dict)  # HF name that is not saved -> HF name of the same tensor
    copied: Mapping[str, str] = field(default_factory=dict)  # HF name that is not read -> HF name it is a copy of
    ignored: frozenset[str] = frozenset()  # HF names of tensors that are not used, which older versions saved
    constants: Mapping[str, Tensor] = field(default_factory=dict)  # HF names of tensors that are computed, not read
    zero_if_missing: frozenset[str] = frozenset()  # HF names of tensors that a folder may lack

    def skips(self, name: str) -> bool:
        """Return whether an HF tensor of that name is not read, although the model may have it."""
        return (
            name in self.copied
            or name in self.constants
            or any(name_pattern(template).fullmatch(name) for template in self.ignored)
        )

    def may_lack(self, name: str) -> bool:
        """Return whether a folder may lack an HF tensor of that name."""
        return name in self.copied or name in self.zero_if_missing

    def merged_with(self, added: NameTable) -> NameTable:
        """Return the rows of both tables."""
        return NameTable(
            rows=self.rows + added.rows,
            tied={**self.tied, **added.tied},
            copied={**self.copied, **added.copied},
            ignored=self.ignored | added.ignored,
            constants={**self.constants, **added.constants},
            zero_if_missing=self.zero_if_missing | added.zero_if_missing,
        )


def name_rows(*rows: Named) -> tuple[NameRow, ...]:
    """Make rows from plain tuples; a single HF name may be given without a tuple around it."""
    return tuple(NameRow((row[0],) if isinstance(row[0], str) else row[0], *row[1:]) for row in rows)


@cache
def name_pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the tensor names that match a template."""
    escaped = re.escape(template).replace(r"\{\}", r"(0|[1-9]\d*)").replace(r"\{any\}", "(.+?)")
    return re.compile(escaped + r"(\.weight|\.bias)?")


OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # suffixes for norms in checkpoints from TensorFlow -> ours


def modern_name(name: str) -> str:
    """Return a name with .gamma and .beta written as .weight and .bias."""
    stem, dot, last = name.rpartition(".")
    return stem + OLD_SUFFIXES.get(dot + last, dot + last)


def claims(table: NameTable, name: str) -> bool:
    """Return whether the table has an HF name: in a row, or as tied, copied, constant or ignored."""
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
            (row_index, part_index, match.groups(""))
            for row_index, row in enumerate(table.rows)
            for part_index, template in enumerate(row.hf)
            if (match := name_pattern(template).fullmatch(name))
        ]
        if len(matches) != 1:
            unclaimed.append(f"{name} (claimed {len(matches)} times)")
            continue
        row_index, part_index, groups = matches[0]
        parts_of[row_index, groups][part_index] = tensor
    if unclaimed:
        raise ModelError(f"tensors that no single row of the name table claims: {_shortened(unclaimed)}")
    tensors = {}
    for (row_index, (*layers, suffix)), parts in parts_of.items():
        row = table.rows[row_index]
        name = _fill(row.name, layers) + suffix
        missing = [_fill(template, layers) + suffix for index, template in enumerate(row.hf) if index not in parts]
        if missing:
            raise ModelError(f"tensors that {name} is made of are missing: {_shortened(missing)}")
        tensors[name] = row.op.load([parts[index] for index in range(len(parts))]).contiguous()
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


def _fill(template: str, values: Iterable[str]) -> str:
    """Return a template with values in place of {} and {any}."""
    return template.replace("{any}", "{}").format(*values)


def _shortened(names: list[str], limit: int = 8) -> str:
    """List the first `limit` names, for error messages."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

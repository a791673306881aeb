"""Gathers of packed rows into the slots of padded blocks, and back, for the kernels of `heedful.nn.kernels`.

Where possible, the backward pass of a gather is a gather with the inverse index, which is faster than a scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.nn.autograd import AutogradContext


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """The index of a gather, and the index of the gather that computes its gradient."""

    index: Int[Tensor, " outputs"]  # index of the input that is copied to each output
    inverse: (
        Int[Tensor, " inputs"] | None
    )  # index of the output that copies each input; None: the gradient is a scatter


def pack_index(row_of_slot: Int[np.ndarray, " slots"], rows: int, device: torch.device) -> RowIndex | None:
    """Make the index that gathers rows into slots; returns None if it is the identity.

    Args:
        row_of_slot: Row in each slot, -1 for padding.
        rows: Number of rows.
        device: Device of the index.
    """
    if np.array_equal(row_of_slot, np.arange(rows)):
        return None
    slot_of_row = np.full(rows, -1)
    has_row = row_of_slot >= 0
    slot_of_row[row_of_slot[has_row]] = np.flatnonzero(has_row)
    every_row_has_one_slot = has_row.sum() == rows and (slot_of_row >= 0).all()
    return RowIndex(
        index=torch.from_numpy(row_of_slot.clip(min=0)).to(device, non_blocking=True),
        inverse=torch.from_numpy(slot_of_row).to(device, non_blocking=True) if every_row_has_one_slot else None,
    )


def unpack_index(
    result_slot: Int[np.ndarray, " rows"],
    row_of_slot: Int[np.ndarray, " slots"],
    has_result: Bool[np.ndarray, " slots"],
    device: torch.device,
) -> RowIndex | None:
    """Make the index that gathers results from slots into rows; returns None if it is the identity.

    Args:
        result_slot: Slot of each row's result. For a row that attends to no key, whose result is 0, the number of
            slots: `unpack_rows` appends a slot of zeros.
        row_of_slot: Row in each slot, -1 for padding.
        has_result: Which slots have a row that attends to at least one key.
        device: Device of the index.
    """
    if np.array_equal(result_slot, np.arange(len(row_of_slot))):
        return None
    inverse = None
    rows = len(result_slot)
    if has_result.sum() == rows:  # every row attends to a key; the gradient of padding is the zeros after the last row
        inverse = torch.from_numpy(np.where(has_result, row_of_slot, rows)).to(device, non_blocking=True)
    return RowIndex(index=torch.from_numpy(result_slot).to(device, non_blocking=True), inverse=inverse)


class _PackRows(torch.autograd.Function):
    """Gather rows into slots; in the backward pass, gather the gradient of each row from its slot."""

    @staticmethod
    def forward(context: AutogradContext, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, context.saved_tensors[0]), None, None


class _UnpackRows(torch.autograd.Function):
    """Gather slots into rows; in the backward pass, gather the gradient of each slot from its row, 0 for padding."""

    @staticmethod
    def forward(context: AutogradContext, slots: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return slots.index_select(0, index)

    @staticmethod
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with_zeros = torch.cat([gradients[0], gradients[0].new_zeros(1, *gradients[0].shape[1:])])
        return with_zeros.index_select(0, context.saved_tensors[0]), None, None


def pack_rows(rows: Tensor, row_index: RowIndex | None) -> Tensor:
    """Gather rows into slots; padding slots get copies of arbitrary rows. `row_index` is a result of `pack_index`."""
    if row_index is None:
        return rows
    if len(rows) == 0:
        return rows.new_zeros(len(row_index.index), *rows.shape[1:])
    if row_index.inverse is None:
        return rows.index_select(0, row_index.index)
    packed: Tensor = _PackRows.apply(rows, row_index.index, row_index.inverse)  # type: ignore[no-untyped-call]
    return packed


def unpack_rows(slots: list[Tensor], row_index: RowIndex | None) -> Tensor:
    """Gather the results of rows from the slots of several blocks; the result of a row without visible keys is 0.

    Args:
        slots: Results of each block; slots are numbered through all blocks.
        row_index: Result of `unpack_index`.
    """
    if row_index is None:
        return slots[0] if len(slots) == 1 else torch.cat(slots)
    if row_index.inverse is None:
        with_zeros = torch.cat([*slots, slots[0].new_zeros(1, *slots[0].shape[1:])])
        return with_zeros.index_select(0, row_index.index)
    rows: Tensor = _UnpackRows.apply(torch.cat(slots), row_index.index, row_index.inverse)  # type: ignore[no-untyped-call]
    return rows

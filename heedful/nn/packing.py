"""Gathers packed rows into padded blocks and back; the backward pass is a gather too, and not a scatter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.nn.autograd import AutogradContext


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """The index of a gather, and that of its backward pass; None where the backward pass has to scatter."""

    index: Int[Tensor, " outputs"]
    inverse: Int[Tensor, " inputs"] | None


def pack_index(places: Int[np.ndarray, " places"], rows: int, device: torch.device) -> RowIndex | None:
    """Build gather indices from the row at each place (-1: padding); None if the mapping is the identity."""
    if np.array_equal(places, np.arange(rows)):
        return None
    inverse = np.full(rows, -1)
    has_row = places >= 0
    inverse[places[has_row]] = np.flatnonzero(has_row)
    return RowIndex(
        index=torch.from_numpy(places.clip(min=0)).to(device, non_blocking=True),
        inverse=torch.from_numpy(inverse).to(device, non_blocking=True)
        if has_row.sum() == rows and (inverse >= 0).all()
        else None,
    )


def unpack_index(
    result: Int[np.ndarray, " rows"],
    places: Int[np.ndarray, " places"],
    real: Bool[np.ndarray, " places"],
    device: torch.device,
) -> RowIndex | None:
    """Build gather indices from the place of each row's result; None if the mapping is the identity.

    Args:
        result: Place of each row's result; the number of places for a row that sees no key, whose result is zeros.
        places: Row at each place, -1 for padding.
        real: Which places have a row that sees a key.
    """
    if np.array_equal(result, np.arange(len(places))):
        return None
    inverse = None
    if real.sum() == len(result):  # each row sees a key; a padding place takes the zeros after the last row
        inverse = torch.from_numpy(np.where(real, places, len(result))).to(device, non_blocking=True)
    return RowIndex(index=torch.from_numpy(result).to(device, non_blocking=True), inverse=inverse)


class _PackRows(torch.autograd.Function):
    """Rows to places; backward takes each row's gradient from its place."""

    @staticmethod
    def forward(context: AutogradContext, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, context.saved_tensors[0]), None, None


class _UnpackRows(torch.autograd.Function):
    """Places to rows; backward takes each place's gradient from its row, or zeros."""

    @staticmethod
    def forward(context: AutogradContext, places: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return places.index_select(0, index)

    @staticmethod
    def backward(context: AutogradContext, *gradients: Tensor) -> tuple[Tensor, None, None]:
        with_zeros = torch.cat([gradients[0], gradients[0].new_zeros(1, *gradients[0].shape[1:])])
        return with_zeros.index_select(0, context.saved_tensors[0]), None, None


def pack_rows(rows: Tensor, row_index: RowIndex | None) -> Tensor:
    """Gather rows to their places; padding places hold arbitrary rows."""
    if row_index is None:
        return rows
    if len(rows) == 0:
        return rows.new_zeros(len(row_index.index), *rows.shape[1:])
    if row_index.inverse is None:
        return rows.index_select(0, row_index.index)
    packed: Tensor = _PackRows.apply(rows, row_index.index, row_index.inverse)  # type: ignore[no-untyped-call]
    return packed


def unpack_rows(places: list[Tensor], row_index: RowIndex | None) -> Tensor:
    """Gather the result of each row from places that lie end to end; zeros for a row that has none."""
    if row_index is None:
        return places[0] if len(places) == 1 else torch.cat(places)
    if row_index.inverse is None:
        with_zeros = torch.cat([*places, places[0].new_zeros(1, *places[0].shape[1:])])
        return with_zeros.index_select(0, row_index.index)
    rows: Tensor = _UnpackRows.apply(torch.cat(places), row_index.index, row_index.inverse)  # type: ignore[no-untyped-call]
    return rows

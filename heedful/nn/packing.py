"""Rows to places and back, where each row has one place: backward is a gather, too, and not a scatter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """Which row goes to each place, and at which place each row is; None where a row has no place."""

    index: Int[Tensor, " places"]
    inverse: Int[Tensor, " rows"] | None


def pack_index(places: Int[np.ndarray, " places"], rows: int, device: torch.device) -> RowIndex | None:
    """Of which row lies at each place, -1 for none; None: places are rows."""
    if np.array_equal(places, np.arange(rows)):
        return None
    back = np.full(rows, -1)
    real = places >= 0
    back[places[real]] = np.flatnonzero(real)
    return RowIndex(
        index=torch.from_numpy(places.clip(min=0)).to(device),
        inverse=torch.from_numpy(back).to(device) if real.sum() == rows and (back >= 0).all() else None,
    )


def unpack_index(
    result: Int[np.ndarray, " rows"],
    places: Int[np.ndarray, " places"],
    real: Bool[np.ndarray, " places"],
    device: torch.device,
) -> RowIndex | None:
    """Of the place where each row's result lies; `real` places have a row and see a key. None: places are rows."""
    if np.array_equal(result, np.arange(len(places))):
        return None
    back = None
    if real.sum() == len(result):  # no row is without a key; a place without a row takes the zeros after the last one
        back = torch.from_numpy(np.where(real, places, len(result))).to(device)
    return RowIndex(index=torch.from_numpy(result).to(device), inverse=back)


class _Move(torch.autograd.Function):
    """Rows to places; backward takes each row's gradient from its place, which is a gather and not a scatter."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


class _Fetch(torch.autograd.Function):
    """Places to rows; backward takes each place's gradient from its row, or zeros."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return places.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        given = torch.cat([gradients[0], gradients[0].new_zeros(1, *gradients[0].shape[1:])])
        return given.index_select(0, ctx.saved_tensors[0]), None, None


def pack_rows(rows: Tensor, moves: RowIndex | None) -> Tensor:
    """The rows at their places; what lies at a place without a row is of no matter."""
    if moves is None:
        return rows
    if len(rows) == 0:
        return rows.new_zeros(len(moves.index), *rows.shape[1:])
    if moves.inverse is None:
        return rows.index_select(0, moves.index)
    moved: Tensor = _Move.apply(rows, moves.index, moves.inverse)  # type: ignore[no-untyped-call]
    return moved


def unpack_rows(places: list[Tensor], moves: RowIndex | None) -> Tensor:
    """The result of each row, from places end to end; zeros for a row that has none."""
    if moves is None:
        return places[0] if len(places) == 1 else torch.cat(places)
    if moves.inverse is None:
        return torch.cat([*places, places[0].new_zeros(1, *places[0].shape[1:])]).index_select(0, moves.index)
    fetched: Tensor = _Fetch.apply(torch.cat(places), moves.index, moves.inverse)  # type: ignore[no-untyped-call]
    return fetched

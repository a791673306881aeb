"""torch.nn's LSTM and GRU, which sequences of different lengths go through, are the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from heedful.nn.recurrence import run_cells

COUNTS = ([3, 2, 2, 1], [1], [4], [2, 2, 2], [5, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1])


def make_cells(
    kind: type[nn.LSTM | nn.GRU], counts: Sequence[int], layers: int = 1, **more: bool
) -> tuple[nn.Module, torch.Tensor]:
    """Cells and rows, in double precision."""
    torch.manual_seed(len(counts) + layers)
    cells = kind(5, 7, layers, **more).double()
    return cells, torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_and_gradients_are_those_of_torch(
    kind: type[nn.LSTM | nn.GRU], counts: list[int], layers: int, bidirectional: bool
) -> None:
    cells, x = make_cells(kind, counts, layers, bidirectional=bidirectional)
    mine, reference = run_cells(cells, x, counts), cells(PackedSequence(x, torch.tensor(counts)))[0].data
    assert torch.allclose(mine, reference, rtol=0, atol=1e-12)
    learned, weights = [x, *cells.parameters()], torch.randn_like(mine)
    gradients, want = (torch.autograd.grad((rows * weights).sum(), learned) for rows in (mine, reference))
    for gradient, expected_gradient in zip(gradients, want, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_are_not_rounded(kind: type[nn.LSTM | nn.GRU]) -> None:
    cells, x = make_cells(kind, [3, 2, 2, 1])
    cells, x = cells.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run_cells(cells, x, [3, 2, 2, 1])
    assert inside.dtype == torch.float32 and torch.equal(inside, run_cells(cells, x, [3, 2, 2, 1]))


def test_rows_are_dropped_between_layers_in_training_alone() -> None:
    cells = nn.LSTM(5, 7, 2, dropout=0.5)
    x = torch.randn(8, 5)
    torch.manual_seed(0)
    first, second = run_cells(cells, x, [3, 2, 2, 1]), run_cells(cells, x, [3, 2, 2, 1])
    assert not torch.equal(first, second)
    cells.eval()
    assert torch.equal(run_cells(cells, x, [3, 2, 2, 1]), run_cells(cells, x, [3, 2, 2, 1]))
    assert torch.allclose(
        run_cells(cells, x, [3, 2, 2, 1]), cells(PackedSequence(x, torch.tensor([3, 2, 2, 1])))[0].data, atol=1e-6
    )

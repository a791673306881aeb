"""`run_cells` equals torch.nn's LSTM and GRU on packed sequences of different lengths, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from heedful.nn.recurrence import run_cells

# sequences in each time step (`batch_sizes` of a PackedSequence)
COUNTS = ([3, 2, 2, 1], [1], [4], [2, 2, 2], [5, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1])


def make_cells(
    kind: type[nn.LSTM | nn.GRU], counts: Sequence[int], layers: int = 1, **options: bool
) -> tuple[nn.Module, torch.Tensor]:
    """Return an LSTM or GRU and its input rows, in float64."""
    torch.manual_seed(len(counts) + layers)
    cells = kind(5, 7, layers, **options).double()
    return cells, torch.randn(sum(counts), 5, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_outputs_and_gradients_equal_those_of_pytorch(
    kind: type[nn.LSTM | nn.GRU], counts: list[int], layers: int, bidirectional: bool
) -> None:
    cells, x = make_cells(kind, counts, layers, bidirectional=bidirectional)
    outputs, expected = run_cells(cells, x, counts), cells(PackedSequence(x, torch.tensor(counts)))[0].data
    assert torch.allclose(outputs, expected, rtol=0, atol=1e-12)
    inputs, weights = [x, *cells.parameters()], torch.randn_like(outputs)
    gradients, expected_gradients = (
        torch.autograd.grad((rows * weights).sum(), inputs) for rows in (outputs, expected)
    )
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_autocast_does_not_round_states(kind: type[nn.LSTM | nn.GRU]) -> None:
    cells, x = make_cells(kind, [3, 2, 2, 1])
    cells, x = cells.float(), x.float()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run_cells(cells, x, [3, 2, 2, 1])
    assert outputs.dtype == torch.float32 and torch.equal(outputs, run_cells(cells, x, [3, 2, 2, 1]))


def test_dropout_between_layers_is_applied_in_training_only() -> None:
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

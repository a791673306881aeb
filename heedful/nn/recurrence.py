"""LSTM and GRU over rows that lie time by time: what torch.nn computes, made for learning on a CPU.

The products of all inputs are one, and so are those of each weight's gradient; the product with the state before alone
remains in each step. Where sequences differ in length torch.nn makes all of them step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.dropout import dropout


def run_cells(
    cells: nn.LSTM | nn.GRU, x: Float[Tensor, "rows width"], counts: Sequence[int]
) -> Float[Tensor, "rows widths_of_directions"]:
    """What the cells make of each row, from states of 0: rows of each time, of so many sequences, longer ones first."""
    cell = _Lstm if isinstance(cells, nn.LSTM) else _Gru
    with torch.autocast(x.device.type, enabled=False):  # a state that is rounded in each step would drift
        for layer in range(cells.num_layers):
            if layer:
                x = dropout(x, cells.dropout, cells.training)
            ways = []
            for way in ("", "_reverse")[: 1 + cells.bidirectional]:
                names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
                w, b, u, c = (getattr(cells, f"{name}_l{layer}{way}") for name in names)
                ways.append(cell.apply(F.linear(x, w, b), u, c, tuple(counts), way != ""))  # type: ignore[no-untyped-call]
            x = torch.cat(ways, -1)
    return x


class _Lstm(torch.autograd.Function):
    """c = f c' + i g, h = o tanh(c); i, f, o are sigmoids, g is a tanh (Hochreiter and Schmidhuber 1997)."""

    @staticmethod
    def forward(
        context: Any, given: Tensor, weight: Tensor, bias: Tensor, counts: tuple[int, ...], back: bool
    ) -> Float[Tensor, "rows width"]:
        width, turned = weight.shape[1], weight.t()
        gates = given + bias
        h, c = (given.new_empty(len(given), width) for _ in range(2))
        whole, rows, states = (each.split(counts) for each in (gates, h, c))
        enter, keep, new, out = (each.split(counts) for each in gates.split(width, 1))
        both = gates[:, : 2 * width].split(counts)
        for time, last, going in _course(counts, back):
            if going:
                whole[time][:going].addmm_(rows[last][:going], turned)
            both[time].sigmoid_()
            new[time].tanh_()
            out[time].sigmoid_()
            torch.mul(enter[time], new[time], out=states[time])
            if going:
                states[time][:going].addcmul_(keep[time][:going], states[last][:going])
            torch.tanh(states[time], out=rows[time]).mul_(out[time])
        context.save_for_backward(weight, gates, h, c)
        context.counts, context.back = counts, back
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, h, c = context.saved_tensors
        counts, back, width = context.counts, context.back, weight.shape[1]
        i, f, g, o = gates.split(width, 1)
        tanh = c.tanh()
        slopes = torch.empty_like(gates)  # of what goes into each gate, by those of c and h; then those of the loss
        by_i, by_f, by_g, by_o = slopes.split(width, 1)
        torch.mul(g * i, 1 - i, out=by_i)
        torch.mul(_before(c, counts, back) * f, 1 - f, out=by_f)
        torch.mul(i, 1 - g * g, out=by_g)
        torch.mul(tanh * o, 1 - o, out=by_o)
        by_c = (o * (1 - tanh * tanh)).split(counts)
        whole, by_o, given, keep = (each.split(counts) for each in (slopes, by_o, dh, f))
        three = slopes.view(-1, 4, width)[:, :3].split(counts)
        at_h, at_c = (dh.new_zeros(max(counts), width) for _ in range(2))
        for time, _, going in reversed(list(_course(counts, back))):
            at, cell = at_h[: counts[time]], at_c[: counts[time]]
            cell.addcmul_(at.add_(given[time]), by_c[time])
            three[time].mul_(cell[:, None])
            by_o[time].mul_(at)
            cell.mul_(keep[time])
            if going:
                torch.mm(whole[time][:going], weight, out=at[:going])
        return slopes, _of_weight(slopes, h, counts, back), slopes.sum(0), None, None


class _Gru(torch.autograd.Function):
    """h = n + z (h' - n), n = tanh(x_n + r h_n); r and z are sigmoids (Cho et al. 2014, as torch.nn.GRU has it)."""

    @staticmethod
    def forward(
        context: Any, given: Tensor, weight: Tensor, bias: Tensor, counts: tuple[int, ...], back: bool
    ) -> Float[Tensor, "rows width"]:
        width, turned = weight.shape[1], weight.t()
        gates, hidden = given.clone(), bias.expand(len(given), -1).clone()
        h = given.new_empty(len(given), width)
        whole, rows = hidden.split(counts), h.split(counts)
        reset, keep, new = (each.split(counts) for each in gates.split(width, 1))
        both, both_hidden = (each[:, : 2 * width].split(counts) for each in (gates, hidden))
        new_hidden = hidden[:, 2 * width :].split(counts)
        for time, last, going in _course(counts, back):
            if going:
                whole[time][:going].addmm_(rows[last][:going], turned)
            both[time].add_(both_hidden[time]).sigmoid_()
            new[time].addcmul_(reset[time], new_hidden[time]).tanh_()
            torch.mul(keep[time], new[time], out=rows[time])
            torch.sub(new[time], rows[time], out=rows[time])
            if going:
                rows[time][:going].addcmul_(keep[time][:going], rows[last][:going])
        context.save_for_backward(weight, gates, hidden[:, 2 * width :].clone(), h)
        context.counts, context.back = counts, back
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, hidden, h = context.saved_tensors
        counts, back, width = context.counts, context.back, weight.shape[1]
        r, z, n = gates.split(width, 1)
        slopes = torch.empty_like(gates)  # of what goes into each gate from the state before, by that of h
        by_r, by_z, by_hidden = slopes.split(width, 1)
        by_n = (1 - z) * (1 - n * n)
        torch.mul(by_n, r, out=by_hidden)
        torch.mul(by_hidden * hidden, 1 - r, out=by_r)
        torch.mul((_before(h, counts, back) - n) * z, 1 - z, out=by_z)
        whole, each_n, given, keep = (each.split(counts) for each in (slopes, by_n, dh, z))
        three = slopes.view(-1, 3, width).split(counts)
        at_h = dh.new_zeros(max(counts), width)
        for time, _, going in reversed(list(_course(counts, back))):
            at = at_h[: counts[time]].add_(given[time])
            three[time].mul_(at[:, None])
            each_n[time].mul_(at)
            if going:
                at[:going].mul_(keep[time][:going]).addmm_(whole[time][:going], weight)
        at_input = torch.cat([slopes[:, : 2 * width], by_n], 1)
        return at_input, _of_weight(slopes, h, counts, back), slopes.sum(0), None, None


def _course(counts: Sequence[int], back: bool) -> Iterator[tuple[int, int, int]]:
    """Each time, the one before it on the way, and how many of its sequences were there already: the first ones."""
    times = range(len(counts))
    for time in reversed(times) if back else times:
        last = time + 1 if back else time - 1
        yield time, last, min(counts[time], counts[last]) if last in times else 0


def _pairs(counts: Sequence[int]) -> tuple[Tensor, slice]:
    """The rows that have one of the same sequence after them, and those."""
    sizes = torch.tensor(counts)
    return torch.arange(counts[0], int(sizes.sum())) - sizes[:-1].repeat_interleave(sizes[1:]), slice(counts[0], None)


def _before(values: Tensor, counts: Sequence[int], back: bool) -> Tensor:
    """Of each row, the value of the one before it on the way; 0 where there is none."""
    found = torch.zeros_like(values)
    early, late = _pairs(counts)
    if back:
        return found.index_copy_(0, early, values[late])
    found[late] = values[early]
    return found


def _of_weight(slopes: Tensor, h: Tensor, counts: Sequence[int], back: bool) -> Tensor:
    """The gradient of the weight that takes the state before."""
    early, late = _pairs(counts)
    return slopes[early].t() @ h[late] if back else slopes[late].t() @ h[early]

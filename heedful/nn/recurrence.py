"""LSTM and GRU over packed sequences in time-major order: torch.nn's functions, faster in training on a CPU.

`heedful.model.classic` calls `run_cells`. The products with the inputs of all time steps are one matrix product, and so
is the gradient of each weight; only the product with the previous state is computed step by step. torch.nn computes all
products step by step if sequences differ in length.

Rows are in the order of torch's PackedSequence: sequences are sorted by length, longest first, and the rows of a time
step follow each other. In time step t the first counts[t] sequences have a row, and the first `carried` of them have a
previous state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.autograd import AutogradContext
from heedful.nn.dropout import dropout


def run_cells(
    cells: nn.LSTM | nn.GRU, x: Float[Tensor, "rows width"], counts: Sequence[int]
) -> Float[Tensor, "rows widths_of_directions"]:
    """Return the outputs of the last layer in all directions for each row, from initial states of 0.

    Args:
        cells: The weights, number of layers, directions and dropout.
        x: Rows of the first time step, longest sequence first, then those of the second time step, and so on.
        counts: Number of rows in each time step (`batch_sizes` of a PackedSequence).
    """
    cell = _Lstm if isinstance(cells, nn.LSTM) else _Gru
    with torch.autocast(x.device.type, enabled=False):  # in bfloat16, rounding errors of the state would add up
        for layer in range(cells.num_layers):
            if layer:
                x = dropout(x, cells.dropout, cells.training)
            outputs = []
            for direction in ("", "_reverse")[: 1 + cells.bidirectional]:
                input_weight, input_bias, weight, bias = (
                    getattr(cells, f"{name}_l{layer}{direction}")
                    for name in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
                )
                inputs = F.linear(x, input_weight, input_bias)
                outputs.append(cell.apply(inputs, weight, bias, tuple(counts), direction != ""))  # type: ignore[no-untyped-call]
            x = torch.cat(outputs, -1)
    return x


class _Lstm(torch.autograd.Function):
    """One layer and direction of an LSTM: c = f c' + i g, h = o tanh(c) (Hochreiter and Schmidhuber 1997).

    i, f and o are sigmoids and g is the tanh of W_ih x + b_ih + W_hh h' + b_hh, split in four; c' and h' are the
    previous state and output. `inputs` are W_ih x + b_ih, [rows, 4 width]; the result is h, [rows, width].
    """

    @staticmethod
    def forward(
        context: AutogradContext, inputs: Tensor, weight: Tensor, bias: Tensor, counts: tuple[int, ...], reverse: bool
    ) -> Float[Tensor, "rows width"]:
        width, transposed = weight.shape[1], weight.t()
        gates = inputs + bias
        h, c = (inputs.new_empty(len(inputs), width) for _ in range(2))
        all_gates, outputs, states = (rows.split(counts) for rows in (gates, h, c))
        i, f, g, o = (gate.split(counts) for gate in gates.split(width, 1))
        i_and_f = gates[:, : 2 * width].split(counts)
        for time, previous, carried in _time_steps(counts, reverse):
            if carried:
                all_gates[time][:carried].addmm_(outputs[previous][:carried], transposed)
            i_and_f[time].sigmoid_()
            g[time].tanh_()
            o[time].sigmoid_()
            torch.mul(i[time], g[time], out=states[time])
            if carried:
                states[time][:carried].addcmul_(f[time][:carried], states[previous][:carried])
            torch.tanh(states[time], out=outputs[time]).mul_(o[time])
        context.save_for_backward(weight, gates, h, c)
        context.counts, context.reverse = counts, reverse
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: AutogradContext, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, h, c = context.saved_tensors
        counts, reverse, width = context.counts, context.reverse, weight.shape[1]
        i, f, g, o = gates.split(width, 1)
        tanh_c = c.tanh()
        slopes = torch.empty_like(gates)  # d(c or h) / d(input of a gate); times the gradient of c or h in the loop
        slope_i, slope_f, slope_g, slope_o = slopes.split(width, 1)
        torch.mul(g * i, 1 - i, out=slope_i)
        torch.mul(_previous(c, counts, reverse) * f, 1 - f, out=slope_f)
        torch.mul(i, 1 - g * g, out=slope_g)
        torch.mul(tanh_c * o, 1 - o, out=slope_o)
        slope_c = (o * (1 - tanh_c * tanh_c)).split(counts)
        all_slopes, slope_o, output_gradients, forget = (rows.split(counts) for rows in (slopes, slope_o, dh, f))
        i_f_g = slopes.view(-1, 4, width)[:, :3].split(counts)
        h_gradient, c_gradient = (dh.new_zeros(max(counts), width) for _ in range(2))
        for time, _, carried in reversed(list(_time_steps(counts, reverse))):
            dh_time, dc_time = h_gradient[: counts[time]], c_gradient[: counts[time]]
            dc_time.addcmul_(dh_time.add_(output_gradients[time]), slope_c[time])
            i_f_g[time].mul_(dc_time[:, None])
            slope_o[time].mul_(dh_time)
            dc_time.mul_(forget[time])
            if carried:
                torch.mm(all_slopes[time][:carried], weight, out=dh_time[:carried])
        return slopes, _weight_gradient(slopes, h, counts, reverse), slopes.sum(0), None, None


class _Gru(torch.autograd.Function):
    """One layer and direction of a GRU: h = n + z (h' - n), n = tanh(x_n + r h_n) (Cho et al. 2014, as torch.nn.GRU).

    r = sigmoid(x_r + h_r) and z = sigmoid(x_z + h_z), where x_r, x_z, x_n are W_ih x + b_ih, split in three, and h_r,
    h_z, h_n are W_hh h' + b_hh; h' is the previous output. `inputs` are W_ih x + b_ih, [rows, 3 width]; the result is
    h, [rows, width].
    """

    @staticmethod
    def forward(
        context: AutogradContext, inputs: Tensor, weight: Tensor, bias: Tensor, counts: tuple[int, ...], reverse: bool
    ) -> Float[Tensor, "rows width"]:
        width, transposed = weight.shape[1], weight.t()
        gates = inputs.clone()
        hidden = bias.expand(len(inputs), -1).clone()
        h = inputs.new_empty(len(inputs), width)
        all_hidden, outputs = hidden.split(counts), h.split(counts)
        r, z, n = (gate.split(counts) for gate in gates.split(width, 1))
        r_and_z, hidden_r_and_z = (rows[:, : 2 * width].split(counts) for rows in (gates, hidden))
        hidden_n = hidden[:, 2 * width :].split(counts)
        for time, previous, carried in _time_steps(counts, reverse):
            if carried:
                all_hidden[time][:carried].addmm_(outputs[previous][:carried], transposed)
            r_and_z[time].add_(hidden_r_and_z[time]).sigmoid_()
            n[time].addcmul_(r[time], hidden_n[time]).tanh_()
            torch.mul(z[time], n[time], out=outputs[time])
            torch.sub(n[time], outputs[time], out=outputs[time])
            if carried:
                outputs[time][:carried].addcmul_(z[time][:carried], outputs[previous][:carried])
        context.save_for_backward(weight, gates, hidden[:, 2 * width :].clone(), h)
        context.counts, context.reverse = counts, reverse
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: AutogradContext, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        weight, gates, hidden, h = context.saved_tensors
        counts, reverse, width = context.counts, context.reverse, weight.shape[1]
        r, z, n = gates.split(width, 1)
        slopes = torch.empty_like(gates)  # dh / d(h_r, h_z, h_n); times the gradient of h in the loop
        slope_r, slope_z, slope_hidden = slopes.split(width, 1)
        slope_n = (1 - z) * (1 - n * n)
        torch.mul(slope_n, r, out=slope_hidden)
        torch.mul(slope_hidden * hidden, 1 - r, out=slope_r)
        torch.mul((_previous(h, counts, reverse) - n) * z, 1 - z, out=slope_z)
        all_slopes, n_slopes, output_gradients, update = (rows.split(counts) for rows in (slopes, slope_n, dh, z))
        r_z_hidden = slopes.view(-1, 3, width).split(counts)
        h_gradient = dh.new_zeros(max(counts), width)
        for time, _, carried in reversed(list(_time_steps(counts, reverse))):
            dh_time = h_gradient[: counts[time]].add_(output_gradients[time])
            r_z_hidden[time].mul_(dh_time[:, None])
            n_slopes[time].mul_(dh_time)
            if carried:
                dh_time[:carried].mul_(update[time][:carried]).addmm_(all_slopes[time][:carried], weight)
        input_gradient = torch.cat([slopes[:, : 2 * width], slope_n], 1)
        return input_gradient, _weight_gradient(slopes, h, counts, reverse), slopes.sum(0), None, None


def _time_steps(counts: Sequence[int], reverse: bool) -> Iterator[tuple[int, int, int]]:
    """Yield each time step, the previous one, and the number of sequences that have a row in both.

    In reverse, the previous time step is the later one.
    """
    times = range(len(counts))
    for time in reversed(times) if reverse else times:
        previous = time + 1 if reverse else time - 1
        yield time, previous, min(counts[time], counts[previous]) if previous in times else 0


def _consecutive_rows(counts: Sequence[int]) -> tuple[Tensor, slice]:
    """Return the rows that have a next row in their sequence, and these next rows: all but those of the first step."""
    sizes = torch.tensor(counts)
    next_rows = torch.arange(counts[0], int(sizes.sum()))
    return next_rows - sizes[:-1].repeat_interleave(sizes[1:]), slice(counts[0], None)


def _previous(values: Tensor, counts: Sequence[int], reverse: bool) -> Tensor:
    """Return the value of the row before each row of a sequence, or after it in reverse; 0 if there is no such row."""
    previous = torch.zeros_like(values)
    earlier, later = _consecutive_rows(counts)
    if reverse:
        return previous.index_copy_(0, earlier, values[later])
    previous[later] = values[earlier]
    return previous


def _weight_gradient(slopes: Tensor, h: Tensor, counts: Sequence[int], reverse: bool) -> Tensor:
    """Return the gradient of W_hh, the weight that multiplies the previous output."""
    earlier, later = _consecutive_rows(counts)
    return slopes[earlier].t() @ h[later] if reverse else slopes[later].t() @ h[earlier]

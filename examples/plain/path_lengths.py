"""Path lengths: how many layers or steps until the first token can change the output of the last one?

Self-attention needs one layer, a window of radius r needs (n - 1) / r layers, a convolution of kernel k needs
2 (n - 1) / (k - 1), dilated ones about log_k(n). A recurrent layer needs one layer, but n - 1 steps that cannot run at
the same time (Vaswani et al. 2017, table 1).
"""

from collections.abc import Callable
from math import ceil, log

import torch
from torch import nn

from heedful.nn.layout import Layout
from heedful.nn.local_attention import restricted
from heedful.study.layers import unfused_self_attention

ROWS, WIDTH, RADIUS, KERNEL = 28, 4, 3, 3
Layer = Callable[[torch.Tensor, int], torch.Tensor]  # rows and the number of the layer


def attention(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Return softmax(x x^T / sqrt(d)) x."""
    return (x @ x.T / WIDTH**0.5).softmax(-1) @ x


def window(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Compute self-attention in which a row sees only rows at most RADIUS positions away."""
    positions = torch.arange(ROWS)
    far = (positions[:, None] - positions).abs() > RADIUS
    return (x @ x.T / WIDTH**0.5).masked_fill(far, -torch.inf).softmax(-1) @ x


def convolution(x: torch.Tensor, layer: int, growth: int = 1) -> torch.Tensor:
    """Sum KERNEL neighbours that are `growth`^layer positions apart: a convolution with all weights 1."""
    apart, kernel = growth**layer, torch.ones(WIDTH, 1, KERNEL, dtype=x.dtype)
    return nn.functional.conv1d(x.T[None], kernel, padding=apart * (KERNEL // 2), dilation=apart, groups=WIDTH)[0].T


def dilated(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Compute a convolution whose dilation grows by the factor KERNEL with each layer."""
    return convolution(x, layer, growth=KERNEL)


def layers_needed(step: Layer) -> int:
    """Return the number of layers until the gradient of the last row reaches the first row of the input."""
    x = source = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    for layer in range(ROWS):
        x = step(x, layer)
        if torch.autograd.grad(x[-1].sum(), source, retain_graph=True)[0][0].any():
            return layer + 1
    raise AssertionError("the first row is never seen")


def main() -> dict[str, int]:
    """Return the layers that each kind needs, after comparing both attentions with the library's."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    near = restricted(*[x[:, None]] * 3, Layout.of([0, ROWS]), radius=RADIUS, scale=WIDTH**-0.5)[:, 0]
    assert torch.allclose(window(x, 0), near) and torch.allclose(attention(x, 0), unfused_self_attention(x))
    layer_counts = {step.__name__: layers_needed(step) for step in (attention, window, convolution, dilated)}
    gap = ROWS - 1
    expected = (1, ceil(gap / RADIUS), ceil(2 * gap / (KERNEL - 1)), ceil(log(2 * gap + 1, KERNEL)))
    assert tuple(layer_counts.values()) == expected
    return layer_counts


if __name__ == "__main__":
    print(main())

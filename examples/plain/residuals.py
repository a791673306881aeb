"""Residual connections and layer norm: gradients in a deep stack with and without them.

Without x + f(x) the gradient of the first layer is a product of many small Jacobians and vanishes (He et al. 2016).
The norm before each sublayer keeps rows at one scale (Xiong et al. 2020).
"""

import torch
from torch import nn

LAYERS, WIDTH, ROWS = 24, 32, 16


def first_gradient(residual: bool, norm: bool) -> float:
    """Return the norm of the first layer's gradient divided by the norm of the last layer's."""
    torch.manual_seed(0)
    mlps = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)
    for mlp in mlps:
        y = mlp(nn.functional.layer_norm(x, [WIDTH]) if norm else x)
        x = x + y if residual else y
    x.sum().backward()
    first, last = (mlp[0].weight.grad.norm().item() for mlp in (mlps[0], mlps[-1]))
    return first / last


def main() -> dict[str, float]:
    """Return the ratio of gradients for each variant."""
    ratios = {
        "neither": first_gradient(residual=False, norm=False),
        "norm before": first_gradient(residual=False, norm=True),
        "residuals": first_gradient(residual=True, norm=False),
        "residuals and norm before": first_gradient(residual=True, norm=True),
    }
    assert ratios["neither"] < 1e-6 < 0.1 < ratios["residuals and norm before"] < 100
    return ratios


if __name__ == "__main__":
    for name, ratio in main().items():
        print(f"{name:26} {ratio:.2e}")

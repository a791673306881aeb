"""Why scores are divided by sqrt(d): their variance, and the gradient that passes the softmax.

If the d components of q and k are independent with variance 1, q k has variance d. Large scores make the softmax
almost one-hot, where its gradient vanishes (Vaswani et al. 2017, footnote 4).
"""

import torch

from heedful.nn.scores import dot, scaled_dot

WIDTHS = (16, 64, 256, 1024)


def gradient_norm(scores: torch.Tensor) -> float:
    """Return the mean norm of the softmax's Jacobian, diag(p) - p p^T, over rows of scores."""
    p = scores.softmax(-1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(jacobian.flatten(1).norm(dim=1).mean())


def main() -> dict[int, tuple[float, float, float, float]]:
    """Return for each width the variance of the scores and the gradient norm, without and with the division."""
    torch.manual_seed(0)
    table = {}
    for width in WIDTHS:
        q, k = torch.randn(200, width), torch.randn(20, width)
        raw, scaled = dot(q, k), scaled_dot(q, k)
        assert torch.allclose(scaled, q @ k.T / width**0.5)
        table[width] = (float(raw.var()), gradient_norm(raw), float(scaled.var()), gradient_norm(scaled))
    return table


if __name__ == "__main__":
    print("   d   variance  gradient   variance / d  gradient of scaled scores")
    for width, (variance, gradient, scaled_variance, scaled_gradient) in main().items():
        print(f"{width:4} {variance:10.1f} {gradient:9.4f} {scaled_variance:14.2f} {scaled_gradient:9.4f}")

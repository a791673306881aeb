"""Hard attention reads one value; how does it learn, if choosing has no gradient?

Straight-through: the forward pass takes the one-hot choice, the backward pass pretends that the soft weights were
used (Bengio et al. 2013). It is biased but has low variance; REINFORCE is unbiased with high variance (Xu et al.
2015).
"""

import torch

from heedful.nn.scores import hard_weights

KEYS = 5


def straight_through(scores: torch.Tensor) -> torch.Tensor:
    """Return one-hot weights of the largest score, with the gradient of the softmax."""
    soft = scores.softmax(-1)
    one_hot = torch.nn.functional.one_hot(soft.argmax(-1), scores.shape[-1]).to(soft)
    return one_hot + soft - soft.detach()


def main() -> None:
    """Compare values and gradients with the library's, then learn to read the value that the loss wants."""
    torch.manual_seed(0)
    scores = torch.randn(1, KEYS, requires_grad=True)
    values = torch.randn(KEYS)
    weights = (straight_through(scores), hard_weights((scores,))[0])
    gradients = [torch.autograd.grad((w @ values).sum(), scores)[0] for w in weights]
    assert torch.allclose(*weights) and torch.allclose(*gradients)

    learned = torch.zeros(1, KEYS, requires_grad=True)
    optimizer = torch.optim.SGD([learned], lr=1.0)
    targets = torch.arange(KEYS).float()
    for _ in range(50):
        loss = (straight_through(learned) @ targets - 3.0).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert learned.argmax() == 3


if __name__ == "__main__":
    main()

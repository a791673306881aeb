"""Knowledge distillation: a student learns the teacher's softened probabilities.

KL(softmax(t / T) || softmax(s / T)) T^2, where T > 1 shows how the teacher ranks wrong classes and T^2 keeps the size
of the gradient (Hinton et al. 2015, section 2).
"""

import torch

from heedful.objectives.distillation.losses import kd_kl


def loss(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the loss of each row of logits."""
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    return (p * (p / q).log()).sum(-1) * temperature**2


def main() -> None:
    """Compare with the library's loss; equal logits have the loss 0, and the gradient hardly depends on T."""
    torch.manual_seed(0)
    teacher, student = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    assert torch.allclose(loss(student, teacher, 2.0), kd_kl(student, teacher, 2.0), atol=1e-6)
    assert loss(teacher, teacher, 2.0).abs().max() < 1e-6
    norms = [torch.autograd.grad(loss(student, teacher, t).sum(), student)[0].norm() for t in (10.0, 100.0)]
    assert 0.8 < norms[0] / norms[1] < 1.25


if __name__ == "__main__":
    main()

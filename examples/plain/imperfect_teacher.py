"""A teacher that makes mistakes: what a student learns from few labels, from its answers, and from its probabilities.

The teacher is right about 85 texts of 100. The student has few labels and many unlabelled texts; the loss of what is
distilled is T^2 KL(softmax(t / T) || softmax(s / T)) (Hinton et al. 2015).
"""

import torch
from torch.nn import functional as F

from heedful.objectives.distillation.losses import kd_kl

WIDTH, CLASSES, LABELS, TEXTS, TEMPERATURE = 20, 5, 30, 300, 2.0


def fit(x: torch.Tensor, target: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    """Weights of a linear student, from labels or, with a temperature, from the teacher's logits."""
    w = torch.zeros(WIDTH, CLASSES, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.05, weight_decay=1e-3)
    for _ in range(200):
        found = x @ w
        loss = F.cross_entropy(found, target) if temperature is None else kd_kl(found, target, temperature).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return w.detach()


def trial(seed: int) -> list[float]:
    """Accuracy of the teacher and of three students on new texts."""
    torch.manual_seed(seed)
    truth = torch.randn(WIDTH, CLASSES)
    x, unlabelled, test = (torch.randn(count, WIDTH) for count in (LABELS, TEXTS, 2_000))
    teacher = truth + 0.25 * torch.randn(WIDTH, CLASSES)  # the same mistakes each time it is asked
    gold, logits = (test @ truth).argmax(-1), unlabelled @ teacher / 2
    students = (
        fit(x, (x @ truth).argmax(-1)),
        fit(unlabelled, logits.argmax(-1)),
        fit(unlabelled, logits, TEMPERATURE),
    )
    return [float(((test @ w).argmax(-1) == gold).float().mean()) for w in (teacher, *students)]


def main() -> dict[str, float]:
    """Return mean accuracies over five draws, after comparing the loss with its formula."""
    t, s = torch.randn(4, CLASSES), torch.randn(4, CLASSES)
    p, q = (t / TEMPERATURE).softmax(-1), (s / TEMPERATURE).softmax(-1)
    assert torch.allclose((p * (p / q).log()).sum(-1) * TEMPERATURE**2, kd_kl(s, t, TEMPERATURE), atol=1e-5)
    means = torch.tensor([trial(seed) for seed in range(5)]).mean(0).tolist()
    names = ("teacher", f"{LABELS} correct labels", "the teacher's answers", "the teacher's probabilities")
    found = dict(zip(names, means, strict=True))
    assert means[1] < means[2] < means[3] < 0.95
    return found


if __name__ == "__main__":
    for name, accuracy in main().items():
        print(f"{name:28} {accuracy:.3f}")

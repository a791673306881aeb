"""Losses that compare the scores, hidden states and attention relations of a student with those of its teacher.

Equal models have the loss 0. T is the temperature, s and t are values of student and teacher, and q and p are the
log-probabilities of their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.objectives.base import full_precision, upcast

Vectors = Float[Tensor, "vectors dim"]


def kd_kl(
    student: Float[Tensor, "targets classes"], teacher: Float[Tensor, "targets classes"], temperature: float = 1.0
) -> Float[Tensor, " targets"]:
    """Return T² KL(softmax(t / T), softmax(s / T)) of each target (Hinton et al. 2015, section 2).

    Without the factor T², the gradient would shrink with 1 / T².

    >>> s, t = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]])
    >>> float(kd_kl(s, t, 2.0)), round(float(kd_kl(s, -t, 2.0)), 4)
    (0.0, 0.4898)
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def kd_kl_multi_label(
    student: Float[Tensor, "targets labels"], teacher: Float[Tensor, "targets labels"], temperature: float = 1.0
) -> Float[Tensor, " targets"]:
    """Return, for each target of a multi-label problem, the mean over labels of T² KL between sigmoids."""
    parts = []
    for sign in (1.0, -1.0):
        p, q = F.logsigmoid(sign * teacher / temperature), F.logsigmoid(sign * student / temperature)
        parts.append(p.exp() * (p - q))
    return temperature**2 * (parts[0] + parts[1]).mean(-1)


def kd_kl_spans(student: Vectors, teacher: Vectors, bounds: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return, for each sequence, `kd_kl` over its tokens, averaged over start and end scores.

    Args:
        student: Start and end scores of the student, [tokens, 2].
        teacher: Start and end scores of the teacher, [tokens, 2].
        bounds: Bounds of the sequences.
        temperature: T.
    """
    losses = [
        kd_kl(student[start:stop].T, teacher[start:stop].T, temperature).mean() for start, stop in pairwise(bounds)
    ]
    return torch.stack(losses)


def kd_kl_choices(
    student: Float[Tensor, " sequences"],
    teacher: Float[Tensor, " sequences"],
    groups: Sequence[int],
    temperature: float = 1.0,
) -> Tensor:
    """Return, for each prompt, `kd_kl` over its candidates. `groups` are the candidate counts of the prompts."""
    pairs = zip(student.split(list(groups)), teacher.split(list(groups)), strict=True)
    return torch.cat([kd_kl(s[None], t[None], temperature) for s, t in pairs])


def kd_margins(
    student: Float[Tensor, " documents"], teacher: Float[Tensor, " documents"], groups: Sequence[int]
) -> Tensor:
    """Return, for each query, the mean of ((s_1 - s_i) - (t_1 - t_i))² over documents i > 1 (Hofstätter et al. 2020).

    `groups` are the document counts of the queries.

    >>> s, t = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([1.0, 2.0, 5.0])
    >>> kd_margins(s, t, [3]), kd_margins(s + 7, s, [3])
    (tensor([2.]), tensor([0.]))
    """
    differences = (student - teacher).split(list(groups))
    return torch.stack([(group[0] - group[1:]).square().mean() for group in differences])


def topk_with_rest(
    teacher: Float[Tensor, "targets classes"], count: int, temperature: float = 1.0
) -> tuple[Int[Tensor, "targets count"], Float[Tensor, "targets count_and_one"]]:
    """Return the teacher's `count` top classes, and log p of each; the last column is log p of all other classes."""
    p = (teacher / temperature).log_softmax(-1)
    top_p, ids = p.topk(min(count, p.shape[-1]), -1)
    return ids, torch.cat([top_p, _rest(p, ids)], -1)


def kd_kl_topk(
    student: Float[Tensor, "targets classes"],
    ids: Int[Tensor, "targets count"],
    p: Float[Tensor, "targets count_and_one"],
    temperature: float = 1.0,
) -> Float[Tensor, " targets"]:
    """Return T² KL over the teacher's top classes and one more class that unites all other classes.

    Args:
        student: Scores of the student.
        ids: The teacher's top classes, from `topk_with_rest`.
        p: Log-probabilities of these classes and of all other ones, from `topk_with_rest`.
        temperature: T.
    """
    q = (student / temperature).log_softmax(-1)
    q = torch.cat([q.gather(-1, ids), _rest(q, ids)], -1)
    return temperature**2 * torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def _rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability that the class is not in `ids`, [targets, 1]."""
    return log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)


def row_mse(student: Vectors, teacher: Vectors) -> Float[Tensor, " vectors"]:
    """Return, for each vector, the mean of (s - t)² over features."""
    return (student - teacher).square().mean(-1)


def cosine_distance(student: Vectors, teacher: Vectors) -> Float[Tensor, " vectors"]:
    """Return, for each vector, 1 - cos(s, t) (Sanh et al. 2019, section 3)."""
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def similarity_matrix_loss(
    student: Vectors, teacher: Float[Tensor, "vectors teacher_dim"], group_size: int
) -> Float[Tensor, " vectors"]:
    """Return, for each vector, the mean of (cos(s, s') - cos(t, t'))² over the other vectors of its group.

    Vectors of student and teacher may have different dimensions (Passalis and Tefas 2018; Tung and Mori 2019).
    """
    losses = []
    for s, t in zip(student.split(group_size), teacher.split(group_size), strict=True):
        a, b = F.normalize(upcast(s), dim=-1), F.normalize(upcast(t), dim=-1)
        with full_precision(a):
            losses.append((a @ a.T - b @ b.T).square().sum(-1) / max(1, len(a) - 1))
    return torch.cat(losses)


def relation_scores(x: Vectors, y: Vectors, heads: int) -> Float[Tensor, "heads vectors vectors"]:
    """Return x y / sqrt(d) of each two tokens of a sequence, for `heads` heads with the head dimension d.

    The number of heads may differ from the model's (Wang et al. 2021, section 3.2).
    """
    a, b = (vectors.unflatten(-1, (heads, -1)) for vectors in (x, y))
    with full_precision(a):
        scores: Tensor = torch.einsum("ihd,jhd->hij", a, b) / a.shape[-1] ** 0.5
    return scores


def relation_kl(
    student: tuple[Vectors, Float[Tensor, "vectors dim"]],
    teacher: tuple[Float[Tensor, "vectors teacher_dim"], Float[Tensor, "vectors teacher_dim"]],
    bounds: Sequence[int],
    heads: int,
    *,
    squares: bool = False,
) -> Float[Tensor, " vectors"]:
    """Return, for each token, the mean over heads of KL(softmax(R_t), softmax(R_s)) (Wang et al. 2021, equation 6).

    R is the result of `relation_scores`. With `squares`, the loss is the mean of (R_t - R_s)² over heads and keys (Jiao
    et al. 2020, equation 7).

    Args:
        student: Two tensors whose relation is compared, such as queries and keys.
        teacher: The same two tensors of the teacher, of any dimension.
        bounds: Bounds of the sequences.
        heads: Number of heads into which the vectors of both models are split.
        squares: Compare scores instead of their softmax.
    """
    losses = []
    for start, stop in pairwise(bounds):
        r_s, r_t = (relation_scores(x[start:stop], y[start:stop], heads) for x, y in (student, teacher))
        if squares:
            losses.append((r_s - r_t).square().mean((0, 2)))
        else:
            p, q = r_t.log_softmax(-1), r_s.log_softmax(-1)
            losses.append((p.exp() * (p - q)).sum(-1).mean(0))
    return torch.cat(losses)

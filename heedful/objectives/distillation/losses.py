"""Losses that compare a student with its teacher: scores, hidden states and relations. Equal models have the loss 0.

T is the temperature; s and t are values of student and teacher; q and p are the log-probabilities of their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.objectives.base import full_precision, upcast

Rows = Float[Tensor, "rows width"]


def kd_kl(
    student: Float[Tensor, "targets classes"], teacher: Float[Tensor, "targets classes"], temperature: float = 1.0
) -> Float[Tensor, " targets"]:
    """Return T² KL(softmax(t / T), softmax(s / T)) of each target (Hinton et al. 2015, section 2).

    The factor T² keeps the size of the gradient, which would shrink with 1 / T².

    >>> s, t = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]])
    >>> float(kd_kl(s, t, 2.0)), round(float(kd_kl(s, -t, 2.0)), 4)
    (0.0, 0.4898)
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def kd_kl_multi_label(
    student: Float[Tensor, "targets labels"], teacher: Float[Tensor, "targets labels"], temperature: float = 1.0
) -> Float[Tensor, " targets"]:
    """Return, for each target, the mean over labels of T² KL between sigmoids; labels do not exclude each other."""
    parts = []
    for sign in (1.0, -1.0):
        p, q = F.logsigmoid(sign * teacher / temperature), F.logsigmoid(sign * student / temperature)
        parts.append(p.exp() * (p - q))
    return temperature**2 * (parts[0] + parts[1]).mean(-1)


def kd_kl_spans(student: Rows, teacher: Rows, bounds: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return, for each sequence, `kd_kl` over its rows: the mean of the losses of start and end scores.

    Args:
        student: Start and end scores of the student, [rows, 2].
        teacher: Scores of the teacher.
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
    """Return, for each prompt, `kd_kl` over its candidates; `groups` are the numbers of candidates."""
    pairs = zip(student.split(list(groups)), teacher.split(list(groups)), strict=True)
    return torch.cat([kd_kl(s[None], t[None], temperature) for s, t in pairs])


def kd_margins(
    student: Float[Tensor, " documents"], teacher: Float[Tensor, " documents"], groups: Sequence[int]
) -> Tensor:
    """Return, for each query, the mean of ((s_1 - s_i) - (t_1 - t_i))² over documents i > 1 (Hofstätter et al. 2020).

    >>> s, t = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([1.0, 2.0, 5.0])
    >>> kd_margins(s, t, [3]), kd_margins(s + 7, s, [3])
    (tensor([2.]), tensor([0.]))
    """
    differences = (student - teacher).split(list(groups))
    return torch.stack([(group[0] - group[1:]).square().mean() for group in differences])


def topk_with_rest(
    teacher: Float[Tensor, "targets classes"], count: int, temperature: float = 1.0
) -> tuple[Int[Tensor, "targets count"], Float[Tensor, "targets count_and_one"]]:
    """Return the top classes, and log p of each; the last column has log p of all other classes together."""
    p = (teacher / temperature).log_softmax(-1)
    top_p, ids = p.topk(min(count, p.shape[-1]), -1)
    return ids, torch.cat([top_p, _rest(p, ids)], -1)


def kd_kl_topk(
    student: Float[Tensor, "targets classes"],
    ids: Int[Tensor, "targets count"],
    p: Float[Tensor, "targets count_and_one"],
    temperature: float = 1.0,
) -> Float[Tensor, " targets"]:
    """Return T² KL over the teacher's top classes and one class for all other classes.

    Args:
        student: Scores of the student.
        ids: The teacher's top classes, as `topk_with_rest` returns them.
        p: Their log-probabilities, as `topk_with_rest` returns them.
        temperature: T, of both models.
    """
    q = (student / temperature).log_softmax(-1)
    q = torch.cat([q.gather(-1, ids), _rest(q, ids)], -1)
    return temperature**2 * torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def _rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of all classes but `ids` together, [targets, 1]."""
    return log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)


def row_mse(student: Rows, teacher: Rows) -> Float[Tensor, " rows"]:
    """Return, for each row, the mean of (s - t)² over features."""
    return (student - teacher).square().mean(-1)


def cosine_distance(student: Rows, teacher: Rows) -> Float[Tensor, " rows"]:
    """Return, for each row, 1 - cos(s, t) (Sanh et al. 2019, section 3)."""
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def similarity_matrix_loss(
    student: Rows, teacher: Float[Tensor, "rows other"], group_size: int
) -> Float[Tensor, " rows"]:
    """Return, for each row, the mean of (cos(s, s') - cos(t, t'))² over the other rows of its group.

    Student and teacher may have different widths (Passalis and Tefas 2018; Tung and Mori 2019).
    """
    losses = []
    for s, t in zip(student.split(group_size), teacher.split(group_size), strict=True):
        a, b = F.normalize(upcast(s), dim=-1), F.normalize(upcast(t), dim=-1)
        with full_precision(a):
            losses.append((a @ a.T - b @ b.T).square().sum(-1) / max(1, len(a) - 1))
    return torch.cat(losses)


def relation_scores(x: Rows, y: Rows, heads: int) -> Float[Tensor, "heads rows rows"]:
    """Return x y / sqrt(d) of each two rows of a sequence, split into `heads` heads of width d.

    The number of heads may differ from the model's (Wang et al. 2021, section 3.2).
    """
    a, b = (rows.unflatten(-1, (heads, -1)) for rows in (x, y))
    with full_precision(a):
        scores: Tensor = torch.einsum("ihd,jhd->hij", a, b) / a.shape[-1] ** 0.5
    return scores


def relation_kl(
    student: tuple[Rows, Float[Tensor, "rows width"]],
    teacher: tuple[Float[Tensor, "rows other"], Float[Tensor, "rows other"]],
    bounds: Sequence[int],
    heads: int,
    *,
    squares: bool = False,
) -> Float[Tensor, " rows"]:
    """Return, for each row, KL(softmax(R_t), softmax(R_s)), the mean over heads (Wang et al. 2021, equation 6).

    R is the result of `relation_scores`. With `squares`, the loss is (R_t - R_s)², the mean over heads and keys (Jiao
    et al. 2020, equation 7).

    Args:
        student: Two tensors whose relation is compared, such as queries and keys.
        teacher: The same two tensors of the teacher, of any width.
        bounds: Bounds of the sequences.
        heads: Heads into which both models' rows are split.
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

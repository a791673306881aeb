"""Losses of a student against its teacher: of scores, hidden states and relations; 0 where both are equal.

Letters: T the temperature, s and t the scores of student and teacher, p and q their softmax or its logarithm.
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

    T² keeps the size of the gradient, which falls with 1 / T².

    >>> s, t = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]])
    >>> float(kd_kl(s, t, 2.0)), round(float(kd_kl(s, -t, 2.0)), 4)
    (0.0, 0.4898)
    """
    p, q = (teacher / temperature).log_softmax(-1), (student / temperature).log_softmax(-1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1)


def kd_kl_multi_label(
    student: Float[Tensor, "targets labels"], teacher: Float[Tensor, "targets labels"], temperature: float = 1.0
) -> Float[Tensor, " targets"]:
    """Return the mean over labels of T² KL between sigmoids, for labels that do not exclude each other."""
    parts = []
    for sign in (1.0, -1.0):
        p, q = F.logsigmoid(sign * teacher / temperature), F.logsigmoid(sign * student / temperature)
        parts.append(p.exp() * (p - q))
    return temperature**2 * (parts[0] + parts[1]).mean(-1)


def kd_kl_spans(student: Rows, teacher: Rows, bounds: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return `kd_kl` over the rows of each sequence, the mean of its start and end scores."""
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
    """Return `kd_kl` over the candidates of each prompt."""
    pairs = zip(student.split(list(groups)), teacher.split(list(groups)), strict=True)
    return torch.cat([kd_kl(s[None], t[None], temperature) for s, t in pairs])


def kd_margins(
    student: Float[Tensor, " documents"], teacher: Float[Tensor, " documents"], groups: Sequence[int]
) -> Tensor:
    """Return the mean of ((s_1 - s_i) - (t_1 - t_i))² over the documents i > 1 of each query (Hofstätter et al. 2020).

    >>> s, t = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([1.0, 2.0, 5.0])
    >>> kd_margins(s, t, [3]), kd_margins(s + 7, s, [3])
    (tensor([2.]), tensor([0.]))
    """
    differences = (student - teacher).split(list(groups))
    return torch.stack([(group[0] - group[1:]).square().mean() for group in differences])


def topk_with_rest(
    teacher: Float[Tensor, "targets classes"], count: int, temperature: float = 1.0
) -> tuple[Int[Tensor, "targets count"], Float[Tensor, "targets count_and_one"]]:
    """Return the top classes, and log p of each and, in the last column, of all other classes together."""
    p = (teacher / temperature).log_softmax(-1)
    top, ids = p.topk(min(count, p.shape[-1]), -1)
    return ids, torch.cat([top, _others(p, ids)], -1)


def kd_kl_topk(
    student: Float[Tensor, "targets classes"],
    ids: Int[Tensor, "targets count"],
    p: Float[Tensor, "targets count_and_one"],
    temperature: float = 1.0,
) -> Float[Tensor, " targets"]:
    """Return T² KL over the teacher's top classes and one class for all others; `p` is from `topk_with_rest`."""
    q = (student / temperature).log_softmax(-1)
    q = torch.cat([q.gather(-1, ids), _others(q, ids)], -1)
    return temperature**2 * torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)


def _others(log_shares: Tensor, ids: Tensor) -> Tensor:
    return log_shares.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)


def row_mse(student: Rows, teacher: Rows) -> Float[Tensor, " rows"]:
    """Return the mean over features of (s - t)², of each row."""
    return (student - teacher).square().mean(-1)


def cosine_distance(student: Rows, teacher: Rows) -> Float[Tensor, " rows"]:
    """Return 1 - cos(s, t) of each row (Sanh et al. 2019, section 3)."""
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


def similarity_matrix_loss(
    student: Rows, teacher: Float[Tensor, "rows other"], group_size: int
) -> Float[Tensor, " rows"]:
    """Return the mean of (cos(s, s') - cos(t, t'))² over the other rows s' of a group, of each row.

    Vectors of any two widths can be compared (Passalis and Tefas 2018; Tung and Mori 2019).
    """
    losses = []
    for s, t in zip(student.split(group_size), teacher.split(group_size), strict=True):
        a, b = F.normalize(upcast(s), dim=-1), F.normalize(upcast(t), dim=-1)
        with full_precision(a):
            losses.append((a @ a.T - b @ b.T).square().sum(-1) / max(1, len(a) - 1))
    return torch.cat(losses)


def relation_scores(x: Rows, y: Rows, heads: int) -> Float[Tensor, "heads rows rows"]:
    """Return x y / sqrt(d) of the rows of one sequence, split into `heads` heads of width d.

    The heads need not be those of the model: they are regrouped (Wang et al. 2021, section 3.2).
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
    """Return KL(softmax(R_t), softmax(R_s)) of each row, the mean over the heads (Wang et al. 2021, equation 6).

    With `squares`, (R_t - R_s)² before the softmax, the mean over heads and keys (Jiao et al. 2020, equation 7).
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

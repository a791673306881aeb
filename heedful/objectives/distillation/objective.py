"""Distillation: a student learns its teacher's scores and states, and labels where there are any (Hinton et al. 2015).

Each term is a mean over its own targets in the whole step: soft labels over scored items (sequences, words, masked
tokens), labels over items that have one, states and relations over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.pooling import PooledClassesHead
from heedful.objectives.base import Batch, Sample, SelfSupervised, Term, upcast
from heedful.objectives.distillation.losses import (
    cosine_distance,
    kd_kl,
    kd_kl_choices,
    kd_kl_multi_label,
    kd_kl_spans,
    kd_kl_topk,
    kd_margins,
    relation_kl,
    row_mse,
    similarity_matrix_loss,
)
from heedful.objectives.distillation.teacher import (
    CaptureSpec,
    SampleAlignment,
    ScoreKind,
    ScoringObjective,
    TeacherOutputs,
    capture,
    score_counts,
)

AskTeacher = Callable[
    [Sequence[int], Sequence[int]], TeacherOutputs
]  # numbers of the teacher's samples, and their keys
GROUP = 16  # samples whose vectors are compared with each other, where student and teacher have other widths


class DistillationTarget(NamedTuple):
    """Replaces a sample's target during distillation: its label and the number of the teacher's output."""

    target: Any  # the task's own
    number: int
    labelled: bool
    share: float  # in a kd term: 1 / windows


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStateLoss:
    """Loss of hidden states, for pairs of layers of student and teacher."""

    weight: float
    how: Literal["mse", "cosine"]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationLoss:
    """Loss of relations between queries, keys and values of an attention layer of each; "qk" is attention."""

    weight: float
    of: tuple[str, ...]
    pair: tuple[int, int]
    heads: int
    squares: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLosses:
    """Weights of the losses; one of weight 0 is left out."""

    kd: float = 1.0  # weight of the term over soft labels
    temperature: float = 2.0
    ranking: Literal["listwise", "margin_mse"] = "listwise"  # of the scores of a query's documents
    label: float = 1.0  # weight of the term over labels
    states: tuple[HiddenStateLoss, ...] = ()
    relations: tuple[RelationLoss, ...] = ()

    def wanted(self, side: int) -> CaptureSpec:
        """Return the layers to capture in the student (side 0) or the teacher (side 1)."""
        states = {pair[side] for loss in self.states for pair in loss.pairs}
        return CaptureSpec(
            states=tuple(sorted(states)), attention=tuple(sorted({loss.pair[side] for loss in self.relations}))
        )


class TeacherRequest(NamedTuple):
    """Inputs of the distillation terms, beside the batch of the task."""

    samples: Sequence[Sample]  # the task's
    numbers: list[int]
    keys: list[int]
    label: Tensor  # weight of each target of the task: 0 without a label
    kd: Tensor  # weight of each target of the kd term
    sizes: list[int]  # scores of each sample
    rows: Tensor | None  # weight of each row in losses of states and relations: 0 for padding; None: 1


@dataclass(frozen=True, kw_only=True)
class Distillation(SelfSupervised):
    """The objective of a task, or masked language modelling, with terms of a teacher."""

    learner: ScoringObjective  # of the student
    kind: ScoreKind
    losses: DistillationLosses
    ask: AskTeacher
    pairing: SampleAlignment
    project: nn.ModuleDict  # maps of the student's states to the teacher's width, where these differ
    group: int = 1  # samples whose vectors are compared; 1: vectors are compared with the teacher's own
    classes: int | None = None  # number of scores that are compared, of a vocabulary that both have; None: all
    first: Literal["kd", "label"] = "kd"  # the term that is named first

    @property
    def group_size(self) -> int:  # type: ignore[override]
        """Samples that the task, or the comparison of vectors, compares."""
        return max(getattr(self.learner, "group_size", 1), self.group)

    @property
    def num_static_masks(self) -> int | None:  # type: ignore[override]
        """The static masks of the task."""
        return getattr(self.learner, "num_static_masks", None)

    @property
    def extra_module(self) -> nn.Module | None:  # type: ignore[override]
        """The maps of states; None without any."""
        return self.project if len(self.project) else None

    @cached_property
    def term_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """The weight of each term."""
        return tuple(weight for _, weight in self._weights)

    @cached_property
    def _weights(self) -> list[tuple[str, float]]:
        """Names and weights of the terms; those of states and relations are named by their numbers."""
        scores = [("kd", self.losses.kd), ("label", self.losses.label)]
        if self.first == "label":
            scores = scores[::-1]
        scores = [(name, weight) for name, weight in scores if weight > 0 or (name, self.first) == ("label", "label")]
        inside: list[HiddenStateLoss | RelationLoss] = [*self.losses.states, *self.losses.relations]
        at = 0 if not scores or (scores[0][0] == "label" and self.first == "kd") else 1
        return [*scores[:at], *((str(number), loss.weight) for number, loss in enumerate(inside)), *scores[at:]]

    def prepared(self, samples: Sequence[Sample], owners: Sequence[int], labelled: Sequence[bool]) -> list[Sample]:
        """Return the task's samples with `DistillationTarget`s.

        Args:
            samples: Of the task.
            owners: The number of each one's example.
            labelled: Whether each example has a label.
        """
        windows: dict[int, int] = {}
        for owner in owners:
            windows[owner] = windows.get(owner, 0) + 1
        return [
            replace(sample, target=DistillationTarget(sample.target, number, labelled[owner], 1 / windows[owner]))
            for number, (sample, owner) in enumerate(zip(samples, owners, strict=True))
        ]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the task's batch with a `TeacherRequest`."""
        targets: list[DistillationTarget] = [sample.target for sample in samples]
        plain = [replace(sample, target=sample.target.target) for sample in samples]
        batch = self.learner.batch(plain, keys)
        sizes = score_counts(plain, batch, self.kind)
        counts = torch.tensor(sizes) if len(batch.weights) != len(plain) else torch.ones(len(plain), dtype=torch.long)
        labelled = torch.tensor([float(target.labelled) for target in targets])
        label = batch.weights * labelled.repeat_interleave(counts)
        request = TeacherRequest(
            samples=plain,
            numbers=[target.number for target in targets],
            keys=list(keys),
            label=label,
            kd=self._kd_weights(targets, batch, sizes),
            sizes=sizes,
            rows=_without_filler(plain),
        )
        rows = float(batch.packed.bounds[-1]) if request.rows is None else _total(request.rows)
        count = {"kd": _total(request.kd), "label": _total(label)}
        return replace(batch, words=request, counts=tuple(count.get(name, rows) for name, _ in self._weights))

    def _kd_weights(self, targets: Sequence[DistillationTarget], batch: Batch, sizes: Sequence[int]) -> Tensor:
        """The weight of each target: 1 / windows for a window, 1 for a word, a masked token or a vector."""
        fits = torch.tensor([float(self.pairing.fits(target.number)) for target in targets])
        shares = torch.tensor([target.share for target in targets])
        match self.kind:
            case "masked":
                return batch.weights
            case "tokens" | "vectors":
                return fits.repeat_interleave(torch.tensor(sizes))
        return fits * shares

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return all terms, in the order of `term_weights`."""
        request: TeacherRequest = batch.words
        rows, own = capture(loaded, batch.packed, self.losses.wanted(0))
        scores = self.learner.scores(loaded, batch, rows)
        taught = self._teacher_outputs(request, scores.detach()) if self._asks else {}
        inside: list[HiddenStateLoss | RelationLoss] = [*self.losses.states, *self.losses.relations]
        terms = []
        for name, _ in self._weights:
            if name == "kd":
                losses = self._kd_losses(scores[..., : self.classes], taught, batch)
                terms.append(Term("kd", losses, None, request.kd.to(losses, non_blocking=True)))
            elif name == "label":
                terms.append(self._label_term(loaded, rows, scores, batch))
            else:
                terms.append(self._inside_term(int(name), inside[int(name)], own, taught, batch))
        return tuple(terms)

    @property
    def _asks(self) -> bool:
        return any(name != "label" for name, _ in self._weights)

    def _label_term(self, loaded: ModelBundle, rows: Tensor | None, scores: Tensor, batch: Batch) -> Term:
        losses = self.learner.target_losses(scores, batch)
        if isinstance(loaded.head, PooledClassesHead):
            assert rows is not None  # `capture` returns them for such a head
            losses = losses + loaded.head.penalty(rows, batch.packed)
        right = None
        if not torch.is_grad_enabled() and self.kind == "masked":
            right = scores.argmax(-1) == batch.targets
        return Term(
            "mlm" if self.kind == "masked" else "label", losses, right, batch.words.label.to(losses, non_blocking=True)
        )

    def _teacher_outputs(self, request: TeacherRequest, scores: Tensor) -> dict[str, Tensor]:
        """The teacher's outputs for the samples of a batch, end to end, by name."""
        groups = [self.pairing.teacher_numbers[number] for number in request.numbers]
        keys = [key for key, group in zip(request.keys, groups, strict=True) for _ in group]
        asked = list(dict.fromkeys(zip((number for group in groups for number in group), keys, strict=True)))
        outputs = self.ask([number for number, _ in asked], [key for _, key in asked]) if asked else {"scores": []}
        index = {pair: at for at, pair in enumerate(asked)}
        joined: dict[str, Tensor] = {}
        for name, tensors in outputs.items():
            parts = []
            for number, group, key, size in zip(request.numbers, groups, request.keys, request.sizes, strict=True):
                if self.pairing.fits(number):
                    windows = [tensors[index[window, key]] for window in group]
                    parts.append(windows[0] if name != "scores" else self.pairing.scores(number, windows))
                else:
                    like = tensors[0] if tensors else scores
                    parts.append(like.new_zeros(size, scores.shape[-1]))
            joined[name] = torch.cat(parts).to(scores.device, non_blocking=True)
        return joined

    def _kd_losses(self, scores: Tensor, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """The loss of each target of the kd term."""
        temperature = self.losses.temperature
        if "ids" in outputs:
            return kd_kl_topk(scores, outputs["ids"].long(), outputs["scores"].float(), temperature)
        taught = upcast(outputs["scores"])
        match self.kind:
            case "multiple":
                return kd_kl_multi_label(scores, taught, temperature)
            case "numbers":
                return row_mse(scores, taught)
            case "span":
                return kd_kl_spans(scores, taught, batch.packed.bounds, temperature)
            case "choice":
                return kd_kl_choices(scores, taught, batch.words.sizes, temperature)
            case "ranking" if self.losses.ranking == "margin_mse":
                return kd_margins(scores[:, 0], taught[:, 0], batch.words.sizes)
            case "ranking":
                return kd_kl_choices(scores[:, 0], taught[:, 0], batch.words.sizes, temperature)
            case "vectors" if self.group > 1:
                return similarity_matrix_loss(scores, taught, 2 * self.group)
            case "vectors":
                return cosine_distance(scores, taught)
        return kd_kl(scores, taught, temperature)

    def _inside_term(
        self,
        number: int,
        loss: HiddenStateLoss | RelationLoss,
        student: dict[str, Tensor],
        teacher: dict[str, Tensor],
        batch: Batch,
    ) -> Term:
        """The loss of each row: the mean over pairs of layers for states, over kinds of relations for relations."""
        parts = []
        if isinstance(loss, HiddenStateLoss):
            compare = row_mse if loss.how == "mse" else cosine_distance
            for layer, teacher_layer in loss.pairs:
                state, name = student[f"states.{layer}"], f"{layer} {teacher_layer}"
                state = self.project[name](state).float() if name in self.project else state
                parts.append(compare(state, teacher[f"states.{teacher_layer}"].float()))
        else:
            sides = ((student, loss.pair[0]), (teacher, loss.pair[1]))
            for kinds in loss.of:
                x, y = kinds[0], kinds[1]
                pairs = [(side[f"{x}.{layer}"].float(), side[f"{y}.{layer}"].float()) for side, layer in sides]
                bounds = batch.packed.bounds
                parts.append(relation_kl(pairs[0], pairs[1], bounds, loss.heads, squares=loss.squares))
        kind, losses = "states" if isinstance(loss, HiddenStateLoss) else "relations", torch.stack(parts).mean(0)
        weights = batch.words.rows
        return Term(
            f"{kind}_{number + 1}", losses, None, None if weights is None else weights.to(losses, non_blocking=True)
        )


def state_projections(losses: DistillationLosses, widths: tuple[int, int], seed: int) -> nn.ModuleDict:
    """Return linear maps of states to the teacher's width, by pair of layers; none if the `widths` are equal."""
    maps = nn.ModuleDict()
    if widths[0] != widths[1]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer, teacher_layer in dict.fromkeys(pair for loss in losses.states for pair in loss.pairs):
                maps[f"{layer} {teacher_layer}"] = nn.Linear(widths[0], widths[1])
    return maps


def _without_filler(samples: Sequence[Sample]) -> Tensor | None:
    """The weight of each row, 0 for padding; None if no sample is padded."""
    if not any(sample.filler for sample in samples):
        return None
    parts = [torch.ones(len(sample)) for sample in samples]
    for weights, sample in zip(parts, samples, strict=True):
        weights[len(sample) - sample.filler :] = 0
    return torch.cat(parts)


def _total(weights: Tensor) -> float:
    return float(weights.sum(dtype=torch.float64))

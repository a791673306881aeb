"""A student learns what its teacher says, and what labels say where there are some (Hinton et al. 2015).

Every term is a mean over its own targets of the whole step: soft labels over what is scored (sequences, words, hidden
tokens), hard labels over what has one, states and relations over tokens.
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
    """What stands in the place of a sample's target."""

    target: Any  # the task's own
    number: int
    labelled: bool
    share: float  # in a kd term: 1 / windows


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStateLoss:
    """Hidden states of pairs of layers, student's and teacher's."""

    weight: float
    how: Literal["mse", "cosine"]
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationLoss:
    """What is related to what in an attention layer of each, "qk" being attention, and in how many heads."""

    weight: float
    of: tuple[str, ...]
    pair: tuple[int, int]
    heads: int
    squares: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLosses:
    """What is learned of the teacher, and what of labels; what weighs 0 is left out."""

    kd: float = 1.0  # weight of the term over soft labels
    temperature: float = 2.0
    label: float = 1.0  # weight of the term over labels
    states: tuple[HiddenStateLoss, ...] = ()
    relations: tuple[RelationLoss, ...] = ()

    def wanted(self, side: int) -> CaptureSpec:
        """What is looked at in the student (0) or in the teacher (1)."""
        states = {pair[side] for each in self.states for pair in each.pairs}
        return CaptureSpec(
            states=tuple(sorted(states)), attention=tuple(sorted({each.pair[side] for each in self.relations}))
        )


class TeacherRequest(NamedTuple):
    """What a batch has beside the task's own."""

    samples: Sequence[Sample]  # the task's
    numbers: list[int]
    keys: list[int]
    label: Tensor  # what each target of the task weighs: 0 without a label
    kd: Tensor  # what each target of the kd term weighs
    sizes: list[int]  # scores of each sample
    rows: Tensor | None  # what each row weighs in losses of states and relations: 0 where it only fills up; None: 1


@dataclass(frozen=True, kw_only=True)
class Distillation(SelfSupervised):
    """A task, or masked tokens, and the teacher beside it."""

    learner: ScoringObjective  # of the student
    kind: ScoreKind
    losses: DistillationLosses
    ask: AskTeacher
    pairing: SampleAlignment
    project: nn.ModuleDict  # maps of the student's states to the teacher's width, where these differ
    group: int = 1  # samples whose vectors are compared; 1: vectors are compared with the teacher's own
    classes: int | None = None  # of a vocabulary: the scores that are compared, which both have; none: all
    first: Literal["kd", "label"] = "kd"  # the term that is named first

    @property
    def group_size(self) -> int:  # type: ignore[override]
        """What the task, or the comparison of vectors, sees at once."""
        return max(getattr(self.learner, "group_size", 1), self.group)

    @property
    def num_static_masks(self) -> int | None:  # type: ignore[override]
        """Those of the task."""
        return getattr(self.learner, "num_static_masks", None)

    @property
    def extra_module(self) -> nn.Module | None:  # type: ignore[override]
        """The maps."""
        return self.project if len(self.project) else None

    @cached_property
    def term_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """The weights of the terms that there are."""
        return tuple(weight for _, weight in self._weights)

    @cached_property
    def _weights(self) -> list[tuple[str, float]]:
        found = [("kd", self.losses.kd), ("label", self.losses.label)]
        if self.first == "label":
            found = found[::-1]
        found = [each for each in found if each[1] > 0 or (each[0], self.first) == ("label", "label")]
        inside: list[HiddenStateLoss | RelationLoss] = [*self.losses.states, *self.losses.relations]
        at = 0 if not found or (found[0][0] == "label" and self.first == "kd") else 1
        return [*found[:at], *((str(number), each.weight) for number, each in enumerate(inside)), *found[at:]]

    def prepared(self, samples: Sequence[Sample], owners: Sequence[int], labelled: Sequence[bool]) -> list[Sample]:
        """The samples of the task with what the teacher is asked about them."""
        windows: dict[int, int] = {}
        for owner in owners:
            windows[owner] = windows.get(owner, 0) + 1
        return [
            replace(sample, target=DistillationTarget(sample.target, number, labelled[owner], 1 / windows[owner]))
            for number, (sample, owner) in enumerate(zip(samples, owners, strict=True))
        ]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """The task's batch, and which of the teacher's samples go with it."""
        known = [sample.target for sample in samples]
        plain = [replace(sample, target=sample.target.target) for sample in samples]
        batch = self.learner.batch(plain, keys)
        sizes = score_counts(plain, batch, self.kind)
        each = torch.tensor(sizes) if len(batch.weights) != len(plain) else torch.ones(len(plain), dtype=torch.long)
        labelled = torch.tensor([float(one.labelled) for one in known])
        label = batch.weights * labelled.repeat_interleave(each)
        asked = TeacherRequest(
            samples=plain,
            numbers=[one.number for one in known],
            keys=list(keys),
            label=label,
            kd=self._kd_weights(known, batch, sizes),
            sizes=sizes,
            rows=_without_filler(plain),
        )
        rows = float(batch.packed.bounds[-1]) if asked.rows is None else _total(asked.rows)
        count = {"kd": _total(asked.kd), "label": _total(label)}
        return replace(batch, words=asked, counts=tuple(count.get(name, rows) for name, _ in self._weights))

    def _kd_weights(self, known: Sequence[DistillationTarget], batch: Batch, sizes: Sequence[int]) -> Tensor:
        """Of each target: a window counts 1 / windows, a word or a hidden token 1, each vector 1."""
        fits = torch.tensor([float(self.pairing.fits(one.number)) for one in known])
        shares = torch.tensor([one.share for one in known])
        match self.kind:
            case "masked":
                return batch.weights
            case "tokens" | "vectors":
                return fits.repeat_interleave(torch.tensor(sizes))
        return fits * shares

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """All terms, in the order of `term_weights`."""
        asked: TeacherRequest = batch.words
        rows, mine = capture(loaded, batch.packed, self.losses.wanted(0))
        scores = self.learner.scores(loaded, batch, rows)
        theirs = self._said(asked, scores.detach()) if self._asks else {}
        inside: list[HiddenStateLoss | RelationLoss] = [*self.losses.states, *self.losses.relations]
        found = []
        for name, _ in self._weights:
            if name == "kd":
                losses = self._softened(scores[..., : self.classes], theirs, batch)
                found.append(Term("kd", losses, None, asked.kd.to(losses)))
            elif name == "label":
                found.append(self._label_term(loaded, rows, scores, batch))
            else:
                found.append(self._inside(int(name), inside[int(name)], mine, theirs, batch))
        return tuple(found)

    @property
    def _asks(self) -> bool:
        return any(name != "label" for name, _ in self._weights)

    def _label_term(self, loaded: ModelBundle, rows: Tensor | None, scores: Tensor, batch: Batch) -> Term:
        losses = self.learner.target_losses(scores, batch)
        if isinstance(loaded.head, PooledClassesHead):
            assert rows is not None  # `look` gives them for such a head
            losses = losses + loaded.head.penalty(rows, batch.packed)
        right = None
        if not torch.is_grad_enabled() and self.kind == "masked":
            right = scores.argmax(-1) == batch.targets
        return Term("mlm" if self.kind == "masked" else "label", losses, right, batch.words.label.to(losses))

    def _said(self, asked: TeacherRequest, scores: Tensor) -> dict[str, Tensor]:
        """What the teacher says of the samples of the batch, end to end."""
        pairs = [self.pairing.theirs[number] for number in asked.numbers]
        keys = [key for key, several in zip(asked.keys, pairs, strict=True) for _ in several]
        numbers = list(dict.fromkeys(zip((number for several in pairs for number in several), keys, strict=True)))
        said = self.ask([number for number, _ in numbers], [key for _, key in numbers]) if numbers else {"scores": []}
        place = {pair: at for at, pair in enumerate(numbers)}
        found: dict[str, Tensor] = {}
        for name, each in said.items():
            parts = []
            for number, several, key, size in zip(asked.numbers, pairs, asked.keys, asked.sizes, strict=True):
                if self.pairing.fits(number):
                    held = [each[place[one, key]] for one in several]
                    parts.append(held[0] if name != "scores" else self.pairing.scores(number, held))
                else:
                    like = each[0] if each else scores
                    parts.append(like.new_zeros(size, scores.shape[-1]))
            found[name] = torch.cat(parts).to(scores.device)
        return found

    def _softened(self, scores: Tensor, theirs: dict[str, Tensor], batch: Batch) -> Tensor:
        """A loss for each target of the kd term."""
        heat, asked = self.losses.temperature, batch.words
        if "ids" in theirs:
            return kd_kl_topk(scores, theirs["ids"].long(), theirs["scores"].float(), heat)
        taught = upcast(theirs["scores"])
        match self.kind:
            case "multiple":
                return kd_kl_multi_label(scores, taught, heat)
            case "numbers":
                return row_mse(scores, taught)
            case "span":
                return kd_kl_spans(scores, taught, batch.packed.bounds, heat)
            case "choice":
                return kd_kl_choices(scores, taught, asked.sizes, heat)
            case "vectors" if self.group > 1:
                return similarity_matrix_loss(scores, taught, 2 * self.group)
            case "vectors":
                return cosine_distance(scores, taught)
        return kd_kl(scores, taught, heat)

    def _inside(
        self,
        number: int,
        loss: HiddenStateLoss | RelationLoss,
        mine: dict[str, Tensor],
        theirs: dict[str, Tensor],
        batch: Batch,
    ) -> Term:
        """A loss for each row: of states, the mean over the pairs of layers; of relations, over what is related."""
        parts = []
        if isinstance(loss, HiddenStateLoss):
            compare = row_mse if loss.how == "mse" else cosine_distance
            for ours, taught in loss.pairs:
                state, name = mine[f"states.{ours}"], f"{ours} {taught}"
                state = self.project[name](state).float() if name in self.project else state
                parts.append(compare(state, theirs[f"states.{taught}"].float()))
        else:
            ours, taught = loss.pair
            for two in loss.of:
                x, y = two[0], two[1]
                pairs = [
                    (held[f"{x}.{layer}"].float(), held[f"{y}.{layer}"].float())
                    for held, layer in ((mine, ours), (theirs, taught))
                ]
                bounds = batch.packed.bounds
                parts.append(relation_kl(pairs[0], pairs[1], bounds, loss.heads, squares=loss.squares))
        kind, lost = "states" if isinstance(loss, HiddenStateLoss) else "relations", torch.stack(parts).mean(0)
        rows = batch.words.rows
        return Term(f"{kind}_{number + 1}", lost, None, None if rows is None else rows.to(lost))


def state_projections(losses: DistillationLosses, widths: tuple[int, int], seed: int) -> nn.ModuleDict:
    """Linear maps of the student's states to the teacher's width, one for each pair of layers, where these differ."""
    found = nn.ModuleDict()
    if widths[0] != widths[1]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for ours, taught in dict.fromkeys(pair for each in losses.states for pair in each.pairs):
                found[f"{ours} {taught}"] = nn.Linear(widths[0], widths[1])
    return found


def _without_filler(samples: Sequence[Sample]) -> Tensor | None:
    if not any(sample.filler for sample in samples):
        return None
    each = [torch.ones(len(sample)) for sample in samples]
    for weights, sample in zip(each, samples, strict=True):
        weights[len(sample) - sample.filler :] = 0
    return torch.cat(each)


def _total(weights: Tensor) -> float:
    return float(weights.sum(dtype=torch.float64))

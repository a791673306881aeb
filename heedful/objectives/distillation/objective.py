"""`Distillation`: a student learns its teacher's scores and hidden states, and labels (Hinton et al. 2015).

Each term is a mean over its own targets in the whole step:

* kd: targets are scored items, such as sequences, words or masked tokens; the teacher's scores are soft labels.
* label: targets are the scored items that have a label.
* states and relations: targets are tokens.
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

# returns outputs for indices of the teacher's samples, with a key (random seed) for each
RunTeacher = Callable[[Sequence[int], Sequence[int]], TeacherOutputs]
GROUP = 16  # samples whose embeddings are compared with each other, if student and teacher have different dimensions


class DistillationTarget(NamedTuple):
    """Replaces a sample's target during distillation, and adds the index of the sample among all samples."""

    target: Any  # the sample's target in its task
    sample_index: int
    labelled: bool  # whether the example has a label
    share: float  # weight in the kd term: 1 / windows of the example


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenStateLoss:
    """Loss that compares hidden states, for pairs of layers of student and teacher."""

    weight: float
    how: Literal["mse", "cosine"]
    pairs: tuple[tuple[int, int], ...]  # (student layer, teacher layer) of each comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationLoss:
    """Loss that compares relations between queries, keys and values of one attention layer of each model."""

    weight: float
    of: tuple[str, ...]  # kinds of relations, such as "qq" or "vv"; "qk" is attention
    pair: tuple[int, int]  # (student layer, teacher layer)
    heads: int  # number of heads into which the vectors of both models are split
    squares: bool  # True for the squared error of the scores, False for the KL divergence of their softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationLosses:
    """Weights of the losses; a loss of weight 0 is left out."""

    kd: float = 1.0  # weight of the kd term (knowledge distillation), over the teacher's soft labels
    temperature: float = 2.0  # temperature of the softmax of both models' scores
    ranking: Literal["listwise", "margin_mse"] = "listwise"  # loss of the scores of a query's documents
    label: float = 1.0  # weight of the label term
    states: tuple[HiddenStateLoss, ...] = ()
    relations: tuple[RelationLoss, ...] = ()

    def capture_spec(self, side: Literal["student", "teacher"]) -> CaptureSpec:
        """Return the layers to capture in the student or in the teacher."""
        index = 0 if side == "student" else 1
        states = {pair[index] for loss in self.states for pair in loss.pairs}
        attention = {loss.pair[index] for loss in self.relations}
        return CaptureSpec(states=tuple(sorted(states)), attention=tuple(sorted(attention)))

    @property
    def layer_losses(self) -> list[HiddenStateLoss | RelationLoss]:
        """The losses of hidden states, then the losses of relations."""
        return [*self.states, *self.relations]


class TeacherRequest(NamedTuple):
    """Inputs of the distillation terms, in addition to the batch of the base objective."""

    samples: Sequence[Sample]  # samples with the targets of the base objective
    sample_indices: list[int]  # index of each sample among all samples
    keys: list[int]  # key (random seed) of each sample
    label_weights: Tensor  # weight of each target of the base objective, 0 without a label
    kd_weights: Tensor  # weight of each target of the kd term
    score_counts: list[int]  # number of scored items of each sample
    token_weights: Tensor | None  # weight of each token in layer losses, 0 for padding; None if all are 1


@dataclass(frozen=True, kw_only=True)
class Distillation(SelfSupervised):
    """A base objective (a task, or masked language modelling) with terms that compare the student with a teacher."""

    base_objective: ScoringObjective
    kind: ScoreKind
    losses: DistillationLosses
    run_teacher: RunTeacher
    alignment: SampleAlignment
    projections: nn.ModuleDict  # linear maps of the student's states to the teacher's hidden size, if they differ
    vector_group_size: int = 1  # samples whose embeddings are compared with each other; if 1, only with the teacher's
    classes: int | None = None  # compare the scores of the first `classes` classes; None for all classes
    first_term: Literal["kd", "label"] = "kd"  # the term that comes first, if the loss has it

    @property
    def group_size(self) -> int:  # type: ignore[override]
        """Number of samples that the base objective, or the comparison of embeddings, compares with each other."""
        return max(getattr(self.base_objective, "group_size", 1), self.vector_group_size)

    @property
    def num_static_masks(self) -> int | None:  # type: ignore[override]
        """The number of static masks of the base objective."""
        return getattr(self.base_objective, "num_static_masks", None)

    @property
    def extra_module(self) -> nn.Module | None:  # type: ignore[override]
        """The linear maps of hidden states, or None if the hidden sizes are equal."""
        return self.projections if len(self.projections) else None

    @cached_property
    def term_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """The weight of each term."""
        return tuple(weight for _, weight in self._named_weights)

    @cached_property
    def _named_weights(self) -> list[tuple[str, float]]:
        """Name and weight of each term; the name of a layer loss is its index in `layer_losses`."""
        kd = "kd", self.losses.kd
        label = "label", self.losses.label
        if self.first_term == "label":
            score_terms = [label, *([kd] if kd[1] > 0 else [])]  # the first term is included even if its weight is 0
        else:
            score_terms = [term for term in (kd, label) if term[1] > 0]
        layer_terms = [(str(index), loss.weight) for index, loss in enumerate(self.losses.layer_losses)]
        if not score_terms or score_terms[0][0] != self.first_term:
            return [*layer_terms, *score_terms]
        return [score_terms[0], *layer_terms, *score_terms[1:]]

    def add_teacher_targets(
        self, samples: Sequence[Sample], example_indices: Sequence[int], labelled: Sequence[bool]
    ) -> list[Sample]:
        """Replace the targets of samples by `DistillationTarget`s.

        Args:
            samples: Samples of the base objective.
            example_indices: Index of the example of each sample.
            labelled: Whether each example has a label.
        """
        windows: dict[int, int] = {}  # number of windows of each example
        for example in example_indices:
            windows[example] = windows.get(example, 0) + 1
        return [
            replace(sample, target=DistillationTarget(sample.target, index, labelled[example], 1 / windows[example]))
            for index, (sample, example) in enumerate(zip(samples, example_indices, strict=True))
        ]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch of the base objective with a `TeacherRequest`."""
        targets: list[DistillationTarget] = [sample.target for sample in samples]
        base_samples = [replace(sample, target=sample.target.target) for sample in samples]
        batch = self.base_objective.batch(base_samples, keys)
        sizes = score_counts(base_samples, batch, self.kind)
        one_target_each = len(batch.weights) == len(base_samples)
        target_counts = torch.ones(len(base_samples), dtype=torch.long) if one_target_each else torch.tensor(sizes)
        labelled = torch.tensor([float(target.labelled) for target in targets])
        request = TeacherRequest(
            samples=base_samples,
            sample_indices=[target.sample_index for target in targets],
            keys=list(keys),
            label_weights=batch.weights * labelled.repeat_interleave(target_counts),
            kd_weights=self._kd_weights(targets, batch, sizes),
            score_counts=sizes,
            token_weights=_token_weights(base_samples),
        )
        weights = request.token_weights
        token_count = float(batch.packed.bounds[-1]) if weights is None else _total(weights)
        counts = {"kd": _total(request.kd_weights), "label": _total(request.label_weights)}
        return replace(
            batch, distillation=request, counts=tuple(counts.get(name, token_count) for name, _ in self._named_weights)
        )

    def _kd_weights(self, targets: Sequence[DistillationTarget], batch: Batch, sizes: Sequence[int]) -> Tensor:
        """Return the weight of each kd target: 1 / windows for a window, 1 for a word, masked token or embedding."""
        fits = torch.tensor([float(self.alignment.fits(target.sample_index)) for target in targets])
        shares = torch.tensor([target.share for target in targets])
        match self.kind:
            case "masked":
                return batch.weights
            case "tokens" | "vectors":
                return fits.repeat_interleave(torch.tensor(sizes))
        return fits * shares

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return all terms, in the order of `term_weights`."""
        request: TeacherRequest = batch.distillation
        hidden_states, captured = capture(loaded, batch.packed, self.losses.capture_spec("student"))
        scores = self.base_objective.scores(loaded, batch, hidden_states)
        outputs = self._teacher_outputs(request, scores.detach()) if self._needs_teacher else {}
        terms = []
        for name, _ in self._named_weights:
            if name == "kd":
                losses = self._kd_losses(scores[..., : self.classes], outputs, batch)
                terms.append(Term("kd", losses, None, request.kd_weights.to(losses, non_blocking=True)))
            elif name == "label":
                terms.append(self._label_term(loaded, hidden_states, scores, batch))
            else:
                terms.append(self._layer_term(int(name), captured, outputs, batch))
        return tuple(terms)

    @property
    def _needs_teacher(self) -> bool:
        """Whether a term compares the student with the teacher."""
        return any(name != "label" for name, _ in self._named_weights)

    def _label_term(self, loaded: ModelBundle, hidden_states: Tensor | None, scores: Tensor, batch: Batch) -> Term:
        """Return the term of the base objective's targets."""
        losses = self.base_objective.target_losses(scores, batch)
        if isinstance(loaded.head, PooledClassesHead):
            assert hidden_states is not None  # `capture` returns them for such a head
            losses = losses + loaded.head.penalty(hidden_states, batch.packed)
        right = None
        if not torch.is_grad_enabled() and self.kind == "masked":
            right = scores.argmax(-1) == batch.targets
        name = "mlm" if self.kind == "masked" else "label"
        return Term(name, losses, right, batch.distillation.label_weights.to(losses, non_blocking=True))

    def _teacher_outputs(self, request: TeacherRequest, scores: Tensor) -> dict[str, Tensor]:
        """Return the teacher's outputs for the samples of a batch, concatenated, by name.

        A sample without outputs of the teacher gets zeros.

        Args:
            request: The samples.
            scores: Scores of the student.
        """
        window_groups = [self.alignment.teacher_indices[index] for index in request.sample_indices]
        windows = [(window, key) for group, key in zip(window_groups, request.keys, strict=True) for window in group]
        unique_windows = list(dict.fromkeys(windows))
        if unique_windows:
            outputs = self.run_teacher([window for window, _ in unique_windows], [key for _, key in unique_windows])
        else:
            outputs = {"scores": []}
        index_of = {window_and_key: index for index, window_and_key in enumerate(unique_windows)}
        joined: dict[str, Tensor] = {}
        for name, tensors in outputs.items():
            parts = []
            for sample_index, group, key, count in zip(
                request.sample_indices, window_groups, request.keys, request.score_counts, strict=True
            ):
                if not self.alignment.fits(sample_index):
                    like = tensors[0] if tensors else scores
                    parts.append(like.new_zeros(count, scores.shape[-1]))
                    continue
                window_outputs = [tensors[index_of[window, key]] for window in group]
                if name == "scores":
                    parts.append(self.alignment.scores(sample_index, window_outputs))
                else:
                    parts.append(window_outputs[0])
            joined[name] = torch.cat(parts).to(scores.device, non_blocking=True)
        return joined

    def _kd_losses(self, scores: Tensor, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """Return the loss of each target of the kd term."""
        temperature = self.losses.temperature
        if "ids" in outputs:  # the teacher's outputs have only the top scores
            return kd_kl_topk(scores, outputs["ids"].long(), outputs["scores"].float(), temperature)
        teacher_scores = upcast(outputs["scores"])
        groups = batch.distillation.score_counts
        match self.kind:
            case "multiple":
                return kd_kl_multi_label(scores, teacher_scores, temperature)
            case "numbers":
                return row_mse(scores, teacher_scores)
            case "span":
                return kd_kl_spans(scores, teacher_scores, batch.packed.bounds, temperature)
            case "choice":
                return kd_kl_choices(scores, teacher_scores, groups, temperature)
            case "ranking" if self.losses.ranking == "margin_mse":
                return kd_margins(scores[:, 0], teacher_scores[:, 0], groups)
            case "ranking":
                return kd_kl_choices(scores[:, 0], teacher_scores[:, 0], groups, temperature)
            case "vectors" if self.vector_group_size > 1:
                return similarity_matrix_loss(scores, teacher_scores, 2 * self.vector_group_size)  # pairs of texts
            case "vectors":
                return cosine_distance(scores, teacher_scores)
        return kd_kl(scores, teacher_scores, temperature)

    def _layer_term(self, index: int, student: dict[str, Tensor], teacher: dict[str, Tensor], batch: Batch) -> Term:
        """Return the term of a layer loss: for each token, the mean over pairs of layers or over kinds of relations.

        Args:
            index: Index of the loss in `layer_losses`.
            student: Captured tensors of the student, by name.
            teacher: Outputs of the teacher, by name.
            batch: The batch.
        """
        loss = self.losses.layer_losses[index]
        if isinstance(loss, HiddenStateLoss):
            name = "states"
            parts = self._state_losses(loss, student, teacher)
        else:
            name = "relations"
            parts = _relation_losses(loss, student, teacher, batch.packed.bounds)
        losses = torch.stack(parts).mean(0)
        weights = batch.distillation.token_weights
        weights = None if weights is None else weights.to(losses, non_blocking=True)
        return Term(f"{name}_{index + 1}", losses, None, weights)

    def _state_losses(
        self, loss: HiddenStateLoss, student: dict[str, Tensor], teacher: dict[str, Tensor]
    ) -> list[Tensor]:
        """Return the losses of hidden states for each pair of layers, each [tokens]."""
        compare = row_mse if loss.how == "mse" else cosine_distance
        losses = []
        for layer, teacher_layer in loss.pairs:
            states = student[f"states.{layer}"]
            name = f"{layer} {teacher_layer}"
            if name in self.projections:
                states = self.projections[name](states).float()
            losses.append(compare(states, teacher[f"states.{teacher_layer}"].float()))
        return losses


def _relation_losses(
    loss: RelationLoss, student: dict[str, Tensor], teacher: dict[str, Tensor], bounds: Sequence[int]
) -> list[Tensor]:
    """Return the losses of each kind of relations, each [tokens]."""
    layer, teacher_layer = loss.pair
    losses = []
    for kinds in loss.of:
        x, y = kinds[0], kinds[1]  # such as "q" and "k"
        student_pair = student[f"{x}.{layer}"].float(), student[f"{y}.{layer}"].float()
        teacher_pair = teacher[f"{x}.{teacher_layer}"].float(), teacher[f"{y}.{teacher_layer}"].float()
        losses.append(relation_kl(student_pair, teacher_pair, bounds, loss.heads, squares=loss.squares))
    return losses


def state_projections(losses: DistillationLosses, hidden_sizes: tuple[int, int], seed: int) -> nn.ModuleDict:
    """Return linear maps of the student's hidden states to the teacher's hidden size, by pair of layers.

    There are no maps if the hidden sizes are equal.

    Args:
        losses: The losses.
        hidden_sizes: Hidden sizes of student and teacher.
        seed: Seed of the initial weights.
    """
    student_size, teacher_size = hidden_sizes
    maps = nn.ModuleDict()
    if student_size != teacher_size:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for layer, teacher_layer in dict.fromkeys(pair for loss in losses.states for pair in loss.pairs):
                maps[f"{layer} {teacher_layer}"] = nn.Linear(student_size, teacher_size)
    return maps


def _token_weights(samples: Sequence[Sample]) -> Tensor | None:
    """Return the weight of each token, 0 for padding, or None if no sample is padded."""
    if not any(sample.filler for sample in samples):
        return None
    parts = [torch.ones(len(sample)) for sample in samples]
    for weights, sample in zip(parts, samples, strict=True):
        weights[len(sample) - sample.filler :] = 0
    return torch.cat(parts)


def _total(weights: Tensor) -> float:
    """Return the sum of weights, added up in float64."""
    return float(weights.sum(dtype=torch.float64))

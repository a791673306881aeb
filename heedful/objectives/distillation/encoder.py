"""Pre-training of a small encoder with a trained encoder as teacher: up to four terms in one forward pass.

* `mlm`: cross-entropy of masked tokens (Devlin et al. 2019, section 3.1).
* `hidden_states`: for each word, the mean over features of (map(h) - t)². h is the mean of the student's hidden states
  of the word's tokens, t the teacher's standardised state, and map a linear map that only training uses.
* `sentence_embedding`: 1 - cos(mean of the student's hidden states, the teacher's sentence embedding), as in LEAF
  (Vujanic and Rueckstiess 2025). A student with a smaller hidden size learns the first principal components of the
  embedding. After training, the mean of its hidden states is a sentence embedding without a map.
* `pair_similarity`: (s - cos(a, b))². s is the score of a small head over the first token of a pair of texts; a and b
  are the teacher's embeddings of both texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data.sampler import derive_seed
from heedful.errors import HeedfulError
from heedful.model.heads import pool
from heedful.objectives.base import Batch, Sample, Term, pack_samples
from heedful.objectives.distillation.encoder_teacher import AlignedWords, EncoderTeacher, mean_rows
from heedful.objectives.distillation.vector_cache import VectorCache
from heedful.objectives.masked_lm import MaskedLM
from heedful.objectives.random_numbers import uniform
from heedful.objectives.sentence_windows import FIRST_TEXT, SECOND_START
from heedful.packed import Packed
from heedful.random_streams import Stream

TERMS = ("mlm", "hidden_states", "sentence_embedding", "pair_similarity")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderTargets:
    """The words, sequences and texts of a batch to which the teacher's targets belong."""

    words: AlignedWords | None  # words of student and teacher; None if the teacher does not run in the step
    singles: NDArray[np.int64]  # indices of the sequences of one text
    pairs: NDArray[np.int64]  # indices of the sequences of two texts
    first_texts: NDArray[np.int64]  # [sequences]: index of each sequence's first text among all texts
    windows: NDArray[np.int64]  # [texts]: index of each text's window in the cache


@dataclass(frozen=True, kw_only=True)
class EncoderDistillation(MaskedLM):
    """The weighted sum of the terms in `TERMS` with a weight above 0. Each term is a mean over its own targets.

    With `masked_sequence_prob` below 1, some sequences have no masks. They have targets for all terms but `mlm`.
    """

    teacher: EncoderTeacher
    modules: nn.ModuleDict  # map and head of `new_modules`, which only training uses
    weight_by_term: Mapping[str, float] = field(default_factory=lambda: {"mlm": 1.0, "hidden_states": 10.0})
    masked_sequence_prob: float = 1.0  # probability that a sequence has masked tokens
    vectors: VectorCache | None = None  # cached sentence embeddings; None to run the teacher in each step

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.weight_by_term) - set(TERMS):
            raise HeedfulError(f"weight_by_term has {min(unknown)!r}; expected some of {', '.join(TERMS)}")
        if not self.names:
            raise HeedfulError("weight_by_term has no weight above 0; give one to a term")
        if not 0 < self.masked_sequence_prob <= 1:
            raise HeedfulError(
                f"masked_sequence_prob is {self.masked_sequence_prob}; expected a probability above 0, at most 1"
            )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the terms of the loss, in the order of `TERMS`."""
        return tuple(name for name in TERMS if self.weight_by_term.get(name, 0.0) > 0)

    @cached_property
    def term_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """The weight of each term."""
        return tuple(self.weight_by_term[name] for name in self.names)

    @property
    def extra_module(self) -> nn.Module:  # type: ignore[override]
        """The map of hidden states and the head over pairs."""
        return self.modules

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return a masked batch with `EncoderTargets`."""
        masked = super().batch(samples, keys)
        packed = pack_samples(samples)
        targets = self._targets(samples, packed)
        counts = {
            "mlm": float(masked.weights.sum()),
            "hidden_states": 0.0 if targets.words is None else float(targets.words.count),
            "sentence_embedding": float(len(targets.singles)),
            "pair_similarity": float(len(targets.pairs)),
        }
        return replace(masked, distillation=targets, counts=tuple(counts[name] for name in self.names))

    def _targets(self, samples: Sequence[Sample], packed: Packed) -> EncoderTargets:
        """Find the words, sequences and texts of packed samples to which the teacher's targets belong."""
        window_targets = np.concatenate([np.zeros((0, 3), dtype=np.int64), *map(_window_targets, samples)])
        second_starts = window_targets[:, SECOND_START]
        is_pair = second_starts > 0
        starts = np.array(packed.bounds[:-1], dtype=np.int64)
        # earlier sequences have one text each, and earlier pairs one more
        earlier_pairs = np.concatenate([[0], np.cumsum(is_pair)[:-1]]).astype(np.int64)[: len(starts)]
        has_text = np.stack([np.ones_like(is_pair), is_pair], 1)
        words = None
        if self._teacher_runs:
            text_bounds = np.sort(np.concatenate([starts, (starts + second_starts)[is_pair], [packed.bounds[-1]]]))
            words = self.teacher.align_words(packed, packed.tokens.numpy(), self.is_text_id, text_bounds.tolist())
        return EncoderTargets(
            words=words,
            singles=np.flatnonzero(second_starts == 0),
            pairs=np.flatnonzero(is_pair),
            first_texts=np.arange(len(starts)) + earlier_pairs,
            windows=window_targets[:, FIRST_TEXT:][has_text],
        )

    @property
    def _teacher_runs(self) -> bool:
        """Whether the teacher runs in each step, because a term needs its states or embeddings that are not cached."""
        if self.names == ("mlm",):
            return False
        return self.vectors is None or "hidden_states" in self.names

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the terms of `names`, each with one loss for each target."""
        targets: EncoderTargets = batch.distillation
        states = loaded.hidden_states(batch.packed)
        assert batch.rows is not None
        teacher_states = None if targets.words is None else self.teacher.token_states(targets.words)
        vectors = self._sentence_vectors(targets, teacher_states, states)
        terms: dict[str, Term] = {}
        for name in self.names:
            match name:
                case "mlm":
                    terms[name] = self.masked_term(loaded, states[batch.rows], batch)
                case "hidden_states":
                    assert targets.words is not None and teacher_states is not None
                    terms[name] = Term(name, self._state_losses(states, targets.words, teacher_states))
                case "sentence_embedding":
                    terms[name] = Term(name, self._vector_losses(states, batch, targets, vectors))
                case "pair_similarity":
                    terms[name] = Term(name, self._pair_losses(states, batch, targets, vectors))
        return tuple(terms.values())

    def _sentence_vectors(self, targets: EncoderTargets, teacher_states: Tensor | None, states: Tensor) -> Tensor:
        """Return the teacher's embedding of each text, [texts, dimension]; no embeddings if no term needs them."""
        if not {"sentence_embedding", "pair_similarity"} & set(self.names):
            return states.new_zeros(0, self.teacher.vector_size)
        if teacher_states is not None:
            assert targets.words is not None
            return self.teacher.sentence_vectors(teacher_states, targets.words.teacher_input)
        assert self.vectors is not None
        return self.vectors[targets.windows].to(states.device, non_blocking=True)

    def _state_losses(self, states: Tensor, words: AlignedWords, teacher_states: Tensor) -> Float[Tensor, " words"]:
        """Return the squared error of the student's mapped state of each word."""
        student_words = mean_rows(states, words.student_positions, words.student_word_of, words.count)
        teacher_words = self.teacher.word_states(words, teacher_states).to(states.device, non_blocking=True)
        mapped: Tensor = self.modules["states"](student_words)
        return ((mapped.float() - teacher_words) ** 2).mean(-1)

    def _vector_losses(
        self, states: Tensor, batch: Batch, targets: EncoderTargets, vectors: Tensor
    ) -> Float[Tensor, " singles"]:
        """Return 1 - cosine between the embeddings of student and teacher, for each sequence of one text."""
        singles = torch.from_numpy(targets.singles).to(states.device, non_blocking=True)
        texts = torch.from_numpy(targets.first_texts[targets.singles]).to(states.device, non_blocking=True)
        student_vectors = pool(states, batch.packed, "mean")[singles].float()
        teacher_vectors = self.teacher.project_vectors(vectors[texts], student_vectors.shape[1])
        return 1.0 - F.cosine_similarity(student_vectors, teacher_vectors, dim=-1)

    def _pair_losses(
        self, states: Tensor, batch: Batch, targets: EncoderTargets, vectors: Tensor
    ) -> Float[Tensor, " pairs"]:
        """Return the squared error of the similarity score of each pair of texts."""
        pairs = torch.from_numpy(targets.pairs).to(states.device, non_blocking=True)
        first_texts = torch.from_numpy(targets.first_texts[targets.pairs]).to(states.device, non_blocking=True)
        scores: Tensor = self.modules["pairs"](states[batch.packed.first_rows()[pairs]])
        cosines = (vectors[first_texts] * vectors[first_texts + 1]).sum(-1)
        return (scores.float()[:, 0] - cosines) ** 2

    def _maskable(self, sample: Sample, key: int) -> NDArray[np.bool_]:
        """Mark the text tokens of the sequences that are chosen for masking."""
        maskable = super()._maskable(sample, key)
        if self.masked_sequence_prob == 1:
            return maskable
        lengths = np.diff(sample.bounds)
        masked = uniform(derive_seed(key, Stream.UNMASKED_SEQUENCES), len(lengths)) < self.masked_sequence_prob
        return maskable & np.repeat(masked, lengths)


def _window_targets(sample: Sample) -> NDArray[np.int64]:
    """Return the rows of `WindowPlan.targets` for a sample, [sequences, 3]; if it has no target, zeros."""
    if sample.target is None:
        return np.zeros((len(sample.bounds) - 1, 3), dtype=np.int64)
    targets: NDArray[np.int64] = sample.target
    return targets


def new_modules(hidden_size: int, teacher_hidden_size: int, seed: int) -> nn.ModuleDict:
    """Return new modules to train together with a student: the map of hidden states, and the head over pairs.

    Args:
        hidden_size: Hidden size of the student.
        teacher_hidden_size: Hidden size of the teacher.
        seed: Seed of the initial weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pair_head = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1))
        return nn.ModuleDict({"states": nn.Linear(hidden_size, teacher_hidden_size), "pairs": pair_head})

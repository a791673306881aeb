"""Pre-train a small encoder with a trained one as its teacher: four terms in one forward pass.

* `mlm`: cross-entropy of masked tokens (Devlin et al. 2019, section 3.1).
* `hidden_states`: for each word, the mean over features of (map(h) - t)^2, with h the mean of the student's rows, t the
  teacher's standardised state, and a linear map that is dropped afterwards.
* `sentence_embedding`: 1 - cos(mean of the student's rows, the teacher's sentence vector) (as in LEAF, Vujanic and
  Rueckstiess 2025). A narrower student learns the vector's principal components, so that the plain mean of its rows is
  the sentence vector, without a map.
* `pair_similarity`: (s - cos(a, b))^2, with s a score of a small head over the first row of a packed pair, and a, b the
  teacher's vectors of its two texts.
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
from heedful.random_streams import Stream

TERMS = ("mlm", "hidden_states", "sentence_embedding", "pair_similarity")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderTargets:
    """Positions in a batch to which the teacher's targets belong."""

    words: AlignedWords | None  # None: the teacher does not run, its vectors are cached
    singles: NDArray[np.int64]  # numbers of the sequences that are one text
    pairs: NDArray[np.int64]  # numbers of those that are two
    texts: NDArray[np.int64]  # [sequences]: the number of each sequence's first text among all texts
    windows: NDArray[np.int64]  # [texts]: the window of each text, in the cache


@dataclass(frozen=True, kw_only=True)
class EncoderDistillation(MaskedLM):
    """The weighted sum of those of `TERMS` whose weight is above 0, each a mean over its own targets.

    With `masked_sequence_prob` below 1 some sequences are read whole: they have all targets but masked tokens.
    """

    teacher: EncoderTeacher
    modules: nn.ModuleDict  # trained with the model and then dropped: see `new_modules`
    weight_by_term: Mapping[str, float] = field(default_factory=lambda: {"mlm": 1.0, "hidden_states": 10.0})
    masked_sequence_prob: float = 1.0
    vectors: VectorCache | None = None  # of all windows; None: the teacher runs in each step

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
        """The terms of the loss, in their order."""
        return tuple(name for name in TERMS if self.weight_by_term.get(name, 0.0) > 0)

    @cached_property
    def term_weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """The weight of each term."""
        return tuple(self.weight_by_term[name] for name in self.names)

    @property
    def extra_module(self) -> nn.Module:  # type: ignore[override]
        """The map of hidden states and the head for pairs."""
        return self.modules

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return a masked batch with the words and texts that the teacher's targets belong to."""
        masked = super().batch(samples, keys)
        packed = pack_samples(samples)
        parts = [self._targets(sample) for sample in samples]
        targets_of_texts = np.concatenate(parts) if parts else np.zeros((0, 3), dtype=np.int64)
        starts = np.array(packed.bounds[:-1], dtype=np.int64)
        second = targets_of_texts[:, SECOND_START]
        is_pair = second > 0
        bounds = np.sort(np.concatenate([starts, (starts + second)[is_pair], [packed.bounds[-1]]]))
        texts = np.arange(len(starts)) + np.concatenate([[0], np.cumsum(is_pair)[:-1]]).astype(np.int64)[: len(starts)]
        windows = targets_of_texts[:, FIRST_TEXT:][np.stack([np.ones_like(is_pair), is_pair], 1)]
        runs = self.vectors is None or "hidden_states" in self.names
        words = None
        if runs and self.names != ("mlm",):
            words = self.teacher.words(packed, packed.tokens.numpy(), self.free, bounds.tolist())
        targets = EncoderTargets(
            words=words,
            singles=np.flatnonzero(second == 0),
            pairs=np.flatnonzero(is_pair),
            texts=texts,
            windows=windows,
        )
        counts = {
            "mlm": float(masked.weights.sum()),
            "hidden_states": 0.0 if words is None else float(words.count),
            "sentence_embedding": float(len(targets.singles)),
            "pair_similarity": float(len(targets.pairs)),
        }
        return replace(masked, words=targets, counts=tuple(counts[name] for name in self.names))

    def terms(self, loaded: ModelBundle, batch: Batch) -> tuple[Term, ...]:
        """Return the terms of `names`, each with one loss for each target."""
        targets: EncoderTargets = batch.words
        rows = loaded.hidden_states(batch.packed)
        assert batch.rows is not None
        taught = None if targets.words is None else self.teacher.rows(targets.words)
        vectors = self._vectors(targets, taught, rows)
        terms: dict[str, Term] = {}
        for name in self.names:
            match name:
                case "mlm":
                    terms[name] = self.masked_term(loaded, rows[batch.rows], batch)
                case "hidden_states":
                    assert targets.words is not None and taught is not None
                    terms[name] = Term(name, self._state_losses(rows, targets.words, taught))
                case "sentence_embedding":
                    terms[name] = Term(name, self._vector_losses(rows, batch, targets, vectors))
                case "pair_similarity":
                    terms[name] = Term(name, self._pair_losses(rows, batch, targets, vectors))
        return tuple(terms.values())

    def _targets(self, sample: Sample) -> NDArray[np.int64]:
        """Return WindowPlan.targets of a row, [sequences, 3]; a sample without a target has single texts alone."""
        if sample.target is None:
            return np.zeros((len(sample.bounds) - 1, 3), dtype=np.int64)
        targets: NDArray[np.int64] = sample.target
        return targets

    def _vectors(self, targets: EncoderTargets, taught: Tensor | None, rows: Tensor) -> Tensor:
        """The teacher's vector of each text."""
        if not {"sentence_embedding", "pair_similarity"} & set(self.names):
            return rows.new_zeros(0, self.teacher.width)
        if taught is not None:
            assert targets.words is not None
            return self.teacher.pooled(taught, targets.words.taught)
        assert self.vectors is not None
        return self.vectors[targets.windows].to(rows.device, non_blocking=True)

    def _state_losses(self, rows: Tensor, words: AlignedWords, taught: Tensor) -> Float[Tensor, " words"]:
        own = mean_rows(rows, words.places, words.owners, words.count)
        states = self.teacher.states(words, taught).to(rows.device, non_blocking=True)
        mapped: Tensor = self.modules["states"](own)
        return ((mapped.float() - states) ** 2).mean(-1)

    def _vector_losses(
        self, rows: Tensor, batch: Batch, targets: EncoderTargets, vectors: Tensor
    ) -> Float[Tensor, " singles"]:
        singles = torch.from_numpy(targets.singles).to(rows.device, non_blocking=True)
        first = torch.from_numpy(targets.texts[targets.singles]).to(rows.device, non_blocking=True)
        own = pool(rows, batch.packed, "mean")[singles].float()
        return 1.0 - F.cosine_similarity(own, self.teacher.projected(vectors[first], own.shape[1]), dim=-1)

    def _pair_losses(
        self, rows: Tensor, batch: Batch, targets: EncoderTargets, vectors: Tensor
    ) -> Float[Tensor, " pairs"]:
        pairs = torch.from_numpy(targets.pairs).to(rows.device, non_blocking=True)
        first = torch.from_numpy(targets.texts[targets.pairs]).to(rows.device, non_blocking=True)
        scores: Tensor = self.modules["pairs"](rows[batch.packed.first_rows()[pairs]])
        return (scores.float()[:, 0] - (vectors[first] * vectors[first + 1]).sum(-1)) ** 2

    def _maskable(self, sample: Sample, key: int) -> NDArray[np.bool_]:
        """Ordinary tokens of the sequences that are sampled for masking."""
        free = super()._maskable(sample, key)
        if self.masked_sequence_prob == 1:
            return free
        lengths = np.diff(sample.bounds)
        masked = uniform(derive_seed(key, Stream.UNMASKED_SEQUENCES), len(lengths)) < self.masked_sequence_prob
        return free & np.repeat(masked, lengths)


def new_modules(width: int, teacher_width: int, seed: int) -> nn.ModuleDict:
    """Return new modules to train beside a student of that width: the map of states, and the head for pairs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head: list[nn.Module] = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
        return nn.ModuleDict({"states": nn.Linear(width, teacher_width), "pairs": nn.Sequential(*head)})

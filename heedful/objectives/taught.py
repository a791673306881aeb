"""Masked language modelling with a teacher: the hidden states that a trained model has for each word are to be found.

The teacher reads the whole text, the student the masked one, and each word, wherever its pieces lie, is the mean of its
rows; so the two may have different vocabularies, as long as both part texts into the same words. A teacher that tells
" fox" from "fox" reads each word behind a space, but where our tokenizer would write none, as before a comma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.model.config import Learned
from heedful.nn.layers import means
from heedful.objectives.base import Batch, Sample, Term, long, pack
from heedful.objectives.frame import Frame
from heedful.objectives.masked import Masked
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer

LEAST = 1e-3  # what a standard deviation counts at least


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Words:
    """The words of a batch, and the teacher's sequences of the same words."""

    count: int
    places: NDArray[np.int64]  # rows of ours that belong to a word
    owners: NDArray[np.int64]  # and to which
    taught: Packed
    taught_places: NDArray[np.int64]
    taught_owners: NDArray[np.int64]


class Teacher:
    """A trained model's last hidden states for words, each number less its mean over a sample, in deviations of it."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer) -> None:
        """For texts that `tokenizer` has made tokens of."""
        if loaded.tokenizer is None:
            raise HeedfulError(f"{loaded.source} has no tokenizer, so it cannot teach: put its tokenizer.json there")
        self.loaded, self.tokenizer = loaded.eval().requires_grad_(False), tokenizer
        self.vocabulary = loaded.tokenizer
        self.width = loaded.config.model.width
        place = loaded.config.model.embedding.positions
        frame = Frame.of(loaded.tokenizer, pair=False)
        self._before, self._after = (ids for ids, _ in frame.runs)
        self._room = (place.count - place.offset if isinstance(place, Learned) else 1 << 20) - frame.width
        self._known: dict[bytes, NDArray[np.int32]] = {}
        self.mean, self.deviation = torch.zeros(self.width), torch.ones(self.width)

    def prepare(self, samples: Sequence[Sample], free: NDArray[np.bool_]) -> None:
        """Take mean and deviation from these samples."""
        packed = pack(samples)
        states = self.states(self.words(packed, packed.tokens.numpy(), free))
        self.mean, self.deviation = states.mean(0), states.std(0).clamp(min=LEAST)

    @torch.no_grad()
    def states(self, words: Words) -> Float[Tensor, "words width"]:
        """The mean of each word's rows, float32; the teacher computes in its own precision."""
        device = next(self.loaded.parameters()).device
        with torch.autocast(device.type, enabled=False):
            rows = self.loaded.model(words.taught.to(device)).float()
        states = mean_rows(rows, words.taught_places, words.taught_owners, words.count)
        return (states - self.mean.to(device)) / self.deviation.to(device)

    def words(self, packed: Packed, tokens: NDArray[np.int64], free: NDArray[np.bool_]) -> Words:
        """The words of a batch whose unmasked tokens these are; `free` tells tokens of text from special ones."""
        inside = free[tokens]
        starts = inside & ~self.tokenizer.continues[tokens]
        starts[1:] |= inside[1:] & ~inside[:-1]
        starts[[bound for bound in packed.bounds[:-1] if bound < len(tokens)]] |= True
        starts &= inside
        word = np.where(inside, np.cumsum(starts) - 1, -1)
        places = np.flatnonzero(inside)
        first = np.flatnonzero(starts)
        stops = first + np.bincount(word[places], minlength=len(first))
        narrow = tokens.astype(np.int32)
        pieces = [self._pieces(narrow[start:stop]) for start, stop in zip(first, stops, strict=True)]
        sizes = np.array([len(each) for each in pieces], dtype=np.int64)
        owner = np.searchsorted(np.array(packed.bounds), first, side="right") - 1  # the sequence of each word
        ids: list[NDArray[np.int32]] = []
        owners: list[NDArray[np.int64]] = []
        lengths: list[int] = []
        kept = np.zeros(len(first), dtype=np.bool_)
        edges = np.searchsorted(owner, np.arange(len(packed) + 1))
        for low, high in pairwise(edges.tolist()):
            high = low + int(np.searchsorted(np.cumsum(sizes[low:high]), self._room, side="right"))
            kept[low:high] = True
            ids += [self._before, *pieces[low:high], self._after]
            mine = np.repeat(np.arange(low, high), sizes[low:high])
            owners += [np.full(len(self._before), -1), mine, np.full(len(self._after), -1)]
            lengths.append(len(self._before) + len(mine) + len(self._after))
        renumbered = np.where(kept, np.cumsum(kept) - 1, -1)
        ours = renumbered[word[places]]
        theirs = np.concatenate([*owners, np.zeros(0)]).astype(np.int64)
        theirs = np.where(theirs >= 0, renumbered[theirs], -1)
        bounds = (0, *accumulate(lengths))
        taught = Packed(
            tokens=long(ids),
            positions=long([np.arange(each) for each in lengths]),
            types=torch.zeros(bounds[-1], dtype=torch.long),
            bounds=bounds,
        )
        at = np.flatnonzero(theirs >= 0)
        return Words(
            count=int(kept.sum()),
            places=places[ours >= 0],
            owners=ours[ours >= 0],
            taught=taught,
            taught_places=at,
            taught_owners=theirs[at],
        )

    def _pieces(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The teacher's tokens of a word that has these of ours."""
        key = ids.tobytes()
        if key not in self._known:
            (found,) = self.vocabulary.ids([self._written(ids.tolist())])
            unknown = self.vocabulary.special.unknown
            self._known[key] = found if len(found) else np.array([unknown or 0], dtype=np.int32)
        return self._known[key]

    def _written(self, ids: list[int]) -> str:
        """A word as it stands in a text after another one: behind a space, where our tokenizer writes one before it.

        A vocabulary that marks where words begin has other tokens for it without that space.
        """
        return self.tokenizer.decode([*ids, *ids])[len(self.tokenizer.decode(ids)) :]


@dataclass(frozen=True, kw_only=True)
class Taught(Masked):
    """Masked tokens, and the squared error of the teacher's states of each word, from a linear map of ours."""

    teacher: Teacher
    project: nn.Linear  # of our rows to the teacher's width; it learns with the model and is not kept
    weight: float = 10.0

    @cached_property
    def balance(self) -> tuple[float, ...]:  # type: ignore[override]
        """Masked tokens count once."""
        return 1.0, self.weight

    @property
    def beside(self) -> nn.Module:  # type: ignore[override]
        """The map."""
        return self.project

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """The same, with the words."""
        masked = super().batch(samples, keys)
        packed = pack(samples)
        words = self.teacher.words(packed, packed.tokens.numpy(), self.free)
        return replace(masked, words=words, counts=(float(masked.weights.sum()), float(words.count)))

    def terms(self, loaded: Loaded, batch: Batch) -> tuple[Term, ...]:
        """Cross-entropy of masked tokens, and of each word the mean over its numbers of (map(h) - state)^2."""
        words = batch.words
        rows = loaded.rows(batch.packed)
        assert batch.rows is not None
        masked = self.masked_term(loaded, rows[batch.rows], batch)
        ours = mean_rows(rows, words.places, words.owners, words.count)
        error = (self.project(ours).float() - self.teacher.states(words).to(ours.device)) ** 2
        return masked, Term("taught", error.mean(-1))


def mean_rows(
    rows: Float[Tensor, "rows width"], places: NDArray[np.int64], owners: NDArray[np.int64], count: int
) -> Float[Tensor, "count width"]:
    """The mean of the rows in those places, for each owner."""
    given = (places, owners, np.bincount(owners, minlength=count))
    place, owner, counts = (torch.from_numpy(each).to(rows.device) for each in given)
    return means(rows[place], owner, counts)

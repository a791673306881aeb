"""A trained encoder as a source of targets: hidden states of words, and sentence vectors.

Teacher and student may have different vocabularies, as long as both split texts into the same words: a word's state is
the mean of the rows of its pieces. The teacher reads unmasked text, which is decoded from the student's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.heads import SentenceEmbeddingHead, pool
from heedful.nn.layers import segment_means
from heedful.objectives.base import Sample, concat_long, pack_samples
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer

MIN_STD = 1e-3  # lower bound of the standard deviations that states are divided by


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AlignedWords:
    """The words of a batch, and the teacher's sequences of the same words, one for each text."""

    count: int
    places: NDArray[np.int64]  # the student's rows that belong to a word
    owners: NDArray[np.int64]  # the word of each of these rows
    taught: Packed  # input of the teacher
    taught_places: NDArray[np.int64]
    taught_owners: NDArray[np.int64]


class EncoderTeacher:
    """A frozen encoder that computes targets for texts tokenised by `tokenizer`.

    States of words are standardised: each feature less its mean over a sample of words, divided by its deviation there.
    Sentence vectors have unit length and, where the student is narrower, are projected on their principal components.
    """

    def __init__(self, loaded: ModelBundle, tokenizer: Tokenizer) -> None:
        if loaded.tokenizer is None:
            raise HeedfulError(f"{loaded.source} has no tokenizer, which a teacher needs: put its tokenizer.json there")
        self.loaded, self.tokenizer = loaded.eval().requires_grad_(False), tokenizer
        self.vocabulary = loaded.tokenizer
        self.width = loaded.config.model.width
        positions = loaded.config.model.embedding.positions
        limit = None if positions is None else positions.limit
        frame = SpecialTokenTemplate.of(loaded.tokenizer, pair=False)
        self._before, self._after = (ids for ids, _ in frame.runs)
        self._room = (1 << 20 if limit is None else limit) - frame.width
        self._known: dict[bytes, NDArray[np.int32]] = {}
        self.mean, self.deviation = torch.zeros(self.width), torch.ones(self.width)
        self.basis: Tensor | None = None  # [width, width]: principal components of sentence vectors, strongest first

    # -- statistics of a sample -------------------------------------------------------------------------------------

    def prepare(self, samples: Sequence[Sample], free: NDArray[np.bool_]) -> None:
        """Estimate means, deviations and principal components from samples; `free` marks ordinary tokens."""
        states, vectors = [], []
        for sample in samples:
            packed = pack_samples([sample])
            words = self.words(packed, packed.tokens.numpy(), free)
            rows = self.rows(words)
            states.append(mean_rows(rows, words.taught_places, words.taught_owners, words.count))
            vectors.append(self.pooled(rows, words.taught))
        every, vector = torch.cat(states).cpu(), torch.cat(vectors).cpu()
        self.mean, self.deviation = every.mean(0), every.std(0).clamp(min=MIN_STD)
        basis = torch.linalg.eigh((vector.T @ vector).double()).eigenvectors.flip(-1)
        largest = basis.abs().argmax(0, keepdim=True)
        self.basis = (basis * basis.gather(0, largest).sign()).float()

    def statistics(self) -> dict[str, Tensor]:
        """The estimates of `prepare`, as tensors to save."""
        assert self.basis is not None
        return {"mean": self.mean, "deviation": self.deviation, "basis": self.basis.contiguous()}

    def load_statistics(self, tensors: Mapping[str, Tensor]) -> None:
        """Use statistics that were estimated before."""
        self.mean, self.deviation, self.basis = tensors["mean"], tensors["deviation"], tensors["basis"]

    # -- targets ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rows(self, words: AlignedWords) -> Float[Tensor, "rows width"]:
        """The last hidden states of the teacher's sequences, float32; it computes in its own precision."""
        device = next(self.loaded.parameters()).device
        with torch.autocast(device.type, enabled=False):
            rows: Tensor = self.loaded.model(words.taught.to(device))
            return rows.float()

    def states(
        self, words: AlignedWords, rows: Float[Tensor, "rows width"] | None = None
    ) -> Float[Tensor, "words width"]:
        """The standardised state of each word; `rows` are those of `rows(words)`, where they are known."""
        rows = self.rows(words) if rows is None else rows
        states = mean_rows(rows, words.taught_places, words.taught_owners, words.count)
        return (states - self.mean.to(rows.device, non_blocking=True)) / self.deviation.to(
            rows.device, non_blocking=True
        )

    def pooled(self, rows: Float[Tensor, "rows width"], taught: Packed) -> Float[Tensor, "texts width"]:
        """Sentence vectors of unit length: pooled as the teacher's folder says, else the mean of all rows."""
        head, batch = self.loaded.head, taught.to(rows.device)
        vectors = head(rows, batch) if isinstance(head, SentenceEmbeddingHead) else pool(rows, batch, "mean")
        return F.normalize(vectors.float(), dim=-1)

    def projected(self, vectors: Float[Tensor, "texts width"], width: int) -> Float[Tensor, "texts narrow"]:
        """Sentence vectors for a student of that width: on the first principal components, or filled up with zeros."""
        if width >= vectors.shape[1]:
            return F.pad(vectors, (0, width - vectors.shape[1]))
        assert self.basis is not None, "prepare comes first"
        return vectors @ self.basis[:, :width].to(vectors.device, non_blocking=True)

    # -- words ------------------------------------------------------------------------------------------------------

    def words(
        self, packed: Packed, tokens: NDArray[np.int64], free: NDArray[np.bool_], bounds: Sequence[int] | None = None
    ) -> AlignedWords:
        """Align the words of a batch with the teacher's tokens.

        `tokens` are the batch's unmasked tokens, `free` marks ordinary ones by id. `bounds` are the rows at which texts
        begin, and the end of the last one: the teacher reads each text by itself. None: each sequence is one text.
        """
        bounds = packed.bounds if bounds is None else bounds
        inside = free[tokens]
        starts = inside & ~self.tokenizer.continues[tokens]
        starts[1:] |= inside[1:] & ~inside[:-1]
        starts[[bound for bound in bounds[:-1] if bound < len(tokens)]] |= True
        starts &= inside
        word = np.where(inside, np.cumsum(starts) - 1, -1)
        places = np.flatnonzero(inside)
        first = np.flatnonzero(starts)
        stops = first + np.bincount(word[places], minlength=len(first))
        narrow = tokens.astype(np.int32)
        pieces = [self._pieces(narrow[start:stop]) for start, stop in zip(first, stops, strict=True)]
        sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
        owner = np.searchsorted(np.array(bounds), first, side="right") - 1  # the text of each word
        ids: list[NDArray[np.int32]] = []
        owners: list[NDArray[np.int64]] = []
        lengths: list[int] = []
        fits = np.zeros(len(first), dtype=np.bool_)
        edges = np.searchsorted(owner, np.arange(len(bounds)))
        for low, high in pairwise(edges.tolist()):
            high = low + int(np.searchsorted(np.cumsum(sizes[low:high]), self._room, side="right"))
            fits[low:high] = True
            ids += [self._before, *pieces[low:high], self._after]
            own = np.repeat(np.arange(low, high), sizes[low:high])
            owners += [np.full(len(self._before), -1), own, np.full(len(self._after), -1)]
            lengths.append(len(self._before) + len(own) + len(self._after))
        renumbered = np.where(fits, np.cumsum(fits) - 1, -1)
        student_owners = renumbered[word[places]]
        teacher_owners = np.concatenate([*owners, np.zeros(0)]).astype(np.int64)
        teacher_owners = np.where(teacher_owners >= 0, renumbered[teacher_owners], -1)
        ends = (0, *accumulate(lengths))
        taught = Packed(
            tokens=concat_long(ids),
            positions=concat_long([np.arange(length) for length in lengths]),
            types=torch.zeros(ends[-1], dtype=torch.long),
            bounds=ends,
        )
        at = np.flatnonzero(teacher_owners >= 0)
        return AlignedWords(
            count=int(fits.sum()),
            places=places[student_owners >= 0],
            owners=student_owners[student_owners >= 0],
            taught=taught,
            taught_places=at,
            taught_owners=teacher_owners[at],
        )

    def _pieces(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The teacher's tokens of a word that has these tokens of the student's."""
        key = ids.tobytes()
        if key not in self._known:
            (pieces,) = self.vocabulary.ids([self._written(ids.tolist())])
            unknown = self.vocabulary.special.unknown
            self._known[key] = pieces if len(pieces) else np.array([unknown or 0], dtype=np.int32)
        return self._known[key]

    def _written(self, ids: list[int]) -> str:
        """The word as it is written after another one: with a space in front, where our tokenizer writes one.

        A vocabulary that marks where words begin has other tokens for it without that space.
        """
        return self.tokenizer.decode([*ids, *ids])[len(self.tokenizer.decode(ids)) :]


def mean_rows(
    rows: Float[Tensor, "rows width"], places: NDArray[np.int64], owners: NDArray[np.int64], count: int
) -> Float[Tensor, "count width"]:
    """The mean over the rows of each owner."""
    place, owner, counts = (
        torch.from_numpy(array).to(rows.device, non_blocking=True)
        for array in (places, owners, np.bincount(owners, minlength=count))
    )
    return segment_means(rows[place], owner, counts)

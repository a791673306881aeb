"""A trained encoder as a teacher: hidden states of words, and sentence vectors, as targets.

Teacher and student may have different vocabularies. A word's state is the mean of the rows of its tokens, in either
vocabulary. The teacher reads unmasked text, which is decoded from the student's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

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
    """The words of a batch in the student's rows, and in the teacher's sequences of the same words."""

    count: int  # number of words
    student_rows: NDArray[np.int64]  # the student's rows that belong to a word
    student_words: NDArray[np.int64]  # for each of these rows, the number of its word
    teacher_input: Packed  # a sequence for each text
    teacher_rows: NDArray[np.int64]  # the teacher's rows that belong to a word
    teacher_words: NDArray[np.int64]  # for each of these rows, the number of its word


class EncoderTeacher:
    """A frozen encoder that computes targets for texts tokenised by the student's tokenizer.

    States of words are standardised: each feature minus its mean, divided by its standard deviation, both estimated
    over a sample of words. Sentence vectors have unit length; for a narrower student they are projected on their
    principal components.

    Args:
        loaded: The teacher.
        tokenizer: The student's tokenizer.
    """

    def __init__(self, loaded: ModelBundle, tokenizer: Tokenizer) -> None:
        if loaded.tokenizer is None:
            raise HeedfulError(f"{loaded.source} has no tokenizer, which a teacher needs: put its tokenizer.json there")
        self.loaded, self.student_tokenizer = loaded.eval().requires_grad_(False), tokenizer
        self.tokenizer = loaded.tokenizer
        self.width = loaded.config.model.width
        positions = loaded.config.model.embedding.positions
        limit = None if positions is None else positions.limit
        template = SpecialTokenTemplate.of(loaded.tokenizer, pair=False)
        self._prefix_ids, self._suffix_ids = (ids for ids, _ in template.runs)
        self._room = (1 << 20 if limit is None else limit) - template.width  # maximum text tokens in a sequence
        self._teacher_ids_of: dict[bytes, NDArray[np.int32]] = {}  # ids of words, by the bytes of the student's ids
        self.mean, self.deviation = torch.zeros(self.width), torch.ones(self.width)
        self.basis: Tensor | None = None  # [width, width]: principal components of sentence vectors, strongest first

    # -- statistics of a sample -------------------------------------------------------------------------------------

    def estimate_statistics(self, samples: Sequence[Sample], is_text_id: NDArray[np.bool_]) -> None:
        """Estimate means, standard deviations and principal components.

        Args:
            samples: Samples of the student.
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
        """
        state_parts, vector_parts = [], []
        for sample in samples:
            packed = pack_samples([sample])
            words = self.align_words(packed, packed.tokens.numpy(), is_text_id)
            rows = self.hidden_states(words)
            state_parts.append(mean_rows(rows, words.teacher_rows, words.teacher_words, words.count))
            vector_parts.append(self.sentence_vectors(rows, words.teacher_input))
        states, vectors = torch.cat(state_parts).cpu(), torch.cat(vector_parts).cpu()
        self.mean, self.deviation = states.mean(0), states.std(0).clamp(min=MIN_STD)
        basis = torch.linalg.eigh((vectors.T @ vectors).double()).eigenvectors.flip(-1)
        largest = basis.abs().argmax(0, keepdim=True)
        self.basis = (basis * basis.gather(0, largest).sign()).float()  # the largest number of a component is positive

    def statistics(self) -> dict[str, Tensor]:
        """Return the estimates as tensors to save."""
        assert self.basis is not None
        return {"mean": self.mean, "deviation": self.deviation, "basis": self.basis.contiguous()}

    def load_statistics(self, tensors: Mapping[str, Tensor]) -> None:
        """Use saved estimates."""
        self.mean, self.deviation, self.basis = tensors["mean"], tensors["deviation"], tensors["basis"]

    # -- targets ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hidden_states(self, words: AlignedWords) -> Float[Tensor, "rows width"]:
        """Return the last hidden states of the teacher's sequences in float32, computed in the teacher's precision."""
        device = next(self.loaded.parameters()).device
        with torch.autocast(device.type, enabled=False):
            rows: Tensor = self.loaded.model(words.teacher_input.to(device))
            return rows.float()

    def word_states(
        self, words: AlignedWords, rows: Float[Tensor, "rows width"] | None = None
    ) -> Float[Tensor, "words width"]:
        """Return the standardised state of each word; `rows` are `hidden_states(words)`, if they are known."""
        rows = self.hidden_states(words) if rows is None else rows
        states = mean_rows(rows, words.teacher_rows, words.teacher_words, words.count)
        mean, deviation = (values.to(rows.device, non_blocking=True) for values in (self.mean, self.deviation))
        return (states - mean) / deviation

    def sentence_vectors(
        self, rows: Float[Tensor, "rows width"], teacher_input: Packed
    ) -> Float[Tensor, "texts width"]:
        """Return the unit vector of each text: pooled by the teacher's head if it has one, else the mean of all rows.

        Args:
            rows: Last hidden states of the teacher.
            teacher_input: The sequences that the rows belong to.
        """
        head, batch = self.loaded.head, teacher_input.to(rows.device)
        vectors = head(rows, batch) if isinstance(head, SentenceEmbeddingHead) else pool(rows, batch, "mean")
        return F.normalize(vectors.float(), dim=-1)

    def project_vectors(self, vectors: Float[Tensor, "texts width"], width: int) -> Float[Tensor, "texts narrow"]:
        """Project sentence vectors on the first `width` principal components, or fill them up with zeros."""
        if width >= vectors.shape[1]:
            return F.pad(vectors, (0, width - vectors.shape[1]))
        assert self.basis is not None, "estimate_statistics comes first"
        return vectors @ self.basis[:, :width].to(vectors.device, non_blocking=True)

    # -- words ------------------------------------------------------------------------------------------------------

    def align_words(
        self,
        packed: Packed,
        tokens: NDArray[np.int64],
        is_text_id: NDArray[np.bool_],
        bounds: Sequence[int] | None = None,
    ) -> AlignedWords:
        """Align the words of the student's batch with the teacher's tokens.

        Words that exceed the teacher's maximum length are left out.

        Args:
            packed: The student's batch.
            tokens: The unmasked tokens of the batch.
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
            bounds: Rows at which texts begin, and the number of rows. The teacher reads each text by itself. None: each
                sequence is one text.
        """
        bounds = packed.bounds if bounds is None else bounds
        is_text = is_text_id[tokens]
        starts = self._word_starts(tokens, is_text, bounds)
        word_of = np.where(is_text, np.cumsum(starts) - 1, -1)  # the word of each row; -1: special tokens
        student_rows, first_rows = np.flatnonzero(is_text), np.flatnonzero(starts)
        stop_rows = first_rows + np.bincount(word_of[student_rows], minlength=len(first_rows))
        student_ids = tokens.astype(np.int32)
        teacher_ids = [
            self._teacher_ids(student_ids[start:stop]) for start, stop in zip(first_rows, stop_rows, strict=True)
        ]
        text_of = np.searchsorted(np.array(bounds), first_rows, side="right") - 1  # the text of each word
        text_bounds = np.searchsorted(text_of, np.arange(len(bounds)))  # first word of each text, and number of words
        teacher_input, teacher_word_of, fits = self._teacher_sequences(teacher_ids, text_bounds.tolist())
        new_numbers = np.where(fits, np.cumsum(fits) - 1, -1)  # words that do not fit are not counted
        student_words = new_numbers[word_of[student_rows]]
        teacher_rows = np.flatnonzero(teacher_word_of >= 0)
        return AlignedWords(
            count=int(fits.sum()),
            student_rows=student_rows[student_words >= 0],
            student_words=student_words[student_words >= 0],
            teacher_input=teacher_input,
            teacher_rows=teacher_rows,
            teacher_words=new_numbers[teacher_word_of[teacher_rows]],
        )

    def _word_starts(
        self, tokens: NDArray[np.int64], is_text: NDArray[np.bool_], bounds: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Mark the student's rows that begin a word; the first text token of a text or after a special token does."""
        starts: NDArray[np.bool_] = is_text & ~self.student_tokenizer.continues[tokens]
        starts[1:] |= is_text[1:] & ~is_text[:-1]
        starts[[bound for bound in bounds[:-1] if bound < len(tokens)]] |= True
        starts &= is_text
        return starts

    def _teacher_sequences(
        self, teacher_ids: Sequence[NDArray[np.int32]], text_bounds: Sequence[int]
    ) -> tuple[Packed, NDArray[np.int64], NDArray[np.bool_]]:
        """Build the teacher's sequences: for each text its first words that fit, between special tokens.

        Args:
            teacher_ids: The teacher's token ids of each word.
            text_bounds: First word of each text, and the number of words.

        Returns:
            The sequences; the word of each of their rows, -1 for special tokens; and which words fit.
        """
        sizes = np.array([len(ids) for ids in teacher_ids], dtype=np.int64)
        fits = np.zeros(len(sizes), dtype=np.bool_)
        ids: list[NDArray[np.int32]] = []
        word_of: list[NDArray[Any]] = [np.zeros(0)]
        lengths: list[int] = []
        for first, stop in pairwise(text_bounds):
            stop = first + int(np.searchsorted(np.cumsum(sizes[first:stop]), self._room, side="right"))
            fits[first:stop] = True
            words = np.repeat(np.arange(first, stop), sizes[first:stop])
            ids += [self._prefix_ids, *teacher_ids[first:stop], self._suffix_ids]
            word_of += [np.full(len(self._prefix_ids), -1), words, np.full(len(self._suffix_ids), -1)]
            lengths.append(len(self._prefix_ids) + len(words) + len(self._suffix_ids))
        bounds = (0, *accumulate(lengths))
        packed = Packed(
            tokens=concat_long(ids),
            positions=concat_long([np.arange(length) for length in lengths]),
            types=torch.zeros(bounds[-1], dtype=torch.long),
            bounds=bounds,
        )
        return packed, np.concatenate(word_of).astype(np.int64), fits

    def _teacher_ids(self, student_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the teacher's token ids of a word, from the student's; the unknown token if it has none."""
        key = student_ids.tobytes()
        if key not in self._teacher_ids_of:
            (ids,) = self.tokenizer.ids([self._word_text(student_ids.tolist())])
            unknown = self.tokenizer.special.unknown
            self._teacher_ids_of[key] = ids if len(ids) else np.array([unknown or 0], dtype=np.int32)
        return self._teacher_ids_of[key]

    def _word_text(self, student_ids: list[int]) -> str:
        """Return a word as it is written after another word: with a space in front, if the tokenizer writes one.

        A vocabulary that marks where words begin has different tokens for a word without that space.
        """
        decode = self.student_tokenizer.decode
        return decode([*student_ids, *student_ids])[len(decode(student_ids)) :]


def mean_rows(
    rows: Float[Tensor, "rows width"], row_indices: NDArray[np.int64], groups: NDArray[np.int64], count: int
) -> Float[Tensor, "count width"]:
    """Return the mean of the rows of each group.

    Args:
        rows: All rows.
        row_indices: Indices of the rows that belong to a group.
        groups: For each of these indices, the number of its group.
        count: Number of groups.
    """
    sizes = np.bincount(groups, minlength=count)
    indices, group_numbers, group_sizes = (
        torch.from_numpy(array).to(rows.device, non_blocking=True) for array in (row_indices, groups, sizes)
    )
    return segment_means(rows[indices], group_numbers, group_sizes)

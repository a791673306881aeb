"""`EncoderTeacher`: a trained encoder whose word states and sentence embeddings a student learns.

Teacher and student may have different vocabularies, so that states are compared word by word. The state of a word is
the mean of the hidden states of its tokens. The teacher reads the unmasked text, decoded from the student's tokens.
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
from heedful.model.config import SentenceEmbedding
from heedful.model.heads import SentenceEmbeddingHead, pool
from heedful.nn.layers import segment_means
from heedful.objectives.base import Sample, concat_long, pack_samples
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer

UNLIMITED_LENGTH = 1 << 20  # maximum tokens of a sequence for a teacher without a limit, more than a batch has
MIN_STD = 1e-3  # lower bound of the standard deviations by which states are divided


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AlignedWords:
    """The words of a batch, with their tokens in the student's batch and in the teacher's."""

    count: int  # number of words
    student_positions: NDArray[np.int64]  # positions in the student's batch of tokens that belong to a word
    student_word_of: NDArray[np.int64]  # index of the word of each of these tokens
    teacher_input: Packed  # the teacher's batch, one sequence for each text
    teacher_positions: NDArray[np.int64]  # positions in the teacher's batch of tokens that belong to a word
    teacher_word_of: NDArray[np.int64]  # index of the word of each of these tokens


class EncoderTeacher:
    """A frozen encoder that computes targets for texts tokenised by the student's tokenizer.

    States of words are standardised: from each feature its mean is subtracted, and the result is divided by its
    standard deviation, both estimated over a sample of words. Sentence embeddings have unit length. For a student with
    a smaller hidden size they are projected on their uncentred principal components, and are no longer of unit length.

    Args:
        loaded: The teacher. It is changed: put in eval mode, and its parameters get no more gradients.
        tokenizer: The student's tokenizer.
    """

    def __init__(self, loaded: ModelBundle, tokenizer: Tokenizer) -> None:
        if loaded.tokenizer is None:
            raise HeedfulError(f"{loaded.source} has no tokenizer, which a teacher needs: put its tokenizer.json there")
        self.loaded = loaded.eval().requires_grad_(False)
        self.student_tokenizer = tokenizer
        self.tokenizer = loaded.tokenizer
        self.hidden_size = loaded.config.model.width
        head = loaded.config.head
        # dimension of sentence embeddings
        self.vector_size = head.width(loaded.config.model) if isinstance(head, SentenceEmbedding) else self.hidden_size
        max_length = UNLIMITED_LENGTH if loaded.max_length is None else loaded.max_length
        template = SpecialTokenTemplate.of(loaded.tokenizer, pair=False)
        self._prefix_ids, self._suffix_ids = (ids for ids, _ in template.runs)
        self._room = max_length - template.width  # maximum text tokens in a sequence
        self._ids_cache: dict[bytes, NDArray[np.int32]] = {}  # the ids of words, by the bytes of the student's ids
        self.mean = torch.zeros(self.hidden_size)
        self.deviation = torch.ones(self.hidden_size)
        self.basis: Tensor | None = None  # [dim, dim]: principal components of sentence embeddings, largest first

    # -- statistics of a sample -------------------------------------------------------------------------------------

    def estimate_statistics(self, samples: Sequence[Sample], is_text_id: NDArray[np.bool_]) -> None:
        """Estimate means, standard deviations and uncentred principal components from samples of the student.

        Args:
            samples: Samples of the student.
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
        """
        state_parts = []
        vector_parts = []
        for sample in samples:
            packed = pack_samples([sample])
            words = self.align_words(packed, packed.tokens.numpy(), is_text_id)
            token_states = self.token_states(words)
            state_parts.append(mean_rows(token_states, words.teacher_positions, words.teacher_word_of, words.count))
            vector_parts.append(self.sentence_vectors(token_states, words.teacher_input))
        states = torch.cat(state_parts).cpu()
        vectors = torch.cat(vector_parts).cpu()
        self.mean = states.mean(0)
        self.deviation = states.std(0).clamp(min=MIN_STD)
        basis = torch.linalg.eigh((vectors.T @ vectors).double()).eigenvectors.flip(-1)
        largest = basis.abs().argmax(0, keepdim=True)
        self.basis = (basis * basis.gather(0, largest).sign()).float()  # the largest feature of each is positive

    def statistics(self) -> dict[str, Tensor]:
        """Return the estimates as tensors to save."""
        assert self.basis is not None
        return {"mean": self.mean, "deviation": self.deviation, "basis": self.basis.contiguous()}

    def load_statistics(self, tensors: Mapping[str, Tensor]) -> None:
        """Use saved estimates."""
        self.mean, self.deviation, self.basis = tensors["mean"], tensors["deviation"], tensors["basis"]

    # -- targets ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def token_states(self, words: AlignedWords) -> Float[Tensor, "rows hidden"]:
        """Return the last hidden states of the teacher's batch in float32, computed in the teacher's precision."""
        device = next(self.loaded.parameters()).device
        with torch.autocast(device.type, enabled=False):
            states: Tensor = self.loaded.model(words.teacher_input.to(device))
            return states.float()

    def word_states(
        self, words: AlignedWords, token_states: Float[Tensor, "rows hidden"] | None = None
    ) -> Float[Tensor, "words hidden"]:
        """Return the standardised state of each word.

        Args:
            words: The words.
            token_states: The result of `token_states(words)`. If None, it is computed.
        """
        token_states = self.token_states(words) if token_states is None else token_states
        states = mean_rows(token_states, words.teacher_positions, words.teacher_word_of, words.count)
        mean = self.mean.to(states.device, non_blocking=True)
        deviation = self.deviation.to(states.device, non_blocking=True)
        return (states - mean) / deviation

    def sentence_vectors(
        self, token_states: Float[Tensor, "rows hidden"], teacher_input: Packed
    ) -> Float[Tensor, "texts dim"]:
        """Return the unit sentence embedding of each text.

        The teacher's sentence embedding head pools the hidden states. Without such a head, the embedding is their mean.
        A head with a dense layer may give embeddings of another size than the hidden size.

        Args:
            token_states: Last hidden states of the teacher.
            teacher_input: The batch of these hidden states.
        """
        head = self.loaded.head
        batch = teacher_input.to(token_states.device)
        if isinstance(head, SentenceEmbeddingHead):
            vectors = head(token_states, batch)
        else:
            vectors = pool(token_states, batch, "mean")
        return F.normalize(vectors.float(), dim=-1)

    def project_vectors(self, vectors: Float[Tensor, "texts dim"], size: int) -> Float[Tensor, "texts size"]:
        """Project sentence embeddings on the first `size` principal components, or pad them with zeros up to `size`."""
        if size >= vectors.shape[1]:
            return F.pad(vectors, (0, size - vectors.shape[1]))
        assert self.basis is not None, "estimate_statistics comes first"
        return vectors @ self.basis[:, :size].to(vectors.device, non_blocking=True)

    # -- words ------------------------------------------------------------------------------------------------------

    def align_words(
        self,
        packed: Packed,
        tokens: NDArray[np.int64],
        is_text_id: NDArray[np.bool_],
        bounds: Sequence[int] | None = None,
    ) -> AlignedWords:
        """Align the words of the student's batch with the teacher's tokens.

        Words that exceed the teacher's maximum length are left out, and words without tokens in its vocabulary, such as
        line ends.

        Args:
            packed: The student's batch.
            tokens: The unmasked tokens of the batch.
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
            bounds: First position of each text in the batch, then the number of all tokens. Each text is a separate
                sequence for the teacher. If None, each sequence of the student is one text.
        """
        bounds = packed.bounds if bounds is None else bounds
        is_text = is_text_id[tokens]
        starts = self._word_starts(tokens, is_text, bounds)
        word_of = np.where(is_text, np.cumsum(starts) - 1, -1)  # word of each token; -1 for special tokens
        student_positions = np.flatnonzero(is_text)
        first_rows = np.flatnonzero(starts)
        stop_rows = first_rows + np.bincount(word_of[student_positions], minlength=len(first_rows))
        student_ids = tokens.astype(np.int32)
        teacher_ids = [
            self._teacher_ids(student_ids[start:stop]) for start, stop in zip(first_rows, stop_rows, strict=True)
        ]
        text_of = np.searchsorted(np.array(bounds), first_rows, side="right") - 1  # text of each word
        text_bounds = np.searchsorted(text_of, np.arange(len(bounds)))  # first word of each text, then the word count
        teacher_input, teacher_token_words, fits = self._teacher_sequences(teacher_ids, text_bounds.tolist())
        new_indices = np.where(fits, np.cumsum(fits) - 1, -1)  # index of each word among those that fit
        student_word_of = new_indices[word_of[student_positions]]
        teacher_positions = np.flatnonzero(teacher_token_words >= 0)
        return AlignedWords(
            count=int(fits.sum()),
            student_positions=student_positions[student_word_of >= 0],
            student_word_of=student_word_of[student_word_of >= 0],
            teacher_input=teacher_input,
            teacher_positions=teacher_positions,
            teacher_word_of=new_indices[teacher_token_words[teacher_positions]],
        )

    def _word_starts(
        self, tokens: NDArray[np.int64], is_text: NDArray[np.bool_], bounds: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Mark the student's tokens that begin a word.

        The first text token of a text and the first one after a special token always begin a word.
        """
        starts: NDArray[np.bool_] = is_text & self.student_tokenizer.starts(tokens)
        starts[1:] |= is_text[1:] & ~is_text[:-1]
        starts[[bound for bound in bounds[:-1] if bound < len(tokens)]] |= True
        starts &= is_text
        return starts

    def _teacher_sequences(
        self, teacher_ids: Sequence[NDArray[np.int32]], text_bounds: Sequence[int]
    ) -> tuple[Packed, NDArray[np.int64], NDArray[np.bool_]]:
        """Build the teacher's batch: for each text the first words that fit, between special tokens.

        A word without tokens does not count as one that fits.

        Args:
            teacher_ids: The teacher's token ids of each word.
            text_bounds: First word of each text, then the number of all words.

        Returns:
            The batch; the word of each of its tokens, -1 for special tokens; and a mask of the words that fit.
        """
        sizes = np.array([len(ids) for ids in teacher_ids], dtype=np.int64)
        fits = np.zeros(len(sizes), dtype=np.bool_)
        ids: list[NDArray[np.int32]] = []
        word_of: list[NDArray[Any]] = [np.zeros(0)]
        lengths: list[int] = []
        for first, stop in pairwise(text_bounds):
            stop = first + int(np.searchsorted(np.cumsum(sizes[first:stop]), self._room, side="right"))
            fits[first:stop] = sizes[first:stop] > 0
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
        """Return the teacher's token ids of a word from the student's; no ids if its tokenizer drops the word."""
        key = student_ids.tobytes()
        if key not in self._ids_cache:
            (self._ids_cache[key],) = self.tokenizer.ids([self._word_text(student_ids.tolist())])
        return self._ids_cache[key]

    def _word_text(self, student_ids: list[int]) -> str:
        """Return a word as the tokenizer decodes it after another word, with a leading space if there is one.

        Vocabularies that mark the starts of words have different tokens for a word without that space.
        """
        decode = self.student_tokenizer.decode
        return decode([*student_ids, *student_ids])[len(decode(student_ids)) :]


def mean_rows(
    rows: Float[Tensor, "rows hidden"], row_indices: NDArray[np.int64], groups: NDArray[np.int64], count: int
) -> Float[Tensor, "count hidden"]:
    """Return the mean of the rows of each group, such as the mean of the hidden states of each word.

    Args:
        rows: All rows.
        row_indices: Indices of the rows that belong to a group.
        groups: Index of the group of each of these rows.
        count: Number of groups.
    """
    sizes = np.bincount(groups, minlength=count)
    indices, group_indices, group_sizes = (
        torch.from_numpy(array).to(rows.device, non_blocking=True) for array in (row_indices, groups, sizes)
    )
    return segment_means(rows[indices], group_indices, group_sizes)

"""Constraints on the tokens that a model generates: tokens that are forced or banned in some steps.

`decode.py` applies them in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceSoFar:
    """The tokens of a sequence that is being generated."""

    prompt: list[int]
    generated: list[int]
    next_is_last: bool  # whether the next token is the last one that can be generated


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenConstraints:
    """Constraints on the next token: the logits processors of transformers, under the names of their settings.

    The log-probability of a banned token becomes -inf, that of a forced token 0; nothing is normalised again. If tokens
    are forced in a step, no other constraint applies to it.

    Args:
        min_length: Tokens of a sequence, its prompt included, before a token may end it.
        min_new_tokens: Tokens after the prompt before a token may end the sequence.
        no_repeat_ngram_size: Length of token sequences that may occur only once. If 0, there is no limit.
        bad_words_ids: Sequences of tokens that are never generated.
        forced_bos_token_id: The token after a prompt of one token.
        forced_eos_token_id: Tokens that end a text of the maximum length: one of them is forced at its last position.
        max_length: Maximum number of tokens of a sequence, its prompt included. If None, unlimited.
    """

    min_length: int = 0
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    max_length: int | None = None

    def apply(
        self, log_p: Float[Tensor, "sequences vocabulary"], sequences: Sequence[SequenceSoFar], stop: Sequence[int]
    ) -> Float[Tensor, "sequences vocabulary"]:
        """Return the log-probabilities of the next tokens with those of banned and forced ones set.

        Args:
            stop: Tokens that end a sequence.
        """
        log_p = log_p.clone()
        for row, sequence in enumerate(sequences):
            if forced := self._forced(sequence):
                log_p[row] = -inf
                log_p[row, list(forced)] = 0.0
            elif banned := self._banned(sequence, stop):
                log_p[row, list(banned)] = -inf
        return log_p

    def _forced(self, sequence: SequenceSoFar) -> tuple[int, ...]:
        """Return the only tokens that are allowed next, or () if every token is allowed."""
        if sequence.next_is_last and self.forced_eos_token_id:
            return self.forced_eos_token_id
        is_first = len(sequence.prompt) + len(sequence.generated) == 1
        return (self.forced_bos_token_id,) if is_first and self.forced_bos_token_id is not None else ()

    def _banned(self, sequence: SequenceSoFar, stop: Sequence[int]) -> set[int]:
        """Return the tokens that are not allowed next."""
        tokens = sequence.prompt + sequence.generated
        words = (word for word in self.bad_words_ids if len(word) > 1 or word[0] not in stop)
        banned = {word[-1] for word in words if _ends(tokens, word)}
        if len(tokens) < self.min_length or len(sequence.generated) < self.min_new_tokens:
            banned |= set(stop)
        if size := self.no_repeat_ngram_size:
            ngrams = (tokens[start : start + size] for start in range(len(tokens) - size + 1))
            banned |= {ngram[-1] for ngram in ngrams if _ends(tokens, ngram)}
        return banned


def _ends(history: list[int], word: Sequence[int]) -> bool:
    """Return whether `history` ends with all tokens of a word but the last one, which would complete the word."""
    return len(word) <= len(history) + 1 and history[len(history) - len(word) + 1 :] == list(word[:-1])

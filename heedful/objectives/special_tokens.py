"""`SpecialTokenTemplate`: the special tokens that a tokenizer puts around a text or a pair of texts.

Objectives build sequences from the token ids of a corpus, without running the tokenizer again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer

Ids = NDArray[np.int32]
Types = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpecialTokenTemplate:
    """Runs of special tokens with gaps for the texts: run, text, run, text, ..., run. A run may be empty."""

    runs: tuple[tuple[Ids, Types], ...]  # token ids and types of each run; one more run than texts
    text_types: tuple[int, ...]  # token type of each text

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, pair: bool) -> SpecialTokenTemplate:
        """Return the template of a tokenizer for a text, or for a pair of texts.

        Raises:
            HeedfulError: If the tokenizer puts the second text of a pair before the first one.
        """
        encoded = tokenizer.encode(("a", "a") if pair else "a")
        tokens = zip(encoded.segments, encoded.ids, encoded.types, strict=True)
        runs: list[tuple[Ids, Types]] = [special_run([])]
        text_types: list[int] = []
        for segment, group in groupby(tokens, key=lambda token: token[0]):
            ids_and_types = [(id, type_id) for _, id, type_id in group]
            if segment is None:  # special tokens
                runs[-1] = special_run(ids_and_types)
            else:
                if segment != len(text_types):
                    raise HeedfulError("this tokenizer swaps the texts of a pair: use another one")
                text_types.append(ids_and_types[0][1])
                runs.append(special_run([]))
        return cls(runs=tuple(runs), text_types=tuple(text_types))

    @property
    def width(self) -> int:
        """Number of special tokens."""
        return sum(len(ids) for ids, _ in self.runs)

    @property
    def without_end(self) -> SpecialTokenTemplate:
        """The template without the special tokens after the last text, for a window before the end of a document."""
        return replace(self, runs=(*self.runs[:-1], special_run([])))

    def room(self, length: int) -> int:
        """Return how many text tokens fit into a sequence of `length` tokens.

        Raises:
            HeedfulError: If fewer than two tokens are left for each text.
        """
        room = length - self.width
        if room < 2 * len(self.text_types):
            raise HeedfulError(
                f"length is {length}, and {self.width} of these tokens are special: set it to at least "
                f"{self.width + 2 * len(self.text_types)}"
            )
        return room

    def fill(self, *texts: Ids) -> tuple[Ids, Types]:
        """Return the token ids and types of the sequence with these texts in the gaps.

        >>> template = SpecialTokenTemplate(runs=(special_run([(2, 0)]), special_run([(3, 0)])), text_types=(0,))
        >>> template.fill(np.array([7, 8], dtype=np.int32))[0].tolist()
        [2, 7, 8, 3]
        """
        (first_ids, first_types), *later_runs = self.runs
        ids, types = [first_ids], [first_types]
        for text, text_type, (run_ids, run_types) in zip(texts, self.text_types, later_runs, strict=True):
            ids += [text, run_ids]
            types += [np.full(len(text), text_type, dtype=np.uint8), run_types]
        return np.concatenate(ids), np.concatenate(types)


def special_run(tokens: list[tuple[int, int]]) -> tuple[Ids, Types]:
    """Convert (token id, token type) pairs to an array of ids and an array of types."""
    ids, types = [id for id, _ in tokens], [type_id for _, type_id in tokens]
    return np.array(ids, dtype=np.int32), np.array(types, dtype=np.uint8)

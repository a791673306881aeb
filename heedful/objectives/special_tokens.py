"""Templates of the special tokens around a text or a pair of texts, as a tokenizer adds them."""

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
    """Runs of special tokens with gaps between them for the texts: special, text, special, ...; runs may be empty."""

    runs: tuple[tuple[Ids, Types], ...]  # texts + 1
    kinds: tuple[int, ...]  # the type of each text's tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, pair: bool) -> SpecialTokenTemplate:
        """Return the template of a tokenizer for a text, or for a pair of texts."""
        encoded = tokenizer.encode(("a", "a") if pair else "a")
        parts = list(zip(encoded.segments, encoded.ids, encoded.types, strict=True))
        runs: list[tuple[Ids, Types]] = [special_run([])]
        kinds: list[int] = []
        for segment, group in groupby(parts, key=lambda part: part[0]):
            tokens = list(group)
            if segment is None:
                runs[-1] = special_run([(id, kind) for _, id, kind in tokens])
            else:
                if segment != len(kinds):
                    raise HeedfulError("this tokenizer swaps the texts of a pair: use another one")
                kinds.append(tokens[0][2])
                runs.append(special_run([]))
        return cls(runs=tuple(runs), kinds=tuple(kinds))

    @property
    def width(self) -> int:
        """Number of special tokens."""
        return sum(len(ids) for ids, _ in self.runs)

    @property
    def opening(self) -> SpecialTokenTemplate:
        """The template without the special tokens after the last text, for a text that continues."""
        return replace(self, runs=(*self.runs[:-1], special_run([])))

    def room(self, length: int) -> int:
        """Return the number of tokens of text in a sequence of `length` tokens."""
        room = length - self.width
        if room < 2 * len(self.kinds):
            raise HeedfulError(
                f"length is {length}, of which {self.width} are special tokens: give at least "
                f"{self.width + 2 * len(self.kinds)}"
            )
        return room

    def fill(self, *texts: Ids) -> tuple[Ids, Types]:
        """Return tokens and types of a sequence.

        >>> frame = SpecialTokenTemplate(runs=(special_run([(2, 0)]), special_run([(3, 0)])), kinds=(0,))
        >>> frame.fill(np.array([7, 8], dtype=np.int32))[0].tolist()
        [2, 7, 8, 3]
        """
        ids, types = [self.runs[0][0]], [self.runs[0][1]]
        for text, kind, (after, kinds) in zip(texts, self.kinds, self.runs[1:], strict=True):
            ids += [text, after]
            types += [np.full(len(text), kind, dtype=np.uint8), kinds]
        return np.concatenate(ids), np.concatenate(types)


def special_run(parts: list[tuple[int, int]]) -> tuple[Ids, Types]:
    """Return arrays of ids and types."""
    ids, types = [id for id, _ in parts], [kind for _, kind in parts]
    return np.array(ids, dtype=np.int32), np.array(types, dtype=np.uint8)

"""Random documents for pretraining.py, packed into rows of windows and of blocks, and the objective that masks them.

A window is a run of whole sentences of one document; blocks are cut every LENGTH tokens, wherever that is.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lengths import CLS, FIRST_WORD, SEP
from numpy.typing import NDArray

if TYPE_CHECKING:
    from heedful.objectives import Sample
    from heedful.objectives.masked_lm import MaskedLM

PAD, UNKNOWN, MASK = 0, 100, 103  # ids of BERT's English vocabulary, like CLS and SEP
LENGTH = 128  # maximum tokens of a sequence
SHARE = 0.15  # share of the tokens that are masked
SEED = 1
# lengths in tokens: the mean, and the standard deviation of the logarithm
DOCUMENT = (400.0, 1.0)
SENTENCE = (24.0, 0.55)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The sizes of a round."""

    row: int  # maximum tokens of a row
    batch: int  # rows of a step
    steps: int  # steps of a round, which takes all arms together about a minute

    @property
    def tokens(self) -> int:
        """The most tokens of a round."""
        return self.row * self.batch * self.steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """The data of a round: rows of several sequences each, concatenated."""

    tokens: NDArray[np.int64]
    inputs: NDArray[np.int64]  # the tokens after masking, which the model reads
    labels: NDArray[np.int64]  # -100 for tokens that are not masked
    lengths: NDArray[np.int64]  # tokens of each sequence
    counts: NDArray[np.int64]  # sequences of each row

    @classmethod
    def of(cls, samples: Sequence[Sample], objective: MaskedLM) -> Round:
        """Mask the samples as Heedful's trainer does, which masks the same tokens in every epoch."""
        from heedful.data.sampler import derive_seed

        inputs, labels = [], []
        for index, sample in enumerate(samples):
            batch = objective.batch([sample], [derive_seed(SEED, 0, index)])
            assert batch.rows is not None
            inputs.append(batch.packed.tokens.numpy())
            labels.append(np.full(len(sample), -100))
            labels[-1][batch.rows.numpy()] = batch.targets.numpy()
        return cls(
            tokens=np.concatenate([sample.tokens.astype(np.int64) for sample in samples]),
            inputs=np.concatenate(inputs),
            labels=np.concatenate(labels),
            lengths=np.concatenate([np.diff(sample.bounds) for sample in samples]),
            counts=np.array([len(sample.bounds) - 1 for sample in samples]),
        )

    @classmethod
    def open(cls, path: str) -> Round:
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls(**file)

    def save(self, path: Path) -> str:
        """Write the round to a file and return its path."""
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})
        return str(path)

    def first(self, rows: int) -> Round:
        """Return the round of the first rows."""
        sequences = int(self.counts[:rows].sum())
        tokens = int(self.lengths[:sequences].sum())
        return Round(
            tokens=self.tokens[:tokens],
            inputs=self.inputs[:tokens],
            labels=self.labels[:tokens],
            lengths=self.lengths[:sequences],
            counts=self.counts[:rows],
        )

    def digest(self) -> str:
        """Return a short hash of the round."""
        return hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in astuple(self))).hexdigest()[:16]

    def samples(self) -> list[Sample]:
        """Return the samples for Heedful's trainer."""
        from heedful.objectives import Sample

        samples, start = [], 0
        for lengths in np.split(self.lengths, np.cumsum(self.counts)[:-1]):
            bounds = (0, *accumulate(lengths.tolist()))
            tokens = self.tokens[start : start + bounds[-1]].astype(np.int32)
            samples.append(Sample(tokens=tokens, types=np.zeros(len(tokens), dtype=np.uint8), bounds=bounds))
            start += bounds[-1]
        return samples


def corpus(tokens: int, vocabulary: int) -> Any:
    """Return a corpus of random words with at least `tokens` tokens; its last document is complete."""
    from heedful.data.corpus.shards import Corpus

    generator = random.Random(SEED)
    documents, segments = [0], [0]

    def lognormal(mean: float, sigma: float) -> int:
        return max(2, round(exp(generator.gauss(log(mean) - sigma**2 / 2, sigma))))

    while segments[-1] < tokens:
        document_end = segments[-1] + lognormal(*DOCUMENT)
        while segments[-1] < document_end:
            segments.append(segments[-1] + lognormal(*SENTENCE))
        documents.append(len(segments) - 1)
    ids = np.array([generator.randrange(FIRST_WORD, vocabulary) for _ in range(segments[-1])], dtype=np.int32)

    class Invented(Corpus):
        """A corpus in memory."""

        def __init__(self) -> None:
            self.documents, self.segments = np.array(documents), np.array(segments)

        def __len__(self) -> int:
            return len(self.documents) - 1

        def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
            return ids[start:stop]

    return Invented()


def windows(dataset: Any, case: Case) -> list[Sample]:
    """Return the rows of windows of a round: random ones of those that pre-training packs, if they are nearly full."""
    from heedful.data.sampler import epoch_order
    from heedful.objectives import packing
    from heedful.objectives.special_tokens import SpecialTokenTemplate, special_run

    template = SpecialTokenTemplate(runs=(special_run([(CLS, 0)]), special_run([(SEP, 0)])), text_types=(0,))
    ranges = packing.segment_windows(dataset, np.arange(len(dataset)), template.room(LENGTH))
    packed = packing.PackedSequences(dataset, template, ranges, case.row, SEED)
    shuffled = (packed[index] for index in epoch_order(len(packed), SEED, 0))
    rows = [row for row in shuffled if len(row) >= packing.FULL * case.row]
    assert len(rows) >= case.batch * case.steps, "a longer corpus is needed, or longer rows"
    return rows[: case.batch * case.steps]


def blocks(dataset: Any, case: Case) -> list[Sample]:
    """Return the rows of blocks of a round: the first ones that transformers' run_mlm cuts with group_texts."""
    from heedful.objectives import Sample

    edges = dataset.segments[dataset.documents]
    stream = np.concatenate([[CLS, *dataset.tokens(start, stop), SEP] for start, stop in pairwise(edges)])
    return [
        Sample(
            tokens=stream[start : start + case.row].astype(np.int32),
            types=np.zeros(case.row, dtype=np.uint8),
            bounds=tuple(range(0, case.row + 1, LENGTH)),
        )
        for start in range(0, case.tokens, case.row)
    ]


@cache
def objective(vocabulary: int) -> MaskedLM:
    """Return the masked-LM objective of a vocabulary; it masks the same tokens in every epoch."""
    import tokenizers

    from heedful.objectives.masked_lm import MaskedLM
    from heedful.tokenizer import Tokenizer

    special = {"pad_token": PAD, "unk_token": UNKNOWN, "cls_token": CLS, "sep_token": SEP, "mask_token": MASK}
    words = {str(token_id): token_id for token_id in range(FIRST_WORD, vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(special | words, unk_token="unk_token"))
    return MaskedLM(tokenizer=Tokenizer(backend, {name: name for name in special}), mask_prob=SHARE, num_static_masks=1)

"""Probes: scores of frozen vectors on small labelled files during pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.data import DataSettings, read
from heedful.data.examples import Example, LabelledExample, ScoredExample, TaggedExample
from heedful.errors import HeedfulError
from heedful.model.heads import pool
from heedful.packed import Packed
from heedful.runs.pretrain.settings import Probe
from heedful.tasks.metrics.regression import ranks
from heedful.tokenizer import Tokenizer

BATCH_TOKENS = 8192
MAX_LENGTH = 128  # tokens of a text
RIDGE = 1e-3  # of the linear classifier, relative to the mean square of the features
EXAMPLES: dict[str, type[Example]] = {"similarity": ScoredExample, "classify": LabelledExample, "tag": TaggedExample}


class ProbeSet:
    """The texts and targets of a probe, tokenised once."""

    def __init__(self, probe: Probe, tokenizer: Tokenizer) -> None:
        """Read the file; raises HeedfulError where it does not have what the probe needs."""
        self.probe = probe
        if not Path(probe.data).exists():
            raise HeedfulError(f"probe {probe.name}: {probe.data} does not exist; give a labelled file")
        source = read(probe.data, EXAMPLES[probe.kind], DataSettings(dev_fraction=0.0))
        examples = [example for split in source.splits for example in source.examples(split)]
        tokenizer = tokenizer.limited(min(MAX_LENGTH, tokenizer.max_length or MAX_LENGTH))
        self.targets: NDArray[np.float64]
        if probe.kind == "similarity":
            pairs = [
                example for example in examples if isinstance(example, ScoredExample) and example.text_pair is not None
            ]
            texts: list[str] = [text for pair in pairs for text in pair.texts]
            self.targets = np.array([pair.score for pair in pairs])
        elif probe.kind == "classify":
            labelled = [example for example in examples if isinstance(example, LabelledExample)]
            texts = [example.text for example in labelled]
            names = sorted({example.label for example in labelled})
            self.targets = np.array([names.index(example.label) for example in labelled], dtype=np.float64)
        else:
            tagged = [example for example in examples if isinstance(example, TaggedExample)]
            texts = [" ".join(example.words) for example in tagged]
        encoded = tokenizer.encode_batch(list(texts))
        self.ids, self.types = [encoding.ids for encoding in encoded], [encoding.types for encoding in encoded]
        self.rows: list[list[int]] = []  # of a tagging probe: the row of each word's first token, by text
        if probe.kind == "tag":
            chosen: list[str] = []
            for example, ids in zip(tagged, encoded, strict=True):
                starts = np.cumsum([0, *(len(word) + 1 for word in example.words)])[:-1]
                first = {
                    offset[0]: row for row, offset in reversed(list(enumerate(ids.offsets))) if offset[1] > offset[0]
                }
                rows = [first.get(int(start), -1) for start in starts]
                pairs_of = [(row, tag) for row, tag in zip(rows, example.tags, strict=True) if row >= 0 and tag != "O"]
                self.rows.append([row for row, _ in pairs_of])
                chosen += [tag for _, tag in pairs_of]
            names = sorted(set(chosen))
            self.targets = np.array([names.index(tag) for tag in chosen], dtype=np.float64)
        if len(self.targets) < 8:
            raise HeedfulError(
                f"probe {probe.name}: {probe.data} has {len(self.targets)} targets for {probe.kind}; expected 8 or more"
            )

    @torch.no_grad()
    def score(self, loaded: ModelBundle) -> float:
        """The probe's score, from -1 to 1 for similarity and from 0 to 1 for the others."""
        features = self._features(loaded).double().cpu().numpy()
        if self.probe.kind == "similarity":
            unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
            return float(np.corrcoef(ranks((unit[::2] * unit[1::2]).sum(1)), ranks(self.targets))[0, 1])
        return _linear_accuracy(features, self.targets.astype(np.int64))

    def _features(self, loaded: ModelBundle) -> Float[Tensor, "vectors width"]:
        """Mean vectors of texts, or the rows of words, in the order of the targets."""
        device = next(loaded.parameters()).device
        order = sorted(range(len(self.ids)), key=lambda number: len(self.ids[number]))
        vectors: list[Tensor] = [torch.zeros(0)] * len(order)
        batch: list[int] = []
        for place, number in enumerate(order):
            batch.append(number)
            if sum(len(self.ids[row]) for row in batch) < BATCH_TOKENS and place + 1 < len(order):
                continue
            packed = Packed.of([self.ids[row] for row in batch], [self.types[row] for row in batch]).to(device)
            rows = loaded.hidden_states(packed).float()
            if self.rows:
                for text, part in zip(batch, packed.unpack(rows), strict=True):
                    vectors[text] = part[self.rows[text]]
            else:
                for text, vector in zip(batch, pool(rows, packed, "mean"), strict=True):
                    vectors[text] = vector[None]
            batch = []
        return torch.cat(vectors)


def _linear_accuracy(features: NDArray[np.float64], targets: NDArray[np.int64]) -> float:
    """Accuracy on the last third of a ridge regression to one-hot targets that is fitted on the rest.

    It has a closed form, so that a probe is the same on every machine and takes milliseconds.
    """
    cut = 2 * len(features) // 3
    mean, deviation = features[:cut].mean(0), features[:cut].std(0) + 1e-6
    inputs = np.concatenate([(features - mean) / deviation, np.ones((len(features), 1))], 1)
    wanted = np.eye(int(targets.max()) + 1)[targets[:cut]]
    gram = inputs[:cut].T @ inputs[:cut] + RIDGE * cut * np.eye(inputs.shape[1])
    scores = inputs[cut:] @ np.linalg.solve(gram, inputs[:cut].T @ wanted)
    return float((scores.argmax(1) == targets[cut:]).mean())


def probe_scores(sets: Sequence[ProbeSet], loaded: ModelBundle) -> dict[str, float]:
    """Scores by their names in the journal: probe_NAME."""
    return {f"probe_{probe_set.probe.name}": probe_set.score(loaded) for probe_set in sets}

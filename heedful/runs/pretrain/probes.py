"""Probes: scores of frozen vectors on small labelled files. `runs.pretrain.evaluate` measures them in training."""

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
from heedful.tokenizer import Encoding, Tokenizer

BATCH_TOKENS = 8192  # tokens in a batch
MAX_LENGTH = 128  # maximum tokens of a text
RIDGE = 1e-3  # regularization of the linear classifier, for features with a mean square of 1
MIN_TARGETS = 8  # minimum of targets of a probe
EXAMPLES: dict[str, type[Example]] = {"similarity": ScoredExample, "classify": LabelledExample, "tag": TaggedExample}


class ProbeSet:
    """The tokenized texts and the targets of a probe.

    Args:
        probe: Name, kind and file of the probe.
        tokenizer: The tokenizer of the model.

    Raises:
        HeedfulError: If the file is missing, or lacks columns or targets.
    """

    def __init__(self, probe: Probe, tokenizer: Tokenizer) -> None:
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
        encodings = tokenizer.encode_batch(list(texts))
        self.ids = [encoding.ids for encoding in encodings]
        self.types = [encoding.types for encoding in encodings]
        self.positions: list[list[int]] = []  # for a tagging probe, each text's positions of the first tokens of words
        if probe.kind == "tag":
            tags: list[str] = []
            for example, encoding in zip(tagged, encodings, strict=True):
                text_positions, text_tags = _tagged_positions(example, encoding)
                self.positions.append(text_positions)
                tags += text_tags
            names = sorted(set(tags))
            self.targets = np.array([names.index(tag) for tag in tags], dtype=np.float64)
        if len(self.targets) < MIN_TARGETS:
            raise HeedfulError(
                f"probe {probe.name}: {probe.data} has {len(self.targets)} targets for {probe.kind}; expected "
                f"{MIN_TARGETS} or more"
            )

    @torch.no_grad()
    def score(self, loaded: ModelBundle) -> float:
        """Return the probe's score of a model: from -1 to 1 for similarity, from 0 to 1 for the other kinds."""
        features = self._features(loaded).double().cpu().numpy()
        if self.probe.kind == "similarity":
            unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
            return float(np.corrcoef(ranks((unit[::2] * unit[1::2]).sum(1)), ranks(self.targets))[0, 1])
        return _linear_accuracy(features, self.targets.astype(np.int64))

    def _features(self, loaded: ModelBundle) -> Float[Tensor, "vectors hidden_size"]:
        """Compute mean vectors of texts, or hidden states of words, in the order of the targets."""
        device = next(loaded.parameters()).device
        order = sorted(range(len(self.ids)), key=lambda text: len(self.ids[text]))
        vectors: list[Tensor] = [torch.zeros(0)] * len(order)
        batch: list[int] = []  # indices of texts
        for texts_seen, text_index in enumerate(order, start=1):
            batch.append(text_index)
            if sum(len(self.ids[text]) for text in batch) < BATCH_TOKENS and texts_seen < len(order):
                continue
            packed = Packed.of([self.ids[text] for text in batch], [self.types[text] for text in batch]).to(device)
            states = loaded.hidden_states(packed).float()
            if self.positions:
                for text, text_states in zip(batch, packed.unpack(states), strict=True):
                    vectors[text] = text_states[self.positions[text]]
            else:
                for text, vector in zip(batch, pool(states, packed, "mean"), strict=True):
                    vectors[text] = vector[None]
            batch = []
        return torch.cat(vectors)


def _tagged_positions(example: TaggedExample, encoding: Encoding) -> tuple[list[int], list[str]]:
    """Return positions of the first tokens of an example's words, and the tags of these words.

    The words, joined by spaces, are encoded in `encoding`. Words that are tagged O, or whose first token is missing,
    are left out.
    """
    position_at_offset: dict[int, int] = {}  # character where a token starts -> position of the token
    for position, (start, stop) in enumerate(encoding.offsets):
        if stop > start:
            position_at_offset.setdefault(start, position)
    positions: list[int] = []
    tags: list[str] = []
    word_start = 0
    for word, tag in zip(example.words, example.tags, strict=True):
        first_position = position_at_offset.get(word_start)
        if first_position is not None and tag != "O":
            positions.append(first_position)
            tags.append(tag)
        word_start += len(word) + 1
    return positions, tags


def _linear_accuracy(features: NDArray[np.float64], targets: NDArray[np.int64]) -> float:
    """Measure the accuracy of a linear classifier on the last third of the rows, fitted on the others.

    The classifier is a ridge regression to one-hot targets. It has a closed form, so a probe gives the same score on
    every machine and takes milliseconds.
    """
    train_rows = 2 * len(features) // 3
    mean = features[:train_rows].mean(0)
    deviation = features[:train_rows].std(0) + 1e-6
    inputs = np.concatenate([(features - mean) / deviation, np.ones((len(features), 1))], 1)
    one_hot = np.eye(int(targets.max()) + 1)[targets[:train_rows]]
    gram = inputs[:train_rows].T @ inputs[:train_rows] + RIDGE * train_rows * np.eye(inputs.shape[1])
    scores = inputs[train_rows:] @ np.linalg.solve(gram, inputs[:train_rows].T @ one_hot)
    return float((scores.argmax(1) == targets[train_rows:]).mean())


def probe_scores(probe_sets: Sequence[ProbeSet], loaded: ModelBundle) -> dict[str, float]:
    """Score a model on all probes. The keys are names of metrics, probe_NAME."""
    return {f"probe_{probe_set.probe.name}": probe_set.score(loaded) for probe_set in probe_sets}

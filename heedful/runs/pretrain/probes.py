"""Probes: how well the frozen vectors of a model predict the labels of a small file. See `Probe` for the kinds.

`runs.pretrain.evaluate` scores the model on all probes at each evaluation of a pre-training run.
"""

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

BATCH_TOKENS = 8192  # a batch is complete when it has this number of tokens
MAX_LENGTH = 128  # maximum tokens of a text; longer texts are truncated
RIDGE = 1e-3  # L2 regularization of the linear classifier, for features with a mean square of 1
MIN_TARGETS = 8  # minimum number of targets of a probe
# type of the examples by kind of the probe
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
        self.targets: NDArray[np.float64]  # a score per pair of texts, a class id per text, or a class id per word
        if probe.kind == "similarity":
            pairs = [
                example for example in examples if isinstance(example, ScoredExample) and example.text_pair is not None
            ]
            texts: list[str] = [text for pair in pairs for text in pair.texts]
            self.targets = np.array([pair.score for pair in pairs])
        elif probe.kind == "classify":
            labelled = [example for example in examples if isinstance(example, LabelledExample)]
            texts = [example.text for example in labelled]
            self.targets = _class_ids([example.label for example in labelled])
        else:
            tagged = [example for example in examples if isinstance(example, TaggedExample)]
            texts = [" ".join(example.words) for example in tagged]
        encodings = tokenizer.encode_batch(list(texts))
        self.ids = [encoding.ids for encoding in encodings]
        self.types = [encoding.types for encoding in encodings]
        self.positions: list[list[int]] = []  # of a "tag" probe: for each text, the position of each tagged word
        if probe.kind == "tag":
            tags: list[str] = []
            for example, encoding in zip(tagged, encodings, strict=True):
                text_positions, text_tags = _tagged_positions(example, encoding)
                self.positions.append(text_positions)
                tags += text_tags
            self.targets = _class_ids(tags)
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
            unit_vectors = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
            cosines = (unit_vectors[::2] * unit_vectors[1::2]).sum(1)  # first and second texts of pairs alternate
            spearman = np.corrcoef(ranks(cosines), ranks(self.targets))[0, 1]
            return float(spearman)
        return _linear_accuracy(features, self.targets.astype(np.int64))

    def _features(self, loaded: ModelBundle) -> Float[Tensor, "vectors hidden_size"]:
        """Compute the mean hidden state of each text, or of a "tag" probe the hidden state of each tagged word."""
        device = next(loaded.parameters()).device
        by_length = sorted(range(len(self.ids)), key=lambda index: len(self.ids[index]))  # indices of texts
        vectors: list[Tensor] = [torch.zeros(0)] * len(by_length)
        batch: list[int] = []  # indices of texts
        for num_seen, text_index in enumerate(by_length, start=1):
            batch.append(text_index)
            batch_tokens = sum(len(self.ids[index]) for index in batch)
            if batch_tokens < BATCH_TOKENS and num_seen < len(by_length):
                continue
            packed = Packed.of([self.ids[index] for index in batch], [self.types[index] for index in batch]).to(device)
            states = loaded.hidden_states(packed).float()
            if self.positions:
                for index, text_states in zip(batch, packed.unpack(states), strict=True):
                    vectors[index] = text_states[self.positions[index]]
            else:
                for index, vector in zip(batch, pool(states, packed, "mean"), strict=True):
                    vectors[index] = vector[None]
            batch = []
        return torch.cat(vectors)


def _class_ids(labels: Sequence[str]) -> NDArray[np.float64]:
    """Return the index of each label among the sorted different labels, as a float."""
    names = sorted(set(labels))
    return np.array([names.index(label) for label in labels], dtype=np.float64)


def _tagged_positions(example: TaggedExample, encoding: Encoding) -> tuple[list[int], list[str]]:
    """Return the position of the first token of each tagged word, and the tags of these words.

    Words that are tagged O, or whose first token is missing because the text was truncated, are left out.

    Args:
        example: Words with tags.
        encoding: Encoding of the words, joined by spaces.
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
    """Return the accuracy of a linear classifier on the last third of the vectors, fitted on the first two thirds.

    The classifier is a ridge regression to one-hot targets. It has a closed form, so a probe gives the same score on
    every machine and takes milliseconds.

    Args:
        features: [vectors, hidden size].
        targets: Class id of each vector.
    """
    train_count = 2 * len(features) // 3
    mean = features[:train_count].mean(0)
    std = features[:train_count].std(0) + 1e-6
    inputs = np.concatenate([(features - mean) / std, np.ones((len(features), 1))], 1)  # with a column for the bias
    train_inputs, test_inputs = inputs[:train_count], inputs[train_count:]
    one_hot = np.eye(int(targets.max()) + 1)[targets[:train_count]]
    gram = train_inputs.T @ train_inputs + RIDGE * train_count * np.eye(inputs.shape[1])
    weights = np.linalg.solve(gram, train_inputs.T @ one_hot)
    predictions = (test_inputs @ weights).argmax(1)
    return float((predictions == targets[train_count:]).mean())


def probe_scores(probe_sets: Sequence[ProbeSet], loaded: ModelBundle) -> dict[str, float]:
    """Return the score of a model on each probe, by name of the metric: probe_NAME."""
    return {f"probe_{probe_set.probe.name}": probe_set.score(loaded) for probe_set in probe_sets}

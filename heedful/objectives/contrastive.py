"""Contrastive learning from labels: texts with equal labels get similar embeddings, other texts dissimilar ones.

It is the first stage of fine-tuning a classifier on few labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.model.heads import ClassesHead
from heedful.objectives.base import (
    Batch,
    Loss,
    Objective,
    Sample,
    full_precision,
    pack_samples,
    upcast,
    weighted_loss,
    weights_of_samples,
)


@dataclass(frozen=True, kw_only=True)
class ContrastiveClasses(Objective):
    """The mean of (cos(a, b) - s(a, b))² over all pairs of a group, as in SetFit (Tunstall et al. 2022, section 3).

    s is the similarity of the labels of two texts. For single labels it is 1 if they are equal, else 0. For texts with
    several labels it is the Jaccard index, the share of common labels. a and b are the inputs of the last layer of the
    sequence classification head. SetFit encodes both texts of each pair. Here each text is encoded once in a step, and
    compared with all other texts of its group.

    Args:
        group_size: Number of texts that are compared with each other.
        classes: Number of labels. The target of a sample is the index of its label, or a list of 0 or 1 for each label.
    """

    group_size: int
    classes: int

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch, whose targets are 0 or 1 for each label, [texts, labels]."""
        targets = np.array([sample.target for sample in samples])
        if targets.ndim == 1:
            targets = np.eye(self.classes)[targets]
        labels = torch.from_numpy(targets.astype(np.float32))
        return Batch(packed=pack_samples(samples), targets=labels, weights=weights_of_samples(samples))

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the sum over texts of the mean squared error of cosines with the other texts of the group."""
        assert isinstance(loaded.head, ClassesHead)
        states = loaded.hidden_states(batch.packed)
        vectors = F.normalize(upcast(loaded.head.vectors(states, batch.packed)), dim=-1)
        groups = zip(vectors.split(self.group_size), batch.targets.split(self.group_size), strict=True)
        with full_precision(vectors):
            losses = [_pair_losses(group_vectors, labels) for group_vectors, labels in groups]
        return weighted_loss(torch.cat(losses), batch)


def _pair_losses(vectors: Tensor, labels: Tensor) -> Tensor:
    """Return, for each text of a group, the mean squared error of its cosines with the other texts, [texts]."""
    other_texts = max(1, len(vectors) - 1)
    errors = (vectors @ vectors.T - label_similarity(labels)).square()
    return (errors.sum(-1) - errors.diagonal()) / other_texts


def label_similarity(labels: Tensor) -> Tensor:
    """Return the Jaccard index |A and B| / |A or B| of the labels of each two texts, [texts, texts].

    Two texts without labels have the similarity 1.

    Args:
        labels: 1 for each label that a text has, else 0, [texts, labels].
    """
    common = labels @ labels.T
    counts = labels.sum(-1)
    union = counts[:, None] + counts - common
    return torch.where(union > 0, common / union.clamp(min=1), 1.0)

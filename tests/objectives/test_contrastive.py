"""Contrastive learning from labels: the loss over all pairs of a group, for any split of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from heedful.model.heads import ClassesHead
from heedful.objectives.contrastive import ContrastiveClasses, label_similarity
from heedful.train.settings import AdamW, TrainSettings
from heedful.train.trainer import Trainer
from tests.support.tiny_runs import LABELS, classify

KEYS = list(range(16))


def test_the_loss_is_the_squared_error_of_the_cosines_of_all_pairs_of_a_group() -> None:
    loaded, _, samples = classify(dropout=0.0)
    objective = ContrastiveClasses(group_size=5, classes=len(LABELS))
    batch = objective.batch(samples[:8], KEYS[:8])
    loss = objective.loss(loaded.eval(), batch)
    assert isinstance(loaded.head, ClassesHead)
    with torch.no_grad():
        vectors = F.normalize(loaded.head.vectors(loaded.hidden_states(batch.packed), batch.packed), dim=-1)
    expected = 0.0
    for group in (range(5), range(5, 8)):  # the last group is smaller
        for a in group:
            errors = [
                (float(vectors[a] @ vectors[b]) - (samples[a].target == samples[b].target)) ** 2
                for b in group
                if a != b
            ]
            expected += sum(errors) / len(errors)
    assert loss.count == 8
    assert loss.sum.item() == pytest.approx(expected, rel=1e-5)


def test_a_group_of_one_text_has_no_loss() -> None:
    loaded, _, samples = classify(dropout=0.0)
    objective = ContrastiveClasses(group_size=4, classes=len(LABELS))
    assert objective.loss(loaded, objective.batch(samples[:1], KEYS[:1])).sum.item() == pytest.approx(0.0, abs=1e-12)


def test_the_similarity_of_several_labels_is_their_jaccard_index() -> None:
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 0]])
    expected = [[1, 1 / 3, 0, 0], [1 / 3, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert torch.allclose(label_similarity(labels), torch.tensor(expected))
    loaded, _, samples = classify(dropout=0.0)
    objective = ContrastiveClasses(group_size=8, classes=len(LABELS))
    multi_label = [replace(sample, target=np.eye(2)[sample.target].tolist()) for sample in samples[:8]]
    losses = [
        objective.loss(loaded, objective.batch(texts, KEYS[:8])).sum.item() for texts in (samples[:8], multi_label)
    ]
    assert losses[0] == losses[1], "a list with one label has another loss than the label"


def test_training_lowers_the_loss_equally_for_any_micro_batches() -> None:
    losses_by_size = []
    for tokens in (64, 4096):
        loaded, _, samples = classify(dropout=0.0)
        settings = TrainSettings(
            max_steps=60, batch_size=8, optimizer=AdamW(lr=5e-3), precision="float32", max_tokens_per_microbatch=tokens
        )
        objective = ContrastiveClasses(group_size=8, classes=len(LABELS))
        losses = [step.loss for step in Trainer(loaded, objective, samples, settings)]
        assert losses[-1] < 0.6 * losses[0]
        losses_by_size.append(losses)
    assert losses_by_size[0] == pytest.approx(losses_by_size[1], rel=1e-3)

"""A linear classifier over sentence vectors: its head, and the fit of its last layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.new_head import with_head
from heedful.model.config import Classes, SentenceEmbedding
from heedful.objectives import Sample
from heedful.objectives.base import pack_samples
from heedful.runs.finetune.few_labels import fit_last_layer, sentence_vectors, with_vector_head
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.task import Task
from tests.support.tiny_runs import LABELS, classify, tokenizer


def vector_model() -> tuple[ModelBundle, Task, list[Sample]]:
    loaded, task, samples = classify(dropout=0.0)
    return with_vector_head(loaded, loaded).eval(), task, samples


def probabilities(model: ModelBundle, samples: list[Sample]) -> torch.Tensor:
    with torch.no_grad():
        scores = model.head_outputs(pack_samples(samples))
    assert isinstance(scores, torch.Tensor)
    return scores.double().softmax(-1)


def test_vectors_are_the_mean_of_the_hidden_states() -> None:
    model, _, samples = vector_model()
    vectors = sentence_vectors(model, samples)
    for sample, vector in zip(samples, vectors, strict=True):
        with torch.no_grad():
            mean = model.hidden_states(pack_samples([sample])).mean(0)
        assert np.allclose(mean.numpy(), vector, atol=1e-6)


def test_pooling_is_that_of_the_sentence_vectors_of_the_model() -> None:
    loaded, _, _ = classify(dropout=0.0)
    embeds = with_head(loaded, "embedding")
    assert isinstance(embeds.config.head, SentenceEmbedding)
    embeds.config = replace(embeds.config, head=replace(embeds.config.head, pooling=("max",)))
    head = with_vector_head(loaded, embeds).config.head
    assert isinstance(head, Classes) and head.pooling == "max" and head.labels == LABELS


def test_the_model_is_saved_and_loaded_to_the_last_bit(tmp_path: Path) -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    save(model, tmp_path / "model")
    assert torch.equal(probabilities(load(tmp_path / "model"), samples), probabilities(model, samples))


def test_probabilities_are_those_of_scikit_learn() -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    vectors = sentence_vectors(model, samples)
    scaled = vectors / np.sqrt(np.mean(vectors**2))
    fitted = LogisticRegression(max_iter=1000).fit(scaled, [sample.target for sample in samples])
    assert np.allclose(fitted.predict_proba(scaled), probabilities(model, samples).numpy(), atol=1e-5)


def test_windows_of_a_long_text_weigh_as_one_example() -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    once = probabilities(model, samples)
    halves = [replace(samples[0], weight=0.5)] * 2 + samples[1:]
    fit_last_layer(model, halves, task)
    assert torch.allclose(probabilities(model, samples), once, atol=1e-4)


def three_labels(targets: list[int]) -> tuple[ModelBundle, list[Sample]]:
    loaded, _, samples = classify(dropout=0.0)
    labels = ("a", "b", "c")
    base = with_head(loaded, "sequence_classification", labels=labels)
    task = Classify(tokenizer=tokenizer(), limit=48, labels=labels)
    model = with_vector_head(base, loaded).eval()
    samples = [replace(sample, target=target) for sample, target in zip(samples, targets, strict=True)]
    fit_last_layer(model, samples, task)
    return model, samples


def test_a_class_without_examples_is_not_predicted() -> None:
    model, samples = three_labels([0, 2] * 8)
    assert float(probabilities(model, samples)[:, 1].max()) < 1e-3
    model, samples = three_labels([1] * 16)
    assert probabilities(model, samples).argmax(-1).eq(1).all()
    model, samples = three_labels([0, 1, 2, 2] * 4)
    assert torch.isfinite(probabilities(model, samples)).all()


@pytest.mark.parametrize("weights", [(), (3.0, 1.0, 1.0)], ids=["equal", "weighted"])
def test_any_number_of_labels_are_fitted_each_by_itself(weights: tuple[float, ...]) -> None:
    loaded, _, samples = classify(dropout=0.0)
    labels = ("long", "always", "never")
    base = with_head(loaded, "sequence_classification", labels=labels, problem_type="multi_label_classification")
    task = ClassifyMultiLabel(tokenizer=tokenizer(), limit=48, labels=labels, weights=weights)
    model = with_vector_head(base, loaded).eval()
    targets = [[float(len(sample) > 10), 1.0, 0.0] for sample in samples]
    samples = [replace(sample, target=target) for sample, target in zip(samples, targets, strict=True)]
    fit_last_layer(model, samples, task)
    with torch.no_grad():
        scores = model.head_outputs(pack_samples(samples))
    assert isinstance(scores, torch.Tensor)
    shares = scores.double().sigmoid().numpy()
    assert (shares[:, 1] > 0.99).all() and (shares[:, 2] < 0.01).all()
    vectors = sentence_vectors(model, samples)
    scaled = vectors / np.sqrt(np.mean(vectors**2))
    gold = np.array(targets)[:, 0]
    fitted = LogisticRegression(max_iter=1000).fit(scaled, gold, np.where(gold > 0, 3.0 if weights else 1.0, 1.0))
    assert np.allclose(fitted.predict_proba(scaled)[:, 1], shares[:, 0], atol=1e-5)

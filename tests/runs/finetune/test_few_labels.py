"""A linear classifier over sentence vectors: its head, and the fit of its last layer."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.new_head import with_head
from heedful.model.config import Classes, SentenceEmbedding
from heedful.objectives import Sample
from heedful.objectives.base import pack_samples
from heedful.runs.finetune import few_labels
from heedful.runs.finetune.few_labels import fit_last_layer, sentence_vectors, with_vector_head
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.task import Task
from tests.support.tiny_runs import LABELS, classify, tokenizer


def vector_model() -> tuple[ModelBundle, Task, list[Sample]]:
    """Return a classifier over sentence vectors, its task, and training samples."""
    loaded, task, samples = classify(dropout=0.0)
    return with_vector_head(loaded, loaded).eval(), task, samples


def scores_of(model: ModelBundle, samples: list[Sample]) -> torch.Tensor:
    """Return the scores of a model before the softmax or the sigmoid, [samples, labels], in float64."""
    with torch.no_grad():
        scores = model.head_outputs(pack_samples(samples))
    assert isinstance(scores, torch.Tensor)
    return scores.double()


def probabilities_of(model: ModelBundle, samples: list[Sample]) -> torch.Tensor:
    return scores_of(model, samples).softmax(-1)


def features_of(model: ModelBundle, samples: list[Sample]) -> np.ndarray:
    """Return sentence vectors with a mean square of 1."""
    vectors = sentence_vectors(model, samples)
    return vectors / np.sqrt(np.mean(vectors**2))


def test_vectors_are_the_mean_of_the_hidden_states() -> None:
    model, _, samples = vector_model()
    vectors = sentence_vectors(model, samples)
    for sample, vector in zip(samples, vectors, strict=True):
        with torch.no_grad():
            mean = model.hidden_states(pack_samples([sample])).mean(0)
        assert np.allclose(mean.numpy(), vector, atol=1e-6)


def test_the_pooling_is_that_of_a_sentence_embedding_model() -> None:
    loaded, _, _ = classify(dropout=0.0)
    embedding_model = with_head(loaded, "embedding")
    assert isinstance(embedding_model.config.head, SentenceEmbedding)
    max_pooling = replace(embedding_model.config.head, pooling=("max",))
    embedding_model.config = replace(embedding_model.config, head=max_pooling)
    head = with_vector_head(loaded, embedding_model).config.head
    assert isinstance(head, Classes)
    assert head.pooling == "max"
    assert head.labels == LABELS


def test_a_loaded_model_has_the_same_probabilities(tmp_path: Path) -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    save(model, tmp_path / "model")
    assert torch.equal(probabilities_of(load(tmp_path / "model"), samples), probabilities_of(model, samples))


def test_probabilities_are_those_of_scikit_learn() -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    features, targets = features_of(model, samples), [sample.target for sample in samples]
    reference = LogisticRegression(max_iter=1000).fit(features, targets)
    assert np.allclose(reference.predict_proba(features), probabilities_of(model, samples).numpy(), atol=1e-5)


def test_only_warnings_about_convergence_are_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, task, samples = vector_model()
    monkeypatch.setattr(few_labels, "MAX_ITERATIONS", 1)  # scikit-learn then warns that the fit did not converge
    with warnings.catch_warnings(record=True) as caught:
        fit_last_layer(model, samples, task)
    assert not caught

    def fit(self: LogisticRegression, *args: Any, original: Any = LogisticRegression.fit) -> Any:
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)
        return original(self, *args)

    monkeypatch.setattr(LogisticRegression, "fit", fit)
    with pytest.warns(RuntimeWarning, match="overflow"):
        fit_last_layer(model, samples, task)


def test_two_windows_of_a_text_have_the_weight_of_one_example() -> None:
    model, task, samples = vector_model()
    fit_last_layer(model, samples, task)
    expected = probabilities_of(model, samples)
    half_weight = replace(samples[0], weight=0.5)
    fit_last_layer(model, [half_weight, half_weight, *samples[1:]], task)
    assert torch.allclose(probabilities_of(model, samples), expected, atol=1e-4)


def probabilities_of_three_classes(targets: list[int]) -> torch.Tensor:
    """Fit a classifier with three classes to samples with these classes, and return its probabilities for them."""
    loaded, _, samples = classify(dropout=0.0)
    labels = ("a", "b", "c")
    base = with_head(loaded, "sequence_classification", labels=labels)
    task = Classify(tokenizer=tokenizer(), limit=48, labels=labels)
    model = with_vector_head(base, loaded).eval()
    samples = [replace(sample, target=target) for sample, target in zip(samples, targets, strict=True)]
    fit_last_layer(model, samples, task)
    return probabilities_of(model, samples)


def test_a_class_without_examples_is_not_predicted() -> None:
    without_second_class = probabilities_of_three_classes([0, 2] * 8)
    assert float(without_second_class[:, 1].max()) < 1e-3
    only_second_class = probabilities_of_three_classes([1] * 16)
    assert only_second_class.argmax(-1).eq(1).all()
    all_classes = probabilities_of_three_classes([0, 1, 2, 2] * 4)
    assert torch.isfinite(all_classes).all()


@pytest.mark.parametrize("class_weights", [(), (3.0, 1.0, 1.0)], ids=["equal", "weighted"])
def test_each_label_of_a_multi_label_task_is_fitted_separately(class_weights: tuple[float, ...]) -> None:
    loaded, _, samples = classify(dropout=0.0)
    labels = ("long", "always", "never")
    base = with_head(loaded, "sequence_classification", labels=labels, problem_type="multi_label_classification")
    task = ClassifyMultiLabel(tokenizer=tokenizer(), limit=48, labels=labels, weights=class_weights)
    model = with_vector_head(base, loaded).eval()
    is_long = np.array([float(len(sample) > 10) for sample in samples])
    targets = [[float(long), 1.0, 0.0] for long in is_long]
    samples = [replace(sample, target=target) for sample, target in zip(samples, targets, strict=True)]
    fit_last_layer(model, samples, task)
    probabilities = scores_of(model, samples).sigmoid().numpy()
    probability_of_long, probability_of_always, probability_of_never = probabilities.T
    assert (probability_of_always > 0.99).all()
    assert (probability_of_never < 0.01).all()
    features = features_of(model, samples)
    weight_of_long = class_weights[0] if class_weights else 1.0
    sample_weights = np.where(is_long > 0, weight_of_long, 1.0)
    reference = LogisticRegression(max_iter=1000).fit(features, is_long, sample_weights)
    assert np.allclose(reference.predict_proba(features)[:, 1], probability_of_long, atol=1e-5)

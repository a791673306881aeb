"""Methods for few labels: logistic regression over sentence vectors, which are frozen or trained by pairs of texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.checkpoint.bundle import assign
from heedful.data.sampler import consecutive_batches
from heedful.model.config import Classes, SentenceEmbedding
from heedful.model.heads import ClassesHead
from heedful.model.initialise import skip_init
from heedful.objectives import Objective, Sample
from heedful.objectives.base import pack_samples
from heedful.objectives.contrastive import ContrastiveClasses
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.tasks.task import Task

INVERSE_REGULARISATION = 1.0  # C of scikit-learn, on features whose mean square is 1
MAX_ITERATIONS = 1000  # iterations of the optimizer of a logistic regression
ABSENT_CLASS_BIAS = -10.0  # bias of a class without training examples
BATCH_TOKENS = 8192  # tokens of the texts that are encoded at once


def with_vector_head(model: ModelBundle, base: ModelBundle) -> ModelBundle:
    """Return a classifier whose last layer reads sentence vectors; its family is Heedful's own, which fits any encoder.

    Args:
        model: A classifier with the labels and the encoder.
        base: The pretrained model. If it makes sentence embeddings by a single pooling, that pooling is used; else the
            mean.
    """
    head, base_head = model.config.head, base.config.head
    assert isinstance(head, Classes)
    pooling = base_head.pooling if isinstance(base_head, SentenceEmbedding) else ()
    head = Classes(
        labels=head.labels,
        problem_type=head.problem_type,
        pooling=pooling[0] if len(pooling) == 1 else "mean",
        dense=False,
    )
    config = BundleConfig(family="heedful", model=model.config.model, head=head)
    with skip_init():
        classifier = ModelBundle(config, model.tokenizer, model.source)
    old_tensors = model.named_tensors()
    tensors: dict[str, Tensor] = {}
    for name, tensor in classifier.named_tensors().items():
        if name in old_tensors and not name.startswith("head."):
            tensors[name] = old_tensors[name].detach().clone()
        else:
            tensors[name] = torch.zeros(tensor.shape)
    assign(classifier, tensors, next(model.parameters()).device)
    classifier.thresholds, classifier.pairs = dict(model.thresholds), model.pairs
    return classifier.train(model.training)


def body_objective(settings: FinetuneSettings, task: Task) -> Objective:
    """Return the objective that trains the weights below the last layer: pairs of texts, or the task itself."""
    if settings.method != "contrastive":
        return task
    return ContrastiveClasses(group_size=settings.train.batch_size, classes=len(task.labels))


def fit_last_layer(model: ModelBundle, samples: Sequence[Sample], task: Task) -> None:
    """Fit the last layer of a classifier to samples by logistic regression with an L2 penalty, in place.

    If an example may have any number of labels, each label is fitted by itself. A class without examples is never
    predicted. A label that all examples have, or none, gets a constant probability.

    Args:
        model: A model with a `ClassesHead` over vectors, in eval mode.
        samples: Windows of the training examples, weighted by 1 / windows.
        task: The classification task; its class weights are used.
    """
    head = model.head
    assert isinstance(head, ClassesHead)
    vectors = sentence_vectors(model, samples)
    targets = np.array([sample.target for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    root_mean_square = float(np.sqrt(np.average(np.square(vectors).mean(1), weights=weights))) or 1.0
    features = vectors / root_mean_square
    if targets.ndim == 1:
        weight, bias = _fit_softmax(features, targets, weights, len(task.labels))
    else:
        positive_weights = getattr(task, "weights", ()) or (1.0,) * len(task.labels)
        # a softmax over two classes for each label: class 1 has the label, class 0 does not
        fits = [
            _fit_softmax(features, column.astype(int), weights * np.where(column > 0, positive, 1.0), 2)
            for column, positive in zip(targets.T, positive_weights, strict=True)
        ]
        weight = np.array([label_weight[1] - label_weight[0] for label_weight, _ in fits])
        bias = np.array([label_bias[1] - label_bias[0] for _, label_bias in fits])
    with torch.no_grad():
        head.out.weight.copy_(torch.from_numpy(weight / root_mean_square))
        head.out.bias.copy_(torch.from_numpy(bias))


def _fit_softmax(
    vectors: NDArray[np.float64], targets: NDArray[np.int64], weights: NDArray[np.float64], classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit the weights, [classes, width], and biases, [classes], of a softmax over classes by logistic regression."""
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((classes, vectors.shape[1])), np.full(classes, ABSENT_CLASS_BIAS)
    seen = np.unique(targets)
    if len(seen) == 1:
        bias[seen] = 0.0
        return weight, bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about too few iterations
        fitted = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS).fit(vectors, targets, weights)
    if len(seen) == 2:  # scikit-learn fits one row, the log odds of the second class
        weight[seen] = np.concatenate([-fitted.coef_, fitted.coef_]) / 2
        bias[seen] = np.array([-1, 1]) * fitted.intercept_ / 2
    else:
        weight[seen], bias[seen] = fitted.coef_, fitted.intercept_
    return weight, bias


@torch.no_grad()
def sentence_vectors(model: ModelBundle, samples: Sequence[Sample]) -> Float[NDArray[np.float64], "samples width"]:
    """Return the vectors that the last layer of a classifier reads, in eval mode and float32."""
    head, device = model.head, next(model.parameters()).device
    assert isinstance(head, ClassesHead) and not model.training
    vectors = []
    for chunk in consecutive_batches(samples, BATCH_TOKENS):
        batch = pack_samples(chunk).to(device)
        vectors.append(head.vectors(model.hidden_states(batch), batch).double().cpu().numpy())
    return np.concatenate(vectors)

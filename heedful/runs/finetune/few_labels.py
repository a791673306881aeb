"""Methods for few labels: a linear classifier over sentence vectors, frozen or trained by pairs of texts before."""

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
MAX_ITERATIONS = 1000
ABSENT = -10.0  # bias of a class without training examples
TOKENS = 8192  # of the texts that are encoded at once


def with_vector_head(model: ModelBundle, base: ModelBundle) -> ModelBundle:
    """Return a classifier whose last layer reads sentence vectors, in Heedful's own format, which any encoder has.

    Args:
        model: A classifier with the labels.
        base: The pretrained model; the pooling of its sentence vectors is kept. By default it is the mean.
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
        new = ModelBundle(config, model.tokenizer, model.source)
    body = model.named_tensors()
    tensors = {
        name: body[name].detach().clone() if name in body and not name.startswith("head.") else _zeros(tensor)
        for name, tensor in new.named_tensors().items()
    }
    assign(new, tensors, next(model.parameters()).device)
    new.thresholds, new.pairs = dict(model.thresholds), model.pairs
    return new.train(model.training)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape)


def body_objective(settings: FinetuneSettings, task: Task) -> Objective:
    """Return the objective by which the weights below the last layer are trained; by default that of the task."""
    if settings.method != "contrastive":
        return task
    return ContrastiveClasses(group_size=settings.train.batch_size, classes=len(task.labels))


def fit_last_layer(model: ModelBundle, samples: Sequence[Sample], task: Task) -> None:
    """Fit the last layer of a classifier to samples by logistic regression with an L2 penalty, in place.

    Any number of labels are fitted each by itself. A class without examples is never predicted; a label that all
    examples have, or none, gets a constant probability.

    Args:
        model: With a `ClassesHead` over vectors, in eval mode.
        samples: Windows of the training examples, weighted by 1 / windows.
        task: Classification; its class weights are those of the loss.
    """
    head = model.head
    assert isinstance(head, ClassesHead)
    vectors = sentence_vectors(model, samples)
    targets = np.array([sample.target for sample in samples])
    weights = np.array([sample.weight for sample in samples])
    size = float(np.sqrt(np.average(np.square(vectors).mean(1), weights=weights))) or 1.0
    if targets.ndim == 1:
        weight, bias = _one_of_several(vectors / size, targets, weights, len(task.labels))
    else:
        positive_weights = getattr(task, "weights", ()) or (1.0,) * len(task.labels)
        rows = [
            _one_of_several(vectors / size, column.astype(int), weights * np.where(column > 0, positive, 1.0), 2)
            for column, positive in zip(targets.T, positive_weights, strict=True)
        ]
        weight = np.array([own[1] - own[0] for own, _ in rows])
        bias = np.array([own[1] - own[0] for _, own in rows])
    with torch.no_grad():
        head.out.weight.copy_(torch.from_numpy(weight / size))
        head.out.bias.copy_(torch.from_numpy(bias))


def _one_of_several(
    vectors: NDArray[np.float64], targets: NDArray[np.int64], weights: NDArray[np.float64], classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit weights, [classes, width], and biases, [classes]; softmax of the scores is the probability of each class."""
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((classes, vectors.shape[1])), np.full(classes, ABSENT)
    seen = np.unique(targets)
    if len(seen) == 1:
        bias[seen] = 0.0
        return weight, bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about too few iterations
        fitted = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS).fit(vectors, targets, weights)
    if len(seen) == 2:  # one row: the log odds of the second class
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
    for chunk in consecutive_batches(samples, TOKENS):
        batch = pack_samples(chunk).to(device)
        vectors.append(head.vectors(model.hidden_states(batch), batch).double().cpu().numpy())
    return np.concatenate(vectors)

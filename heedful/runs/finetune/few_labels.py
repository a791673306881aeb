"""Methods for few labels: logistic regression over sentence vectors, which are frozen or trained contrastively.

These are the methods "linear" and "contrastive" of fine-tuning.
"""

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
from heedful.tasks.classify import ClassifyMultiLabel
from heedful.tasks.task import Task

INVERSE_REGULARISATION = 1.0  # C of scikit-learn, for features with a mean square of 1
MAX_ITERATIONS = 1000  # maximum iterations of the optimizer of a logistic regression
ABSENT_CLASS_BIAS = -10.0  # bias of a class without training examples
BATCH_TOKENS = 8192  # tokens in a batch of a forward pass


def with_vector_head(model: ModelBundle, base: ModelBundle) -> ModelBundle:
    """Return a classifier whose last layer is applied to sentence vectors.

    Its family is "heedful", since other families have another head.

    Args:
        model: A classifier with the labels and the encoder.
        base: The pretrained model. If it is a sentence embedding model with a single pooling, that pooling is used,
            else mean pooling.
    """
    head, base_head = model.config.head, base.config.head
    assert isinstance(head, Classes)
    poolings = base_head.pooling if isinstance(base_head, SentenceEmbedding) else ()
    head = Classes(
        labels=head.labels,
        problem_type=head.problem_type,
        pooling=poolings[0] if len(poolings) == 1 else "mean",
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
            tensors[name] = torch.zeros(tensor.shape)  # the head is zero until `fit_last_layer`
    assign(classifier, tensors, next(model.parameters()).device)
    classifier.thresholds = dict(model.thresholds)
    classifier.pairs = model.pairs
    return classifier.train(model.training)


def body_objective(settings: FinetuneSettings, task: Task) -> Objective:
    """Return the objective that trains the weights below the last layer: contrastive, or the task itself."""
    if settings.method != "contrastive":
        return task
    # each batch is one group
    return ContrastiveClasses(group_size=settings.train.batch_size, classes=len(task.labels))


def fit_last_layer(model: ModelBundle, samples: Sequence[Sample], task: Task) -> None:
    """Fit the last layer of a classifier to samples by logistic regression with an L2 penalty, in place.

    In multi-label classification, each label is fitted separately. A class without examples is never predicted. A label
    that all examples have, or no example has, is predicted always or never.

    Args:
        model: A model with a `ClassesHead` over vectors, in eval mode.
        samples: Windows of the training examples. The weight of a window is that of its example (its class weight, or
            1) / number of windows.
        task: The classification task: its labels and, for multi-label classification, the weights of positives.
    """
    head = model.head
    assert isinstance(head, ClassesHead)
    vectors = sentence_vectors(model, samples)
    targets = np.array([sample.target for sample in samples])  # [samples] class ids, or [samples, labels] of 0 and 1
    sample_weights = np.array([sample.weight for sample in samples])
    root_mean_square = float(np.sqrt(np.average(np.square(vectors).mean(1), weights=sample_weights))) or 1.0
    features = vectors / root_mean_square
    if targets.ndim == 1:
        weight, bias = _fit_softmax(features, targets, sample_weights, len(task.labels))
    else:
        assert isinstance(task, ClassifyMultiLabel)
        positive_weights = task.weights or (1.0,) * len(task.labels)
        weight_rows, bias_values = [], []
        for has_label, positive_weight in zip(targets.T, positive_weights, strict=True):
            label_sample_weights = sample_weights * np.where(has_label > 0, positive_weight, 1.0)
            # a softmax over two classes: 0 for an absent label, 1 for a present one
            binary_weight, binary_bias = _fit_softmax(features, has_label.astype(int), label_sample_weights, 2)
            weight_rows.append(binary_weight[1] - binary_weight[0])
            bias_values.append(binary_bias[1] - binary_bias[0])
        weight, bias = np.array(weight_rows), np.array(bias_values)
    with torch.no_grad():
        head.out.weight.copy_(torch.from_numpy(weight / root_mean_square))
        head.out.bias.copy_(torch.from_numpy(bias))


def _fit_softmax(
    features: NDArray[np.float64], targets: NDArray[np.int64], sample_weights: NDArray[np.float64], classes: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit a softmax classifier. Return its weight, [classes, dimension], and its bias, [classes]."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    weight = np.zeros((classes, features.shape[1]))
    bias = np.full(classes, ABSENT_CLASS_BIAS)
    seen = np.unique(targets)
    if len(seen) == 1:
        bias[seen] = 0.0
        return weight, bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=MAX_ITERATIONS)
        fitted.fit(features, targets, sample_weights)
    if len(seen) == 2:  # scikit-learn then fits a single weight vector, for the log odds of the second class
        weight[seen] = np.concatenate([-fitted.coef_, fitted.coef_]) / 2
        bias[seen] = np.array([-1, 1]) * fitted.intercept_ / 2
    else:
        weight[seen], bias[seen] = fitted.coef_, fitted.intercept_
    return weight, bias


@torch.no_grad()
def sentence_vectors(model: ModelBundle, samples: Sequence[Sample]) -> Float[NDArray[np.float64], "samples dimension"]:
    """Return the vectors to which the last layer of a classifier is applied, as float64.

    The model must be in eval mode. The vectors are computed in its dtype.
    """
    head = model.head
    device = next(model.parameters()).device
    assert isinstance(head, ClassesHead) and not model.training
    vectors = []
    for chunk in consecutive_batches(samples, BATCH_TOKENS):
        batch = pack_samples(chunk).to(device)
        vectors.append(head.vectors(model.hidden_states(batch), batch).double().cpu().numpy())
    return np.concatenate(vectors)

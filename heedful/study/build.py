"""Building blocks that several studies use: small classifiers, their training, and their evaluation by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.model.classic_config import ClassicConfig, PoolingConfigs
from heedful.model.config import (
    Buckets,
    Classes,
    EmbeddingConfig,
    Learned,
    ModelConfig,
    Rotary,
    Shaw,
    Sinusoidal,
    StackConfig,
    Xavier,
)
from heedful.objectives import Sample
from heedful.tasks.answering import Answer
from heedful.tasks.classify import Classify
from heedful.tasks.task import ScoredAnswer, evaluate_task
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import count_words, word_tokenizer
from heedful.train.settings import AdamW, Constant, Linear, TrainSettings
from heedful.train.trainer import Trainer

HEAD_DIM = 16  # dimension of an attention head
CLASSIC = "heedful-classic"  # family of classic models
Positions = Learned | Sinusoidal | Rotary | Shaw | Buckets | None
# function that returns the part of the test set to which an example belongs; the accuracy on each part is a measure
PartOf = Callable[[LabelledExample], str]

# head of a classifier: W h + b, with h the mean of the hidden states
MEAN_POOLED = Classes(labels=("",), pooling="mean", dense=False, activation=None)


def word_level_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with one token for each word of the texts."""
    return word_tokenizer([word for word, _ in count_words(texts).most_common()])


def transformer_classifier(
    tokenizer: Tokenizer,
    labels: Sequence[str],
    seed: int,
    *,
    positions: Positions = None,
    width: int = 64,
    layers: int = 2,
    pre_norm: bool = True,
    head: Classes = MEAN_POOLED,
) -> ModelBundle:
    """Return a small Transformer encoder with random weights and a classification head.

    Args:
        tokenizer: The tokenizer.
        labels: Names of the classes.
        seed: Random seed of the weights.
        positions: Representation of positions. If None, the model does not know the order of words.
        width: Hidden size, a multiple of `HEAD_DIM`.
        layers: Number of layers.
        pre_norm: Whether there is a norm before each sublayer instead of after it.
        head: The configuration of the head, whose labels are replaced by `labels`.
    """
    model = ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=width,
            positions=positions if isinstance(positions, Learned | Sinusoidal) else None,
            scale=width**0.5 if isinstance(positions, Sinusoidal) else 1.0,  # embeddings as large as the sinusoids
            norm="layer",
        ),
        encoder=StackConfig(
            width=width,
            layers=layers,
            heads=width // HEAD_DIM,
            head_width=HEAD_DIM,
            inner_width=4 * width,
            norm_at="pre" if pre_norm else "post",
            final_norm=pre_norm,
            relation=None if isinstance(positions, Learned | Sinusoidal) else positions,
        ),
        initialisation=Xavier(),
    )
    config = BundleConfig(family="heedful", model=model, head=replace(head, labels=tuple(labels)))
    return create(config, tokenizer, seed=seed)


def classic_classifier(
    tokenizer: Tokenizer, labels: Sequence[str], seed: int, reader: PoolingConfigs, *, width: int = 64
) -> ModelBundle:
    """Return a classic model with random weights and a classification head.

    Args:
        tokenizer: The tokenizer.
        labels: Names of the classes.
        seed: Random seed of the weights.
        reader: Pooling of the word vectors, and the layers between them and the pooling.
        width: Dimension of the word vectors.
    """
    model = ClassicConfig(embedding=EmbeddingConfig(vocabulary=tokenizer.size, width=width), reader=reader)
    bare = create(BundleConfig(family=CLASSIC, model=model), tokenizer, seed=seed)
    return with_head(bare, "sequence_classification", labels=tuple(labels), seed=seed)


def classification_task(tokenizer: Tokenizer, labels: Sequence[str], loaded: ModelBundle) -> Classify:
    """Return the task of classifying texts by a model, with which it is trained and evaluated."""
    return Classify(tokenizer=tokenizer, limit=loaded.max_length, labels=tuple(labels))


def train_classifier(
    loaded: ModelBundle,
    task: Classify,
    samples: Sequence[Sample],
    *,
    steps: int,
    seed: int,
    lr: float = 2e-3,
    batch_size: int = 32,
    schedule: Linear | Constant | None = None,
) -> list[float]:
    """Train a model with AdamW, and return the loss of each step.

    Args:
        loaded: The model.
        task: The task.
        samples: Training samples.
        steps: Number of optimizer steps.
        seed: Random seed of the order of samples.
        lr: Peak learning rate.
        batch_size: Samples in each step.
        schedule: Schedule of the learning rate. If None, linear decay after a warmup of 10 % of the steps.
    """
    settings = TrainSettings(
        max_steps=steps,
        batch_size=batch_size,
        optimizer=AdamW(lr=lr),
        schedule=schedule or Linear(warmup_ratio=0.1),
        precision="float32",
        seed=seed,
    )
    return [step.loss for step in Trainer(loaded, task, samples, settings)]


def accuracy_by_part(
    loaded: ModelBundle, task: Classify, examples: Sequence[LabelledExample], part_of: PartOf = lambda example: ""
) -> dict[str, float]:
    """Return the accuracy on each part of the examples by name of the part, and on all of them under "all"."""
    correct: dict[str, list[bool]] = {}  # whether the prediction for each example is correct, by part

    def record(index: int, example: LabelledExample, answer: Answer, scored: ScoredAnswer) -> None:
        for part in {part_of(example), "all"}:
            correct.setdefault(part, []).append(bool(scored.correct))

    evaluate_task(task, Engine(loaded), examples, on_answer=record)
    return {part: sum(values) / len(values) for part, values in correct.items()}


def labelled_examples(rows: Iterable[tuple[str, str]]) -> list[LabelledExample]:
    """Convert (text, label) pairs to examples."""
    return [LabelledExample(text=text, label=label) for text, label in rows]


def head_outputs(loaded: ModelBundle, texts: Sequence[str]) -> list[Tensor]:
    """Return the outputs of the head for each text, such as the logits of the classes."""
    engine = Engine(loaded)
    chunks = [chunk for encoded in engine.tokenize(list(texts)) for chunk in encoded.chunks]
    with torch.inference_mode():
        return [scores for scores in engine.score(chunks) if isinstance(scores, Tensor)]

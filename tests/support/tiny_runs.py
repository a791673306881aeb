"""A tiny model that trains in milliseconds, tasks for it, and faults that tests put into its training."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.data import LabelledExample, TaggedExample
from heedful.errors import HeedfulError
from heedful.model.config import (
    Classes,
    EmbeddingConfig,
    Head,
    Learned,
    MaskedTokens,
    ModelConfig,
    StackConfig,
    TokenClasses,
)
from heedful.objectives import Batch, Loss, Objective, Sample
from heedful.objectives.masked_lm import MaskedLM
from heedful.settings import from_mapping
from heedful.tasks.classify import Classify
from heedful.tasks.tag import Tag
from heedful.tasks.task import Task
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.train.fit import EvalResult, FitSettings
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.trainer import Step, Trainer, TrainSettings

LINES = """
the cat sat on the mat and slept . good
a bad day . bad
nothing went well for the old dog today , not even its walk . bad
what a lovely evening by the sea ! good
rain . bad
the soup was warm and the bread was fresh . good
she lost her keys and then the train left without her . bad
we sang . good
the film is long , loud and empty . bad
a quiet book with a big heart , read it twice . good
he fell . bad
the garden is full of light in the early morning . good
cold coffee again . bad
they came home early and danced until the lamp went out . good
my phone broke . bad
the bus was on time for once , and the driver smiled . good
""".strip().splitlines()
LABELS = ("bad", "good")
TAGS = ("O", "B-X", "I-X")


@cache
def tokenizer() -> Tokenizer:
    """Train a tokenizer on the lines."""
    return train_tokenizer(
        [line.rpartition(" ")[0] for line in LINES], TokenizerSettings(vocab_size=150, max_length=48)
    )


def create_encoder(head: Head, dropout: float, width: int = 16, norm: Literal["layer", "rms"] = "layer") -> ModelBundle:
    """Return a new encoder with two layers of two heads, and the head of a task."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size,
        width=width,
        positions=Learned(count=48),
        types=2,
        padding=tokenizer().special.pad,
        norm="layer",
        dropout=dropout,
    )
    encoder = StackConfig(
        width=width, layers=2, heads=2, head_width=width // 2, inner_width=2 * width, dropout=dropout,
        attention_dropout=dropout, norm=norm,
    )  # fmt: skip
    model = ModelConfig(embedding=embedding, encoder=encoder)
    return create(BundleConfig(family="heedful", model=model, head=head), tokenizer(), seed=1)


def classify(
    dropout: float = 0.1, weights: tuple[float, ...] = (), width: int = 16
) -> tuple[ModelBundle, Task, list[Sample]]:
    """Return a model, its task, and 16 samples of 4 to 19 tokens."""
    loaded = create_encoder(Classes(labels=LABELS, dropout=dropout), dropout, width)
    task = Classify(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS, weights=weights)
    parts = [line.rpartition(" ") for line in LINES]
    return (
        loaded,
        task,
        task.encode_split([LabelledExample(text=text, label=label) for text, _, label in parts]).samples,
    )


def tag(dropout: float = 0.1) -> tuple[ModelBundle, Task, list[Sample]]:
    """Return a model, a tagging task with a target for each word, and samples with very different target counts."""
    loaded = create_encoder(TokenClasses(labels=TAGS, dropout=dropout), dropout)
    task = Tag(tokenizer=tokenizer(), limit=loaded.max_length, labels=TAGS)
    words = [tuple(line.split()) for line in LINES]
    tags = [tuple(TAGS[len(word) % 3] for word in sentence) for sentence in words]
    return (
        loaded,
        task,
        task.encode_split([TaggedExample(words=w, tags=t) for w, t in zip(words, tags, strict=True)]).samples,
    )


class PartialHeadClassify(Classify):
    """A classifier whose loss uses the head only for good texts: on some ranks and steps, the head has no gradient."""

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        assert loaded.head is not None
        rows = loaded.model(batch.packed)
        bare = rows[batch.packed.first_rows()][:, :4].sum(1) ** 2
        good = batch.targets == 1
        if not good.any():
            return Loss(bare.sum(), float(len(bare)))
        losses = self.losses(loaded.head(rows, batch.packed), batch.targets)
        return Loss(torch.where(good, losses, bare).sum(), float(len(losses)))


def partial_head(dropout: float = 0.1) -> tuple[ModelBundle, Task, list[Sample]]:
    """Return a model, a task whose loss does not always use the head, and samples."""
    loaded, _, samples = classify(dropout)
    return loaded, PartialHeadClassify(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS), samples


def packed_mlm(dropout: float = 0.1, norm: Literal["layer", "rms"] = "layer") -> tuple[ModelBundle, Any, list[Sample]]:
    """Return a model with tied embeddings, masked language modelling, and samples of one to four packed sequences."""
    loaded = create_encoder(MaskedTokens(), dropout, norm=norm)
    encoded = [tokenizer().encode(line.rpartition(" ")[0]) for line in LINES]
    groups = [encoded[start : start + count] for start, count in zip(range(16), [4, 1, 3, 2] * 4, strict=True)]
    samples = [
        Sample.of([encoding.ids for encoding in group], [encoding.types for encoding in group]) for group in groups
    ]
    return loaded, MaskedLM(tokenizer=tokenizer()), samples


TASKS: dict[str, Callable[[float], tuple[ModelBundle, Any, list[Sample]]]] = {
    "classify": classify,
    "tag": tag,
    "partial head": partial_head,
    "packed": packed_mlm,
    "packed, rms": partial(packed_mlm, norm="rms"),
}


TRAIN: dict[str, Any] = {
    "max_steps": 12,
    "batch_size": 5,  # with 16 samples: three epochs of four steps; the last step of an epoch takes one sample
    "max_tokens_per_microbatch": 30,
    "optimizer": {"kind": "adamw", "lr": 2e-3},
    "precision": "float32",
}
# AdamW with a large eps, so that gradients that are 0 except for rounding (those of key biases) change nothing
LARGE_EPS = {"kind": "adamw", "lr": 2e-2, "eps": 1e-2}
FIT: dict[str, Any] = {"eval_every_epochs": 0.5, "checkpoint_every_minutes": 0.0}


def make_settings(train: dict[str, Any], fit: dict[str, Any]) -> tuple[TrainSettings, FitSettings]:
    """Return settings of training and of fit: TRAIN and FIT, with these values instead of theirs."""
    return from_mapping(TrainSettings, TRAIN | train, source="train"), from_mapping(
        FitSettings, FIT | fit, source="fit"
    )


def make_trainer(task: str = "classify", dropout: float = 0.1, ranks: Ranks = SINGLE_PROCESS, **train: Any) -> Trainer:
    """Return a trainer of a task in TASKS, with these settings instead of those of TRAIN."""
    loaded, objective, samples = TASKS[task](dropout)
    return Trainer(loaded, objective, samples, make_settings(train, {})[0], ranks)


def evaluate_with_peak(trainer: Trainer) -> EvalResult:
    """Return an evaluation that is best near step 7; its metric depends on the weights too."""
    score = -abs(trainer.step - 7) + trainer.loaded.named_tensors()["embedding.norm.bias"].sum().item()
    return EvalResult(metric_value=score, metrics={"score": score})


class RecordingObjective(Objective):
    """An objective that records the samples of each batch and each loss, and calls `before` before each loss."""

    def __init__(self, trainer: Trainer, before: Callable[[Batch], None] = lambda batch: None, group_size: int = 1):
        self.objective, self.before, self.group_size = trainer.objective, before, group_size
        self.sample_numbers = {id(sample): number for number, sample in enumerate(trainer.samples)}
        self.batches: list[list[int]] = []
        self.keys: list[int] = []
        self.losses: list[float] = []
        trainer.objective = self

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        self.batches.append([self.sample_numbers[id(sample)] for sample in samples])
        self.keys += keys
        return self.objective.batch(samples, keys)

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        self.before(batch)
        loss = self.objective.loss(loaded, batch)
        self.losses.append(loss.sum.item())
        return loss


def copy_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the current weights."""
    return {name: tensor.detach().clone() for name, tensor in trainer.loaded.named_tensors().items()}


def copy_state(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a copy of the state, with values that went through JSON."""
    tensors, values = trainer.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values))


def records(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the journal records of steps, which are equal in equal runs."""
    return [step.record for step in steps]


def tensors_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Return whether two states have the same names, and tensors that are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def relative_error(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two numbers, relative to the largest number in the second tensor."""
    assert first.keys() == second.keys()
    with torch.no_grad():
        return max(float((first[name] - second[name]).abs().max() / second[name].abs().max()) for name in first)


# -- faults ----------------------------------------------------------------------------------------------------


def nan_loss(loss: Loss, loaded: ModelBundle) -> Loss:
    """Make the loss and all gradients NaN."""
    return Loss(loss.sum * math.nan, loss.count)


def nan_loss_only(loss: Loss, loaded: ModelBundle) -> Loss:
    """Make the loss NaN, and leave the gradients as they are."""
    return Loss(loss.sum + math.nan, loss.count)


def infinite_loss(loss: Loss, loaded: ModelBundle) -> Loss:
    """Make the loss infinite."""
    return Loss(loss.sum / 0, loss.count)


def nan_gradient(loss: Loss, loaded: ModelBundle) -> Loss:
    """Make one number of one gradient NaN, and leave the loss as it is."""
    weight = next(tensor for name, tensor in loaded.named_tensors().items() if name.endswith("mlp.up.weight"))
    gradient = torch.zeros_like(weight)
    gradient[3, 5] = math.nan
    return Loss(loss.sum + _ZeroWithGradient.apply(weight, gradient), loss.count)


class _ZeroWithGradient(torch.autograd.Function):
    """Return 0, with `gradient` as the gradient of `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0], None


def send_signal(name: str) -> Any:
    """Return a fault that sends a signal to this process in the middle of a micro-batch."""

    def fault(loss: Loss, loaded: ModelBundle) -> Loss:
        os.kill(os.getpid(), getattr(signal, name))
        return loss

    return fault


def raise_error(loss: Loss, loaded: ModelBundle) -> Loss:
    """Raise an error."""
    raise HeedfulError("this rank is broken on purpose")


def run_out_of_memory(loss: Loss, loaded: ModelBundle) -> Loss:
    """Raise the error of PyTorch for a CPU without free memory."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


FAULTS = {
    "out of memory": run_out_of_memory,
    "nan loss": nan_loss,
    "nan loss only": nan_loss_only,
    "infinite loss": infinite_loss,
    "nan gradient": nan_gradient,
    "error": raise_error,
    **{name: send_signal(name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL", "SIGSTOP")},
}


class FaultyObjective(Objective):
    """An objective with a fault in the first micro-batch of `num_steps` steps, from step `step` on."""

    def __init__(self, objective: Objective, trainer: Trainer, fault: Any, step: int, num_steps: int = 1) -> None:
        self.objective, self.trainer, self.fault = objective, trainer, fault
        self.faulty_steps = set(range(step, step + num_steps))
        self.group_size = objective.group_size

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        return self.objective.batch(samples, keys)

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        loss = self.objective.loss(loaded, batch)
        if self.trainer.step + 1 in self.faulty_steps:
            self.faulty_steps.remove(self.trainer.step + 1)
            return self.fault(loss, loaded)
        return loss

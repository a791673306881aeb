"""A tiny model that learns in milliseconds, tasks for it, and what can go wrong with them."""

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


def created(head: Head, dropout: float, width: int = 16, norm: Literal["layer", "rms"] = "layer") -> ModelBundle:
    """A fresh model of two layers with two heads."""
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
    """A model, its task, and 16 samples of 4 to 19 tokens."""
    loaded = created(Classes(labels=LABELS, dropout=dropout), dropout, width)
    task = Classify(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS, weights=weights)
    parts = [line.rpartition(" ") for line in LINES]
    return (
        loaded,
        task,
        task.encode_split([LabelledExample(text=text, label=label) for text, _, label in parts]).samples,
    )


def tag(dropout: float = 0.1) -> tuple[ModelBundle, Task, list[Sample]]:
    """Make a tagging task, with a target for each word: very unequal counts."""
    loaded = created(TokenClasses(labels=TAGS, dropout=dropout), dropout)
    task = Tag(tokenizer=tokenizer(), limit=loaded.max_length, labels=TAGS)
    words = [tuple(line.split()) for line in LINES]
    tags = [tuple(TAGS[len(word) % 3] for word in sentence) for sentence in words]
    return (
        loaded,
        task,
        task.encode_split([TaggedExample(words=w, tags=t) for w, t in zip(words, tags, strict=True)]).samples,
    )


class Half(Classify):
    """Bad texts do not use the head, so that it has a gradient on some ranks and in some steps only."""

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        assert loaded.head is not None
        rows = loaded.model(batch.packed)
        bare = rows[batch.packed.first_rows()][:, :4].sum(1) ** 2
        good = batch.targets == 1
        if not good.any():
            return Loss(bare.sum(), float(len(bare)))
        losses = self.losses(loaded.head(rows, batch.packed), batch.targets)
        return Loss(torch.where(good, losses, bare).sum(), float(len(losses)))


def half(dropout: float = 0.1) -> tuple[ModelBundle, Task, list[Sample]]:
    """With a head that is not always used."""
    loaded, _, samples = classify(dropout)
    return loaded, Half(tokenizer=tokenizer(), limit=loaded.max_length, labels=LABELS), samples


def packed(dropout: float = 0.1, norm: Literal["layer", "rms"] = "layer") -> tuple[ModelBundle, Any, list[Sample]]:
    """Hidden tokens, scored by the embedding's own table, in ragged rows of one to four whole sequences."""
    loaded = created(MaskedTokens(), dropout, norm=norm)
    encoded = [tokenizer().encode(line.rpartition(" ")[0]) for line in LINES]
    groups = [encoded[start : start + count] for start, count in zip(range(16), [4, 1, 3, 2] * 4, strict=True)]
    samples = [
        Sample.of([encoding.ids for encoding in group], [encoding.types for encoding in group]) for group in groups
    ]
    return loaded, MaskedLM(tokenizer=tokenizer()), samples


MADE: dict[str, Callable[[float], tuple[ModelBundle, Any, list[Sample]]]] = {
    "classify": classify,
    "tag": tag,
    "half": half,
    "packed": packed,
    "packed, rms": partial(packed, norm="rms"),
}


TRAIN: dict[str, Any] = {
    "max_steps": 12,
    "batch_size": 5,  # of 16: the fourth step of an epoch takes one sample, and there are three epochs
    "max_tokens_per_microbatch": 30,
    "optimizer": {"kind": "adamw", "lr": 2e-3},
    "precision": "float32",
}
# gradients that are 0 but for rounding, as those of key biases are, must not become whole steps
CALM = {"kind": "adamw", "lr": 2e-2, "eps": 1e-2}
FIT: dict[str, Any] = {"eval_every_epochs": 0.5, "checkpoint_every_minutes": 0.0}


def settings(train: dict[str, Any], fit: dict[str, Any]) -> tuple[TrainSettings, FitSettings]:
    """These, over TRAIN and FIT."""
    return from_mapping(TrainSettings, TRAIN | train, source="train"), from_mapping(
        FitSettings, FIT | fit, source="fit"
    )


def trainer(task: str = "classify", dropout: float = 0.1, ranks: Ranks = SINGLE_PROCESS, **train: Any) -> Trainer:
    """With these settings over TRAIN."""
    loaded, objective, samples = MADE[task](dropout)
    return Trainer(loaded, objective, samples, settings(train, {})[0], ranks)


def wave(trainer: Trainer) -> EvalResult:
    """The best is at step 7, or beside it; it depends on the weights too."""
    score = -abs(trainer.step - 7) + trainer.loaded.named_tensors()["embedding.norm.bias"].sum().item()
    return EvalResult(metric_value=score, metrics={"score": score})


class Spy(Objective):
    """An objective that notes which samples it is given, and may do something before each loss."""

    def __init__(self, trainer: Trainer, before: Callable[[Batch], None] = lambda batch: None, group_size: int = 1):
        self.task, self.before, self.group_size = trainer.objective, before, group_size
        self.numbers = {id(sample): number for number, sample in enumerate(trainer.samples)}
        self.seen: list[list[int]] = []
        self.keys: list[int] = []
        self.losses: list[float] = []
        trainer.objective = self

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        self.seen.append([self.numbers[id(sample)] for sample in samples])
        self.keys += keys
        return self.task.batch(samples, keys)

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        self.before(batch)
        loss = self.task.loss(loaded, batch)
        self.losses.append(loss.sum.item())
        return loss


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copy the current weights."""
    return {name: tensor.detach().clone() for name, tensor in trainer.loaded.named_tensors().items()}


def everything(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A copy of the state, the values by way of JSON."""
    tensors, values = trainer.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values))


def records(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the fields of the steps that are equal in every run."""
    return [step.record for step in steps]


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest difference of two numbers, as a share of the largest number in their tensor."""
    assert first.keys() == second.keys()
    with torch.no_grad():
        return max(float((first[name] - second[name]).abs().max() / second[name].abs().max()) for name in first)


# -- what can go wrong ------------------------------------------------------------------------------------------


def nan_loss(loss: Loss, loaded: ModelBundle) -> Loss:
    """The loss itself, and with it all gradients."""
    return Loss(loss.sum * math.nan, loss.count)


def nan_loss_alone(loss: Loss, loaded: ModelBundle) -> Loss:
    """The loss itself; the gradients are right."""
    return Loss(loss.sum + math.nan, loss.count)


def infinite_loss(loss: Loss, loaded: ModelBundle) -> Loss:
    """The loss itself."""
    return Loss(loss.sum / 0, loss.count)


def nan_gradient(loss: Loss, loaded: ModelBundle) -> Loss:
    """One number of one gradient; the loss is right."""
    weight = next(tensor for name, tensor in loaded.named_tensors().items() if name.endswith("mlp.up.weight"))
    hurt = torch.zeros_like(weight)
    hurt[3, 5] = math.nan
    return Loss(loss.sum + _Hurt.apply(weight, hurt), loss.count)


class _Hurt(torch.autograd.Function):
    """0, with the gradient that is given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradients[0], None


def sent(name: str) -> Any:
    """The process gets a signal in the middle of a micro-batch."""

    def fault(loss: Loss, loaded: ModelBundle) -> Loss:
        os.kill(os.getpid(), getattr(signal, name))
        return loss

    return fault


def broken(loss: Loss, loaded: ModelBundle) -> Loss:
    """Any error."""
    raise HeedfulError("this rank is broken on purpose")


def full(loss: Loss, loaded: ModelBundle) -> Loss:
    """Not enough memory."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


FAULTS = {
    "full": full,
    "nan loss": nan_loss,
    "nan loss alone": nan_loss_alone,
    "infinite loss": infinite_loss,
    "nan gradient": nan_gradient,
    "broken": broken,
    **{name: sent(name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGKILL", "SIGSTOP")},
}


class Faulty(Objective):
    """An objective with a fault in the first micro-batch of one step, or of several from there."""

    def __init__(self, task: Objective, trainer: Trainer, fault: Any, at: int, steps: int = 1) -> None:
        self.task, self.trainer, self.fault = task, trainer, fault
        self.left = {at + number for number in range(steps)}
        self.group_size = task.group_size

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        return self.task.batch(samples, keys)

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        loss = self.task.loss(loaded, batch)
        if self.trainer.step + 1 in self.left:
            self.left.remove(self.trainer.step + 1)
            return self.fault(loss, loaded)
        return loss

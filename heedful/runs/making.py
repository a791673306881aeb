"""From settings and data to what is trained: a model to start from, and a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import hypot
from typing import Any, TypeVar

import torch

from heedful.checkpoint import Config, Loaded, create, load
from heedful.checkpoint.attach import attach
from heedful.data import (
    Labelled,
    MultiLabelled,
    Rewritten,
    Scored,
    Source,
)
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.objectives.masked import Masked
from heedful.runs.classic_making import classic_start
from heedful.runs.init_settings import HEAD_WIDTH, Classic, Init, Pretrained, Scratch, Seq2Seq, named_model
from heedful.runs.rewrite_making import writer_start
from heedful.runs.settings import (
    ClassifySettings,
    EmbedSettings,
    FinetuneSettings,
    MultipleChoiceSettings,
    MultipleSettings,
    QASettings,
    RegressSettings,
    Seq2SeqSettings,
    TagSettings,
)
from heedful.runs.survey import Survey
from heedful.shipped import ENCODER
from heedful.tasks.choose import Choose
from heedful.tasks.classify import THRESHOLD, Classify, ClassifyMany
from heedful.tasks.embed import Embed
from heedful.tasks.extract import ANSWER_LIMIT, NO_ANSWER, Extract, no_answer_row
from heedful.tasks.regress import Regress
from heedful.tasks.rewrite import TEXT_SUFFIX, Rewrite, marks
from heedful.tasks.tag import Tag
from heedful.tasks.task import Read, Task
from heedful.tokenizer import Tokenizer, TokenizerSettings, train
from heedful.train.loop import Trainer
from heedful.train.settings import AdamW, TrainSettings

Item = TypeVar("Item")

LONGEST = 256  # tokens that an encoder reads that is trained on the spot
MOST = 50_000  # examples whose texts it is trained on, and vocabularies are made of
TUNED = "tuned"  # the value of settings of thresholds that are chosen on dev
NUMBER = "score"  # what a regression's one output is called, unless a teacher calls it otherwise


def on_split(task: Task, loaded: Loaded, found: Survey, split: str) -> tuple[Task, Loaded]:
    """Both as they are measured on a split: where some of its questions have no answer, none may be the answer."""
    if not isinstance(task, Extract) or split not in found.unanswered or task.impossible:
        return task, loaded
    loaded = copy(loaded)  # the one that was given stays as it is
    loaded.thresholds = {NO_ANSWER: 0.0, **loaded.thresholds}
    return replace(task, impossible=True), loaded


def start(
    init: Init,
    source: Source[Any],
    counts: Mapping[str, int],
    seed: int,
    longest: int | None,
    log: Callable[[str], None],
) -> Loaded:
    """Load or make the model that training starts from.

    `counts` says how many examples each split has, of which those of train are read, or MOST of them.
    """
    if isinstance(init, Seq2Seq):
        return writer_start(init, list(_texts(source, counts)), seed, longest, log)
    if source.kind is Rewritten and (isinstance(init, Scratch) or named_model(init) == ENCODER):
        raise HeedfulError(
            "no model was given, and seq2seq needs one with a decoder: give --model the folder of one, or "
            "let one learn from random weights: --init.kind=transformer, or init.kind=recurrent"
        )
    if isinstance(init, Classic):
        return classic_start(init, list(_texts(source, counts)), seed, log, every=_texts(source, counts, None))
    if isinstance(init, Pretrained):
        return load(init.model, revision=init.revision or None)
    longest = longest or LONGEST
    texts = list(_texts(source, counts))
    tokenizer = train(texts, TokenizerSettings(vocab_size=init.tokenizer.vocab_size, max_length=longest))
    bare = create(Config(family="heedful", model=_model(init, tokenizer, longest)), tokenizer, seed=seed)
    log(
        f"no model was given: an encoder of {bare.count():,} parameters is trained on the spot, on these texts alone; "
        "give --model to start from one that has read more"
    )
    if not init.mlm_steps:
        return bare
    loaded = attach(bare, "masked_lm", seed=seed)
    objective = Masked(tokenizer=tokenizer)
    how = TrainSettings(max_steps=init.mlm_steps, batch_size=64, optimizer=AdamW(lr=1e-3), seed=seed)
    began = time.monotonic()
    steps = list(Trainer(loaded, objective, objective.samples(texts, longest), how))
    log(
        f"it read {sum(step.tokens for step in steps):,} tokens in {time.monotonic() - began:.0f} s; "
        f"the loss of hidden tokens went from {steps[0].loss:.2f} to {steps[-1].loss:.2f}"
    )
    return loaded


def _model(settings: Scratch, tokenizer: Tokenizer, longest: int) -> ModelConfig:
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=settings.width,
            positions=Learned(count=longest),
            types=2,
            padding=tokenizer.special.pad,
            norm="layer",
            dropout=0.1,
        ),
        encoder=StackConfig(
            width=settings.width,
            layers=settings.layers,
            heads=settings.width // HEAD_WIDTH,
            head_width=HEAD_WIDTH,
            inner_width=4 * settings.width,
            dropout=0.1,
        ),
    )


def _texts(source: Source[Any], counts: Mapping[str, int], most: int | None = MOST) -> Iterator[str]:
    """Those of train, or of so many of its examples, as far apart as they can be: files may be sorted."""
    for example in some(source.examples("train"), counts["train"], most):
        yield from example.texts


def some(items: Iterable[Item], count: int, most: int | None = MOST) -> Iterator[Item]:
    """All of so many, or as many as there may be.

    >>> list(some("abcdefgh", 8, 3))
    ['c', 'f', 'h']
    """
    for number, item in enumerate(items):
        if most is None or count <= most or (number + 1) * most // count > number * most // count:
            yield item


def make_task(
    settings: FinetuneSettings,
    source: Source[Any],
    found: Survey,
    loaded: Loaded,
    labels: tuple[str, ...] | None = None,
) -> tuple[Task, Loaded]:
    """The task, and the model with its head; it answers the labels of the data, or those."""
    labels = source.labels if labels is None else labels
    match settings.task:
        case ClassifySettings(class_weight=class_weight):
            task, made = _made(Classify, settings, loaded, labels=labels, weights=_weights(class_weight, labels, found))
        case MultipleSettings(class_weight=class_weight, thresholds=threshold):
            positive = _positive_weights(class_weight, labels, found)
            task, made = _made(ClassifyMany, settings, loaded, labels=labels, weights=positive)
            if threshold not in (THRESHOLD, TUNED):
                made.thresholds = dict.fromkeys(labels, float(threshold))
        case RegressSettings():
            task, made = _regress(settings, found, loaded, labels or (NUMBER,))
        case TagSettings():
            task, made = _made(Tag, settings, loaded, labels=labels)
        case QASettings(max_answer_tokens=max_answer_tokens, no_answer_threshold=threshold):
            task, made = _made(
                Extract, settings, loaded, impossible=found.impossible, max_answer_tokens=max_answer_tokens
            )
            assert isinstance(task, Extract)
            task = replace(task, null_row=no_answer_row(made.config.head))
            made.thresholds = (
                {ANSWER_LIMIT: float(max_answer_tokens)} if max_answer_tokens != Extract.max_answer_tokens else {}
            )
            if found.impossible:
                made.thresholds[NO_ANSWER] = 0.0 if threshold == TUNED else float(threshold)
        case MultipleChoiceSettings():
            task, made = _made(Choose, settings, loaded)
        case EmbedSettings(group_size=group_size, scale=scale):
            settings = replace(settings, long_inputs="truncate")  # a text has one vector
            how = embedding(found, group_size)
            task, made = _made(Embed, settings, loaded, **how, scale=scale)
            made.label_scaling = {name: how[name] for name in ("low", "high") if name in how}
        case Seq2SeqSettings() as chosen:
            mark = marks(loaded.config.model, tokenizer_of(loaded))
            suffix = "" if mark.start is not None else TEXT_SUFFIX
            names = ("max_new_tokens", "num_beams", "label_smoothing", "metric", "bleu")
            how = {name: getattr(chosen, name) for name in names}
            task, made = _made(Rewrite, settings, loaded, mark=mark, text_suffix=suffix, **how)
            assert isinstance(task, Rewrite)
            task, made.text_suffix = replace(task, limit_written=made.limit_written), suffix
    if source.kind in (Labelled, MultiLabelled, Scored):
        first = next(iter(source.examples("train")), None)
        made.pairs = None if first is None else len(first.texts) > 1
    return task, made


def embedding(found: Survey, group_size: int = 2) -> dict[str, Any]:
    """How pairs are compared: with scores between 0, or the lowest, and the highest; else with each other."""
    if found.low is None or found.high is None:
        return {"scored": False, "together": group_size}
    low = min(0.0, found.low)
    return {"scored": True, "low": low, "high": found.high if found.high > low else 1.0}


def _regress(settings: FinetuneSettings, found: Survey, loaded: Loaded, labels: tuple[str, ...]) -> tuple[Task, Loaded]:
    """Numbers are learned by their distance from the mean, in deviations; without a bias, from 0."""
    task, made = _made(Regress, settings, loaded, labels=labels)
    known, now = loaded.named(), made.named()
    mean, deviation = found.mean, found.deviation
    if "head.out.bias" not in now:
        mean, deviation = 0.0, hypot(mean, deviation)
    assert isinstance(task, Regress)
    task = replace(task, mean=mean, deviation=deviation)
    if "head.out.weight" in known and torch.equal(known["head.out.weight"], now["head.out.weight"]):
        made = task.learning(made)  # it gave scores before
    made.label_scaling = {"mean": mean, "std": deviation}
    return task, made


def _made(kind: type[Task], settings: FinetuneSettings, loaded: Loaded, **more: Any) -> tuple[Task, Loaded]:
    """A task of that kind, and the model with the head for it, which reads max_length tokens from now on."""
    tokenizer = tokenizer_of(loaded)
    made = attach(
        loaded,
        kind.head,
        labels=more.get("labels", ()),
        problem_type=kind.problem_type,
        seed=settings.train.seed,
        reinit_layers=settings.init.reinit_layers if isinstance(settings.init, Pretrained) else 0,
    )
    if settings.max_length is not None:
        if made.limit is not None and settings.max_length > made.limit:
            raise HeedfulError(f"max_length is {settings.max_length}, but {loaded.source} reads {made.limit} tokens")
        tokenizer = made.tokenizer = tokenizer.limited(settings.max_length)
    return kind(tokenizer=tokenizer, limit=made.limit, long_inputs=settings.long_inputs, **more), made


def notes(learned: Read) -> list[str]:
    """What reading the training examples cost, in sentences."""
    found = [f"{learned.examples:,} training examples are {_samples(learned)} of {learned.tokens:,} tokens"]
    if learned.windowed:
        found.append(f"{learned.windowed:,} training examples are longer than the model reads and are seen in windows")
    if learned.cut:
        found.append(
            f"{learned.cut:,} training examples are longer than the model reads and were cut: {learned.cut_tokens:,} "
            "tokens are lost"
        )
    if learned.left_out:
        found.append(
            f"{learned.left_out:,} training examples were left out: no tokens match what should be learned of them"
        )
    found += [f"{count:,} training examples {remark}" for remark, count in learned.remarks.items()]
    return found


def _samples(learned: Read) -> str:
    return f"{len(learned.samples):,} sample" + ("s" if len(learned.samples) != 1 else "")


def tokenizer_of(loaded: Loaded) -> Tokenizer:
    """The tokenizer, without which no text can be read."""
    if loaded.tokenizer is None:
        raise HeedfulError(
            f"{loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
        )
    return loaded.tokenizer


def _weights(class_weight: str | None, labels: Sequence[str], found: Survey) -> tuple[float, ...]:
    """Of classes: examples / (classes * examples of the class); () where all weigh the same."""
    if class_weight is None:
        return ()
    count = found.labels.total()
    return tuple(count / (len(labels) * max(1, found.labels[label])) for label in labels)


def _positive_weights(class_weight: str | None, labels: Sequence[str], found: Survey) -> tuple[float, ...]:
    """Of each label's positives: negatives / positives; () where all weigh the same."""
    if class_weight is None:
        return ()
    count = next(iter(found.counts.values()))
    return tuple(max(1, count - found.labels[label]) / max(1, found.labels[label]) for label in labels)

"""From settings and data to what is trained: a model to start from, and a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from heedful.bundled import ENCODER
from heedful.checkpoint import Config, Loaded, create, load
from heedful.checkpoint.new_head import attach
from heedful.data import (
    Rewritten,
    Source,
)
from heedful.data.labelled.statistics import Survey
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.objectives.masked_lm import MaskedLM
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import HEAD_WIDTH, Classic, Init, Pretrained, Scratch, Seq2Seq, model_name
from heedful.runs.finetune.seq2seq import seq2seq_model
from heedful.runs.finetune.settings import (
    FinetuneSettings,
)
from heedful.tasks.specs import SPECS
from heedful.tasks.task import EncodedSplit, Task, TaskSetup
from heedful.tokenizer import Tokenizer, TokenizerSettings, train
from heedful.train.settings import AdamW, TrainSettings
from heedful.train.trainer import Trainer

Item = TypeVar("Item")

LONGEST = 256  # tokens that an encoder reads that is trained on the spot
MOST = 50_000  # examples whose texts it is trained on, and vocabularies are made of


def initial_model(
    init: Init,
    source: Source[Any],
    counts: Mapping[str, int],
    seed: int,
    max_length: int | None,
    log: Callable[[str], None],
) -> Loaded:
    """Load or make the model that training starts from.

    `counts` says how many examples each split has, of which those of train are read, or MOST of them.
    """
    if isinstance(init, Seq2Seq):
        return seq2seq_model(init, list(_texts(source, counts)), seed, max_length, log)
    if source.kind is Rewritten and (isinstance(init, Scratch) or model_name(init) == ENCODER):
        raise HeedfulError(
            "no model was given, and seq2seq needs one with a decoder: give --model the folder of one, or "
            "let one learn from random weights: --init.kind=transformer, or init.kind=recurrent"
        )
    if isinstance(init, Classic):
        return classic_model(init, list(_texts(source, counts)), seed, log, all_texts=_texts(source, counts, None))
    if isinstance(init, Pretrained):
        return load(init.model, revision=init.revision or None)
    max_length = max_length or LONGEST
    texts = list(_texts(source, counts))
    tokenizer = train(texts, TokenizerSettings(vocab_size=init.tokenizer.vocab_size, max_length=max_length))
    bare = create(Config(family="heedful", model=_model(init, tokenizer, max_length)), tokenizer, seed=seed)
    log(
        f"no model was given: an encoder of {bare.count():,} parameters is trained on the spot, on these texts alone; "
        "give --model to start from one that has read more"
    )
    if not init.mlm_steps:
        return bare
    loaded = attach(bare, "masked_lm", seed=seed)
    objective = MaskedLM(tokenizer=tokenizer)
    how = TrainSettings(max_steps=init.mlm_steps, batch_size=64, optimizer=AdamW(lr=1e-3), seed=seed)
    began = time.monotonic()
    steps = list(Trainer(loaded, objective, objective.samples(texts, max_length), how))
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
    for example in evenly_spaced(source.examples("train"), counts["train"], most):
        yield from example.texts


def evenly_spaced(items: Iterable[Item], count: int, max_items: int | None = MOST) -> Iterator[Item]:
    """All of so many, or as many as there may be.

    >>> list(some("abcdefgh", 8, 3))
    ['c', 'f', 'h']
    """
    for number, item in enumerate(items):
        if max_items is None or count <= max_items or (number + 1) * max_items // count > number * max_items // count:
            yield item


def build_task(
    settings: FinetuneSettings,
    source: Source[Any],
    stats: Survey,
    model: Loaded,
    labels: tuple[str, ...] | None = None,
) -> tuple[Task, Loaded]:
    """The task, and the model with its head; it answers the labels of the data, or those."""
    init = settings.init
    setup = TaskSetup(
        settings=settings.task,
        loaded=model,
        labels=source.labels if labels is None else labels,
        survey=stats,
        seed=settings.train.seed,
        reinit_layers=init.reinit_layers if isinstance(init, Pretrained) else 0,
        max_length=settings.max_length,
        long_inputs=settings.long_inputs,
    )
    task, made = SPECS[settings.task.kind].task.create(setup)
    if task.takes_pairs:
        first = next(iter(source.examples("train")), None)
        made.pairs = None if first is None else len(first.texts) > 1
    return task, made


def encoding_notes(learned: EncodedSplit) -> list[str]:
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


def _samples(learned: EncodedSplit) -> str:
    return f"{len(learned.samples):,} sample" + ("s" if len(learned.samples) != 1 else "")

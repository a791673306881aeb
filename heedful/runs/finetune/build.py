"""Creation of the initial model and of the task of a fine-tuning run, from settings and data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import BundleConfig, ModelBundle, create, load
from heedful.checkpoint.new_head import with_head
from heedful.data import Dataset, Seq2SeqExample
from heedful.data.examples import Example
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import ModelError
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.objectives.masked_lm import MaskedLM
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import (
    HEAD_DIMENSION,
    ClassicInit,
    Init,
    Pretrained,
    Scratch,
    Seq2Seq,
    model_name,
)
from heedful.runs.finetune.seq2seq import seq2seq_model
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.tasks.specs import SPECS
from heedful.tasks.task import EncodedSplit, Task, TaskSetup
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.train.settings import AdamW, TrainSettings
from heedful.train.trainer import Trainer

Item = TypeVar("Item")

MAX_LENGTH = 256  # maximum tokens of an encoder with random weights
MAX_EXAMPLES = 50_000  # maximum examples for training a new tokenizer, word vectors or an encoder


def initial_model(
    init: Init,
    dataset: Dataset[Example],
    counts: Mapping[str, int],
    seed: int,
    max_length: int | None,
    log: Callable[[str], None],
) -> ModelBundle:
    """Load or create the model that training starts from, without the task's head.

    Args:
        init: Settings of the model.
        dataset: The data. A new tokenizer, vocabulary or encoder is trained on the texts of the train split.
        counts: Counts of examples by split.
        seed: Seed of random weights.
        max_length: Maximum tokens of a new model. If None, MAX_LENGTH for an encoder, and no limit for other models.
        log: Receives sentences about a new model.

    Raises:
        ModelError: If the task is seq2seq, but the settings do not name a model with a decoder.
    """
    if isinstance(init, Seq2Seq):
        return seq2seq_model(init, list(_texts(dataset, counts)), seed, max_length, log)
    if dataset.kind is Seq2SeqExample and (isinstance(init, Scratch) or model_name(init) == BUNDLED_ENCODER):
        raise ModelError(
            "no model was given, and seq2seq needs one with a decoder: give --model the folder of one, or "
            "train one from random weights: --init.kind=transformer, or init.kind=recurrent"
        )
    if isinstance(init, ClassicInit):
        all_texts = _texts(dataset, counts, None)
        return classic_model(init, list(_texts(dataset, counts)), seed, log, all_texts=all_texts)
    if isinstance(init, Pretrained):
        return load(init.model, revision=init.revision or None)
    return _scratch_encoder(init, list(_texts(dataset, counts)), seed, max_length or MAX_LENGTH, log)


def _scratch_encoder(
    init: Scratch, texts: list[str], seed: int, max_length: int, log: Callable[[str], None]
) -> ModelBundle:
    """Create a tokenizer and an encoder with random weights, and pre-train it as a masked LM for `mlm_steps` steps."""
    tokenizer = train_tokenizer(texts, TokenizerSettings(vocab_size=init.tokenizer.vocab_size, max_length=max_length))
    config = BundleConfig(family="heedful", model=_scratch_config(init, tokenizer, max_length))
    encoder = create(config, tokenizer, seed=seed)
    log(
        f"no model was given: an encoder of {encoder.count():,} parameters is trained on the spot, on these texts "
        "alone; give --model to start from one that was trained on more"
    )
    if not init.mlm_steps:
        return encoder
    model = with_head(encoder, "masked_lm", seed=seed)
    objective = MaskedLM(tokenizer=tokenizer)
    settings = TrainSettings(max_steps=init.mlm_steps, batch_size=64, optimizer=AdamW(lr=1e-3), seed=seed)
    start = time.monotonic()
    steps = list(Trainer(model, objective, objective.samples(texts, max_length), settings))
    seconds = time.monotonic() - start
    log(
        f"it was trained on {sum(step.tokens for step in steps):,} tokens in {seconds:.0f} s; "
        f"the loss of masked tokens went from {steps[0].loss:.2f} to {steps[-1].loss:.2f}"
    )
    return model


def _scratch_config(settings: Scratch, tokenizer: Tokenizer, max_length: int) -> ModelConfig:
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=settings.width,
            positions=Learned(count=max_length),
            types=2,
            padding=tokenizer.special.pad,
            norm="layer",
            dropout=0.1,
        ),
        encoder=StackConfig(
            width=settings.width,
            layers=settings.layers,
            heads=settings.width // HEAD_DIMENSION,
            head_width=HEAD_DIMENSION,
            inner_width=4 * settings.width,
            dropout=0.1,
        ),
    )


def _texts(
    dataset: Dataset[Example], counts: Mapping[str, int], max_examples: int | None = MAX_EXAMPLES
) -> Iterator[str]:
    """Yield the texts of all training examples, or of `max_examples` of them.

    These are evenly spaced in the data, since files may be sorted.
    """
    for example in evenly_spaced(dataset.examples("train"), counts["train"], max_examples):
        yield from example.texts


def evenly_spaced(items: Iterable[Item], count: int, max_items: int | None = MAX_EXAMPLES) -> Iterator[Item]:
    """Yield all `count` items, or `max_items` of them, evenly spaced.

    >>> list(evenly_spaced("abcdefgh", 8, 3))
    ['c', 'f', 'h']
    """
    if max_items is None or count <= max_items:
        yield from items
        return
    for index, item in enumerate(items):
        if (index + 1) * max_items // count > index * max_items // count:
            yield item


def build_task(
    settings: FinetuneSettings,
    dataset: Dataset[Example],
    stats: DatasetStats,
    model: ModelBundle,
    labels: tuple[str, ...] | None = None,
) -> tuple[Task, ModelBundle]:
    """Return the task, and the model with the task's head.

    Args:
        settings: Settings of the run.
        dataset: The data.
        stats: Statistics of the data.
        model: The initial model.
        labels: Labels of the head. If None, the labels of the data.
    """
    init = settings.init
    setup = TaskSetup(
        settings=settings.task,
        loaded=model,
        labels=dataset.labels if labels is None else labels,
        stats=stats,
        seed=settings.train.seed,
        reinit_layers=init.reinit_layers if isinstance(init, Pretrained) else 0,
        max_length=settings.max_length,
        long_inputs=settings.long_inputs,
    )
    task, model = SPECS[settings.task.kind].task.create(setup)
    if task.takes_pairs:
        first_example = next(iter(dataset.examples("train")), None)
        model.pairs = None if first_example is None else len(first_example.texts) > 1
    return task, model


def encoding_notes(encoded: EncodedSplit) -> list[str]:
    """Return sentences about the counts of samples and tokens, and about examples that were split, cut or left out."""
    samples = f"{len(encoded.samples):,} sample" + ("s" if len(encoded.samples) != 1 else "")
    notes = [f"{encoded.examples:,} training examples are {samples} of {encoded.tokens:,} tokens"]
    if encoded.windowed:
        notes.append(f"{encoded.windowed:,} training examples are longer than the model reads and are read in windows")
    if encoded.truncated:
        notes.append(
            f"{encoded.truncated:,} training examples are longer than the model reads and were cut: "
            f"{encoded.truncated_tokens:,} tokens are lost"
        )
    if encoded.skipped:
        notes.append(f"{encoded.skipped:,} training examples were left out: {encoded.skipped_because}")
    return notes + [f"{count:,} training examples {remark}" for remark, count in encoded.remarks.items()]

"""From settings and text to what is pre-trained: a model of a family and a size, an objective, rows of the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from heedful.checkpoint import Config, Loaded, assign, create, load, read_config
from heedful.checkpoint.attach import attach
from heedful.checkpoint.hub import name_and_revision
from heedful.data.order import mixed
from heedful.data.shards import Corpus
from heedful.errors import HeedfulError, did_you_mean
from heedful.families import FAMILIES, USUAL
from heedful.model.config import Learned, ModelConfig, StackConfig
from heedful.objectives import Pretext, Sample
from heedful.objectives.causal import Causal
from heedful.objectives.frame import Frame, run_of
from heedful.objectives.masked import Masked, MaskedPairs
from heedful.objectives.permuted import Permuted
from heedful.objectives.replaced import Replaced, tied_generator
from heedful.objectives.rows import HELD, Pairs, Rows, held_out, windows
from heedful.objectives.spans import Spans
from heedful.objectives.taught import Taught, Teacher
from heedful.runs.pretrain_settings import (
    CausalSettings,
    MaskedSettings,
    NextSettings,
    OrderSettings,
    PermutedSettings,
    PretrainSettings,
    ReplacedSettings,
    SpansSettings,
    TaughtSettings,
)
from heedful.tokenizer import Tokenizer

PROJECT = 6  # what a seed is mixed with here
DROPOUTS = ("dropout", "attention_dropout", "attention_out_dropout", "inner_dropout", "final_dropout")
PROBE = 8  # rows from which a teacher's mean is taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What a run is made of."""

    settings: PretrainSettings
    tokenizer: Tokenizer
    corpus: Corpus
    started: Loaded | None  # the trained model that goes on


# -- the model ----------------------------------------------------------------------------------------------------


def fresh_or_started(pieces: Pieces) -> Loaded:
    """The model with the head of the objective."""
    settings, seed = pieces.settings, pieces.settings.train.seed
    head = _head(settings)
    if pieces.started is not None:
        usual = pieces.started.config.model
        started = _remade(pieces.started, rated(usual, usual, settings.model.dropout))
        made = attach(started, head, seed=seed)
        longest = max(settings.lengths)
        if made.limit is not None and longest > made.limit:
            raise HeedfulError(f"length is {longest}, but {pieces.started.source} reads {made.limit} tokens")
        return made
    family = settings.model.family or USUAL[settings.objective.kind]
    if family not in FAMILIES:
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, list(FAMILIES))}: {", ".join(FAMILIES)}')
    config = shaped(family, settings, pieces.tokenizer)
    config = replace(config, model=rated(config.model, config.model, settings.model.dropout))
    bare = create(config, pieces.tokenizer.limited(max(settings.lengths)), seed=seed)
    return attach(bare, head, seed=seed)


def _head(settings: PretrainSettings) -> str:
    match settings.objective:
        case NextSettings() | OrderSettings():
            return "pretraining"
        case PermutedSettings():
            return "permuted"
        case SpansSettings() | CausalSettings():
            return "next_token"
        case ReplacedSettings():
            return "replaced"
    return "masked"


def _usual(family: str) -> ModelConfig:
    """The first published size."""
    values = next(iter(FAMILIES[family].sizes.values()))
    return read_config(dict(values) | {"model_type": family}, family).model


def shaped(family: str, settings: PretrainSettings, tokenizer: Tokenizer) -> Config:
    """The first published size of a family with other numbers: layers, width, heads, vocabulary and positions."""
    model = _usual(family)
    layers, width, heads = settings.model.shape

    def stack(given: StackConfig | None) -> StackConfig | None:
        if given is None:
            return None
        return replace(
            given,
            width=width,
            layers=layers,
            heads=heads,
            head_width=width // heads,
            inner_width=round(given.inner_width / given.width * width),
            blocks=None if given.blocks is None else min(given.blocks, layers),
        )

    embedding, place = model.embedding, model.embedding.positions
    if isinstance(place, Learned):
        padding = None if place.padding is None else tokenizer.special.pad
        offset = place.offset if padding is None else padding + 1
        place = replace(place, count=max(settings.lengths) + offset, offset=offset, padding=padding)
    embedding = replace(
        embedding,
        vocabulary=tokenizer.size,
        width=width if embedding.width == model.width else min(embedding.width, width),
        positions=place,
        padding=None if embedding.padding is None else tokenizer.special.pad,
    )
    return Config(
        family=family,
        model=replace(
            model,
            embedding=embedding,
            encoder=stack(model.encoder),
            decoder=stack(model.decoder),
            start=None if model.start is None else tokenizer.special.pad,
        ),
    )


def rated(model: ModelConfig, like: ModelConfig, rate: float | None = None) -> ModelConfig:
    """The same with the dropout of another one, or with that rate wherever the other one has some."""

    def of(given: Any, usual: Any) -> Any:
        if given is None or usual is None:
            return given
        found = {name: getattr(usual, name) for name in DROPOUTS if hasattr(usual, name)}
        return replace(given, **{name: rate if each and rate is not None else each for name, each in found.items()})

    parts = ("embedding", "encoder", "decoder", "decoder_embedding")
    return replace(model, **{name: of(getattr(model, name), getattr(like, name)) for name in parts})


def _remade(loaded: Loaded, model: ModelConfig) -> Loaded:
    """The same weights under another config."""
    with torch.device("meta"):
        made = Loaded(replace(loaded.config, model=model), loaded.tokenizer, loaded.source)
    assign(made, {name: each.detach() for name, each in loaded.named().items()}, "cpu")
    return made.eval()


def saved(loaded: Loaded, pieces: Pieces) -> Loaded:
    """The model as it is kept: with the dropout that fine-tuning wants, its family's own or the started model's."""
    usual = pieces.started.config.model if pieces.started is not None else _usual(loaded.config.family)
    return _remade(loaded, rated(loaded.config.model, usual))


# -- the objective ------------------------------------------------------------------------------------------------


def objective_of(pieces: Pieces, loaded: Loaded, samples: Sequence[Sample]) -> Pretext:
    """What is learned."""
    tokenizer, asked, seed = pieces.tokenizer, pieces.settings.objective, pieces.settings.train.seed
    match asked:
        case MaskedSettings():
            return Masked(tokenizer=tokenizer, rate=asked.rate, choose=asked.choose, versions=asked.versions)
        case NextSettings() | OrderSettings():
            name = "next" if isinstance(asked, NextSettings) else "order"
            return MaskedPairs(
                tokenizer=tokenizer, rate=asked.rate, choose=asked.choose, versions=asked.versions, name=name
            )
        case PermutedSettings():
            return Permuted(tokenizer=tokenizer)
        case SpansSettings():
            start = loaded.config.model.start
            if start is None:
                raise HeedfulError("this model has no token with which its decoder starts: spans need one")
            return Spans(tokenizer=tokenizer, rate=asked.rate, mean=asked.mean, start=start)
        case CausalSettings():
            return Causal(tokenizer=tokenizer)
        case ReplacedSettings():
            generator = tied_generator(loaded, part=asked.part, seed=seed)
            return Replaced(tokenizer=tokenizer, generator=generator, rate=asked.rate, weight=asked.weight)
        case TaughtSettings():
            name, revision = name_and_revision(asked.teacher)
            teacher = Teacher(load(name, revision=revision), tokenizer)
            with torch.random.fork_rng():
                torch.manual_seed(mixed(seed, PROJECT))
                project = nn.Linear(loaded.config.model.width, teacher.width)
            taught = Taught(
                tokenizer=tokenizer,
                teacher=teacher,
                project=project,
                rate=asked.rate,
                choose=asked.choose,
                weight=asked.weight,
            )
            teacher.prepare([samples[number] for number in range(min(PROBE, len(samples)))], taught.free)
            return taught
    raise AssertionError(asked)


# -- the samples --------------------------------------------------------------------------------------------------


def samples_of(pieces: Pieces) -> tuple[list[Sequence[Sample]], list[Sample]]:
    """Rows to learn from, for each phase, and those that are held out, in the shape of the last phase."""
    settings, corpus = pieces.settings, pieces.corpus
    held = held_out(corpus, settings.held_out)
    learned, kept = np.flatnonzero(~held), np.flatnonzero(held)
    if not len(learned) or not len(kept):
        raise HeedfulError(
            f"{len(corpus):,} documents are too few to hold out a share of {settings.held_out:g}: "
            f"{len(kept)} would be held out. Give more documents, or raise held_out"
        )
    found = [_rows(pieces, learned, length, settings.train.seed) for length in settings.lengths]
    measured = _rows(pieces, kept, settings.lengths[0], mixed(settings.train.seed, HELD))
    rows: list[Sample] = []
    left = settings.held_tokens
    for number in range(len(measured)):
        if left <= 0:
            break
        rows.append(measured[number])
        left -= len(rows[-1])
    return found, rows


def _rows(pieces: Pieces, documents: Any, length: int, seed: int) -> Sequence[Sample]:
    settings, corpus, tokenizer = pieces.settings, pieces.corpus, pieces.tokenizer
    size = max(settings.row, length)
    match settings.objective:
        case NextSettings(short=short) | OrderSettings(short=short) as asked:
            if isinstance(asked, NextSettings) and len(documents) < 2:
                raise HeedfulError(f"{len(documents)} documents: next-sentence prediction needs at least two")
            frame = Frame.of(tokenizer, pair=True)
            swapped = isinstance(asked, OrderSettings)
            return Pairs(
                corpus=corpus, documents=documents, frame=frame, length=length, size=size, seed=seed,
                swapped=swapped, short=short,
            )  # fmt: skip
        case CausalSettings():
            frame = _opened(tokenizer)
        case _:
            frame = Frame.of(tokenizer, pair=False)
    return Rows(corpus, frame, windows(corpus, documents, frame.room(length)), size, seed)


def _opened(tokenizer: Tokenizer) -> Frame:
    """What stands around a text that is written from left to right: at least a token to begin with."""
    frame = Frame.of(tokenizer, pair=False)
    if frame.width:
        return frame
    end = tokenizer.special.separator
    if end is None:
        raise HeedfulError("this tokenizer has no token for the end of a text, with which each one could begin")
    return Frame(runs=(run_of([(end, 0)]), run_of([])), kinds=(0,))

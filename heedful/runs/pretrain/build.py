"""Model, objective and samples of a pre-training run, from its settings, tokenizer and corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from heedful.checkpoint import RUN_MODEL, BundleConfig, ModelBundle, assign, create, load, read_config
from heedful.checkpoint.new_head import make_head_config, with_head
from heedful.data.corpus.documents import CorpusSettings
from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import derive_seed, epoch_order
from heedful.errors import HeedfulError, did_you_mean
from heedful.families import DEFAULT_FAMILIES, FAMILIES
from heedful.model.config import Learned, ModelConfig, StackConfig
from heedful.model.initialise import skip_init
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.causal_lm import CausalLM
from heedful.objectives.masked_lm import MaskedLM, MaskedLMWithPairs
from heedful.objectives.packing import HELD, FixedShape, PackedRows, SegmentPairs, held_out, segment_windows
from heedful.objectives.permutation_lm import PermutationLM
from heedful.objectives.replaced_token_detection import ReplacedTokenDetection, tied_generator
from heedful.objectives.span_corruption import SpanCorruption
from heedful.objectives.special_tokens import SpecialTokenTemplate, special_run
from heedful.runs.pretrain.probes import ProbeSet
from heedful.runs.pretrain.settings import (
    ClmSettings,
    DistillationSettings,
    MlmNspSettings,
    MlmSettings,
    MlmSopSettings,
    PlmSettings,
    PretrainSettings,
    RtdSettings,
    SpanCorruptionSettings,
    pretrain_defaults,
)
from heedful.runs.pretrain.teacher import TeacherRun, WindowRows
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import PretrainTokenizer

GENERATOR = "generator"  # folder of the generator that was trained beside the model (ELECTRA)
DROPOUTS = ("dropout", "attention_dropout", "attention_out_dropout", "inner_dropout", "final_dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Settings, tokenizer, corpus and models of a run."""

    settings: PretrainSettings
    tokenizer: Tokenizer
    corpus: Corpus
    init_model: ModelBundle | None  # the trained model to continue from
    teacher: TeacherRun | None = None
    probes: Sequence[ProbeSet] = ()


# -- checks before text is read -------------------------------------------------------------------------------------


def check_ignored_settings(settings: PretrainSettings, *, from_corpus: bool) -> None:
    """Refuse settings that were changed and would change nothing; `from_corpus`: the data is a finished corpus."""
    start, usual = settings.model.init_from, pretrain_defaults(settings.objective.kind, 1, continued=False)
    own = "--tokenizer names one" if settings.tokenizer.path else f"{start or 'the corpus'} has its own"
    of_new_one = [each.name for each in fields(PretrainTokenizer) if each.name != "path"]
    trained = not (from_corpus or start or settings.tokenizer.path)
    for table, names, used, why in (
        ("fit", ("eval_every_epochs",), False, "set eval_every_steps instead"),
        ("tokenizer", ("max_length",), False, "the greatest max_seq_length of all phases is used"),
        ("tokenizer", of_new_one, trained, f"no tokenizer is trained, {own}"),
        ("corpus", [each.name for each in fields(CorpusSettings)], not from_corpus, "the corpus was made before"),
        ("model", ("family", "size", "layers", "width", "heads"), not start, f"{start} has a shape of its own"),
    ):
        given, known = (getattr(each, table) for each in (settings, usual))
        for name in names:
            if not used and getattr(given, name) != getattr(known, name):
                raise HeedfulError(f"{table}.{name} would change nothing: {why}; leave it out")


def check_model(settings: PretrainSettings, started: ModelBundle | None, teacher: ModelBundle | None) -> None:
    """Refuse a model or a teacher that does not fit the objective, before text is read."""
    if started is None:
        config, who = BundleConfig(family=_family(settings), model=_usual(_family(settings))), _family(settings)
    else:
        config, who, longest = started.config, started.source, max(settings.lengths)
        if started.max_length is not None and longest > started.max_length:
            raise HeedfulError(f"max_seq_length is {longest}, but {started.source} reads {started.max_length} tokens")
    make_head_config(config, _head(settings))
    both = config.model.has_encoder and config.model.has_decoder
    if isinstance(settings.objective, ClmSettings) and both:
        told = "has an encoder, and causal language modelling needs a decoder alone"
        raise HeedfulError(f"{who} {told}: take --objective span_corruption, or another model")
    if isinstance(settings.objective, SpanCorruptionSettings) and not both:
        told = "is not an encoder-decoder, as span corruption needs"
        raise HeedfulError(f"{who} {told}: take --objective clm, or another model")
    if teacher is not None and teacher.config.model.has_encoder and teacher.config.model.has_decoder:
        told = "has a decoder beside its encoder, and a teacher is an encoder alone"
        raise HeedfulError(f"{teacher.source} {told}: write its encoder alone with heedful convert --head-kind encoder")


def check_tokenizer(settings: PretrainSettings, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer or lengths that the objective cannot use."""
    for length in settings.lengths:
        _frame(settings, tokenizer).room(length)
    match settings.objective:
        case MlmSettings(mask_unit=unit) | MlmNspSettings(mask_unit=unit) | MlmSopSettings(mask_unit=unit):
            MaskedLM(tokenizer=tokenizer, mask_unit=unit)
        case DistillationSettings(mask_unit=unit):
            MaskedLM(tokenizer=tokenizer, mask_unit=unit)
        case RtdSettings():
            MaskedLM(tokenizer=tokenizer)
        case SpanCorruptionSettings(mask_prob=rate, mean_noise_span_length=mean):
            SpanCorruption(tokenizer=tokenizer, mask_prob=rate, mean_noise_span_length=mean, start=0)


def _family(settings: PretrainSettings) -> str:
    family = settings.model.family or DEFAULT_FAMILIES[settings.objective.kind]
    known = [name for name, each in FAMILIES.items() if each.sizes]  # the others have no sizes to pre-train
    if family not in known:
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, known)}: {", ".join(known)}')
    return family


# -- the model ----------------------------------------------------------------------------------------------------


def build_model(components: Components) -> ModelBundle:
    """Make the model, or take the one to continue from, with the head of the objective."""
    settings, seed = components.settings, components.settings.train.seed
    head = _head(settings)
    if components.init_model is not None:
        usual = components.init_model.config.model
        started = _remade(components.init_model, with_dropout(usual, usual, settings.model.dropout))
        return with_head(started, head, seed=seed)
    config = config_of_size(_family(settings), settings, components.tokenizer)
    config = replace(config, model=with_dropout(config.model, config.model, settings.model.dropout))
    bare = create(config, components.tokenizer.limited(max(settings.lengths)), seed=seed)
    return with_head(bare, head, seed=seed)


def _head(settings: PretrainSettings) -> str:
    match settings.objective:
        case MlmNspSettings() | MlmSopSettings():
            return "pretraining"
        case PlmSettings():
            return "permutation_lm"
        case SpanCorruptionSettings() | ClmSettings():
            return "language_model"
        case RtdSettings():
            return "replaced_token_detection"
    return "masked_lm"


def _usual(family: str) -> ModelConfig:
    """The config of a family's first published size."""
    values = next(iter(FAMILIES[family].sizes.values()))
    return read_config(dict(values) | {"model_type": family}, family).model


def config_of_size(family: str, settings: PretrainSettings, tokenizer: Tokenizer) -> BundleConfig:
    """The config of a family with the layers, width and heads of the settings, for a tokenizer and a length."""
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
        width=width if embedding.width == model.width else min(embedding.width, max(1, width // 2)),  # stays narrower
        positions=place,
        types=embedding.types and max(embedding.types, 1 + max(tokenizer.encode(("a", "a")).types)),
        padding=None if embedding.padding is None else tokenizer.special.pad,
    )
    model = replace(
        model,
        embedding=embedding,
        encoder=stack(model.encoder),
        decoder=stack(model.decoder),
        start=None if model.start is None else tokenizer.special.pad,
    )
    told = read_config(dict(FAMILIES[family].write(model)) | {"model_type": family}, family).model
    return BundleConfig(family=family, model=replace(model, initialisation=told.initialisation))  # by its own layers


def with_dropout(model: ModelConfig, like: ModelConfig, rate: float | None = None) -> ModelConfig:
    """The config with the dropout of another one, or with `rate` where the other one has any."""

    def of(given: Any, usual: Any) -> Any:
        if given is None or usual is None:
            return given
        found = {name: getattr(usual, name) for name in DROPOUTS if hasattr(usual, name)}
        return replace(given, **{name: rate if each and rate is not None else each for name, each in found.items()})

    parts = ("embedding", "encoder", "decoder", "decoder_embedding")
    return replace(model, **{name: of(getattr(model, name), getattr(like, name)) for name in parts})


def _remade(loaded: ModelBundle, model: ModelConfig) -> ModelBundle:
    """The model with another config and the same weights."""
    with skip_init():
        made = ModelBundle(replace(loaded.config, model=model), loaded.tokenizer, loaded.source)
    assign(made, {name: each.detach() for name, each in loaded.named_tensors().items()}, "cpu")
    made.other_head_tensors = loaded.other_head_tensors
    return made.eval()


def model_to_save(loaded: ModelBundle, components: Components) -> ModelBundle:
    """The model with the dropout for fine-tuning: that of its family, or of the model that training continued from."""
    usual = components.init_model.config.model if components.init_model is not None else _usual(loaded.config.family)
    return _remade(loaded, with_dropout(loaded.config.model, usual))


# -- the objective ------------------------------------------------------------------------------------------------


def build_objectives(
    components: Components, loaded: ModelBundle, samples: Sequence[Sequence[Sample]]
) -> list[SelfSupervised]:
    """The objective of each phase, the first one's in front."""
    settings = components.settings.objectives()
    if components.teacher is not None:
        width, rows = loaded.config.model.width, [cast(WindowRows, each) for each in samples]
        phases = [each for each in settings if isinstance(each, DistillationSettings)]
        return list(components.teacher.objectives(phases, rows, width, _masks(components)))
    first = _objective_of(components, loaded)
    others = [
        first if asked == settings[0] else replace(first, mask_prob=cast(Any, asked).mask_prob)
        for asked in settings[1:]
    ]
    return [first, *others]


def _objective_of(components: Components, loaded: ModelBundle) -> Any:
    """The objective of the first phase."""
    tokenizer, asked = components.tokenizer, components.settings.objective
    match asked:
        case MlmSettings():
            return MaskedLM(tokenizer=tokenizer, num_static_masks=asked.num_static_masks, **_masks(components))
        case MlmNspSettings() | MlmSopSettings():
            name: Any = "nsp" if isinstance(asked, MlmNspSettings) else "sop"
            return MaskedLMWithPairs(
                tokenizer=tokenizer, num_static_masks=asked.num_static_masks, name=name, **_masks(components)
            )
        case PlmSettings():
            return PermutationLM(tokenizer=tokenizer)
        case SpanCorruptionSettings():
            start = loaded.config.model.start
            if start is None:
                raise HeedfulError("this model has no token with which its decoder starts: spans need one")
            return SpanCorruption(
                tokenizer=tokenizer,
                mask_prob=asked.mask_prob,
                mean_noise_span_length=asked.mean_noise_span_length,
                start=start,
            )
        case ClmSettings():
            return CausalLM(tokenizer=tokenizer)
        case RtdSettings():
            generator = _generator(components, loaded, asked.generator_size)
            return ReplacedTokenDetection(
                tokenizer=tokenizer, generator=generator, mask_prob=asked.mask_prob, disc_weight=asked.disc_weight
            )
    raise AssertionError(asked)


def generator_folder(settings: PretrainSettings) -> Path | None:
    """The folder of the generator of the model that training continues from; None if it has none."""
    start = Path(settings.model.init_from)
    place = (start.parent if start.name == RUN_MODEL else start) / GENERATOR
    return place if settings.model.init_from and place.is_dir() else None


def _generator(components: Components, loaded: ModelBundle, part: float) -> ModelBundle:
    """Make a generator that shares the model's embeddings, with the other weights of the earlier generator, if any."""
    made = tied_generator(loaded, generator_size=part, seed=components.settings.train.seed)
    if (place := generator_folder(components.settings)) is None:
        return made
    shared = {id(each) for each in loaded.parameters()}
    own = {name: each for name, each in made.named_tensors().items() if id(each) not in shared}
    learned = load(place, head="masked_lm").named_tensors()
    if other := [name for name, each in own.items() if name not in learned or learned[name].shape != each.shape]:
        raise HeedfulError(
            f"{place} is of another shape than a generator with objective.generator_size = {part:g} ({other[0]} "
            "differs): set it to the value of that run, or move the folder away to train a new one"
        )
    with torch.no_grad():
        for name, each in own.items():
            each.copy_(learned[name])
    return made


def _masks(components: Components) -> dict[str, Any]:
    """Arguments for choosing masked tokens; rows of a fixed shape have room for those of the longest text."""
    settings, count = components.settings, None
    asked: Any = settings.objective
    if settings.sequences_per_pack is not None:
        width = _frame(settings, components.tokenizer).width
        longest = max(settings.pack_length, *settings.lengths)
        most = longest - settings.sequences_per_pack - width  # where one sequence is all text
        count = max(1, round(asked.mask_prob * most))
    return {"mask_prob": asked.mask_prob, "mask_unit": asked.mask_unit, "count": count}


# -- the samples --------------------------------------------------------------------------------------------------


def build_samples(components: Components) -> tuple[list[Sequence[Sample]], list[Sample]]:
    """Training samples of each phase, and validation samples in the form of the first phase.

    Raises:
        HeedfulError: If the corpus has too few documents.
    """
    settings, corpus = components.settings, components.corpus
    held = held_out(corpus, settings.eval_fraction)
    learned, kept = np.flatnonzero(~held), np.flatnonzero(held)
    if not len(learned) or not len(kept):
        raise HeedfulError(
            f"the number of documents, {len(corpus):,}, is too small to hold out a share of "
            f"{settings.eval_fraction:g}: {len(kept)} would be held out. Give more documents, raise eval_fraction, or "
            "set corpus.sample_by: a line, a paragraph (up to an empty line) or the whole document is one"
        )
    if isinstance(settings.objective, MlmNspSettings) and min(len(learned), len(kept)) < 2:
        raise HeedfulError(
            f"a second segment of another document needs two documents at least, but of {len(corpus):,} there are "
            f"{len(learned):,} to learn from and {len(kept):,} held out: give more documents, or change eval_fraction"
        )
    steady = _steady(components)
    found = [_rows(components, learned, length, settings.train.seed, steady) for length in settings.lengths]
    measured = _rows(components, kept, settings.lengths[0], derive_seed(settings.train.seed, HELD), held=True)
    rows: list[Sample] = []
    left = settings.eval_tokens
    for number in epoch_order(
        len(measured), derive_seed(settings.train.seed, HELD), 0
    ).tolist():  # shuffled, since long ones are together
        if left <= 0:
            break
        rows.append(measured[number])
        left -= len(rows[-1])
    return found, rows


def _steady(components: Components) -> FixedShape | None:
    sequences, pad = components.settings.sequences_per_pack, components.tokenizer.special.pad
    if sequences is None:
        return None
    if not hasattr(components.settings.objective, "mask_unit"):
        kind = components.settings.objective.kind
        raise HeedfulError(
            f'sequences_per_pack is for objectives with masked tokens, but this one is "{kind}": unset it'
        )
    if pad is None:
        raise HeedfulError("this tokenizer has no padding token, to fill up rows with: unset sequences_per_pack")
    return FixedShape(sequences=sequences, pad=pad, longest=max(components.settings.lengths))


def _rows(
    components: Components,
    documents: Any,
    length: int,
    seed: int,
    steady: FixedShape | None = None,
    *,
    held: bool = False,
) -> Sequence[Sample]:
    settings, corpus, frame = components.settings, components.corpus, _frame(components.settings, components.tokenizer)
    size = max(settings.pack_length, length)
    match settings.objective:
        case MlmNspSettings(short_seq_prob=short) | MlmSopSettings(short_seq_prob=short) as asked:
            swapped = isinstance(asked, MlmSopSettings)
            return SegmentPairs(
                corpus=corpus, documents=documents, frame=frame, length=length, size=size, seed=seed,
                swapped=swapped, short_seq_prob=short, steady=steady,
            )  # fmt: skip
    if components.teacher is not None:
        return components.teacher.rows(corpus, documents, size, length, seed, steady, held_out=held)
    inner = frame.opening if isinstance(settings.objective, ClmSettings) else None
    return PackedRows(
        corpus, frame, segment_windows(corpus, documents, frame.room(length)), size, seed, steady=steady, inner=inner
    )


def _frame(settings: PretrainSettings, tokenizer: Tokenizer) -> SpecialTokenTemplate:
    match settings.objective:
        case ClmSettings():
            return _ended(tokenizer)
        case MlmNspSettings() | MlmSopSettings():
            return SpecialTokenTemplate.of(tokenizer, pair=True)
    return SpecialTokenTemplate.of(tokenizer, pair=False)


def _ended(tokenizer: Tokenizer) -> SpecialTokenTemplate:
    """Special tokens around a document of a causal language model: one at its beginning, and one at its end."""
    frame, end = SpecialTokenTemplate.of(tokenizer, pair=False), tokenizer.special.separator
    before, after = frame.runs
    if len(after[0]):
        return frame
    if end is None:
        raise HeedfulError("this tokenizer has no token for the end of a text, which a model has to learn")
    return replace(frame, runs=(before if len(before[0]) else special_run([(end, 0)]), special_run([(end, 0)])))

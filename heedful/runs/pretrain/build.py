"""Model, objective and samples of a pre-training run, from its settings, tokenizer and corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np

from heedful.checkpoint import BundleConfig, ModelBundle, assign, create, read_config
from heedful.checkpoint.new_head import make_head_config, with_head
from heedful.data.corpus.documents import CorpusSettings
from heedful.data.sampler import derive_seed, epoch_order
from heedful.errors import HeedfulError, did_you_mean
from heedful.families import DEFAULT_FAMILIES, FAMILIES
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.model.initialise import skip_init
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.packing import FixedShape, held_out
from heedful.random_streams import Stream
from heedful.runs.pretrain.objective_builder import Components, builder_of
from heedful.runs.pretrain.settings import PretrainSettings, pretrain_defaults
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import PretrainTokenizer

Part = TypeVar("Part", EmbeddingConfig, StackConfig, None)
DROPOUTS = ("dropout", "attention_dropout", "attention_out_dropout", "inner_dropout", "final_dropout")


# -- checks before text is read -------------------------------------------------------------------------------------


def check_ignored_settings(settings: PretrainSettings, *, from_corpus: bool) -> None:
    """Refuse settings that were changed and would change nothing; `from_corpus`: the data is a finished corpus."""
    start, usual = settings.model.init_from, pretrain_defaults(settings.objective.kind, 1, continued=False)
    own = "--tokenizer names one" if settings.tokenizer.path else f"{start or 'the corpus'} has its own"
    of_new_one = [field.name for field in fields(PretrainTokenizer) if field.name != "path"]
    trained = not (from_corpus or start or settings.tokenizer.path)
    for table, names, used, why in (
        ("fit", ("eval_every_epochs",), False, "set eval_every_steps instead"),
        ("tokenizer", ("max_length",), False, "the greatest max_seq_length of all phases is used"),
        ("tokenizer", of_new_one, trained, f"no tokenizer is trained, {own}"),
        ("corpus", [field.name for field in fields(CorpusSettings)], not from_corpus, "the corpus was made before"),
        ("model", ("family", "size", "layers", "width", "heads"), not start, f"{start} has a shape of its own"),
    ):
        table_settings, known = (getattr(source, table) for source in (settings, usual))
        for name in names:
            if not used and getattr(table_settings, name) != getattr(known, name):
                raise HeedfulError(f"{table}.{name} would change nothing: {why}; leave it out")


def check_model(settings: PretrainSettings, init_model: ModelBundle | None) -> None:
    """Refuse a model that does not fit the objective, before text is read."""
    if init_model is None:
        name = _family(settings)
        config = BundleConfig(family=name, model=_usual(name))
    else:
        config, name, longest = init_model.config, init_model.source, max(settings.lengths)
        if init_model.max_length is not None and longest > init_model.max_length:
            raise HeedfulError(f"max_seq_length is {longest}, but {name} reads {init_model.max_length} tokens")
    make_head_config(config, settings.spec.head)
    builder_of(settings).check_model(config, name)


def _family(settings: PretrainSettings) -> str:
    family = settings.model.family or settings.spec.family or DEFAULT_FAMILIES[settings.spec.name]
    known = [
        name for name, other_family in FAMILIES.items() if other_family.sizes
    ]  # the others have no sizes to pre-train
    if family not in known:
        raise HeedfulError(f'"{family}" is no family{did_you_mean(family, known)}: {", ".join(known)}')
    return family


# -- the model ----------------------------------------------------------------------------------------------------


def build_model(components: Components) -> ModelBundle:
    """Make the model, or take the one to continue from, with the head of the objective."""
    settings, seed = components.settings, components.settings.train.seed
    head = settings.spec.head
    if components.init_model is not None:
        usual = components.init_model.config.model
        started = _remade(components.init_model, with_dropout(usual, usual, settings.model.dropout))
        return with_head(started, head, seed=seed)
    config = config_of_size(_family(settings), settings, components.tokenizer)
    config = replace(config, model=with_dropout(config.model, config.model, settings.model.dropout))
    bare = create(config, components.tokenizer.limited(max(settings.lengths)), seed=seed)
    return with_head(bare, head, seed=seed)


def _usual(family: str) -> ModelConfig:
    """The config of a family's first published size."""
    values = next(iter(FAMILIES[family].sizes.values()))
    return read_config(dict(values) | {"model_type": family}, family).model


def config_of_size(family: str, settings: PretrainSettings, tokenizer: Tokenizer) -> BundleConfig:
    """The config of a family with the layers, width and heads of the settings, for a tokenizer and a length."""
    model = _usual(family)
    layers, width, heads = settings.model.shape

    def stack(config: StackConfig | None) -> StackConfig | None:
        if config is None:
            return None
        return replace(
            config,
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=config.kv_heads_of(heads),
            head_width=width // heads,
            inner_width=round(config.inner_width / config.width * width),
            blocks=None if config.blocks is None else min(config.blocks, layers),
        )

    def resized(embedding: EmbeddingConfig) -> EmbeddingConfig:
        positions, new_width = embedding.positions, width
        if embedding.width != model.width:  # it stays narrower
            new_width = min(embedding.width, max(1, width // 2))
        if isinstance(positions, Learned):
            padding = None if positions.padding is None else tokenizer.special.pad
            offset = positions.offset if padding is None else padding + 1
            positions = replace(positions, count=max(settings.lengths) + offset, offset=offset, padding=padding)
        return replace(
            embedding,
            vocabulary=tokenizer.size,
            width=new_width,
            positions=positions,
            types=embedding.types and max(embedding.types, 1 + max(tokenizer.encode(("a", "a")).types)),
            padding=None if embedding.padding is None else tokenizer.special.pad,
            scale=new_width**0.5 if embedding.scale == embedding.width**0.5 else embedding.scale,
        )

    model = replace(
        model,
        embedding=resized(model.embedding),
        encoder=stack(model.encoder),
        decoder=stack(model.decoder),
        decoder_embedding=None if model.decoder_embedding is None else resized(model.decoder_embedding),
        start=None if model.start is None else tokenizer.special.pad,
    )
    own = read_config(dict(FAMILIES[family].write(model)) | {"model_type": family}, family).model
    return BundleConfig(family=family, model=replace(model, initialisation=own.initialisation))  # by its own layers


def with_dropout(model: ModelConfig, like: ModelConfig, rate: float | None = None) -> ModelConfig:
    """The config with the dropout of another one, or with `rate` where the other one has any."""

    def of(config: Part, usual: Part) -> Part:
        if config is None or usual is None:
            return config
        rates: dict[str, Any] = {name: getattr(usual, name) for name in DROPOUTS if hasattr(usual, name)}
        if rate is not None:
            rates |= {name: rate for name, own in rates.items() if own}
        return replace(config, **rates)

    parts = ("embedding", "encoder", "decoder", "decoder_embedding")
    return replace(model, **{name: of(getattr(model, name), getattr(like, name)) for name in parts})


def _remade(loaded: ModelBundle, model: ModelConfig) -> ModelBundle:
    """The model with another config and the same weights."""
    with skip_init():
        bundle = ModelBundle(replace(loaded.config, model=model), loaded.tokenizer, loaded.source)
    assign(bundle, {name: tensor.detach() for name, tensor in loaded.named_tensors().items()}, "cpu")
    bundle.other_head_tensors = loaded.other_head_tensors
    return bundle.eval()


def model_to_save(loaded: ModelBundle, components: Components) -> ModelBundle:
    """The model with the dropout for fine-tuning: that of its family, or of the model that training continued from."""
    usual = components.init_model.config.model if components.init_model is not None else _usual(loaded.config.family)
    return _remade(loaded, with_dropout(loaded.config.model, usual))


# -- the objective ------------------------------------------------------------------------------------------------


def build_objectives(
    components: Components, loaded: ModelBundle, samples: Sequence[Sequence[Sample]]
) -> list[SelfSupervised]:
    """Return the objective of each phase, the first one's in front."""
    return components.builder.objectives(components, loaded, samples)


# -- the samples --------------------------------------------------------------------------------------------------


def build_samples(components: Components) -> tuple[list[Sequence[Sample]], list[Sample]]:
    """Training samples of each phase, and validation samples in the form of the first phase.

    Raises:
        HeedfulError: If the corpus has too few documents.
    """
    settings, corpus = components.settings, components.corpus
    held = held_out(corpus, settings.eval_fraction)
    learned, validation = np.flatnonzero(~held), np.flatnonzero(held)
    if not len(learned) or not len(validation):
        raise HeedfulError(
            f"the number of different documents in {len(corpus):,} is too small to hold out a share of "
            f"{settings.eval_fraction:g}: {len(validation)} would be held out. Give more documents, or set "
            "corpus.sample_by: a line, a paragraph (up to an empty line) or the whole document is one"
        )
    builder, seed = components.builder, settings.train.seed
    builder.check_documents(len(learned), len(validation))
    shape = _fixed_shape(components)
    phases = [builder.rows(components, learned, length, seed, shape) for length in settings.lengths]
    measured = builder.rows(
        components, validation, settings.lengths[0], derive_seed(seed, Stream.VALIDATION), validation=True
    )
    rows: list[Sample] = []
    left = settings.eval_tokens
    for number in epoch_order(
        len(measured), derive_seed(settings.train.seed, Stream.VALIDATION), 0
    ).tolist():  # shuffled, since long ones are together
        if left <= 0:
            break
        rows.append(measured[number])
        left -= len(rows[-1])
    return phases, rows


def _fixed_shape(components: Components) -> FixedShape | None:
    settings, pad = components.settings, components.tokenizer.special.pad
    sequences = settings.sequences_per_pack
    if sequences is None:
        return None
    if not settings.spec.fixed_shape:
        raise HeedfulError(
            f'sequences_per_pack is for objectives with masked tokens, but this one is "{settings.spec.name}": unset it'
        )
    if pad is None:
        raise HeedfulError("this tokenizer has no padding token, to fill up rows with: unset sequences_per_pack")
    return FixedShape(sequences=sequences, pad=pad, longest=max(settings.lengths))

"""Build model, objectives and samples of a pre-training run from its components.

A training sample is a packed row: several sequences of tokens, end to end without padding. `runs.pretrain.run` and the
distillation of masked language models call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
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
from heedful.objectives import Sample
from heedful.objectives.packing import FixedShape, held_out
from heedful.random_streams import Stream
from heedful.runs.pretrain.objective_builder import Components, builder_of
from heedful.runs.pretrain.settings import PretrainSettings, pretrain_defaults
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.settings import PretrainTokenizer

ConfigPart = TypeVar("ConfigPart", EmbeddingConfig, StackConfig, None)
# dropout fields of EmbeddingConfig and StackConfig
DROPOUTS = ("dropout", "attention_dropout", "attention_out_dropout", "inner_dropout", "final_dropout")


# -- checks before text is read -------------------------------------------------------------------------------------


def check_ignored_settings(settings: PretrainSettings, *, from_corpus: bool) -> None:
    """Refuse settings that differ from their defaults although the run would not use them.

    Args:
        settings: The settings of the run.
        from_corpus: Whether the data is a finished corpus, not files of text.

    Raises:
        HeedfulError: If there is such a setting.
    """
    init_from, tokenizer_path = settings.model.init_from, settings.tokenizer.path
    # the width only changes the default learning rate, which is not compared
    defaults = pretrain_defaults(settings.objective.kind, width=1, continued=False)
    unused: list[tuple[str, Sequence[str], str]] = [  # table of the settings, names in it, reason
        ("fit", ["eval_every_epochs"], "set eval_every_steps instead"),
        ("tokenizer", ["max_length"], "the greatest max_seq_length of all phases is used"),
    ]
    if from_corpus or init_from or tokenizer_path:
        training_options = [field.name for field in fields(PretrainTokenizer) if field.name != "path"]
        source = "tokenizer.path names one" if tokenizer_path else f"{init_from or 'the corpus'} has its own"
        unused.append(("tokenizer", training_options, f"no tokenizer is trained, {source}"))
    if from_corpus:
        unused.append(("corpus", [field.name for field in fields(CorpusSettings)], "the corpus was made before"))
    if init_from:
        shape_settings = ["family", "size", "layers", "width", "heads"]
        unused.append(("model", shape_settings, f"{init_from} has a shape of its own"))
    for table, names, reason in unused:
        table_settings, table_defaults = getattr(settings, table), getattr(defaults, table)
        for name in names:
            if getattr(table_settings, name) != getattr(table_defaults, name):
                raise HeedfulError(f"{table}.{name} would change nothing: {reason}; leave it out")


def check_model(settings: PretrainSettings, init_model: ModelBundle | None) -> None:
    """Check that the model fits the objective, before text is read.

    Args:
        settings: The settings of the run.
        init_model: The model that training continues from. If None, the family of the settings is checked.

    Raises:
        HeedfulError: If the family has no published sizes, or the objective's head, the lengths or the dropout do not
            fit the model.
    """
    if init_model is None:
        name = _family(settings)
        config = BundleConfig(family=name, model=first_published_config(name))
    else:
        config, name, longest = init_model.config, init_model.source, max(settings.lengths)
        if init_model.max_length is not None and longest > init_model.max_length:
            raise HeedfulError(
                f"max_seq_length is {longest}, but {name} reads {init_model.max_length} tokens: set it to that or less"
            )
    make_head_config(config, settings.spec.head)
    builder_of(settings).check_model(config, name)
    if settings.model.dropout and with_dropout(config.model, config.model, 0.0) == config.model:
        raise HeedfulError(
            f"model.dropout would change nothing: it replaces dropout rates above 0, and all rates of {name} are 0; "
            "leave it out"
        )


def _family(settings: PretrainSettings) -> str:
    """Return the family of a model with random weights."""
    return settings.model.family or settings.spec.family or DEFAULT_FAMILIES[settings.spec.name]


# -- the model ----------------------------------------------------------------------------------------------------


def build_model(components: Components) -> ModelBundle:
    """Return the model to train, with the objective's head.

    It has random weights, or those of the model that training continues from.
    """
    settings, seed = components.settings, components.settings.train.seed
    head = settings.spec.head
    if components.init_model is not None:
        config_before = components.init_model.config.model
        config_for_training = with_dropout(config_before, config_before, settings.model.dropout)
        return with_head(_with_config(components.init_model, config_for_training), head, seed=seed)
    config = config_of_size(_family(settings), settings, components.tokenizer)
    config = replace(config, model=with_dropout(config.model, config.model, settings.model.dropout))
    headless = create(config, components.tokenizer.limited(max(settings.lengths)), seed=seed)
    return with_head(headless, head, seed=seed)


def first_published_config(family: str) -> ModelConfig:
    """Return the config of a family's first published size.

    Raises:
        HeedfulError: If the family is unknown, or has no published sizes.
    """
    if family not in FAMILIES or not FAMILIES[family].sizes:
        families_with_sizes = [name for name, known_family in FAMILIES.items() if known_family.sizes]
        hint = did_you_mean(family, families_with_sizes)
        problem = "has no published sizes" if family in FAMILIES else f"is no family{hint}"
        raise HeedfulError(f'"{family}" {problem}; use one of {", ".join(families_with_sizes)}')
    values = next(iter(FAMILIES[family].sizes.values()))
    return read_config(dict(values) | {"model_type": family}, family).model


def config_of_size(family: str, settings: PretrainSettings, tokenizer: Tokenizer) -> BundleConfig:
    """Return a config of a family, with the shape of the settings and the vocabulary of a tokenizer.

    Args:
        family: A family with published sizes. All other values of the config are from the first size.
        settings: Layers, hidden size, heads and lengths.
        tokenizer: The tokenizer of the model.
    """
    published = first_published_config(family)
    shape = settings.model.shape
    resize_embedding = partial(_resize_embedding, family_width=published.width, settings=settings, tokenizer=tokenizer)
    model = replace(
        published,
        embedding=resize_embedding(published.embedding),
        encoder=None if published.encoder is None else _resize_stack(published.encoder, shape),
        decoder=None if published.decoder is None else _resize_stack(published.decoder, shape),
        decoder_embedding=(
            None if published.decoder_embedding is None else resize_embedding(published.decoder_embedding)
        ),
        # the published id belongs to another vocabulary; the padding token starts the decoder, as in T5
        start=None if published.start is None else tokenizer.special.pad,
    )
    # in some families the initialisation depends on the number of layers: take that of the new config
    reread = read_config(dict(FAMILIES[family].write(model)) | {"model_type": family}, family).model
    return BundleConfig(family=family, model=replace(model, initialisation=reread.initialisation))


def _resize_stack(config: StackConfig, shape: tuple[int, int, int]) -> StackConfig:
    """Return the config of a stack with another shape (layers, hidden size, heads).

    The ratio of inner size to hidden size and the number of heads in a group are unchanged.
    """
    layers, width, heads = shape
    return replace(
        config,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=config.kv_heads_of(heads),
        head_width=width // heads,
        inner_width=round(config.inner_width / config.width * width),
        # blocks that share their weights, as in ALBERT: one for each layer at most
        blocks=None if config.blocks is None else min(config.blocks, layers),
    )


def _resize_embedding(
    embedding: EmbeddingConfig, *, family_width: int, settings: PretrainSettings, tokenizer: Tokenizer
) -> EmbeddingConfig:
    """Return the config of an embedding for the hidden size and lengths of the settings, and for a tokenizer.

    Args:
        embedding: The published config.
        family_width: Hidden size of the published model.
        settings: The settings of the run.
        tokenizer: The tokenizer of the model.
    """
    _, width, _ = settings.model.shape
    if embedding.width != family_width:  # a family whose embedding dimension is below its hidden size
        # half the hidden size if the published dimension is larger, so that it stays below
        width = min(embedding.width, max(1, width // 2))
    positions = embedding.positions
    if isinstance(positions, Learned):
        padding = None if positions.padding is None else tokenizer.special.pad
        offset = positions.offset if padding is None else padding + 1  # positions begin after the padding row
        positions = replace(positions, count=max(settings.lengths) + offset, offset=offset, padding=padding)
    num_types = embedding.types
    if num_types:  # at least as many token types as the tokenizer uses for a pair of texts
        num_types = max(num_types, 1 + max(tokenizer.encode(("a", "a")).types))
    return replace(
        embedding,
        vocabulary=tokenizer.size,
        width=width,
        positions=positions,
        types=num_types,
        padding=None if embedding.padding is None else tokenizer.special.pad,
        scale=width**0.5 if embedding.scale == embedding.width**0.5 else embedding.scale,
    )


def with_dropout(model: ModelConfig, source: ModelConfig, rate: float | None = None) -> ModelConfig:
    """Return a copy of a config with the dropout rates of another one.

    Args:
        model: The config.
        source: The config whose rates are copied.
        rate: Replaces all rates of `source` that are not 0. If None, they are copied unchanged.
    """

    def copy_rates(config: ConfigPart, source_config: ConfigPart) -> ConfigPart:
        if config is None or source_config is None:
            return config
        rates: dict[str, Any] = {
            name: getattr(source_config, name) for name in DROPOUTS if hasattr(source_config, name)
        }
        if rate is not None:
            rates |= {name: rate for name, source_rate in rates.items() if source_rate}
        return replace(config, **rates)

    parts = ("embedding", "encoder", "decoder", "decoder_embedding")
    return replace(model, **{name: copy_rates(getattr(model, name), getattr(source, name)) for name in parts})


def _with_config(loaded: ModelBundle, model: ModelConfig) -> ModelBundle:
    """Return a model in eval mode with another config and the same weights."""
    with skip_init():
        bundle = ModelBundle(replace(loaded.config, model=model), loaded.tokenizer, loaded.source)
    assign(bundle, {name: tensor.detach() for name, tensor in loaded.named_tensors().items()}, "cpu")
    bundle.other_head_tensors = loaded.other_head_tensors
    return bundle.eval()


def model_to_save(loaded: ModelBundle, components: Components) -> ModelBundle:
    """Return the trained model with the dropout rates of its family, or of the model that training continued from.

    These are the rates for fine-tuning. The dropout of pre-training is a setting of its own.
    """
    init_model = components.init_model
    source = first_published_config(loaded.config.family) if init_model is None else init_model.config.model
    return _with_config(loaded, with_dropout(loaded.config.model, source))


# -- the samples --------------------------------------------------------------------------------------------------


def build_samples(components: Components) -> tuple[list[Sequence[Sample]], list[Sample]]:
    """Return the training samples of each phase, and the validation samples.

    Validation samples have the maximum length of the first phase. They are packed rows that are chosen at random until
    they have at least `eval_tokens` tokens together, or all rows if the split has fewer.

    Raises:
        HeedfulError: If the corpus has too few different documents.
    """
    settings = components.settings
    corpus = components.corpus
    is_held_out = held_out(corpus, settings.eval_fraction)
    train_documents, validation_documents = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    if not len(train_documents) or not len(validation_documents):  # `held_out` leaves neither empty otherwise
        count = len(corpus)
        reason = "there is only one document" if count == 1 else f"all {count:,} documents have the same text"
        raise HeedfulError(
            f"{reason}, so none can be held out for validation: give more documents, or set corpus.sample_by to split "
            "files into more documents"
        )
    builder, seed = components.builder, settings.train.seed
    builder.check_documents(len(train_documents), len(validation_documents))
    shape = _fixed_shape(components)
    train_rows = [builder.rows(components, train_documents, length, seed, shape) for length in settings.lengths]
    validation_seed = derive_seed(seed, Stream.VALIDATION)
    # without the fixed shape of training rows, so that validation rows have all sequences that fit
    validation_rows = builder.rows(
        components, validation_documents, settings.lengths[0], validation_seed, validation=True
    )
    chosen_rows: list[Sample] = []
    tokens_left = settings.eval_tokens
    for index in epoch_order(len(validation_rows), validation_seed, 0).tolist():  # shuffled, as rows are by length
        if tokens_left <= 0:
            break
        chosen_rows.append(validation_rows[index])
        tokens_left -= len(chosen_rows[-1])
    return train_rows, chosen_rows


def _fixed_shape(components: Components) -> FixedShape | None:
    """Return the shape that all packed rows have by the setting `sequences_per_pack`, or None if it is unset.

    Raises:
        HeedfulError: If rows of a fixed shape are not possible with the objective or the tokenizer.
    """
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

"""Creation of seq2seq models with random weights and a shared vocabulary, and the choice of BLEU as their metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.data import Dataset, Seq2SeqExample
from heedful.data.examples import Example
from heedful.errors import HeedfulError
from heedful.model.classic_config import ClassicConfig, RecurrentSeq2Seq
from heedful.model.config import (
    Buckets,
    EmbeddingConfig,
    Learned,
    ModelConfig,
    Rotary,
    Shaw,
    Sinusoidal,
    TransformerXl,
)
from heedful.model.vaswani import vaswani_config
from heedful.runs.finetune.init_settings import RecurrentInit, Seq2Seq, TransformerInit
from heedful.tasks.metrics.bleu import bleu_is_informative
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.seq2seq import BleuTokenizer, Seq2SeqSettings, has_bleu
from heedful.tokenizer import TokenizerSettings, train_tokenizer

MAX_TARGETS = 1000  # maximum targets for the decision whether BLEU counts words or characters
RELATIONS: dict[str, Rotary | Buckets | Shaw | TransformerXl] = {
    "rotary": Rotary(),
    "shaw": Shaw(),
    "buckets": Buckets(),
    "transformer_xl": TransformerXl(),
}


def seq2seq_model(
    init: Seq2Seq, texts: Sequence[str], seed: int, max_length: int | None, log: Callable[[str], None]
) -> ModelBundle:
    """Train a tokenizer, and create a model with random weights.

    Args:
        init: Settings of the model and of its tokenizer.
        texts: Source and target texts.
        seed: Seed of the weights.
        max_length: Maximum tokens of a text. If None, only learned positions limit the length.
        log: Receives a sentence about the model.
    """
    limits = [] if max_length is None else [max_length]
    if isinstance(init, TransformerInit) and init.positions == "learned":
        limits.append(init.longest)
    tokenizer_settings = TokenizerSettings(
        algorithm=init.tokenizer.algorithm,
        vocab_size=init.tokenizer.vocab_size,
        lower_case=init.tokenizer.lower_case,
        strip_accents=False,
        max_length=min(limits, default=None),
    )
    tokenizer = train_tokenizer(texts, tokenizer_settings)
    if isinstance(init, RecurrentInit):
        family, description = "heedful-classic", "two recurrent nets"
        model = recurrent_config(init.rnn, tokenizer.size, init.embedding_width)
    else:
        family, description = "heedful", "a Transformer"
        model = transformer_config(init, tokenizer.size)
    bundle = create(BundleConfig(family=family, model=model), tokenizer, seed=seed)
    log(
        f"{description} of {bundle.count():,} parameters with random weights, over {tokenizer.size:,} tokens of both "
        "texts"
    )
    return bundle


def recurrent_config(rnn: RecurrentSeq2Seq, vocabulary: int, width: int | None = None) -> ModelConfig:
    """Return the configuration of a recurrent encoder and decoder that share an embedding of unit variance.

    Args:
        rnn: Settings of encoder and decoder.
        vocabulary: Vocabulary size.
        width: Embedding dimension. If None, half of rnn.width.
    """
    width = width or rnn.width // 2
    embedding = EmbeddingConfig(vocabulary=vocabulary, width=width, scale=width**0.5, dropout=rnn.dropout)
    return ClassicConfig(embedding=embedding, reader=rnn)


def transformer_config(settings: TransformerInit, vocabulary: int) -> ModelConfig:
    """Return the configuration of the original Transformer, with the norms and positions of the settings."""
    config = vaswani_config(settings.shape, vocabulary)
    absolute: dict[str, Learned | Sinusoidal] = {"learned": Learned(count=settings.longest), "sine": Sinusoidal()}
    relation = RELATIONS.get(settings.positions)
    final_norm = settings.norm_at == "pre"
    assert config.encoder is not None and config.decoder is not None
    return replace(
        config,
        embedding=replace(config.embedding, positions=absolute.get(settings.positions)),
        encoder=replace(config.encoder, norm_at=settings.norm_at, final_norm=final_norm, relation=relation),
        decoder=replace(config.decoder, norm_at=settings.norm_at, final_norm=final_norm, relation=relation),
    )


def sample_targets(dataset: Dataset[Example], splits: Sequence[str]) -> list[str]:
    """Return the first targets of dev, else of train, or [] if the task is not seq2seq or sacrebleu is missing."""
    if dataset.kind is not Seq2SeqExample or not has_bleu():
        return []
    examples = dataset.examples("dev" if "dev" in splits else "train")
    return [example.rewritten for example in islice(examples, MAX_TARGETS) if isinstance(example, Seq2SeqExample)]


def default_bleu_units(references: Sequence[str]) -> BleuTokenizer | None:
    """Return the units that BLEU counts by default: words, or characters if most targets have too few words.

    The result is None if most targets have too few characters too.
    """
    candidates: tuple[BleuTokenizer, ...] = ("13a", "char")
    return next((units for units in candidates if bleu_is_informative(references, units)), None)


def check_bleu(task: TaskSettings, references: Sequence[str]) -> None:
    """Raise a HeedfulError if BLEU is the metric and most targets are too short for it, so that it is 0 or unstable."""
    if isinstance(task, Seq2SeqSettings) and task.metric == "bleu" and not bleu_is_informative(references, task.bleu):
        raise HeedfulError(
            "task.metric is bleu, which counts up to 4 words in a row, but most targets have fewer words with "
            f"task.bleu={task.bleu}: set task.bleu=char, for Chinese zh, or rank models by F1 of words: task.metric=f1"
        )

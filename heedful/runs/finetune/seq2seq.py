"""Seq2seq models with random weights and one vocabulary of source and target texts."""

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

TARGETS = 1000  # looked at to see what BLEU can count in them
RELATIONS: dict[str, Rotary | Buckets | Shaw | TransformerXl] = {
    "rotary": Rotary(),
    "shaw": Shaw(),
    "buckets": Buckets(),
    "transformer_xl": TransformerXl(),
}


def seq2seq_model(
    init: Seq2Seq, texts: Sequence[str], seed: int, longest: int | None, log: Callable[[str], None]
) -> ModelBundle:
    """Make the tokenizer and the model that training starts from."""
    options = init.tokenizer
    places = init.longest if isinstance(init, TransformerInit) and init.positions == "learned" else None
    limits = [most for most in (longest, places) if most is not None]
    names = TokenizerSettings(
        algorithm=options.algorithm,
        vocab_size=options.vocab_size,
        lower_case=options.lower_case,
        strip_accents=False,
        max_length=min(limits, default=None),
    )
    tokenizer = train_tokenizer(texts, names)
    if isinstance(init, RecurrentInit):
        family, model = "heedful-classic", recurrent_config(init.rnn, tokenizer.size, init.embedding_width)
    else:
        family, model = "heedful", transformer_config(init, tokenizer.size)
    bundle = create(BundleConfig(family=family, model=model), tokenizer, seed=seed)
    what = "two recurrent nets" if isinstance(init, RecurrentInit) else "a Transformer"
    log(f"{what} of {bundle.count():,} parameters with random weights, over {tokenizer.size:,} tokens of both texts")
    return bundle


def recurrent_config(writer: RecurrentSeq2Seq, vocabulary: int, width: int | None = None) -> ModelConfig:
    """Configuration of a recurrent encoder and decoder that share an embedding of unit variance."""
    width = width or writer.width // 2
    words = EmbeddingConfig(vocabulary=vocabulary, width=width, scale=width**0.5, dropout=writer.dropout)
    return ClassicConfig(embedding=words, reader=writer)


def transformer_config(settings: TransformerInit, vocabulary: int) -> ModelConfig:
    """BundleConfig of the original Transformer, or of one with other norms or positions."""
    config = vaswani_config(settings.shape, vocabulary)
    places: dict[str, Learned | Sinusoidal] = {"learned": Learned(count=settings.longest), "sine": Sinusoidal()}
    relation, final_norm = RELATIONS.get(settings.positions), settings.norm_at == "pre"
    assert config.encoder is not None and config.decoder is not None
    return replace(
        config,
        embedding=replace(config.embedding, positions=places.get(settings.positions)),
        encoder=replace(config.encoder, norm_at=settings.norm_at, final_norm=final_norm, relation=relation),
        decoder=replace(config.decoder, norm_at=settings.norm_at, final_norm=final_norm, relation=relation),
    )


def sample_targets(source: Dataset[Example], splits: Sequence[str]) -> list[str]:
    """The first targets of dev, or of train without dev; [] if the task has no targets, or BLEU is not installed."""
    if source.kind is not Seq2SeqExample or not has_bleu():
        return []
    examples = source.examples("dev" if "dev" in splits else "train")
    return [example.rewritten for example in islice(examples, TARGETS) if isinstance(example, Seq2SeqExample)]


def default_bleu_units(references: Sequence[str]) -> BleuTokenizer | None:
    """The default for what BLEU counts: words, or characters if most targets are short; None if they are too short."""
    ways: tuple[BleuTokenizer, ...] = ("13a", "char")
    return next((words for words in ways if bleu_is_informative(references, words)), None)


def check_bleu(task: TaskSettings, references: Sequence[str]) -> None:
    """Refuse BLEU as the metric if most targets are too short for it, so that it is 0 or depends on few targets."""
    if isinstance(task, Seq2SeqSettings) and task.metric == "bleu" and not bleu_is_informative(references, task.bleu):
        raise HeedfulError(
            f"task.metric is bleu, which counts up to 4 words in a row, but most targets have fewer as task.bleu="
            f"{task.bleu} parts them: set task.bleu=char, for Chinese zh, or let F1 of words compare: task.metric=f1"
        )

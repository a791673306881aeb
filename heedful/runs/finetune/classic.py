"""Classic models with new word embeddings: random, read from a file, or trained by skip-gram.

If a model is named, the classic model runs over the hidden states of that encoder instead, which stays frozen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from heedful.checkpoint import BundleConfig, ModelBundle, assign, create, load
from heedful.data.word_vectors import WordVectors, read_vectors
from heedful.errors import HeedfulError
from heedful.model.classic_config import ClassicConfig, HierarchicalPooling, PoolingConfigs
from heedful.model.config import EmbeddingConfig
from heedful.model.initialise import skip_init
from heedful.objectives import Sample
from heedful.objectives.skipgram import SkipGram
from heedful.runs.finetune.init_settings import ClassicInit, WordSettings
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.tokenizer.words import as_single_word, count_words, word_tokenizer
from heedful.train.settings import AdamW, TrainSettings
from heedful.train.trainer import Trainer

FAMILY = "heedful-classic"
ENDS, CLOSING = ".!?…。！？", "\"'”’»›)]）」』"  # what ends a sentence, and what may follow in the same token
LONGEST = 2048  # tokens of a skip-gram sample: all pairs of a batch are in memory at once
Said = Callable[[str], None]


def classic_model(
    settings: ClassicInit, texts: Sequence[str], seed: int, log: Said, *, all_texts: Iterable[str] | None = None
) -> ModelBundle:
    """Make the classic model that training starts from, without a head.

    Args:
        settings: Pooling, embeddings or encoder.
        texts: On which subwords and skip-gram are trained.
        seed: Of random weights.
        log: Receives sentences about what is made.
        all_texts: Whose words make up the vocabulary; None: `texts`.
    """
    if settings.model:
        return _in_context(settings, seed)
    words, mine, known = settings.words, list[str](), None
    if words.tokens == "subwords":
        names = TokenizerSettings(vocab_size=words.vocab_size, lower_case=words.lower_case)
        tokenizer = train_tokenizer(texts, names)
    else:
        tokenizer, known, mine = _words(words, texts if all_texts is None else all_texts)
    config = ClassicConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=words.width if known is None else known.vectors.shape[1],
            dropout=words.dropout,
        ),
        reader=with_sentence_ends(settings.reader, tokenizer),
    )
    bundle = create(BundleConfig(family=FAMILY, model=config), tokenizer, seed=seed)
    if (unknown := tokenizer.special.unknown) is not None:
        bundle.model.embedding.tokens.weight.data[unknown] = 0.0  # stays untrained where no text has unknown words
    log(f"a classic model of {bundle.count():,} parameters without its head, over {tokenizer.size:,} {words.tokens}")
    if known is not None:
        log(assign_vectors(bundle, known, mine))
    if settings.skipgram_steps:
        log(_learn(bundle, texts, settings.skipgram_steps, seed))
    return freeze_embeddings(bundle) if words.frozen else bundle


def _in_context(settings: ClassicInit, seed: int) -> ModelBundle:
    """A classic model over the hidden states of a frozen encoder."""
    inner = load(settings.model, revision=settings.revision or None)
    model = inner.config.model
    if inner.tokenizer is None or model.encoder is None or model.decoder is not None or type(model) is ClassicConfig:
        raise HeedfulError(
            f"{inner.source} is not an encoder with a tokenizer, which a classic model runs over: name another model"
        )
    config = ClassicConfig(
        embedding=model.embedding,
        encoder=model.encoder,
        reader=with_sentence_ends(settings.reader, inner.tokenizer),
        frozen=True,
    )
    bundle = create(BundleConfig(family=FAMILY, model=config), inner.tokenizer, seed=seed)
    known, fresh = inner.named_tensors(), bundle.named_tensors()
    body = {name for name in known if name.startswith(("embedding.", "encoder."))}
    assert body == {name for name in fresh if not name.startswith("over.")}
    assign(bundle, {name: (known if name in body else fresh)[name].detach() for name in fresh}, "cpu")
    bundle.source = f"a classic model over {inner.source}"
    return bundle.eval()


def _words(settings: WordSettings, texts: Iterable[str]) -> tuple[Tokenizer, WordVectors | None, list[str]]:
    """A tokenizer of the words of the texts, the most frequent first, and then of the file, up to the vocabulary size.

    Returns:
        The tokenizer, the vectors of the file, and the words of the texts.
    """
    counted = count_words(texts, lower_case=settings.lower_case)
    most = settings.vocab_size - 1  # without the token of unknown words
    mine = [word for word, _ in counted.most_common(most)]
    known = None
    if settings.vectors:
        form = partial(as_single_word, lower_case=settings.lower_case)
        known = read_vectors(settings.vectors, wanted=mine, max_other_words=most - len(mine), normalise=form)
        if not set(known.words) & set(mine):
            raise HeedfulError(
                f"{settings.vectors} has a vector for none of the {len(mine):,} words of the training texts: is it of "
                "another language?"
            )
    more = [] if known is None else known.words
    return word_tokenizer([*mine, *more], lower_case=settings.lower_case), known, mine


@torch.no_grad()
def assign_vectors(loaded: ModelBundle, known: WordVectors, mine: Sequence[str]) -> str:
    """Copy the vectors of a file into the embedding table, and say how many words of the texts have one."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.id(word) for word in known.words]
    there = [number for number, id in enumerate(ids) if id is not None]
    table = loaded.model.embedding.tokens.weight
    table[torch.tensor([ids[number] for number in there])] = torch.from_numpy(known.vectors[there]).to(table)
    have = len(set(mine) & set(known.words))
    return (
        f"{have:,} of {len(mine):,} words of the texts have a vector from the file, the others random ones; "
        f"{len(there) - have:,} more words of the file are known"
    )


def _learn(loaded: ModelBundle, texts: Sequence[str], steps: int, seed: int) -> str:
    """Train the embeddings by skip-gram, and report its loss in a sentence."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    samples = skipgram_samples(tokenizer, texts)
    if not samples:
        raise HeedfulError("no text has two words, as skip-gram needs: leave init.skipgram_steps out")
    unknown = [] if tokenizer.special.unknown is None else [tokenizer.special.unknown]
    width = loaded.config.model.embedding.width
    objective = SkipGram.of(samples, tokenizer.size, ignored=unknown, width=width)
    how = TrainSettings(max_steps=steps, batch_size=64, optimizer=AdamW(lr=1e-2), seed=seed)
    began = time.monotonic()
    losses = [step.loss for step in Trainer(loaded, objective, samples, how)]
    return (
        f"vectors learned by skip-gram in {time.monotonic() - began:.0f} s; the loss of a pair went from "
        f"{losses[0]:.2f} to {np.mean(losses[-20:]):.2f}"
    )


def skipgram_samples(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sample]:
    """Samples for skip-gram: texts of two words or more, long ones in parts of LONGEST tokens."""
    cut = [ids[start : start + LONGEST] for ids in tokenizer.ids(texts) for start in range(0, len(ids), LONGEST)]
    return [Sample.of([ids.tolist()], [[0] * len(ids)]) for ids in cut if len(ids) > 1]


def with_sentence_ends(reader: PoolingConfigs, tokenizer: Tokenizer) -> PoolingConfigs:
    """Return a pooling with the tokens that end a sentence, if it needs them.

    Raises:
        SettingError: If a token id is out of range, or no token ends a sentence.
    """
    if not isinstance(reader, HierarchicalPooling):
        return reader
    if wrong := [id for id in reader.ends if not 0 <= id < tokenizer.size]:
        raise HeedfulError(
            f"init.reader.ends has {wrong[0]}, which is no token: ids go from 0 to {tokenizer.size - 1}; leave ends "
            "out, and a sentence ends after . ! or ?"
        )
    if reader.ends:
        return reader
    marks, may = set(ENDS), set(ENDS + CLOSING)
    texts = (set(tokenizer.decode([id]).strip()) for id in range(tokenizer.size))  # however the vocabulary spells it
    ends = tuple(id for id, text in enumerate(texts) if text <= may and text & marks)
    if not ends:
        raise HeedfulError(
            f"no token ends a sentence: the vocabulary has none of {' '.join(ENDS)}; give their ids in "
            "init.reader.ends, or take another kind than hierarchical"
        )
    after = tokenizer.special.eos_or_sep  # which ends a text, and is no sentence of its own
    return replace(reader, ends=ends if after is None else (*ends, after))


def freeze_embeddings(loaded: ModelBundle) -> ModelBundle:
    """Return the classic model with frozen embeddings."""
    model = loaded.config.model
    assert isinstance(model, ClassicConfig)
    with skip_init():
        bundle = ModelBundle(replace(loaded.config, model=replace(model, frozen=True)), loaded.tokenizer, loaded.source)
    tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in loaded.named_tensors().items()}
    assign(bundle, tensors, "cpu")
    return bundle.eval()

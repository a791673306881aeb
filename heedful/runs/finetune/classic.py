"""A classic model made on the spot: its words from the training texts, its vectors drawn, read from a file or learned.

Where a model is named, its rows are read instead: words in context, from an encoder that stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from heedful.checkpoint import Config, Loaded, assign, create, load
from heedful.data.word_vectors import WordVectors, read_vectors
from heedful.errors import HeedfulError
from heedful.model.classic_config import ClassicConfig, Hierarchical, Readers
from heedful.model.config import EmbeddingConfig
from heedful.model.initialise import undrawn
from heedful.objectives import Sample
from heedful.objectives.skipgram import SkipGram
from heedful.runs.finetune.init_settings import Classic, WordSettings
from heedful.tokenizer import Tokenizer, TokenizerSettings, train
from heedful.tokenizer.words import count_words, one_word, word_tokenizer
from heedful.train.settings import AdamW, TrainSettings
from heedful.train.trainer import Trainer

FAMILY = "heedful-classic"
ENDS, CLOSING = ".!?…。！？", "\"'”’»›)]）」』"  # what ends a sentence, and what may stand in one token with it
LONGEST = 2048  # tokens of a text that skip-gram learns from at once: all pairs of a batch are in memory together
Said = Callable[[str], None]


def classic_model(
    settings: Classic, texts: Sequence[str], seed: int, log: Said, *, all_texts: Iterable[str] | None = None
) -> Loaded:
    """The classic model that training starts from, without a head.

    Words are those of every text, where `texts` are some of them: subwords and skip-gram learn from these.
    """
    if settings.model:
        return _in_context(settings, seed)
    words, mine, known = settings.words, list[str](), None
    if words.tokens == "subwords":
        names = TokenizerSettings(vocab_size=words.vocab_size, lower_case=words.lower_case)
        tokenizer = train(texts, names)
    else:
        tokenizer, known, mine = _words(words, texts if all_texts is None else all_texts)
    config = ClassicConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=words.width if known is None else known.rows.shape[1],
            dropout=words.dropout,
        ),
        reader=with_sentence_ends(settings.reader, tokenizer),
    )
    made = create(Config(family=FAMILY, model=config), tokenizer, seed=seed)
    if (unknown := tokenizer.special.unknown) is not None:
        made.model.embedding.tokens.weight.data[unknown] = 0.0  # where no text has one, it would stay as it was drawn
    log(f"a classic model of {made.count():,} parameters without its head, over {tokenizer.size:,} {words.tokens}")
    if known is not None:
        log(assign_vectors(made, known, mine))
    if settings.skipgram_steps:
        log(_learn(made, texts, settings.skipgram_steps, seed))
    return freeze_embeddings(made) if words.frozen else made


def _in_context(settings: Classic, seed: int) -> Loaded:
    """Over the rows of an encoder that is named."""
    inner = load(settings.model, revision=settings.revision or None)
    model = inner.config.model
    if inner.tokenizer is None or model.encoder is None or model.decoder is not None or type(model) is ClassicConfig:
        raise HeedfulError(
            f"{inner.source}: a classic model reads the rows of an encoder that has a tokenizer, and this one has none"
        )
    config = ClassicConfig(
        embedding=model.embedding,
        encoder=model.encoder,
        reader=with_sentence_ends(settings.reader, inner.tokenizer),
        frozen=True,
    )
    made = create(Config(family=FAMILY, model=config), inner.tokenizer, seed=seed)
    known, given = inner.named(), made.named()
    body = {name for name in known if name.startswith(("embedding.", "encoder."))}
    assert body == {name for name in given if not name.startswith("over.")}
    assign(made, {name: (known if name in body else given)[name].detach() for name in given}, "cpu")
    made.source = f"a classic model over {inner.source}"
    return made.eval()


def _words(settings: WordSettings, texts: Iterable[str]) -> tuple[Tokenizer, WordVectors | None, list[str]]:
    """The words of the texts, the most frequent first, and then those of the file, as many as there may be."""
    counted = count_words(texts, lower_case=settings.lower_case)
    most = settings.vocab_size - 1  # one stands for all others
    mine = [word for word, _ in counted.most_common(most)]
    known = None
    if settings.vectors:
        form = partial(one_word, lower_case=settings.lower_case)
        known = read_vectors(settings.vectors, wanted=mine, others=most - len(mine), form=form)
        if not set(known.words) & set(mine):
            raise HeedfulError(
                f"{settings.vectors} has a vector for none of the {len(mine):,} words of the training texts: is it of "
                "another language?"
            )
    more = [] if known is None else known.words
    return word_tokenizer([*mine, *more], lower_case=settings.lower_case), known, mine


@torch.no_grad()
def assign_vectors(loaded: Loaded, known: WordVectors, mine: Sequence[str]) -> str:
    """Give the tokens that are words of the file their vectors, and say how many words of the texts are among them."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.id(word) for word in known.words]
    there = [number for number, id in enumerate(ids) if id is not None]
    table = loaded.model.embedding.tokens.weight
    table[torch.tensor([ids[number] for number in there])] = torch.from_numpy(known.rows[there]).to(table)
    have = len(set(mine) & set(known.words))
    return (
        f"{have:,} of {len(mine):,} words of the texts have a vector from the file, the others are drawn; "
        f"{len(there) - have:,} more words of the file are known"
    )


def _learn(loaded: Loaded, texts: Sequence[str], steps: int, seed: int) -> str:
    """Train the vectors by skip-gram first."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    samples = skipgram_samples(tokenizer, texts)
    if not samples:
        raise HeedfulError("no text has two words, which skip-gram learns from: leave init.skipgram_steps out")
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
    """What skip-gram learns from: each text, a long one in parts; two words are the least."""
    cut = [ids[start : start + LONGEST] for ids in tokenizer.ids(texts) for start in range(0, len(ids), LONGEST)]
    return [Sample.of([ids.tolist()], [[0] * len(ids)]) for ids in cut if len(ids) > 1]


def with_sentence_ends(reader: Readers, tokenizer: Tokenizer) -> Readers:
    """A reader that reads sentences knows which tokens end one."""
    if not isinstance(reader, Hierarchical):
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
    after = tokenizer.special.separator  # which ends a text, and is no sentence of its own
    return replace(reader, ends=ends if after is None else (*ends, after))


def freeze_embeddings(loaded: Loaded) -> Loaded:
    """The same classic model, whose words learn no more."""
    model = loaded.config.model
    assert isinstance(model, ClassicConfig)
    with undrawn():
        made = Loaded(replace(loaded.config, model=replace(model, frozen=True)), loaded.tokenizer, loaded.source)
    tensors: dict[str, Tensor] = {name: each.detach() for name, each in loaded.named().items()}
    assign(made, tensors, "cpu")
    return made.eval()

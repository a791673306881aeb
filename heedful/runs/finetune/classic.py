"""Creation of classic models with new word embeddings, which are random, read from a file, or trained by skip-gram.

If the settings name an encoder, the classic model runs over its hidden states instead, and the encoder stays frozen.
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
SENTENCE_ENDS = ".!?…。！？"
CLOSING_MARKS = "\"'”’»›)]）」』"  # marks that may follow the end of a sentence in the same token
MAX_SKIPGRAM_TOKENS = 2048  # maximum tokens of a skip-gram sample, since all pairs of a batch are in memory


def classic_model(
    settings: ClassicInit,
    texts: Sequence[str],
    seed: int,
    log: Callable[[str], None],
    *,
    all_texts: Iterable[str] | None = None,
) -> ModelBundle:
    """Create the classic model that training starts from, without a head.

    Args:
        settings: Pooling, and word embeddings or an encoder.
        texts: Texts on which subwords and skip-gram are trained.
        seed: Seed of random weights.
        log: Receives sentences about the model.
        all_texts: Texts from whose words the vocabulary is built. If None, `texts`.
    """
    if settings.model:
        return _over_encoder(settings, seed)
    words = settings.words
    text_words: list[str] = []
    file_vectors: WordVectors | None = None
    if words.tokens == "subwords":
        tokenizer_settings = TokenizerSettings(vocab_size=words.vocab_size, lower_case=words.lower_case)
        tokenizer = train_tokenizer(texts, tokenizer_settings)
    else:
        tokenizer, file_vectors, text_words = _build_word_tokenizer(words, texts if all_texts is None else all_texts)
    config = ClassicConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=words.width if file_vectors is None else file_vectors.vectors.shape[1],
            dropout=words.dropout,
        ),
        reader=with_sentence_ends(settings.reader, tokenizer),
    )
    bundle = create(BundleConfig(family=FAMILY, model=config), tokenizer, seed=seed)
    if (unknown := tokenizer.special.unknown) is not None:
        bundle.model.embedding.tokens.weight.data[unknown] = 0.0  # not trained if no text has unknown words
    log(f"a classic model of {bundle.count():,} parameters without its head, over {tokenizer.size:,} {words.tokens}")
    if file_vectors is not None:
        log(assign_vectors(bundle, file_vectors, text_words))
    if settings.skipgram_steps:
        log(_train_skipgram(bundle, texts, settings.skipgram_steps, seed))
    return freeze_embeddings(bundle) if words.frozen else bundle


def _over_encoder(settings: ClassicInit, seed: int) -> ModelBundle:
    """Return a classic model over the hidden states of a frozen encoder."""
    encoder = load(settings.model, revision=settings.revision or None)
    model = encoder.config.model
    if encoder.tokenizer is None or model.encoder is None or model.decoder is not None or type(model) is ClassicConfig:
        raise HeedfulError(
            f"{encoder.source} is not an encoder with a tokenizer, which a classic model runs over: name another model"
        )
    config = ClassicConfig(
        embedding=model.embedding,
        encoder=model.encoder,
        reader=with_sentence_ends(settings.reader, encoder.tokenizer),
        frozen=True,
    )
    bundle = create(BundleConfig(family=FAMILY, model=config), encoder.tokenizer, seed=seed)
    encoder_tensors = {
        name: tensor
        for name, tensor in encoder.named_tensors().items()
        if name.startswith(("embedding.", "encoder."))  # without a head
    }
    initial_tensors = bundle.named_tensors()
    assert encoder_tensors.keys() == {name for name in initial_tensors if not name.startswith("over.")}
    tensors = {name: tensor.detach() for name, tensor in (initial_tensors | encoder_tensors).items()}
    assign(bundle, tensors, "cpu")
    bundle.source = f"a classic model over {encoder.source}"
    return bundle.eval()


def _build_word_tokenizer(
    settings: WordSettings, texts: Iterable[str]
) -> tuple[Tokenizer, WordVectors | None, list[str]]:
    """Build a tokenizer whose vocabulary is the most frequent words of texts, then words of a file of vectors.

    Returns:
        The tokenizer, the vectors of the file or None without a file, and the words of the texts.

    Raises:
        HeedfulError: If the file has no vector for any word of the texts.
    """
    counts = count_words(texts, lower_case=settings.lower_case)
    max_words = settings.vocab_size - 1  # without the token of unknown words
    text_words = [word for word, _ in counts.most_common(max_words)]
    if not settings.vectors:
        return word_tokenizer(text_words, lower_case=settings.lower_case), None, text_words
    file_vectors = read_vectors(
        settings.vectors,
        wanted=text_words,
        max_other_words=max_words - len(text_words),
        normalise=partial(as_single_word, lower_case=settings.lower_case),
    )
    if not set(file_vectors.words) & set(text_words):
        raise HeedfulError(
            f"{settings.vectors} has a vector for none of the {len(text_words):,} words of the training texts: is it "
            "of another language?"
        )
    tokenizer = word_tokenizer([*text_words, *file_vectors.words], lower_case=settings.lower_case)
    return tokenizer, file_vectors, text_words


@torch.no_grad()
def assign_vectors(loaded: ModelBundle, vectors: WordVectors, text_words: Sequence[str]) -> str:
    """Copy the vectors of a file into the embedding table. Return a sentence about how many words have a vector."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.id(word) for word in vectors.words]
    indices = [index for index, id in enumerate(ids) if id is not None]  # indices in the file of words with a token
    table = loaded.model.embedding.tokens.weight
    token_ids = torch.tensor([ids[index] for index in indices])
    table[token_ids] = torch.from_numpy(vectors.vectors[indices]).to(table)
    covered = len(set(text_words) & set(vectors.words))
    return (
        f"{covered:,} of {len(text_words):,} words of the texts have a vector from the file, the others random ones; "
        f"{len(indices) - covered:,} more words of the file are known"
    )


def _train_skipgram(loaded: ModelBundle, texts: Sequence[str], steps: int, seed: int) -> str:
    """Train the embeddings by skip-gram, and return a sentence with the loss."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    samples = skipgram_samples(tokenizer, texts)
    if not samples:
        raise HeedfulError("no text has two words, as skip-gram needs: leave init.skipgram_steps out")
    unknown = [] if tokenizer.special.unknown is None else [tokenizer.special.unknown]
    width = loaded.config.model.embedding.width
    objective = SkipGram.of(samples, tokenizer.size, ignored=unknown, width=width)
    settings = TrainSettings(max_steps=steps, batch_size=64, optimizer=AdamW(lr=1e-2), seed=seed)
    start = time.monotonic()
    losses = [step.loss for step in Trainer(loaded, objective, samples, settings)]
    seconds = time.monotonic() - start
    return (
        f"vectors learned by skip-gram in {seconds:.0f} s; the loss of a pair went from "
        f"{losses[0]:.2f} to {np.mean(losses[-20:]):.2f}"
    )


def skipgram_samples(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sample]:
    """Return samples for skip-gram: chunks of up to MAX_SKIPGRAM_TOKENS tokens of each text.

    A chunk of a single token is left out, since it has no pair of words.
    """
    samples = []
    for ids in tokenizer.ids(texts):
        for start in range(0, len(ids), MAX_SKIPGRAM_TOKENS):
            chunk = ids[start : start + MAX_SKIPGRAM_TOKENS]
            if len(chunk) > 1:
                samples.append(Sample.of([chunk.tolist()], [[0] * len(chunk)]))
    return samples


def with_sentence_ends(reader: PoolingConfigs, tokenizer: Tokenizer) -> PoolingConfigs:
    """Set the ids of tokens that end a sentence in a hierarchical pooling that has none. Others are unchanged.

    Raises:
        HeedfulError: If an id is out of range, or if no token ends a sentence.
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
    marks, allowed = set(SENTENCE_ENDS), set(SENTENCE_ENDS + CLOSING_MARKS)
    # decoded, so that characters do not depend on how the vocabulary spells tokens
    characters_of_tokens = (set(tokenizer.decode([id]).strip()) for id in range(tokenizer.size))
    ends = tuple(
        id for id, characters in enumerate(characters_of_tokens) if characters <= allowed and characters & marks
    )
    if not ends:
        raise HeedfulError(
            f"no token ends a sentence: the vocabulary has none of {' '.join(SENTENCE_ENDS)}; give their ids in "
            "init.reader.ends, or take another kind than hierarchical"
        )
    end_of_text = tokenizer.special.eos_or_sep  # belongs to the last sentence
    return replace(reader, ends=ends if end_of_text is None else (*ends, end_of_text))


def freeze_embeddings(loaded: ModelBundle) -> ModelBundle:
    """Return a classic model with the same weights and frozen embeddings."""
    model = loaded.config.model
    assert isinstance(model, ClassicConfig)
    with skip_init():
        bundle = ModelBundle(replace(loaded.config, model=replace(model, frozen=True)), loaded.tokenizer, loaded.source)
    tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in loaded.named_tensors().items()}
    assign(bundle, tensors, "cpu")
    return bundle.eval()

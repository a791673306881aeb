"""Random streams: constants that are mixed into a seed, so that random numbers for different purposes differ."""

from __future__ import annotations

from enum import IntEnum


class Stream(IntEnum):
    """A purpose of random numbers; `data.sampler.derive_seed` mixes its value into a seed.

    A comment lists the other inputs of the seed. Members with the same value are aliases. That is harmless: one of them
    is mixed into the seed of a run, the other one into the key of a sample or into a constant, so that they never yield
    the same seed. New streams get new values. Values never change, because results would change with them.
    """

    DROPOUT = 1  # with the seed, step, micro-batch and rank
    SKIPGRAM_NOISE = 1  # with a sample's key: negative samples
    WORD_REPLACEMENT = 1  # with an augmented sample's key: words that are replaced
    UNMASKED_SEQUENCES = 2  # with a sample's key: sequences that stay unmasked
    SEGMENT_PAIRS = 3  # with the seed, epoch and document
    PACKING = 4  # with the seed: the order in which sequences are packed
    VALIDATION = 5  # with the seed: validation rows, and the rotation of an epoch's rows
    EXTRA_MODULES = 6  # with the seed: modules that are trained together with a student
    PROJECTION = 7  # with the seed: projections of a student's hidden states
    AUGMENTATION = 8  # with the seed: augmented samples
    TOKENIZER_DOCUMENTS = 8  # with a document's index only: documents that a tokenizer is trained on
    SENTENCE_WINDOWS = 11  # with the seed and document
    BASELINE_WORDS = 11  # with the seed: examples of the bag-of-words baseline
    WINDOW_PAIRS = 12  # with the seed
    TEXT_POOL = 13  # with the seed: texts whose nearest neighbours are found
    LISTS = 14  # with the seed, epoch and query: documents of a query that are used in training

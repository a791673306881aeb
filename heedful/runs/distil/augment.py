"""Data augmentation for `heedful distil`: some words of a text are replaced by predictions of a masked language model.

TinyBERT uses this method (Jiao et al. 2020, section 4) for words of a single token. It masks one word after the other;
here all chosen words of a text are masked together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from heedful.atomic_io import atomic_path, write_synced
from heedful.checkpoint import ModelBundle, load
from heedful.data import Example, TaggedExample
from heedful.data.sampler import derive_seed
from heedful.errors import HeedfulError, ModelError
from heedful.objectives.random_numbers import is_text_token, uniform
from heedful.packed import Packed
from heedful.random_streams import Stream
from heedful.runs.distil.settings import AugmentSettings
from heedful.tasks.answering import strip_span
from heedful.tasks.specs import SPECS
from heedful.tokenizer import Encoding, PreTokenized, Tokenizer
from heedful.train.ranks import Ranks

BATCH_EXAMPLES = 64  # examples in a batch of the masked language model
Text = str | PreTokenized
Variant = str | list[str]  # a text with replaced words; as a list of words if the text was pre-tokenized


def augmented_examples(
    settings: AugmentSettings,
    task: str,
    teacher: str,
    examples: Sequence[Example],
    path: Path,
    *,
    label: str,
    seed: int,
    ranks: Ranks,
    log: Callable[[str], None],
) -> list[Example]:
    """Return augmented variants of examples. The first rank writes a missing file of variants; all ranks read it.

    Args:
        settings: How many variants to make, the share of replaced words, and the masked language model.
        task: Name of the task.
        teacher: The teacher's folder or name. Its masked head predicts the words, unless the settings name a model.
        examples: Examples to augment.
        path: JSON lines file with the variants.
        label: The label of all variants, a placeholder that the loss ignores.
        seed: Random seed.
        ranks: The processes that train together.
        log: Receives a message before the variants are made.
    """
    if ranks.is_main and not path.exists():
        log(f"{settings.copies * len(examples):,} more texts are made, with words replaced")
        variants = augmented_inputs(load_masked_lm(teacher, settings), examples, settings, seed)
        with atomic_path(path) as temporary:
            write_synced(temporary, (f"{json.dumps(variant, allow_nan=False)}\n".encode() for variant in variants))
    ranks.barrier()
    with path.open(encoding="utf-8") as file:
        inputs = [json.loads(line) for line in file]
    return list(SPECS[task].example.from_inputs(inputs, label))


def check_augmentation(task: str, name: str, settings: AugmentSettings) -> None:
    """Check that the examples of a task can be augmented by a model, before anything is written.

    Raises:
        ModelError: If answers of the task may change with a word, or the model has no masked head.
    """
    if not SPECS[task].replaceable:
        raise ModelError(f"augment cannot be used for {task}, whose answers may change with a word: leave augment out")
    load_masked_lm(name, settings)


def load_masked_lm(name: str, settings: AugmentSettings) -> ModelBundle:
    """Load the model that the settings name, or else the model `name`, with its masked head.

    Raises:
        ModelError: If the model has no masked head, or no mask token.
    """
    model_name = settings.model or name
    try:
        model = load(model_name, head="masked_lm")
    except HeedfulError as error:
        raise ModelError(
            f"words are replaced by a masked language model, and {model_name} has no such head ({error}): set "
            "augment.model to a folder that has one, such as the model that the teacher was fine-tuned from, or leave "
            "augment out"
        ) from None
    if model.tokenizer is None or model.tokenizer.special.mask is None:
        raise ModelError(f"{model_name} has no tokenizer with a mask token: set augment.model to a model that has one")
    return model


def augmented_inputs(
    model: ModelBundle, examples: Sequence[Example], settings: AugmentSettings, seed: int
) -> Iterator[Variant | list[Variant]]:
    """Yield variants of all examples, `copies` times in the order of the examples.

    A variant is a text, a list of words for a tagged example, or a list of texts for an example with several.
    """
    replacer = WordReplacer(model, settings)
    for copy in range(settings.copies):
        for start in range(0, len(examples), BATCH_EXAMPLES):
            texts_by_example = [_texts(example) for example in examples[start : start + BATCH_EXAMPLES]]
            texts: list[Text] = []
            keys: list[int] = []
            for example_index, example_texts in enumerate(texts_by_example, start=start):
                for text_index, text in enumerate(example_texts):
                    texts.append(text)
                    keys.append(derive_seed(seed, Stream.AUGMENTATION, copy, example_index, text_index))
            replaced = iter(replacer(texts, keys))
            for example_texts in texts_by_example:
                variant = [next(replaced) for _ in example_texts]
                yield variant[0] if len(variant) == 1 else variant


def _texts(example: Example) -> Sequence[Text]:
    """Return the texts of an example. The words of a tagged example are one pre-tokenized text."""
    if isinstance(example, TaggedExample):
        return [PreTokenized(list(example.words))]
    return list(example.texts)


class WordReplacer:
    """Replaces words of a single token by tokens that are sampled from the predictions of a masked language model.

    Args:
        model: The masked language model, with its tokenizer.
        settings: The share of replaced words, and how many of the likeliest tokens to sample from.
    """

    def __init__(self, model: ModelBundle, settings: AugmentSettings) -> None:
        self.model = model.eval()
        self.settings = settings
        assert model.tokenizer is not None
        self.tokenizer: Tokenizer = model.tokenizer
        all_ids = np.arange(self.tokenizer.size, dtype=np.int32)
        is_word = is_text_token(all_ids, self.tokenizer) & ~self.tokenizer.continues
        unknown = self.tokenizer.special.unknown
        if unknown is not None:
            is_word[unknown] = False
        for id in np.flatnonzero(is_word):  # punctuation is not a word, or "much." could become "muchsaw"
            is_word[id] = any(map(str.isalnum, self.tokenizer.decode([int(id)], skip_special=False)))
        self._is_word = torch.from_numpy(is_word)  # [vocabulary], True for tokens that are whole words

    def __call__(self, texts: Sequence[Text], keys: Sequence[int]) -> list[Variant]:
        """Return a variant of each text, sampled by its key. A text without a word of a single token is unchanged."""
        limit = self.model.max_length
        encodings = self.tokenizer.encode_batch(
            list(texts), max_length=limit, truncate="longest_first" if limit else "error"
        )
        masked_positions = [
            self._sample_positions(encoding, key) for encoding, key in zip(encodings, keys, strict=True)
        ]
        new_words = self._sample_words(encodings, masked_positions, keys)
        return [
            _with_replaced_words(text, encoding, dict(zip(positions, words, strict=True)))
            for text, encoding, positions, words in zip(texts, encodings, masked_positions, new_words, strict=True)
        ]

    def _sample_positions(self, encoding: Encoding, key: int) -> list[int]:
        """Sample the token positions of the words to replace, sorted.

        Only words of a single token are replaced: a share `replace_prob` of all words, but at least one.
        """
        token_counts = Counter(word_index for word_index in encoding.words if word_index is not None)
        replaceable = [
            position
            for position, word_index in enumerate(encoding.words)
            if word_index is not None and token_counts[word_index] == 1 and bool(self._is_word[encoding.ids[position]])
        ]
        count = min(len(replaceable), max(1, round(self.settings.replace_prob * len(token_counts))))
        order = np.argsort(uniform(key, max(1, len(replaceable)))[: len(replaceable)], kind="stable")
        return sorted(replaceable[index] for index in order[:count])

    @torch.inference_mode()
    def _sample_words(
        self, encodings: Sequence[Encoding], masked_positions: Sequence[list[int]], keys: Sequence[int]
    ) -> list[list[str]]:
        """Sample new words for the masked positions of each text, from the model's top-k predictions."""
        mask = self.tokenizer.special.mask
        assert mask is not None and self.model.head is not None
        ids = [
            [mask if position in positions else id for position, id in enumerate(encoding.ids)]
            for encoding, positions in zip(encodings, map(set, masked_positions), strict=True)
        ]
        batch = Packed.of(ids, [encoding.types for encoding in encodings])
        masked_rows = [
            start + position
            for start, positions in zip(batch.bounds, masked_positions, strict=False)
            for position in positions
        ]
        if not masked_rows:
            return [[] for _ in encodings]
        head = getattr(self.model.head, "masked", self.model.head)
        scores = head(self.model.hidden_states(batch, output_rows=torch.tensor(masked_rows)), batch)
        scores = scores[:, : len(self._is_word)].float().masked_fill(~self._is_word, -torch.inf)
        top_scores, top_ids = scores.topk(min(self.settings.top_k, int(self._is_word.sum())), -1)
        cumulative_probabilities = top_scores.softmax(-1).double().cumsum(-1)  # [masked positions, top_k]
        candidates = zip(cumulative_probabilities, top_ids, strict=True)  # for each masked position of all texts
        words_by_text: list[list[str]] = []
        for positions, key in zip(masked_positions, keys, strict=True):
            random_numbers = uniform(derive_seed(key, 1), max(1, len(positions)))[: len(positions)]
            words = []
            for random_number in random_numbers:
                cumulative, candidate_ids = next(candidates)
                threshold = float(random_number) * float(cumulative[-1])
                rank = min(int(torch.searchsorted(cumulative, threshold)), len(candidate_ids) - 1)
                words.append(self.tokenizer.decode([int(candidate_ids[rank])], skip_special=False).strip())
            words_by_text.append(words)
        return words_by_text


def _with_replaced_words(text: Text, encoding: Encoding, new_words: dict[int, str]) -> Variant:
    """Return the text with replaced words. The keys of `new_words` are token positions."""
    if isinstance(text, PreTokenized):
        words = list(text.words)
        for position, new_word in new_words.items():
            word_index = encoding.words[position]
            assert word_index is not None
            words[word_index] = new_word
        return words
    for position in sorted(new_words, reverse=True):  # last word first, so that offsets of earlier ones stay valid
        start, stop = strip_span(text, *encoding.offsets[position])  # some tokenizers include the space before a word
        text = text[:start] + new_words[position] + text[stop:]
    return text

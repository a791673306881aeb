"""Data augmentation: some words of each text are replaced by predictions of a masked language model.

After Jiao et al. 2020, section 4 (words of a single token, by BERT's predictions), but all chosen words are masked at
once.
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

BATCH = 64  # texts that the model reads at once
Text = str | PreTokenized
Variant = str | list[str]  # a text, or the words of one


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
    """Return variants of examples; the first rank makes them once, in a file, which the others read.

    Args:
        settings: How many variants, and how much of a text is replaced.
        task: Of the examples.
        teacher: The teacher's folder or name, whose masked head is used unless the settings name a model.
        examples: To be varied.
        path: The file.
        label: Of the variants, which means nothing.
        seed: Random seed.
        ranks: The processes that train together.
        log: Receives a sentence.
    """
    if ranks.is_main and not path.exists():
        log(f"{settings.copies * len(examples):,} more texts are made, with words replaced")
        variants = augmented_inputs(load_masked_lm(teacher, settings), examples, settings, seed)
        with atomic_path(path) as part:
            write_synced(part, (f"{json.dumps(variant, allow_nan=False)}\n".encode() for variant in variants))
    ranks.barrier()
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return list(SPECS[task].example.from_inputs(rows, label))


def check_augmentation(task: str, name: str, settings: AugmentSettings) -> None:
    """Refuse a task whose answers change with words, or a model without a masked head, before anything is written."""
    if not SPECS[task].replaceable:
        raise ModelError(f"augment cannot be used for {task}, whose answers may change with a word: leave augment out")
    load_masked_lm(name, settings)


def load_masked_lm(name: str, settings: AugmentSettings) -> ModelBundle:
    """Load the model that the settings name, or the teacher, with its masked head.

    Raises:
        ModelError: If it has no masked head, or no mask token.
    """
    source = settings.model or name
    try:
        model = load(source, head="masked_lm")
    except HeedfulError as error:
        raise ModelError(
            f"words are replaced by a masked language model, and {source} has no such head ({error}): set "
            "augment.model to a folder that has one, such as the model that the teacher was fine-tuned from, or leave "
            "augment out"
        ) from None
    if model.tokenizer is None or model.tokenizer.special.mask is None:
        raise ModelError(f"{source} has no tokenizer with a mask token: set augment.model to a model that has one")
    return model


def augmented_inputs(
    model: ModelBundle, examples: Sequence[Example], settings: AugmentSettings, seed: int
) -> Iterator[Variant | list[Variant]]:
    """Yield variants of all examples, `copies` times: texts, pairs of texts, or lists of words."""
    replacer = WordReplacer(model, settings)
    for turn in range(settings.copies):
        for start in range(0, len(examples), BATCH):
            chunk = examples[start : start + BATCH]
            parts = [_parts(example) for example in chunk]
            flat = [text for texts in parts for text in texts]
            keys = [
                derive_seed(seed, Stream.AUGMENTATION, turn, start + n, m)
                for n, texts in enumerate(parts)
                for m in range(len(texts))
            ]
            replaced = iter(replacer(flat, keys))
            for texts in parts:
                variant = [next(replaced) for _ in texts]
                yield variant[0] if len(variant) == 1 else variant


def _parts(example: Example) -> Sequence[Text]:
    """The texts of an example, which are varied one by one."""
    if isinstance(example, TaggedExample):
        return [PreTokenized(list(example.words))]
    return list(example.texts)


class WordReplacer:
    """Replaces words of a single token by others, sampled from the most likely tokens by their probability."""

    def __init__(self, model: ModelBundle, settings: AugmentSettings) -> None:
        self.model, self.settings = model.eval(), settings
        assert model.tokenizer is not None
        self.tokenizer: Tokenizer = model.tokenizer
        words = (
            is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer) & ~self.tokenizer.continues
        )
        unknown = self.tokenizer.special.unknown
        if unknown is not None:
            words[unknown] = False
        for id in np.flatnonzero(words):  # without punctuation: "much." could become "muchsaw"
            words[id] = any(map(str.isalnum, self.tokenizer.decode([int(id)], skip_special=False)))
        self._words = torch.from_numpy(words)

    def __call__(self, texts: Sequence[Text], keys: Sequence[int]) -> list[Variant]:
        """Return a variant of each text, sampled by its key. A text without a word of a single token is unchanged."""
        limit = self.model.max_length
        encoded = self.tokenizer.encode_batch(
            list(texts), max_length=limit, truncate="longest_first" if limit else "error"
        )
        chosen = [self._chosen(encoding, key) for encoding, key in zip(encoded, keys, strict=True)]
        filled = self._filled(encoded, chosen, keys)
        return [
            _written(text, encoding, dict(zip(places, names, strict=True)))
            for text, encoding, places, names in zip(texts, encoded, chosen, filled, strict=True)
        ]

    def _chosen(self, encoded: Encoding, key: int) -> list[int]:
        """Positions of words to replace: words of a single token, a share of all words and at least one."""
        of = Counter(word for word in encoded.words if word is not None)
        single = [
            place
            for place, word in enumerate(encoded.words)
            if word is not None and of[word] == 1 and bool(self._words[encoded.ids[place]])
        ]
        count = min(len(single), max(1, round(self.settings.replace_prob * len(of))))
        order = np.argsort(uniform(key, max(1, len(single)))[: len(single)], kind="stable")
        return sorted(single[number] for number in order[:count])

    @torch.inference_mode()
    def _filled(self, encoded: Sequence[Encoding], chosen: Sequence[list[int]], keys: Sequence[int]) -> list[list[str]]:
        mask = self.tokenizer.special.mask
        assert mask is not None and self.model.head is not None
        ids = [
            [mask if place in places else id for place, id in enumerate(encoding.ids)]
            for encoding, places in zip(encoded, map(set, chosen), strict=True)
        ]
        batch = Packed.of(ids, [encoding.types for encoding in encoded])
        at = [start + place for start, places in zip(batch.bounds, chosen, strict=False) for place in places]
        if not at:
            return [[] for _ in encoded]
        head = getattr(self.model.head, "masked", self.model.head)
        scores = head(self.model.hidden_states(batch, output_rows=torch.tensor(at)), batch)[
            :, : len(self._words)
        ].float()
        scores = scores.masked_fill(~self._words, -torch.inf)
        best, tokens = scores.topk(min(self.settings.top_k, int(self._words.sum())), -1)
        shares = best.softmax(-1).double().cumsum(-1)
        rows, row = [], 0
        for places, key in zip(chosen, keys, strict=True):
            drawn = uniform(derive_seed(key, 1), max(1, len(places)))
            names = []
            for number in range(len(places)):
                place = int(torch.searchsorted(shares[row], float(drawn[number]) * float(shares[row][-1])))
                token = int(tokens[row][min(place, tokens.shape[1] - 1)])
                names.append(self.tokenizer.decode([token], skip_special=False).strip())
                row += 1
            rows.append(names)
        return rows


def _written(text: Text, encoded: Encoding, names: dict[int, str]) -> Variant:
    """The text with replaced words; `names` are the new ones by token position."""
    if isinstance(text, PreTokenized):
        words = list(text.words)
        for place, name in names.items():
            word = encoded.words[place]
            assert word is not None
            words[word] = name
        return words
    for place in sorted(names, reverse=True):
        start, stop = strip_span(text, *encoded.offsets[place])  # some tokenizers count the space before a word to it
        text = text[:start] + names[place] + text[stop:]
    return text

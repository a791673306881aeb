"""More texts without labels: some words of each text replaced by what a masked language model finds in their place.

After Jiao et al. 2020, section 4 (single-piece words by BERT's predictions), but with all chosen words hidden at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.atomic_io import put, whole
from heedful.checkpoint import Loaded, load
from heedful.data import Example, Tagged
from heedful.data.sampler import mixed
from heedful.errors import HeedfulError
from heedful.objectives.random_numbers import is_text_token, uniform
from heedful.packed import Packed
from heedful.runs.distil.settings import AugmentSettings
from heedful.tasks.answering import strip_span
from heedful.tasks.specs import SPECS
from heedful.tokenizer import Encoded, Item, Tokenizer, Words
from heedful.train.ranks import Ranks

TOGETHER = 64  # texts that the model reads at once
DRAWN = 8  # what a seed is mixed with here


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
    if ranks.first and not path.exists():
        log(f"{settings.copies * len(examples):,} more texts are made, with words replaced")
        variants = augmented_inputs(load_masked_lm(teacher, settings), examples, settings, seed)
        with whole(path) as part:
            put(part, (f"{json.dumps(variant, allow_nan=False)}\n".encode() for variant in variants))
    ranks.wait()
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return list(SPECS[task].example.of_inputs(rows, label))


def check_augmentation(task: str, name: str, settings: AugmentSettings) -> None:
    """Refuse what cannot be made, before anything is written."""
    if not SPECS[task].replaceable:
        raise HeedfulError(
            f"more texts cannot be made for {task}: where a word is replaced, the answer may go with it. Leave more out"
        )
    load_masked_lm(name, settings)


def load_masked_lm(name: str, settings: AugmentSettings) -> Loaded:
    """The teacher with its masked head, or the model that is named; refused where there is none."""
    asked = settings.model or name
    try:
        found = load(asked, head="masked_lm")
    except HeedfulError as error:
        raise HeedfulError(
            f"words are replaced by a masked language model, and {asked} has no such head ({error}): set augment.model "
            "to a folder that has one, such as the model that the teacher was fine-tuned from, or leave augment out"
        ) from None
    if found.tokenizer is None or found.tokenizer.special.mask is None:
        raise HeedfulError(f"{asked} has no tokenizer with a mask token: set augment.model to a model that has one")
    return found


def augmented_inputs(model: Loaded, examples: Sequence[Example], settings: AugmentSettings, seed: int) -> Iterator[Any]:
    """Inputs: texts, pairs of them, or lists of words, as many as there are times examples."""
    replacer = WordReplacer(model, settings)
    for turn in range(settings.copies):
        for start in range(0, len(examples), TOGETHER):
            chunk = examples[start : start + TOGETHER]
            parts = [_parts(each) for each in chunk]
            flat = [text for each in parts for text in each]
            keys = [mixed(seed, DRAWN, turn, start + n, m) for n, each in enumerate(parts) for m in range(len(each))]
            made = iter(replacer(flat, keys))
            for each in parts:
                found = [next(made) for _ in each]
                yield found[0] if len(found) == 1 else found


def _parts(example: Example) -> list[Item]:
    """What is written anew, each by itself."""
    if isinstance(example, Tagged):
        return [Words(list(example.words))]
    return list(example.texts)


class WordReplacer:
    """Replaces words of one piece each by others of one piece, drawn among the most likely by their probability."""

    def __init__(self, model: Loaded, settings: AugmentSettings) -> None:
        self.model, self.settings = model.eval(), settings
        assert model.tokenizer is not None
        self.tokenizer: Tokenizer = model.tokenizer
        words = (
            is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer) & ~self.tokenizer.continues
        )
        unknown = self.tokenizer.special.unknown
        if unknown is not None:
            words[unknown] = False
        for id in np.flatnonzero(words):  # signs are no words: "much." could become "muchsaw"
            words[id] = any(map(str.isalnum, self.tokenizer.decode([int(id)], skip_special=False)))
        self._words = torch.from_numpy(words)

    def __call__(self, texts: Sequence[Item], keys: Sequence[int]) -> list[Any]:
        """A variant of each; the draws depend on its key alone. A text without a word of one piece stays as it is."""
        limit = self.model.limit
        cut: Any = {"max_length": limit, "truncate": "longest_first"} if limit else {}
        encoded = self.tokenizer.encode_batch(list(texts), **cut)
        chosen = [self._chosen(each, key) for each, key in zip(encoded, keys, strict=True)]
        filled = self._filled(encoded, chosen, keys)
        return [
            _written(text, each, dict(zip(places, names, strict=True)))
            for text, each, places, names in zip(texts, encoded, chosen, filled, strict=True)
        ]

    def _chosen(self, encoded: Encoded, key: int) -> list[int]:
        """Places of words that are one piece: a share of all words, one at least."""
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
    def _filled(self, encoded: Sequence[Encoded], chosen: Sequence[list[int]], keys: Sequence[int]) -> list[list[str]]:
        mask = self.tokenizer.special.mask
        assert mask is not None and self.model.head is not None
        ids = [
            [mask if place in places else id for place, id in enumerate(each.ids)]
            for each, places in zip(encoded, map(set, chosen), strict=True)
        ]
        batch = Packed.of(ids, [each.types for each in encoded])
        at = [start + place for start, places in zip(batch.bounds, chosen, strict=False) for place in places]
        if not at:
            return [[] for _ in encoded]
        head = getattr(self.model.head, "masked", self.model.head)
        scores = head(self.model.rows(batch, wanted=torch.tensor(at)), batch)[:, : len(self._words)].float()
        scores = scores.masked_fill(~self._words, -torch.inf)
        best, tokens = scores.topk(min(self.settings.top_k, int(self._words.sum())), -1)
        shares = best.softmax(-1).double().cumsum(-1)
        found, row = [], 0
        for places, key in zip(chosen, keys, strict=True):
            drawn = uniform(mixed(key, 1), max(1, len(places)))
            names = []
            for number in range(len(places)):
                place = int(torch.searchsorted(shares[row], float(drawn[number]) * float(shares[row][-1])))
                token = int(tokens[row][min(place, tokens.shape[1] - 1)])
                names.append(self.tokenizer.decode([token], skip_special=False).strip())
                row += 1
            found.append(names)
        return found


def _written(text: Any, encoded: Encoded, names: dict[int, str]) -> Any:
    """The text with those words in the places of others."""
    if isinstance(text, Words):
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

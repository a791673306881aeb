"""Advice against the bundled encoder: for texts in another language, or longer than it reads."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import Dataset
from heedful.data.examples import Example
from heedful.data.labelled.statistics import DatasetStats
from heedful.runs.finetune.build import encoding_notes, evenly_spaced
from heedful.runs.finetune.init_settings import model_name
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.tasks.task import EncodedSplit, Task
from heedful.tokenizer import Tokenizer

TEXTS, CHARACTERS = 500, 1000  # looked at: examples, and the first characters of each text
TOKENS = 1.6  # per word or sign; English has 1.1 to 1.2, other languages in Latin letters 1.7 to 2.9
FOREIGN = 0.2  # share of letters that are not Latin
LONG = 0.5  # share of the examples that are longer than the encoder reads
UNIT = re.compile(r"\w+|[^\w\s]")


def reading_notes(
    settings: FinetuneSettings, source: Dataset[Example], stats: DatasetStats, task: Task, learned: EncodedSplit
) -> list[str]:
    """Sentences about what encoding the training examples cost, and why another encoder may do better."""
    notes = encoding_notes(learned)
    if model_name(settings.init) != BUNDLED_ENCODER:
        return notes
    examples = evenly_spaced(source.examples("train"), stats.counts["train"], TEXTS)
    texts = [text for example in examples for text in example.texts]
    limit = task.limit if settings.max_length is None else None
    return [*notes, *encoder_advice(texts, task.tokenizer, learned, limit)]


def encoder_advice(texts: Sequence[str], tokenizer: Tokenizer, learned: EncodedSplit, limit: int | None) -> list[str]:
    """Sentences with reasons to start from another encoder than the bundled one.

    Args:
        texts: Of training examples, from all over the data.
        tokenizer: Of the encoder.
        learned: What reading all training examples gave.
        limit: Tokens that the encoder reads at once; None: max_length is set.
    """
    advice = []
    if why := _not_english([text[:CHARACTERS] for text in texts], tokenizer):
        advice.append(
            f"the training texts do not look English ({why}), and {BUNDLED_ENCODER} knows English alone: "
            "start from an encoder of their language with --model FOLDER or NAME[@REVISION]"
        )
    long = learned.windowed + learned.truncated
    if limit is not None and long > LONG * learned.examples:
        how = "read in windows" if learned.windowed else "cut"
        advice.append(
            f"{long:,} of {learned.examples:,} training examples are longer than the {limit:,} tokens that "
            f"{BUNDLED_ENCODER} reads at once, and are {how}: an encoder that reads more, "
            "given with --model, may do better"
        )
    return advice


def _not_english(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    """The reason to believe that texts are not English, or "".

    An English vocabulary has most English words as one token, and splits those of other languages.
    """
    letters = [character for text in texts for character in text if character.isalpha()]
    foreign = sum(
        not character.isascii() and not unicodedata.name(character, "").startswith("LATIN") for character in letters
    )
    if letters and foreign > FOREIGN * len(letters):
        return f"{100 * foreign / len(letters):.0f} % of their letters are not Latin"
    units = sum(len(UNIT.findall(text)) for text in texts)
    tokens = sum(map(len, tokenizer.ids(texts)))
    if units and tokens > TOKENS * units:
        return f"{tokens / units:.1f} tokens per word, where English has about 1.2"
    return ""

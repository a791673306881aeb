"""Advice to start from another encoder than the bundled one, for texts in other languages and for long texts."""

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

SAMPLED_EXAMPLES = 500  # examples whose language is tested
SAMPLED_CHARACTERS = 1000  # tested characters of each text
MAX_TOKENS_PER_WORD = 1.6  # maximum for English, which has 1.1 to 1.2; other languages in Latin letters have 1.7 to 2.9
MAX_FOREIGN_SHARE = 0.2  # maximum share of letters that are not Latin, for English
MAX_LONG_SHARE = 0.5  # share of examples longer than the encoder's limit above which advice is given
WORD_OR_SIGN = re.compile(r"\w+|[^\w\s]")


def reading_notes(
    settings: FinetuneSettings, dataset: Dataset[Example], stats: DatasetStats, task: Task, encoded: EncodedSplit
) -> list[str]:
    """Return `encoding_notes` on the training examples, and `encoder_advice` for a run from the bundled encoder."""
    notes = encoding_notes(encoded)
    if model_name(settings.init) != BUNDLED_ENCODER:
        return notes
    examples = evenly_spaced(dataset.examples("train"), stats.counts["train"], SAMPLED_EXAMPLES)
    texts = [text for example in examples for text in example.texts]
    limit = task.limit if settings.max_length is None else None
    return [*notes, *encoder_advice(texts, task.tokenizer, encoded, limit)]


def encoder_advice(texts: Sequence[str], tokenizer: Tokenizer, encoded: EncodedSplit, limit: int | None) -> list[str]:
    """Return sentences with reasons to start from another encoder than the bundled one.

    Args:
        texts: Texts of training examples, evenly spaced in the data.
        tokenizer: The tokenizer of the encoder.
        encoded: All training examples, encoded.
        limit: Maximum tokens of the encoder, or None if the setting max_length limits the length.
    """
    advice = []
    if reason := _reason_not_english([text[:SAMPLED_CHARACTERS] for text in texts], tokenizer):
        advice.append(
            f"the training texts do not look English ({reason}), and {BUNDLED_ENCODER} knows English alone: "
            "start from an encoder of their language with --model FOLDER or NAME[@REVISION]"
        )
    long_examples = encoded.windowed + encoded.truncated
    if limit is not None and long_examples > MAX_LONG_SHARE * encoded.examples:
        treatment = "read in windows" if encoded.windowed else "cut"
        advice.append(
            f"{long_examples:,} of {encoded.examples:,} training examples are longer than the {limit:,} tokens that "
            f"{BUNDLED_ENCODER} reads at once, and are {treatment}: an encoder that reads more, "
            "given with --model, may do better"
        )
    return advice


def _reason_not_english(texts: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the reason to assume that texts are not English, or "".

    An English vocabulary has a token for most English words, and splits words of other languages.
    """
    letters = [character for text in texts for character in text if character.isalpha()]
    foreign = sum(
        not character.isascii() and not unicodedata.name(character, "").startswith("LATIN") for character in letters
    )
    if letters and foreign > MAX_FOREIGN_SHARE * len(letters):
        return f"{100 * foreign / len(letters):.0f} % of their letters are not Latin"
    words = sum(len(WORD_OR_SIGN.findall(text)) for text in texts)
    tokens = sum(map(len, tokenizer.ids(texts)))
    if words and tokens > MAX_TOKENS_PER_WORD * words:
        return f"{tokens / words:.1f} tokens per word, where English has about 1.2"
    return ""

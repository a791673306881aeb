"""Tokenizers of whole words, for classic models and studies: a word outside the vocabulary is unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from heedful.errors import TokenizerError
from heedful.tokenizer.errors import translate_errors
from heedful.tokenizer.tokenizer import Tokenizer

UNKNOWN = "[UNK]"


def word_tokenizer(words: Sequence[str], *, lower_case: bool = True) -> Tokenizer:
    """Return a tokenizer with a token for each word, and id 0 for all others.

    The tokenizer splits at spaces and around punctuation, and adds no special tokens. Lower-casing removes accents too.

    Raises:
        TokenizerError: If there are no words.
    """
    distinct = [word for word in dict.fromkeys(words) if word != UNKNOWN]
    ids = {word: id for id, word in enumerate([UNKNOWN, *distinct])}
    if not distinct:
        raise TokenizerError("there are no words to make a vocabulary of: give some")
    with translate_errors("this vocabulary cannot be used", "check its words"):
        backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
        backend.normalizer = _normalizer(lower_case)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.add_special_tokens([UNKNOWN])
    return Tokenizer(backend, {"unk_token": UNKNOWN})


def count_words(texts: Iterable[str], *, lower_case: bool = True) -> Counter[str]:
    """Count the words of texts as `word_tokenizer` splits them, in the order in which they first occur."""
    normalize, split = _normalizer(lower_case).normalize_str, pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    counts: Counter[str] = Counter()
    with translate_errors("the texts cannot be split into words", "read them as UTF-8"):
        for text in texts:
            counts.update(word for word, _ in split(normalize(text)))
    return counts


def as_single_word(word: str, *, lower_case: bool = True) -> str | None:
    """Return a word as `word_tokenizer` normalises it, or None if the result is several words or empty.

    >>> as_single_word("Schön"), as_single_word("schön", lower_case=False), as_single_word("U.S.")
    ('schon', 'schön', None)
    """
    words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(_normalizer(lower_case).normalize_str(word))
    return words[0][0] if len(words) == 1 else None


@cache
def _normalizer(lower_case: bool) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
    )

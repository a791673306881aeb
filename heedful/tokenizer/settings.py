"""What a trained tokenizer is to be; imports nothing heavy, so that a wrong setting is told at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from heedful.errors import HeedfulError

ANGLED = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # RoBERTa's special tokens, in the order of their ids
SENTINEL = "<extra_id_{}>"  # counted from 0; published vocabularies have 100 of them, with descending ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialNames:
    """How the special tokens are spelled; ids 0 to 4 (BPE: in the order first, pad, separator, unknown, mask)."""

    pad: str = "[PAD]"  # fills rows up
    unknown: str = "[UNK]"  # stands for what the vocabulary lacks
    first: str = "[CLS]"  # begins each sequence
    separator: str = "[SEP]"  # ends each segment
    mask: str = "[MASK]"  # stands for masked tokens

    def config(self) -> dict[str, Any]:
        """As tokenizer_config.json names them."""
        keys = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        return dict(zip(keys, asdict(self).values(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """What to train: WordPiece and Unigram wrap texts as BERT does, byte-level BPE as RoBERTa does."""

    kind: Literal["wordpiece", "bpe", "unigram"] = "wordpiece"  # algorithm of the tokenizer
    vocabulary: int = 30_000  # how many tokens at most, special ones included
    lower_case: bool | None = None  # None: as published for the kind, so for WordPiece alone
    strip_accents: bool | None = None  # None: exactly when lower-casing
    min_frequency: int = 2  # of a pair that is joined (WordPiece, BPE)
    alphabet: int = 1_000  # how many characters are kept, the most frequent ones (WordPiece; BPE keeps all 256 bytes)
    special: SpecialNames | None = None  # None: as published for the kind
    max_length: int | None = None  # in tokens, of the model to come; written to tokenizer_config.json
    sentinels: int = 0  # <extra_id_0> and so on, which stand for spans; the last of the vocabulary, 0 the very last

    def __post_init__(self) -> None:
        for name, least in (("min_frequency", 0), ("alphabet", 1), ("max_length", 1), ("sentinels", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise HeedfulError(f"{name} is {given}; expected a whole number from {least}")

    @property
    def room(self) -> int:
        """How many tokens there are at most without sentinels."""
        return self.vocabulary - self.sentinels

    @property
    def lower_cases(self) -> bool:
        """Whether text is lower-cased."""
        return self.kind == "wordpiece" if self.lower_case is None else self.lower_case

    @property
    def strips_accents(self) -> bool:
        """Whether accents are taken off."""
        return self.lower_cases if self.strip_accents is None else self.strip_accents

    @property
    def names(self) -> SpecialNames:
        """The special tokens."""
        if self.special is not None:
            return self.special
        first, pad, separator, unknown, mask = ANGLED
        angled = SpecialNames(pad=pad, unknown=unknown, first=first, separator=separator, mask=mask)
        return angled if self.kind == "bpe" else SpecialNames()

"""Settings of a tokenizer to train. The module imports nothing heavy, so that a wrong setting fails at once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from heedful.errors import SettingError

Algorithm = Literal["wordpiece", "bpe", "unigram"]
ANGLE_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")  # RoBERTa's special tokens, in the order of their ids
SENTINEL = "<extra_id_{}>"  # counted from 0; published vocabularies have 100 of them, with descending ids


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialNames:
    """The text of the special tokens; their ids are 0 to 4, for BPE in the order cls, pad, sep, unk, mask."""

    pad_token: str = "[PAD]"  # padding
    unk_token: str = "[UNK]"  # replaces characters that are not in the vocabulary
    cls_token: str = "[CLS]"  # begins each sequence
    sep_token: str = "[SEP]"  # ends each segment
    mask_token: str = "[MASK]"  # replaces masked tokens

    def config(self) -> dict[str, object]:
        """Return the entries of tokenizer_config.json."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """A tokenizer to train: WordPiece and Unigram add BERT's special tokens to a text, byte-level BPE RoBERTa's."""

    algorithm: Algorithm = "wordpiece"  # bpe is byte-level
    vocab_size: int = 30_000  # maximum size of the vocabulary, special tokens included
    lower_case: bool | None = None  # lower-case texts; none: only for WordPiece
    strip_accents: bool | None = None  # remove accents; none: if texts are lower-cased
    min_frequency: int = 2  # minimum occurrences of a pair of tokens to be merged (WordPiece, BPE)
    limit_alphabet: int = 1_000  # maximum characters in the vocabulary, the most frequent ones (only WordPiece)
    special_tokens: SpecialNames | None = None  # texts of the special tokens; none: [CLS] ..., and for BPE <s> ...
    max_length: int | None = None  # maximum tokens of a sequence: model_max_length of tokenizer_config.json
    num_sentinels: int = 0  # sentinel tokens <extra_id_0>, ... for span corruption, at the end of the vocabulary

    def __post_init__(self) -> None:
        for name, minimum in (("min_frequency", 0), ("limit_alphabet", 1), ("max_length", 1), ("num_sentinels", 0)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise SettingError(f"{name} is {value}; expected a whole number from {minimum}")

    @property
    def size_without_sentinels(self) -> int:
        """Maximum size of the vocabulary without sentinels."""
        return self.vocab_size - self.num_sentinels

    @property
    def lowercases(self) -> bool:
        """Whether texts are lower-cased."""
        return self.algorithm == "wordpiece" if self.lower_case is None else self.lower_case

    @property
    def strips_accents(self) -> bool:
        """Whether accents are removed."""
        return self.lowercases if self.strip_accents is None else self.strip_accents

    @property
    def names(self) -> SpecialNames:
        """The texts of the special tokens."""
        if self.special_tokens is not None:
            return self.special_tokens
        if self.algorithm != "bpe":
            return SpecialNames()
        cls, pad, sep, unk, mask = ANGLE_TOKENS
        return SpecialNames(pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainTokenizer(TokenizerSettings):
    """The tokenizer of a pre-training run: an existing one, or a new one that is trained on the text."""

    path: str = ""  # folder of an existing tokenizer; "": that of model.init_from, or a new one trained on the text
    vocab_size: int = 16_000  # maximum size of the vocabulary, special tokens included
    train_chars: int = 30_000_000  # maximum characters of text that a new tokenizer is trained on

    def __post_init__(self) -> None:
        TokenizerSettings.__post_init__(self)
        if self.train_chars < 1:
            raise SettingError(f"train_chars is {self.train_chars}; expected a whole number from 1")

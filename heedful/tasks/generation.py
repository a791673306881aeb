"""How a model generates text: its settings, the tokens it begins and ends with, and the prompts of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.config import ModelConfig, NextToken
from heedful.model.decode import Decoding, DecodingMethod, Greedy, decode
from heedful.packed import Packed
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """How an engine writes."""

    how: DecodingMethod = field(default_factory=Greedy)
    max_new_tokens: int = 128
    seed: int = 0  # of samples

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise HeedfulError(f"max_new_tokens is {self.max_new_tokens}; expected a whole number from 1")


class SequenceEnds(NamedTuple):
    """The tokens around what is written: with which the decoder begins (None: it goes on from the text), and ends."""

    start: int | None
    stop: int


def sequence_ends(model: ModelConfig, tokenizer: Tokenizer) -> SequenceEnds:
    """What a model writes between; one that cannot write, or would never end, is refused."""
    if not model.has_decoder:
        raise HeedfulError("this model has no decoder, so it cannot write: start from one that has")
    special = tokenizer.special
    if special.separator is None:
        raise HeedfulError("this tokenizer has no token that ends a text: name it as eos_token")
    if not model.has_encoder:
        return SequenceEnds(None, special.separator)
    start = special.first if model.start is None else model.start
    if start is None:
        raise HeedfulError("it is not known with which token the decoder begins: name it as decoder_start_token_id")
    return SequenceEnds(start, special.separator)


def encode_truncated(
    tokenizer: Tokenizer, items: Sequence[TokenizerInput], text_suffix: str, most: int | None
) -> list[Encoding]:
    """Items of at most so many tokens, which lose the end of their text, and never what was put behind it.

    Without that a model would not know that the text is over and its rewriting begins. None: all of them.
    """
    if most is None:
        return tokenizer.encode_batch(items)
    if not text_suffix:
        return tokenizer.encode_batch(items, max_length=most, truncate="longest_first")
    seen = zip(tokenizer.encode_batch(items), items, strict=True)
    return [_cut(each, str(item), text_suffix, most) for each, item in seen]


def _cut(whole: Encoding, text: str, text_suffix: str, most: int) -> Encoding:
    spare, end = len(whole) - most, len(text.removesuffix(text_suffix))
    own = [place for place, (_, stop) in enumerate(whole.offsets) if whole.segments[place] is not None and stop <= end]
    if spare <= 0:
        return whole
    if spare >= len(own):
        rest = len(whole) - len(own)
        raise HeedfulError(f"max_length {most} leaves no token of a text: {rest} tokens go around it, or behind it")
    return replace(whole.without(own[-spare:]), dropped=spare)


def decoder_prompts(loaded: ModelBundle, tokenizer: Tokenizer, seen: Sequence[Encoding]) -> list[Encoding]:
    """Texts as a decoder alone goes on from them: without the special tokens that the tokenizer puts after a text.

    Where that leaves nothing, it goes on from the token that stands before a text, or else from the one that ends it:
    in GPT-2 they are the same. All else is left as it is, a model among it that learned what stands between a text and
    its rewriting.
    """
    if not isinstance(loaded.config.head, NextToken) or loaded.config.model.has_encoder or loaded.text_suffix:
        return list(seen)
    probe = tokenizer.encode("a").segments
    last = max((place for place, segment in enumerate(probe) if segment is not None), default=len(probe) - 1)
    cut = (each.until(len(each) - (len(probe) - 1 - last)) for each in seen)
    special = tokenizer.special
    begin = special.separator if special.first is None else special.first
    if begin is None:
        return list(cut)
    nothing = Encoding(ids=(begin,), types=(0,), segments=(None,), offsets=((0, 0),), words=(None,))
    return [each if len(each) else nothing for each in cut]


def start_generation(loaded: ModelBundle, tokenizer: Tokenizer, given: Packed, writing: GenerationConfig) -> Decoding:
    """Prepare generation for each sequence: the encoder's text, or what the decoder goes on from."""
    mark = sequence_ends(loaded.config.model, tokenizer)
    if (head := loaded.head) is None:
        raise HeedfulError("this model has no head over the vocabulary, so it cannot write")
    prompts, source = given, None
    if mark.start is not None:
        prompts, source = Packed.of([[mark.start]] * len(given)).to(given.tokens.device), given
    return decode(
        loaded.model,
        head,
        prompts,
        writing.how,
        max_new_tokens=writing.max_new_tokens,
        stop=[mark.stop],
        source=source,
        seed=writing.seed,
    )

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
    """Settings of text generation."""

    how: DecodingMethod = field(default_factory=Greedy)
    max_new_tokens: int = 128
    seed: int = 0  # of sampling

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise HeedfulError(f"max_new_tokens is {self.max_new_tokens}; expected a whole number from 1")


class SequenceEnds(NamedTuple):
    """The token that a decoder starts from (None: it continues the text), and the one that ends its output."""

    start: int | None
    stop: int


def sequence_ends(model: ModelConfig, tokenizer: Tokenizer) -> SequenceEnds:
    """Return the tokens between which a model generates.

    Raises:
        HeedfulError: If the model has no decoder, or one of the tokens is unknown.
    """
    if not model.has_decoder:
        raise HeedfulError("this model has no decoder, so it cannot generate text: start from one that has")
    special = tokenizer.special
    if special.eos_or_sep is None:
        raise HeedfulError("this tokenizer has no token that ends a text: name it as eos_token")
    if not model.has_encoder:
        return SequenceEnds(None, special.eos_or_sep)
    start = special.bos_or_cls if model.start is None else model.start
    if start is None:
        raise HeedfulError("the token that the decoder starts from is unknown: name it as decoder_start_token_id")
    return SequenceEnds(start, special.eos_or_sep)


def encode_truncated(
    tokenizer: Tokenizer, inputs: Sequence[TokenizerInput], text_suffix: str, limit: int | None
) -> list[Encoding]:
    """Encode inputs, truncated at the end of their text; the suffix behind it is kept, since it begins the target.

    Args:
        tokenizer: The tokenizer.
        inputs: Texts, with the suffix.
        text_suffix: After the text of each.
        limit: Tokens of an input; None: any number.

    Raises:
        HeedfulError: If the limit leaves no token of a text.
    """
    if limit is None:
        return tokenizer.encode_batch(inputs)
    if not text_suffix:
        return tokenizer.encode_batch(inputs, max_length=limit, truncate="longest_first")
    encodings = zip(tokenizer.encode_batch(inputs), inputs, strict=True)
    return [_cut(encoding, str(item), text_suffix, limit) for encoding, item in encodings]


def _cut(whole: Encoding, text: str, text_suffix: str, limit: int) -> Encoding:
    spare, end = len(whole) - limit, len(text.removesuffix(text_suffix))
    own = [place for place, (_, stop) in enumerate(whole.offsets) if whole.segments[place] is not None and stop <= end]
    if spare <= 0:
        return whole
    if spare >= len(own):
        rest = len(whole) - len(own)
        raise HeedfulError(f"max_length {limit} leaves no token of a text: {rest} tokens go around it, or behind it")
    return replace(whole.without(own[-spare:]), dropped=spare)


def decoder_prompts(loaded: ModelBundle, tokenizer: Tokenizer, encodings: Sequence[Encoding]) -> list[Encoding]:
    """Return the prompts of a decoder-only model: texts without the special tokens that the tokenizer puts after them.

    An empty prompt becomes the token before a text, or else the one that ends it: in GPT-2 they are the same. Texts of
    other models, also of those with a `text_suffix`, are returned unchanged.
    """
    if not isinstance(loaded.config.head, NextToken) or loaded.config.model.has_encoder or loaded.text_suffix:
        return list(encodings)
    probe = tokenizer.encode("a").segments
    last = max((position for position, segment in enumerate(probe) if segment is not None), default=len(probe) - 1)
    cut = (encoding.until(len(encoding) - (len(probe) - 1 - last)) for encoding in encodings)
    special = tokenizer.special
    begin = special.eos_or_sep if special.bos_or_cls is None else special.bos_or_cls
    if begin is None:
        return list(cut)
    nothing = Encoding(ids=(begin,), types=(0,), segments=(None,), offsets=((0, 0),), words=(None,))
    return [encoding if len(encoding) else nothing for encoding in cut]


def start_generation(
    loaded: ModelBundle, tokenizer: Tokenizer, texts: Packed, generation: GenerationConfig
) -> Decoding:
    """Prepare generation for each text, which the encoder reads or a decoder-only model continues."""
    ends = sequence_ends(loaded.config.model, tokenizer)
    if (head := loaded.head) is None:
        raise HeedfulError("this model has no head over the vocabulary, so it cannot generate text")
    prompts, source = texts, None
    if ends.start is not None:
        prompts, source = Packed.of([[ends.start]] * len(texts)).to(texts.tokens.device), texts
    return decode(
        loaded.model,
        head,
        prompts,
        generation.how,
        max_new_tokens=generation.max_new_tokens,
        stop=[ends.stop],
        source=source,
        seed=generation.seed,
    )

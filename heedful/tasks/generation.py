"""Text generation: its settings in a model folder, start and end tokens, and the prompts of decoder-only models.

The engine generates with `start_generation`; the task `Seq2Seq` trains with the same start and end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.config import GENERATION, BundleConfig
from heedful.errors import HeedfulError, ModelError, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.model.config import ModelConfig, NextToken
from heedful.model.decode import BeamSearch, Decoding, DecodingMethod, Greedy, Sampling, decode
from heedful.model.token_constraints import TokenConstraints
from heedful.packed import Packed
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

TOP_K = 50  # default top_k of sampling in transformers
NEUTRAL: dict[str, tuple[object, ...]] = {  # unsupported settings, with the values at which they have no effect
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_return_sequences", "num_beam_groups"), (1,)),
    **dict.fromkeys(("min_p", "top_h", "penalty_alpha", "exponential_decay_length_penalty", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("constraints", "force_words_ids", "stop_strings", "max_time", "watermarking_config"), ()),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "token_healing"), (False,)),
}
SUPPORTED = frozenset(  # settings that Heedful applies
    """
    num_beams do_sample temperature top_k top_p early_stopping length_penalty max_length max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id eos_token_id
    bos_token_id decoder_start_token_id
    """.split()  # noqa: SIM905
)
IGNORED_KEYS = frozenset(  # settings that do not change the generated tokens
    """
    _from_model_config pad_token_id use_cache cache_implementation cache_config return_legacy_cache prefill_chunk_size
    output_logits low_memory compile_config disable_compile is_assistant num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit assistant_lookbehind
    target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationConfig:
    """Settings of text generation.

    Args:
        how: Greedy decoding, sampling or beam search.
        beam_search: Settings of beam search that apply when a user sets `num_beams`.
        max_new_tokens: Maximum generated tokens.
        max_length: Maximum tokens of prompt and generated text together. If None, only `max_new_tokens` applies.
        seed: Seed of sampling.
    """

    how: DecodingMethod = field(default_factory=Greedy)
    beam_search: BeamSearch = field(default_factory=BeamSearch)
    max_new_tokens: int = 128
    max_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise HeedfulError(f"max_new_tokens is {self.max_new_tokens}; expected a whole number from 1")

    def with_choices(
        self,
        *,
        num_beams: int | None = None,
        num_return_sequences: int | None = None,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> GenerationConfig:
        """Return the settings with the values that a user chose. An argument that is None changes nothing.

        Args:
            num_beams: Use beam search with this beam size.
            num_return_sequences: How many texts beam search returns; reduced to `num_beams` if it is larger.
            temperature: Use sampling with this temperature.
            max_new_tokens: Maximum generated tokens; replaces `max_length` too.
            seed: Seed of sampling.
        """
        config = self
        if temperature is not None:
            sampling = self.how if isinstance(self.how, Sampling) else Sampling()
            config = replace(config, how=replace(sampling, temperature=temperature))
        elif num_beams is not None:
            config = replace(config, how=replace(self.beam_search, num_beams=num_beams))
        if isinstance(config.how, BeamSearch) and num_return_sequences is not None:
            count = max(1, min(num_return_sequences, config.how.num_beams))
            config = replace(config, how=replace(config.how, num_return_sequences=count))
        if max_new_tokens is not None:
            config = replace(config, max_new_tokens=max_new_tokens, max_length=None)
        return config if seed is None else replace(config, seed=seed)


# -- settings of a model folder -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderGeneration:
    """The generation settings of a model folder.

    Args:
        defaults: Settings that apply if a user chooses none.
        constraints: Tokens that are forced or banned.
        start: Id of the token with which the decoder of an encoder-decoder model starts. If None, it is not set.
        stop: Ids of tokens that end a text, in addition to the one that the tokenizer puts after texts.
    """

    defaults: GenerationConfig
    constraints: TokenConstraints
    start: int | None
    stop: tuple[int, ...]


def folder_generation(bundle: ModelBundle) -> FolderGeneration:
    """Return the generation settings of a model's folder.

    They come from generation_config.json, or from config.json if that file is missing, as in transformers 5.

    Raises:
        ModelError: If a setting is not supported, or has an unexpected value.
    """
    values, file = _generation_values(bundle.config)
    reader = ConfigReader(
        {key: value for key, value in values.items() if value is not None}, f"{bundle.source}: {file}"
    )
    for key, accepted in NEUTRAL.items():
        reader.only(key, *accepted, why="Heedful does not have this setting")
    settings = _defaults(reader)
    constraints = _constraints(reader, bundle.config.model.embedding.vocabulary)
    start = reader.integer("decoder_start_token_id", reader.integer("bos_token_id", None, minimum=0), minimum=0)
    stop = _ids(reader, "eos_token_id")
    reader.check_all_read(IGNORED_KEYS)
    return FolderGeneration(defaults=settings, constraints=constraints, start=start, stop=stop)


def with_languages(bundle: ModelBundle, src_lang: str | None, tgt_lang: str | None) -> ModelBundle:
    """Return the model for translation between two languages. A language code that is None leaves the model's language.

    The tokenizer puts the code of the source language beside each text. If it puts codes before texts, as in mBART-50,
    the code of the target language is the first token that the model generates (forced_bos_token_id). If it puts codes
    after texts, as in mBART, the decoder starts with the code of the target language (decoder_start_token_id).

    Raises:
        HeedfulError: If the model has no such language codes.
    """
    bundle, tokenizer = copy(bundle), bundle.tokenizer
    if tokenizer is None:
        raise HeedfulError(
            f"{bundle.source} has no tokenizer, which knows the language codes: put tokenizer.json there"
        )
    if src_lang is not None:
        bundle.tokenizer = tokenizer.with_source_language(src_lang)
    if tgt_lang is not None:
        bundle.config = _with_target_language(bundle.config, tokenizer, tokenizer.check_language(tgt_lang))
    return bundle


def _with_target_language(config: BundleConfig, tokenizer: Tokenizer, code: int) -> BundleConfig:
    """Return the configuration with the target language: as forced first token, or as the decoder's start token."""
    generation, _ = _generation_values(config)
    if tokenizer.name(tokenizer.encode("a").ids[0]) in tokenizer.languages:
        return replace(config, generation=generation | {"forced_bos_token_id": code})
    generation.pop("forced_bos_token_id", None)
    generation["decoder_start_token_id"] = code
    return replace(config, model=replace(config.model, start=code), generation=generation)


def _generation_values(config: BundleConfig) -> tuple[dict[str, object], str]:
    """Return the generation settings of a folder as written in its JSON, and the name of the JSON file."""
    if config.generation is not None:
        return dict(config.generation), GENERATION
    defaults = FAMILIES[config.family].generation_defaults if config.hf_config else {}
    known = {key: value for key, value in config.hf_config.items() if key in SUPPORTED | NEUTRAL.keys()}
    return {**defaults, **known}, "config.json"


def _defaults(reader: ConfigReader) -> GenerationConfig:
    """Read the decoding method and the maximum length of generated texts."""
    num_beams = reader.integer("num_beams", 1)
    do_sample = reader.flag("do_sample", False)
    temperature = reader.number("temperature", 1.0, maximum=1000.0)
    top_p = reader.number("top_p", 1.0)
    top_k = reader.integer("top_k", TOP_K, minimum=0)
    reader.only("early_stopping", True, False, "never", why="transformers knows no others")
    early_stopping = reader.values.get("early_stopping", False)
    beam_search = BeamSearch(
        num_beams=num_beams,
        length_penalty=reader.number("length_penalty", 1.0, minimum=-10.0, maximum=10.0),
        early_stopping="never" if early_stopping == "never" else bool(early_stopping),
    )
    how: DecodingMethod = Greedy() if num_beams == 1 else beam_search
    if do_sample and num_beams > 1:
        raise ModelError(
            f"{reader.source}: do_sample is true and num_beams is {num_beams}; beam search does not sample"
        )
    if do_sample:
        how = Sampling(temperature=temperature, top_k=top_k or None, top_p=None if top_p == 1.0 else top_p)
    config = GenerationConfig(how=how, beam_search=beam_search)
    max_new_tokens = reader.integer("max_new_tokens", None)
    max_length = reader.integer("max_length", None)
    if max_new_tokens is not None:
        return replace(config, max_new_tokens=max_new_tokens)
    return config if max_length is None else replace(config, max_new_tokens=max_length, max_length=max_length)


def _constraints(reader: ConfigReader, vocabulary: int) -> TokenConstraints:
    """Read which tokens are forced or banned; `vocabulary` is the vocabulary size of the model."""
    words = reader.values.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ModelError(f"{reader.source}: bad_words_ids is {quoted(words)}; expected a list of lists of token ids")
    min_length = reader.integer("min_length", 0, minimum=0)
    min_new_tokens = reader.integer("min_new_tokens", 0, minimum=0)
    constraints = TokenConstraints(
        min_length=0 if "min_new_tokens" in reader.values else min_length,  # as in transformers
        min_new_tokens=min_new_tokens,
        no_repeat_ngram_size=reader.integer("no_repeat_ngram_size", 0, minimum=0),
        bad_words_ids=tuple(tuple(word) for word in words),
        forced_bos_token_id=reader.integer("forced_bos_token_id", None, minimum=0),
        forced_eos_token_id=_ids(reader, "forced_eos_token_id"),
    )
    forced_bos = () if constraints.forced_bos_token_id is None else (constraints.forced_bos_token_id,)
    banned = chain.from_iterable(constraints.bad_words_ids)
    for id in (*forced_bos, *constraints.forced_eos_token_id, *banned):
        if type(id) is not int or not 0 <= id < vocabulary:
            raise ModelError(f"{reader.source}: {quoted(id)} is no token id of a model with {vocabulary} tokens")
    return constraints


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Read one token id or a list of token ids, or return () if the key is missing."""
    if isinstance(listed := reader.values.get(key), list) and listed and all(type(id) is int for id in listed):
        return tuple(listed)
    id = reader.integer(key, None, minimum=0)
    return () if id is None else (id,)


# -- the beginning and the end of texts ------------------------------------------------------------------------------


class SequenceEnds(NamedTuple):
    """Ids of the tokens with which generation starts and ends."""

    start: int | None  # token with which the decoder starts; None: a decoder-only model, which continues the text
    stop: int  # token that ends the output
    forced_bos: int | None = None  # forced first token of the output; None: no forced token


def sequence_ends(model: ModelConfig, tokenizer: Tokenizer) -> SequenceEnds:
    """Return the tokens with which generation by a model starts and ends.

    Raises:
        HeedfulError: If the model has no decoder, or a token is unknown.
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


def trained_ends(loaded: ModelBundle, tokenizer: Tokenizer) -> SequenceEnds:
    """Return the start and end tokens for training, with the forced first token of the output."""
    ends = sequence_ends(loaded.config.model, tokenizer)
    forced = None if ends.start is None else folder_generation(loaded).constraints.forced_bos_token_id
    return ends._replace(forced_bos=forced)


def encode_truncated(
    tokenizer: Tokenizer, inputs: Sequence[TokenizerInput], text_suffix: str, limit: int | None
) -> list[Encoding]:
    """Encode texts with a suffix, truncated at the end of the text. The suffix stays, since the target follows it.

    Args:
        tokenizer: The tokenizer.
        inputs: Texts with the suffix.
        text_suffix: The suffix at the end of each input.
        limit: Maximum tokens of an input. If None, inputs are not truncated.

    Raises:
        HeedfulError: If the limit leaves no token of a text.
    """
    if limit is None:
        return tokenizer.encode_batch(inputs)
    if not text_suffix:
        return tokenizer.encode_batch(inputs, max_length=limit, truncate="longest_first")
    encodings = zip(tokenizer.encode_batch(inputs), inputs, strict=True)
    return [_truncate_text(encoding, str(item), text_suffix, limit) for encoding, item in encodings]


def _truncate_text(encoded: Encoding, text: str, text_suffix: str, limit: int) -> Encoding:
    """Remove tokens at the end of the text, before the suffix, until `limit` tokens are left."""
    excess = len(encoded) - limit
    text_end = len(text.removesuffix(text_suffix))  # characters of the text without the suffix
    text_positions = [
        position
        for position, (_, stop) in enumerate(encoded.offsets)
        if encoded.segments[position] is not None and stop <= text_end
    ]
    if excess <= 0:
        return encoded
    if excess >= len(text_positions):
        other_tokens = len(encoded) - len(text_positions)
        raise HeedfulError(
            f"max_length {limit} leaves no token of a text: {other_tokens} tokens go around it, or behind it"
        )
    return replace(encoded.without(text_positions[-excess:]), dropped=excess)


def decoder_prompts(loaded: ModelBundle, tokenizer: Tokenizer, encodings: Sequence[Encoding]) -> list[Encoding]:
    """Return the prompts of a decoder-only model: encoded texts without the special tokens at their end.

    An empty prompt becomes the token that begins a text or, if the tokenizer has none, the token that ends a text, as
    in GPT-2. The encodings for other models, and for models with a `text_suffix`, are returned unchanged.
    """
    if not isinstance(loaded.config.head, NextToken) or loaded.config.model.has_encoder or loaded.text_suffix:
        return list(encodings)
    probe = tokenizer.encode("a").segments
    last_text_token = max(
        (position for position, segment in enumerate(probe) if segment is not None), default=len(probe) - 1
    )
    end_token_count = len(probe) - 1 - last_text_token  # special tokens after a text
    prompts = [encoding.until(len(encoding) - end_token_count) for encoding in encodings]
    special = tokenizer.special
    begin = special.eos_or_sep if special.bos_or_cls is None else special.bos_or_cls
    if begin is None:
        return prompts
    empty_prompt = Encoding(ids=(begin,), types=(0,), segments=(None,), offsets=((0, 0),), words=(None,))
    return [prompt if len(prompt) else empty_prompt for prompt in prompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInputs:
    """Inputs and constraints of text generation.

    Args:
        prompts: Tokens that the decoder continues, for each text.
        source: Input texts of the encoder. If None, the model has no encoder.
        stop: Ids of tokens that end a text.
        constraints: Tokens that are forced or banned.
    """

    prompts: Packed
    source: Packed | None
    stop: tuple[int, ...]
    constraints: TokenConstraints


def generation_inputs(
    loaded: ModelBundle, tokenizer: Tokenizer, texts: Packed, generation: GenerationConfig
) -> GenerationInputs:
    """Return the inputs of generation from texts: inputs of the encoder, or prompts of a decoder-only model."""
    settings = folder_generation(loaded)
    ends = sequence_ends(loaded.config.model, tokenizer)
    prompts, source = texts, None
    if ends.start is not None:
        start = ends.start if settings.start is None else settings.start
        prompts = Packed.of([[start]] * len(texts)).to(texts.tokens.device)
        source = texts
    return GenerationInputs(
        prompts=prompts,
        source=source,
        stop=tuple(dict.fromkeys((*settings.stop, ends.stop))),
        constraints=replace(settings.constraints, max_length=generation.max_length),
    )


def start_generation(
    loaded: ModelBundle, tokenizer: Tokenizer, texts: Packed, generation: GenerationConfig
) -> Decoding:
    """Start generation from texts: inputs of the encoder, or prompts of a decoder-only model."""
    inputs = generation_inputs(loaded, tokenizer, texts, generation)
    if loaded.head is None:
        raise HeedfulError("this model has no head over the vocabulary, so it cannot generate text")
    return decode(
        loaded.model,
        loaded.head,
        inputs.prompts,
        generation.how,
        max_new_tokens=generation.max_new_tokens,
        stop=inputs.stop,
        source=inputs.source,
        seed=generation.seed,
        constraints=inputs.constraints,
    )

"""How a model generates text: its settings, the tokens it begins and ends with, and the prompts of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
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

TOP_K = 50  # of sampling in transformers, where a folder does not say
NEUTRAL: dict[str, tuple[object, ...]] = {  # settings that are not supported -> values that change nothing
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_return_sequences", "num_beam_groups"), (1,)),
    **dict.fromkeys(("min_p", "top_h", "penalty_alpha", "exponential_decay_length_penalty", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), ([],)),
    **dict.fromkeys(("constraints", "force_words_ids", "stop_strings", "max_time", "watermarking_config"), ()),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "token_healing"), (False,)),
}
OBEYED = frozenset(
    """
    num_beams do_sample temperature top_k top_p early_stopping length_penalty max_length max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id eos_token_id
    bos_token_id decoder_start_token_id
    """.split()  # noqa: SIM905
)
IGNORED_KEYS = frozenset(  # they change no token
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
        beam_search: Settings of a beam search, if a user asks for one by its number of beams.
        max_length: Most tokens, the prompt included, beside max_new_tokens; None: any number.
    """

    how: DecodingMethod = field(default_factory=Greedy)
    beam_search: BeamSearch = field(default_factory=BeamSearch)
    max_new_tokens: int = 128
    max_length: int | None = None
    seed: int = 0  # of sampling

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
        """Return the settings with those that a user chose; None: unchanged.

        Args:
            num_return_sequences: Of a beam search, at most its number of beams.
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
    """How the folder of a model says that it generates text.

    Args:
        defaults: Settings where a user chooses none.
        start: The token that a decoder beside an encoder starts with; None: the folder does not say.
        stop: The tokens that end a text, beside the one that the tokenizer puts after texts.
    """

    defaults: GenerationConfig
    constraints: TokenConstraints
    start: int | None
    stop: tuple[int, ...]


def folder_generation(bundle: ModelBundle) -> FolderGeneration:
    """Return the generation settings of a model's folder.

    They are those of generation_config.json, or without that file those of config.json, as transformers 5 reads them.

    Raises:
        ModelError: If a setting is not supported, or has an unexpected value.
    """
    values, file = _values(bundle.config)
    reader = ConfigReader(
        {key: value for key, value in values.items() if value is not None}, f"{bundle.source}: {file}"
    )
    for key, accepted in NEUTRAL.items():
        reader.only(key, *accepted, why="Heedful does not have this setting")
    settings = _defaults(reader)
    constraints = _constraints(reader, bundle.config.model.embedding.vocabulary)
    start = reader.integer("decoder_start_token_id", reader.integer("bos_token_id", None, least=0), least=0)
    stop = _ids(reader, "eos_token_id")
    reader.check_all_read(IGNORED_KEYS)
    return FolderGeneration(defaults=settings, constraints=constraints, start=start, stop=stop)


def with_languages(bundle: ModelBundle, src_lang: str | None, tgt_lang: str | None) -> ModelBundle:
    """Return the model for translation between two languages, by their codes; None: unchanged.

    The tokenizer puts the code of the source language beside each text. If codes come before texts, as in mBART-50, the
    code of the target language is the first token that the model generates (forced_bos_token_id). If they come behind
    texts, as in mBART, the decoder starts with that code (decoder_start_token_id).

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
    generation = _values(config)[0]
    if tokenizer.name(tokenizer.encode("a").ids[0]) in tokenizer.languages:
        return replace(config, generation=generation | {"forced_bos_token_id": code})
    generation.pop("forced_bos_token_id", None)
    generation["decoder_start_token_id"] = code
    return replace(config, model=replace(config.model, start=code), generation=generation)


def _values(config: BundleConfig) -> tuple[dict[str, object], str]:
    """Return the generation settings of a folder, and the name of the file that has them."""
    if config.generation is not None:
        return dict(config.generation), GENERATION
    defaults = FAMILIES[config.family].generation_defaults if config.hf_config else {}
    named = {key: value for key, value in config.hf_config.items() if key in OBEYED | NEUTRAL.keys()}
    return {**defaults, **named}, "config.json"


def _defaults(reader: ConfigReader) -> GenerationConfig:
    """Read how tokens are chosen, and how many."""
    num_beams, samples = reader.integer("num_beams", 1), reader.flag("do_sample", False)
    temperature, top_p = reader.number("temperature", 1.0, most=1000.0), reader.number("top_p", 1.0)
    top_k = reader.integer("top_k", TOP_K, least=0)
    reader.only("early_stopping", True, False, "never", why="transformers knows no others")
    stopping = reader.values.get("early_stopping", False)
    beam_search = BeamSearch(
        num_beams=num_beams,
        length_penalty=reader.number("length_penalty", 1.0, least=-10.0, most=10.0),
        early_stopping="never" if stopping == "never" else bool(stopping),
    )
    how: DecodingMethod = Greedy() if num_beams == 1 else beam_search
    if samples and num_beams > 1:
        raise ModelError(
            f"{reader.source}: do_sample is true and num_beams is {num_beams}; beam search does not sample"
        )
    if samples:
        how = Sampling(temperature=temperature, top_k=top_k or None, top_p=None if top_p == 1.0 else top_p)
    config = GenerationConfig(how=how, beam_search=beam_search)
    new, length = reader.integer("max_new_tokens", None), reader.integer("max_length", None)
    if new is not None:
        return replace(config, max_new_tokens=new)
    return config if length is None else replace(config, max_new_tokens=length, max_length=length)


def _constraints(reader: ConfigReader, vocabulary: int) -> TokenConstraints:
    """Read which tokens are forced or banned."""
    words = reader.values.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ModelError(f"{reader.source}: bad_words_ids is {quoted(words)}; expected a list of lists of token ids")
    min_length, min_new_tokens = (reader.integer(f"min_{name}", 0, least=0) for name in ("length", "new_tokens"))
    constraints = TokenConstraints(
        min_length=0 if "min_new_tokens" in reader.values else min_length,  # as in transformers
        min_new_tokens=min_new_tokens,
        no_repeat_ngram_size=reader.integer("no_repeat_ngram_size", 0, least=0),
        bad_words_ids=tuple(tuple(word) for word in words),
        forced_bos_token_id=reader.integer("forced_bos_token_id", None, least=0),
        forced_eos_token_id=_ids(reader, "forced_eos_token_id"),
    )
    first = () if constraints.forced_bos_token_id is None else (constraints.forced_bos_token_id,)
    for id in (*first, *constraints.forced_eos_token_id, *(id for word in constraints.bad_words_ids for id in word)):
        if type(id) is not int or not 0 <= id < vocabulary:
            raise ModelError(f"{reader.source}: {quoted(id)} is no token id of a model with {vocabulary} tokens")
    return constraints


def _ids(reader: ConfigReader, key: str) -> tuple[int, ...]:
    """Read one or several token ids; none without the key."""
    if isinstance(listed := reader.values.get(key), list) and listed and all(type(id) is int for id in listed):
        return tuple(listed)
    id = reader.integer(key, None, least=0)
    return () if id is None else (id,)


# -- the beginning and the end of texts ------------------------------------------------------------------------------


class SequenceEnds(NamedTuple):
    """The token that a decoder starts from (None: it continues the text), and those that end and begin its output."""

    start: int | None
    stop: int
    forced_bos: int | None = None  # None: the output begins with any token


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


def trained_ends(loaded: ModelBundle, tokenizer: Tokenizer) -> SequenceEnds:
    """Return the tokens between which a model learns to generate, as `sequence_ends`, with one that is forced."""
    ends = sequence_ends(loaded.config.model, tokenizer)
    forced = None if ends.start is None else folder_generation(loaded).constraints.forced_bos_token_id
    return ends._replace(forced_bos=forced)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInputs:
    """Inputs of text generation, and the tokens that end a text.

    Args:
        prompts: The tokens that each generated text continues.
        source: The texts that the encoder reads; None: the model has no encoder.
    """

    prompts: Packed
    source: Packed | None
    stop: tuple[int, ...]
    constraints: TokenConstraints


def generation_inputs(
    loaded: ModelBundle, tokenizer: Tokenizer, texts: Packed, generation: GenerationConfig
) -> GenerationInputs:
    """Return the inputs of generation for each text, which the encoder reads or a decoder-only model continues."""
    settings, ends = folder_generation(loaded), sequence_ends(loaded.config.model, tokenizer)
    prompts, source = texts, None
    if ends.start is not None:
        start = ends.start if settings.start is None else settings.start
        prompts, source = Packed.of([[start]] * len(texts)).to(texts.tokens.device), texts
    return GenerationInputs(
        prompts=prompts,
        source=source,
        stop=tuple(dict.fromkeys((*settings.stop, ends.stop))),
        constraints=replace(settings.constraints, max_length=generation.max_length),
    )


def start_generation(
    loaded: ModelBundle, tokenizer: Tokenizer, texts: Packed, generation: GenerationConfig
) -> Decoding:
    """Prepare generation for each text, which the encoder reads or a decoder-only model continues."""
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

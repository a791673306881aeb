"""Builders of WordPiece and byte-level BPE from a vocabulary, and of the special tokens around texts.

`files.py` calls these functions for a folder without tokenizer.json, and `training.py` after training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from heedful.errors import TokenizerError
from heedful.tokenizer.errors import translate_errors
from heedful.tokenizer.limits import TokenizerConfig
from heedful.tokenizer.settings import ANGLE_TOKENS

PUBLISHED_NAMES: dict[str, tuple[str, ...]] = {  # published special tokens, by their keys in tokenizer_config.json
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "bos_token": ("<s>",),
    "eos_token": ("</s>",),
    "mask_token": ("[MASK]", "<mask>"),
}
BRACKET_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"


class FamilyDefaults(TypedDict, total=False):
    """Values of a model's family that vocab.txt, SentencePiece models and their tokenizer_config.json may lack."""

    model: str  # kind of vocabulary of vocab.txt that the values are for: "wordpiece"
    file: str  # name of the SentencePiece model that the values are for; missing: any name
    by_class: Mapping[str, FamilyDefaults]  # other values for some values of tokenizer_class in tokenizer_config.json
    tokenizer_class: str  # class that transformers needs to load the files
    special: Mapping[str, object]  # special tokens by their keys in tokenizer_config.json, such as "eos_token"
    single: str  # special tokens around a text, as a template of the `tokenizers` library, such as "$A:0 </s>:0"
    pair: str  # the same for a pair of texts
    do_lower_case: bool  # whether texts are lower-cased; default false
    keep_accents: bool  # whether accents are kept; default true
    quotes: bool  # whether `` and '' become double quotes; default false
    extra_ids: int  # number of sentinel tokens <extra_id_0>, <extra_id_1>, ..., the first one with the highest id
    replaced: list[str]  # first pieces in the file; `leading` replaces them; the first one is the unknown token
    leading: list[str]  # first tokens of the vocabulary
    trailing: list[str]  # control tokens after the last piece
    appended: list[str]  # special tokens after all others


def build_wordpiece(
    vocabulary: dict[str, int],
    config: TokenizerConfig,
    path: Path | str,
    notes: list[str],
    defaults: FamilyDefaults | None = None,
) -> tokenizers.Tokenizer:
    """Build BERT's tokenizer (Devlin et al. 2019; WordPiece: Schuster and Nakajima 2012, Wu et al. 2016).

    A word of more than 100 characters is unknown, as in the library (200 in google-research/bert).

    Args:
        vocabulary: Ids of the tokens.
        config: Values of tokenizer_config.json; keys that it lacks are added.
        path: File of the vocabulary, for messages.
        notes: Sentences for the user, to which some may be added.
        defaults: Values of the model's family; "special", "single" and "pair" are used. If None, BERT's values.

    Raises:
        TokenizerError: If the vocabulary lacks the unknown token or cannot be used.
    """
    for key, token in (defaults or FamilyDefaults()).get("special", {}).items():
        config.setdefault(key, token)
    for key, names in PUBLISHED_NAMES.items():
        if names[0] in BRACKET_TOKENS and config.get(key) is None:
            config[key] = names[0]
    unknown = _token_text(config["unk_token"])
    if unknown not in vocabulary:
        raise TokenizerError(f"{path}: the unknown token {unknown} is missing: add it, or name yours as unk_token")
    if config.get("do_lower_case") is None:
        config["do_lower_case"] = not any(map(_has_upper_case, vocabulary))
        treatment = "kept in its case, since the vocabulary has an upper-case entry"
        if config["do_lower_case"]:
            treatment = "lower-cased, as the vocabulary has no upper-case entry"
        notes.append(f"do_lower_case is not in tokenizer_config.json: text is {treatment}")
    chinese = config.get("tokenize_chinese_chars")
    with translate_errors(f"{path} cannot be used", "check that it is a WordPiece vocabulary"):
        backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True if chinese is None else chinese,
            strip_accents=config.get("strip_accents"),
            lowercase=config["do_lower_case"],
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix="##")
        if defaults is not None and "single" in defaults:
            add_family_template(backend, defaults, path)
        else:
            add_template(backend, _token_text(config["cls_token"]), _token_text(config["sep_token"]))
    return backend


def add_family_template(backend: tokenizers.Tokenizer, defaults: FamilyDefaults, path: Path | str) -> None:
    """Set the special tokens around texts from the templates "single" and "pair" of a family.

    Args:
        backend: The tokenizer, which is changed.
        defaults: Values of the family. Without templates, no special tokens are added.
        path: File of the vocabulary, for messages.

    Raises:
        TokenizerError: If a special token of the templates is missing.
    """
    single, pair = defaults.get("single", "$A"), defaults.get("pair", "$A $B:1")
    special_tokens = {token.split(":")[0] for token in f"{single} {pair}".split() if not token.startswith("$")}
    if missing := sorted(token for token in special_tokens if backend.token_to_id(token) is None):
        raise TokenizerError(f"{path} has no {', '.join(missing)}, which its model expects around a text")
    tokens_and_ids = [(token, backend.token_to_id(token)) for token in sorted(special_tokens)]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens_and_ids)


def add_template(backend: tokenizers.Tokenizer, cls_token: str, sep_token: str) -> None:
    """Set the special tokens around texts: `[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]`, with type 1 for `B [SEP]`.

    A special token that the vocabulary lacks is left out.
    """
    ids = {token: backend.token_to_id(token) for token in (cls_token, sep_token)}
    special_tokens = [(token, id) for token, id in ids.items() if id is not None]
    begin = [cls_token] if ids[cls_token] is not None else []
    has_sep = ids[sep_token] is not None
    single = [*begin, "$A:0", *([f"{sep_token}:0"] if has_sep else [])]
    pair = [*single, "$B:1", *([f"{sep_token}:1"] if has_sep else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special_tokens)


def build_byte_level_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    config: TokenizerConfig,
    path: Path | str,
    notes: list[str],
) -> tokenizers.Tokenizer:
    """Build byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), with RoBERTa's template (Liu et al. 2019).

    The template needs the first and the separator token (`<s>` and `</s>` unless the config names others) in the
    vocabulary: texts become `<s> A </s>` and `<s> A </s></s> B </s>`, all of type 0. Without them no special tokens
    are added.

    Args:
        vocabulary: Ids of the tokens.
        merges: Pairs of tokens, the first to be merged first.
        config: Values of tokenizer_config.json; keys that it lacks are added.
        path: File of the vocabulary, for messages.
        notes: Sentences for the user, to which some may be added.

    Raises:
        TokenizerError: If the vocabulary is not byte-level or cannot be used.
    """
    if sum(token.endswith("</w>") for token in vocabulary) > len(vocabulary) // 10:
        raise TokenizerError(f"{path} marks word ends with </w>, so it is not byte-level BPE: give tokenizer.json")
    if missing := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)):
        notes.append(f"{len(missing)} of the 256 bytes are not in the vocabulary, first {missing[0]!r}: text is lost")
    cls_token = _token_text(config.get("cls_token") or "<s>")
    sep_token = _token_text(config.get("sep_token") or "</s>")
    has_template = cls_token in vocabulary and sep_token in vocabulary
    if has_template:
        for key, names in PUBLISHED_NAMES.items():
            if names[-1] in ANGLE_TOKENS and config.get(key) is None:
                config[key] = names[-1]
    elif END_OF_TEXT in vocabulary:
        for key in ("bos_token", "eos_token", "unk_token"):
            if config.get(key) is None:
                config[key] = END_OF_TEXT
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    add_prefix_space = bool(config.get("add_prefix_space"))
    trim_offsets = config.get("trim_offsets")
    with translate_errors(f"{path} cannot be used", "check that merges.txt belongs to vocab.json"):
        model = models.BPE(
            vocab=vocabulary, merges=merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        backend.decoder = decoders.ByteLevel()
        if has_template:
            backend.post_processor = processors.RobertaProcessing(
                (sep_token, vocabulary[sep_token]),
                (cls_token, vocabulary[cls_token]),
                trim_offsets=True if trim_offsets is None else trim_offsets,
                add_prefix_space=add_prefix_space,
            )
    return backend


def _token_text(token: object) -> str:
    """Return the text of a special token in tokenizer_config.json."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _has_upper_case(token: str) -> bool:
    """Return whether an ordinary token has an ASCII upper-case letter; `[unused1]` and `<mask>` are not ordinary."""
    return re.search("[A-Z]", token) is not None and re.fullmatch(r"\[.*\]|<.*>", token) is None

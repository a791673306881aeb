"""The library's tokenizers put together from a vocabulary: WordPiece, byte-level BPE, Unigram."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from heedful.errors import TokenizerError
from heedful.tokenizer.errors import translate_errors
from heedful.tokenizer.limits import TokenizerConfig
from heedful.tokenizer.settings import ANGLED

# The published names of special tokens, by the key that tokenizer_config.json has for them.
TYPICAL: dict[str, tuple[str, ...]] = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<cls>", "<s>"),
    "sep_token": ("[SEP]", "<sep>", "</s>"),
    "bos_token": ("<s>",),
    "eos_token": ("</s>",),
    "mask_token": ("[MASK]", "<mask>"),
}
BRACKETED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_TEXT = "<|endoftext|>"


def build_wordpiece(
    vocabulary: dict[str, int],
    config: TokenizerConfig,
    path: Path | str,
    notes: list[str],
    defaults: Mapping[str, object] | None = None,
) -> tokenizers.Tokenizer:
    """BERT's tokenizer (Devlin et al. 2019; WordPiece: Schuster and Nakajima 2012, Wu et al. 2016).

    A word of more than 100 characters is unknown, as in the library (200 in google-research/bert). Keys that the
    config lacks are filled in.

    Args:
        vocabulary: Ids of the tokens.
        config: tokenizer_config.json; names of special tokens are added.
        path: Of the vocabulary, for messages.
        notes: Remarks for the user are added.
        defaults: Of the model's family: names of special tokens ("special") and templates ("single", "pair"); None:
            BERT's.
    """
    special = (defaults or {}).get("special", {})
    assert isinstance(special, dict)
    for key, token in special.items():
        config.setdefault(key, token)
    for key, names in TYPICAL.items():
        if names[0] in BRACKETED and config.get(key) is None:
            config[key] = names[0]
    unknown = _content(config["unk_token"])
    if unknown not in vocabulary:
        raise TokenizerError(f"{path}: the unknown token {unknown} is missing: add it, or name yours as unk_token")
    if config.get("do_lower_case") is None:
        config["do_lower_case"] = not any(map(_cased, vocabulary))
        case = "lower-cased, as" if config["do_lower_case"] else "kept in its case, since"
        none = "no" if config["do_lower_case"] else "an"
        notes.append(
            f"do_lower_case is not in tokenizer_config.json: text is {case} the vocabulary has {none} upper-case entry"
        )
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
            add_template(backend, _content(config["cls_token"]), _content(config["sep_token"]))
    return backend


def add_family_template(backend: tokenizers.Tokenizer, defaults: Mapping[str, object], path: Path | str) -> None:
    """Set the templates "single" and "pair"; raises TokenizerError for a special token that is missing."""
    single, pair = defaults.get("single", "$A"), defaults.get("pair", "$A $B:1")
    around = {token.split(":")[0] for token in f"{single} {pair}".split() if not token.startswith("$")}
    if missing := sorted(token for token in around if backend.token_to_id(token) is None):
        raise TokenizerError(f"{path} has no {', '.join(missing)}, which its model expects around a text")
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, backend.token_to_id(token)) for token in sorted(around)]
    )


def add_template(backend: tokenizers.Tokenizer, first: str, separator: str) -> None:
    """`[CLS] A [SEP]` and `[CLS] A [SEP] B [SEP]` with type 1 over `B [SEP]`; a token that is missing is left out."""
    known = [(token, backend.token_to_id(token)) for token in (first, separator)]
    start, stop = (token if number is not None else None for token, number in known)
    single = [*([start] if start else []), "$A:0", *([f"{stop}:0"] if stop else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B:1", *([f"{stop}:1"] if stop else [])],
        special_tokens=[(token, number) for token, number in known if number is not None],
    )


def build_byte_level_bpe(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    config: TokenizerConfig,
    path: Path | str,
    notes: list[str],
) -> tokenizers.Tokenizer:
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), wrapped as RoBERTa's (Liu et al. 2019) if it can be.

    When the first and separator tokens (`<s>`, `</s>` unless the config names others) are in the vocabulary, texts
    become `<s> A </s>` and `<s> A </s></s> B </s>` with type 0 throughout; else nothing goes around them.
    """
    if sum(token.endswith("</w>") for token in vocabulary) > len(vocabulary) // 10:
        raise TokenizerError(f"{path} marks word ends with </w>, so it is not byte-level BPE: give tokenizer.json")
    if missing := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocabulary)):
        notes.append(f"{len(missing)} of the 256 bytes are not in the vocabulary, first {missing[0]!r}: text is lost")
    first = _content(config.get("cls_token") or "<s>")
    separator = _content(config.get("sep_token") or "</s>")
    wrapped = first in vocabulary and separator in vocabulary
    if wrapped:
        for key, names in TYPICAL.items():
            if names[-1] in ANGLED and config.get(key) is None:
                config[key] = names[-1]
    elif END_OF_TEXT in vocabulary:
        for key in ("bos_token", "eos_token", "unk_token"):
            if config.get(key) is None:
                config[key] = END_OF_TEXT
    config.setdefault("model_input_names", ["input_ids", "attention_mask"])
    leading = bool(config.get("add_prefix_space"))
    trim = config.get("trim_offsets")
    with translate_errors(f"{path} cannot be used", "check that merges.txt belongs to vocab.json"):
        model = models.BPE(
            vocab=vocabulary, merges=merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=leading)
        backend.decoder = decoders.ByteLevel()
        if wrapped:
            backend.post_processor = processors.RobertaProcessing(
                (separator, vocabulary[separator]),
                (first, vocabulary[first]),
                trim_offsets=True if trim is None else trim,
                add_prefix_space=leading,
            )
    return backend


def _content(token: object) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _cased(token: str) -> bool:
    """Whether an ordinary entry has an ASCII upper-case letter; `[unused1]` and `<mask>` are not ordinary."""
    return re.search("[A-Z]", token) is not None and re.fullmatch(r"\[.*\]|<.*>", token) is None

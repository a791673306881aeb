"""Limits for tokenizer files, checked before the `tokenizers` library reads them.

The library does not check its input: some files make it grow without end, read past its arrays or abort the process.
Here each component must have a known type, and all components together may make a text at most MAX_GROWTH times as
long. `files.py` calls `check_state` for tokenizer.json; other readers of vocabularies call `check_tokens`,
`check_pieces` and `check_added`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heedful.errors import TokenizerError, quoted
from heedful.tokenizer.charsmap import max_expanded_chars, max_replacement_chars
from heedful.tokenizer.regex_cost import UnsupportedError, bound_cost

State = Mapping[str, Any]  # a tokenizer.json, or a part of it, as parsed
TokenizerConfig = dict[str, Any]  # a tokenizer_config.json, as parsed

MAX_TOKENS = 1_000_000  # tokens of a vocabulary, and merges
MAX_ADDED = 100_000  # added tokens
MAX_ADDED_CHARS = 2 << 20  # characters of all added tokens: the search for them takes some 75 bytes for each
MAX_TOKEN_CHARS = 4_096  # characters of a token
MAX_PIECE_CHARS = 256  # characters of a piece of Unigram, which tries all lengths at each position
MAX_PIECE_BYTES = 4 << 20  # bytes of all pieces: Unigram's trie takes some 350 bytes for each
MAX_ABS_SCORE = 1e30  # absolute score of a piece
MAX_WORD_CHARS = 200  # characters of a word: WordPiece's time grows with their cube
MAX_AFFIX_CHARS = 16  # characters of a prefix or suffix of BPE or WordPiece
MAX_ID = 2**31 - 1  # id of a token
MAX_COMPONENTS = 64  # components of a normalizer, pre-tokenizer, post-processor or decoder
MAX_DEPTH = 16  # levels of sequences in sequences
MAX_TEXT_CHARS = 256  # characters of any other text
MAX_GROWTH = 16  # factor by which a text may become longer, beyond Unicode's normal forms
UNICODE_GROWTH = 18  # maximum characters in the normal form of one character
MAX_TEMPLATE_TOKENS = 32  # special tokens around a text


class BoundsError(ValueError):
    """A file exceeds a limit; the message does not name the file."""


def check_state(state: State, path: Path) -> None:
    """Check the parsed contents of a tokenizer.json; raise TokenizerError if they exceed a limit."""
    try:
        _check_model(state["model"])
        check_added(state.get("added_tokens") or [])
        _check_growth(state, "normalizer", "pre_tokenizer")
        _check_growth(state, "decoder")
        _check_growth(state, "post_processor")
        count = sum(map(_num_template_tokens, _components(state, "post_processor")))
        if count > MAX_TEMPLATE_TOKENS:
            raise BoundsError(
                f"its post_processor puts {count} tokens around a text, at most {MAX_TEMPLATE_TOKENS} are read"
            )
    except BoundsError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _check_growth(state: State, *parts: str) -> None:
    """Check the components of parts that are applied one after another, and by how much they lengthen a text."""
    growth = 1.0
    for part in parts:
        for step in _components(state, part):
            growth *= _growth(step, part)
            if growth > MAX_GROWTH * UNICODE_GROWTH:
                break  # refused below, with or without a map
    has_map = any(step["type"] == "Precompiled" for part in parts for step in _components(state, part))
    if growth > MAX_GROWTH * (UNICODE_GROWTH if has_map else 1):  # a map may do what Unicode's normal forms do
        raise BoundsError(f"its {parts[0]} can make a text more than {MAX_GROWTH} times as long")


# -- vocabularies ---------------------------------------------------------------------------------------------


def _check_model(model: State) -> None:
    """Check the vocabulary, the merges and the affixes of a model."""
    vocabulary, merges = model.get("vocab"), model.get("merges") or []
    for key, max_chars in (("unk_token", MAX_TOKEN_CHARS), ("end_of_word_suffix", MAX_AFFIX_CHARS)):
        if not isinstance(model.get(key), str | None) or len(model.get(key) or "") > max_chars:
            raise BoundsError(f"its model has {key} {quoted(model[key])}, expected at most {max_chars} characters")
    word_chars = model.get("max_input_chars_per_word", MAX_WORD_CHARS)
    if type(word_chars) is not int or not 0 < word_chars <= MAX_WORD_CHARS:
        raise BoundsError(f"max_input_chars_per_word is {quoted(word_chars)}, expected 1 to {MAX_WORD_CHARS}")
    if isinstance(vocabulary, list):
        if not all(isinstance(entry, list) and len(entry) == 2 for entry in vocabulary):
            raise BoundsError("its vocabulary is a list, but not of pieces and scores")
        check_pieces(vocabulary)
    elif isinstance(vocabulary, dict):
        check_tokens(vocabulary)
    if not isinstance(merges, list) or len(merges) > MAX_TOKENS:
        raise BoundsError(f"its merges are no list of at most {MAX_TOKENS}")
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(prefix, str) or len(prefix) > MAX_AFFIX_CHARS:
        raise BoundsError(
            f"continuing_subword_prefix is {quoted(prefix)}, expected at most {MAX_AFFIX_CHARS} characters"
        )
    if prefix:  # the library cuts as many characters off the second part of each merge without a check
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not (isinstance(pair, list) and isinstance(pair[-1], str) and pair[-1].startswith(prefix)):
                raise BoundsError(f"the second part of the merge {quoted(merge)} does not begin with {quoted(prefix)}")


def check_tokens(tokens: Mapping[str, object]) -> None:
    """Check the count and the lengths of a vocabulary's tokens."""
    if len(tokens) > MAX_TOKENS:
        raise BoundsError(f"it has {len(tokens)} tokens, at most {MAX_TOKENS} are read")
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARS:
        raise BoundsError(
            f"its token {quoted(longest)} has {len(longest)} characters, at most {MAX_TOKEN_CHARS} are read"
        )


def check_pieces(pieces: Sequence[Sequence[object]]) -> None:
    """Check the pieces of a Unigram vocabulary, each (text, score)."""
    if len(pieces) > MAX_TOKENS:
        raise BoundsError(f"it has {len(pieces)} pieces, at most {MAX_TOKENS} are read")
    size = 0  # bytes
    for piece, score in pieces:
        if not isinstance(piece, str) or len(piece) > MAX_PIECE_CHARS:
            raise BoundsError(f"its piece {quoted(piece)} is no text of at most {MAX_PIECE_CHARS} characters")
        if not isinstance(score, int | float) or isinstance(score, bool) or not abs(score) <= MAX_ABS_SCORE:
            raise BoundsError(f"the score of {quoted(piece)} is {quoted(score)}, expected a number")
        size += len(piece) if piece.isascii() else len(piece.encode(errors="replace"))
    if size > MAX_PIECE_BYTES:
        raise BoundsError(f"its pieces have {size} bytes together, at most {MAX_PIECE_BYTES} are read")


def check_added(tokens: object) -> None:
    """Check added tokens, which are texts or objects with a content."""
    if not isinstance(tokens, list) or len(tokens) > MAX_ADDED:
        raise BoundsError(f"its added tokens are no list of at most {MAX_ADDED}")
    size = 0  # characters
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
            raise BoundsError(f"the added token {quoted(token)} is no text of 1 to {MAX_TOKEN_CHARS} characters")
        size += len(content)
    if size > MAX_ADDED_CHARS:
        raise BoundsError(f"its added tokens have {size} characters together, at most {MAX_ADDED_CHARS} are read")


# -- components -----------------------------------------------------------------------------------------------


def _components(state: State, part: str) -> list[State]:
    """Return the components of a part in the order of their use; sequences are replaced by their components."""
    components: list[State] = []
    list_name = _SEQUENCE_KEYS[part]

    def collect(component: object, depth: int) -> None:
        if not isinstance(component, dict) or not isinstance(component.get("type"), str):
            raise BoundsError(f"its {part} holds {quoted(component)}, expected an object with a type")
        if component["type"] != "Sequence":
            components.append(component)
        elif not isinstance(component.get(list_name), list) or depth == MAX_DEPTH:
            raise BoundsError(f"its {part} has a Sequence without {list_name}, or more than {MAX_DEPTH} deep")
        else:
            for inner in component[list_name][: MAX_COMPONENTS + 1]:
                collect(inner, depth + 1)
        if len(components) > MAX_COMPONENTS:
            raise BoundsError(f"its {part} has more than {MAX_COMPONENTS} components")

    if state.get(part) is not None:
        collect(state[part], 0)
    return components


_SEQUENCE_KEYS = {  # part to the key under which a Sequence has its components
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def _growth(step: State, part: str) -> float:
    """Check a component, and return the factor by which it can make a text longer."""
    kind, growth_by_type = step["type"], GROWTH_BY_TYPE[part]
    if kind not in growth_by_type:
        raise BoundsError(f"its {part} has the type {quoted(kind)}, expected one of {', '.join(growth_by_type)}")
    for key, value in step.items():
        if key not in _CHECKED_ELSEWHERE and (isinstance(value, dict | list) or len(str(value)) > MAX_TEXT_CHARS):
            raise BoundsError(f"{key} of its {kind} is {quoted(value)}, expected at most {MAX_TEXT_CHARS} characters")
    return growth_by_type[kind](step)


_CHECKED_ELSEWHERE = ("pattern", "precompiled_charsmap", "sep", "cls", "single", "pair", "special_tokens")


def _no_growth(step: State) -> float:
    return 1


def _replace_growth(step: State) -> float:
    """Return the growth by the replacement of a pattern or a text by another text."""
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(content, str):
        raise BoundsError(f"a Replace has the content {quoted(content)}, expected a text")
    match_chars = _min_match_chars(pattern)
    content_chars = max_expanded_chars(content)
    return max(1.0, content_chars / match_chars) if match_chars else 1.0 + content_chars


def _split_growth(step: State) -> float:
    _min_match_chars(step.get("pattern"))  # checks the pattern
    return 1


def _min_match_chars(pattern: object) -> int:
    """Check a pattern, and return the minimum number of characters of a match."""
    match pattern:
        case {"String": str(text)} if 0 < len(text) <= MAX_TEXT_CHARS:
            return len(text)
        case {"Regex": str(text)}:
            try:
                return bound_cost(text).min_chars
            except UnsupportedError as error:
                raise BoundsError(f"the pattern {quoted(text)} is not used: {error}") from None
    raise BoundsError(f"it has the pattern {quoted(pattern)}, expected a String or a Regex")


def _prepend_growth(step: State) -> float:
    return 1.0 + max_expanded_chars(str(step.get("prepend")))


def _precompiled_growth(step: State) -> float:
    data = step.get("precompiled_charsmap")
    if not isinstance(data, str):
        raise BoundsError(f"precompiled_charsmap is {quoted(data)}, expected a text in base64")
    try:
        return check_charsmap(base64.b64decode(data, validate=True))
    except ValueError as error:
        raise BoundsError(str(error)) from None


def check_charsmap(data: bytes) -> int:
    """Check a compiled character map, and return how many characters its longest replacement has, at least 1."""
    try:
        return max(1, max_replacement_chars(data))
    except ValueError as error:
        raise BoundsError(str(error)) from None


def _integer_bounds(limits: Mapping[str, tuple[int, int]]) -> Callable[[State], float]:
    """Return a check that the values of a component, which does not lengthen a text, are in these ranges."""

    def check(step: State) -> float:
        for key, (minimum, maximum) in limits.items():
            if type(value := step.get(key)) is not int or not minimum <= value <= maximum:
                raise BoundsError(f"{key} of its {step['type']} is {quoted(value)}, expected {minimum} to {maximum}")
        return 1

    return check


def _check_sep_and_cls(step: State) -> float:
    """Check the two special tokens of a component, each (token, id)."""
    for key in ("sep", "cls"):
        match step.get(key):
            case [str(token), int(id)] if len(token) <= MAX_TEXT_CHARS and 0 <= id <= MAX_ID:
                continue
        raise BoundsError(f"{key} of its {step['type']} is {quoted(step.get(key))}, expected a token and its id")
    return 1


def _check_template(step: State) -> float:
    """Check a template: it has each text at most once, and special tokens with ids."""
    special_tokens = step.get("special_tokens")
    if not isinstance(special_tokens, dict) or len(special_tokens) > MAX_TEMPLATE_TOKENS:
        raise BoundsError(f"its template has no special_tokens, or more than {MAX_TEMPLATE_TOKENS}")
    for name, token in special_tokens.items():
        match token:
            case {"id": str(id), "ids": [*ids], "tokens": [*tokens]} if id == name and len(id) <= MAX_TEXT_CHARS:
                are_ids = all(type(token_id) is int and 0 <= token_id <= MAX_ID for token_id in ids)
                are_texts = all(isinstance(text, str) and len(text) <= MAX_TEXT_CHARS for text in tokens)
                if are_ids and are_texts and len(ids) == len(tokens) <= MAX_TEMPLATE_TOKENS:
                    continue
        raise BoundsError(f"the special token {quoted(name)} of its template is {quoted(token)}")
    for key, texts in (("single", {"A"}), ("pair", {"A", "B"})):
        pieces: object = step.get(key)
        seen: set[str] = set()
        if not isinstance(pieces, list) or len(pieces) > MAX_TEMPLATE_TOKENS:
            raise BoundsError(
                f"{key} of its template is {quoted(pieces)}, expected at most {MAX_TEMPLATE_TOKENS} pieces"
            )
        for piece in pieces:
            match piece:
                case {"SpecialToken": {"id": str(id), "type_id": int(type_)}} if (
                    id in special_tokens and 0 <= type_ < 256
                ):
                    continue
                case {"Sequence": {"id": str(id), "type_id": int(type_)}} if id in texts - seen and 0 <= type_ < 256:
                    seen.add(id)
                    continue
            raise BoundsError(f"{key} of its template holds {quoted(piece)}, which is unknown or occurs twice")
    return 1


def _num_template_tokens(step: State) -> int:
    """Return how many special tokens a post-processor puts around a text or pair, at most."""
    match step["type"]:
        case "TemplateProcessing":
            num_ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            counts = []
            for key in ("single", "pair"):
                names = [piece.get("SpecialToken", {}).get("id") for piece in step[key]]
                counts.append(sum(num_ids.get(name, 0) for name in names))
            return max(counts)
        case "ByteLevel":
            return 0
    return 4


# part -> type of a component -> function that checks a component and returns the factor by which it may lengthen a text
GROWTH_BY_TYPE: dict[str, dict[str, Callable[[State], float]]] = {
    "normalizer": {
        "BertNormalizer": lambda step: 3,  # a space on either side of each Chinese character
        "ByteLevel": lambda step: 4,  # one character for each byte
        "Lowercase": _no_growth,
        "NFC": _no_growth,
        "NFD": _no_growth,
        "NFKC": _no_growth,
        "NFKD": _no_growth,
        "Nmt": _no_growth,
        "Precompiled": _precompiled_growth,
        "Prepend": _prepend_growth,
        "Replace": _replace_growth,
        "Strip": _no_growth,
        "StripAccents": _no_growth,
    },
    "pre_tokenizer": {
        "BertPreTokenizer": _no_growth,
        "ByteLevel": lambda step: 4,
        "CharDelimiterSplit": _no_growth,
        "Digits": _no_growth,
        "FixedLength": _integer_bounds({"length": (1, MAX_ID)}),
        "Metaspace": lambda step: 2,  # one character before each word
        "Punctuation": _no_growth,
        "Split": _split_growth,
        "UnicodeScripts": _no_growth,
        "Whitespace": _no_growth,
        "WhitespaceSplit": _no_growth,
    },
    "post_processor": {
        "BertProcessing": _check_sep_and_cls,
        "ByteLevel": _no_growth,
        "RobertaProcessing": _check_sep_and_cls,
        "TemplateProcessing": _check_template,
    },
    "decoder": {
        "BPEDecoder": _no_growth,
        "ByteFallback": _no_growth,
        "ByteLevel": _no_growth,
        "CTC": _no_growth,
        "Fuse": _no_growth,
        "Metaspace": _no_growth,
        "Replace": _replace_growth,
        "Strip": _integer_bounds({"start": (0, MAX_TEXT_CHARS), "stop": (0, 1)}),
        "WordPiece": _no_growth,
    },
}

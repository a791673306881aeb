"""Bounds for tokenizer files, checked before the `tokenizers` library sees them.

The library takes what it is given: some files make it grow without end, read past its arrays or abort the process.
Here every component has to be a known one, and the whole may make a text at most MAX_GROWTH times as long.
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

MAX_TOKENS = 1_000_000  # of a vocabulary, and the same number of merges
MAX_ADDED = 100_000  # added tokens
MAX_ADDED_CHARS = 2 << 20  # of all added tokens together: finding them takes some 75 bytes for each
MAX_TOKEN_CHARS = 4_096  # characters
MAX_PIECE_CHARS = 256  # characters of a piece of Unigram, which tries all lengths at each place
MAX_PIECE_BYTES = 4 << 20  # of all pieces together: Unigram's trie takes some 350 bytes for each
MAX_ABS_SCORE = 1e30
MAX_WORD_CHARS = 200  # characters; WordPiece's time grows with their cube
MAX_AFFIX_CHARS = 16  # characters of a prefix or suffix of BPE or WordPiece
MAX_ID = 2**31 - 1
MAX_COMPONENTS = 64  # in a normalizer, pre-tokenizer, post-processor or decoder
MAX_DEPTH = 16  # of sequences in sequences
MAX_TEXT_CHARS = 256  # characters of any other text
MAX_GROWTH = 16  # times, beyond what Unicode's normal forms do
UNICODE_GROWTH = 18  # characters that Unicode's normal forms make of one, at most
MAX_TEMPLATE_TOKENS = 32  # special tokens that post-processors put around a text


class BoundsError(ValueError):
    """A file goes past a bound; the message does not name the file."""


def check_state(state: State, path: Path) -> None:
    """Check the whole of a tokenizer.json, as parsed."""
    try:
        _check_model(state["model"])
        check_added(state.get("added_tokens") or [])
        _check_growth(state, "normalizer", "pre_tokenizer")
        _check_growth(state, "decoder")
        _check_growth(state, "post_processor")
        around = sum(map(_tokens_around, _components(state, "post_processor")))
        if around > MAX_TEMPLATE_TOKENS:
            raise BoundsError(
                f"its post_processor puts {around} tokens around a text, at most {MAX_TEMPLATE_TOKENS} are read"
            )
    except BoundsError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _check_growth(state: State, *parts: str) -> None:
    """Check the components of parts that are applied one after the other."""
    growth = 1.0
    for part in parts:
        for step in _components(state, part):
            growth *= _growth(step, part)
            if growth > MAX_GROWTH * UNICODE_GROWTH:
                break
    maps = any(step["type"] == "Precompiled" for part in parts for step in _components(state, part))
    if growth > MAX_GROWTH * (UNICODE_GROWTH if maps else 1):  # one map may do what Unicode's normal forms do
        raise BoundsError(f"its {parts[0]} can make a text more than {MAX_GROWTH} times as long")


# -- vocabularies ---------------------------------------------------------------------------------------------


def _check_model(model: State) -> None:
    vocabulary, merges = model.get("vocab"), model.get("merges") or []
    for key, most in (("unk_token", MAX_TOKEN_CHARS), ("end_of_word_suffix", MAX_AFFIX_CHARS)):
        if not isinstance(model.get(key), str | None) or len(model.get(key) or "") > most:
            raise BoundsError(f"its model has {key} {quoted(model[key])}, expected at most {most} characters")
    longest = model.get("max_input_chars_per_word", MAX_WORD_CHARS)
    if type(longest) is not int or not 0 < longest <= MAX_WORD_CHARS:
        raise BoundsError(f"max_input_chars_per_word is {quoted(longest)}, expected 1 to {MAX_WORD_CHARS}")
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
    if prefix:  # the library cuts it off the second part of every merge, whether it is there or not
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not (isinstance(pair, list) and isinstance(pair[-1], str) and pair[-1].startswith(prefix)):
                raise BoundsError(f"the second part of the merge {quoted(merge)} does not begin with {quoted(prefix)}")


def check_tokens(tokens: Mapping[str, object]) -> None:
    """Check how many tokens a vocabulary has, and how long they are."""
    if len(tokens) > MAX_TOKENS:
        raise BoundsError(f"it has {len(tokens)} tokens, at most {MAX_TOKENS} are read")
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARS:
        raise BoundsError(
            f"its token {quoted(longest)} has {len(longest)} characters, at most {MAX_TOKEN_CHARS} are read"
        )


def check_pieces(pieces: Sequence[Sequence[object]]) -> None:
    """Check the (piece, score) of a Unigram vocabulary."""
    if len(pieces) > MAX_TOKENS:
        raise BoundsError(f"it has {len(pieces)} pieces, at most {MAX_TOKENS} are read")
    size = 0
    for piece, score in pieces:
        if not isinstance(piece, str) or len(piece) > MAX_PIECE_CHARS:
            raise BoundsError(f"its piece {quoted(piece)} is no text of at most {MAX_PIECE_CHARS} characters")
        if not isinstance(score, int | float) or isinstance(score, bool) or not abs(score) <= MAX_ABS_SCORE:
            raise BoundsError(f"the score of {quoted(piece)} is {quoted(score)}, expected a number")
        size += len(piece) if piece.isascii() else len(piece.encode(errors="replace"))
    if size > MAX_PIECE_BYTES:
        raise BoundsError(f"its pieces have {size} bytes together, at most {MAX_PIECE_BYTES} are read")


def check_added(tokens: object) -> None:
    """Check added tokens: texts, or objects with a content."""
    if not isinstance(tokens, list) or len(tokens) > MAX_ADDED:
        raise BoundsError(f"its added tokens are no list of at most {MAX_ADDED}")
    size = 0
    for token in tokens:
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
            raise BoundsError(f"the added token {quoted(token)} is no text of 1 to {MAX_TOKEN_CHARS} characters")
        size += len(content)
    if size > MAX_ADDED_CHARS:
        raise BoundsError(f"its added tokens have {size} characters together, at most {MAX_ADDED_CHARS} are read")


# -- components -----------------------------------------------------------------------------------------------


def _components(state: State, part: str) -> list[State]:
    """The components in the order in which they are applied, those of sequences among them."""
    components: list[State] = []
    list_name = _SEQUENCE_KEYS[part]

    def walk(component: object, depth: int) -> None:
        if not isinstance(component, dict) or not isinstance(component.get("type"), str):
            raise BoundsError(f"its {part} holds {quoted(component)}, expected an object with a type")
        if component["type"] != "Sequence":
            components.append(component)
        elif not isinstance(component.get(list_name), list) or depth == MAX_DEPTH:
            raise BoundsError(f"its {part} has a Sequence without {list_name}, or more than {MAX_DEPTH} deep")
        else:
            for inner in component[list_name][: MAX_COMPONENTS + 1]:
                walk(inner, depth + 1)
        if len(components) > MAX_COMPONENTS:
            raise BoundsError(f"its {part} has more than {MAX_COMPONENTS} components")

    if state.get(part) is not None:
        walk(state[part], 0)
    return components


_SEQUENCE_KEYS = {  # parts, and the key under which a Sequence of theirs has its components
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def _growth(step: State, part: str) -> float:
    """By how much a component can make a text longer."""
    kind, table = step["type"], GROWTH_BY_TYPE[part]
    if kind not in table:
        raise BoundsError(f"its {part} has the type {quoted(kind)}, expected one of {', '.join(table)}")
    for key, value in step.items():
        if key not in _CHECKED_ELSEWHERE and (isinstance(value, dict | list) or len(str(value)) > MAX_TEXT_CHARS):
            raise BoundsError(f"{key} of its {kind} is {quoted(value)}, expected at most {MAX_TEXT_CHARS} characters")
    return table[kind](step)


_CHECKED_ELSEWHERE = ("pattern", "precompiled_charsmap", "sep", "cls", "single", "pair", "special_tokens")


def _no_growth(step: State) -> float:
    return 1


def _replace_growth(step: State) -> float:
    """A pattern or a text by another text."""
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(content, str):
        raise BoundsError(f"a Replace has the content {quoted(content)}, expected a text")
    shortest = _min_match_chars(pattern)
    length = max_expanded_chars(content)
    return max(1.0, length / shortest) if shortest else 1.0 + length


def _split_growth(step: State) -> float:
    _min_match_chars(step.get("pattern"))
    return 1


def _min_match_chars(pattern: object) -> int:
    """The characters that a match has at least."""
    match pattern:
        case {"String": str(text)} if 0 < len(text) <= MAX_TEXT_CHARS:
            return len(text)
        case {"Regex": str(text)}:
            try:
                return bound_cost(text).shortest
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
    """The length of the longest replacement of a compiled character map."""
    try:
        return max(1, max_replacement_chars(data))
    except ValueError as error:
        raise BoundsError(str(error)) from None


def _integer_bounds(limits: Mapping[str, tuple[int, int]]) -> Callable[[State], float]:
    def check(step: State) -> float:
        for key, (least, most) in limits.items():
            if type(value := step.get(key)) is not int or not least <= value <= most:
                raise BoundsError(f"{key} of its {step['type']} is {quoted(value)}, expected {least} to {most}")
        return 1

    return check


def _check_sep_and_cls(step: State) -> float:
    for key in ("sep", "cls"):
        match step.get(key):
            case [str(token), int(number)] if len(token) <= MAX_TEXT_CHARS and 0 <= number <= MAX_ID:
                continue
        raise BoundsError(f"{key} of its {step['type']} is {quoted(step.get(key))}, expected a token and its id")
    return 1


def _check_template(step: State) -> float:
    """Each text once, and a few special tokens that are all described."""
    specials = step.get("special_tokens")
    if not isinstance(specials, dict) or len(specials) > MAX_TEMPLATE_TOKENS:
        raise BoundsError(f"its template has no special_tokens, or more than {MAX_TEMPLATE_TOKENS}")
    for name, token in specials.items():
        match token:
            case {"id": str(id), "ids": [*ids], "tokens": [*tokens]} if id == name and len(id) <= MAX_TEXT_CHARS:
                whole = all(type(number) is int and 0 <= number <= MAX_ID for number in ids)
                named = all(isinstance(text, str) and len(text) <= MAX_TEXT_CHARS for text in tokens)
                if whole and named and len(ids) == len(tokens) <= MAX_TEMPLATE_TOKENS:
                    continue
        raise BoundsError(f"the special token {quoted(name)} of its template is {quoted(token)}")
    for key, known in (("single", {"A"}), ("pair", {"A", "B"})):
        pieces: object = step.get(key)
        seen: set[str] = set()
        if not isinstance(pieces, list) or len(pieces) > MAX_TEMPLATE_TOKENS:
            raise BoundsError(
                f"{key} of its template is {quoted(pieces)}, expected at most {MAX_TEMPLATE_TOKENS} pieces"
            )
        for piece in pieces:
            match piece:
                case {"SpecialToken": {"id": str(id), "type_id": int(kind)}} if id in specials and 0 <= kind < 256:
                    continue
                case {"Sequence": {"id": str(id), "type_id": int(kind)}} if id in known - seen and 0 <= kind < 256:
                    seen.add(id)
                    continue
            raise BoundsError(f"{key} of its template holds {quoted(piece)}, which is unknown or there twice")
    return 1


def _tokens_around(step: State) -> int:
    """How many special tokens a post-processor puts around a pair, or around a text."""
    match step["type"]:
        case "TemplateProcessing":
            ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            named = [[piece.get("SpecialToken", {}).get("id") for piece in step[key]] for key in ("single", "pair")]
            return max(sum(ids.get(name, 0) for name in names) for names in named)
        case "ByteLevel":
            return 0
    return 4


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

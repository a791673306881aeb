"""`tokenizer_state`: a tokenizer as data for web/tokenizer.js, which tokenizes texts in the page.

The data is the parts of tokenizer.json that affect the tokens of a text, with sequences of components flattened.
"""

from __future__ import annotations

import re
from typing import Any

from heedful.errors import HeedfulError
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.encoding import Encoding

State = dict[str, Any]
NORMALIZERS = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Replace",
    "Strip",
    "StripAccents",
}
PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "Digits",
    "Metaspace",
    "Punctuation",
    "Split",
    "Whitespace",
    "WhitespaceSplit",
}
MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}
UNSUPPORTED_OPTIONS = ("dropout", "end_of_word_suffix")  # options of a model
DIFFERENT_PATTERN = re.compile(  # regex syntax that JavaScript interprets differently
    r"\\[^sSdDAzpPnrt^$\\.*+?()\[\]{}|/]"  # other escapes, such as \\w, whose class is ASCII in JavaScript
    r"|\(\?(?![:=!]|<[=!])"  # other groups, such as (?i: and (?>
    r"|[*+?}]\+"  # possessive quantifiers
    r"|&&|\[\[?:"  # intersections and POSIX classes
)
BYTE_LEVEL = ("ByteLevel", "RobertaProcessing")  # post-processors that can trim offsets


def tokenizer_state(tokenizer: Tokenizer) -> State:
    """Return the data from which tokenizer.js builds the tokenizer.

    Raises:
        HeedfulError: If tokenizer.js does not support a part of the tokenizer.
    """
    state = tokenizer.tokenizer_json()
    model = dict(state["model"])
    for name in UNSUPPORTED_OPTIONS:
        if model.get(name):
            raise HeedfulError(f"the tokenizer has the option {name}, which HTML export does not support")
    if model["type"] == "BPE" and model.get("continuing_subword_prefix"):
        raise HeedfulError(
            "the BPE tokenizer has the option continuing_subword_prefix, which HTML export does not support"
        )
    _check([model], MODELS)
    pre_tokenizers = _steps(state["pre_tokenizer"], "pretokenizers")
    normalizers = _steps(state["normalizer"], "normalizers")
    _check(pre_tokenizers, PRE_TOKENIZERS)
    _check(normalizers, NORMALIZERS)
    _check_patterns([*normalizers, *pre_tokenizers])
    processors = _steps(state["post_processor"], "processors")
    trims = [step for step in processors if step["type"] in BYTE_LEVEL and step.get("trim_offsets")]
    return {
        "normalizers": normalizers,
        "pre_tokenizers": pre_tokenizers,
        "model": model,
        "added": state["added_tokens"],
        "templates": [_template(tokenizer.encode("a")), _template(tokenizer.encode(("a", "a")))],
        "trim": trims[0] if trims else None,
        "decoder": _decoder(_steps(state["decoder"], "decoders")),
    }


def _decoder(steps: list[State]) -> str | None:
    """Return the type of the first decoder. A decoder that replaces "\u2581" by a space is "Metaspace" too."""
    if not steps:
        return None
    first = steps[0]
    if first["type"] == "Replace" and (first["pattern"], first["content"]) == ({"String": "\u2581"}, " "):
        return "Metaspace"
    return str(first["type"])


def _steps(part: State | None, key: str) -> list[State]:
    """Return a component of tokenizer.json as a list, or all components of a Sequence, whose list is at `key`."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for member in part[key] for step in _steps(member, key)]


def _check(steps: list[State], known: set[str]) -> None:
    """Raise a HeedfulError if a component has an unsupported type."""
    for step in steps:
        if step["type"] not in known:
            raise HeedfulError(
                f"the tokenizer has a part of the type {step['type']}, which HTML export does not support; it supports "
                f"{', '.join(sorted(known))}"
            )


def _check_patterns(steps: list[State]) -> None:
    """Raise a HeedfulError if JavaScript interprets a regular expression of a component differently."""
    for step in steps:
        pattern = (step.get("pattern") or {}).get("Regex", "")
        if different := DIFFERENT_PATTERN.search(pattern):
            raise HeedfulError(
                f"the tokenizer has the pattern {pattern!r}; {different[0]!r} is regex syntax that JavaScript "
                "interprets differently"
            )


def _template(encoding: Encoding) -> list[State]:
    """Return special tokens and texts in order, from an encoding with special tokens; a text has one entry."""
    template: list[State] = []
    for id, type, segment in zip(encoding.ids, encoding.types, encoding.segments, strict=True):
        part = {"special": id, "type": type} if segment is None else {"segment": segment, "type": type}
        if segment is None or part not in template:
            template.append(part)
    return template

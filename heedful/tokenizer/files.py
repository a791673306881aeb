"""A folder's tokenizer files, read with suspicion: what decides ids is checked before anything is encoded."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from heedful.errors import HeedfulError, TokenizerError, quoted
from heedful.tokenizer import joint_vocabulary, sentencepiece_model
from heedful.tokenizer.build import PUBLISHED_NAMES, build_byte_level_bpe, build_wordpiece
from heedful.tokenizer.errors import silence_stderr, translate_errors
from heedful.tokenizer.limits import (
    LARGEST_ID,
    LONGEST_TOKEN,
    MAX_TOKENS,
    BoundsError,
    TokenizerConfig,
    check_added,
    check_state,
    check_tokens,
)
from heedful.untrusted_files import read_bytes, read_json

LONGEST_LINE = 1_000  # characters of a line of vocab.txt or merges.txt
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """Contents of a folder: the library's tokenizer, tokenizer_config.json with defaults, and notes for the user."""

    backend: tokenizers.Tokenizer
    config: TokenizerConfig
    notes: list[str] = field(default_factory=list)


def read_tokenizer_files(folder: Path, defaults: Mapping[str, object] | None = None) -> TokenizerFiles:
    """Read tokenizer.json, else vocab.txt, source.spm, vocab.json with merges.txt, or a SentencePiece model.

    `defaults` completes vocab.txt and the latter, which say little (see `build_wordpiece` and `build_sentencepiece`).
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder: give the folder that holds tokenizer.json or a vocabulary")
    notes: list[str] = []
    config = _config(folder)
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder, notes)
    elif (folder / "vocab.txt").is_file():
        entries = _vocabulary_lines(folder, "vocab.txt", notes)
        wordpiece = defaults if defaults is not None and defaults.get("model") == "wordpiece" else None
        backend = build_wordpiece(entries, config, folder / "vocab.txt", notes, wordpiece)
    elif (folder / joint_vocabulary.SOURCE).is_file():
        vocabulary = _vocabulary_json(folder, joint_vocabulary.VOCABULARY)
        backend = joint_vocabulary.read_joint_vocabulary(folder, vocabulary, config, defaults)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        vocabulary, merges = _vocabulary_json(folder, "vocab.json"), _merges(folder, "merges.txt", notes)
        backend = build_byte_level_bpe(vocabulary, merges, config, folder / "vocab.json", notes)
    elif model := next((folder / name for name in sentencepiece_model.NAMES if (folder / name).is_file()), None):
        by_class = (defaults or {}).get("by_class", {})
        assert isinstance(by_class, dict)
        defaults = by_class.get(config.get("tokenizer_class"), defaults)
        if defaults is not None and defaults.get("file", model.name) != model.name:
            defaults = None  # they are for a file with another name
        if defaults is None:
            notes.append(f"{model.name} does not name the special tokens around a text (none are added)")
        backend = sentencepiece_model.build_sentencepiece(
            sentencepiece_model.read_model(folder, model.name), defaults or {}, config, model
        )
    else:
        raise _nothing(folder)
    _add_named(backend, config, folder, notes)
    return TokenizerFiles(backend=backend, config=config, notes=notes)


def _nothing(folder: Path) -> HeedfulError:
    others = sorted(path.name for path in folder.glob("*.model"))
    hint = f"; {', '.join(others)} is of another kind: convert it to tokenizer.json first" if others else ""
    return TokenizerError(
        f"no tokenizer in {folder}: looked for tokenizer.json, for vocab.txt (WordPiece), "
        "for vocab.json with merges.txt (byte-level BPE), and for "
        f"{sentencepiece_model.NAMES[0]} (SentencePiece){hint}"
    )


def _object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder."""
    value = read_json(folder, name)
    if not isinstance(value, dict):
        raise TokenizerError(f"{folder / name} holds a JSON {type(value).__name__}, but an object was expected")
    return value


def _config(folder: Path) -> TokenizerConfig:
    config: TokenizerConfig = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _object(folder, name)
    for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "trim_offsets"):
        if not isinstance(config.get(key), bool | None):
            raise TokenizerError(
                f"{folder}/tokenizer_config.json: {key} is {quoted(config[key])}, but true or false is needed"
            )
    for key, shape in (("added_tokens_decoder", dict), ("additional_special_tokens", list)):
        if not isinstance(config.get(key), shape | None):
            raise TokenizerError(
                f"{folder}/tokenizer_config.json: {key} is {quoted(config[key])}, not a {shape.__name__}"
            )
    for key in PUBLISHED_NAMES:
        content = config[key].get("content") if isinstance(config.get(key), dict) else config.get(key)
        if not isinstance(content, str | None) or len(content or "") > LONGEST_TOKEN:
            raise TokenizerError(
                f"{folder}/tokenizer_config.json: {key} is {quoted(config[key])}, but a token is needed"
            )
    longest = config.get("model_max_length")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float) or not longest > 0):
        raise TokenizerError(
            f"{folder}/tokenizer_config.json: model_max_length is {quoted(longest)}, but a number is needed"
        )
    if (folder / "added_tokens.json").is_file():
        added = {str(number): {"content": token} for token, number in _object(folder, "added_tokens.json").items()}
        config["added_tokens_decoder"] = added | (config.get("added_tokens_decoder") or {})
    try:
        check_added(list((config.get("added_tokens_decoder") or {}).values()))
        check_added(config.get("additional_special_tokens") or [])
    except BoundsError as error:
        raise TokenizerError(f"{folder}: its added tokens cannot be used: {error}") from None
    return config


def _read_tokenizer_json(folder: Path, notes: list[str]) -> tokenizers.Tokenizer:
    """tokenizer.json less its stored truncation, padding and dropout, which would change what a text means."""
    state, path = _object(folder, "tokenizer.json"), folder / "tokenizer.json"
    state["truncation"] = state["padding"] = None
    model = state.get("model")
    if not isinstance(model, dict):
        raise TokenizerError(f"{path} has no model: give the tokenizer.json that belongs to the checkpoint")
    if model.get("dropout"):
        notes.append(f"tokenizer.json drops {quoted(model['dropout'])} of its merges at random (switched off)")
        model["dropout"] = None
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        check_ids(vocabulary, path)
    check_state(state, path)
    with translate_errors(f"{path} cannot be read", "write it again with the library that made it"), silence_stderr():
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and isinstance(vocabulary, dict) and unknown not in vocabulary:
        raise TokenizerError(f"{path}: the unknown token {quoted(unknown)} is not in the vocabulary: add or rename it")
    for added in state.get("added_tokens") or []:
        token, number = added["content"], added["id"]
        if backend.token_to_id(token) != number:
            raise TokenizerError(
                f"{path}: the added token {quoted(token)} says id {number} but would get {backend.token_to_id(token)}: "
                "added tokens must continue the vocabulary without a gap"
            )
    return backend


def check_ids(vocabulary: dict[str, object], path: Path) -> None:
    """Refuse ids that are no numbers, are shared, or are far past the vocabulary."""
    owners: dict[int, str] = {}
    for token, number in vocabulary.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= LARGEST_ID:
            raise TokenizerError(
                f"{path}: the id of {quoted(token)} is {quoted(number)}, but 0 to {LARGEST_ID} was expected"
            )
        if number in owners:
            raise TokenizerError(
                f"{path}: {quoted(owners[number])} and {quoted(token)} both have id {number}: give each its own"
            )
        owners[number] = token
    if owners and max(owners) >= 2 * len(owners) + 1000:
        raise TokenizerError(
            f"{path}: the id of {quoted(owners[max(owners)])} is {max(owners)}, but there are only {len(owners)} "
            "tokens: ids must count through the vocabulary"
        )


def _add_named(backend: tokenizers.Tokenizer, config: TokenizerConfig, folder: Path, notes: list[str]) -> None:
    """Make special what tokenizer_config.json names, as transformers does; ids must come out as they are written."""
    path = folder / "tokenizer_config.json"
    with translate_errors(f"{path}: its added tokens cannot be used", "correct added_tokens_decoder"), silence_stderr():
        listed = sorted((int(number), entry) for number, entry in (config.get("added_tokens_decoder") or {}).items())
        there = {token.content for token in backend.get_added_tokens_decoder().values()}
        # added_tokens.json, of before transformers 4.34, knows no flags; tokenizer.json does
        new = [
            (number, entry)
            for number, entry in listed
            if not (entry.keys() == {"content"} and entry["content"] in there)
            or backend.token_to_id(entry["content"]) != number
        ]
        # all at once: each call takes time for all tokens that were added before
        backend.add_tokens([_added(entry, special=bool(entry.get("special"))) for _, entry in new])
        for number, entry in new:
            if backend.token_to_id(entry["content"]) != number:
                raise TokenizerError(
                    f"{path}: the added token {quoted(entry['content'])} should have id {number}, but it gets "
                    f"{backend.token_to_id(entry['content'])}: this vocabulary is not the one it was added to"
                )
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        for key in PUBLISHED_NAMES:
            token = config.get(key)
            if token is None:
                continue
            content = token["content"] if isinstance(token, dict) else token
            if content in known and isinstance(token, str):
                continue
            if backend.token_to_id(content) is None:
                notes.append(f"{key} {quoted(content)} is not in the vocabulary and is left out")
                config[key] = None
            else:
                backend.add_special_tokens([_added(token, special=True)])
        extra = config.get("additional_special_tokens") or []
        backend.add_special_tokens([_added(token, special=True) for token in extra])


def _added(token: str | dict[str, Any], *, special: bool) -> tokenizers.AddedToken:
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=special, normalized=not special)
    flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return tokenizers.AddedToken(token["content"], special=special, **flags)


def _lines(folder: Path, name: str, notes: list[str]) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) without line ends, mark or more than the allowed length."""
    windows, path, data = False, folder / name, read_bytes(folder, name)
    if (count := data.count(b"\n")) > MAX_TOKENS:
        raise TokenizerError(f"{path} has {count} lines: a vocabulary has at most {MAX_TOKENS}")
    with io.BytesIO(data) as file:
        number = 0
        while raw := file.readline(4 * LONGEST_LINE + 3):
            number += 1
            if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                raw = raw[3:]
                notes.append("a byte order mark (ignored)")
            try:
                line = raw.decode("utf-8").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{path}, line {number} is not UTF-8 ({error.reason}): save it as UTF-8") from None
            if len(line) > LONGEST_LINE:
                raise TokenizerError(f"{path}, line {number}: a line has at most {LONGEST_LINE} characters")
            if line.endswith("\r"):
                windows = True
                line = line.removesuffix("\r")
            yield number, line
    if windows:
        notes.append("Windows line ends (ignored)")


def _vocabulary_lines(folder: Path, name: str, notes: list[str]) -> dict[str, int]:
    """vocab.txt: a token's id is its line number from 0; of a doubled token the last one counts, as in transformers."""
    vocabulary: dict[str, int] = {}
    doubled: list[str] = []
    blank: list[int] = []
    for number, line in _lines(folder, name, notes):
        token = line.rstrip(WHITE_SPACE)  # as the library's own reader does
        if not token:
            blank.append(number)
            continue
        if token in vocabulary:
            doubled.append(f"{quoted(token)} (lines {vocabulary[token] + 1} and {number})")
        vocabulary[token] = number - 1
    if doubled:
        notes.append(f"{len(doubled)} doubled tokens, first {doubled[0]} (the last one counts)")
    if blank:
        notes.append(f"{len(blank)} blank lines, first line {blank[0]} (their ids stay unused)")
    if not vocabulary:
        raise TokenizerError(f"{folder / name} holds no token: give one token on each line")
    return vocabulary


def _vocabulary_json(folder: Path, name: str) -> dict[str, int]:
    vocabulary = _object(folder, name)
    try:
        check_tokens(vocabulary)
    except BoundsError as error:
        raise TokenizerError(f"{folder / name} cannot be read: {error}") from None
    check_ids(vocabulary, folder / name)
    return vocabulary


def _merges(folder: Path, name: str, notes: list[str]) -> list[tuple[str, str]]:
    merges = []
    for number, line in _lines(folder, name, notes):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise TokenizerError(
                f"{folder / name}, line {number} is {quoted(line)}: a merge is two pieces with a space between"
            )
        merges.append((left, right))
    return merges

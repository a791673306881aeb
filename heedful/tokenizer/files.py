"""Read the tokenizer files of a folder, which is untrusted: everything that decides ids is checked before its use.

`Tokenizer.load` calls `read_tokenizer_files`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from heedful.errors import HeedfulError, TokenizerError, quoted
from heedful.tokenizer import joint_vocabulary, sentencepiece_model
from heedful.tokenizer.build import PUBLISHED_NAMES, FamilyDefaults, build_byte_level_bpe, build_wordpiece
from heedful.tokenizer.errors import silence_stderr, translate_errors
from heedful.tokenizer.limits import (
    MAX_ID,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    BoundsError,
    TokenizerConfig,
    check_added,
    check_state,
    check_tokens,
)
from heedful.untrusted_files import read_bytes, read_json

MAX_LINE_CHARS = 1_000  # characters in a line of vocab.txt or merges.txt
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The contents of a folder."""

    backend: tokenizers.Tokenizer  # the library's tokenizer
    config: TokenizerConfig  # tokenizer_config.json with defaults
    notes: list[str] = field(default_factory=list)  # sentences for the user


def read_tokenizer_files(folder: Path, defaults: FamilyDefaults | None = None) -> TokenizerFiles:
    """Read tokenizer.json, else vocab.txt, source.spm, vocab.json with merges.txt, or a SentencePiece model.

    Args:
        folder: The folder.
        defaults: Values of the model's family. None if the family is unknown.

    Raises:
        TokenizerError: If there is no tokenizer, or a file is damaged or exceeds a limit.
    """
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder: give the folder that holds tokenizer.json or a vocabulary")
    notes: list[str] = []
    config = _read_config(folder)
    if (folder / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(folder, notes)
    elif (folder / "vocab.txt").is_file():
        entries = _read_vocabulary_lines(folder, "vocab.txt", notes)
        wordpiece = defaults if defaults is not None and defaults.get("model") == "wordpiece" else None
        backend = build_wordpiece(entries, config, folder / "vocab.txt", notes, wordpiece)
    elif (folder / joint_vocabulary.SOURCE).is_file():
        vocabulary = _read_vocabulary_json(folder, joint_vocabulary.VOCABULARY)
        backend = joint_vocabulary.read_joint_vocabulary(folder, vocabulary, config, defaults)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        vocabulary = _read_vocabulary_json(folder, "vocab.json")
        merges = _read_merges(folder, "merges.txt", notes)
        backend = build_byte_level_bpe(vocabulary, merges, config, folder / "vocab.json", notes)
    elif model := next((folder / name for name in sentencepiece_model.NAMES if (folder / name).is_file()), None):
        backend = _read_sentencepiece(model, config, defaults, notes)
    else:
        raise _no_tokenizer_error(folder)
    _add_config_tokens(backend, config, folder, notes)
    return TokenizerFiles(backend=backend, config=config, notes=notes)


def _read_sentencepiece(
    path: Path, config: TokenizerConfig, defaults: FamilyDefaults | None, notes: list[str]
) -> tokenizers.Tokenizer:
    """Read a SentencePiece model, with the defaults that the family has for its class and its file name, if any."""
    defaults_by_class = (defaults or FamilyDefaults()).get("by_class", {})
    defaults = defaults_by_class.get(config.get("tokenizer_class", ""), defaults)
    if defaults is not None and defaults.get("file", path.name) != path.name:
        defaults = None  # the defaults are for a file with another name
    if defaults is None:
        notes.append(f"{path.name} does not name the special tokens around a text (none are added)")
    model = sentencepiece_model.read_model(path.parent, path.name)
    return sentencepiece_model.build_sentencepiece(model, defaults or FamilyDefaults(), config, path)


def _no_tokenizer_error(folder: Path) -> HeedfulError:
    """Make the error that a folder has no tokenizer file."""
    unknown = sorted(path.name for path in folder.glob("*.model"))
    hint = f"; {', '.join(unknown)} is of another kind: convert it to tokenizer.json first" if unknown else ""
    return TokenizerError(
        f"no tokenizer in {folder}: looked for tokenizer.json, for vocab.txt (WordPiece), "
        "for vocab.json with merges.txt (byte-level BPE), and for "
        f"{sentencepiece_model.NAMES[0]} (SentencePiece){hint}"
    )


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in a file of the folder."""
    value = read_json(folder, name)
    if not isinstance(value, dict):
        raise TokenizerError(f"{folder / name} holds a JSON {type(value).__name__}, but an object was expected")
    return value


def _read_config(folder: Path) -> TokenizerConfig:
    """Read and check tokenizer_config.json, with the older special_tokens_map.json and added_tokens.json."""
    config: TokenizerConfig = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _read_object(folder, name)
    _check_config(config, folder)
    if (folder / "added_tokens.json").is_file():
        ids = _read_object(folder, "added_tokens.json")
        added_tokens = {str(id): {"content": token} for token, id in ids.items()}
        config["added_tokens_decoder"] = added_tokens | (config.get("added_tokens_decoder") or {})
    try:
        check_added(list((config.get("added_tokens_decoder") or {}).values()))
        check_added(config.get("additional_special_tokens") or [])
    except BoundsError as error:
        raise TokenizerError(f"{folder}: its added tokens cannot be used: {error}") from None
    return config


def _check_config(config: TokenizerConfig, folder: Path) -> None:
    """Raise TokenizerError for a value of tokenizer_config.json with a wrong type."""
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
        if not isinstance(content, str | None) or len(content or "") > MAX_TOKEN_CHARS:
            raise TokenizerError(
                f"{folder}/tokenizer_config.json: {key} is {quoted(config[key])}, but a token is needed"
            )
    max_length = config.get("model_max_length")
    if max_length is not None:
        is_number = isinstance(max_length, int | float) and not isinstance(max_length, bool)
        if not is_number or not max_length > 0:
            raise TokenizerError(
                f"{folder}/tokenizer_config.json: model_max_length is {quoted(max_length)}, but a number is needed"
            )


def _read_tokenizer_json(folder: Path, notes: list[str]) -> tokenizers.Tokenizer:
    """Read tokenizer.json, without its stored truncation, padding and dropout."""
    state = _read_object(folder, "tokenizer.json")
    path = folder / "tokenizer.json"
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
    for added_token in state.get("added_tokens") or []:
        token, id = added_token["content"], added_token["id"]
        if backend.token_to_id(token) != id:
            raise TokenizerError(
                f"{path}: the added token {quoted(token)} says id {id} but would get {backend.token_to_id(token)}: "
                "added tokens must continue the vocabulary without a gap"
            )
    return backend


def check_ids(vocabulary: dict[str, object], path: Path) -> None:
    """Raise TokenizerError for ids that are not numbers, are shared, or are far greater than the vocabulary."""
    token_by_id: dict[int, str] = {}
    for token, id in vocabulary.items():
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id <= MAX_ID:
            raise TokenizerError(f"{path}: the id of {quoted(token)} is {quoted(id)}, but 0 to {MAX_ID} was expected")
        if id in token_by_id:
            raise TokenizerError(
                f"{path}: {quoted(token_by_id[id])} and {quoted(token)} both have id {id}: give each its own"
            )
        token_by_id[id] = token
    greatest = max(token_by_id, default=0)
    if token_by_id and greatest >= 2 * len(token_by_id) + 1000:
        raise TokenizerError(
            f"{path}: the id of {quoted(token_by_id[greatest])} is {greatest}, but there are only {len(token_by_id)} "
            "tokens: ids must count through the vocabulary"
        )


def _add_config_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig, folder: Path, notes: list[str]) -> None:
    """Add the tokens of tokenizer_config.json to a tokenizer, and make its special tokens special, as in transformers.

    Args:
        backend: The tokenizer, which is changed.
        config: Values of tokenizer_config.json; a special token that the vocabulary lacks is set to None.
        folder: Folder of the file, for messages.
        notes: Sentences for the user, to which some may be added.

    Raises:
        TokenizerError: If an added token does not get the id that the file has for it.
    """
    path = folder / "tokenizer_config.json"
    with translate_errors(f"{path}: its added tokens cannot be used", "correct added_tokens_decoder"), silence_stderr():
        _add_listed_tokens(backend, config.get("added_tokens_decoder") or {}, path)
        _make_special(backend, config, notes)
        extra = config.get("additional_special_tokens") or []
        backend.add_special_tokens([_added_token(token, special=True) for token in extra])


def _added_texts(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the texts of the added tokens of a tokenizer."""
    return {token.content for token in backend.get_added_tokens_decoder().values()}


def _add_listed_tokens(backend: tokenizers.Tokenizer, entries_by_id: dict[str, dict[str, Any]], path: Path) -> None:
    """Add the tokens of added_tokens_decoder that the tokenizer lacks, or for which the file has flags."""
    added_before = _added_texts(backend)
    new: list[tuple[int, dict[str, Any]]] = []
    for id, entry in sorted((int(id), entry) for id, entry in entries_by_id.items()):
        # entries of added_tokens.json (before transformers 4.34) have no flags; tokenizer.json has them
        has_flags = entry.keys() != {"content"}
        if has_flags or entry["content"] not in added_before or backend.token_to_id(entry["content"]) != id:
            new.append((id, entry))
    # one call for all tokens, because the time of a call grows with the tokens that were added before
    backend.add_tokens([_added_token(entry, special=bool(entry.get("special"))) for _, entry in new])
    for id, entry in new:
        if backend.token_to_id(entry["content"]) != id:
            raise TokenizerError(
                f"{path}: the added token {quoted(entry['content'])} should have id {id}, but it gets "
                f"{backend.token_to_id(entry['content'])}: this vocabulary is not the one it was added to"
            )


def _make_special(backend: tokenizers.Tokenizer, config: TokenizerConfig, notes: list[str]) -> None:
    """Make the tokens of keys such as "mask_token" special. A key is set to None if the vocabulary lacks its token."""
    added = _added_texts(backend)
    for key in PUBLISHED_NAMES:
        token = config.get(key)
        if token is None:
            continue
        content = token["content"] if isinstance(token, dict) else token
        if content in added and isinstance(token, str):
            continue
        if backend.token_to_id(content) is None:
            notes.append(f"{key} {quoted(content)} is not in the vocabulary and is left out")
            config[key] = None
        else:
            backend.add_special_tokens([_added_token(token, special=True)])


def _added_token(token: str | dict[str, Any], *, special: bool) -> tokenizers.AddedToken:
    """Make the library's added token of a text, or of an object with a content and flags."""
    if isinstance(token, str):
        return tokenizers.AddedToken(token, special=special, normalized=not special)
    flags = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return tokenizers.AddedToken(token["content"], special=special, **flags)


def _read_lines(folder: Path, name: str, notes: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line, without a byte order mark and line ends.

    Raises:
        TokenizerError: If there are too many lines, or one is too long or not UTF-8.
    """
    path = folder / name
    data = read_bytes(folder, name)
    has_windows_ends = False
    if (count := data.count(b"\n")) > MAX_TOKENS:
        raise TokenizerError(f"{path} has {count} lines: a vocabulary has at most {MAX_TOKENS}")
    with io.BytesIO(data) as file:
        line_number = 0
        while line_bytes := file.readline(4 * MAX_LINE_CHARS + 3):
            line_number += 1
            if line_number == 1 and line_bytes.startswith(b"\xef\xbb\xbf"):
                line_bytes = line_bytes[3:]
                notes.append("a byte order mark (ignored)")
            try:
                line = line_bytes.decode("utf-8").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise TokenizerError(
                    f"{path}, line {line_number} is not UTF-8 ({error.reason}): save it as UTF-8"
                ) from None
            if len(line) > MAX_LINE_CHARS:
                raise TokenizerError(f"{path}, line {line_number}: a line has at most {MAX_LINE_CHARS} characters")
            if line.endswith("\r"):
                has_windows_ends = True
                line = line.removesuffix("\r")
            yield line_number, line
    if has_windows_ends:
        notes.append("Windows line ends (ignored)")


def _read_vocabulary_lines(folder: Path, name: str, notes: list[str]) -> dict[str, int]:
    """Read vocab.txt, in which the id of a token is its line number from 0.

    If a token occurs twice, its last line is its id, as in transformers.
    """
    vocabulary: dict[str, int] = {}
    doubled_tokens: list[str] = []
    blank_lines: list[int] = []
    for line_number, line in _read_lines(folder, name, notes):
        token = line.rstrip(WHITE_SPACE)  # as the library's own reader does
        if not token:
            blank_lines.append(line_number)
            continue
        if token in vocabulary:
            doubled_tokens.append(f"{quoted(token)} (lines {vocabulary[token] + 1} and {line_number})")
        vocabulary[token] = line_number - 1
    if doubled_tokens:
        notes.append(f"{len(doubled_tokens)} doubled tokens, first {doubled_tokens[0]} (the last one counts)")
    if blank_lines:
        notes.append(f"{len(blank_lines)} blank lines, first line {blank_lines[0]} (their ids stay unused)")
    if not vocabulary:
        raise TokenizerError(f"{folder / name} holds no token: give one token on each line")
    return vocabulary


def _read_vocabulary_json(folder: Path, name: str) -> dict[str, int]:
    """Read and check a JSON file of ids by token."""
    vocabulary = _read_object(folder, name)
    try:
        check_tokens(vocabulary)
    except BoundsError as error:
        raise TokenizerError(f"{folder / name} cannot be read: {error}") from None
    check_ids(vocabulary, folder / name)
    return vocabulary


def _read_merges(folder: Path, name: str, notes: list[str]) -> list[tuple[str, str]]:
    """Read a file with two tokens on each line, which BPE merges."""
    merges = []
    for line_number, line in _read_lines(folder, name, notes):
        if not line or (line_number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise TokenizerError(
                f"{folder / name}, line {line_number} is {quoted(line)}: a merge is two pieces with a space between"
            )
        merges.append((left, right))
    return merges

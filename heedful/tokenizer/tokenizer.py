"""`Tokenizer`: from texts and pairs to token ids, types and offsets, within a limit, and back."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from heedful.atomic_io import atomic_path, write_synced
from heedful.errors import HeedfulError, HeedfulWarning, TokenizerError, did_you_mean
from heedful.tokenizer import files
from heedful.tokenizer.build import END_OF_TEXT, PUBLISHED_NAMES, FamilyDefaults
from heedful.tokenizer.encoding import (
    Encoding,
    PreTokenized,
    TokenizerInput,
    Truncate,
    check_limits,
    count_tokens,
    cut_windows,
    from_library,
    kept_positions,
    select_entries,
    tokens_to_keep,
)
from heedful.tokenizer.errors import silence_stderr, translate_errors
from heedful.tokenizer.joint_vocabulary import JointVocabulary
from heedful.tokenizer.limits import TokenizerConfig

if TYPE_CHECKING:
    from heedful.packed import Packed

ID_STATE_KEYS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")  # keys that decide ids
LANGUAGE_CODE = re.compile("[a-z]{2,3}_[A-Z]{2}")  # such as en_XX
UNLIMITED = 1_000_000_000  # a model_max_length from which there is no limit; transformers writes 1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids of the special tokens by their roles, or None for a role without a token."""

    pad: int | None
    unknown: int | None
    bos_or_cls: int | None  # token before the first text: [CLS], <s>
    eos_or_sep: int | None  # token after each text: [SEP], </s>
    mask: int | None


ROLES = {  # role -> its keys in tokenizer_config.json, the preferred one first
    "pad": ("pad_token",),
    "unknown": ("unk_token",),
    "bos_or_cls": ("cls_token", "bos_token"),
    "eos_or_sep": ("sep_token", "eos_token"),
    "mask": ("mask_token",),
}

FAST_CLASS, TOKEN_TYPES = "PreTrainedTokenizerFast", "token_type_ids"  # a class and an input of transformers


class Tokenizer:
    """Converts texts to token ids and back, exactly as the published model's own tokenizer; immutable.

    A special token that is written out in a text, like "[MASK]", becomes the special token, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig | None = None) -> None:
        """Wrap a tokenizer of the `tokenizers` library, which must not be changed afterwards.

        Args:
            backend: The library's tokenizer.
            config: Values of tokenizer_config.json (default: none).

        Raises:
            TokenizerError: If the vocabulary is empty, or ids are shared or unknown.
        """
        self._backend = backend
        self._config = dict(config or {})
        with (
            translate_errors("this tokenizer cannot be used", "give the files that belong to the checkpoint"),
            silence_stderr(),
        ):
            backend.no_truncation()
            backend.no_padding()
            if backend.post_processor is None:  # the library's fast path would forget the types of pairs
                backend.post_processor = processors.TemplateProcessing(
                    single="$A:0", pair="$A:0 $B:1", special_tokens=[]
                )
            all_ids = list(backend.get_vocab(with_added_tokens=True).values())
            self._state = self.tokenizer_json()
            probes = [backend.encode("a"), backend.encode("a", "a")]
        for key in ("vocab", "merges"):  # the backend has these large values too
            self._state["model"].pop(key, None)
        if not all_ids:
            raise TokenizerError("this tokenizer has an empty vocabulary: give the files that belong to the checkpoint")
        vocabulary_ids = set(all_ids)
        if len(vocabulary_ids) != len(all_ids):
            raise TokenizerError("two tokens of this tokenizer share an id: give each token its own id")
        self.size: int = 1 + max(vocabulary_ids)  # how many rows the embedding table needs
        if unknown_ids := {id for probe in probes for id in probe.ids} - vocabulary_ids:
            raise TokenizerError(
                f"the post-processor puts id {min(unknown_ids)} around texts, but no token has it: correct its id"
            )
        self.special: SpecialIds = _find_special_ids(self, probes[0])

    @classmethod
    def load(cls, folder: str | Path, defaults: Mapping[str, object] | None = None) -> Tokenizer:
        """Load the tokenizer of a folder.

        The tokenizer is read from tokenizer.json, else from vocab.txt (WordPiece), vocab.json and merges.txt
        (byte-level BPE), or spiece.model (SentencePiece). tokenizer_config.json is read too. Stored truncation and
        padding are ignored.

        Args:
            folder: The folder.
            defaults: Values of the model's family that vocab.txt and spiece.model lack, with the keys of
                `heedful.tokenizer.build.FamilyDefaults`; loading a model passes them.

        Warns:
            HeedfulWarning: About damage that does not prevent the use of the tokenizer.

        Raises:
            HeedfulError: If a file cannot be used.
        """
        folder = Path(folder)
        try:
            contents = files.read_tokenizer_files(folder, cast("FamilyDefaults | None", defaults))
        except OSError as error:
            raise TokenizerError(f"{folder} cannot be read: {error.strerror}; check its files and rights") from error
        try:
            tokenizer = cls(contents.backend, contents.config)
        except HeedfulError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        if isinstance(language := contents.config.get("src_lang"), str) and language in tokenizer.languages:
            tokenizer = tokenizer.with_source_language(language)
        notes = contents.notes
        lower_case = contents.config.get("do_lower_case")
        if isinstance(lower_case, bool) and tokenizer.lowercases not in (None, lower_case):
            notes.append(
                f"tokenizer_config.json has do_lower_case {json.dumps(lower_case)} but tokenizer.json does the "
                "opposite (tokenizer.json counts)"
            )
        if notes:
            warnings.warn(f"{folder}: " + "; ".join(notes), HeedfulWarning, stacklevel=2)
        return tokenizer

    def __repr__(self) -> str:
        """Show the size of the vocabulary and the maximum length."""
        return f"Tokenizer(size={self.size}, max_length={self.max_length})"

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of the tokenizer's model, or None if it is unknown or unlimited."""
        max_length = self._config.get("model_max_length")
        return int(max_length) if max_length is not None and max_length < UNLIMITED else None

    def limited(self, max_length: int) -> Tokenizer:
        """Return this tokenizer for a model that reads at most `max_length` tokens."""
        return Tokenizer(self._backend, self._config | {"model_max_length": max_length})

    @cached_property
    def for_targets(self) -> Tokenizer:
        """The tokenizer of texts that a model generates: this one, unless target texts have their own."""
        if not isinstance(self._backend, JointVocabulary):
            return self
        return Tokenizer(cast(tokenizers.Tokenizer, self._backend.for_targets()), self._config)

    @property
    def languages(self) -> tuple[str, ...]:
        """Language codes among the special tokens, such as en_XX."""
        special = (token["content"] for token in self._state["added_tokens"] if token["special"])
        return tuple(token for token in special if LANGUAGE_CODE.fullmatch(token))

    def with_source_language(self, code: str) -> Tokenizer:
        """Return the tokenizer of texts in another language, which adds the code of this language to each text.

        Raises:
            TokenizerError: If the language is unknown, or the tokenizer adds no language codes.
        """
        state = self.tokenizer_json()
        template = state["post_processor"]
        special_pieces = [step["SpecialToken"] for step in _all_steps(template) if "SpecialToken" in step]
        old_codes = {piece["id"] for piece in special_pieces}.intersection(self.languages)
        if not old_codes:
            raise TokenizerError("this tokenizer puts no language code beside a text: leave the source language out")
        self.check_language(code)
        for piece in special_pieces:
            if piece["id"] in old_codes:
                piece["id"] = code
        template["special_tokens"][code] = {"id": code, "ids": [self.id(code)], "tokens": [code]}
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), self._config | {"src_lang": code})

    def check_language(self, code: str) -> int:
        """Return the id of a language code; raise TokenizerError if it is unknown."""
        if code not in self.languages:
            languages = ", ".join(self.languages) or "none"
            raise TokenizerError(
                f"{code!r} is no language of this model{did_you_mean(code, self.languages)}; it has {languages}"
            )
        id = self.id(code)
        assert id is not None
        return id

    @property
    def lowercases(self) -> bool | None:
        """Whether texts are lower-cased, or None if the normalizer does not say."""
        steps = _all_steps(self._state["normalizer"])
        if any(step.get("type") == "Lowercase" for step in steps):
            return True
        return next((bool(step["lowercase"]) for step in steps if "lowercase" in step), None)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides ids, as "sha256:...": tokenizers with equal fingerprints return equal ids."""
        state = self.tokenizer_json()
        canonical = _canonical_state({key: state[key] for key in ID_STATE_KEYS})
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def id(self, token: str) -> int | None:
        """Return the id of a token, spelt as in the vocabulary ("##ing", "Ġthe"), or None if it is missing."""
        return self._backend.token_to_id(token)

    @property
    def continues(self) -> NDArray[np.bool_]:
        """Whether each token continues a word, [size]."""
        return self._word_marks[0]

    def starts(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether each token of a text begins a word, [tokens]; any token after a line end begins one.

        Args:
            tokens: Ids of the text's tokens, [tokens].
        """
        continues, ends_line = self._word_marks
        starts: NDArray[np.bool_] = ~continues[tokens]
        starts[1:] |= ends_line[tokens[:-1]]
        return starts

    @cached_property
    def _word_marks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether each token continues a word, [size], and whether it ends a line, [size].

        Line ends are only marked in vocabularies that mark the beginning of words.
        """
        names = [self._backend.id_to_token(id) or "" for id in range(self.size)]
        continuing_prefix = self._state["model"].get("continuing_subword_prefix") or ""
        if continuing_prefix:
            return np.array([name.startswith(continuing_prefix) for name in names]), np.zeros(self.size, np.bool_)
        for word_mark, line_end in (("\u2581", "\n"), ("\u0120", "\u010a")):  # SentencePiece, byte-level BPE
            if any(name.startswith(word_mark) for name in names):
                continues = np.array([not name.startswith((word_mark, line_end)) for name in names])
                return continues, np.array([name.endswith(line_end) for name in names])
        raise TokenizerError(
            "this vocabulary does not mark words (## inside of words, or \u2581 or \u0120 before them): "
            "choose tokens or spans instead of words"
        )

    def name(self, id: int) -> str:
        """Return the token with an id, spelt as in the vocabulary; raise TokenizerError if it is missing."""
        token = self._backend.id_to_token(id) if 0 <= id < self.size else None
        if token is None:
            raise TokenizerError(f"no token has id {id}: the ids of this tokenizer go from 0 to {self.size - 1}")
        return token

    def encode(self, item: TokenizerInput, *, max_length: int | None = None, truncate: Truncate = "error") -> Encoding:
        """Encode a text, a pair (a tuple of two texts) or PreTokenized words.

        Args:
            item: The text, pair or words.
            max_length: Maximum number of tokens (default: unlimited).
            truncate: What happens to more tokens: "error" raises TokenizerError, "longest_first" cuts the longer text
                of a pair, "only_second" the second text. Special tokens are never cut; `Encoding.dropped` counts cut
                tokens.
        """
        return self.encode_batch([item], max_length=max_length, truncate=truncate)[0]

    def encode_batch(
        self, items: Sequence[TokenizerInput], *, max_length: int | None = None, truncate: Truncate = "error"
    ) -> list[Encoding]:
        """Encode several items on all processor cores; `encode` has the same options."""
        check_limits(max_length=max_length, truncate=truncate)
        results = []
        for index, encoding in enumerate(self._encode_with_library(items, fast=False)):
            positions, dropped = _truncated_positions(encoding, index, max_length=max_length, truncate=truncate)
            results.append(from_library(encoding, positions, dropped=dropped))
        return results

    def ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the token ids of each text, without special tokens, on all processor cores."""
        texts = list(texts)
        try:
            with translate_errors("the texts cannot be tokenized", "try them one by one to find which"):
                encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except HeedfulError:
            _check_surrogates(texts)
            raise
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def windows(self, item: TokenizerInput, *, max_length: int, stride: int) -> list[Encoding]:
        """Cut a text, or the second text of a pair, into windows; the first text of a pair is complete in each window.

        Args:
            item: The text, pair or words.
            max_length: Maximum number of tokens in a window.
            stride: Tokens of the text between the starts of two windows (Google's doc_stride), from 1; in transformers
                the stride is the overlap of two windows.
        """
        check_limits(max_length=max_length, truncate="error")
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
            raise TokenizerError(
                f"stride is {stride!r}: give by how many tokens, from 1, a window starts after the last"
            )
        (encoding,) = self._encode_with_library([item], fast=False)
        segment = 1 if isinstance(item, tuple) else 0
        return cut_windows(from_library(encoding), segment=segment, max_length=max_length, stride=stride)

    def pack(
        self, items: Sequence[TokenizerInput], *, max_length: int | None = None, truncate: Truncate = "error"
    ) -> Packed:
        """Encode items as one batch for a model; `encode` has the same options."""
        from heedful.packed import Packed  # imports torch, which other methods do not need

        check_limits(max_length=max_length, truncate=truncate)
        ids, types = [], []
        for index, encoding in enumerate(self._encode_with_library(items, fast=True)):
            positions, _ = _truncated_positions(encoding, index, max_length=max_length, truncate=truncate)
            ids.append(select_entries(encoding.ids, positions))
            types.append(select_entries(encoding.type_ids, positions))
        return Packed.of(ids, types)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; it differs from the original if the tokenizer normalises texts.

        Args:
            ids: The token ids.
            skip_special: Whether special tokens are left out.
        """
        int_ids = [int(id) for id in ids]
        if unknown := [id for id in int_ids if not 0 <= id < self.size]:
            raise TokenizerError(
                f"no token has id {unknown[0]}: the ids of this tokenizer go from 0 to {self.size - 1}"
            )
        with translate_errors("these ids cannot be decoded", "check the tokenizer's decoder"):
            return self._backend.decode(int_ids, skip_special_tokens=skip_special)

    def save(self, folder: str | Path, *, types: bool | None = None) -> None:
        """Write the files that transformers loads: tokenizer.json, tokenizer_config.json, for WordPiece vocab.txt.

        A joint vocabulary of two SentencePiece models is written as the files that it was read from. An old vocab.txt
        is removed unless this tokenizer is WordPiece. Keys of a loaded tokenizer_config.json are kept. Each file
        appears complete or not at all.

        Args:
            folder: The folder, which is made if it is missing.
            types: Whether the model reads token types, which transformers' tokenizer then returns. None if unknown.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._backend, JointVocabulary):
            for name, data in self._backend.files.items():
                with atomic_path(folder / name) as temporary:
                    write_synced(temporary, [data])
            _write_text(folder / "tokenizer_config.json", _to_json(self._saved_config(types), sort_keys=True))
            return
        state = self.tokenizer_json()
        if state["model"].get("type") == "WordPiece":
            entries = sorted(state["model"]["vocab"].items(), key=lambda entry: entry[1])
            if [id for _, id in entries] == list(range(len(entries))):  # ids are line numbers in vocab.txt
                _write_text(folder / "vocab.txt", "".join(f"{token}\n" for token, _ in entries))
        else:
            (folder / "vocab.txt").unlink(missing_ok=True)
        _write_text(folder / "tokenizer_config.json", _to_json(self._saved_config(types), sort_keys=True))
        _write_text(folder / "tokenizer.json", _to_json(state))

    def _saved_config(self, types: bool | None) -> TokenizerConfig:
        """Return the contents of tokenizer_config.json."""
        config = {"tokenizer_class": FAST_CLASS} | self._config
        inputs = config.get("model_input_names")
        # in transformers 5 a tokenizer of this class returns no token types unless they are listed
        if types and inputs is None and config["tokenizer_class"] == FAST_CLASS:
            config["model_input_names"] = ["input_ids", TOKEN_TYPES, "attention_mask"]
        elif types is False and TOKEN_TYPES in (inputs or ()):
            config["model_input_names"] = [name for name in inputs or () if name != TOKEN_TYPES]
        added_tokens = {token["id"]: token["content"] for token in self._state["added_tokens"]}
        for role, keys in ROLES.items():
            id = getattr(self.special, role)
            if id in added_tokens and not any(config.get(key) for key in keys):
                config[keys[0]] = added_tokens[id]
        for step in _all_steps(self._state["normalizer"]):
            if step.get("type") == "BertNormalizer":
                config["do_lower_case"] = step["lowercase"]
                config["strip_accents"] = step["strip_accents"]
                config["tokenize_chinese_chars"] = step["handle_chinese_chars"]
        return config

    @cached_property
    def _pretokenized_backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for PreTokenized words; in byte-level BPE, it puts a space before each word."""
        state = self.tokenizer_json()
        is_changed = False
        for step in [*_all_steps(state["pre_tokenizer"]), *_all_steps(state["post_processor"])]:
            if step.get("add_prefix_space") is False:
                step["add_prefix_space"] = is_changed = True
        return tokenizers.Tokenizer.from_str(json.dumps(state)) if is_changed else self._backend

    def tokenizer_json(self) -> dict[str, Any]:
        """Return the contents of tokenizer.json."""
        state: dict[str, Any] = json.loads(self._backend.to_str())
        return state

    def _encode_with_library(self, items: Sequence[TokenizerInput], *, fast: bool) -> list[tokenizers.Encoding]:
        """Encode items without limits.

        Args:
            fast: Whether to leave out offsets.
        """
        if isinstance(items, str | tuple | PreTokenized):
            raise TokenizerError(
                f"items is one {type(items).__name__}, but a list of texts, pairs or PreTokenized is needed"
            )
        items = list(items)
        for index, item in enumerate(items):
            if not isinstance(item, str):
                _check_item(index, item)
        results: dict[int, tokenizers.Encoding] = {}
        for are_words in (False, True):
            indices = [index for index, item in enumerate(items) if isinstance(item, PreTokenized) is are_words]
            if not indices:
                continue
            batch = [items[index] for index in indices]
            inputs = [list(item.words) if isinstance(item, PreTokenized) else item for item in batch]
            try:
                with translate_errors("the texts cannot be tokenized", "try them one by one to find which"):
                    backend = self._pretokenized_backend if are_words else self._backend
                    encode_batch = backend.encode_batch_fast if fast else backend.encode_batch
                    encodings = encode_batch(inputs, is_pretokenized=are_words)
            except HeedfulError:
                _check_surrogates(items)
                raise
            results.update(zip(indices, encodings, strict=True))
        return [results[index] for index in range(len(items))]


def _check_item(index: int, item: object) -> None:
    """Raise TokenizerError for an item that is neither a text nor a pair nor words."""
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item):
        return
    if isinstance(item, PreTokenized):
        if isinstance(item.words, str) or not all(isinstance(word, str) for word in item.words):
            raise TokenizerError(f"item {index} is {item!r:.80}: PreTokenized has a list of words, each a str")
        return
    raise TokenizerError(
        f"item {index} is {item!r:.80} ({type(item).__name__}): give a text (str), a pair (a tuple of two texts), "
        "or PreTokenized([...]) for a text that is already split"
    )


def _check_surrogates(items: Sequence[TokenizerInput]) -> None:
    """Raise TokenizerError if an item has a lone surrogate."""
    for index, item in enumerate(items):
        texts: Sequence[str]
        if isinstance(item, str):
            texts = [item]
        elif isinstance(item, PreTokenized):
            texts = item.words
        else:
            texts = item
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"item {index} has half a character ({text[error.start]!a}, a lone surrogate) at character "
                    f'{error.start}: read the text as UTF-8, or clean it with text.encode("utf-8", "replace").decode()'
                ) from None


def _truncated_positions(
    encoding: tokenizers.Encoding, index: int, *, max_length: int | None, truncate: Truncate
) -> tuple[list[int] | None, int]:
    """Return the positions of the tokens to keep, or None for all, and how many tokens are cut.

    Args:
        index: Index of the item, for error messages.
    """
    if max_length is None or len(encoding) <= max_length:
        return None, 0
    lengths = count_tokens(encoding)
    stops = tokens_to_keep(lengths, max_length=max_length, truncate=truncate, what=f"item {index}")
    return kept_positions(encoding, stops), lengths[0] + lengths[1] - sum(stops)


def _find_special_ids(tokenizer: Tokenizer, probe: tokenizers.Encoding) -> SpecialIds:
    """Find the special tokens, which tokenizer_config.json names; otherwise those around a text, or published ones.

    Args:
        tokenizer: The tokenizer.
        probe: The library's encoding of a text.
    """
    config, state = tokenizer._config, tokenizer._state
    added_tokens = {token["content"] for token in state["added_tokens"]}
    segments = probe.sequence_ids
    text_positions = [position for position, segment in enumerate(segments) if segment is not None]
    text_stop = text_positions[-1] + 1 if text_positions else len(segments)
    # whether there is a special token before the text, and after it
    has_token = {"bos_or_cls": segments[:1] == [None], "eos_or_sep": segments[-1:] == [None]}
    # ids of the special token before the text, and of the first one after it: <sep> of <sep> <cls>
    ids_around = {"bos_or_cls": probe.ids[:1], "eos_or_sep": probe.ids[text_stop : text_stop + 1]}
    special: dict[str, int | None] = {}
    for role, keys in ROLES.items():
        config_tokens = [config[key] for key in keys if config.get(key)]
        tokens = [token["content"] if isinstance(token, dict) else token for token in config_tokens]
        if role == "unknown":
            tokens.append(state["model"].get("unk_token"))
            unknown_id = state["model"].get("unk_id")
            if unknown_id is not None:
                tokens.append(tokenizer.name(unknown_id))
        if not has_token.get(role):
            end_of_text = [END_OF_TEXT] if role in has_token else []  # GPT-2's published folders name no tokens
            published = (*PUBLISHED_NAMES[keys[0]], *end_of_text)
            tokens.extend(token for token in published if token in added_tokens)
        ids = [tokenizer.id(token) for token in tokens if token is not None]
        if has_token.get(role):
            ids += ids_around[role]
        special[role] = next((id for id in ids if id is not None), None)
    return SpecialIds(**special)


def _all_steps(state: object) -> list[dict[str, Any]]:
    """Return a normalizer, pre-tokenizer or post-processor, and all objects inside it, such as its steps."""
    if isinstance(state, list):
        return [step for component in state for step in _all_steps(component)]
    if not isinstance(state, dict):
        return []
    return [state, *(step for value in state.values() for step in _all_steps(value))]


def _canonical_state(state: object) -> object:
    """Return a state without differences between versions of the library: options that are off, digits of scores."""
    if isinstance(state, float):
        return f"{state:.9g}"
    if isinstance(state, dict):
        return {
            key: _canonical_state(value) for key, value in state.items() if value is not None and value is not False
        }
    return [_canonical_state(value) for value in state] if isinstance(state, list) else state


def _to_json(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys) + "\n"


def _write_text(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all."""
    with atomic_path(path) as temporary:
        write_synced(temporary, [text.encode()])

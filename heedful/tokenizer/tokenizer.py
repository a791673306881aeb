"""Tokenizer: texts and pairs to token ids, types and offsets, within a limit, and back."""

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
from heedful.tokenizer.build import END_OF_TEXT, PUBLISHED_NAMES
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

DECIDES = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")  # what decides ids
LANGUAGE_CODE = re.compile("[a-z]{2,3}_[A-Z]{2}")
UNLIMITED = 1_000_000_000  # transformers writes 1e30 for "no limit"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialIds:
    """Ids of the special tokens by their roles; None: the tokenizer has no such token."""

    pad: int | None
    unknown: int | None
    bos_or_cls: int | None  # begins a sequence: [CLS], <s>
    eos_or_sep: int | None  # ends each text: [SEP], </s>
    mask: int | None


ROLES = {  # keys of tokenizer_config.json for each role, the preferred one first
    "pad": ("pad_token",),
    "unknown": ("unk_token",),
    "bos_or_cls": ("cls_token", "bos_token"),
    "eos_or_sep": ("sep_token", "eos_token"),
    "mask": ("mask_token",),
}

PLAIN, TYPES = "PreTrainedTokenizerFast", "token_type_ids"  # as transformers calls them


class Tokenizer:
    """Converts texts to token ids and back, exactly as the published model's own tokenizer; immutable.

    A special token that is written out in a text ("[MASK]") becomes that special token, as in transformers.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig | None = None) -> None:
        """Wrap a tokenizer of the `tokenizers` library, which must not be changed afterwards."""
        self._backend = backend
        self._config = dict(config or {})
        with (
            translate_errors("this tokenizer cannot be used", "give the files that belong to the checkpoint"),
            silence_stderr(),
        ):
            backend.no_truncation()
            backend.no_padding()
            if backend.post_processor is None:  # without one the library's fast path forgets the types of pairs
                backend.post_processor = processors.TemplateProcessing(
                    single="$A:0", pair="$A:0 $B:1", special_tokens=[]
                )
            numbers = list(backend.get_vocab(with_added_tokens=True).values())
            self._state = self.tokenizer_json()
            probes = [backend.encode("a"), backend.encode("a", "a")]
        for large in ("vocab", "merges"):  # the backend has them: a server need not hold them twice
            self._state["model"].pop(large, None)
        if not numbers:
            raise TokenizerError("this tokenizer has an empty vocabulary: give the files that belong to the checkpoint")
        known = set(numbers)
        if len(known) != len(numbers):
            raise TokenizerError("two tokens of this tokenizer share an id: give each token its own id")
        self.size: int = 1 + max(known)  # rows that an embedding needs
        for number in sorted({number for probe in probes for number in probe.ids} - known):
            raise TokenizerError(
                f"the post-processor puts id {number} around texts, but no token has it: correct its id"
            )
        self.special: SpecialIds = _special(self, probes[0])

    @classmethod
    def load(cls, folder: str | Path, defaults: Mapping[str, object] | None = None) -> Tokenizer:
        """Read tokenizer.json, else vocab.txt (WordPiece), vocab.json and merges.txt (byte-level BPE), or spiece.model
        (SentencePiece's Unigram), which `defaults` completes: load() of a whole model folder knows it.

        tokenizer_config.json is read beside each; stored truncation and padding are dropped.

        Warns:
            HeedfulWarning: Of damage that does not prevent its use.

        Raises:
            HeedfulError: If a file cannot be used.
        """
        folder = Path(folder)
        try:
            source = files.read_tokenizer_files(folder, defaults)
        except OSError as error:
            raise TokenizerError(f"{folder} cannot be read: {error.strerror}; check its files and rights") from error
        try:
            tokenizer = cls(source.backend, source.config)
        except HeedfulError as error:
            raise TokenizerError(f"{folder}: {error}") from error
        if isinstance(language := source.config.get("src_lang"), str) and language in tokenizer.languages:
            tokenizer = tokenizer.with_source_language(language)
        stored = source.config.get("do_lower_case")
        if isinstance(stored, bool) and tokenizer.lowercases is not None and stored != tokenizer.lowercases:
            source.notes.append(
                f"tokenizer_config.json has do_lower_case {json.dumps(stored)} but tokenizer.json does the opposite "
                "(tokenizer.json counts)"
            )
        if source.notes:
            warnings.warn(f"{folder}: " + "; ".join(source.notes), HeedfulWarning, stacklevel=2)
        return tokenizer

    def __repr__(self) -> str:
        """Return the size of the vocabulary and the maximum length."""
        return f"Tokenizer(size={self.size}, max_length={self.max_length})"

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of the model that the tokenizer belongs to; None if unknown or unlimited."""
        longest = self._config.get("model_max_length")
        return int(longest) if longest is not None and longest < UNLIMITED else None

    def limited(self, max_length: int) -> Tokenizer:
        """Return the tokenizer for a model that reads at most `max_length` tokens."""
        return Tokenizer(self._backend, self._config | {"model_max_length": max_length})

    @cached_property
    def for_targets(self) -> Tokenizer:
        """The tokenizer of texts that a model generates: another one where source and target have their own."""
        if not isinstance(self._backend, JointVocabulary):
            return self
        return Tokenizer(cast(tokenizers.Tokenizer, self._backend.for_targets()), self._config)

    @property
    def languages(self) -> tuple[str, ...]:
        """Language codes among the special tokens, such as en_XX."""
        special = (token["content"] for token in self._state["added_tokens"] if token["special"])
        return tuple(token for token in special if LANGUAGE_CODE.fullmatch(token))

    def with_source_language(self, code: str) -> Tokenizer:
        """Return the tokenizer of texts in another language, whose code it puts beside each text.

        Raises:
            TokenizerError: If the language is unknown, or the tokenizer puts no code beside texts.
        """
        state = self.tokenizer_json()
        around = {step["SpecialToken"]["id"] for step in _walk(state["post_processor"]) if "SpecialToken" in step}
        if not (codes := around.intersection(self.languages)):
            raise TokenizerError("this tokenizer puts no language code beside a text: leave the source language out")
        self.check_language(code)
        template = state["post_processor"]
        for step in _walk(template):
            if "SpecialToken" in step and step["SpecialToken"]["id"] in codes:
                step["SpecialToken"]["id"] = code
        template["special_tokens"][code] = {"id": code, "ids": [self.id(code)], "tokens": [code]}
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), self._config | {"src_lang": code})

    def check_language(self, code: str) -> int:
        """Return the id of a language code; raises TokenizerError if it is unknown."""
        if code not in self.languages:
            known = ", ".join(self.languages) or "none"
            raise TokenizerError(
                f"{code!r} is no language of this model{did_you_mean(code, self.languages)}; it has {known}"
            )
        id = self.id(code)
        assert id is not None
        return id

    @property
    def lowercases(self) -> bool | None:
        """Whether text is lower-cased; None if the normalizer does not tell."""
        steps = _walk(self._state["normalizer"])
        if any(step.get("type") == "Lowercase" for step in steps):
            return True
        return next((bool(step["lowercase"]) for step in steps if "lowercase" in step), None)

    @cached_property
    def fingerprint(self) -> str:
        """ "sha256:..." of everything that decides ids: tokenizers with equal fingerprints give equal ids."""
        state = self.tokenizer_json()
        decides = _canonical({key: state[key] for key in DECIDES})
        canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it ("##ing", "Ġthe"), or None."""
        return self._backend.token_to_id(token)

    @property
    def continues(self) -> NDArray[np.bool_]:
        """Whether each token continues a word, [size]."""
        return self._word_marks[0]

    def starts(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Mark the tokens of a text that begin a word; after the end of a line a token without a mark does, too."""
        continues, ends_line = self._word_marks
        starts: NDArray[np.bool_] = ~continues[tokens]
        starts[1:] |= ends_line[tokens[:-1]]
        return starts

    @cached_property
    def _word_marks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether each token continues a word; and ends a line, in a vocabulary that marks the beginning of words."""
        names = [self._backend.id_to_token(id) or "" for id in range(self.size)]
        inside = self._state["model"].get("continuing_subword_prefix") or ""
        if inside:
            return np.array([name.startswith(inside) for name in names]), np.zeros(self.size, np.bool_)
        for begins in ("\u2581", "\u0120"):
            if any(name.startswith(begins) for name in names):
                line = "\u010a" if begins == "\u0120" else "\n"  # as byte-level vocabularies write it, or as it is
                continues = np.array([not name.startswith((begins, line)) for name in names])
                return continues, np.array([name.endswith(line) for name in names])
        raise TokenizerError(
            "this vocabulary does not mark words (## inside of words, or \u2581 or \u0120 before them): "
            "choose tokens or spans instead of words"
        )

    def name(self, id: int) -> str:
        """Return the token with an id, as the vocabulary spells it."""
        token = self._backend.id_to_token(id) if 0 <= id < self.size else None
        if token is None:
            raise TokenizerError(f"no token has id {id}: the ids of this tokenizer go from 0 to {self.size - 1}")
        return token

    def encode(self, item: TokenizerInput, *, max_length: int | None = None, truncate: Truncate = "error") -> Encoding:
        """Encode a text, a pair (a tuple of two texts) or PreTokenized words.

        Args:
            item: The text.
            max_length: Tokens, at most; None: any number.
            truncate: "error" refuses more tokens; else they are cut, and counted in `dropped`: "longest_first" cuts the
                longer text of a pair, "only_second" the second one. Special tokens are always kept.
        """
        return self.encode_batch([item], max_length=max_length, truncate=truncate)[0]

    def encode_batch(
        self, items: Sequence[TokenizerInput], *, max_length: int | None = None, truncate: Truncate = "error"
    ) -> list[Encoding]:
        """Encode several items, on all processor cores; see `encode`."""
        check_limits(max_length=max_length, truncate=truncate)
        results = []
        for number, encoding in enumerate(self._run(items, fast=False)):
            positions, dropped = _truncation(encoding, number, max_length=max_length, truncate=truncate)
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
        """Return a text in windows of at most max_length tokens, each starting `stride` tokens after the one before.

        Of a pair the second text is windowed, and the first is whole in each window. The stride is Google's doc_stride,
        the distance between the starts of windows (at most their room for text), in tokens of the windowed text. In
        transformers stride is the overlap: room - stride.
        """
        check_limits(max_length=max_length, truncate="error")
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
            raise TokenizerError(
                f"stride is {stride!r}: give by how many tokens, from 1, a window starts after the last"
            )
        (encoding,) = self._run([item], fast=False)
        segment = 1 if isinstance(item, tuple) else 0
        return cut_windows(from_library(encoding), segment=segment, max_length=max_length, stride=stride)

    def pack(
        self, items: Sequence[TokenizerInput], *, max_length: int | None = None, truncate: Truncate = "error"
    ) -> Packed:
        """Return items as one batch for a model; limits as for `encode`."""
        from heedful.packed import Packed  # imports torch, which texts to ids need not

        check_limits(max_length=max_length, truncate=truncate)
        ids, types = [], []
        for number, encoding in enumerate(self._run(items, fast=True)):
            positions, _ = _truncation(encoding, number, max_length=max_length, truncate=truncate)
            ids.append(select_entries(encoding.ids, positions))
            types.append(select_entries(encoding.type_ids, positions))
        return Packed.of(ids, types)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ids, which for a lossy tokenizer differs from the original."""
        numbers = [int(number) for number in ids]
        if wrong := [number for number in numbers if not 0 <= number < self.size]:
            raise TokenizerError(f"no token has id {wrong[0]}: the ids of this tokenizer go from 0 to {self.size - 1}")
        with translate_errors("these ids cannot be decoded", "check the tokenizer's decoder"):
            return self._backend.decode(numbers, skip_special_tokens=skip_special)

    def save(self, folder: str | Path, *, types: bool | None = None) -> None:
        """Write tokenizer.json and tokenizer_config.json (for WordPiece vocab.txt too), which transformers loads.

        A joint vocabulary of two SentencePiece models is written as the files that it was read from.

        An older vocab.txt is removed unless this tokenizer is WordPiece. Other keys of a loaded tokenizer_config.json
        are kept. Each file appears complete or not at all.

        Args:
            folder: The folder, which is made if it is missing.
            types: Whether the model reads token types, which transformers' tokenizer then returns; None: unknown.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self._backend, JointVocabulary):
            for name, data in self._backend.files.items():
                with atomic_path(folder / name) as part:
                    write_synced(part, [data])
            _write(folder / "tokenizer_config.json", _json(self._saved_config(types), sort_keys=True))
            return
        state = self.tokenizer_json()
        if state["model"].get("type") == "WordPiece":
            names = sorted(state["model"]["vocab"].items(), key=lambda entry: entry[1])
            if [number for _, number in names] == list(range(len(names))):
                _write(folder / "vocab.txt", "".join(f"{token}\n" for token, _ in names))
        else:
            (folder / "vocab.txt").unlink(missing_ok=True)
        _write(folder / "tokenizer_config.json", _json(self._saved_config(types), sort_keys=True))
        _write(folder / "tokenizer.json", _json(state))

    def _saved_config(self, types: bool | None) -> TokenizerConfig:
        config = {"tokenizer_class": PLAIN} | self._config
        names = config.get("model_input_names")
        if types and names is None and config["tokenizer_class"] == PLAIN:  # which gives none in transformers 5
            config["model_input_names"] = ["input_ids", TYPES, "attention_mask"]
        elif types is False and TYPES in (names or ()):
            config["model_input_names"] = [name for name in names or () if name != TYPES]
        added = {token["id"]: token["content"] for token in self._state["added_tokens"]}
        for role, keys in ROLES.items():
            number = getattr(self.special, role)
            if number in added and not any(config.get(key) for key in keys):
                config[keys[0]] = added[number]
        for step in _walk(self._state["normalizer"]):
            if step.get("type") == "BertNormalizer":
                config["do_lower_case"] = step["lowercase"]
                config["strip_accents"] = step["strip_accents"]
                config["tokenize_chinese_chars"] = step["handle_chinese_chars"]
        return config

    @cached_property
    def _pretokenized_backend(self) -> tokenizers.Tokenizer:
        """Byte-level BPE sees a space before each of the given words, the first one too, as it was trained."""
        state, changed = self.tokenizer_json(), False
        for step in [*_walk(state["pre_tokenizer"]), *_walk(state["post_processor"])]:
            if step.get("add_prefix_space") is False:
                step["add_prefix_space"] = changed = True
        return tokenizers.Tokenizer.from_str(json.dumps(state)) if changed else self._backend

    def tokenizer_json(self) -> dict[str, Any]:
        """The contents of tokenizer.json."""
        state: dict[str, Any] = json.loads(self._backend.to_str())
        return state

    def _run(self, items: Sequence[TokenizerInput], *, fast: bool) -> list[tokenizers.Encoding]:
        if isinstance(items, str | tuple | PreTokenized):
            raise TokenizerError(
                f"items is one {type(items).__name__}, but a list of texts, pairs or PreTokenized is needed"
            )
        items = list(items)
        for number, item in enumerate(items):
            if not isinstance(item, str):
                _check(number, item)
        results: dict[int, tokenizers.Encoding] = {}
        for words in (False, True):
            numbers = [number for number, item in enumerate(items) if isinstance(item, PreTokenized) is words]
            if not numbers:
                continue
            picked = [items[number] for number in numbers]
            inputs = [list(item.words) if isinstance(item, PreTokenized) else item for item in picked]
            try:
                with translate_errors("the texts cannot be tokenized", "try them one by one to find which"):
                    backend = self._pretokenized_backend if words else self._backend
                    run = backend.encode_batch_fast if fast else backend.encode_batch
                    encodings = run(inputs, is_pretokenized=words)
            except HeedfulError:
                _check_surrogates(items)
                raise
            results.update(zip(numbers, encodings, strict=True))
        return [results[number] for number in range(len(items))]


def _check(number: int, item: object) -> None:
    if isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item):
        return
    if isinstance(item, PreTokenized):
        if isinstance(item.words, str) or not all(isinstance(word, str) for word in item.words):
            raise TokenizerError(f"item {number} is {item!r:.80}: PreTokenized has a list of words, each a str")
        return
    raise TokenizerError(
        f"item {number} is {item!r:.80} ({type(item).__name__}): give a text (str), a pair (a tuple of two texts), "
        "or PreTokenized([...]) for a text that is already split"
    )


def _check_surrogates(items: Sequence[TokenizerInput]) -> None:
    for number, item in enumerate(items):
        for text in [item] if isinstance(item, str) else item.words if isinstance(item, PreTokenized) else item:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"item {number} has half a character ({text[error.start]!a}, a lone surrogate) at character "
                    f'{error.start}: read the text as UTF-8, or clean it with text.encode("utf-8", "replace").decode()'
                ) from None


def _truncation(
    encoding: tokenizers.Encoding, number: int, *, max_length: int | None, truncate: Truncate
) -> tuple[list[int] | None, int]:
    """Positions of the tokens to keep (None: all), and the number of the others."""
    if max_length is None or len(encoding) <= max_length:
        return None, 0
    lengths = count_tokens(encoding)
    stops = tokens_to_keep(lengths, max_length=max_length, truncate=truncate, what=f"item {number}")
    return kept_positions(encoding, stops), lengths[0] + lengths[1] - sum(stops)


def _special(tokenizer: Tokenizer, probe: tokenizers.Encoding) -> SpecialIds:
    """Find special tokens: as tokenizer_config.json names them; else those around a text; else published names."""
    config, state = tokenizer._config, tokenizer._state
    added = {token["content"] for token in state["added_tokens"]}
    segments = probe.sequence_ids
    end = len(segments) - next((back for back, segment in enumerate(reversed(segments)) if segment is not None), 0)
    around = {"bos_or_cls": probe.ids[:1], "eos_or_sep": probe.ids[end : end + 1]}  # some end a text in <sep> <cls>
    outside = {"bos_or_cls": segments[:1] == [None], "eos_or_sep": segments[-1:] == [None]}
    special: dict[str, int | None] = {}
    for role, keys in ROLES.items():
        named = [config[key] for key in keys if config.get(key)]
        contents = [token["content"] if isinstance(token, dict) else token for token in named]
        if role == "unknown":
            contents.append(state["model"].get("unk_token"))
            number = state["model"].get("unk_id")
            contents.extend([tokenizer.name(number)] if number is not None else [])
        ends = [END_OF_TEXT] if role in outside else []  # GPT-2's published folders name none
        typical = (*PUBLISHED_NAMES[keys[0]], *ends)
        contents.extend(token for token in typical if token in added and not outside.get(role))
        ids = [tokenizer.id(token) for token in contents if token is not None]
        ids += around[role] if outside.get(role) else []
        special[role] = next((number for number in ids if number is not None), None)
    return SpecialIds(**special)


def _walk(state: object) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or post-processor, and all components of a Sequence."""
    if isinstance(state, list):
        return [step for part in state for step in _walk(part)]
    if not isinstance(state, dict):
        return []
    return [state, *(step for value in state.values() for step in _walk(value))]


def _canonical(state: object) -> object:
    """The state that all versions of the library write: no options that are off, no last digits of scores."""
    if isinstance(state, float):
        return f"{state:.9g}"
    if isinstance(state, dict):
        return {key: _canonical(value) for key, value in state.items() if value is not None and value is not False}
    return [_canonical(value) for value in state] if isinstance(state, list) else state


def _json(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys) + "\n"


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as part:
        write_synced(part, [text.encode()])

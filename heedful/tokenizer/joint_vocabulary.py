"""Tokenizers of two SentencePiece models, for source and target texts, with one vocabulary of ids (vocab.json).

The library's tokenizer of each SentencePiece model has other ids, so a wrapper looks up the id of each piece by its
text. `files.py` calls `read_joint_vocabulary` for folders of translation models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models

from heedful.errors import TokenizerError, quoted
from heedful.tokenizer.build import FamilyDefaults
from heedful.tokenizer.limits import TokenizerConfig
from heedful.tokenizer.sentencepiece_model import SPACE, build_sentencepiece, read_model
from heedful.untrusted_files import read_bytes

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"
SPECIAL_TOKENS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
DEFAULT_MAX_LENGTH = 512  # tokens, if tokenizer_config.json does not say
CODE_BRACKETS = (">>", "<<")  # around the code of the target language, at the beginning of a text


class RenumberedEncoding:
    """An encoding of the library with other ids; all other attributes are the library's."""

    def __init__(self, encoding: tokenizers.Encoding, ids: list[int]) -> None:
        self._encoding, self.ids = encoding, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while the object is unpickled, it has no _encoding
            raise AttributeError(name)
        return getattr(self._encoding, name)


class JointVocabulary:
    """A tokenizer with the library's methods: a segmenter splits texts, and another tokenizer has the vocabulary."""

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer,
        segmenters: Mapping[str, tokenizers.Tokenizer],
        files: Mapping[str, bytes],
        side: str = SOURCE,
    ) -> None:
        """Make the tokenizer of source or target texts.

        Args:
            vocabulary: Tokenizer with the ids of all pieces.
            segmenters: Tokenizers that split source and target texts, by the names of their files.
            files: Contents of the files, for saving.
            side: Which texts the tokenizer splits, SOURCE or TARGET.
        """
        self._vocabulary = vocabulary
        self._segmenters = segmenters
        self.files = files
        self._side = side
        self._ids = vocabulary.get_vocab(with_added_tokens=True)
        self._languages = _language_codes(self._ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._vocabulary, name)

    def for_targets(self) -> JointVocabulary:
        """Return the tokenizer of target texts."""
        return JointVocabulary(self._vocabulary, self._segmenters, self.files, TARGET)

    @property
    def post_processor(self) -> object:
        """The special tokens around a text."""
        return self._segmenters[self._side].post_processor

    def encode(self, *texts: Any) -> RenumberedEncoding:
        """Encode a text, or a pair."""
        return self._renumber(self._segmenters[self._side].encode(*texts))

    def encode_batch(self, inputs: Sequence[Any], **options: bool) -> list[RenumberedEncoding]:
        """Encode texts, pairs or lists of words."""
        for text in inputs:
            self._check_language(text)
        return [self._renumber(encoding) for encoding in self._segmenters[self._side].encode_batch(inputs, **options)]

    encode_batch_fast = encode_batch  # the library's fast method leaves out the texts of pieces

    def add_special_tokens(self, tokens: list[Any]) -> None:
        """Add special tokens, which must be in the vocabulary."""
        for backend in (self._vocabulary, *self._segmenters.values()):
            backend.add_special_tokens(tokens)

    def add_tokens(self, tokens: list[Any]) -> None:
        """Add tokens, which must be in the vocabulary."""
        for backend in (self._vocabulary, *self._segmenters.values()):
            backend.add_tokens(tokens)

    def to_str(self) -> str:
        """Return everything that decides ids, as JSON."""
        state = json.loads(self._vocabulary.to_str())
        segmenter = json.loads(self._segmenters[self._side].to_str())
        state["model"]["segmenter"] = segmenter["model"]
        steps = ("normalizer", "pre_tokenizer", "post_processor")
        return json.dumps(state | {step: segmenter[step] for step in steps})

    def _renumber(self, encoding: tokenizers.Encoding) -> RenumberedEncoding:
        unknown = self._ids[SPECIAL_TOKENS["unk_token"]]
        return RenumberedEncoding(encoding, [self._ids.get(token, unknown) for token in encoding.tokens])

    def _check_language(self, text: object) -> None:
        """Raise TokenizerError for a text that begins with the code of an unknown language."""
        if isinstance(text, str) and text.startswith(CODE_BRACKETS[0]) and CODE_BRACKETS[1] in text:
            code = text[: text.index(CODE_BRACKETS[1]) + len(CODE_BRACKETS[1])]
            if code not in self._languages:
                languages = ", ".join(sorted(self._languages)[:20]) or "none"
                raise TokenizerError(
                    f"a text begins with {quoted(code)}, a language unknown to this model: it has {languages}"
                )


def _language_codes(tokens: Iterable[str]) -> list[str]:
    """Return the tokens that are codes of target languages, such as >>fr<<."""
    return [token for token in tokens if token.startswith(CODE_BRACKETS[0]) and token.endswith(CODE_BRACKETS[1])]


def read_joint_vocabulary(
    folder: Path, vocabulary: dict[str, int], config: TokenizerConfig, defaults: FamilyDefaults | None
) -> tokenizers.Tokenizer:
    """Read the tokenizer of a folder with source.spm, target.spm and vocab.json.

    Args:
        folder: The folder.
        vocabulary: Contents of vocab.json.
        config: Values of tokenizer_config.json; keys that it lacks are added.
        defaults: Values of the model's family; only "tokenizer_class" is used.

    Raises:
        TokenizerError: If a file cannot be used, or source and target have separate vocabularies.
    """
    if config.get("separate_vocabs"):
        raise TokenizerError(f"{folder}: separate_vocabs is true; only one vocabulary for both sides can be loaded")
    for key, token in SPECIAL_TOKENS.items():
        config.setdefault(key, token)
        config_token = config[key]["content"] if isinstance(config[key], dict) else config[key]
        if config_token != token:
            raise TokenizerError(f"{folder}: {key} is {quoted(config_token)}; only {token} can be loaded")
        if token not in vocabulary:
            raise TokenizerError(f"{folder / VOCABULARY} has no {token}, the {key}: give the file of the model")
    config.setdefault("model_max_length", DEFAULT_MAX_LENGTH)
    if defaults is not None and "tokenizer_class" in defaults:
        config.setdefault("tokenizer_class", defaults["tokenizer_class"])
    special_tokens = list(SPECIAL_TOKENS.values())
    template: FamilyDefaults = {"single": "$A:0 </s>:0", "pair": "$A:0 $B:0 </s>:0", "appended": special_tokens}
    segmenters = {
        name: build_sentencepiece(read_model(folder, name), template, {}, folder / name) for name in (SOURCE, TARGET)
    }
    codes = [tokenizers.AddedToken(code, normalized=False) for code in _language_codes(vocabulary)]
    segmenters[SOURCE].add_tokens(codes)
    joint = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    joint.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    joint.add_special_tokens(special_tokens)
    files = {name: read_bytes(folder, name) for name in (SOURCE, TARGET, VOCABULARY)}
    return cast(tokenizers.Tokenizer, JointVocabulary(joint, segmenters, files))

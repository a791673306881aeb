"""Two SentencePiece models, of source and target texts, with one vocabulary (vocab.json) that numbers their pieces.

The library's tokenizers number pieces by themselves, so a wrapper looks up the text of each piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models

from heedful.errors import TokenizerError, quoted
from heedful.tokenizer.limits import TokenizerConfig
from heedful.tokenizer.sentencepiece_model import SPACE, build_sentencepiece, read_model
from heedful.untrusted_files import read_bytes

SOURCE, TARGET, VOCABULARY = "source.spm", "target.spm", "vocab.json"
SPECIAL = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MAX_LENGTH = 512  # tokens, where tokenizer_config.json does not say
LANGUAGE = (">>", "<<")  # around the code of the target language, before a text


class RenumberedEncoding:
    """An encoding of the library with other ids."""

    def __init__(self, encoding: tokenizers.Encoding, ids: list[int]) -> None:
        self._encoding, self.ids = encoding, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self._encoding, name)


class JointVocabulary:
    """One tokenizer that splits texts and one that has the vocabulary, with the methods of the library's tokenizer."""

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer,
        segmenters: Mapping[str, tokenizers.Tokenizer],
        files: Mapping[str, bytes],
        side: str = SOURCE,
    ) -> None:
        """Make the tokenizer of one side.

        Args:
            vocabulary: Has the ids of all pieces.
            segmenters: Split source and target texts, by the names of their files.
            files: Contents of the files, for saving.
        """
        self._vocabulary, self._segmenters, self.files, self._side = vocabulary, segmenters, files, side
        self._ids = vocabulary.get_vocab(with_added_tokens=True)
        self._languages = [
            token for token in self._ids if token.startswith(LANGUAGE[0]) and token.endswith(LANGUAGE[1])
        ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._vocabulary, name)

    def for_targets(self) -> JointVocabulary:
        """Return the tokenizer of target texts."""
        return JointVocabulary(self._vocabulary, self._segmenters, self.files, TARGET)

    @property
    def post_processor(self) -> object:
        """The tokens around a text."""
        return self._segmenters[self._side].post_processor

    def encode(self, *texts: Any) -> RenumberedEncoding:
        """Encode a text, or a pair."""
        return self._renumbered(self._segmenters[self._side].encode(*texts))

    def encode_batch(self, inputs: Sequence[Any], **options: bool) -> list[RenumberedEncoding]:
        """Encode texts, pairs or lists of words."""
        for text in inputs:
            self._check_language(text)
        return [self._renumbered(encoding) for encoding in self._segmenters[self._side].encode_batch(inputs, **options)]

    encode_batch_fast = encode_batch  # the library's own leaves the texts of pieces out

    def add_special_tokens(self, tokens: list[Any]) -> None:
        """Add special tokens, which must be in the vocabulary."""
        for backend in (self._vocabulary, *self._segmenters.values()):
            backend.add_special_tokens(tokens)

    def add_tokens(self, tokens: list[Any]) -> None:
        """Add tokens, which must be in the vocabulary."""
        for backend in (self._vocabulary, *self._segmenters.values()):
            backend.add_tokens(tokens)

    def to_str(self) -> str:
        """Return all that decides ids, as JSON."""
        state, segmenter = (json.loads(part.to_str()) for part in (self._vocabulary, self._segmenters[self._side]))
        state["model"]["segmenter"] = segmenter["model"]
        steps = ("normalizer", "pre_tokenizer", "post_processor")
        return json.dumps(state | {step: segmenter[step] for step in steps})

    def _renumbered(self, encoding: tokenizers.Encoding) -> RenumberedEncoding:
        unknown = self._ids[SPECIAL["unk_token"]]
        return RenumberedEncoding(encoding, [self._ids.get(token, unknown) for token in encoding.tokens])

    def _check_language(self, text: object) -> None:
        """Raise TokenizerError for a text that begins with the code of an unknown language."""
        if isinstance(text, str) and text.startswith(LANGUAGE[0]) and LANGUAGE[1] in text:
            code = text[: text.index(LANGUAGE[1]) + len(LANGUAGE[1])]
            if code not in self._languages:
                known = ", ".join(sorted(self._languages)[:20]) or "none"
                raise TokenizerError(
                    f"a text begins with {quoted(code)}, a language unknown to this model: it has {known}"
                )


def read_joint_vocabulary(
    folder: Path, vocabulary: dict[str, int], config: TokenizerConfig, defaults: Mapping[str, object] | None
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder with source.spm, target.spm and vocab.json.

    Args:
        vocabulary: The contents of vocab.json.
        config: tokenizer_config.json; names of special tokens are added.
        defaults: Of the model's family: "tokenizer_class", which transformers needs for such files.

    Raises:
        TokenizerError: If a file cannot be used, or each side has a vocabulary of its own.
    """
    if config.get("separate_vocabs"):
        raise TokenizerError(f"{folder}: separate_vocabs is true; only one vocabulary for both sides can be loaded")
    for key, token in SPECIAL.items():
        config.setdefault(key, token)
        named = config[key]["content"] if isinstance(config[key], dict) else config[key]
        if named != token:
            raise TokenizerError(f"{folder}: {key} is {quoted(named)}; only {token} can be loaded")
        if token not in vocabulary:
            raise TokenizerError(f"{folder / VOCABULARY} has no {token}, the {key}: give the file of the model")
    config.setdefault("model_max_length", MAX_LENGTH)
    if defaults is not None and "tokenizer_class" in defaults:
        config.setdefault("tokenizer_class", defaults["tokenizer_class"])
    special = list(SPECIAL.values())
    codes = [token for token in vocabulary if token.startswith(LANGUAGE[0]) and token.endswith(LANGUAGE[1])]
    around = {"single": "$A:0 </s>:0", "pair": "$A:0 $B:0 </s>:0", "appended": special}
    segmenters = {
        name: build_sentencepiece(read_model(folder, name), around, {}, folder / name) for name in (SOURCE, TARGET)
    }
    segmenters[SOURCE].add_tokens([tokenizers.AddedToken(code, normalized=False) for code in codes])
    joint = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    joint.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    joint.add_special_tokens(special)
    files = {name: read_bytes(folder, name) for name in (SOURCE, TARGET, VOCABULARY)}
    return cast(tokenizers.Tokenizer, JointVocabulary(joint, segmenters, files))

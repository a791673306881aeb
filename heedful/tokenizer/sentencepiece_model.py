"""Read SentencePiece's `.model` files (Kudo and Richardson 2018) without its library, as Unigram or BPE.

The format is a protocol buffer with the fields of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from heedful.errors import HeedfulError, TokenizerError, quoted
from heedful.tokenizer.build import add_family_template
from heedful.tokenizer.errors import translate_errors
from heedful.tokenizer.limits import (
    MAX_GROWTH,
    MAX_TOKENS,
    UNICODE_GROWTH,
    TokenizerConfig,
    check_charsmap,
    check_pieces,
)
from heedful.untrusted_files import read_bytes

NAMES = ("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.model", "sentencepiece.bpe.model")
SPACE = "▁"  # replaces spaces
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
MAX_EXTRA_IDS = 10_000
MAX_FIELDS = 50_000  # of a message beside the pieces
NEVER_PENALTY = 1000.0  # by so much worse than all others scores what segmentation may not use


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePieceModel:
    """The contents of a model file."""

    pieces: tuple[tuple[str, float, int], ...]  # text, score, type
    unknown: int
    characters: bytes  # how characters are normalised, compiled; b"": not at all
    prefix: bool  # a space is put before each text
    single_spaces: bool  # spaces at the ends and repeated ones are left out
    bytes: bool  # unknown characters become the pieces of their bytes
    bpe: bool  # the best two neighbours are merged first, rather than the best segmentation taken


def read_model(folder: Path, name: str) -> SentencePieceModel:
    """Read a model file, refusing what is damaged, is neither Unigram nor BPE, or means something else than usual."""
    path, data = folder / name, read_bytes(folder, name)
    try:
        return _parse(data)
    except HeedfulError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise TokenizerError(f"{path} is no SentencePiece model, or is damaged: {error}; fetch it again") from error


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    others = 0
    for field, value in _parse_fields(data):
        others += field != 1
        if len(pieces) > MAX_TOKENS or others > MAX_FIELDS:
            raise ValueError(f"more than {MAX_TOKENS} pieces, or {MAX_FIELDS} other fields")
        if field == 1:
            piece = _parse_message(value)
            score = struct.unpack("<f", struct.pack("<I", piece.get(2, 0)))[0]
            pieces.append((_as_bytes(piece[1]).decode(), score, int(piece.get(3, NORMAL))))
        elif field == 2:
            trainer = _parse_message(value)
        elif field == 3:
            normalizer = _parse_message(value)
    if not pieces:
        raise ValueError("it holds no pieces")
    if trainer.get(3, UNIGRAM) not in (UNIGRAM, BPE):
        raise TokenizerError(
            "it is neither Unigram nor BPE: convert it to tokenizer.json with the library that made it"
        )
    if trainer.get(24, 0) or not normalizer.get(5, 1):
        raise TokenizerError("it writes spaces in an unusual way: convert it to tokenizer.json first")
    unknown = [number for number, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN]
    if len(unknown) != 1:
        raise ValueError(f"{len(unknown)} unknown pieces, expected one")
    check_pieces([(text, score) for text, score, _ in pieces])
    if len({text for text, _, _ in pieces}) != len(pieces):
        raise ValueError("pieces are repeated")
    characters = _as_bytes(normalizer.get(2, b""))
    if characters and 2 * check_charsmap(characters) > UNICODE_GROWTH * MAX_GROWTH:
        raise ValueError("its character map makes texts too long")
    return SentencePieceModel(
        pieces=tuple(pieces),
        unknown=unknown[0],
        characters=characters,
        prefix=bool(normalizer.get(3, 1)),
        single_spaces=bool(normalizer.get(4, 1)),
        bytes=bool(trainer.get(35, 0)),
        bpe=trainer.get(3, UNIGRAM) == BPE,
    )


def _parse_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a message: integers, 32 and 64 bits as integers, or bytes."""
    position = 0
    while position < len(data):
        key, position = _parse_varint(data, position)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _parse_varint(data, position)
            yield field, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind} at byte {position}")
        length, position = _parse_varint(data, position) if kind == 2 else ({1: 8, 5: 4}[kind], position)
        if position + length > len(data):
            raise ValueError(f"it ends in the middle of a field, at byte {len(data)}")
        raw = data[position : position + length]
        yield field, raw if kind == 2 else int.from_bytes(raw, "little")
        position += length


def _parse_message(value: int | bytes) -> dict[int, int | bytes]:
    """The fields of a message inside the message; of a repeated one the last."""
    fields = list(islice(_parse_fields(_as_bytes(value)), MAX_FIELDS + 1))
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"more than {MAX_FIELDS} fields in one message")
    return dict(fields)


def _parse_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError(f"a number without an end at byte {position}")


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number was read, expected text")
    return value


def build_sentencepiece(
    model: SentencePieceModel, defaults: Mapping[str, object], config: TokenizerConfig, path: Path
) -> tokenizers.Tokenizer:
    """Return the library's Unigram or BPE tokenizer for a model.

    Args:
        model: The model.
        defaults: Of the model's family, which no file has: templates ("single", "pair"), names of special tokens
            ("special"), number of sentinels ("extra_ids"), special tokens after the pieces ("appended"), those in position
            of the first pieces ("leading", "replaced"), control pieces after the last ("trailing"), "do_lower_case",
            "keep_accents", and whether double quotes are normalised ("quotes").
        config: tokenizer_config.json; names of special tokens are added.
        path: Of the model, for messages.
    """
    special = defaults.get("special", {})
    assert isinstance(special, dict)
    for key, token in special.items():
        config.setdefault(key, token)
    model = _with_family_pieces(model, defaults, path)
    with translate_errors(f"{path} cannot be used", "fetch it again"):
        backend = tokenizers.Tokenizer(_build_bpe(model, path) if model.is_bpe else _build_unigram(model))
        backend.normalizer = normalizers.Sequence(_normalizer_steps(model, defaults, config))
        has_inner_spaces = any(SPACE in text[1:] for text, _, kind in model.pieces if kind == NORMAL)
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="never", split=not has_inner_spaces
        )
        decoder_steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*decoder_steps, decoders.Strip(" ", int(model.adds_prefix), 0)])
        backend.add_special_tokens(
            [tokenizers.AddedToken(text, normalized=False) for text, _, kind in model.pieces if kind == CONTROL]
        )
        backend.add_special_tokens([model.pieces[model.unknown_id][0]])
        extra_ids = config.get("extra_ids", defaults.get("extra_ids", 0))
        if not isinstance(extra_ids, int) or not 0 <= extra_ids <= MAX_EXTRA_IDS:
            raise TokenizerError(
                f"{path}: extra_ids is {quoted(extra_ids)}; expected a whole number from 0 to {MAX_EXTRA_IDS}"
            )
        backend.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(extra_ids))])
        appended = defaults.get("appended", [])
        assert isinstance(appended, list)
        backend.add_special_tokens(appended)
        add_family_template(backend, defaults, path)
    return backend


def _with_family_pieces(model: SentencePieceModel, defaults: Mapping[str, object], path: Path) -> SentencePieceModel:
    """Return the model with the family's own first pieces in position of those of the file."""
    leading, replaced = defaults.get("leading", []), defaults.get("replaced", [])
    assert isinstance(leading, list) and isinstance(replaced, list)
    if not leading:
        return model
    if (first := [text for text, _, _ in model.pieces[: len(replaced)]]) != replaced:
        raise TokenizerError(f"{path} begins with {quoted(first)}; the family of its model expects {quoted(replaced)}")
    unknown = leading.index(replaced[0])
    pieces = [(text, 0.0, UNKNOWN if number == unknown else CONTROL) for number, text in enumerate(leading)]
    trailing = defaults.get("trailing", [])
    assert isinstance(trailing, list)
    last = [(text, 0.0, CONTROL) for text in trailing]
    return replace(model, pieces=(*pieces, *model.pieces[len(replaced) :], *last), unknown=unknown)


def _build_unigram(model: SentencePieceModel) -> models.Unigram:
    """Return Unigram in which symbols that the model's maker defined win, and control symbols are never segments."""
    normal = [score for _, score, kind in model.pieces if kind == NORMAL] or [0.0]
    best, never = max(normal), min(normal) - NEVER_PENALTY

    def scored(text: str, score: float, kind: int) -> tuple[str, float]:
        if kind == USER:
            return text, len(text.encode()) * best - 0.1
        return text, score if kind in (NORMAL, BYTE) else never

    return models.Unigram([scored(*piece) for piece in model.pieces], model.unknown_id, model.byte_fallback)


def _build_bpe(model: SentencePieceModel, path: Path) -> models.BPE:
    """Return BPE whose merges are all ways to make a piece of two others, best piece first, then longest left part."""
    if unsupported := next((text for text, _, kind in model.pieces if kind in (USER, UNUSED)), None):
        problem = f"{path} is BPE with pieces that are unused or defined by its maker, such as {quoted(unsupported)}"
        raise TokenizerError(f"{problem}; they are not supported: convert it to tokenizer.json")
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    merges = [
        (-score, -cut, text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(
        vocab={text: number for number, (text, _, _) in enumerate(model.pieces)},
        merges=[(left, right) for _, _, left, right in sorted(merges)],
        unk_token=model.pieces[model.unknown_id][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _normalizer_steps(
    model: SentencePieceModel, defaults: Mapping[str, object], config: TokenizerConfig
) -> list[normalizers.Normalizer]:
    """Return the steps of the normalizer, in order."""

    def flag(key: str, default: bool) -> bool:
        value = config.get(key)
        return bool(defaults.get(key, default) if value is None else value)

    steps: list[normalizers.Normalizer] = []
    if defaults.get("quotes"):
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not flag("keep_accents", True):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if flag("do_lower_case", False):
        steps.append(normalizers.Lowercase())
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.removes_extra_spaces:  # at the end also SPACE in the text itself
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps

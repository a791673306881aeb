"""Read `.model` files of SentencePiece (Kudo and Richardson 2018) without the sentencepiece library, as Unigram or BPE.

`read_model` parses a file, a protocol buffer with the fields of sentencepiece_model.proto. `build_sentencepiece` builds
the same tokenizer with the `tokenizers` library. `files.py` and `joint_vocabulary.py` call both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from heedful.errors import HeedfulError, TokenizerError, quoted
from heedful.tokenizer.build import FamilyDefaults, add_family_template
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
SPACE = "▁"  # replaces spaces in pieces
# field numbers in sentencepiece_model.proto
PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of ModelProto
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3  # fields of SentencePiece
MODEL_TYPE, TREAT_WHITESPACE_AS_SUFFIX, BYTE_FALLBACK = 3, 24, 35  # fields of TrainerSpec
# fields of NormalizerSpec
PRECOMPILED_CHARSMAP, ADD_DUMMY_PREFIX, REMOVE_EXTRA_WHITESPACES, ESCAPE_WHITESPACES = 2, 3, 4, 5
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models
MAX_EXTRA_IDS = 10_000  # maximum sentinel tokens, whose number an untrusted tokenizer_config.json may set
MAX_FIELDS = 50_000  # maximum fields of a message, pieces not counted
NEVER_PENALTY = 1000.0  # how far the score of a piece that segmentation may not use is below the lowest other score


@dataclass(frozen=True, kw_only=True, slots=True)
class SentencePieceModel:
    """The contents of a model file."""

    pieces: tuple[tuple[str, float, int], ...]  # (text, score, type) by id
    unknown_id: int
    charsmap: bytes  # compiled map by which characters are normalised; b"": none are
    adds_prefix: bool  # whether a space is put before each text
    removes_extra_spaces: bool  # whether spaces at the ends of a text, and repeated spaces, are removed
    byte_fallback: bool  # whether unknown characters become the pieces of their bytes
    is_bpe: bool  # true: BPE, which first merges the two neighbours with the best merged piece; false: Unigram


def read_model(folder: Path, name: str) -> SentencePieceModel:
    """Read a model file.

    Args:
        folder: The folder of the file.
        name: Name of the file, one of NAMES for instance.

    Raises:
        TokenizerError: If the file is damaged, is neither Unigram nor BPE, or represents spaces in an unusual way.
    """
    path, data = folder / name, read_bytes(folder, name)
    try:
        return _parse(data)
    except HeedfulError as error:
        raise TokenizerError(f"{path}: {error}") from None
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise TokenizerError(
            f"{path} is not a SentencePiece model, or is damaged: {error}; fetch the file again"
        ) from error


def _parse(data: bytes) -> SentencePieceModel:
    """Parse and check a model file.

    Raises:
        TokenizerError: If the model is not supported.
        ValueError, LookupError, TypeError, struct.error: If the file is damaged.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    num_others = 0  # fields that are not pieces
    # the limits are checked before a field is stored, so that a hostile file cannot fill the memory
    for field, value in _parse_fields(data):
        if field == PIECES:
            if len(pieces) == MAX_TOKENS:
                raise ValueError(f"more than {MAX_TOKENS} pieces")
            pieces.append(_parse_piece(value))
            continue
        num_others += 1
        if num_others > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields other than pieces")
        if field == TRAINER:
            trainer = _parse_message(value)
        elif field == NORMALIZER:
            normalizer = _parse_message(value)
    if not pieces:
        raise ValueError("the file holds no pieces")
    if trainer.get(MODEL_TYPE, UNIGRAM) not in (UNIGRAM, BPE):
        raise TokenizerError(
            "the model is neither Unigram nor BPE: convert it to tokenizer.json with the library that made it"
        )
    if trainer.get(TREAT_WHITESPACE_AS_SUFFIX, 0) or not normalizer.get(ESCAPE_WHITESPACES, 1):
        # a space after its word, or a space that is not SPACE: `build_sentencepiece` supports neither
        raise TokenizerError("the model represents spaces in an unusual way: convert it to tokenizer.json first")
    unknown_ids = [id for id, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN]
    if len(unknown_ids) != 1:
        raise ValueError(f"{len(unknown_ids)} unknown pieces, expected one")
    check_pieces([(text, score) for text, score, _ in pieces])
    if len({text for text, _, _ in pieces}) != len(pieces):
        raise ValueError("pieces are repeated")
    charsmap = _as_bytes(normalizer.get(PRECOMPILED_CHARSMAP, b""))
    if charsmap and 2 * check_charsmap(charsmap) > UNICODE_GROWTH * MAX_GROWTH:
        raise ValueError("the character map makes texts too long")
    return SentencePieceModel(
        pieces=tuple(pieces),
        unknown_id=unknown_ids[0],
        charsmap=charsmap,
        adds_prefix=bool(normalizer.get(ADD_DUMMY_PREFIX, 1)),
        removes_extra_spaces=bool(normalizer.get(REMOVE_EXTRA_WHITESPACES, 1)),
        byte_fallback=bool(trainer.get(BYTE_FALLBACK, 0)),
        is_bpe=trainer.get(MODEL_TYPE, UNIGRAM) == BPE,
    )


def _parse_piece(value: int | bytes) -> tuple[str, float, int]:
    """Parse the message of a piece as (text, score, type)."""
    piece = _parse_message(value)
    score = struct.unpack("<f", struct.pack("<I", piece.get(PIECE_SCORE, 0)))[0]  # the bits of a float
    return _as_bytes(piece[PIECE_TEXT]).decode(), score, int(piece.get(PIECE_TYPE, NORMAL))


def _parse_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) for each field of a protocol buffer message.

    Integers, and values of 32 or 64 bits, are yielded as integers; texts and inner messages are yielded as bytes.
    """
    position = 0
    while position < len(data):
        key, position = _parse_varint(data, position)
        field, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _parse_varint(data, position)
            yield field, value
            continue
        if wire_type not in (1, 2, 5):
            raise ValueError(f"a field of wire type {wire_type} at byte {position}")
        if wire_type == 2:
            length, position = _parse_varint(data, position)
        else:
            length = 8 if wire_type == 1 else 4
        if position + length > len(data):
            raise ValueError(f"the file ends in the middle of a field, at byte {len(data)}")
        raw = data[position : position + length]
        yield field, raw if wire_type == 2 else int.from_bytes(raw, "little")
        position += length


def _parse_message(value: int | bytes) -> dict[int, int | bytes]:
    """Parse a message in a field. Of several fields with the same number, the last one counts."""
    fields = list(islice(_parse_fields(_as_bytes(value)), MAX_FIELDS + 1))
    if len(fields) > MAX_FIELDS:
        raise ValueError(f"more than {MAX_FIELDS} fields in one message")
    return dict(fields)


def _parse_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after it."""
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
    model: SentencePieceModel, defaults: FamilyDefaults, config: TokenizerConfig, path: Path
) -> tokenizers.Tokenizer:
    """Build the tokenizer of a model with the `tokenizers` library, as Unigram or BPE.

    Args:
        model: The model.
        defaults: Values of the model's family. Values of the same name in `config` take precedence.
        config: Values of tokenizer_config.json; names of special tokens are added.
        path: File of the model, for messages.

    Raises:
        TokenizerError: If the model does not begin with the pieces that its family expects, or cannot be used.
    """
    for key, token in defaults.get("special", {}).items():
        config.setdefault(key, token)
    model = _with_family_pieces(model, defaults, path)
    with translate_errors(f"{path} cannot be used", "fetch it again"):
        backend = tokenizers.Tokenizer(_build_bpe(model, path) if model.is_bpe else _build_unigram(model))
        backend.normalizer = normalizers.Sequence(_normalizer_steps(model, defaults, config))
        # texts are split at spaces first, unless pieces reach beyond a word
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
        backend.add_special_tokens([f"<extra_id_{index}>" for index in reversed(range(extra_ids))])
        backend.add_special_tokens(defaults.get("appended", []))
        add_family_template(backend, defaults, path)
    return backend


def _with_family_pieces(model: SentencePieceModel, defaults: FamilyDefaults, path: Path) -> SentencePieceModel:
    """Return the model with the first pieces of its family instead of those in the file.

    Families that were trained with fairseq have other ids than their file: fairseq put its own special tokens first.
    """
    leading, replaced = defaults.get("leading", []), defaults.get("replaced", [])
    if not leading:
        return model
    if (first := [text for text, _, _ in model.pieces[: len(replaced)]]) != replaced:
        raise TokenizerError(f"{path} begins with {quoted(first)}; the family of its model expects {quoted(replaced)}")
    unknown_id = leading.index(replaced[0])
    first_pieces = [(text, 0.0, UNKNOWN if id == unknown_id else CONTROL) for id, text in enumerate(leading)]
    last_pieces = [(text, 0.0, CONTROL) for text in defaults.get("trailing", [])]
    pieces = (*first_pieces, *model.pieces[len(replaced) :], *last_pieces)
    return replace(model, pieces=pieces, unknown_id=unknown_id)


def _build_unigram(model: SentencePieceModel) -> models.Unigram:
    """Build Unigram in which user-defined pieces are preferred, and control and unused pieces are never used.

    The `tokenizers` library has no types of pieces, so their scores express the types. The score of a user-defined
    piece is that of SentencePiece.
    """
    normal_scores = [score for _, score, kind in model.pieces if kind == NORMAL] or [0.0]
    best, never = max(normal_scores), min(normal_scores) - NEVER_PENALTY

    def with_score(text: str, score: float, kind: int) -> tuple[str, float]:
        if kind == USER:
            return text, len(text.encode()) * best - 0.1
        return text, score if kind in (NORMAL, BYTE) else never

    return models.Unigram([with_score(*piece) for piece in model.pieces], model.unknown_id, model.byte_fallback)


def _build_bpe(model: SentencePieceModel, path: Path) -> models.BPE:
    """Build BPE, whose merges are all ways to join two pieces into a third one. A file has pieces, but no merges.

    Merges are sorted by the score of the result, best first, then by the length of the left piece, longest first.

    Raises:
        TokenizerError: If the model has user-defined or unused pieces.
    """
    if unsupported := next((text for text, _, kind in model.pieces if kind in (USER, UNUSED)), None):
        problem = f"{path} is BPE with pieces that are unused or defined by its maker, such as {quoted(unsupported)}"
        raise TokenizerError(f"{problem}; they are not supported: convert the model to tokenizer.json")
    scores = {text: score for text, score, kind in model.pieces if kind == NORMAL}
    merges: list[tuple[float, int, str, str]] = []
    for text, score in scores.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in scores and right in scores:
                merges.append((-score, -cut, left, right))
    return models.BPE(
        vocab={text: id for id, (text, _, _) in enumerate(model.pieces)},
        merges=[(left, right) for _, _, left, right in sorted(merges)],
        unk_token=model.pieces[model.unknown_id][0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _normalizer_steps(
    model: SentencePieceModel, defaults: FamilyDefaults, config: TokenizerConfig
) -> list[normalizers.Normalizer]:
    """Return the steps of the normalizer, in order: those of the family, then those of the model file."""

    def flag(key: str, default: bool) -> bool:
        value = config.get(key)
        return bool(default if value is None else value)

    steps: list[normalizers.Normalizer] = []
    if defaults.get("quotes", False):
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not flag("keep_accents", defaults.get("keep_accents", True)):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if flag("do_lower_case", defaults.get("do_lower_case", False)):
        steps.append(normalizers.Lowercase())
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.removes_extra_spaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.adds_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.removes_extra_spaces:  # as the last step, which also removes a SPACE that the text itself ends with
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps

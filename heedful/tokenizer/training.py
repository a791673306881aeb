"""A tokenizer from texts: WordPiece, byte-level BPE or Unigram, the same for the same texts."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from heedful.errors import TokenizerError, did_you_mean
from heedful.tokenizer.build import add_template, build_byte_level_bpe, build_wordpiece
from heedful.tokenizer.errors import translate_errors
from heedful.tokenizer.limits import TokenizerConfig
from heedful.tokenizer.settings import SENTINEL, TokenizerSettings
from heedful.tokenizer.tokenizer import Tokenizer

LONGEST_LINE = 16 * 2**20  # bytes
OPENERS: dict[str, Callable[[Path, Literal["rb"]], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".conll", ".iob", ".iob2", ".bio")
REMEDY = "check the texts and the settings"


def train_tokenizer(sources: Iterable[str | Path], settings: TokenizerSettings) -> Tokenizer:
    """Train on texts: a str is a text, a Path a file of UTF-8 text with one text on each line (.gz, .xz, .bz2 too).

    The sources are read twice for WordPiece, one line at a time, so give a list and not a generator. WordPiece and
    BPE give the same tokenizer for the same sources and settings; of Unigram the library's sums depend on the order
    of a hash table, so that its scores differ by about 0.001 from run to run (ids are sorted, to be the same).
    """
    if isinstance(sources, str | Path):
        raise TokenizerError(f"sources is one {type(sources).__name__}: give a list of texts (str) and files (Path)")
    if iter(sources) is sources:
        raise TokenizerError("sources can be read once only, but are read twice: give a list, not a generator")
    if settings.algorithm not in TRAINERS:
        hint = did_you_mean(str(settings.algorithm), list(TRAINERS))
        raise TokenizerError(f"algorithm is {settings.algorithm!r}{hint}: use one of {', '.join(TRAINERS)}")
    names = tuple(asdict(settings.names).values())
    if len(set(names)) != len(names) or not all(names):
        raise TokenizerError(f"the special tokens are {names}: give five different ones")
    if settings.size_without_sentinels <= len(names):
        raise TokenizerError(f"vocab_size is {_size(settings)}, but the {len(names)} special tokens need more")
    config = settings.names.config()
    if settings.max_length is not None:
        config["model_max_length"] = settings.max_length
    with translate_errors("training failed", REMEDY):
        backend = TRAINERS[settings.algorithm](lambda: read_lines(sources), settings, config)
        backend.add_special_tokens(list(names))
        backend.add_special_tokens([SENTINEL.format(number) for number in reversed(range(settings.num_sentinels))])
    return Tokenizer(backend, config)


def _size(settings: TokenizerSettings) -> str:
    """How large a vocabulary may be, for a message."""
    less = (
        f" ({settings.size_without_sentinels} without the {settings.num_sentinels} sentinels)"
        if settings.num_sentinels
        else ""
    )
    return f"{settings.vocab_size}{less}"


Lines = Callable[[], Iterator[str]]


def _train_word_pieces(read: Lines, settings: TokenizerSettings, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """WordPiece as the library learns it: BPE merges over characters, inner ones written `##x`.

    Left alone, the library numbers inner characters in the order of a hash table, and so breaks ties differently in
    each run. They are counted here first, and given to it in order.
    """
    config |= {"do_lower_case": settings.lowercases, "strip_accents": settings.strips_accents}
    names = list(asdict(settings.names).values())
    empty = {name: number for number, name in enumerate(names)}
    backend = build_wordpiece(empty, config, "the special tokens", [])
    characters, inner = _characters(read(), backend, settings.limit_alphabet)
    if not characters:
        raise TokenizerError("there is no text in the sources: give some to learn from")
    if settings.size_without_sentinels < len(names) + len(characters) + len(inner):
        raise TokenizerError(
            f"vocab_size is {_size(settings)}, but {len(names)} special tokens, {len(characters)} characters and "
            f"{len(inner)} of them inside words need {len(names) + len(characters) + len(inner)}: raise vocab_size, "
            "or lower limit_alphabet"
        )
    learner = tokenizers.Tokenizer(models.WordPiece(empty, unk_token=settings.names.unk_token))
    learner.normalizer, learner.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.size_without_sentinels,
        min_frequency=settings.min_frequency,
        special_tokens=[*names, *characters, *(f"##{character}" for character in inner)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    learner.train_from_iterator(read(), trainer)
    return build_wordpiece(learner.get_vocab(with_added_tokens=False), config, "the trained vocabulary", [])


def _characters(texts: Iterator[str], backend: tokenizers.Tokenizer, most: int) -> tuple[list[str], list[str]]:
    """The most frequent characters of all words, and those of them that occur inside a word; both sorted."""
    counted: Counter[str] = Counter()
    inside: set[str] = set()
    normalize, split = backend.normalizer.normalize_str, backend.pre_tokenizer.pre_tokenize_str
    for text in texts:
        words = [word for word, _ in split(normalize(text))]
        counted.update("".join(words))
        inside.update(*(word[1:] for word in words))
    alphabet = sorted(sorted(counted), key=lambda character: -counted[character])[:most]
    return sorted(alphabet), sorted(inside & set(alphabet))


def _train_bytes(read: Lines, settings: TokenizerSettings, config: TokenizerConfig) -> tokenizers.Tokenizer:
    names = settings.names
    if settings.size_without_sentinels < 5 + 256:
        raise TokenizerError(f"vocab_size is {_size(settings)}, but 5 special tokens and 256 bytes need 261: raise it")
    config |= {"bos_token": names.cls_token, "eos_token": names.sep_token}
    learner = tokenizers.Tokenizer(models.BPE())
    if steps := _accents_and_case(settings, normalizers.NFD(), normalizers.NFC()):
        learner.normalizer = normalizers.Sequence(steps)
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.size_without_sentinels,
        min_frequency=settings.min_frequency,
        special_tokens=[names.cls_token, names.pad_token, names.sep_token, names.unk_token, names.mask_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(read(), trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    backend = build_byte_level_bpe(model["vocab"], merges, config, "the trained vocabulary", [])
    backend.normalizer = learner.normalizer
    backend.add_special_tokens([tokenizers.AddedToken(names.mask_token, lstrip=True, special=True, normalized=False)])
    return backend


def _train_unigram(read: Lines, settings: TokenizerSettings, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Unigram (Kudo 2018): spaces become part of the pieces, as sentencepiece has it."""
    names = list(asdict(settings.names).values())
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.normalizer = normalizers.Sequence(
        [
            *(_accents_and_case(settings, normalizers.NFKD()) or []),
            normalizers.NFKC(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.size_without_sentinels,
        special_tokens=names,
        unk_token=settings.names.unk_token,
        show_progress=False,
    )
    learner.train_from_iterator(read(), trainer)
    pieces = sorted((piece, round(score, 6)) for piece, score in json.loads(learner.to_str())["model"]["vocab"])
    if len(pieces) <= len(names):
        raise TokenizerError("there is no text in the sources: give some to learn from")
    vocabulary = [(name, 0.0) for name in names] + [pair for pair in pieces if pair[0] not in names]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=names.index(settings.names.unk_token)))
    backend.normalizer, backend.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    backend.decoder = decoders.Metaspace()
    add_template(backend, settings.names.cls_token, settings.names.sep_token)
    return backend


def _accents_and_case(
    settings: TokenizerSettings, first: normalizers.Normalizer, last: normalizers.Normalizer | None = None
) -> list[normalizers.Normalizer]:
    """The normalizers that take accents off and lower the case, as far as the settings ask."""
    steps = [first, normalizers.StripAccents(), *([last] if last else [])] if settings.strips_accents else []
    return [*steps, *([normalizers.Lowercase()] if settings.lowercases else [])]


TRAINERS = {"wordpiece": _train_word_pieces, "bpe": _train_bytes, "unigram": _train_unigram}


def read_lines(sources: Iterable[str | Path]) -> Iterator[str]:
    """Each text, and each line of each file without its end; an error names the file and line."""
    for number, source in enumerate(sources):
        if isinstance(source, Path):
            yield from _file_lines(source)
        elif isinstance(source, str):
            if not source.isascii():
                _check_text(source, f"text {number}")
            yield source
        else:
            raise TokenizerError(f"source {number} is a {type(source).__name__}: give a text (str) or a file (Path)")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{what} has half a character ({text[error.start]!a}, a lone surrogate) at character {error.start}: "
            "read the text as UTF-8"
        ) from None


def _file_lines(path: Path) -> Iterator[str]:
    name = path.with_suffix("") if path.suffix in OPENERS else path
    if name.suffix.lower() in TABLES:
        raise TokenizerError(
            f"{path}: lines of {name.suffix} files are no texts: write these alone to a .txt file, one on each line; "
            "of tables, heedful pretrain reads the texts itself, and trains a tokenizer on them"
        )
    number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            while raw := file.readline(LONGEST_LINE):
                number += 1
                if len(raw) == LONGEST_LINE:
                    raise TokenizerError(f"{path}, line {number} has {LONGEST_LINE} bytes or more: split it into lines")
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}, line {number} is not UTF-8 ({error.reason}): save it as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TokenizerError(f"{path} cannot be read after line {number}: {error}; check the file") from error

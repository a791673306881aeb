"""`train_tokenizer`: WordPiece, byte-level BPE or Unigram, trained on texts. Equal texts give equal token ids."""

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

MAX_LINE_BYTES = 16 * 2**20  # bytes of a line, which must be shorter
OPENERS: dict[str, Callable[[Path, Literal["rb"]], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".conll", ".iob", ".iob2", ".bio")
REMEDY = "check the texts and the settings"
ReadTexts = Callable[[], Iterator[str]]  # each call reads all texts from the first one


def train_tokenizer(sources: Iterable[str | Path], settings: TokenizerSettings) -> Tokenizer:
    """Train a tokenizer.

    WordPiece and BPE return the same tokenizer for the same sources and settings. With Unigram the library's sums
    depend on the order of a hash table, so that scores differ by about 0.001 from run to run; tokens are sorted, so
    that ids do not.

    Args:
        sources: A str is a text, a Path a UTF-8 file with one text on each line, perhaps compressed (.gz, .xz, .bz2).
            WordPiece reads the sources twice, so that a generator is refused.
        settings: Algorithm, size and normalisation.

    Raises:
        TokenizerError: If a source cannot be read, or the vocabulary is too small for special tokens and characters.
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
        raise TokenizerError(f"vocab_size is {_describe_size(settings)}, but the {len(names)} special tokens need more")
    config = settings.names.config()
    if settings.max_length is not None:
        config["model_max_length"] = settings.max_length
    with translate_errors("training failed", REMEDY):
        backend = TRAINERS[settings.algorithm](lambda: read_lines(sources), settings, config)
        backend.add_special_tokens(list(names))
        backend.add_special_tokens([SENTINEL.format(index) for index in reversed(range(settings.num_sentinels))])
    return Tokenizer(backend, config)


def _describe_size(settings: TokenizerSettings) -> str:
    """Return the maximum size of the vocabulary, for messages."""
    if not settings.num_sentinels:
        return str(settings.vocab_size)
    without = f"{settings.size_without_sentinels} without the {settings.num_sentinels} sentinels"
    return f"{settings.vocab_size} ({without})"


def _train_wordpiece(
    read_texts: ReadTexts, settings: TokenizerSettings, config: TokenizerConfig
) -> tokenizers.Tokenizer:
    """Train WordPiece by the library's algorithm: BPE merges of characters, those inside a word written `##x`.

    The library gives ids to the characters inside words in the order of a hash table, and breaks ties by these ids, so
    that runs would differ. Therefore the characters are counted here first and passed to the library in order.
    """
    config |= {"do_lower_case": settings.lowercases, "strip_accents": settings.strips_accents}
    names = list(asdict(settings.names).values())
    special_ids = {name: id for id, name in enumerate(names)}
    backend = build_wordpiece(special_ids, config, "the special tokens", [])
    characters, inner = _frequent_characters(read_texts(), backend, settings.limit_alphabet)
    if not characters:
        raise TokenizerError("there is no text in the sources: give some to learn from")
    min_size = len(names) + len(characters) + len(inner)
    if settings.size_without_sentinels < min_size:
        raise TokenizerError(
            f"vocab_size is {_describe_size(settings)}, but {len(names)} special tokens, {len(characters)} characters "
            f"and {len(inner)} of them inside words need {min_size}: raise vocab_size, or lower limit_alphabet"
        )
    trained = tokenizers.Tokenizer(models.WordPiece(special_ids, unk_token=settings.names.unk_token))
    trained.normalizer, trained.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.size_without_sentinels,
        min_frequency=settings.min_frequency,
        special_tokens=[*names, *characters, *(f"##{character}" for character in inner)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    trained.train_from_iterator(read_texts(), trainer)
    return build_wordpiece(trained.get_vocab(with_added_tokens=False), config, "the trained vocabulary", [])


def _frequent_characters(
    texts: Iterator[str], backend: tokenizers.Tokenizer, max_characters: int
) -> tuple[list[str], list[str]]:
    """Return the most frequent characters of all words, and those of them that occur inside a word; both sorted."""
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    normalize, split = backend.normalizer.normalize_str, backend.pre_tokenizer.pre_tokenize_str
    for text in texts:
        words = [word for word, _ in split(normalize(text))]
        counts.update("".join(words))
        inside.update(*(word[1:] for word in words))
    alphabet = sorted(sorted(counts), key=lambda character: -counts[character])[:max_characters]
    return sorted(alphabet), sorted(inside & set(alphabet))


def _train_byte_level_bpe(
    read_texts: ReadTexts, settings: TokenizerSettings, config: TokenizerConfig
) -> tokenizers.Tokenizer:
    """Train byte-level BPE (Radford et al. 2019), with the special tokens in RoBERTa's order."""
    names = settings.names
    if settings.size_without_sentinels < 5 + 256:
        raise TokenizerError(
            f"vocab_size is {_describe_size(settings)}, but 5 special tokens and 256 bytes need 261: raise it"
        )
    config |= {"bos_token": names.cls_token, "eos_token": names.sep_token}
    trained = tokenizers.Tokenizer(models.BPE())
    if steps := _accent_and_case_steps(settings, normalizers.NFD(), normalizers.NFC()):
        trained.normalizer = normalizers.Sequence(steps)
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.size_without_sentinels,
        min_frequency=settings.min_frequency,
        special_tokens=[names.cls_token, names.pad_token, names.sep_token, names.unk_token, names.mask_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(read_texts(), trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    backend = build_byte_level_bpe(model["vocab"], merges, config, "the trained vocabulary", [])
    backend.normalizer = trained.normalizer
    backend.add_special_tokens([tokenizers.AddedToken(names.mask_token, lstrip=True, special=True, normalized=False)])
    return backend


def _train_unigram(read_texts: ReadTexts, settings: TokenizerSettings, config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Train Unigram (Kudo 2018); spaces are part of the pieces, as in SentencePiece."""
    names = list(asdict(settings.names).values())
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Sequence(
        [
            *_accent_and_case_steps(settings, normalizers.NFKD()),
            normalizers.NFKC(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=settings.size_without_sentinels,
        special_tokens=names,
        unk_token=settings.names.unk_token,
        show_progress=False,
    )
    trained.train_from_iterator(read_texts(), trainer)
    pieces = sorted((piece, round(score, 6)) for piece, score in json.loads(trained.to_str())["model"]["vocab"])
    if len(pieces) <= len(names):
        raise TokenizerError("there is no text in the sources: give some to learn from")
    vocabulary = [(name, 0.0) for name in names] + [pair for pair in pieces if pair[0] not in names]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=names.index(settings.names.unk_token)))
    backend.normalizer, backend.pre_tokenizer = trained.normalizer, trained.pre_tokenizer
    backend.decoder = decoders.Metaspace()
    add_template(backend, settings.names.cls_token, settings.names.sep_token)
    return backend


def _accent_and_case_steps(
    settings: TokenizerSettings, first: normalizers.Normalizer, last: normalizers.Normalizer | None = None
) -> list[normalizers.Normalizer]:
    """Return the normalizers that remove accents and lower-case texts, if the settings ask for it.

    Args:
        settings: The settings.
        first: Normalizer that separates accents from letters.
        last: Normalizer after the removal of accents, if there is one.
    """
    steps: list[normalizers.Normalizer] = []
    if settings.strips_accents:
        steps += [first, normalizers.StripAccents(), *([last] if last else [])]
    if settings.lowercases:
        steps.append(normalizers.Lowercase())
    return steps


TRAINERS = {"wordpiece": _train_wordpiece, "bpe": _train_byte_level_bpe, "unigram": _train_unigram}


def read_lines(sources: Iterable[str | Path]) -> Iterator[str]:
    """Yield each text, and each line of each file without its line end; errors name the file and line."""
    for index, source in enumerate(sources):
        if isinstance(source, Path):
            yield from _file_lines(source)
        elif isinstance(source, str):
            if not source.isascii():
                _check_text(source, f"text {index}")
            yield source
        else:
            raise TokenizerError(f"source {index} is a {type(source).__name__}: give a text (str) or a file (Path)")


def _check_text(text: str, what: str) -> None:
    """Raise TokenizerError if a text has a lone surrogate; `what` names the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{what} has half a character ({text[error.start]!a}, a lone surrogate) at character {error.start}: "
            "read the text as UTF-8"
        ) from None


def _file_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, which may be compressed."""
    name = path.with_suffix("") if path.suffix in OPENERS else path
    if name.suffix.lower() in TABLE_SUFFIXES:
        raise TokenizerError(
            f"{path}: lines of {name.suffix} files are not texts: write the texts to a .txt file, one on each line; "
            "heedful pretrain reads the texts of tables itself, and trains a tokenizer on them"
        )
    line_number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                line_number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise TokenizerError(
                        f"{path}, line {line_number} has {MAX_LINE_BYTES} bytes or more: split it into lines"
                    )
                yield line.decode("utf-8-sig" if line_number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}, line {line_number} is not UTF-8 ({error.reason}): save it as UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise TokenizerError(f"{path} cannot be read after line {line_number}: {error}; check the file") from error

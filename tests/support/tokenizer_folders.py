"""Small tokenizer folders: a WordPiece vocabulary and a byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import pre_tokenizers

SQUARE_BRACKET_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ANGLE_BRACKET_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def wordpieces(extra: list[str] | None = None) -> list[str]:
    """Return a small WordPiece vocabulary with every ASCII letter, digit and sign, and `extra` entries."""
    signs = [chr(number) for number in range(33, 127) if not chr(number).isupper()]
    joined = ["the", "##ing", "he", "hello", "##llo", "un", "##aff", "##able", "ist", "##anbul", "strasse"]
    return [*SQUARE_BRACKET_TOKENS, *signs, *(f"##{sign}" for sign in signs), *joined, *(extra or [])]


def write_wordpiece(folder: Path, entries: list[str], config: str | None = '{"do_lower_case": true}') -> Path:
    """Write a folder with a WordPiece vocabulary, and a tokenizer_config.json unless `config` is None."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    return folder


def write_byte_level(folder: Path, special: list[str], config: str = "{}") -> Path:
    """Write a folder with a byte-level BPE, whose merges lead up to " hello", " world" and "cat"."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "c a", "ca t"]
    entries = special[:4] + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    vocabulary = {token: number for number, token in enumerate([*entries, *special[4:]])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{merge}\n" for merge in merges))
    (folder / "tokenizer_config.json").write_text(config)
    return folder

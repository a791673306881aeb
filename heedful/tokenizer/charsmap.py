"""The compiled character map of SentencePiece normalizers, checked so that following it cannot leave it.

A map is the size of a double array in bytes, the double array (Yata's, as in Darts), and texts that each end in NUL.
"""

from __future__ import annotations

import unicodedata

import numpy as np

MAX_BYTES = 4 << 20  # published maps have 0.25 MB
LEAF, WIDE, ENDS = 1 << 31, 1 << 9, 1 << 8  # bits of a unit: a value; its offset is in steps of 256; a key ends here


def expanded_length(text: str) -> int:
    """Characters of a text once Unicode's normal forms and lower-casing cannot make it longer."""
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower()))


def longest_output(data: bytes) -> int:
    """Check a map, and return how many characters its longest replacement expands to; ValueError says what is wrong."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"the character map has {len(data)} bytes, at most {MAX_BYTES} are read")
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 1024 or not size:
        raise ValueError(f"the character map has {len(data)} bytes, and its double array claims {size}")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    is_leaf = units >= LEAF
    offsets = (units >> 10) << np.where(units & WIDE, 8, 0)
    targets = np.arange(len(units)) ^ offsets
    last = targets[~is_leaf] | 255  # of the 256 places that a step can lead to
    if len(last) and last.max() >= len(units):
        raise ValueError("a step of the character map leads out of it")
    if not is_leaf[targets[~is_leaf & (units & ENDS != 0)]].all():
        raise ValueError("a key of the character map has no value")
    if not texts.endswith(b"\0"):
        raise ValueError("the last text of the character map has no end")
    starts = np.concatenate([[0], np.flatnonzero(np.frombuffer(texts, np.uint8) == 0)[:-1] + 1])
    if not np.isin(units[is_leaf] & (LEAF - 1), starts).all():
        raise ValueError("a value of the character map is not where a text begins")
    try:
        return max(map(expanded_length, texts.decode().split("\0")))
    except UnicodeDecodeError:
        raise ValueError("the texts of the character map are not UTF-8") from None

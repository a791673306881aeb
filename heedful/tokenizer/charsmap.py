"""Check the compiled character map of a SentencePiece normalizer, so that a lookup cannot read outside of the map.

A map consists of the size of its double array in bytes, the double array (Yata's, as in Darts), and the replacements,
which are texts that each end in NUL. `limits.py` calls `max_replacement_chars`.
"""

from __future__ import annotations

import unicodedata

import numpy as np

MAX_MAP_BYTES = 4 << 20  # published maps have 0.25 MB
# bits of a unit of the double array
VALUE_BIT = 1 << 31  # the unit is a value: the offset of a replacement
WIDE_OFFSET_BIT = 1 << 9  # the offset of the unit is in steps of 256
KEY_END_BIT = 1 << 8  # a key ends at the unit, and its value follows


def max_expanded_chars(text: str) -> int:
    """Return how many characters a text has in the longest of Unicode's normal forms, lower-cased."""
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).lower()))


def max_replacement_chars(data: bytes) -> int:
    """Check a map, and return how many characters its longest replacement has, expanded by Unicode's normal forms.

    Raises:
        ValueError: If the map is damaged or too large.
    """
    if len(data) > MAX_MAP_BYTES:
        raise ValueError(f"the character map has {len(data)} bytes, at most {MAX_MAP_BYTES} are read")
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size > len(data) - 4 or size % 1024 or not size:
        raise ValueError(f"the character map has {len(data)} bytes, and its double array claims {size}")
    units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
    texts = data[4 + size :]
    is_value = units >= VALUE_BIT
    offsets = (units >> 10) << np.where(units & WIDE_OFFSET_BIT, 8, 0)
    targets = np.arange(len(units)) ^ offsets
    last_targets = targets[~is_value] | 255  # a step leads to the target with any of 256 bytes in its low bits
    if len(last_targets) and last_targets.max() >= len(units):
        raise ValueError("a step of the character map leads out of it")
    if not is_value[targets[~is_value & (units & KEY_END_BIT != 0)]].all():
        raise ValueError("a key of the character map has no value")
    if not texts.endswith(b"\0"):
        raise ValueError("the last text of the character map has no end")
    text_starts = np.concatenate([[0], np.flatnonzero(np.frombuffer(texts, np.uint8) == 0)[:-1] + 1])
    if not np.isin(units[is_value] & (VALUE_BIT - 1), text_starts).all():
        raise ValueError("a value of the character map is not where a text begins")
    try:
        return max(map(max_expanded_chars, texts.decode().split("\0")))
    except UnicodeDecodeError:
        raise ValueError("the texts of the character map are not UTF-8") from None

"""Random numbers from a sample's key alone, and of numpy's raw bits, which are the same in every version (NEP 19)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heedful.tokenizer import Tokenizer


def uniform(key: int, count: int) -> NDArray[np.float64]:
    """Return `count` numbers from 0 to below 1."""
    raw: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scale_to_integers(shares: NDArray[np.float64], bound: int) -> NDArray[np.int64]:
    """Turn uniform numbers into whole numbers from 0 to below the bound.

    >>> scale_to_integers(np.array([0.0, 0.5, 0.999]), 10).tolist()
    [0, 5, 9]
    """
    return (shares * bound).astype(np.int64)


def is_text_token(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Mark the tokens of the text: all but padding, begin, separator and mask."""
    special = tokenizer.special
    ids = [id for id in (special.pad, special.bos_or_cls, special.eos_or_sep, special.mask) if id is not None]
    return np.isin(tokens, ids, invert=True)

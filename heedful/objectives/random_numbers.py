"""Random numbers of a sample's key alone; raw bits of numpy's generators never change, unlike what is made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heedful.tokenizer import Tokenizer


def uniform(key: int, count: int) -> NDArray[np.float64]:
    """So many numbers from 0 to below 1 (see NEP 19 for why of raw bits)."""
    raw: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scale_to_integers(shares: NDArray[np.float64], bound: int) -> NDArray[np.int64]:
    """Whole numbers from 0 to below the bound, of uniform numbers.

    >>> scale_to_integers(np.array([0.0, 0.5, 0.999]), 10).tolist()
    [0, 5, 9]
    """
    return (shares * bound).astype(np.int64)


def is_text_token(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which tokens are of the text: none of those that fill up, stand around texts or hide them."""
    special = tokenizer.special
    ids = [id for id in (special.pad, special.first, special.separator, special.mask) if id is not None]
    return np.isin(tokens, ids, invert=True)

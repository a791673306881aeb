"""Random numbers for objectives, which depend only on the key of a sample.

They are derived from the raw bits of numpy's Philox generator, which are the same in every version of numpy (NEP 19).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heedful.tokenizer import Tokenizer


def uniform(key: int, count: int) -> NDArray[np.float64]:
    """Return `count` uniform random numbers in [0, 1). Equal keys give equal numbers."""
    bits: NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scale_to_integers(draws: NDArray[np.float64], bound: int) -> NDArray[np.int64]:
    """Scale uniform random numbers in [0, 1) to integers in [0, bound).

    >>> scale_to_integers(np.array([0.0, 0.5, 0.999]), 10).tolist()
    [0, 5, 9]
    """
    return (draws * bound).astype(np.int64)


def is_text_token(tokens: NDArray[np.int32], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Mark text tokens: all but padding, CLS or BOS, SEP or EOS, and mask tokens."""
    special = tokenizer.special
    ids = [id for id in (special.pad, special.bos_or_cls, special.eos_or_sep, special.mask) if id is not None]
    return np.isin(tokens, ids, invert=True)

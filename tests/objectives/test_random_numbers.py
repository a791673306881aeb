"""Random numbers depend only on a key, are equal on every machine, and have the distributions that they should."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heedful.objectives.random_numbers import is_text_token, scale_to_integers, uniform
from tests.support.corpora import make_documents, train_on


@given(st.integers(0, 2**63 - 1), st.integers(0, 300))
def test_equal_keys_give_equal_numbers(key: int, count: int) -> None:
    draws = uniform(key, count)
    assert draws.shape == (count,) and ((draws >= 0) & (draws < 1)).all()
    assert (draws == uniform(key, count)).all()
    assert (draws == uniform(key, count + 7)[:count]).all(), "the first numbers depend on the count"


def test_numbers_are_equal_on_every_machine() -> None:
    """The numbers are made of the raw bits of Philox (Salmon et al. 2011)."""
    raw = np.random.Philox(key=0).random_raw(4)
    assert (uniform(0, 4) == [(int(bits) >> 11) / 2**53 for bits in raw]).all()
    assert uniform(1, 3).round(12).tolist() == NUMBERS_OF_KEY_1


NUMBERS_OF_KEY_1 = [0.303568034307, 0.848708749686, 0.156134778043]


def test_numbers_are_uniform_and_independent_of_neighbouring_keys() -> None:
    draws = np.concatenate([uniform(key, 1000) for key in range(50)])
    assert abs(draws.mean() - 0.5) < 5 * (1 / 12 / 50_000) ** 0.5
    numbers = scale_to_integers(draws, 7)
    assert set(numbers.tolist()) == set(range(7))
    assert abs(np.bincount(numbers) - 50_000 / 7).max() < 5 * (50_000 / 7) ** 0.5
    first_numbers = np.array([uniform(key, 1)[0] for key in range(5000)])
    assert abs(np.corrcoef(first_numbers[:-1], first_numbers[1:])[0, 1]) < 5 / 5000**0.5


def test_scaled_numbers_never_reach_the_bound() -> None:
    assert scale_to_integers(np.array([1 - 2**-53]), 2**31).tolist() == [2**31 - 1]
    assert scale_to_integers(np.zeros(0), 3).tolist() == []


def test_text_tokens_are_all_but_padding_ends_and_masks() -> None:
    tokenizer = train_on(make_documents(5))
    special = tokenizer.special
    ids = np.array(
        [special.bos_or_cls, 9, special.mask, 10, special.unknown, special.eos_or_sep, special.pad], dtype=np.int32
    )
    assert is_text_token(ids, tokenizer).tolist() == [False, True, False, True, True, False, False]

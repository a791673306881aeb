"""Sinusoids in the three published layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from heedful.nn.positions import Waves, sinusoid


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def formula(place: int, column: int, width: int, layout: Waves, base: float) -> float:
    """One entry, as the papers and programs define it."""
    if layout == "interleaved":
        wave = math.sin if column % 2 == 0 else math.cos
        return wave(place / base ** (2 * (column // 2) / width))
    if layout == "halves":
        sines = (width + 1) // 2
        wave, i = (math.sin, column) if column < sines else (math.cos, column - sines)
        return wave(place / base ** (2 * i / width))
    half = width // 2
    if column == 2 * half:
        return 0.0
    wave, i = (math.sin, column) if column < half else (math.cos, column - half)
    return wave(place / base ** (i / max(half - 1, 1)))


@pytest.mark.parametrize("layout", ["interleaved", "halves", "halves_inclusive"])
@pytest.mark.parametrize(("width", "base"), [(8, 10_000.0), (7, 10_000.0), (12, 500.0), (2, 10_000.0), (1, 10_000.0)])
def test_every_entry_is_the_formulas(layout: Waves, width: int, base: float) -> None:
    places = [0, 1, 2, 17, 511, 5000]
    waves = sinusoid(torch.tensor(places), width, layout, base)
    expected = [[formula(place, column, width, layout, base) for column in range(width)] for place in places]
    torch.testing.assert_close(waves, torch.tensor(expected), atol=1e-12, rtol=0)


def test_positions_may_repeat_and_start_anywhere() -> None:
    whole = sinusoid(torch.arange(20), 6)
    assert torch.equal(sinusoid(torch.tensor([7, 7, 2, 19]), 6), whole[[7, 7, 2, 19]])
    assert sinusoid(torch.arange(0), 6).shape == (0, 6)


def sines_and_cosines(layout: Waves, waves: Tensor) -> tuple[Tensor, Tensor]:
    return (waves[:, 0::2], waves[:, 1::2]) if layout == "interleaved" else tuple(waves.chunk(2, -1))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["interleaved", "halves", "halves_inclusive"])
def test_a_step_is_a_fixed_rotation(layout: Waves) -> None:
    """(sin, cos)(p + k) = R(k) (sin, cos)(p) with one rotation for each frequency, the same for every p."""
    places, k = torch.arange(200), 13
    sin, cos = sines_and_cosines(layout, sinusoid(places, 16, layout))
    later_sin, later_cos = sines_and_cosines(layout, sinusoid(places + k, 16, layout))
    turn_sin, turn_cos = sines_and_cosines(layout, sinusoid(torch.tensor([k]), 16, layout))  # the angles of k
    torch.testing.assert_close(later_sin, sin * turn_cos + cos * turn_sin, atol=1e-12, rtol=0)
    torch.testing.assert_close(later_cos, cos * turn_cos - sin * turn_sin, atol=1e-12, rtol=0)


def test_it_is_computed_in_float64() -> None:
    torch.set_default_dtype(torch.float32)
    assert sinusoid(torch.arange(5000), 32).dtype == torch.float64


@pytest.mark.parametrize("width", [16, 15])
def test_halves_are_the_positions_of_marian(width: int) -> None:
    torch.set_default_dtype(torch.float32)
    marian = MarianSinusoidalPositionalEmbedding(300, width).create_weight()
    torch.testing.assert_close(sinusoid(torch.arange(300), width, "halves").float(), marian, atol=1e-7, rtol=0)


@pytest.mark.parametrize("marian", [SinusoidalPositionalEmbedding, M2M100SinusoidalPositionalEmbedding])
@pytest.mark.parametrize("width", [16, 15])
def test_halves_inclusive_are_the_positions_of_fairseq(marian: Any, width: int) -> None:
    table = marian.get_embedding(300, width, None)  # its float32 angles are off by 300 eps
    torch.testing.assert_close(
        sinusoid(torch.arange(300), width, "halves_inclusive"), table.double(), atol=5e-5, rtol=0
    )

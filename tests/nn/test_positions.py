"""Sinusoids in the three published layouts equal their formulas and the tables of transformers."""

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
def _default_float64(request: pytest.FixtureRequest) -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def formula(position: int, column: int, width: int, layout: Waves, base: float) -> float:
    """Compute one element as the paper or the published code of a layout does."""
    if layout == "interleaved":
        wave = math.sin if column % 2 == 0 else math.cos
        return wave(position / base ** (2 * (column // 2) / width))
    if layout == "halves":
        sines = (width + 1) // 2
        wave, i = (math.sin, column) if column < sines else (math.cos, column - sines)
        return wave(position / base ** (2 * i / width))
    half = width // 2
    if column == 2 * half:
        return 0.0
    wave, i = (math.sin, column) if column < half else (math.cos, column - half)
    return wave(position / base ** (i / max(half - 1, 1)))


@pytest.mark.parametrize("layout", ["interleaved", "halves", "halves_inclusive"])
@pytest.mark.parametrize(("width", "base"), [(8, 10_000.0), (7, 10_000.0), (12, 500.0), (2, 10_000.0), (1, 10_000.0)])
def test_every_element_equals_the_formula(layout: Waves, width: int, base: float) -> None:
    positions = [0, 1, 2, 17, 511, 5000]
    waves = sinusoid(torch.tensor(positions), width, layout, base)
    expected = [[formula(position, column, width, layout, base) for column in range(width)] for position in positions]
    torch.testing.assert_close(waves, torch.tensor(expected), atol=1e-12, rtol=0)


def test_positions_may_have_any_order_and_repeat() -> None:
    table = sinusoid(torch.arange(20), 6)
    assert torch.equal(sinusoid(torch.tensor([7, 7, 2, 19]), 6), table[[7, 7, 2, 19]])
    assert sinusoid(torch.arange(0), 6).shape == (0, 6)


def sines_and_cosines(layout: Waves, waves: Tensor) -> tuple[Tensor, Tensor]:
    return (waves[:, 0::2], waves[:, 1::2]) if layout == "interleaved" else tuple(waves.chunk(2, -1))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["interleaved", "halves", "halves_inclusive"])
def test_a_shift_of_positions_is_a_rotation(layout: Waves) -> None:
    """(sin, cos)(p + k) = R(k) (sin, cos)(p), with a rotation R(k) of each frequency that does not depend on p."""
    positions, k = torch.arange(200), 13
    sin, cos = sines_and_cosines(layout, sinusoid(positions, 16, layout))
    shifted_sin, shifted_cos = sines_and_cosines(layout, sinusoid(positions + k, 16, layout))
    sin_k, cos_k = sines_and_cosines(layout, sinusoid(torch.tensor([k]), 16, layout))
    torch.testing.assert_close(shifted_sin, sin * cos_k + cos * sin_k, atol=1e-12, rtol=0)
    torch.testing.assert_close(shifted_cos, cos * cos_k - sin * sin_k, atol=1e-12, rtol=0)


def test_sinusoids_are_computed_in_float64() -> None:
    torch.set_default_dtype(torch.float32)
    assert sinusoid(torch.arange(5000), 32).dtype == torch.float64


@pytest.mark.parametrize("width", [16, 15])
def test_halves_are_the_positions_of_marian(width: int) -> None:
    torch.set_default_dtype(torch.float32)
    marian = MarianSinusoidalPositionalEmbedding(300, width).create_weight()
    torch.testing.assert_close(sinusoid(torch.arange(300), width, "halves").float(), marian, atol=1e-7, rtol=0)


@pytest.mark.parametrize("embedding", [SinusoidalPositionalEmbedding, M2M100SinusoidalPositionalEmbedding])
@pytest.mark.parametrize("width", [16, 15])
def test_halves_inclusive_are_the_positions_of_fairseq(embedding: Any, width: int) -> None:
    table = embedding.get_embedding(300, width, None)  # its float32 angles have errors of 300 eps
    torch.testing.assert_close(
        sinusoid(torch.arange(300), width, "halves_inclusive"), table.double(), atol=5e-5, rtol=0
    )

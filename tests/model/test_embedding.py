"""The input embedding, and the batches that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, Sinusoidal
from heedful.model.embedding import EmbeddingLayer
from heedful.nn.positions import sinusoid
from heedful.packed import Packed

EMBEDDING = EmbeddingConfig(vocabulary=30, width=16)
SOURCE = Packed.of([[1, 2, 3, 4, 5], [6], [7, 8, 9]])


def test_tokens_are_scaled_and_positions_are_not() -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=Sinusoidal(), scale=16**0.5), 16).double()
    sinusoids = torch.cat([sinusoid(torch.arange(length), 16) for length in SOURCE.lengths])
    expected = 4.0 * embedding.tokens(SOURCE.tokens) + sinusoids
    torch.testing.assert_close(embedding(SOURCE), expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_restart_in_each_sequence(offset: int) -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=Learned(count=8, offset=offset)), 16)
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2]) + offset
    expected = embedding.tokens(SOURCE.tokens) + embedding.positions(positions)
    assert torch.equal(embedding(SOURCE), expected)


def test_sinusoidal_positions_start_at_their_offset() -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=Sinusoidal(layout="halves_inclusive", offset=2)), 16)
    expected = embedding.tokens(SOURCE.tokens)[5] + sinusoid(torch.tensor([2]), 16, "halves_inclusive")[0].float()
    assert torch.equal(embedding(SOURCE)[5], expected)


@pytest.mark.parametrize(
    "positions", [Learned(count=9, join="concatenate", width=6), Sinusoidal(join="concatenate", width=6)]
)
def test_concatenated_positions_follow_the_token(positions: Learned | Sinusoidal) -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=positions, types=2), 22)
    assert isinstance(embedding.project, nn.Identity) and embedding.types.weight.shape == (2, 22)
    rows = embedding(SOURCE) - embedding.types.weight[0]
    torch.testing.assert_close(rows[:, :16], embedding.tokens(SOURCE.tokens))
    torch.testing.assert_close(rows[0, 16:], rows[5, 16:], atol=1e-6, rtol=0)  # both are first in their sequence
    assert EmbeddingLayer(replace(EMBEDDING, positions=positions), 16)(SOURCE).shape == (9, 16)


@pytest.mark.parametrize("positions", [Learned(count=9), Sinusoidal()])
def test_added_positions_have_the_width_of_tokens(positions: Learned | Sinusoidal) -> None:
    same, wider = (EmbeddingLayer(replace(EMBEDDING, positions=positions), width) for width in (16, 24))
    assert same(SOURCE).shape == (9, 16) and isinstance(same.project, nn.Identity)
    assert wider(SOURCE).shape == (9, 24) and isinstance(wider.project, nn.Linear)


def test_the_padding_sequence_may_be_longer_than_the_positions() -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=Learned(count=3)), 16)
    padded = Packed.of([[1, 2, 3]] * 129).pad_to_bucket()
    assert padded.lengths[-1] == 5
    assert embedding(padded).shape == (392, 16)


# -- refusals -------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, *batches: Packed) -> str:
    with pytest.raises(HeedfulError) as caught:
        model(*batches)
    return str(caught.value)


def test_sequences_longer_than_the_positions_are_refused() -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, positions=Learned(count=6, offset=2)), 16)
    expected = "sequence 0 has 5 tokens, but the model has positions for 4: split it into windows or truncate it"
    assert refusal(embedding, SOURCE) == expected
    assert EmbeddingLayer(replace(EMBEDDING, positions=Learned(count=7, offset=2)), 16)(SOURCE).shape == (9, 16)


@pytest.mark.parametrize("bad", [30, -1])
def test_unknown_token_ids_are_refused(bad: int) -> None:
    expected = f"token id {bad} is unknown; this model knows 0 to 29: was the batch made with another tokenizer?"
    layer, batch = EmbeddingLayer(EMBEDDING, 16), Packed.of([[1], [2, bad]])
    assert refusal(layer, batch) == expected
    assert refusal(layer.to("meta"), batch.to("meta")) == expected  # no id is read from the device


def test_unknown_types_are_refused() -> None:
    embedding = EmbeddingLayer(replace(EMBEDDING, types=2), 16)
    expected = "type id 2 is unknown; this model knows 0 to 1: was the batch made with another tokenizer?"
    assert refusal(embedding, Packed.of([[1, 2]], types=[[0, 2]])) == expected

"""Rows of one shape: as many tokens, sequences and targets in each, and what fills them up counts nowhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.masked_lm import MaskedLM, MaskedLMWithPairs
from heedful.objectives.packing import FixedShape, pack_best_fit
from tests.support.tiny_models import save_tiny
from tests.support.tiny_runs import tokenizer

STEADY = FixedShape(sequences=6, pad=0)


def sample(*lengths: int) -> Sample:
    """Sequences of those lengths, with special tokens at both ends, and a label for each."""
    draw = np.random.default_rng(sum(lengths))
    ids = [[2, *draw.integers(5, 60, length - 2).tolist(), 3] for length in lengths]
    return Sample.of(ids, [[0] * each for each in lengths], target=np.arange(len(lengths)) % 2)


def test_rows_leave_room_for_what_fills_them_up() -> None:
    lengths = np.random.default_rng(0).integers(3, 20, 500)
    room, most = STEADY.room(64)
    rows = pack_best_fit(lengths, room, seed=1, max_sequences=most)
    assert sorted(np.concatenate(rows).tolist()) == list(range(500))
    assert max(map(len, rows)) <= 5 and max(int(lengths[row].sum()) for row in rows) <= 58
    few = pack_best_fit(np.full(100, 3), room, seed=1, max_sequences=most)
    assert {len(row) for row in few} == {5}
    with pytest.raises(
        HeedfulError, match="sequences_per_pack is 1; expected a number from 2 to 63 for packs of 64 tokens"
    ):
        FixedShape(sequences=1, pad=0).room(64)
    with pytest.raises(HeedfulError, match="sequences_per_pack is 121; expected a number from 2 to 120 for packs"):
        FixedShape(sequences=121, pad=0, longest=16).room(128)
    assert FixedShape(sequences=120, pad=0, longest=16).room(128) == (1, 119)


@pytest.mark.parametrize("lengths", [(10,), (8, 9, 30), (3, 3, 3, 3, 3)])
def test_every_row_has_one_shape(lengths: tuple[int, ...]) -> None:
    filled = STEADY.pad_sample(sample(*lengths), 64)
    assert len(filled) == 64 and len(filled.bounds) == 7 and filled.filler == 64 - sum(lengths)
    assert all(start < stop for start, stop in zip(filled.bounds, filled.bounds[1:], strict=False))
    assert filled.target.tolist() == [number % 2 for number in range(len(lengths))] + [-1] * (6 - len(lengths))
    text = sum(lengths) - 2 * len(lengths)
    for count in (2, 9):
        batch = MaskedLM(tokenizer=tokenizer(), target_count=count).batch([filled], [3])
        assert batch.rows is not None and len(batch.rows) == len(batch.targets) == len(batch.weights) == count
        assert float(batch.weights.sum()) == min(count, max(1, round(0.15 * text))), "the rate holds in short rows too"
        chosen = batch.rows[batch.weights > 0].numpy()
        assert (chosen < sum(lengths)).all() and len(set(chosen.tolist())) == len(chosen)


@pytest.mark.parametrize(("sequences", "lengths"), [(2, (30,)), (2, (3,)), (4, (3, 3, 3)), (4, (20, 20))])
def test_no_padding_is_longer_than_the_model_has_positions(sequences: int, lengths: tuple[int, ...]) -> None:
    steady = FixedShape(sequences=sequences, pad=0, longest=32)
    filled = steady.pad_sample(sample(*lengths), 64)
    parts = np.diff(filled.bounds)
    assert len(filled) == 64 and len(parts) == steady.total(64) == sequences + 1
    assert parts.min() >= 1 and parts.max() <= 32
    assert steady.room(64) == (64 - sequences - 1, sequences - 1)


def test_the_loss_is_that_without_filling(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForPreTraining", torch.float64)
    ours = heedful.load(tmp_path, dtype=torch.float64)
    plain, filled = sample(8, 9), STEADY.pad_sample(sample(8, 9), 39)
    objective = MaskedLMWithPairs(
        tokenizer=tokenizer(), mask_prob=0.99, target_count=20
    )  # so that both choose all that there are
    losses = []
    for each in (plain, filled):
        batch = objective.batch([each], [5])
        packed = batch.packed
        packed.tokens[: len(plain)] = torch.from_numpy(plain.tokens.astype(np.int64))  # what is drawn depends on length
        losses.append(objective.loss(ours, batch))
    assert losses[0].count == losses[1].count == 13.0
    assert float(losses[0].sum.detach()) == pytest.approx(float(losses[1].sum.detach()), rel=1e-12)
    measured = objective.measure(ours, objective.batch([filled], [5]))
    assert measured["nsp_accuracy"][1] == 2 and measured["mlm_accuracy"][1] == 13

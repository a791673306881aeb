"""Packs of a fixed shape: equal numbers of tokens, sequences and targets, with padding that does not count."""

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

SHAPE = FixedShape(sequences=6, pad=0)


def make_sample(*lengths: int) -> Sample:
    """Return a sample with sequences of these lengths, special tokens at both ends, and a label for each."""
    rng = np.random.default_rng(sum(lengths))
    ids = [[2, *rng.integers(5, 60, length - 2).tolist(), 3] for length in lengths]
    return Sample.of(ids, [[0] * length for length in lengths], target=np.arange(len(lengths)) % 2)


def test_packs_leave_room_for_padding() -> None:
    lengths = np.random.default_rng(0).integers(3, 20, 500)
    room, max_sequences = SHAPE.room(64)
    packs = pack_best_fit(lengths, room, seed=1, max_sequences=max_sequences)
    assert sorted(np.concatenate(packs).tolist()) == list(range(500))
    assert max(map(len, packs)) <= 5 and max(int(lengths[pack].sum()) for pack in packs) <= 58
    short_packs = pack_best_fit(np.full(100, 3), room, seed=1, max_sequences=max_sequences)
    assert {len(pack) for pack in short_packs} == {5}
    with pytest.raises(
        HeedfulError, match="sequences_per_pack is 1; expected a number from 2 to 63 for packs of 64 tokens"
    ):
        FixedShape(sequences=1, pad=0).room(64)
    with pytest.raises(HeedfulError, match="sequences_per_pack is 121; expected a number from 2 to 120 for packs"):
        FixedShape(sequences=121, pad=0, longest=16).room(128)
    assert FixedShape(sequences=120, pad=0, longest=16).room(128) == (1, 119)


@pytest.mark.parametrize("lengths", [(10,), (8, 9, 30), (3, 3, 3, 3, 3)])
def test_every_pack_has_the_same_shape(lengths: tuple[int, ...]) -> None:
    padded = SHAPE.pad_sample(make_sample(*lengths), 64)
    assert len(padded) == 64 and len(padded.bounds) == 7 and padded.filler == 64 - sum(lengths)
    assert all(start < stop for start, stop in zip(padded.bounds, padded.bounds[1:], strict=False))
    labels = [index % 2 for index in range(len(lengths))]
    assert padded.target.tolist() == labels + [-1] * (6 - len(lengths))
    num_text_tokens = sum(lengths) - 2 * len(lengths)  # without the special tokens at both ends
    for count in (2, 9):
        batch = MaskedLM(tokenizer=tokenizer(), target_count=count).batch([padded], [3])
        assert batch.rows is not None and len(batch.rows) == len(batch.targets) == len(batch.weights) == count
        expected_weight = min(count, max(1, round(0.15 * num_text_tokens)))
        assert float(batch.weights.sum()) == expected_weight, "short packs have another share of targets"
        chosen = batch.rows[batch.weights > 0].numpy()
        assert (chosen < sum(lengths)).all() and len(set(chosen.tolist())) == len(chosen)


@pytest.mark.parametrize(("sequences", "lengths"), [(2, (30,)), (2, (3,)), (4, (3, 3, 3)), (4, (20, 20))])
def test_sequences_of_padding_are_not_longer_than_the_limit(sequences: int, lengths: tuple[int, ...]) -> None:
    shape = FixedShape(sequences=sequences, pad=0, longest=32)
    padded = shape.pad_sample(make_sample(*lengths), 64)
    sizes = np.diff(padded.bounds)
    assert len(padded) == 64 and len(sizes) == shape.total(64) == sequences + 1
    assert sizes.min() >= 1 and sizes.max() <= 32
    assert shape.room(64) == (64 - sequences - 1, sequences - 1)


def test_padding_does_not_change_the_loss(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForPreTraining", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    plain, padded = make_sample(8, 9), SHAPE.pad_sample(make_sample(8, 9), 39)
    # with this mask_prob, all text tokens are targets
    objective = MaskedLMWithPairs(tokenizer=tokenizer(), mask_prob=0.99, target_count=20)
    losses = []
    for sample in (plain, padded):
        batch = objective.batch([sample], [5])
        packed = batch.packed
        # remove the masks, which depend on the length
        packed.tokens[: len(plain)] = torch.from_numpy(plain.tokens.astype(np.int64))
        losses.append(objective.loss(loaded, batch))
    assert losses[0].count == losses[1].count == 13.0
    assert float(losses[0].sum.detach()) == pytest.approx(float(losses[1].sum.detach()), rel=1e-12)
    metrics = objective.measure(loaded, objective.batch([padded], [5]))
    assert metrics["nsp_accuracy"][1] == 2 and metrics["mlm_accuracy"][1] == 13

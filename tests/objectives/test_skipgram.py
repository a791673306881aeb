"""Skip-gram: the loss, compared with a loop; pairs, subsampling and negative samples; and training."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from heedful.errors import HeedfulError
from heedful.model.classic_config import BagPooling
from heedful.objectives import Sample
from heedful.objectives.skipgram import SkipGram, pair_losses
from heedful.tokenizer.words import word_tokenizer
from heedful.train.settings import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.classic_models import make_classic_encoder


def make_sample(*texts: list[int]) -> Sample:
    """Return a sample of sequences of token ids."""
    return Sample.of(list(texts), [[0] * len(text) for text in texts])


SAMPLES = [make_sample([1, 2, 3, 4, 5, 6], [7, 8]), make_sample([3]), make_sample([]), make_sample([0, 9, 0, 1, 2])]


def make_objective(**fields: Any) -> SkipGram:
    """Return an objective for SAMPLES."""
    return SkipGram.of(SAMPLES, 10, **({"width": 4, "window": 2, "negatives": 3, "frequent": 1.0} | fields))


def word_pairs(objective: SkipGram, batch: Any) -> list[tuple[int, int]]:
    """Return the pairs (centre, neighbour) of a batch."""
    return list(zip(batch.packed.tokens[batch.rows].tolist(), batch.targets[:, 0].tolist(), strict=True))


def test_the_loss_is_the_formula() -> None:
    """The loss is -log sigmoid(u_o v_c) - sum of log sigmoid(-u_n v_c), without negative samples that equal o."""
    loaded, objective = make_classic_encoder(BagPooling()), make_objective()
    assert objective.extra_module is not None
    objective.extra_module.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    batch = objective.batch(SAMPLES, [5, 6, 7, 8])
    loss = objective.loss(loaded, batch)
    v, u = loaded.model.embedding.tokens.weight.detach(), objective.extra_module.weight.detach()
    total = 0.0
    for row, (target, *noise) in zip(batch.rows.tolist(), batch.targets.tolist(), strict=True):
        centre = v[batch.packed.tokens[row]]
        total -= math.log(1 / (1 + math.exp(-float(centre @ u[target]))))
        total -= sum(math.log(1 / (1 + math.exp(float(centre @ u[n])))) for n in noise if n != target)
    assert loss.count == len(batch.rows) > 5 and loss.sum.item() == pytest.approx(total, rel=1e-5)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (3, 4, 2))]
    assert torch.autograd.gradcheck(pair_losses, inputs)


def test_pairs_are_neighbours_in_a_window_and_in_one_sequence() -> None:
    objective = make_objective(window=1)  # so that R is always 1
    batch = objective.batch(SAMPLES, [1, 2, 3, 4])
    first_pairs = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3), (4, 5), (5, 4), (5, 6), (6, 5), (7, 8), (8, 7)]
    last_pairs = [(0, 9), (9, 0), (9, 0), (0, 9), (0, 1), (1, 0), (1, 2), (2, 1)]
    assert word_pairs(objective, batch) == first_pairs + last_pairs
    wide, near, far = make_objective(), 0, 0
    for key in range(200):
        pair_counts = Counter(word_pairs(wide, wide.batch(SAMPLES[:1], [key])))
        near, far = near + pair_counts[(3, 4)], far + pair_counts[(3, 5)]
        assert max(pair_counts.values()) == 1 and (3, 6) not in pair_counts and (6, 7) not in pair_counts
    assert near == 200 and abs(far - 100) < 5 * math.sqrt(50), "R is 1 or 2 with equal probability"
    ignored = make_objective(ignored=(0,), window=1)
    assert word_pairs(ignored, ignored.batch(SAMPLES[3:], [4])) == [(9, 1), (1, 9), (1, 2), (2, 1)]
    assert not (ignored.batch(SAMPLES, [1, 2, 3, 4]).targets == 0).any()


def test_random_choices_depend_only_on_the_keys() -> None:
    objective, keys = make_objective(frequent=0.05), [11, 12, 13, 14]
    batch = objective.batch(SAMPLES, keys)
    single = [objective.batch([sample], [key]) for sample, key in zip(SAMPLES, keys, strict=True)]
    assert torch.equal(batch.targets, torch.cat([alone.targets for alone in single]))
    starts = [0, 8, 9, 9]  # the first rows of the samples in the batch
    assert torch.equal(batch.rows, torch.cat([alone.rows + start for alone, start in zip(single, starts, strict=True)]))
    repeated = make_objective(frequent=0.05).batch(SAMPLES, keys)
    assert torch.equal(batch.targets, repeated.targets)
    with_another_key = objective.batch(SAMPLES[:1], [15])
    assert not torch.equal(with_another_key.targets, single[0].targets)
    empty = objective.loss(make_classic_encoder(BagPooling()), objective.batch([make_sample([])], [1]))
    assert empty.count == 0 and empty.sum.item() == 0


def test_frequent_words_and_noise_have_their_shares() -> None:
    tokens = [1] * 700 + [2] * 200 + [3] * 100
    objective = SkipGram.of([make_sample(tokens)], 5, width=2, window=1, negatives=4, frequent=0.05)
    expected = [0.0, *(min(1.0, math.sqrt(0.05 / share)) for share in (0.7, 0.2, 0.1)), 0.0]
    assert objective.keep_probability.tolist() == pytest.approx(expected)
    noise = np.concatenate(
        [objective.batch([make_sample(tokens)], [key]).targets[:, 1:].numpy().ravel() for key in range(8)]
    )
    weights = np.array([0, *(count**0.75 for count in (700, 200, 100)), 0])
    shares, observed = weights / weights.sum(), np.bincount(noise, minlength=5) / len(noise)
    assert (abs(observed - shares) <= 5 * np.sqrt(shares * (1 - shares) / len(noise))).all()
    for fields, message in (({"window": 0}, "window is 0"), ({"frequent": 0.0}, "frequent is 0.0; expected a share")):
        with pytest.raises(HeedfulError, match=message):
            make_objective(**fields)
    with pytest.raises(HeedfulError, match="the samples have no words"):
        SkipGram.of([make_sample([])], 5, width=2)


def test_words_of_one_topic_get_similar_vectors() -> None:
    topics = ["cat dog horse cow".split(), "bread cheese apple soup".split()]  # noqa: SIM905
    tokenizer = word_tokenizer([word for words in topics for word in words])
    rng = np.random.default_rng(0)
    texts = [rng.choice(topics[number % 2], 6).tolist() for number in range(60)]
    samples = [make_sample([tokenizer.id(word) or 0 for word in text]) for text in texts]
    loaded = make_classic_encoder(BagPooling(), tokenizer, width=8)
    objective = SkipGram.of(samples, tokenizer.size, width=8, frequent=1.0, window=3)
    settings = TrainSettings(max_steps=60, batch_size=16, optimizer=AdamW(lr=0.05), precision="float32")
    steps = list(Trainer(loaded, objective, samples, settings))
    assert steps[0].loss == pytest.approx(math.log(2) * 6, rel=0.2) and steps[-1].loss < steps[0].loss
    vectors = F.normalize(loaded.model.embedding.tokens.weight.detach()[1:], dim=-1)
    cosines = vectors @ vectors.T
    assert cosines[:4, :4].min() > cosines[:4, 4:].max()

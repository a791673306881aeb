"""Permuted language modelling: nothing leaks, any length, transformers' loss and gradients, and it learns."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, ModelConfig, Normal, PermutedTokens, StackConfig, TransformerXl
from heedful.objectives import Batch, Sample
from heedful.objectives.permutation_lm import PermutationLM
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.task_parity import assert_same_gradients
from tests.support.tiny_models import Float64Mode, save_tiny
from tests.support.tiny_runs import LINES, tokenizer

special = tokenizer().special
FIRST, END, PAD, MASK = special.bos_or_cls, special.eos_or_sep, special.pad, special.mask
SPANS, ANY = PermutationLM(tokenizer=tokenizer()), PermutationLM(tokenizer=tokenizer(), spans=False)
KINDS = pytest.mark.parametrize("objective", [SPANS, ANY], ids=["spans", "any"])
text = st.lists(st.integers(5, 98), max_size=40)
groups = st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=3)


def sample(*texts: list[int]) -> Sample:
    """Of texts with special tokens around them, and two segments."""
    ids = [[FIRST, *each, END] for each in texts]
    return Sample.of(ids, [[int(place > 3) for place in range(len(each))] for each in ids])


def queries(batch: Batch) -> list[list[int]]:
    """The places of each sequence that are predicted."""
    assert batch.packed.key_lengths is not None
    places = batch.packed.unpack(batch.packed.positions)
    return [each[keys:].tolist() for each, keys in zip(places, batch.packed.key_lengths, strict=True)]


@KINDS
@given(groups, st.integers(0, 2**40))
def test_what_is_predicted(objective: PermutationLM, groups_of_texts: list[list[list[int]]], key: int) -> None:
    """Text alone, of any length, a sixth of it; and the batch is laid out as it should be."""
    samples = [sample(*texts) for texts in groups_of_texts]
    batch = objective.batch(samples, [key + number for number in range(len(samples))])
    flat = [[FIRST, *ids, END] for texts in groups_of_texts for ids in texts]
    packed, seen, targets = batch.packed, batch.packed.visibility, []
    assert packed.key_lengths == tuple(map(len, flat)) and seen is not None and batch.rows is not None
    rows = []
    for ids, span, places, sees in zip(flat, packed.spans(), queries(batch), seen, strict=True):
        n = len(ids)
        assert packed.tokens[span][:n].tolist() == ids and packed.positions[span][:n].tolist() == list(range(n))
        assert packed.types[span].tolist() == [int(place > 3) for place in (*range(n), *places)]
        assert not {FIRST, END} & {ids[place] for place in places} and places == sorted(set(places))
        assert sees.shape == (n + len(places), n)
        expected = (n - 2) / 6
        assert len(places) == max(min(1, n - 2), round(expected)) or (objective.spans and len(places) <= expected + 1)
        targets += [ids[place] for place in places]
        rows += list(range(span.stop - len(places), span.stop))
    assert batch.targets.tolist() == targets and batch.rows.tolist() == rows
    assert torch.equal(batch.weights, torch.ones(len(targets)))


@KINDS
def test_each_row_attends_to_its_past_in_the_permutation(objective: PermutationLM) -> None:
    batch = objective.batch([sample(list(range(5, 56)), list(range(9, 20)))], [11])
    assert batch.packed.visibility is not None
    for n, places, sees in zip(batch.packed.key_lengths or (), queries(batch), batch.packed.visibility, strict=True):
        is_target = torch.zeros(n, dtype=torch.bool)
        is_target[places] = True
        content, query = sees[:n], sees[n:]
        assert content.diagonal().all() and query[:, ~is_target].all() and content[:, ~is_target].all()
        assert not content[~is_target][:, is_target].any()  # context sees no target
        among = query[:, places]
        assert not among.diagonal().any()  # no target sees itself
        counts = among.sum(1)
        assert sorted(counts.tolist()) == list(range(len(places)))  # an order: the k-th of it sees k others
        assert torch.equal(among, counts[None, :] < counts[:, None])
        assert torch.equal(content[places], query | torch.eye(n, dtype=torch.bool)[places])


def test_spans_are_of_1_to_5_tokens_in_contexts_six_times_as_long() -> None:
    ids = [5 + place % 90 for place in range(600)]
    lengths, counts, starts = [], [], []
    for key in range(40):
        (places,) = queries(SPANS.batch([sample(ids)], [key]))
        counts.append(len(places))
        cuts = [0, *(np.flatnonzero(np.diff(places) > 1) + 1).tolist(), len(places)]
        lengths += [stop - start for start, stop in pairwise(cuts)]
        starts.append(places[0])
    assert all(abs(count - 100) <= 2 for count in counts)
    assert set(range(1, 6)) <= set(lengths) and abs(float(np.mean(lengths)) - 3) < 0.35  # neighbours may join
    assert len(set(starts)) > 10
    any_place = np.bincount([place for key in range(200) for place in queries(ANY.batch([sample([7] * 12)], [key]))[0]])
    assert any_place[0] == 0 and len(any_place) == 13 and any_place[1:].sum() == 400
    assert (abs(any_place[1:] - 400 / 12) < 5 * (400 / 12) ** 0.5).all()


@KINDS
def test_samples_depend_on_the_key_alone(objective: PermutationLM) -> None:
    one, other = sample(list(range(5, 50))), sample(list(range(20, 60)), [5, 6, 7])
    alone, company = objective.batch([one], [7]), objective.batch([other, one], [1, 7])
    assert alone.packed.visibility is not None and company.packed.visibility is not None
    assert torch.equal(alone.packed.visibility[0], company.packed.visibility[2])
    assert queries(alone)[0] == queries(company)[2]
    assert queries(objective.batch([one], [8])) != queries(alone)


@cache
def make_tiny() -> ModelBundle:
    """Two layers of two streams, 32 wide."""
    embedding = EmbeddingConfig(vocabulary=tokenizer().size, width=32, query=True)
    encoder = StackConfig(
        width=32, layers=2, heads=4, head_width=8, inner_width=64, attention_bias=False, relation=TransformerXl()
    )
    model = ModelConfig(embedding=embedding, encoder=encoder)
    return create(BundleConfig(family="heedful", model=model, head=PermutedTokens()), tokenizer(), seed=1)


@KINDS
def test_predictions_do_not_depend_on_tokens_they_must_not_see(objective: PermutationLM) -> None:
    """Another token anywhere changes, to the bit, the predictions that may know it and no other."""
    loaded, ids = make_tiny(), list(range(5, 28))
    batch = objective.batch([sample(ids)], [3])
    (places,), packed = queries(batch), batch.packed
    assert batch.rows is not None and packed.visibility is not None and len(places) > 2
    among = packed.visibility[0][len(ids) + 2 :]
    with torch.no_grad():
        before = loaded.hidden_states(packed)[batch.rows]
        for place in range(len(ids) + 2):
            tokens = packed.tokens.clone()
            tokens[place] = 60
            changed = (loaded.hidden_states(replace(packed, tokens=tokens))[batch.rows] != before).any(1)
            assert changed.tolist() == among[:, place].tolist()
        tokens = packed.tokens.clone()
        tokens[batch.rows] = 60  # what stands in the rows that predict is not read
        assert torch.equal(loaded.hidden_states(replace(packed, tokens=tokens))[batch.rows], before)


@KINDS
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, objective: PermutationLM) -> None:
    theirs = save_tiny(tmp_path, "xlnet", "XLNetLMHeadModel", torch.float64)
    ours = heedful.load(tmp_path, dtype=torch.float64)
    batch = objective.batch([sample(list(range(5, 28)), [7]), sample(list(range(40, 60)), [8, 9, 10])], [3, 4])
    loss = objective.loss(ours, batch)
    loss.sum.backward()
    total, packed = torch.zeros((), dtype=torch.float64), batch.packed
    assert packed.visibility is not None and packed.key_lengths is not None
    with Float64Mode(torch.float64):
        for n, span, places, sees in zip(
            packed.key_lengths, packed.spans(), queries(batch), packed.visibility, strict=True
        ):
            mapping = torch.zeros(1, len(places), n, dtype=torch.float64)
            mapping[0, torch.arange(len(places)), places] = 1
            hidden = ~sees[:n]
            hidden[places, places] = True  # theirs lets the content of a row see itself
            out = theirs(
                input_ids=packed.tokens[span][None, :n],
                token_type_ids=packed.types[span][None, :n],
                perm_mask=hidden.double()[None],
                target_mapping=mapping,
                labels=packed.tokens[span][places][None],
            )
            total = total + out.loss * len(places)
    assert loss.count == len(batch.targets) > 5
    assert abs(float(loss.sum.detach()) / float(total.detach()) - 1) < 1e-12
    assert_same_gradients(theirs, total / loss.count, ours, loss.count, tolerance=1e-12)


def test_batches_without_targets() -> None:
    loss = SPANS.loss(make_tiny(), SPANS.batch([sample([])], [0]))
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    assert len(SPANS.batch([], []).packed) == 0


@pytest.mark.slow
def test_it_learns() -> None:
    """Two sentences by heart, in any order."""
    config = replace(make_tiny().config, model=replace(make_tiny().config.model, initialisation=Normal(std=0.1)))
    loaded = create(config, tokenizer(), seed=1)
    samples = [sample(*(tokenizer().encode(line.rpartition(" ")[0]).ids[1:-1] for line in LINES[2:4]))] * 4
    settings = TrainSettings(max_steps=130, batch_size=4, optimizer=AdamW(lr=1e-2), precision="float32")
    losses = [step.loss for step in Trainer(loaded, SPANS, samples, settings)]
    assert losses[0] > 4 and sum(losses[-10:]) / 10 < 0.6
    right, count = SPANS.measure(loaded, SPANS.batch(samples, [1, 2, 3, 4]))["plm_accuracy"]
    assert right > 0.8 * count


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(HeedfulError, match=r"share is 6.0; expected more than 0 and less than 1"):
        PermutationLM(tokenizer=tokenizer(), share=6.0)
    config = make_tiny().config
    for embedding, relation in ((False, TransformerXl()), (True, None)):
        assert config.model.encoder is not None
        model = replace(
            config.model,
            embedding=replace(config.model.embedding, query=embedding),
            encoder=replace(config.model.encoder, relation=relation),
        )
        with pytest.raises(HeedfulError, match=r"two-stream attention: embedding\.query = true"):
            SPANS.loss(create(replace(config, model=model)), SPANS.batch([sample([5, 6])], [0]))

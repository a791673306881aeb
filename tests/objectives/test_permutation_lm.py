"""Permutation language modelling: visibility, spans, the loss and gradients of transformers, and training."""

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
SPANS, TOKENS = PermutationLM(tokenizer=tokenizer()), PermutationLM(tokenizer=tokenizer(), spans=False)
BOTH_KINDS = pytest.mark.parametrize("objective", [SPANS, TOKENS], ids=["spans", "tokens"])
text = st.lists(st.integers(5, 98), max_size=40)
groups = st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=3)


def make_sample(*texts: list[int]) -> Sample:
    """Return a sample of texts with special tokens around them; tokens from the fifth on have type 1."""
    ids = [[FIRST, *text_ids, END] for text_ids in texts]
    return Sample.of(ids, [[int(position > 3) for position in range(len(sequence))] for sequence in ids])


def query_positions(batch: Batch) -> list[list[int]]:
    """Return the positions of each sequence's targets: its query rows, which follow its tokens, have them."""
    assert batch.packed.key_lengths is not None
    positions = batch.packed.unpack(batch.packed.positions)
    return [
        sequence_positions[length:].tolist()
        for sequence_positions, length in zip(positions, batch.packed.key_lengths, strict=True)
    ]


@BOTH_KINDS
@given(groups, st.integers(0, 2**40))
def test_targets_and_layout_of_a_batch(
    objective: PermutationLM, groups_of_texts: list[list[list[int]]], key: int
) -> None:
    """A sixth of the text tokens are targets, and queries follow each sequence."""
    samples = [make_sample(*texts) for texts in groups_of_texts]
    batch = objective.batch(samples, [key + number for number in range(len(samples))])
    flat = [[FIRST, *ids, END] for texts in groups_of_texts for ids in texts]
    packed, visibility, targets = batch.packed, batch.packed.visibility, []
    assert packed.key_lengths == tuple(map(len, flat)) and visibility is not None and batch.rows is not None
    rows = []
    for ids, span, positions, mask in zip(flat, packed.spans(), query_positions(batch), visibility, strict=True):
        n = len(ids)
        assert packed.tokens[span][:n].tolist() == ids and packed.positions[span][:n].tolist() == list(range(n))
        assert packed.types[span].tolist() == [int(position > 3) for position in (*range(n), *positions)]
        assert not {FIRST, END} & {ids[position] for position in positions}
        assert positions == sorted(set(positions))
        assert mask.shape == (n + len(positions), n)
        sixth = (n - 2) / 6
        is_rounded_sixth = len(positions) == max(min(1, n - 2), round(sixth))
        assert is_rounded_sixth or (objective.spans and len(positions) <= sixth + 1)
        targets += [ids[position] for position in positions]
        rows += list(range(span.stop - len(positions), span.stop))
    assert batch.targets.tolist() == targets and batch.rows.tolist() == rows
    assert torch.equal(batch.weights, torch.ones(len(targets)))


@BOTH_KINDS
def test_targets_attend_to_earlier_targets_of_the_random_order(objective: PermutationLM) -> None:
    batch = objective.batch([make_sample(list(range(5, 56)), list(range(9, 20)))], [11])
    assert batch.packed.visibility is not None
    for n, positions, mask in zip(
        batch.packed.key_lengths or (), query_positions(batch), batch.packed.visibility, strict=True
    ):
        is_target = torch.zeros(n, dtype=torch.bool)
        is_target[positions] = True
        content, query = mask[:n], mask[n:]
        assert content.diagonal().all()  # every token attends to itself,
        assert query[:, ~is_target].all() and content[:, ~is_target].all()  # and to every token that is no target
        assert not content[~is_target][:, is_target].any()  # tokens that are no targets attend to no target
        target_mask = query[:, positions]
        assert not target_mask.diagonal().any()  # the query of a target does not attend to the target
        counts = target_mask.sum(1)
        assert sorted(counts.tolist()) == list(range(len(positions)))  # the k-th in the order attends to k others
        assert torch.equal(target_mask, counts[None, :] < counts[:, None])
        assert torch.equal(content[positions], query | torch.eye(n, dtype=torch.bool)[positions])


def test_spans_have_1_to_5_tokens_and_are_a_sixth_of_the_text() -> None:
    ids = [5 + position % 90 for position in range(600)]
    lengths, counts, starts = [], [], []
    for key in range(40):
        (positions,) = query_positions(SPANS.batch([make_sample(ids)], [key]))
        counts.append(len(positions))
        cuts = [0, *(np.flatnonzero(np.diff(positions) > 1) + 1).tolist(), len(positions)]
        lengths += [stop - start for start, stop in pairwise(cuts)]
        starts.append(positions[0])
    assert all(abs(count - 100) <= 2 for count in counts)
    assert set(range(1, 6)) <= set(lengths) and abs(float(np.mean(lengths)) - 3) < 0.35  # adjacent spans look like one
    assert len(set(starts)) > 10


def test_single_tokens_are_targets_at_all_positions_equally_often() -> None:
    positions: list[int] = []
    for key in range(200):
        (drawn,) = query_positions(TOKENS.batch([make_sample([7] * 12)], [key]))
        assert len(drawn) == 2  # a sixth of 12
        positions += drawn
    counts = np.bincount(positions, minlength=14)
    assert counts[0] == counts[13] == 0  # the special tokens
    assert (abs(counts[1:13] - 400 / 12) < 5 * (400 / 12) ** 0.5).all()


@BOTH_KINDS
def test_a_batch_depends_only_on_the_keys(objective: PermutationLM) -> None:
    first, second = make_sample(list(range(5, 50))), make_sample(list(range(20, 60)), [5, 6, 7])
    single, both = objective.batch([first], [7]), objective.batch([second, first], [1, 7])
    assert single.packed.visibility is not None and both.packed.visibility is not None
    assert torch.equal(single.packed.visibility[0], both.packed.visibility[2])
    assert query_positions(single)[0] == query_positions(both)[2]
    assert query_positions(objective.batch([first], [8])) != query_positions(single)


@cache
def make_model() -> ModelBundle:
    """Return a new model with two-stream attention: two layers of width 32."""
    embedding = EmbeddingConfig(vocabulary=tokenizer().size, width=32, query=True)
    encoder = StackConfig(
        width=32, layers=2, heads=4, head_width=8, inner_width=64, attention_bias=False, relation=TransformerXl()
    )
    model = ModelConfig(embedding=embedding, encoder=encoder)
    return create(BundleConfig(family="heedful", model=model, head=PermutedTokens()), tokenizer(), seed=1)


@BOTH_KINDS
def test_predictions_depend_only_on_visible_tokens(objective: PermutationLM) -> None:
    """Replacing a token changes exactly the predictions that attend to it."""
    loaded, ids = make_model(), list(range(5, 28))
    batch = objective.batch([make_sample(ids)], [3])
    (positions,), packed = query_positions(batch), batch.packed
    assert batch.rows is not None and packed.visibility is not None and len(positions) > 2
    target_mask = packed.visibility[0][len(ids) + 2 :]
    with torch.no_grad():
        before = loaded.hidden_states(packed)[batch.rows]
        for position in range(len(ids) + 2):
            tokens = packed.tokens.clone()
            tokens[position] = 60
            changed = (loaded.hidden_states(replace(packed, tokens=tokens))[batch.rows] != before).any(1)
            assert changed.tolist() == target_mask[:, position].tolist()
        tokens = packed.tokens.clone()
        tokens[batch.rows] = 60  # token ids of queries are not read
        assert torch.equal(loaded.hidden_states(replace(packed, tokens=tokens))[batch.rows], before)


@BOTH_KINDS
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, objective: PermutationLM) -> None:
    reference = save_tiny(tmp_path, "xlnet", "XLNetLMHeadModel", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    batch = objective.batch(
        [make_sample(list(range(5, 28)), [7]), make_sample(list(range(40, 60)), [8, 9, 10])], [3, 4]
    )
    loss = objective.loss(loaded, batch)
    loss.sum.backward()
    total, packed = torch.zeros((), dtype=torch.float64), batch.packed
    assert packed.visibility is not None and packed.key_lengths is not None
    with Float64Mode(torch.float64):
        for n, span, positions, mask in zip(
            packed.key_lengths, packed.spans(), query_positions(batch), packed.visibility, strict=True
        ):
            mapping = torch.zeros(1, len(positions), n, dtype=torch.float64)
            mapping[0, torch.arange(len(positions)), positions] = 1
            is_hidden = ~mask[:n]
            is_hidden[positions, positions] = True  # in transformers, tokens attend to themselves without being told
            out = reference(
                input_ids=packed.tokens[span][None, :n],
                token_type_ids=packed.types[span][None, :n],
                perm_mask=is_hidden.double()[None],
                target_mapping=mapping,
                labels=packed.tokens[span][positions][None],
            )
            total = total + out.loss * len(positions)
    assert loss.count == len(batch.targets) > 5
    assert abs(float(loss.sum.detach()) / float(total.detach()) - 1) < 1e-12
    assert_same_gradients(reference, total / loss.count, loaded, loss.count, tolerance=1e-12)


def test_batches_without_targets() -> None:
    loss = SPANS.loss(make_model(), SPANS.batch([make_sample([])], [0]))
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    assert len(SPANS.batch([], []).packed) == 0


@pytest.mark.slow
def test_a_model_learns_two_sentences() -> None:
    """The model predicts most tokens of two sentences, in any order."""
    config = replace(make_model().config, model=replace(make_model().config.model, initialisation=Normal(std=0.1)))
    loaded = create(config, tokenizer(), seed=1)
    samples = [make_sample(*(tokenizer().encode(line.rpartition(" ")[0]).ids[1:-1] for line in LINES[2:4]))] * 4
    settings = TrainSettings(max_steps=130, batch_size=4, optimizer=AdamW(lr=1e-2), precision="float32")
    losses = [step.loss for step in Trainer(loaded, SPANS, samples, settings)]
    assert losses[0] > 4 and sum(losses[-10:]) / 10 < 0.6
    right, count = SPANS.measure(loaded, SPANS.batch(samples, [1, 2, 3, 4]))["plm_accuracy"]
    assert right > 0.8 * count


def test_invalid_settings_and_models_are_refused() -> None:
    with pytest.raises(HeedfulError, match=r"share is 6.0; expected more than 0 and less than 1"):
        PermutationLM(tokenizer=tokenizer(), share=6.0)
    config = make_model().config
    for embedding, relation in ((False, TransformerXl()), (True, None)):
        assert config.model.encoder is not None
        model = replace(
            config.model,
            embedding=replace(config.model.embedding, query=embedding),
            encoder=replace(config.model.encoder, relation=relation),
        )
        with pytest.raises(HeedfulError, match=r"two-stream attention: embedding\.query = true"):
            SPANS.loss(create(replace(config, model=model)), SPANS.batch([make_sample([5, 6])], [0]))

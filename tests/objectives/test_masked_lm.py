"""Masked language modelling: shares of masks, whole words, spans, replacements, and the losses of transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

import heedful
from heedful.errors import HeedfulError
from heedful.objectives import Sample
from heedful.objectives.base import term_scales
from heedful.objectives.masked_lm import MAX_SPAN_WORDS, MaskedLM, MaskedLMWithPairs, _choose_spans
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from tests.support.task_parity import assert_same_gradients
from tests.support.tiny_models import Float64Mode, save_tiny
from tests.support.tiny_runs import tokenizer

TEXTS = ["unbelievable foxes jumped overwhelmingly", "the dogs slept", "near hidden wonders, nothing ceased", "a"] * 6


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A tokenizer that splits many words into several tokens."""
    return train_tokenizer(TEXTS, TokenizerSettings(vocab_size=64))


def make_sample(tokenizer: Tokenizer, texts: list[str]) -> Sample:
    """Return a sample with a sequence for each text."""
    encoded = tokenizer.encode_batch(texts)
    return Sample.of([encoding.ids for encoding in encoded], [encoding.types for encoding in encoded])


MASK_UNITS = ("tokens", "words", "spans")


@pytest.mark.parametrize("mask_unit", MASK_UNITS)
def test_mask_share_is_15_percent_split_80_10_10(words: Tokenizer, mask_unit: Any) -> None:
    sample = make_sample(words, TEXTS)
    objective = MaskedLM(tokenizer=words, mask_unit=mask_unit)
    num_maskable = int(objective.is_text_id[sample.tokens].sum())
    masked = replaced = unchanged = total = 0
    for key in range(200):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        new_ids, old_ids = batch.packed.tokens[batch.rows].numpy(), batch.targets.numpy()
        assert np.array_equal(sample.tokens[batch.rows.numpy()], old_ids)
        assert objective.is_text_id[old_ids].all()
        assert len(set(batch.rows.tolist())) == len(batch.rows)
        other_positions = np.delete(np.arange(len(sample)), batch.rows.numpy())
        assert np.array_equal(batch.packed.tokens.numpy()[other_positions], sample.tokens[other_positions])
        assert len(old_ids) <= round(0.15 * num_maskable)
        total += len(old_ids)
        masked += int((new_ids == words.special.mask).sum())
        unchanged += int((new_ids == old_ids).sum())
        replaced += int(((new_ids != old_ids) & (new_ids != words.special.mask)).sum())
    assert total >= 0.99 * 200 * round(0.15 * num_maskable)
    # all tokens of a span are treated alike, so that the standard deviation is larger
    standard_deviation = np.sqrt(0.8 * 0.2 * total) * (2 if mask_unit == "spans" else 1)
    tolerance = 5 * standard_deviation
    assert abs(masked - 0.8 * total) < tolerance
    replaced_by_itself = 0.1 * total / words.size  # the expected number of tokens
    assert abs(replaced - (0.1 * total - replaced_by_itself)) < tolerance
    assert abs(unchanged - (0.1 * total + replaced_by_itself)) < tolerance


def test_random_replacements_cover_the_vocabulary(words: Tokenizer) -> None:
    sample, objective = make_sample(words, TEXTS), MaskedLM(tokenizer=words)
    new_ids: set[int] = set()
    for key in range(400):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        new_ids.update(batch.packed.tokens[batch.rows].tolist())
    assert new_ids == set(range(words.size))


def test_whole_words_are_masked_together(words: Tokenizer) -> None:
    sample, objective = make_sample(words, TEXTS), MaskedLM(tokenizer=words, mask_unit="words")
    names = [words.name(int(id)) for id in sample.tokens]
    masked_pairs = []  # for each part of a word that is a target: whether the part before it and it are [MASK]
    for key in range(50):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        chosen = set(batch.rows.tolist())
        for position, name in enumerate(names):
            if name.startswith("##"):
                assert (position in chosen) == (position - 1 in chosen), (position, name)
                if position in chosen:
                    is_masked = batch.packed.tokens[[position - 1, position]] == words.special.mask
                    masked_pairs.append(tuple(is_masked.tolist()))
    assert {(True, True), (True, False), (False, True)} <= set(masked_pairs)  # each token of a word is drawn by itself


def test_spans_have_whole_words_that_are_treated_alike(words: Tokenizer) -> None:
    """Spans begin and end at bounds of words, except for the last one; all of their tokens are treated alike."""
    sample, objective = make_sample(words, TEXTS), MaskedLM(tokenizer=words, mask_unit="spans", mask_prob=0.3)
    names = [words.name(int(id)) for id in sample.tokens]
    max_word_tokens = max(
        len(encoding.ids) - 2 for encoding in words.encode_batch([w for text in TEXTS for w in text.split()])
    )
    longest = num_inside = num_cut = 0
    for key in range(50):
        positions, actions, _ = objective._draw(sample, key)
        action_at = dict(zip(positions.tolist(), actions.tolist(), strict=True))
        for position, action in action_at.items():
            if names[position].startswith("##"):
                assert action_at.get(position - 1) == action, (key, position, names[position])
                num_inside += 1
        cut_words = [n for n in action_at if n + 1 not in action_at and names[n + 1].startswith("##")]
        assert len(cut_words) <= 1
        num_cut += len(cut_words)
        runs = np.split(positions, 1 + np.flatnonzero(np.diff(positions) > 1))
        longest = max(longest, *(len(run) for run in runs))
        for run in runs:
            assert sum(run[0] < bound <= run[-1] for bound in sample.bounds) == 0
    assert num_inside > 100 and 0 < num_cut < 50
    assert 1 < longest <= 3 * MAX_SPAN_WORDS * max_word_tokens  # adjacent spans look like one


def test_a_word_after_a_newline_is_a_word_of_its_own() -> None:
    """Byte-level vocabularies mark a word by the space before it, which is missing after a newline."""
    texts = ["the fox ran\nThe dog slept\n\nno one came"] * 9
    bpe = train_tokenizer(texts, TokenizerSettings(algorithm="bpe", vocab_size=300))
    sample = make_sample(bpe, texts[:1])
    names = [bpe.name(int(id)) for id in sample.tokens]
    after = [position for position in range(1, len(names)) if names[position - 1] == "\u010a"]
    assert [names[position][0] for position in after] == ["T", "\u010a", "n"]
    assert bpe.starts(sample.tokens)[after].all() and bpe.continues[sample.tokens[after[::2]]].all()
    objective = MaskedLM(tokenizer=bpe, mask_unit="words", mask_prob=0.5)
    chosen = [set(objective._draw(sample, key)[0].tolist()) for key in range(40)]
    for position in after:
        assert any((position in positions) != (position - 1 in positions) for positions in chosen)


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_masks_depend_only_on_the_key(first_key: int, second_key: int) -> None:
    objective = MaskedLM(tokenizer=tokenizer())
    first, second = (Sample.of([list(range(5, 25))], [[0] * 20]) for _ in range(2))
    single = objective.batch([first], [first_key])
    both = objective.batch([second, first], [second_key, first_key])
    assert torch.equal(single.packed.tokens, both.packed.tokens[20:])
    repeated = objective.batch([second, first], [second_key, first_key])
    assert torch.equal(both.packed.tokens, repeated.packed.tokens)
    if first_key != second_key:
        masks = {
            tuple(objective.batch([first], [key]).packed.tokens.tolist()) for key in range(first_key, first_key + 20)
        }
        assert len(masks) > 10


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(HeedfulError, match=r"mask_prob is 1\.5; expected a share of the tokens between 0 and 1"):
        MaskedLM(tokenizer=tokenizer(), mask_prob=1.5)
    vocabulary = {"[UNK]": 0, "[MASK]": 1, "a": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    word_tokenizer = Tokenizer(backend, {"mask_token": "[MASK]"})
    MaskedLM(tokenizer=word_tokenizer, mask_unit="spans")
    with pytest.raises(HeedfulError, match="does not mark words"):
        MaskedLM(tokenizer=word_tokenizer, mask_unit="words")


# -- comparison with transformers -------------------------------------------------------------------------------------


def make_pairs() -> list[Sample]:
    """Return two samples with three labelled pairs in total."""
    rng = np.random.default_rng(3)
    samples = []
    for lengths, labels in (((9, 14), (0, 1)), ((20,), (1,))):
        ids = [rng.integers(5, 60, length).tolist() for length in lengths]
        types = [[0] * (len(pair) // 2) + [1] * (len(pair) - len(pair) // 2) for pair in ids]
        samples.append(Sample.of(ids, types, target=np.array(labels)))
    return samples


@pytest.mark.parametrize(
    ("family", "architecture", "label_name"),
    [("bert", "BertForPreTraining", "next_sentence_label"), ("albert", "AlbertForPreTraining", "sentence_order_label")],
)
def test_both_terms_equal_those_of_transformers(
    tmp_path: Path, family: str, architecture: str, label_name: str
) -> None:
    reference = save_tiny(tmp_path, family, architecture, torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    objective = MaskedLMWithPairs(tokenizer=tokenizer(), name="nsp")
    batch = objective.batch(make_pairs(), [1, 2])
    loss = objective.loss(loaded, batch)
    loss.sum.backward()
    width = max(batch.packed.lengths)
    ids, types, mask, labels = (torch.zeros(3, width, dtype=torch.long) for _ in range(4))
    labels -= 100
    all_labels = torch.full((batch.packed.bounds[-1],), -100)
    all_labels[batch.rows] = batch.targets
    for index, (start, stop) in enumerate(pairwise(batch.packed.bounds)):
        ids[index, : stop - start] = batch.packed.tokens[start:stop]
        types[index, : stop - start] = batch.packed.types[start:stop]
        mask[index, : stop - start] = 1
        labels[index, : stop - start] = all_labels[start:stop]
    with Float64Mode(torch.float64):
        expected = reference(
            input_ids=ids, token_type_ids=types, attention_mask=mask, labels=labels, **{label_name: batch.labels}
        ).loss
    assert abs(float(loss.sum.detach()) / loss.count / float(expected.detach()) - 1) < 1e-12
    assert_same_gradients(reference, expected, loaded, loss.count, tolerance=1e-11)


def test_terms_are_means_over_the_whole_step(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForPreTraining", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    objective, samples = MaskedLMWithPairs(tokenizer=tokenizer()), make_pairs()
    full_loss = objective.loss(loaded, objective.batch(samples, [1, 2]))
    micro_batches = [objective.batch([sample], [key]) for sample, key in zip(samples, (1, 2), strict=True)]
    counts_by_term = zip(*(micro_batch.counts for micro_batch in micro_batches), strict=True)
    scales = term_scales([sum(counts) for counts in counts_by_term])
    losses = [objective.loss(loaded, replace(micro_batch, scales=scales)) for micro_batch in micro_batches]
    total = sum(float(loss.sum.detach()) for loss in losses) / sum(loss.count for loss in losses)
    assert total == pytest.approx(float(full_loss.sum.detach()) / full_loss.count, rel=1e-12)
    metrics = objective.measure(loaded, objective.batch(samples, [1, 2]))
    assert set(metrics) == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert metrics["nsp_accuracy"][1] == 3


def test_lengths_of_spans_follow_the_published_distribution(words: Tokenizer) -> None:
    """The distribution is geometric, cut at 10, with mean 3.8 (Joshi et al. 2020, section 3.1)."""
    maskable, starts = np.ones(400_000, dtype=bool), np.ones(400_000, dtype=bool)
    draws = np.random.default_rng(1).random((2, 400_000))
    _, span_starts = _choose_spans(starts, maskable, draws[0], draws[1], 20_000)
    lengths = np.unique(span_starts, return_counts=True)[1]
    assert abs(lengths.mean() - 3.797) < 0.15 and abs((lengths >= 10).mean() - 0.03) < 0.02

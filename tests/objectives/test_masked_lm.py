"""Masked tokens: rates, whole words, spans, what replaces them; equal to transformers; and it learns."""

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
    """Many words are several pieces."""
    return train_tokenizer(TEXTS, TokenizerSettings(vocab_size=64))


def rows_of(tokenizer: Tokenizer, texts: list[str]) -> Sample:
    """A sample of several sequences."""
    encoded = tokenizer.encode_batch(texts)
    return Sample.of([each.ids for each in encoded], [each.types for each in encoded])


CHOICES = ("tokens", "words", "spans")


@pytest.mark.parametrize("choose", CHOICES)
def test_mask_share_is_15_percent_split_80_10_10(words: Tokenizer, choose: Any) -> None:
    sample = rows_of(words, TEXTS)
    objective = MaskedLM(tokenizer=words, mask_unit=choose)
    free = int(objective.is_text_id[sample.tokens].sum())
    hidden = replaced = kept = total = 0
    for key in range(200):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        now, before = batch.packed.tokens[batch.rows].numpy(), batch.targets.numpy()
        assert np.array_equal(sample.tokens[batch.rows.numpy()], before)
        assert objective.is_text_id[before].all()  # neither special nor padding
        assert len(set(batch.rows.tolist())) == len(batch.rows)
        others = np.delete(np.arange(len(sample)), batch.rows.numpy())
        assert np.array_equal(batch.packed.tokens.numpy()[others], sample.tokens[others])
        assert len(before) <= round(0.15 * free)
        total += len(before)
        hidden += int((now == words.special.mask).sum())
        kept += int((now == before).sum())
        replaced += int(((now != before) & (now != words.special.mask)).sum())
    assert total >= 0.99 * 200 * round(0.15 * free)
    spread = 5 * np.sqrt(0.8 * 0.2 * total) * (2 if choose == "spans" else 1)  # a span is of one kind
    assert abs(hidden - 0.8 * total) < spread
    drawn = 0.1 * total / words.size  # a token may be replaced by itself
    assert abs(replaced - 0.1 * total + drawn) < spread and abs(kept - 0.1 * total - drawn) < spread


def test_random_replacements_cover_the_vocabulary(words: Tokenizer) -> None:
    sample, objective = rows_of(words, TEXTS), MaskedLM(tokenizer=words)
    seen: set[int] = set()
    for key in range(400):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        seen.update(batch.packed.tokens[batch.rows].tolist())
    assert seen == set(range(words.size))


def test_whole_words_are_masked_together(words: Tokenizer) -> None:
    sample, objective = rows_of(words, TEXTS), MaskedLM(tokenizer=words, mask_unit="words")
    names = [words.name(int(id)) for id in sample.tokens]
    kinds = []
    for key in range(50):
        batch = objective.batch([sample], [key])
        assert batch.rows is not None
        chosen = set(batch.rows.tolist())
        for place, name in enumerate(names):
            if name.startswith("##"):
                assert (place in chosen) == (place - 1 in chosen), (place, name)
                if place in chosen:
                    now = batch.packed.tokens[[place - 1, place]] == words.special.mask
                    kinds.append(tuple(now.tolist()))
    assert {(True, True), (True, False), (False, True)} <= set(kinds)  # each piece is treated on its own


def test_spans_are_of_words_and_of_one_kind(words: Tokenizer) -> None:
    """A span begins and ends where words do, but for the last one that is drawn; its pieces are treated alike."""
    sample, objective = rows_of(words, TEXTS), MaskedLM(tokenizer=words, mask_unit="spans", mask_prob=0.3)
    names = [words.name(int(id)) for id in sample.tokens]
    pieces = max(len(each.ids) - 2 for each in words.encode_batch([w for text in TEXTS for w in text.split()]))
    longest = inside = cut = 0
    for key in range(50):
        places, how, _ = objective._draw(sample, key)
        kinds = dict(zip(places.tolist(), how.tolist(), strict=True))
        for place, kind in kinds.items():
            if names[place].startswith("##"):
                assert kinds.get(place - 1) == kind, (key, place, names[place])
                inside += 1
        ends = [place for place in kinds if place + 1 not in kinds and names[place + 1].startswith("##")]
        assert len(ends) <= 1
        cut += len(ends)
        runs = np.split(places, 1 + np.flatnonzero(np.diff(places) > 1))
        longest = max(longest, *(len(run) for run in runs))
        for run in runs:
            assert sum(run[0] < bound <= run[-1] for bound in sample.bounds) == 0
    assert inside > 100 and 0 < cut < 50
    assert 1 < longest <= 3 * MAX_SPAN_WORDS * pieces  # neighbouring spans touch


def test_what_follows_a_lines_end_is_a_word_of_its_own() -> None:
    """Byte-level vocabularies mark the space before a word, and there is none."""
    texts = ["the fox ran\nThe dog slept\n\nno one came"] * 9
    own = train_tokenizer(texts, TokenizerSettings(algorithm="bpe", vocab_size=300))
    sample = rows_of(own, texts[:1])
    names = [own.name(int(id)) for id in sample.tokens]
    after = [place for place in range(1, len(names)) if names[place - 1] == "\u010a"]
    assert [names[place][0] for place in after] == ["T", "\u010a", "n"]
    assert own.starts(sample.tokens)[after].all() and own.continues[sample.tokens[after[::2]]].all()
    objective = MaskedLM(tokenizer=own, mask_unit="words", mask_prob=0.5)
    chosen = [set(objective._draw(sample, key)[0].tolist()) for key in range(40)]
    for place in after:
        assert any((place in each) != (place - 1 in each) for each in chosen)


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_masks_depend_on_the_key_alone(one: int, two: int) -> None:
    objective = MaskedLM(tokenizer=tokenizer())
    first, second = (Sample.of([list(range(5, 25))], [[0] * 20]) for _ in range(2))
    alone = objective.batch([first], [one])
    company = objective.batch([second, first], [two, one])
    assert torch.equal(alone.packed.tokens, company.packed.tokens[20:])
    again = objective.batch([second, first], [two, one])
    assert torch.equal(company.packed.tokens, again.packed.tokens)
    if one != two:
        draws = {tuple(objective.batch([first], [key]).packed.tokens.tolist()) for key in range(one, one + 20)}
        assert len(draws) > 10


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(HeedfulError, match=r"mask_prob is 1\.5; expected a share of the tokens between 0 and 1"):
        MaskedLM(tokenizer=tokenizer(), mask_prob=1.5)
    plain = {"[UNK]": 0, "[MASK]": 1, "a": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(plain, unk_token="[UNK]"))
    odd = Tokenizer(backend, {"mask_token": "[MASK]"})
    MaskedLM(tokenizer=odd, mask_unit="spans")
    with pytest.raises(HeedfulError, match="does not mark words"):
        MaskedLM(tokenizer=odd, mask_unit="words")


# -- parity -----------------------------------------------------------------------------------------------------------


def pairs() -> list[Sample]:
    """Two samples of three pairs with labels."""
    draw = np.random.default_rng(3)
    samples = []
    for lengths, labels in (((9, 14), (0, 1)), ((20,), (1,))):
        ids = [draw.integers(5, 60, length).tolist() for length in lengths]
        types = [[0] * (len(each) // 2) + [1] * (len(each) - len(each) // 2) for each in ids]
        samples.append(Sample.of(ids, types, target=np.array(labels)))
    return samples


@pytest.mark.parametrize(
    ("family", "architecture", "second"),
    [("bert", "BertForPreTraining", "next_sentence_label"), ("albert", "AlbertForPreTraining", "sentence_order_label")],
)
def test_both_terms_are_those_of_transformers(tmp_path: Path, family: str, architecture: str, second: str) -> None:
    theirs = save_tiny(tmp_path, family, architecture, torch.float64)
    ours = heedful.load(tmp_path, dtype=torch.float64)
    objective = MaskedLMWithPairs(tokenizer=tokenizer(), name="nsp")
    batch = objective.batch(pairs(), [1, 2])
    loss = objective.loss(ours, batch)
    loss.sum.backward()
    width = max(batch.packed.lengths)
    ids, types, mask, labels = (torch.zeros(3, width, dtype=torch.long) for _ in range(4))
    labels -= 100
    full = torch.full((batch.packed.bounds[-1],), -100)
    full[batch.rows] = batch.targets
    for number, (start, stop) in enumerate(pairwise(batch.packed.bounds)):
        ids[number, : stop - start] = batch.packed.tokens[start:stop]
        types[number, : stop - start] = batch.packed.types[start:stop]
        mask[number, : stop - start] = 1
        labels[number, : stop - start] = full[start:stop]
    with Float64Mode(torch.float64):
        expected = theirs(
            input_ids=ids, token_type_ids=types, attention_mask=mask, labels=labels, **{second: batch.labels}
        ).loss
    assert abs(float(loss.sum.detach()) / loss.count / float(expected.detach()) - 1) < 1e-12
    assert_same_gradients(theirs, expected, ours, loss.count, tolerance=1e-11)


def test_terms_are_means_over_the_whole_step(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForPreTraining", torch.float64)
    ours = heedful.load(tmp_path, dtype=torch.float64)
    objective, samples = MaskedLMWithPairs(tokenizer=tokenizer()), pairs()
    whole = objective.loss(ours, objective.batch(samples, [1, 2]))
    parts = [objective.batch([sample], [key]) for sample, key in zip(samples, (1, 2), strict=True)]
    scales = term_scales([sum(each) for each in zip(*(part.counts for part in parts), strict=True)])
    losses = [objective.loss(ours, replace(part, scales=scales)) for part in parts]
    total = sum(float(loss.sum.detach()) for loss in losses) / sum(loss.count for loss in losses)
    assert total == pytest.approx(float(whole.sum.detach()) / whole.count, rel=1e-12)
    measured = objective.measure(ours, objective.batch(samples, [1, 2]))
    assert set(measured) == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert measured["nsp_accuracy"][1] == 3


def test_lengths_of_spans_are_those_of_the_published_code(words: Tokenizer) -> None:
    """Geometric, of lengths up to 10 alone (Joshi et al. 2020, section 3.1): 3.8 on average."""
    free, starts = np.ones(400_000, dtype=bool), np.ones(400_000, dtype=bool)
    draws = np.random.default_rng(1).random((2, 400_000))
    _, span_starts = _choose_spans(starts, free, draws[0], draws[1], 20_000)
    lengths = np.unique(span_starts, return_counts=True)[1]
    assert abs(lengths.mean() - 3.797) < 0.15 and abs((lengths >= 10).mean() - 0.03) < 0.02

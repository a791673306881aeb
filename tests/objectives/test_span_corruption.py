"""Span corruption: texts can be restored, shares and lengths of spans, the loss of transformers, and training."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

import heedful
from heedful.checkpoint import BundleConfig, create
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, ModelConfig, NextToken, Sinusoidal, StackConfig
from heedful.objectives import Batch, Sample
from heedful.objectives.span_corruption import SpanCorruption
from heedful.packed import Packed
from heedful.tokenizer import Tokenizer
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.task_parity import assert_same_gradients
from tests.support.tiny_models import Float64Mode, save_tiny
from tests.support.tiny_runs import LINES

PAD, END = 0, 1
WORDS = sorted({word for line in LINES for word in line.split()})[:60]


@cache
def word_tokenizer(sentinels: int = 30) -> Tokenizer:
    """Return a word tokenizer that appends </s>; sentinels have the highest ids, in descending order."""
    names = ["<pad>", "</s>", "<unk>", *WORDS]
    names += [f"<extra_id_{number}>" for number in reversed(range(sentinels))]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([name for name in names if name.startswith("<")])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return Tokenizer(tokenizer, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})


SPANS = SpanCorruption(tokenizer=word_tokenizer(), start=PAD)
FIRST_SENTINEL = word_tokenizer().size - 1
text = st.lists(st.integers(3, 62), max_size=70)
groups = st.lists(st.lists(text, min_size=1, max_size=4), min_size=1, max_size=3)


def make_sample(*texts: list[int]) -> Sample:
    """Return a sample of texts with end tokens."""
    return Sample.of([[*ids, END] for ids in texts], [[0] * (len(ids) + 1) for ids in texts])


def sources_and_targets(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return the source and the target of each sequence of a batch."""
    assert batch.decoder_input is not None
    split = [batch.targets[start:stop].tolist() for start, stop in pairwise(batch.decoder_input.bounds)]
    return [
        (rows.tolist(), target) for rows, target in zip(batch.packed.unpack(batch.packed.tokens), split, strict=True)
    ]


def restore(source: list[int], target: list[int], count: int = 30) -> tuple[list[int], list[list[int]]]:
    """Return the text that a source and a target were made of, and its spans, without the tested code."""
    first_sentinel = word_tokenizer(count).size - 1
    assert target[-1] == END and END not in target[:-1]
    spans: dict[int, list[int]] = {}
    for id in target[:-1]:
        if id > first_sentinel - count:
            assert id == first_sentinel - len(spans)  # sentinels descend from the first one
            spans[id] = []
        else:
            spans[min(spans)].append(id)
    assert [id for id in source if id > first_sentinel - count] == list(spans)
    text = []
    for id in source:
        text += spans.get(id, [id])
    return text, list(spans.values())


@given(groups, st.integers(0, 2**63 - 1))
def test_input_and_target_spans_restore_the_text(groups_of_texts: list[list[list[int]]], key: int) -> None:
    samples = [make_sample(*texts) for texts in groups_of_texts]
    batch = SPANS.batch(samples, [key + number for number in range(len(samples))])
    pairs = sources_and_targets(batch)
    for ids, (source, target) in zip([ids for texts in groups_of_texts for ids in texts], pairs, strict=True):
        if len(ids) < 2:
            assert (source, target) == ([*ids, END], [])
            continue
        restored, spans = restore(source, target)
        noise = sum(map(len, spans))
        assert restored == [*ids, END] and all(spans)
        assert noise == max(1, round(0.15 * len(ids)))
        assert len(spans) == max(1, round(noise / 3))
        assert source[0] == ids[0] and source[-1] == END and source[-2] > FIRST_SENTINEL - 30
        assert all(not (a > FIRST_SENTINEL - 30 and b > FIRST_SENTINEL - 30) for a, b in pairwise(source))
    assert batch.decoder_input is not None and torch.equal(batch.weights, torch.ones(len(batch.targets)))
    assert batch.decoder_input.tokens.tolist() == [id for _, target in pairs if target for id in (PAD, *target[:-1])]
    assert batch.decoder_input.positions.tolist() == [
        position for _, target in pairs for position in range(len(target))
    ]


def test_spans_have_the_noise_density_and_mean_length_and_uniform_partitions() -> None:
    """All partitions of 3 tokens into 2 spans, and of 5 unchanged tokens into 2 parts, are equally frequent."""
    ids = list(range(3, 63)) * 8
    objective = SpanCorruption(tokenizer=word_tokenizer(100), start=PAD)
    batches = [objective.batch([make_sample(ids)], [key]) for key in range(20)]
    spans = [
        restore(*source_and_target, count=100)[1]
        for batch in batches
        for source_and_target in sources_and_targets(batch)
    ]
    noise = [sum(map(len, text_spans)) for text_spans in spans]
    assert set(noise) == {72} and {len(text_spans) for text_spans in spans} == {24}  # 15.0 % of 480, 3.0 each
    lengths = np.bincount([len(span) for text_spans in spans for span in text_spans])
    assert lengths[1] > lengths[2] > lengths[4] > 0  # shorter spans are more frequent
    counts: dict[tuple[int, ...], int] = {}
    objective = SpanCorruption(tokenizer=word_tokenizer(), start=PAD, mask_prob=3 / 8, mean_noise_span_length=1.5)
    for key in range(1600):
        source, target = objective.corrupt_sample(make_sample(list(range(3, 11))), key)
        shape = tuple(
            position
            for side in (source, target)
            for position in (side.tokens > FIRST_SENTINEL - 30).nonzero()[0].tolist()
        )
        counts[shape] = counts.get(shape, 0) + 1
    assert len(counts) == 2 * 4
    assert all(abs(count - 200) < 5 * (200 * 7 / 8) ** 0.5 for count in counts.values())


def test_fewer_sentinels_than_spans_make_longer_spans() -> None:
    ids = list(range(3, 63)) * 2
    (source_and_target,) = sources_and_targets(
        SpanCorruption(tokenizer=word_tokenizer(2), start=PAD).batch([make_sample(ids)], [5])
    )
    restored, spans = restore(*source_and_target, count=2)
    assert restored == [*ids, END] and len(spans) == 2 and sum(map(len, spans)) == 18


def test_most_of_a_text_may_be_removed() -> None:
    """Each span has an unchanged token before it."""
    objective = SpanCorruption(tokenizer=word_tokenizer(), start=PAD, mask_prob=0.9, mean_noise_span_length=1.0)
    ((source, target),) = sources_and_targets(objective.batch([make_sample(list(range(3, 23)))], [1]))
    restored, spans = restore(source, target)
    assert restored == [*range(3, 23), END] and len(spans) == 2 and sum(map(len, spans)) == 18


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(HeedfulError, match=r"no token <extra_id_0>: .* add them as special tokens \(100 are usual\)"):
        SpanCorruption(tokenizer=word_tokenizer(0), start=PAD)
    with pytest.raises(HeedfulError, match=r"mask_prob is 1\.5; expected a share of the tokens between 0"):
        SpanCorruption(tokenizer=word_tokenizer(), start=PAD, mask_prob=1.5)
    for length in (0.5, float("inf"), float("nan")):
        with pytest.raises(HeedfulError, match=f"length is {length}; expected a number of tokens, at least 1"):
            SpanCorruption(tokenizer=word_tokenizer(), start=PAD, mean_noise_span_length=length)


def test_only_special_tokens_at_the_ends_are_never_removed() -> None:
    """Special tokens between text tokens may be removed like any other token."""
    inner = [END, *range(3, 23), END, *range(23, 43), END]
    objective = SpanCorruption(tokenizer=word_tokenizer(), start=PAD, mask_prob=0.5, mean_noise_span_length=1.0)
    batches = [objective.batch([Sample.of([inner], [[0] * len(inner)])], [key]) for key in range(20)]
    sources = [source for batch in batches for source, _ in sources_and_targets(batch)]
    assert all(source[0] == source[-1] == END for source in sources)
    assert {source[1:-1].count(END) for source in sources} == {0, 1}


def test_weights_of_samples_are_not_used() -> None:
    weighted = Sample.of([[*range(3, 23), END]], [[0] * 21], weight=0.5)
    assert set(SPANS.batch([weighted], [1]).weights.tolist()) == {1.0}


def test_a_batch_depends_only_on_the_keys() -> None:
    first, second = make_sample(list(range(3, 50))), make_sample(list(range(4, 40)), [5, 6, 7])
    single = sources_and_targets(SPANS.batch([first], [7]))
    assert sources_and_targets(SPANS.batch([second, first], [1, 7]))[2:] == single
    assert sources_and_targets(SPANS.batch([first], [8])) != single


def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", torch.float64)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    samples = [make_sample(list(range(5, 30)), [7]), make_sample(list(range(30, 60)), [40, 41])]
    batch = SPANS.batch(samples, [3, 4])
    loss = SPANS.loss(loaded, batch)
    loss.sum.backward()
    with Float64Mode(torch.float64):
        losses = [
            reference(input_ids=torch.tensor([source]), labels=torch.tensor([target])).loss * len(target)
            for source, target in sources_and_targets(batch)
            if target
        ]
    total = torch.stack(losses).sum()
    assert loss.count == len(batch.targets) and len(losses) == 3
    assert abs(float(loss.sum.detach()) / float(total.detach()) - 1) < 1e-12
    assert_same_gradients(reference, total / loss.count, loaded, loss.count, tolerance=1e-12)


def test_batches_without_targets(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5ForConditionalGeneration")
    loss = SPANS.loss(heedful.load(tmp_path), SPANS.batch([make_sample([7], [])], [0]))
    loss.sum.backward()
    assert (float(loss.sum.detach()), loss.count) == (0.0, 0.0)
    empty = SPANS.batch([], [])
    assert len(empty.packed) == len(empty.targets) == 0 and isinstance(empty.decoder_input, Packed)


@pytest.mark.slow
def test_a_model_learns_a_few_sentences() -> None:
    """The model restores a few sentences, whichever spans are removed."""
    stack = {"width": 48, "layers": 2, "heads": 4, "head_width": 12, "inner_width": 96, "norm_at": "pre"}
    encoder = StackConfig(**stack, final_norm=True)
    decoder = StackConfig(**stack, final_norm=True, causal=True, cross=True)
    embedding = EmbeddingConfig(vocabulary=word_tokenizer().size, width=48, positions=Sinusoidal())
    model = ModelConfig(embedding=embedding, encoder=encoder, decoder=decoder, start=PAD)
    loaded = create(BundleConfig(family="heedful", model=model, head=NextToken()), word_tokenizer(), seed=1)
    lines = [word_tokenizer().encode(line.rpartition(" ")[0]).ids[:-1] for line in LINES[2:6]]
    samples = [make_sample(lines[0], lines[1]), make_sample(*lines[2:])]
    settings = TrainSettings(max_steps=90, batch_size=2, optimizer=AdamW(lr=5e-3), precision="float32")
    losses = [step.loss for step in Trainer(loaded, SPANS, samples, settings)]
    assert losses[0] > 3 and sum(losses[-10:]) / 10 < 0.4
    right, count = SPANS.measure(loaded, SPANS.batch(samples * 4, list(range(8))))["span_corruption_accuracy"]
    assert right > 0.85 * count

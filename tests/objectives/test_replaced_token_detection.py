"""Replaced token detection: masks, sampling, the losses and gradients of transformers, and training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import heedful
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.errors import HeedfulError
from heedful.model.config import (
    EmbeddingConfig,
    Learned,
    MaskedTokens,
    ModelConfig,
    Normal,
    ReplacedTokens,
    StackConfig,
)
from heedful.objectives import Batch, Sample
from heedful.objectives.replaced_token_detection import ReplacedTokenDetection, corrupt, sample_tokens, tied_generator
from heedful.train.optim import AdamW
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.task_parity import assert_same_gradients
from tests.support.tiny_models import Float64Mode, randomise, save_tiny, use_eager_attention
from tests.support.tiny_runs import LINES, relative_error, tokenizer

special = tokenizer().special
FIRST, END, PAD, MASK = special.bos_or_cls, special.eos_or_sep, special.pad, special.mask
text = st.lists(st.integers(5, 98), max_size=30)
groups = st.lists(st.lists(text, min_size=1, max_size=3), min_size=1, max_size=3)


def make_sample(*texts: list[int]) -> Sample:
    """Return a sample of texts with special tokens around them."""
    return Sample.of([[FIRST, *ids, END] for ids in texts], [[0] * (len(ids) + 2) for ids in texts])


def make_discriminator() -> ModelBundle:
    """Return a new discriminator: two layers of width 32, with embeddings of width 24."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=24, positions=Learned(count=48), types=2, padding=PAD, norm="layer"
    )
    encoder = StackConfig(width=32, layers=2, heads=4, head_width=8, inner_width=64)
    model = ModelConfig(embedding=embedding, encoder=encoder, initialisation=Normal(std=0.1))
    return create(BundleConfig(family="heedful", model=model, head=ReplacedTokens()), tokenizer(), seed=1)


def make_objective(loaded: ModelBundle, **settings: Any) -> ReplacedTokenDetection:
    """Return an objective with a tied generator of half the width."""
    return ReplacedTokenDetection(
        tokenizer=tokenizer(), generator=tied_generator(loaded, generator_size=0.5, seed=2), **settings
    )


OBJECTIVE = make_objective(make_discriminator())


@given(groups, st.integers(0, 2**40))
def test_masked_positions_are_text_tokens(groups_of_texts: list[list[list[int]]], key: int) -> None:
    """In each sample, 15 % of the text tokens are replaced by the mask token; special tokens never are."""
    samples = [make_sample(*texts) for texts in groups_of_texts]
    batch = OBJECTIVE.batch(samples, [key + number for number in range(len(samples))])
    tokens = np.concatenate([sample.tokens for sample in samples])
    assert batch.rows is not None and batch.draws is not None
    rows = batch.rows.numpy()
    assert (batch.packed.tokens[rows] == MASK).all() and batch.targets.tolist() == tokens[rows].tolist()
    unmasked = np.delete(np.arange(len(tokens)), rows)
    assert batch.packed.tokens[unmasked].tolist() == tokens[unmasked].tolist()
    assert not {FIRST, END, MASK} & set(batch.targets.tolist())
    text_sizes = [sum(map(len, texts)) for texts in groups_of_texts]
    assert len(batch.rows) == sum(max(1, round(0.15 * n)) for n in text_sizes if n)
    assert batch.counts == (len(batch.rows), len(tokens)) and batch.draws.shape == batch.weights.shape
    assert ((batch.draws >= 0) & (batch.draws < 1)).all()


def test_all_positions_are_equally_likely() -> None:
    counts = np.zeros(14)
    for key in range(400):
        batch = OBJECTIVE.batch([make_sample([7] * 12)], [key])
        assert batch.rows is not None
        counts[batch.rows.numpy()] += 1
    assert counts[0] == counts[13] == 0 and counts.sum() == 800
    assert (abs(counts[1:-1] - 800 / 12) < 5 * (800 / 12) ** 0.5).all()


def test_a_batch_depends_only_on_the_keys() -> None:
    first, second = make_sample(list(range(5, 50))), make_sample(list(range(20, 60)), [5, 6, 7])
    single, other_key = OBJECTIVE.batch([first], [7]), OBJECTIVE.batch([first], [8])
    both = OBJECTIVE.batch([second, first], [1, 7])
    count = len(single.targets)
    assert single.rows is not None and other_key.rows is not None and both.rows is not None
    assert single.draws is not None and both.draws is not None
    assert torch.equal(single.rows, both.rows[-count:] - len(second))
    assert torch.equal(single.draws, both.draws[-count:])
    assert not torch.equal(single.rows, other_key.rows)


def test_tokens_are_sampled_from_the_softmax_of_the_scores() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 1.0, 2.0], [5.0, 0.0, 0.0, -torch.inf]], dtype=torch.float64)
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for row in scores:
        observed = torch.bincount(sample_tokens(row.expand(len(draws), -1), draws), minlength=4) / len(draws)
        assert (observed - row.softmax(-1)).abs().max() < 2e-4
    low_and_high = sample_tokens(
        scores[:1].float().expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    )
    assert low_and_high.tolist() == [0, 3]
    assert sample_tokens(scores[:0], draws[:0]).shape == (0,)


def test_a_sampled_token_that_equals_the_original_is_not_replaced() -> None:
    batch = OBJECTIVE.batch([make_sample(list(range(5, 45)))], [3])
    assert batch.rows is not None and len(batch.rows) == 6
    tokens = batch.targets.clone()
    tokens[2:] += 1
    corrupted, replaced = corrupt(batch, tokens)
    assert replaced.nonzero().flatten().tolist() == batch.rows[2:].tolist() and len(replaced) == 42
    assert corrupted.tokens[batch.rows].tolist() == tokens.tolist() and (batch.packed.tokens[batch.rows] == MASK).all()


# -- comparison with transformers -----------------------------------------------------------------------------------


def make_pair(folder: Path, tied: bool) -> tuple[ModelBundle, ModelBundle, Any, Any]:
    """Return discriminator and generator of Heedful, and those of transformers with the same weights."""
    save_tiny(folder / "large", "electra", "ElectraForPreTraining", torch.float64)
    loaded = heedful.load(folder / "large", dtype=torch.float64)
    if tied:
        generator = tied_generator(loaded, generator_size=0.5)
        randomise(generator)
    else:
        small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
        save_tiny(folder / "small", "electra", "ElectraForMaskedLM", torch.float64, **small)
        generator = heedful.load(folder / "small", dtype=torch.float64)
    heedful.save(loaded, folder / "discriminator")
    heedful.save(generator, folder / "generator")
    their_model = transformers.ElectraForPreTraining.from_pretrained(folder / "discriminator", dtype=torch.float64)
    their_generator = transformers.ElectraForMaskedLM.from_pretrained(folder / "generator", dtype=torch.float64)
    use_eager_attention(their_model).eval()
    use_eager_attention(their_generator).eval()
    if tied:
        their_generator.electra.embeddings = their_model.electra.embeddings
        their_generator.generator_lm_head.weight = their_model.electra.embeddings.word_embeddings.weight
    return loaded, generator, their_model, their_generator


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    loaded, generator, their_model, their_generator = make_pair(tmp_path, tied)
    objective = ReplacedTokenDetection(tokenizer=tokenizer(), generator=generator)
    batch = objective.batch([make_sample(list(range(5, 28)), [7, 8, 9]), make_sample(list(range(40, 70)))], [3, 4])
    loss = objective.loss(loaded, batch)
    loss.sum.backward()
    assert batch.rows is not None and batch.draws is not None and generator.head is not None
    with torch.no_grad():
        scores = generator(batch.packed)[batch.rows]
        tokens = sample_tokens(scores, batch.draws)
        expected = [  # computed with numpy
            int(np.searchsorted(np.cumsum(np.exp(row) / np.exp(row).sum()), number, side="right"))
            for row, number in zip(scores.numpy(), batch.draws.numpy(), strict=True)
        ]
    assert tokens.tolist() == expected and not torch.equal(tokens, batch.targets)
    corrupted, replaced = corrupt(batch, tokens)
    labels = torch.full_like(batch.packed.tokens, -100)
    labels[batch.rows] = batch.targets

    def mean_losses() -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean losses of generator and discriminator in transformers, which reads one sequence at a time."""
        sums = [torch.zeros((), dtype=torch.float64)] * 2
        their_model.zero_grad()
        their_generator.zero_grad()
        with Float64Mode(torch.float64):
            for span in batch.packed.spans():
                masked = int((labels[span] >= 0).sum())
                masked_ids, corrupted_ids = batch.packed.tokens[span][None], corrupted.tokens[span][None]
                if masked:
                    sums[0] = sums[0] + their_generator(masked_ids, labels=labels[span][None]).loss * masked
                judged = their_model(corrupted_ids, labels=replaced[span][None].long()).loss
                sums[1] = sums[1] + judged * (span.stop - span.start)
        return sums[0] / len(batch.rows), sums[1] / len(labels)

    terms = objective.terms(loaded, batch)
    for term, expected_loss in zip(terms, mean_losses(), strict=True):
        assert abs(float(term.losses.detach().mean()) / float(expected_loss.detach()) - 1) < 1e-12
    for our_module, their_module in ((loaded, their_model), (generator, their_generator)):
        generator_loss, discriminator_loss = mean_losses()
        total = generator_loss + 50 * discriminator_loss
        assert abs(float(loss.sum.detach()) / loss.count / float(total.detach()) - 1) < 1e-12
        assert_same_gradients(their_module, total, our_module, loss.count, tolerance=1e-12)


def test_terms_have_counts_and_correct_predictions() -> None:
    loaded = make_discriminator()
    objective = make_objective(loaded)
    batch = objective.batch([make_sample(list(range(5, 45)))], [3])
    generator, detection = objective.terms(loaded, batch)
    assert (generator.name, detection.name) == ("generator", "rtd")
    assert (len(generator.losses), len(detection.losses)) == batch.counts == (6, 42)
    assert detection.right is not None and torch.equal(detection.right, detection.losses < np.log(2))


# -- the generator --------------------------------------------------------------------------------------------------


def test_a_tied_generator_shares_the_embedding_and_is_smaller() -> None:
    loaded = make_discriminator()
    generator = tied_generator(loaded)
    own, small = loaded.named_tensors(), generator.named_tensors()
    encoder = generator.config.model.encoder
    shared = {name for name in small if name in own and small[name] is own[name]}
    parameters = ("tokens.weight", "positions.weight", "types.weight", "norm.weight", "norm.bias")
    assert shared == {f"embedding.{name}" for name in parameters}
    shared_ids = {id(tensor) for tensor in own.values()} & {id(tensor) for tensor in small.values()}
    assert shared_ids == {id(own[name]) for name in shared}
    assert encoder is not None and generator.config.head == MaskedTokens()
    assert (encoder.width, encoder.heads, encoder.inner_width, encoder.layers) == (8, 1, 16, 2)
    assert small["embedding.project.weight"].shape == (8, 24)
    assert generator.head is not None and generator.head.decoder.weight is own["embedding.tokens.weight"]
    other_seed = tied_generator(loaded, seed=3).named_tensors()
    assert not torch.equal(other_seed["embedding.project.weight"], small["embedding.project.weight"])


def test_invalid_settings_and_models_are_refused() -> None:
    loaded = make_discriminator()
    with pytest.raises(HeedfulError, match=r"generator_size is 4\.0; expected a share of the width"):
        tied_generator(loaded, generator_size=4.0)
    with pytest.raises(HeedfulError, match=r"mask_prob is 15\.0; expected a share"):
        ReplacedTokenDetection(tokenizer=tokenizer(), generator=loaded, mask_prob=15.0)
    model = replace(loaded.config.model, encoder=None, decoder=loaded.config.model.encoder)
    with pytest.raises(HeedfulError, match="needs a model that is only an encoder, and this model is not one"):
        tied_generator(create(replace(loaded.config, model=model)))


# -- training -------------------------------------------------------------------------------------------------------


def train(
    loaded: ModelBundle, objective: ReplacedTokenDetection, samples: list[Sample], **settings: Any
) -> tuple[Trainer, list[float]]:
    """Train a model, and return the trainer and the losses."""
    defaults: dict[str, Any] = {"batch_size": 4, "optimizer": AdamW(lr=1e-2), "precision": "float32"}
    trainer = Trainer(loaded, objective, samples, TrainSettings(**defaults | settings))
    return trainer, [step.loss for step in trainer]


def encoded_texts() -> list[list[int]]:
    """Return the token ids of LINES, without special tokens."""
    return [tokenizer().encode(line.rpartition(" ")[0]).ids[1:-1] for line in LINES]


def test_an_update_does_not_depend_on_micro_batches() -> None:
    """Masks and sampled tokens are the same, and each term is a mean over the whole step."""
    runs = []
    for tokens in (10, 10_000):
        loaded = make_discriminator()
        objective = make_objective(loaded)
        samples = [
            make_sample(*encoded_texts()[:3]),
            make_sample(encoded_texts()[3]),
            *(make_sample(ids) for ids in encoded_texts()[4:8]),
        ]
        optimizer = AdamW(lr=1e-2, eps=1e-2)
        trainer, losses = train(
            loaded, objective, samples, max_steps=2, max_tokens_per_microbatch=tokens, optimizer=optimizer
        )
        runs.append((trainer.parameters, losses))
    (split, split_losses), (full, full_losses) = runs
    assert relative_error(split, full) < 1e-6 and split_losses == pytest.approx(full_losses, rel=1e-6)
    assert any(name.startswith("beside.") for name in split)
    assert len({id(tensor) for tensor in split.values()}) == len(split)


def accuracies(loaded: ModelBundle, objective: ReplacedTokenDetection, batch: Batch) -> tuple[float, float]:
    """Return the accuracy over all tokens, and over replaced tokens."""
    with torch.no_grad():
        _, term = objective.terms(loaded, batch)
        assert batch.rows is not None and batch.draws is not None and term.right is not None
        replaced = corrupt(batch, sample_tokens(objective.generator(batch.packed)[batch.rows], batch.draws))[1]
    return float(term.right.double().mean()), float(term.right[replaced].double().mean())


def test_a_model_learns_to_detect_replacements_of_a_fixed_generator() -> None:
    """The generator is not trained, so its replacements are almost random."""
    loaded = make_discriminator()
    generator = create(replace(tied_generator(loaded).config), tokenizer(), seed=3)
    generator.requires_grad_(False)
    objective = ReplacedTokenDetection(tokenizer=tokenizer(), generator=generator)
    samples = [make_sample(*encoded_texts()[2:4])] * 4
    trainer, _ = train(loaded, objective, samples, max_steps=80)
    assert not any(name.startswith("beside.") for name in trainer.parameters)
    accuracy, replaced_accuracy = accuracies(loaded, objective, objective.batch(samples, [1, 2, 3, 4]))
    assert accuracy > 0.96 and replaced_accuracy > 0.7


@pytest.mark.slow
def test_generator_and_discriminator_learn() -> None:
    loaded = make_discriminator()
    objective = make_objective(loaded)
    samples = [make_sample(*encoded_texts()[2:4])] * 4
    trainer, losses = train(loaded, objective, samples, max_steps=150)
    count = sum(tensor.numel() for tensor in trainer.parameters.values())
    shared = sum(tensor.numel() for name, tensor in loaded.named_tensors().items() if name.startswith("embedding."))
    shared -= sum(tensor.numel() for tensor in loaded.model.embedding.project.parameters())
    assert count == loaded.count() + objective.generator.count() - shared
    metrics = objective.measure(loaded, objective.batch(samples, [1, 2, 3, 4]))
    means = {name: total / number for name, (total, number) in metrics.items()}
    assert losses[0] > 30 and means["generator_loss"] < 1.5 and means["rtd_loss"] < 0.1


def test_batches_without_masked_tokens() -> None:
    loaded = make_discriminator()
    objective = make_objective(loaded)
    loss = objective.loss(loaded, objective.batch([make_sample([])], [0]))
    loss.sum.backward()
    assert float(loss.sum.detach()) > 0 and loss.count == 2.0, "the loss is not that of both special tokens"
    empty = objective.batch([], [])
    assert empty.counts == (0.0, 0.0) and len(empty.targets) == 0 and empty.to("meta").draws is not None

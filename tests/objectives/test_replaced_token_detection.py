"""Replaced token detection: transformers' two losses and their gradients, tokens drawn of a key, and it learns."""

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


def sample(*texts: list[int]) -> Sample:
    """Of texts with special tokens around them."""
    return Sample.of([[FIRST, *ids, END] for ids in texts], [[0] * (len(ids) + 2) for ids in texts])


def discriminator() -> ModelBundle:
    """Two layers, 32 wide, with embeddings of 24."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=24, positions=Learned(count=48), types=2, padding=PAD, norm="layer"
    )
    encoder = StackConfig(width=32, layers=2, heads=4, head_width=8, inner_width=64)
    model = ModelConfig(embedding=embedding, encoder=encoder, initialisation=Normal(std=0.1))
    return create(BundleConfig(family="heedful", model=model, head=ReplacedTokens()), tokenizer(), seed=1)


def objective_of(loaded: ModelBundle, **settings: Any) -> ReplacedTokenDetection:
    """With a tied generator half as wide."""
    return ReplacedTokenDetection(
        tokenizer=tokenizer(), generator=tied_generator(loaded, generator_size=0.5, seed=2), **settings
    )


ONE = objective_of(discriminator())


@given(groups, st.integers(0, 2**40))
def test_masked_positions_are_ordinary_tokens(groups_of_texts: list[list[list[int]]], key: int) -> None:
    """Of each sample 15 % of the text, behind the mask token and nothing else; special tokens never."""
    samples = [sample(*texts) for texts in groups_of_texts]
    batch = ONE.batch(samples, [key + number for number in range(len(samples))])
    flat = np.concatenate([each.tokens for each in samples])
    assert batch.rows is not None and batch.draws is not None
    rows = batch.rows.numpy()
    assert (batch.packed.tokens[rows] == MASK).all() and batch.targets.tolist() == flat[rows].tolist()
    kept = np.delete(np.arange(len(flat)), rows)
    assert batch.packed.tokens[kept].tolist() == flat[kept].tolist()
    assert not {FIRST, END, MASK} & set(batch.targets.tolist())
    free = [sum(map(len, texts)) for texts in groups_of_texts]
    assert len(batch.rows) == sum(max(1, round(0.15 * n)) for n in free if n)
    assert batch.counts == (len(batch.rows), len(flat)) and batch.draws.shape == batch.weights.shape
    assert ((batch.draws >= 0) & (batch.draws < 1)).all()


def test_any_place_as_likely() -> None:
    counts = np.zeros(14)
    for key in range(400):
        batch = ONE.batch([sample([7] * 12)], [key])
        assert batch.rows is not None
        counts[batch.rows.numpy()] += 1
    assert counts[0] == counts[13] == 0 and counts.sum() == 800
    assert (abs(counts[1:-1] - 800 / 12) < 5 * (800 / 12) ** 0.5).all()


def test_samples_depend_on_the_key_alone() -> None:
    one, other = sample(list(range(5, 50))), sample(list(range(20, 60)), [5, 6, 7])
    alone, again, company = ONE.batch([one], [7]), ONE.batch([one], [8]), ONE.batch([other, one], [1, 7])
    count = len(alone.targets)
    assert alone.rows is not None and again.rows is not None and company.rows is not None
    assert alone.draws is not None and company.draws is not None
    assert torch.equal(alone.rows, company.rows[-count:] - len(other))
    assert torch.equal(alone.draws, company.draws[-count:])
    assert not torch.equal(alone.rows, again.rows)


def test_tokens_are_drawn_as_the_scores_say() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 1.0, 2.0], [5.0, 0.0, 0.0, -torch.inf]], dtype=torch.float64)
    draws = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000  # evenly
    for row in scores:
        observed = torch.bincount(sample_tokens(row.expand(len(draws), -1), draws), minlength=4) / len(draws)
        assert (observed - row.softmax(-1)).abs().max() < 2e-4
    low_and_high = sample_tokens(
        scores[:1].float().expand(2, -1), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    )
    assert low_and_high.tolist() == [0, 3]
    assert sample_tokens(scores[:0], draws[:0]).shape == (0,)


def test_a_token_that_is_drawn_right_was_not_replaced() -> None:
    batch = ONE.batch([sample(list(range(5, 45)))], [3])
    assert batch.rows is not None and len(batch.rows) == 6
    tokens = batch.targets.clone()
    tokens[2:] += 1
    corrupted, replaced = corrupt(batch, tokens)
    assert replaced.nonzero().flatten().tolist() == batch.rows[2:].tolist() and len(replaced) == 42
    assert corrupted.tokens[batch.rows].tolist() == tokens.tolist() and (batch.packed.tokens[batch.rows] == MASK).all()


# -- beside transformers ------------------------------------------------------------------------------------------


def pair(folder: Path, tied: bool) -> tuple[ModelBundle, ModelBundle, Any, Any]:
    """Our discriminator and generator, and theirs of the same weights."""
    save_tiny(folder / "one", "electra", "ElectraForPreTraining", torch.float64)
    ours = heedful.load(folder / "one", dtype=torch.float64)
    if tied:
        generator = tied_generator(ours, generator_size=0.5)
        randomise(generator)
    else:
        small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
        save_tiny(folder / "two", "electra", "ElectraForMaskedLM", torch.float64, **small)
        generator = heedful.load(folder / "two", dtype=torch.float64)
    heedful.save(ours, folder / "discriminator")
    heedful.save(generator, folder / "generator")
    theirs = [
        use_eager_attention(kind.from_pretrained(folder / name, dtype=torch.float64)).eval()
        for kind, name in (
            (transformers.ElectraForPreTraining, "discriminator"),
            (transformers.ElectraForMaskedLM, "generator"),
        )
    ]
    if tied:
        theirs[1].electra.embeddings = theirs[0].electra.embeddings
        theirs[1].generator_lm_head.weight = theirs[0].electra.embeddings.word_embeddings.weight
    return ours, generator, *theirs


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    ours, generator, their_model, their_generator = pair(tmp_path, tied)
    objective = ReplacedTokenDetection(tokenizer=tokenizer(), generator=generator)
    batch = objective.batch([sample(list(range(5, 28)), [7, 8, 9]), sample(list(range(40, 70)))], [3, 4])
    loss = objective.loss(ours, batch)
    loss.sum.backward()
    assert batch.rows is not None and batch.draws is not None and generator.head is not None
    with torch.no_grad():
        scores = generator(batch.packed)[batch.rows]
        tokens = sample_tokens(scores, batch.draws)
        expected = [  # by numpy
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

    terms = objective.terms(ours, batch)
    for term, each in zip(terms, mean_losses(), strict=True):
        assert abs(float(term.losses.detach().mean()) / float(each.detach()) - 1) < 1e-12
    for our_part, their_part in ((ours, their_model), (generator, their_generator)):
        one, two = mean_losses()
        total = one + 50 * two
        assert abs(float(loss.sum.detach()) / loss.count / float(total.detach()) - 1) < 1e-12
        assert_same_gradients(their_part, total, our_part, loss.count, tolerance=1e-12)


def test_right_and_counts() -> None:
    loaded = discriminator()
    objective = objective_of(loaded)
    batch = objective.batch([sample(list(range(5, 45)))], [3])
    generator, judged = objective.terms(loaded, batch)
    assert (generator.name, judged.name) == ("generator", "rtd")
    assert (len(generator.losses), len(judged.losses)) == batch.counts == (6, 42)
    assert judged.right is not None and torch.equal(judged.right, judged.losses < np.log(2))


# -- the generator --------------------------------------------------------------------------------------------------


def test_a_tied_generator_shares_the_embedding_and_is_smaller() -> None:
    loaded = discriminator()
    generator = tied_generator(loaded)
    (one, two), encoder = (each.named_tensors() for each in (loaded, generator)), generator.config.model.encoder
    same = {name for name in two if name in one and two[name] is one[name]}
    kinds = ("tokens.weight", "positions.weight", "types.weight", "norm.weight", "norm.bias")
    assert same == {f"embedding.{kind}" for kind in kinds}
    assert {id(each) for each in one.values()} & {id(each) for each in two.values()} == {id(one[name]) for name in same}
    assert encoder is not None and generator.config.head == MaskedTokens()
    assert (encoder.width, encoder.heads, encoder.inner_width, encoder.layers) == (8, 1, 16, 2)
    assert two["embedding.project.weight"].shape == (8, 24)
    assert generator.head is not None and generator.head.decoder.weight is one["embedding.tokens.weight"]
    other = tied_generator(loaded, seed=3).named_tensors()
    assert not torch.equal(other["embedding.project.weight"], two["embedding.project.weight"])


def test_what_cannot_be_is_refused() -> None:
    loaded = discriminator()
    with pytest.raises(HeedfulError, match=r"generator_size is 4\.0; expected a share of the width"):
        tied_generator(loaded, generator_size=4.0)
    with pytest.raises(HeedfulError, match=r"mask_prob is 15\.0; expected a share"):
        ReplacedTokenDetection(tokenizer=tokenizer(), generator=loaded, mask_prob=15.0)
    model = replace(loaded.config.model, encoder=None, decoder=loaded.config.model.encoder)
    with pytest.raises(HeedfulError, match="needs a model that is only an encoder, and this model is not one"):
        tied_generator(create(replace(loaded.config, model=model)))


# -- training -------------------------------------------------------------------------------------------------------


def learn(
    loaded: ModelBundle, objective: ReplacedTokenDetection, samples: list[Sample], **settings: Any
) -> tuple[Trainer, list[float]]:
    defaults: dict[str, Any] = {"batch_size": 4, "optimizer": AdamW(lr=1e-2), "precision": "float32"}
    trainer = Trainer(loaded, objective, samples, TrainSettings(**defaults | settings))
    return trainer, [step.loss for step in trainer]


def texts() -> list[list[int]]:
    return [tokenizer().encode(line.rpartition(" ")[0]).ids[1:-1] for line in LINES]


def test_an_update_does_not_depend_on_micro_batches() -> None:
    """Masks and drawn tokens are the same, and each mean is over the whole step."""
    runs = []
    for tokens in (10, 10_000):
        loaded = discriminator()
        objective = objective_of(loaded)
        samples = [sample(*texts()[:3]), sample(texts()[3]), *(sample(each) for each in texts()[4:8])]
        calm = AdamW(lr=1e-2, eps=1e-2)
        trainer, losses = learn(
            loaded, objective, samples, max_steps=2, max_tokens_per_microbatch=tokens, optimizer=calm
        )
        runs.append((trainer.parameters, losses))
    (one, few), (two, many) = runs
    assert relative_error(one, two) < 1e-6 and few == pytest.approx(many, rel=1e-6)
    assert any(name.startswith("beside.") for name in one)
    assert len({id(each) for each in one.values()}) == len(one)


def judged(loaded: ModelBundle, objective: ReplacedTokenDetection, batch: Batch) -> tuple[float, float]:
    """The share of all tokens that are classified correctly, and that of those that were replaced."""
    with torch.no_grad():
        _, term = objective.terms(loaded, batch)
        assert batch.rows is not None and batch.draws is not None and term.right is not None
        replaced = corrupt(batch, sample_tokens(objective.generator(batch.packed)[batch.rows], batch.draws))[1]
    return float(term.right.double().mean()), float(term.right[replaced].double().mean())


def test_it_learns_what_another_generator_replaces() -> None:
    """One that does not learn, and so replaces tokens by almost any other."""
    loaded = discriminator()
    generator = create(replace(tied_generator(loaded).config), tokenizer(), seed=3)
    generator.requires_grad_(False)
    objective = ReplacedTokenDetection(tokenizer=tokenizer(), generator=generator)
    samples = [sample(*texts()[2:4])] * 4
    trainer, _ = learn(loaded, objective, samples, max_steps=80)
    assert not any(name.startswith("beside.") for name in trainer.parameters)
    everything, replaced = judged(loaded, objective, objective.batch(samples, [1, 2, 3, 4]))
    assert everything > 0.96 and replaced > 0.7


@pytest.mark.slow
def test_both_learn() -> None:
    loaded = discriminator()
    objective = objective_of(loaded)
    samples = [sample(*texts()[2:4])] * 4
    trainer, losses = learn(loaded, objective, samples, max_steps=150)
    count = sum(each.numel() for each in trainer.parameters.values())
    shared = sum(each.numel() for name, each in loaded.named_tensors().items() if name.startswith("embedding."))
    shared -= sum(each.numel() for each in loaded.model.embedding.project.parameters())
    assert count == loaded.count() + objective.generator.count() - shared
    measured = objective.measure(loaded, objective.batch(samples, [1, 2, 3, 4]))
    means = {name: total / number for name, (total, number) in measured.items()}
    assert losses[0] > 30 and means["generator_loss"] < 1.5 and means["rtd_loss"] < 0.1


def test_nothing_to_hide() -> None:
    loaded = discriminator()
    objective = objective_of(loaded)
    loss = objective.loss(loaded, objective.batch([sample([])], [0]))
    loss.sum.backward()
    assert float(loss.sum.detach()) > 0 and loss.count == 2.0, "both tokens are judged, and the mean is over them"
    empty = objective.batch([], [])
    assert empty.counts == (0.0, 0.0) and len(empty.targets) == 0 and empty.to("meta").draws is not None

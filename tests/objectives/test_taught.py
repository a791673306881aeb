"""A teacher's states of words: two vocabularies are aligned, the loss is a plain loop's, and nothing reaches it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from corpora import documents, trained
from torch import nn

from heedful.checkpoint import Config, Loaded, create
from heedful.checkpoint.attach import attach
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack
from heedful.objectives.taught import Taught, Teacher, mean_rows
from heedful.tokenizer import Tokenizer

TEXTS = [" ".join(each) for each in documents(8, seed=3, sentences=(1, 2))]


@cache
def tokenizer(kind: str, vocabulary: int) -> Tokenizer:
    """Of the texts; a small vocabulary has short pieces."""
    return trained([[text] for text in TEXTS], kind=kind, vocabulary=vocabulary)


FEW, MANY = tokenizer("wordpiece", 70), tokenizer("wordpiece", 200)


def bare(own: Tokenizer, width: int, places: int = 200, seed: int = 1) -> Loaded:
    """A random model of two layers."""
    embedding = EmbeddingConfig(
        vocabulary=own.size, width=width, positions=Learned(count=places), types=2, norm="layer"
    )
    encoder = StackConfig(width=width, layers=2, heads=2, head_width=width // 2, inner_width=32, dropout=0.3)
    made = create(Config(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder)), own, seed=seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def samples(own: Tokenizer, texts: list[str] = TEXTS) -> list[Sample]:
    """A sample of each two texts."""
    encoded = own.encode_batch(texts)
    return [
        Sample.of([each.ids for each in encoded[at : at + 2]], [each.types for each in encoded[at : at + 2]])
        for at in range(0, len(encoded), 2)
    ]


def taught(teacher: Teacher, own: Tokenizer, width: int, **more: float) -> Taught:
    """The objective with a random map."""
    torch.manual_seed(5)
    return Taught(tokenizer=own, teacher=teacher, project=nn.Linear(width, teacher.width), **more)  # type: ignore[arg-type]


def spelled(own: Tokenizer, tokens: torch.Tensor, places: np.ndarray, owners: np.ndarray, count: int) -> list[str]:
    """Each word by the names of its tokens."""
    words = [""] * count
    for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
        words[owner] += own.name(int(tokens[place])).removeprefix("##").replace("\u0120", "")
    return words


@pytest.mark.parametrize(("ours", "kind"), [(70, "wordpiece"), (200, "wordpiece"), (300, "bpe")])
def test_words_are_aligned(ours: int, kind: str) -> None:
    own = tokenizer(kind, ours)
    teacher = Teacher(bare(MANY if ours != 200 else FEW, 8), own)
    objective = taught(teacher, own, 8)
    lower = [text.lower() for text in TEXTS]
    batch = objective.batch(samples(own, lower), [1, 2, 3, 4])
    words, packed = batch.words, pack(samples(own, lower))
    assert teacher.loaded.tokenizer is not None
    one = spelled(own, packed.tokens, words.places, words.owners, words.count)
    two = spelled(teacher.loaded.tokenizer, words.taught.tokens, words.taught_places, words.taught_owners, words.count)
    if kind == "wordpiece":
        expected = [word for text in lower for word in text.replace(".", " .").replace(",", " ,").split()]
        assert one == two == expected
        # and the teacher reads what it would have read
        direct = teacher.loaded.tokenizer.pack(lower)
        assert torch.equal(words.taught.tokens, direct.tokens) and words.taught.bounds == direct.bounds
        assert torch.equal(words.taught.positions, direct.positions)
    else:
        assert one == two
    assert batch.counts == (float(len(batch.targets)), float(words.count))
    assert len(words.places) == sum(map(len, packed.unpack(packed.tokens))) - 2 * len(packed), "all but special ones"


@pytest.mark.parametrize(("ours", "theirs"), [("wordpiece", "bpe"), ("unigram", "bpe"), ("bpe", "bpe")])
def test_a_teacher_that_marks_spaces_reads_them(ours: str, theirs: str) -> None:
    """Each word as it stands behind a space, which many vocabularies do not have in their tokens."""
    own, other = tokenizer(ours, 300), tokenizer(theirs, 320)
    teacher, texts = Teacher(bare(other, 8), own), [f" {text.lower()}" for text in TEXTS]
    packed = pack(samples(own, texts))
    free = taught(teacher, own, 8).free
    words = teacher.words(packed, packed.tokens.numpy(), free)
    direct = other.pack(texts)
    assert torch.equal(words.taught.tokens, direct.tokens) and words.taught.bounds == direct.bounds


def test_the_loss_is_a_plain_loops() -> None:
    teacher = Teacher(bare(MANY, 12), FEW)
    student = attach(bare(FEW, 8, seed=2), "masked").eval()
    objective = taught(teacher, FEW, 8, weight=3.0)
    given = samples(FEW)
    teacher.prepare(given[:2], objective.free)
    batch = objective.batch(given, [1, 2, 3, 4])
    masked, term = objective.terms(student, batch)
    words = batch.words
    rows, theirs = student.model(batch.packed), teacher.loaded.model(words.taught)
    losses = []
    for word in range(words.count):
        ours = torch.stack([rows[place] for place, at in zip(words.places, words.owners, strict=True) if at == word])
        state = torch.stack(
            [theirs[p] for p, at in zip(words.taught_places, words.taught_owners, strict=True) if at == word]
        ).mean(0)
        state = (state - teacher.mean) / teacher.deviation
        losses.append(((objective.project(ours.mean(0)) - state) ** 2).mean())
    assert torch.allclose(term.losses, torch.stack(losses), rtol=1e-4, atol=1e-5)
    loss = objective.loss(student, batch)
    expected = masked.losses.mean() + 3.0 * torch.stack(losses).mean()
    assert float(loss.sum.detach()) / loss.count == pytest.approx(float(expected.detach()), rel=1e-4)
    found = objective.measure(student, batch)
    assert set(found) == {"masked_loss", "masked_accuracy", "taught_loss"} and found["taught_loss"][1] == words.count


def test_the_mean_of_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    found = mean_rows(rows, np.array([1, 2, 5]), np.array([0, 0, 2]), 3)
    assert found[0].tolist() == [3.0, 4.0] and found[2].tolist() == [10.0, 11.0]


def test_the_mean_of_rows_in_bfloat16_is_rounded_once() -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    places, owners = np.arange(2000), np.repeat([0, 1], [1331, 669])
    exact = mean_rows(rows.double(), places, owners, 2)
    assert torch.equal(mean_rows(rows, places, owners, 2), exact.bfloat16())


def test_states_are_measured_in_deviations() -> None:
    teacher = Teacher(bare(MANY, 12), FEW)
    objective, given = taught(teacher, FEW, 8), samples(FEW)
    teacher.prepare(given, objective.free)
    packed = pack(given)
    states = teacher.states(teacher.words(packed, packed.tokens.numpy(), objective.free))
    assert torch.allclose(states.mean(0), torch.zeros(12), atol=1e-5)
    assert torch.allclose(states.std(0), torch.ones(12), atol=1e-4)


def test_no_gradient_reaches_the_teacher() -> None:
    loaded = bare(MANY, 12).train()
    before = {name: each.clone() for name, each in loaded.named().items()}
    teacher = Teacher(loaded, FEW)
    assert not teacher.loaded.training
    student = attach(bare(FEW, 8, seed=2), "masked")
    objective = taught(teacher, FEW, 8)
    objective.loss(student, objective.batch(samples(FEW), [1, 2, 3, 4])).sum.backward()
    assert all(each.grad is None and not each.requires_grad for each in teacher.loaded.parameters())
    assert all(torch.equal(each, before[name]) for name, each in teacher.loaded.named().items())
    assert objective.project.weight.grad is not None and bool(objective.project.weight.grad.any())
    assert objective.beside is objective.project
    reached = {name for name, each in student.named().items() if each.grad is not None and bool(each.grad.any())}
    assert any("blocks.0" in name for name in reached)


def test_the_same_model_has_nothing_to_learn_from_itself() -> None:
    loaded = attach(bare(MANY, 8), "masked").eval()
    teacher = Teacher(loaded, MANY)
    project = nn.Linear(8, 8)
    with torch.no_grad():
        project.weight.copy_(torch.eye(8))
        project.bias.zero_()
    objective = Taught(tokenizer=MANY, teacher=teacher, project=project, rate=1e-3)
    (given, *_) = samples(MANY)

    def kept(key: int) -> Batch:
        return objective.batch([given], [key])

    original = pack([given]).tokens
    batch = next(each for each in map(kept, range(500)) if torch.equal(each.packed.tokens, original))
    _, term = objective.terms(loaded, batch)
    assert len(term.losses) > 10 and term.losses.detach().abs().max() == 0
    other = next(each for each in map(kept, range(500)) if not torch.equal(each.packed.tokens, original))
    far = objective.terms(loaded, other)[1].losses.detach()
    assert ((far > 0).sum() > 5) and (far == 0).any(), "a hidden token is seen in all of its own sequence"


def test_words_past_the_teachers_limit_are_left_out() -> None:
    long = [" ".join(TEXTS), TEXTS[0]]
    teacher, whole = Teacher(bare(MANY, 8, places=20), FEW), Teacher(bare(MANY, 8), FEW)
    objective = taught(teacher, FEW, 8)
    given = samples(FEW, long)
    packed = pack(given)
    cut, all_words = (each.words(packed, packed.tokens.numpy(), objective.free) for each in (teacher, whole))
    assert cut.count < all_words.count
    assert max(cut.taught.lengths) <= 20 < max(all_words.taught.lengths)
    ours = spelled(FEW, packed.tokens, cut.places, cut.owners, cut.count)
    theirs = spelled(MANY, cut.taught.tokens, cut.taught_places, cut.taught_owners, cut.count)
    assert ours == theirs and "" not in ours
    every = spelled(FEW, packed.tokens, all_words.places, all_words.owners, all_words.count)
    first = ours.index(".") if cut.count else 0
    assert ours[:first] == every[:first]
    batch = objective.batch(given, [1])
    student = attach(bare(FEW, 8, places=600, seed=2), "masked")
    assert len(objective.terms(student, batch)[1].losses) == cut.count == batch.counts[1]


def test_a_teacher_needs_a_tokenizer() -> None:
    loaded = bare(MANY, 8)
    alone = Loaded(loaded.config, None, "there")
    with pytest.raises(
        HeedfulError, match=r"there has no tokenizer, so it cannot teach: put its tokenizer\.json there"
    ):
        Teacher(alone, FEW)


def test_the_head_is_that_of_masked_tokens() -> None:
    assert isinstance(attach(bare(FEW, 8), "masked").config.head, MaskedTokens)
    assert replace(taught(Teacher(bare(MANY, 8), FEW), FEW, 8), weight=2.0).balance == (1.0, 2.0)

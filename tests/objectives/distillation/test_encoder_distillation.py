"""Distillation of an encoder: words of two vocabularies are aligned, each term equals a plain loop, caches resume."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.checkpoint.new_head import with_head
from heedful.data.corpus.build import Corpus
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples
from heedful.objectives.distillation import vector_cache
from heedful.objectives.distillation.encoder import EncoderDistillation, new_modules
from heedful.objectives.distillation.encoder_teacher import EncoderTeacher, mean_rows
from heedful.objectives.distillation.vector_cache import VectorCache, nearest_texts
from heedful.objectives.packing import PackedSequences
from heedful.objectives.sentence_windows import (
    Neighbours,
    WindowPlan,
    WindowSettings,
    cut_documents,
    plan_windows,
    sample_texts,
)
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.tokenizer import Tokenizer
from tests.support.corpora import make_corpus, make_documents, train_on

TEXTS = [" ".join(each) for each in make_documents(8, seed=3, sentences=(1, 2))]


@cache
def tokenizer(kind: str, vocabulary: int) -> Tokenizer:
    """A tokenizer of the texts; a small vocabulary has short pieces."""
    return train_on([[text] for text in TEXTS], algorithm=kind, vocab_size=vocabulary)


FEW, MANY = tokenizer("wordpiece", 70), tokenizer("wordpiece", 200)


def bare(own: Tokenizer, width: int, places: int = 200, seed: int = 1) -> ModelBundle:
    """A random model of two layers."""
    embedding = EmbeddingConfig(
        vocabulary=own.size, width=width, positions=Learned(count=places), types=2, norm="layer"
    )
    encoder = StackConfig(width=width, layers=2, heads=2, head_width=width // 2, inner_width=32, dropout=0.3)
    encoder = create(
        BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder)), own, seed=seed
    )
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return encoder


def samples(own: Tokenizer, texts: list[str] = TEXTS) -> list[Sample]:
    """A sample of each two texts."""
    encoded = own.encode_batch(texts)
    return [
        Sample.of([each.ids for each in encoded[at : at + 2]], [each.types for each in encoded[at : at + 2]])
        for at in range(0, len(encoded), 2)
    ]


def distillation(teacher: EncoderTeacher, own: Tokenizer, width: int, **more: Any) -> EncoderDistillation:
    """The objective with random modules beside the model."""
    return EncoderDistillation(
        tokenizer=own, teacher=teacher, modules=new_modules(width, teacher.hidden_size, 5), **more
    )


def spelled(own: Tokenizer, tokens: torch.Tensor, places: np.ndarray, owners: np.ndarray, count: int) -> list[str]:
    """Each word by the names of its tokens."""
    words = [""] * count
    for place, owner in zip(places.tolist(), owners.tolist(), strict=True):
        words[owner] += own.name(int(tokens[place])).removeprefix("##").replace("\u0120", "")
    return words


@pytest.mark.parametrize(("ours", "kind"), [(70, "wordpiece"), (200, "wordpiece"), (300, "bpe")])
def test_words_are_aligned(ours: int, kind: str) -> None:
    own = tokenizer(kind, ours)
    teacher = EncoderTeacher(bare(MANY if ours != 200 else FEW, 8), own)
    objective = distillation(teacher, own, 8)
    lower = [text.lower() for text in TEXTS]
    batch = objective.batch(samples(own, lower), [1, 2, 3, 4])
    words, packed = batch.distillation.words, pack_samples(samples(own, lower))
    assert teacher.loaded.tokenizer is not None
    one = spelled(own, packed.tokens, words.student_rows, words.student_words, words.count)
    tokens = words.teacher_input.tokens
    two = spelled(teacher.loaded.tokenizer, tokens, words.teacher_rows, words.teacher_words, words.count)
    if kind == "wordpiece":
        expected = [word for text in lower for word in text.replace(".", " .").replace(",", " ,").split()]
        assert one == two == expected
        # and the teacher reads what it would have read
        direct = teacher.loaded.tokenizer.pack(lower)
        assert torch.equal(words.teacher_input.tokens, direct.tokens) and words.teacher_input.bounds == direct.bounds
        assert torch.equal(words.teacher_input.positions, direct.positions)
    else:
        assert one == two
    assert batch.counts == (float(len(batch.targets)), float(words.count))
    text_tokens = sum(map(len, packed.unpack(packed.tokens))) - 2 * len(packed)
    assert len(words.student_rows) == text_tokens, "all but special ones"


@pytest.mark.parametrize(("ours", "theirs"), [("wordpiece", "bpe"), ("unigram", "bpe"), ("bpe", "bpe")])
def test_a_teacher_that_marks_spaces_reads_them(ours: str, theirs: str) -> None:
    """Each word as it stands behind a space, which many vocabularies do not have in their tokens."""
    own, other = tokenizer(ours, 300), tokenizer(theirs, 320)
    teacher, texts = EncoderTeacher(bare(other, 8), own), [f" {text.lower()}" for text in TEXTS]
    packed = pack_samples(samples(own, texts))
    free = distillation(teacher, own, 8).is_text_id
    words = teacher.align_words(packed, packed.tokens.numpy(), free)
    direct = other.pack(texts)
    assert torch.equal(words.teacher_input.tokens, direct.tokens) and words.teacher_input.bounds == direct.bounds


def test_the_loss_is_a_plain_loops() -> None:
    teacher = EncoderTeacher(bare(MANY, 12), FEW)
    student = with_head(bare(FEW, 8, seed=2), "masked_lm").eval()
    objective = distillation(teacher, FEW, 8, weight_by_term={"mlm": 1.0, "hidden_states": 3.0})
    training_samples = samples(FEW)
    teacher.estimate_statistics(training_samples[:2], objective.is_text_id)
    batch = objective.batch(training_samples, [1, 2, 3, 4])
    masked, term = objective.terms(student, batch)
    words = batch.distillation.words
    rows, theirs = student.model(batch.packed), teacher.loaded.model(words.teacher_input)
    losses = []
    for word in range(words.count):
        pairs = zip(words.student_rows, words.student_words, strict=True)
        ours = torch.stack([rows[place] for place, at in pairs if at == word])
        state = torch.stack(
            [theirs[p] for p, at in zip(words.teacher_rows, words.teacher_words, strict=True) if at == word]
        ).mean(0)
        state = (state - teacher.mean) / teacher.deviation
        losses.append(((objective.modules["states"](ours.mean(0)) - state) ** 2).mean())
    assert torch.allclose(term.losses, torch.stack(losses), rtol=1e-4, atol=1e-5)
    loss = objective.loss(student, batch)
    expected = masked.losses.mean() + 3.0 * torch.stack(losses).mean()
    assert float(loss.sum.detach()) / loss.count == pytest.approx(float(expected.detach()), rel=1e-4)
    measured = objective.measure(student, batch)
    assert (
        set(measured) == {"mlm_loss", "mlm_accuracy", "hidden_states_loss"}
        and measured["hidden_states_loss"][1] == words.count
    )


def test_the_mean_of_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    means = mean_rows(rows, np.array([1, 2, 5]), np.array([0, 0, 2]), 3)
    assert means[0].tolist() == [3.0, 4.0] and means[2].tolist() == [10.0, 11.0]


def test_the_mean_of_rows_in_bfloat16_is_rounded_once() -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    places, owners = np.arange(2000), np.repeat([0, 1], [1331, 669])
    exact = mean_rows(rows.double(), places, owners, 2)
    assert torch.equal(mean_rows(rows, places, owners, 2), exact.bfloat16())


def test_states_are_measured_in_deviations() -> None:
    teacher = EncoderTeacher(bare(MANY, 12), FEW)
    objective, training_samples = distillation(teacher, FEW, 8), samples(FEW)
    teacher.estimate_statistics(training_samples, objective.is_text_id)
    packed = pack_samples(training_samples)
    states = teacher.word_states(teacher.align_words(packed, packed.tokens.numpy(), objective.is_text_id))
    assert torch.allclose(states.mean(0), torch.zeros(12), atol=1e-5)
    assert torch.allclose(states.std(0), torch.ones(12), atol=1e-4)


def test_no_gradient_reaches_the_teacher() -> None:
    loaded = bare(MANY, 12).train()
    before = {name: each.clone() for name, each in loaded.named_tensors().items()}
    teacher = EncoderTeacher(loaded, FEW)
    assert not teacher.loaded.training
    student = with_head(bare(FEW, 8, seed=2), "masked_lm")
    objective = distillation(teacher, FEW, 8)
    objective.loss(student, objective.batch(samples(FEW), [1, 2, 3, 4])).sum.backward()
    assert all(each.grad is None and not each.requires_grad for each in teacher.loaded.parameters())
    assert all(torch.equal(each, before[name]) for name, each in teacher.loaded.named_tensors().items())
    project: Any = objective.modules["states"]
    assert project.weight.grad is not None and bool(project.weight.grad.any())
    assert objective.extra_module is objective.modules
    reached = {
        name for name, each in student.named_tensors().items() if each.grad is not None and bool(each.grad.any())
    }
    assert any("blocks.0" in name for name in reached)


def test_the_same_model_has_nothing_to_learn_from_itself() -> None:
    loaded = with_head(bare(MANY, 8), "masked_lm").eval()
    teacher = EncoderTeacher(loaded, MANY)
    objective = distillation(teacher, MANY, 8, mask_prob=1e-3)
    project: Any = objective.modules["states"]
    with torch.no_grad():
        project.weight.copy_(torch.eye(8))
        project.bias.zero_()
    (training_sample, *_) = samples(MANY)

    def kept(key: int) -> Batch:
        return objective.batch([training_sample], [key])

    original = pack_samples([training_sample]).tokens
    batch = next(each for each in map(kept, range(500)) if torch.equal(each.packed.tokens, original))
    _, term = objective.terms(loaded, batch)
    assert len(term.losses) > 10 and term.losses.detach().abs().max() == 0
    other = next(each for each in map(kept, range(500)) if not torch.equal(each.packed.tokens, original))
    far = objective.terms(loaded, other)[1].losses.detach()
    assert ((far > 0).sum() > 5) and (far == 0).any(), "a hidden token is seen in all of its own sequence"


def test_words_past_the_teachers_limit_are_left_out() -> None:
    long = [" ".join(TEXTS), TEXTS[0]]
    teacher, whole = EncoderTeacher(bare(MANY, 8, places=20), FEW), EncoderTeacher(bare(MANY, 8), FEW)
    objective = distillation(teacher, FEW, 8)
    training_samples = samples(FEW, long)
    packed = pack_samples(training_samples)
    tokens = packed.tokens.numpy()
    cut, all_words = (each.align_words(packed, tokens, objective.is_text_id) for each in (teacher, whole))
    assert cut.count < all_words.count
    assert max(cut.teacher_input.lengths) <= 20 < max(all_words.teacher_input.lengths)
    ours = spelled(FEW, packed.tokens, cut.student_rows, cut.student_words, cut.count)
    theirs = spelled(MANY, cut.teacher_input.tokens, cut.teacher_rows, cut.teacher_words, cut.count)
    assert ours == theirs and "" not in ours
    every = spelled(FEW, packed.tokens, all_words.student_rows, all_words.student_words, all_words.count)
    first = ours.index(".") if cut.count else 0
    assert ours[:first] == every[:first]
    batch = objective.batch(training_samples, [1])
    student = with_head(bare(FEW, 8, places=600, seed=2), "masked_lm")
    assert len(objective.terms(student, batch)[1].losses) == cut.count == batch.counts[1]


def test_a_teacher_needs_a_tokenizer() -> None:
    loaded = bare(MANY, 8)
    alone = ModelBundle(loaded.config, None, "there")
    with pytest.raises(HeedfulError, match=r"there has no tokenizer, which a teacher needs"):
        EncoderTeacher(alone, FEW)


def test_the_head_is_that_of_masked_tokens() -> None:
    assert isinstance(with_head(bare(FEW, 8), "masked_lm").config.head, MaskedTokens)
    teacher = EncoderTeacher(bare(MANY, 8), FEW)
    weights = {"hidden_states": 2.0, "mlm": 1.0, "pair_similarity": 0.0}
    objective = distillation(teacher, FEW, 8, weight_by_term=weights)
    assert (objective.names, objective.term_weights) == (("mlm", "hidden_states"), (1.0, 2.0))


# -- texts and pairs --------------------------------------------------------------------------------------------------

ALL = {"mlm": 1.0, "hidden_states": 2.0, "sentence_embedding": 3.0, "pair_similarity": 4.0}
WINDOWS = WindowSettings(short_window_prob=0.7, max_sentences=2, pair_prob=0.5)


@cache
def corpus() -> Corpus:
    """Invented documents in tokens of `FEW`."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_corpus(folder, make_documents(80, seed=5), FEW)


def planned(neighbours: Neighbours | None = None) -> WindowPlan:
    single, pair = SpecialTokenTemplate.of(FEW, pair=False), SpecialTokenTemplate.of(FEW, pair=True)
    numbers = np.arange(len(corpus()))
    return plan_windows(corpus(), numbers, WINDOWS, single=single, pair=pair, length=120, seed=3, neighbours=neighbours)


def packs_of(plan: WindowPlan) -> PackedSequences:
    single, pair = SpecialTokenTemplate.of(FEW, pair=False), SpecialTokenTemplate.of(FEW, pair=True)
    return PackedSequences(corpus(), single, plan.ranges, 220, 3, plan.targets, pair=pair)


def text(start: int, stop: int) -> str:
    return FEW.decode(corpus().tokens(start, stop).tolist())


def test_windows_cover_every_document_and_pairs_are_neighbours_or_from_anywhere() -> None:
    windows, short, follows = cut_documents(corpus(), np.arange(len(corpus())), 80, WINDOWS, 3)
    flat = windows[:, 0]
    assert int((flat[:, 1] - flat[:, 0]).sum()) == corpus().count, "every token is in one window"
    assert (flat[1:, 0] == flat[:-1, 1]).all() and 0 < short.mean() < 1
    bounds = {int(corpus().segments[first]) for first in corpus().documents[:-1]}
    assert {int(start) for (start, _), later in zip(flat, follows, strict=True) if not later} == bounds
    for (start, stop), is_short in zip(flat.tolist(), short.tolist(), strict=True):
        assert not is_short or text(start, stop).count(".") <= 2
    plan = planned()
    offset, one, two = plan.targets.T
    pairs = np.flatnonzero(offset)
    next_to = plan.ranges[pairs, 0, 1] == plan.ranges[pairs, 1, 0]
    assert 0.25 < next_to.mean() < 0.75, "about half of the pairs are neighbours"
    assert (plan.texts[one[pairs], 0] == plan.ranges[pairs, 0]).all()
    assert (plan.texts[two[pairs], 0] == plan.ranges[pairs, 1]).all()
    singles = np.flatnonzero(offset == 0)
    seen = np.concatenate([one[singles], one[pairs], two[pairs]])
    assert set(seen.tolist()) == set(range(len(plan.texts)))
    assert (planned().ranges == plan.ranges).all(), "a plan is a function of its seed"


def test_pairs_with_the_nearest_text() -> None:
    pool = sample_texts(corpus(), np.arange(len(corpus())), 20, 40, WINDOWS, 3)
    nearest = np.roll(np.arange(len(pool)), 1)
    plan = planned(Neighbours(texts=pool, nearest=nearest))
    count = len(plan.texts) - len(pool)
    pairs = plan.targets[plan.targets[:, 0] > 0]
    near = pairs[pairs[:, 1] >= count, 1:] - count
    assert 0.15 < len(near) / len(pairs) < 0.75, "others are drawn as often, and fit less often"
    assert (nearest[near[:, 0]] == near[:, 1]).all()


def test_nearest_texts_are_those_of_a_plain_search() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), dim=-1)
    scores = vectors @ vectors.T - 3 * torch.eye(50)
    assert (nearest_texts(vectors.numpy(), rows=7) == scores.argmax(-1).numpy()).all()


def test_each_term_equals_a_plain_loop() -> None:
    """The teacher reads both texts of a pair by themselves; the student reads them as one packed sequence."""
    teacher, student = EncoderTeacher(bare(MANY, 12), FEW), with_head(bare(FEW, 8, seed=2), "masked_lm").eval()
    objective = distillation(teacher, FEW, 8, weight_by_term=ALL, masked_sequence_prob=0.6)
    packs = packs_of(planned())
    training_samples = [packs[index] for index in range(12)]
    teacher.estimate_statistics(training_samples, objective.is_text_id)
    assert teacher.basis is not None
    assert torch.allclose(teacher.basis.T @ teacher.basis, torch.eye(12), atol=1e-4)
    batch = objective.batch(training_samples, list(range(12)))
    terms = dict(zip(objective.names, objective.terms(student, batch), strict=True))
    columns = np.concatenate([sample.target for sample in training_samples])
    packed = pack_samples(training_samples)
    hidden = student.model(batch.packed)
    singles, pairs = [], []
    for tokens, (offset, _, _), span in zip(packed.unpack(packed.tokens), columns, packed.spans(), strict=True):
        ids = tokens.tolist()
        texts = [ids[1:-1]] if not offset else [ids[1 : offset - 1], ids[offset:-1]]
        assert MANY is teacher.loaded.tokenizer
        batches = [MANY.pack([FEW.decode(each)]) for each in texts]
        vectors = [torch.nn.functional.normalize(teacher.loaded.model(each).mean(0), dim=0) for each in batches]
        if offset:
            score = objective.modules["pairs"](hidden[span][0])[0]
            pairs.append((score - vectors[0] @ vectors[1]) ** 2)
        else:
            target = vectors[0] @ teacher.basis[:, :8]
            singles.append(1 - torch.nn.functional.cosine_similarity(hidden[span].mean(0), target, dim=0))
    assert len(pairs) > 2 and len(singles) > 2
    assert torch.allclose(terms["sentence_embedding"].losses, torch.stack(singles), atol=1e-5)
    assert torch.allclose(terms["pair_similarity"].losses, torch.stack(pairs), atol=1e-5)
    assert batch.counts == tuple(term.count for term in terms.values())
    loss = objective.loss(student, batch)
    expected = sum(ALL[name] * float(term.losses.detach().mean()) for name, term in terms.items())
    assert float(loss.sum.detach()) / loss.count == pytest.approx(expected, rel=1e-5)


def test_some_sequences_stay_unmasked() -> None:
    teacher, packs = EncoderTeacher(bare(MANY, 12), FEW), packs_of(planned())
    objective = distillation(teacher, FEW, 8, mask_prob=0.3, masked_sequence_prob=0.5)
    masked = []
    for index in range(len(packs)):
        batch = objective.batch([packs[index]], [index])
        changed = batch.packed.tokens != pack_samples([packs[index]]).tokens
        masked += [bool(part.any()) for part in batch.packed.unpack(changed)]
        share = len(batch.targets) / max(1, int(objective.is_text_id[packs[index].tokens].sum()))
        assert share <= 0.31
    assert 0.3 < np.mean(masked) < 0.7


def test_cached_vectors_are_those_of_the_teacher_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_cache, "CHUNK_WINDOWS", 8)
    teacher, plan = EncoderTeacher(bare(MANY, 12), FEW), planned()
    weights = {"sentence_embedding": 1.0, "pair_similarity": 1.0}
    live = distillation(teacher, FEW, 8, weight_by_term=weights)
    cached = VectorCache(tmp_path / "cache", teacher, "digest", corpus(), plan.texts)
    calls: list[int] = []

    def stop(done: int, count: int) -> None:
        calls.append(done)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached.fill(live.is_text_id, on_progress=stop)
    first = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.npy")}
    assert len(first) == 2
    cached.fill(live.is_text_id)
    again = VectorCache(tmp_path / "whole", teacher, "digest", corpus(), plan.texts)
    again.fill(live.is_text_id)
    for path in (tmp_path / "whole").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "cache" / path.name).read_bytes()
    assert all((tmp_path / "cache" / name).read_bytes() == held for name, held in first.items())
    packs = packs_of(plan)
    training_samples = [packs[index] for index in range(12)]
    teacher.estimate_statistics(training_samples, live.is_text_id)
    student = with_head(bare(FEW, 8, seed=2), "masked_lm").eval()
    from_disk = replace(live, vectors=cached)
    one, two = live.batch(training_samples, list(range(12))), from_disk.batch(training_samples, list(range(12)))
    assert one.distillation.words is not None and two.distillation.words is None, "the teacher does not run"
    for mine, theirs in zip(live.terms(student, one), from_disk.terms(student, two), strict=True):
        assert torch.allclose(mine.losses, theirs.losses, atol=2e-3)
    with pytest.raises(HeedfulError, match="a different teacher, corpus or plan"):
        VectorCache(tmp_path / "cache", teacher, "other", corpus(), plan.texts).fill(live.is_text_id)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"weight_by_term": {"word_states": 1.0}}, "word_states"),
        ({"weight_by_term": {"mlm": 0.0}}, "no weight above 0"),
        ({"masked_sequence_prob": 0.0}, "masked_sequence_prob is 0.0"),
    ],
)
def test_what_cannot_be_learned_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        distillation(EncoderTeacher(bare(MANY, 12), FEW), FEW, 8, **more)

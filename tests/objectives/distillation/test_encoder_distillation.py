"""Distillation of an encoder: alignment of words in two vocabularies, terms compared with loops, and caches."""

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
from heedful.model.config import (
    DenseLayer,
    EmbeddingConfig,
    Learned,
    MaskedTokens,
    ModelConfig,
    SentenceEmbedding,
    StackConfig,
)
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

TEXTS = [" ".join(document) for document in make_documents(8, seed=3, sentences=(1, 2))]


@cache
def make_tokenizer(kind: str, vocabulary: int) -> Tokenizer:
    """Return a tokenizer trained on TEXTS; with a small vocabulary, its tokens are short."""
    return train_on([[text] for text in TEXTS], algorithm=kind, vocab_size=vocabulary)


SMALL_VOCABULARY, LARGE_VOCABULARY = make_tokenizer("wordpiece", 70), make_tokenizer("wordpiece", 200)


def make_encoder(tokenizer: Tokenizer, width: int, max_positions: int = 200, seed: int = 1) -> ModelBundle:
    """Return an encoder of two layers with random weights and biases."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer.size, width=width, positions=Learned(count=max_positions), types=2, norm="layer"
    )
    stack = StackConfig(width=width, layers=2, heads=2, head_width=width // 2, inner_width=32, dropout=0.3)
    encoder = create(
        BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack)), tokenizer, seed=seed
    )
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return encoder


def make_samples(tokenizer: Tokenizer, texts: list[str] = TEXTS) -> list[Sample]:
    """Return samples of two texts each."""
    encoded = tokenizer.encode_batch(texts)
    return [
        Sample.of([first.ids, second.ids], [first.types, second.types])
        for first, second in zip(encoded[::2], encoded[1::2], strict=True)
    ]


def make_objective(teacher: EncoderTeacher, tokenizer: Tokenizer, width: int, **fields: Any) -> EncoderDistillation:
    """Return an objective with randomly initialised projections."""
    return EncoderDistillation(
        tokenizer=tokenizer, teacher=teacher, modules=new_modules(width, teacher.hidden_size, 5), **fields
    )


def spell_words(
    tokenizer: Tokenizer, tokens: torch.Tensor, rows: np.ndarray, word_of: np.ndarray, count: int
) -> list[str]:
    """Return each word, spelled by its tokens.

    Args:
        tokenizer: Tokenizer of the tokens.
        tokens: Token ids.
        rows: Positions of the tokens of words.
        word_of: Index of the word of each of these tokens.
        count: Number of words.
    """
    words = [""] * count
    for row, word in zip(rows.tolist(), word_of.tolist(), strict=True):
        words[word] += tokenizer.name(int(tokens[row])).removeprefix("##").replace("\u0120", "")
    return words


@pytest.mark.parametrize(("vocab_size", "kind"), [(70, "wordpiece"), (200, "wordpiece"), (300, "bpe")])
def test_words_are_aligned(vocab_size: int, kind: str) -> None:
    tokenizer = make_tokenizer(kind, vocab_size)
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY if vocab_size != 200 else SMALL_VOCABULARY, 8), tokenizer)
    objective = make_objective(teacher, tokenizer, 8)
    lower = [text.lower() for text in TEXTS]
    batch = objective.batch(make_samples(tokenizer, lower), [1, 2, 3, 4])
    words, packed = batch.distillation.words, pack_samples(make_samples(tokenizer, lower))
    assert teacher.loaded.tokenizer is not None
    student_words = spell_words(tokenizer, packed.tokens, words.student_positions, words.student_word_of, words.count)
    tokens = words.teacher_input.tokens
    teacher_words = spell_words(
        teacher.loaded.tokenizer, tokens, words.teacher_positions, words.teacher_word_of, words.count
    )
    if kind == "wordpiece":
        expected = [word for text in lower for word in text.replace(".", " .").replace(",", " ,").split()]
        assert student_words == expected and teacher_words == expected
        # the input of the teacher equals the encoding of the texts by its own tokenizer
        direct = teacher.loaded.tokenizer.pack(lower)
        assert torch.equal(words.teacher_input.tokens, direct.tokens)
        assert words.teacher_input.bounds == direct.bounds
        assert torch.equal(words.teacher_input.positions, direct.positions)
    else:
        assert student_words == teacher_words
    assert batch.counts == (float(len(batch.targets)), float(words.count))
    text_tokens = sum(map(len, packed.unpack(packed.tokens))) - 2 * len(packed)
    assert len(words.student_positions) == text_tokens, "some tokens that are not special are in no word"


@pytest.mark.parametrize(("kind", "teacher_kind"), [("wordpiece", "bpe"), ("unigram", "bpe"), ("bpe", "bpe")])
def test_a_teacher_that_marks_spaces_reads_them(kind: str, teacher_kind: str) -> None:
    """The teacher reads each word with the space before it, which tokens of the student may lack."""
    tokenizer, teacher_tokenizer = make_tokenizer(kind, 300), make_tokenizer(teacher_kind, 320)
    teacher = EncoderTeacher(make_encoder(teacher_tokenizer, 8), tokenizer)
    texts = [f" {text.lower()}" for text in TEXTS]
    packed = pack_samples(make_samples(tokenizer, texts))
    is_text_id = make_objective(teacher, tokenizer, 8).is_text_id
    words = teacher.align_words(packed, packed.tokens.numpy(), is_text_id)
    direct = teacher_tokenizer.pack(texts)
    assert torch.equal(words.teacher_input.tokens, direct.tokens) and words.teacher_input.bounds == direct.bounds


def test_the_loss_equals_that_of_a_loop() -> None:
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY)
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, seed=2), "masked_lm").eval()
    objective = make_objective(teacher, SMALL_VOCABULARY, 8, weight_by_term={"mlm": 1.0, "hidden_states": 3.0})
    training_samples = make_samples(SMALL_VOCABULARY)
    teacher.estimate_statistics(training_samples[:2], objective.is_text_id)
    batch = objective.batch(training_samples, [1, 2, 3, 4])
    masked, term = objective.terms(student, batch)
    words = batch.distillation.words
    student_states, teacher_states = student.model(batch.packed), teacher.loaded.model(words.teacher_input)
    losses = []
    for word in range(words.count):
        student_state = student_states[words.student_positions[words.student_word_of == word]].mean(0)
        teacher_state = teacher_states[words.teacher_positions[words.teacher_word_of == word]].mean(0)
        standardised = (teacher_state - teacher.mean) / teacher.deviation
        losses.append(((objective.modules["states"](student_state) - standardised) ** 2).mean())
    assert torch.allclose(term.losses, torch.stack(losses), rtol=1e-4, atol=1e-5)
    loss = objective.loss(student, batch)
    expected = masked.losses.mean() + 3.0 * torch.stack(losses).mean()
    assert float(loss.sum.detach()) / loss.count == pytest.approx(float(expected.detach()), rel=1e-4)
    metrics = objective.measure(student, batch)
    assert set(metrics) == {"mlm_loss", "mlm_accuracy", "hidden_states_loss"}
    assert metrics["hidden_states_loss"][1] == words.count


def test_the_mean_of_rows() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    means = mean_rows(rows, np.array([1, 2, 5]), np.array([0, 0, 2]), 3)
    assert means[0].tolist() == [3.0, 4.0] and means[2].tolist() == [10.0, 11.0]


def test_the_mean_of_rows_in_bfloat16_is_rounded_once() -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    row_indices, word_of = np.arange(2000), np.repeat([0, 1], [1331, 669])
    exact = mean_rows(rows.double(), row_indices, word_of, 2)
    assert torch.equal(mean_rows(rows, row_indices, word_of, 2), exact.bfloat16())


def test_teacher_states_are_standardised() -> None:
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY)
    objective, training_samples = make_objective(teacher, SMALL_VOCABULARY, 8), make_samples(SMALL_VOCABULARY)
    teacher.estimate_statistics(training_samples, objective.is_text_id)
    packed = pack_samples(training_samples)
    states = teacher.word_states(teacher.align_words(packed, packed.tokens.numpy(), objective.is_text_id))
    assert torch.allclose(states.mean(0), torch.zeros(12), atol=1e-5)
    assert torch.allclose(states.std(0), torch.ones(12), atol=1e-4)


def test_no_gradient_reaches_the_teacher() -> None:
    loaded = make_encoder(LARGE_VOCABULARY, 12).train()
    before = {name: tensor.clone() for name, tensor in loaded.named_tensors().items()}
    teacher = EncoderTeacher(loaded, SMALL_VOCABULARY)
    assert not teacher.loaded.training
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, seed=2), "masked_lm")
    objective = make_objective(teacher, SMALL_VOCABULARY, 8)
    objective.loss(student, objective.batch(make_samples(SMALL_VOCABULARY), [1, 2, 3, 4])).sum.backward()
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in teacher.loaded.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.loaded.named_tensors().items())
    project: Any = objective.modules["states"]
    assert project.weight.grad is not None and bool(project.weight.grad.any())
    assert objective.extra_module is objective.modules
    with_gradient = [name for name, x in student.named_tensors().items() if x.grad is not None and x.grad.any()]
    assert any("blocks.0" in name for name in with_gradient)


def test_a_model_that_is_its_own_teacher_has_no_loss_without_masks() -> None:
    loaded = with_head(make_encoder(LARGE_VOCABULARY, 8), "masked_lm").eval()
    teacher = EncoderTeacher(loaded, LARGE_VOCABULARY)
    objective = make_objective(teacher, LARGE_VOCABULARY, 8, mask_prob=1e-3)
    project: Any = objective.modules["states"]
    with torch.no_grad():
        project.weight.copy_(torch.eye(8))
        project.bias.zero_()
    (training_sample, *_) = make_samples(LARGE_VOCABULARY)

    def make_batch(key: int) -> Batch:
        return objective.batch([training_sample], [key])

    original = pack_samples([training_sample]).tokens
    batch = next(batch for batch in map(make_batch, range(500)) if torch.equal(batch.packed.tokens, original))
    _, term = objective.terms(loaded, batch)
    assert len(term.losses) > 10 and term.losses.detach().abs().max() == 0
    masked = next(batch for batch in map(make_batch, range(500)) if not torch.equal(batch.packed.tokens, original))
    distances = objective.terms(loaded, masked)[1].losses.detach()
    # a masked token changes the states of the other words of its sequence, but not those of the other sequence
    assert (distances > 0).sum() > 5 and (distances == 0).any()


def test_words_past_the_teachers_limit_are_left_out() -> None:
    texts = [" ".join(TEXTS), TEXTS[0]]
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 8, max_positions=20), SMALL_VOCABULARY)
    unlimited = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 8), SMALL_VOCABULARY)
    objective = make_objective(teacher, SMALL_VOCABULARY, 8)
    training_samples = make_samples(SMALL_VOCABULARY, texts)
    packed = pack_samples(training_samples)
    tokens = packed.tokens.numpy()
    cut, all_words = (model.align_words(packed, tokens, objective.is_text_id) for model in (teacher, unlimited))
    assert cut.count < all_words.count
    assert max(cut.teacher_input.lengths) <= 20 < max(all_words.teacher_input.lengths)
    student_spelling = spell_words(
        SMALL_VOCABULARY, packed.tokens, cut.student_positions, cut.student_word_of, cut.count
    )
    teacher_spelling = spell_words(
        LARGE_VOCABULARY, cut.teacher_input.tokens, cut.teacher_positions, cut.teacher_word_of, cut.count
    )
    assert student_spelling == teacher_spelling and "" not in student_spelling
    full_spelling = spell_words(
        SMALL_VOCABULARY, packed.tokens, all_words.student_positions, all_words.student_word_of, all_words.count
    )
    first = student_spelling.index(".") if cut.count else 0
    assert student_spelling[:first] == full_spelling[:first]
    batch = objective.batch(training_samples, [1])
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, max_positions=600, seed=2), "masked_lm")
    assert len(objective.terms(student, batch)[1].losses) == cut.count == batch.counts[1]


def test_the_limit_of_the_teachers_tokenizer_holds_below_that_of_its_positions() -> None:
    loaded = make_encoder(LARGE_VOCABULARY.limited(15), 8)
    teacher = EncoderTeacher(loaded, SMALL_VOCABULARY)
    packed = pack_samples(make_samples(SMALL_VOCABULARY, [" ".join(TEXTS), TEXTS[0]]))
    is_text_id = make_objective(teacher, SMALL_VOCABULARY, 8).is_text_id
    words = teacher.align_words(packed, packed.tokens.numpy(), is_text_id)
    assert loaded.max_length == 15 and 12 <= max(words.teacher_input.lengths) <= 15


def test_a_word_after_a_line_end_is_a_word_of_its_own() -> None:
    """The teacher's input equals its own encoding of the text, and no word extends over a line end."""
    texts = ["the fox ran.\nthe dog slept\n\nno one came", "the end.\nno one slept\n the dog ran"]
    tokenizer = train_on([texts] * 9, algorithm="bpe", vocab_size=300)
    teacher = EncoderTeacher(make_encoder(train_on([texts] * 9, algorithm="wordpiece", vocab_size=90), 8), tokenizer)
    assert teacher.tokenizer.special.unknown is not None
    packed = pack_samples(make_samples(tokenizer, texts))
    is_text_id = make_objective(teacher, tokenizer, 8).is_text_id
    words = teacher.align_words(packed, packed.tokens.numpy(), is_text_id)
    direct = teacher.tokenizer.pack(texts)
    assert torch.equal(words.teacher_input.tokens, direct.tokens) and words.teacher_input.bounds == direct.bounds
    spelling = spell_words(tokenizer, packed.tokens, words.student_positions, words.student_word_of, words.count)
    assert spelling == " ".join(texts).split()
    states = teacher.word_states(words)
    assert len(states) == words.count and bool(states.isfinite().all())


def test_a_teacher_needs_a_tokenizer() -> None:
    loaded = make_encoder(LARGE_VOCABULARY, 8)
    without_tokenizer = ModelBundle(loaded.config, None, "model-dir")
    with pytest.raises(HeedfulError, match=r"model-dir has no tokenizer, which a teacher needs"):
        EncoderTeacher(without_tokenizer, SMALL_VOCABULARY)


def test_terms_of_weight_0_are_left_out() -> None:
    assert isinstance(with_head(make_encoder(SMALL_VOCABULARY, 8), "masked_lm").config.head, MaskedTokens)
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 8), SMALL_VOCABULARY)
    weights = {"hidden_states": 2.0, "mlm": 1.0, "pair_similarity": 0.0}
    objective = make_objective(teacher, SMALL_VOCABULARY, 8, weight_by_term=weights)
    assert (objective.names, objective.term_weights) == (("mlm", "hidden_states"), (1.0, 2.0))


# -- windows and pairs ------------------------------------------------------------------------------------------------

ALL_TERMS = {"mlm": 1.0, "hidden_states": 2.0, "sentence_embedding": 3.0, "pair_similarity": 4.0}
WINDOWS = WindowSettings(short_window_prob=0.7, max_sentences=2, pair_prob=0.5)


@cache
def corpus() -> Corpus:
    """Return a corpus of generated documents in tokens of SMALL_VOCABULARY."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_corpus(folder, make_documents(80, seed=5), SMALL_VOCABULARY)


def make_plan(neighbours: Neighbours | None = None) -> WindowPlan:
    """Return a plan of windows and pairs over the corpus."""
    single = SpecialTokenTemplate.of(SMALL_VOCABULARY, pair=False)
    pair = SpecialTokenTemplate.of(SMALL_VOCABULARY, pair=True)
    numbers = np.arange(len(corpus()))
    return plan_windows(corpus(), numbers, WINDOWS, single=single, pair=pair, length=120, seed=3, neighbours=neighbours)


def make_packs(plan: WindowPlan) -> PackedSequences:
    """Return the packed sequences of a plan."""
    single = SpecialTokenTemplate.of(SMALL_VOCABULARY, pair=False)
    pair = SpecialTokenTemplate.of(SMALL_VOCABULARY, pair=True)
    return PackedSequences(corpus(), single, plan.ranges, 220, 3, plan.targets, pair=pair)


def corpus_text(start: int, stop: int) -> str:
    """Return the text of a token range of the corpus."""
    return SMALL_VOCABULARY.decode(corpus().tokens(start, stop).tolist())


def test_windows_cover_every_document_and_pairs_are_adjacent_or_random() -> None:
    windows, is_short_mask, continues = cut_documents(corpus(), np.arange(len(corpus())), 80, WINDOWS, 3)
    flat = windows[:, 0]
    assert int((flat[:, 1] - flat[:, 0]).sum()) == corpus().count, "the windows do not cover the corpus"
    assert (flat[1:, 0] == flat[:-1, 1]).all() and 0 < is_short_mask.mean() < 1
    document_starts = {int(corpus().segments[first]) for first in corpus().documents[:-1]}
    assert {int(start) for start in flat[~np.asarray(continues), 0]} == document_starts
    for (start, stop), is_short in zip(flat.tolist(), is_short_mask.tolist(), strict=True):
        assert not is_short or corpus_text(start, stop).count(".") <= 2
    plan = make_plan()
    offset, first, second = plan.targets.T
    pairs = np.flatnonzero(offset)
    is_adjacent = plan.ranges[pairs, 0, 1] == plan.ranges[pairs, 1, 0]
    assert 0.25 < is_adjacent.mean() < 0.75, "the share of adjacent pairs is not about a half"
    assert (plan.texts[first[pairs], 0] == plan.ranges[pairs, 0]).all()
    assert (plan.texts[second[pairs], 0] == plan.ranges[pairs, 1]).all()
    singles = np.flatnonzero(offset == 0)
    used_texts = np.concatenate([first[singles], first[pairs], second[pairs]])
    assert set(used_texts.tolist()) == set(range(len(plan.texts)))
    assert (make_plan().ranges == plan.ranges).all(), "plans with the same seed differ"


def test_pairs_with_the_nearest_text() -> None:
    pool = sample_texts(corpus(), np.arange(len(corpus())), 20, 40, WINDOWS, 3)
    nearest = np.roll(np.arange(len(pool)), 1)
    plan = make_plan(Neighbours(texts=pool, nearest=nearest))
    count = len(plan.texts) - len(pool)
    pairs = plan.targets[plan.targets[:, 0] > 0]
    near = pairs[pairs[:, 1] >= count, 1:] - count
    assert 0.15 < len(near) / len(pairs) < 0.75, "the kinds of pairs are not about equally frequent"
    assert (nearest[near[:, 0]] == near[:, 1]).all()


def test_nearest_texts_equal_those_of_a_full_search() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), dim=-1)
    scores = vectors @ vectors.T - 3 * torch.eye(50)
    assert (nearest_texts(vectors.numpy(), rows=7) == scores.argmax(-1).numpy()).all()


def test_each_term_equals_that_of_a_loop() -> None:
    """The teacher reads both texts of a pair by themselves; the student reads them as one packed sequence."""
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY)
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, seed=2), "masked_lm").eval()
    objective = make_objective(teacher, SMALL_VOCABULARY, 8, weight_by_term=ALL_TERMS, masked_sequence_prob=0.6)
    packs = make_packs(make_plan())
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
        assert LARGE_VOCABULARY is teacher.loaded.tokenizer
        batches = [LARGE_VOCABULARY.pack([SMALL_VOCABULARY.decode(text)]) for text in texts]
        means = [teacher.loaded.model(text_batch).mean(0) for text_batch in batches]
        vectors = [torch.nn.functional.normalize(mean, dim=0) for mean in means]
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
    expected = sum(ALL_TERMS[name] * float(term.losses.detach().mean()) for name, term in terms.items())
    assert float(loss.sum.detach()) / loss.count == pytest.approx(expected, rel=1e-5)


def test_some_sequences_stay_unmasked() -> None:
    teacher = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY)
    packs = make_packs(make_plan())
    objective = make_objective(teacher, SMALL_VOCABULARY, 8, mask_prob=0.3, masked_sequence_prob=0.5)
    masked = []
    for index in range(len(packs)):
        batch = objective.batch([packs[index]], [index])
        changed = batch.packed.tokens != pack_samples([packs[index]]).tokens
        masked += [bool(sequence.any()) for sequence in batch.packed.unpack(changed)]
        share = len(batch.targets) / max(1, int(objective.is_text_id[packs[index].tokens].sum()))
        assert share <= 0.31
    assert 0.3 < np.mean(masked) < 0.7


def test_cached_vectors_are_those_of_the_teacher_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_cache, "CHUNK_WINDOWS", 8)
    teacher, plan = EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY), make_plan()
    weights = {"sentence_embedding": 1.0, "pair_similarity": 1.0}
    live = make_objective(teacher, SMALL_VOCABULARY, 8, weight_by_term=weights)
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
    uninterrupted = VectorCache(tmp_path / "uninterrupted", teacher, "digest", corpus(), plan.texts)
    uninterrupted.fill(live.is_text_id)
    for path in (tmp_path / "uninterrupted").glob("*.npy"):
        assert path.read_bytes() == (tmp_path / "cache" / path.name).read_bytes()
    assert all((tmp_path / "cache" / name).read_bytes() == content for name, content in first.items())
    packs = make_packs(plan)
    training_samples = [packs[index] for index in range(12)]
    teacher.estimate_statistics(training_samples, live.is_text_id)
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, seed=2), "masked_lm").eval()
    from_disk = replace(live, vectors=cached)
    live_batch = live.batch(training_samples, list(range(12)))
    cached_batch = from_disk.batch(training_samples, list(range(12)))
    assert live_batch.distillation.words is not None
    assert cached_batch.distillation.words is None, "the teacher ran although its vectors are cached"
    for live_term, cached_term in zip(
        live.terms(student, live_batch), from_disk.terms(student, cached_batch), strict=True
    ):
        assert torch.allclose(live_term.losses, cached_term.losses, atol=2e-3)
    with pytest.raises(HeedfulError, match="a different teacher, corpus or plan"):
        VectorCache(tmp_path / "cache", teacher, "other", corpus(), plan.texts).fill(live.is_text_id)


def test_embeddings_of_a_dense_layer_are_cached(tmp_path: Path) -> None:
    encoder = make_encoder(LARGE_VOCABULARY, 12)
    config = replace(encoder.config, head=SentenceEmbedding(dense=(DenseLayer(width=5),)))
    teacher, plan = EncoderTeacher(create(config, LARGE_VOCABULARY, seed=1), SMALL_VOCABULARY), make_plan()
    live = make_objective(teacher, SMALL_VOCABULARY, 8, weight_by_term={"sentence_embedding": 1.0})
    cached = VectorCache(tmp_path / "cache", teacher, "digest", corpus(), plan.texts)
    cached.fill(live.is_text_id)
    packs = make_packs(plan)
    training_samples = [packs[index] for index in range(4)]
    student = with_head(make_encoder(SMALL_VOCABULARY, 8, seed=2), "masked_lm").eval()
    teacher.estimate_statistics(training_samples, live.is_text_id)
    losses = []
    for objective in (live, replace(live, vectors=cached)):
        (term,) = objective.terms(student, objective.batch(training_samples, list(range(4))))
        losses.append(term.losses.detach())
    assert len(losses[0]) > 0 and torch.allclose(*losses, atol=2e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_by_term": {"word_states": 1.0}}, "word_states"),
        ({"weight_by_term": {"mlm": 0.0}}, "no weight above 0"),
        ({"masked_sequence_prob": 0.0}, "masked_sequence_prob is 0.0"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        make_objective(
            EncoderTeacher(make_encoder(LARGE_VOCABULARY, 12), SMALL_VOCABULARY), SMALL_VOCABULARY, 8, **fields
        )

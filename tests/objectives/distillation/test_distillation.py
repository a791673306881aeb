"""Distillation: its losses compared with formulas, equal models, the teacher's inputs, and cached teacher outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle, load
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.model.config import StackConfig
from heedful.objectives import Batch, Sample
from heedful.objectives.distillation.losses import (
    cosine_distance,
    kd_kl,
    kd_kl_choices,
    kd_kl_multi_label,
    kd_kl_spans,
    kd_kl_topk,
    relation_kl,
    row_mse,
    similarity_matrix_loss,
    topk_with_rest,
)
from heedful.objectives.distillation.objective import (
    Distillation,
    DistillationLosses,
    HiddenStateLoss,
    RelationLoss,
    state_projections,
)
from heedful.objectives.distillation.teacher import (
    CaptureSpec,
    CaptureTrace,
    OwnedSamples,
    SampleAlignment,
    ScoreKind,
    Teacher,
    align_samples,
    capture,
)
from heedful.objectives.masked_lm import MaskedLM
from heedful.packed import Packed
from heedful.runs.distil import teacher_cache
from heedful.runs.distil.settings import LayersStudent
from heedful.runs.distil.students import _matching_layers, evenly_spread, student_from_layers
from heedful.runs.distil.teacher_cache import CacheFormat, cache_teacher_outputs, online_teacher
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.embed import Embed
from heedful.tasks.multiple_choice import MultipleChoiceTask
from heedful.tasks.qa import QuestionAnswering
from heedful.tasks.rank import Rank, RankTarget
from heedful.tasks.regress import Regress
from heedful.tasks.tag import Tag
from heedful.train import output_cache
from tests.support.model_folders import make_model_dir
from tests.support.tiny_models import save_tiny

TEMPERATURE = 3.0


def softmax(scores: Any) -> Any:
    """Return the softmax over the last axis."""
    exp = np.exp(scores - scores.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def divergence(teacher: Any, student: Any, temperature: float = 1.0) -> Any:
    """Return the Kullback-Leibler divergence of the student's softmax from the teacher's, over the last axis."""
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    return (p * (np.log(p) - np.log(q))).sum(-1)


def random_normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers with a standard deviation of 2."""
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_soft_label_losses_are_kl_times_the_squared_temperature() -> None:
    student, teacher = random_normal(7, 5), random_normal(7, 5, seed=1)
    s, t = student.double().numpy(), teacher.double().numpy()
    expected = TEMPERATURE**2 * divergence(t, s, TEMPERATURE)
    assert np.allclose(kd_kl(student, teacher, TEMPERATURE), expected, atol=1e-5)
    log_q, p = (student / TEMPERATURE).log_softmax(-1), (teacher / TEMPERATURE).softmax(-1)
    torch_kl = torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1)
    assert torch.allclose(kd_kl(student, teacher, TEMPERATURE), torch_kl * TEMPERATURE**2, atol=1e-5)

    # softmax([0, x]) is [1 - sigmoid(x), sigmoid(x)]
    binary_s, binary_t = (np.stack([np.zeros_like(scores), scores], -1) for scores in (s, t))
    expected = TEMPERATURE**2 * divergence(binary_t, binary_s, TEMPERATURE).mean(-1)
    assert np.allclose(kd_kl_multi_label(student, teacher, TEMPERATURE), expected, atol=1e-5)

    spans = ((0, 3), (3, 7))
    student_span, teacher_span = random_normal(7, 2), random_normal(7, 2, seed=1)  # start and end scores
    expected = []
    for start, stop in spans:
        of_text = [scores[start:stop].T.numpy() for scores in (teacher_span, student_span)]  # [2, tokens] each
        expected.append(TEMPERATURE**2 * divergence(*of_text, TEMPERATURE).mean())
    assert np.allclose(kd_kl_spans(student_span, teacher_span, (0, 3, 7), TEMPERATURE), expected, atol=1e-5)

    losses = kd_kl_choices(student[:, 0], teacher[:, 0], [3, 4], TEMPERATURE)
    expected = [divergence(t[start:stop, 0], s[start:stop, 0], TEMPERATURE) for start, stop in spans]
    assert np.allclose(losses, TEMPERATURE**2 * np.array(expected), atol=1e-5)


def test_the_gradient_norm_hardly_depends_on_the_temperature() -> None:
    norms = []
    for temperature in (8.0, 16.0):
        student = random_normal(4, 6).requires_grad_()
        kd_kl(student, random_normal(4, 6, seed=1), temperature).sum().backward()
        assert student.grad is not None
        norms.append(float(student.grad.norm()))
    assert math.isclose(*norms, rel_tol=0.15), "without the factor T², the norm would fall to a quarter"


def test_top_k_loss_unites_all_other_classes() -> None:
    student, teacher = random_normal(5, 9), random_normal(5, 9, seed=1)
    ids, p = topk_with_rest(teacher, 9, TEMPERATURE)
    assert torch.allclose(kd_kl_topk(student, ids, p, TEMPERATURE), kd_kl(student, teacher, TEMPERATURE), atol=1e-5)
    ids, p = topk_with_rest(teacher, 3, TEMPERATURE)
    probs = [softmax(scores.double().numpy() / TEMPERATURE) for scores in (student, teacher)]
    order = np.argsort(-probs[1], -1)
    top_probs = [np.take_along_axis(prob, order[:, :3], 1) for prob in probs]
    united_s, united_t = (np.concatenate([prob, 1 - prob.sum(1, keepdims=True)], 1) for prob in top_probs)
    expected = TEMPERATURE**2 * (united_t * np.log(united_t / united_s)).sum(1)
    assert np.allclose(kd_kl_topk(student, ids, p, TEMPERATURE), expected, atol=1e-5)
    assert kd_kl_topk(teacher, ids, p, TEMPERATURE).abs().max() < 1e-5


def test_hidden_state_losses_follow_the_formulas_of_the_papers() -> None:
    student, teacher = random_normal(6, 4), random_normal(6, 4, seed=1)
    s, t = student.double().numpy(), teacher.double().numpy()
    assert np.allclose(row_mse(student, teacher), ((s - t) ** 2).mean(1), atol=1e-5)
    cosine = (s * t).sum(1) / np.linalg.norm(s, axis=1) / np.linalg.norm(t, axis=1)
    assert np.allclose(cosine_distance(student, teacher), 1 - cosine, atol=1e-5)


def test_relation_losses_follow_the_formulas_of_the_papers() -> None:
    student, teacher = random_normal(6, 8), random_normal(6, 12, seed=1)
    heads = 4  # head dimensions of 2 and 3
    expected = []
    for start, stop in ((0, 2), (2, 6)):
        losses = np.zeros(stop - start)
        for head in range(heads):
            s, t = (
                x[start:stop, head * dim : head * dim + dim].double().numpy() for x, dim in ((student, 2), (teacher, 3))
            )
            losses += divergence(t @ t.T / 3**0.5, s @ s.T / 2**0.5) / heads
        expected.append(losses)
    kl_losses = relation_kl((student, student), (teacher, teacher), (0, 2, 6), heads)
    assert np.allclose(kl_losses, np.concatenate(expected), atol=1e-5)

    s, t = (x[2:6].double().numpy().reshape(4, heads, -1) for x in (student, teacher))
    relations = [[x[:, h] @ x[:, h].T / x.shape[2] ** 0.5 for x in (s, t)] for h in range(heads)]
    squares = np.mean([(relation_s - relation_t) ** 2 for relation_s, relation_t in relations], (0, 2))
    square_losses = relation_kl((student, student), (teacher, teacher), (0, 2, 6), heads, squares=True)
    assert np.allclose(square_losses[2:], squares, atol=1e-5)

    s, t = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (student.double().numpy(), teacher.double().numpy()))
    expected_similarity = ((s[:4] @ s[:4].T - t[:4] @ t[:4].T) ** 2).sum(1) / 3
    assert np.allclose(similarity_matrix_loss(student, teacher, 4)[:4], expected_similarity, atol=1e-5)


# -- models -------------------------------------------------------------------------------------------------------

LABELS = ("bad", "fair", "good")
# for each objective: model of `make_model_dir`, kind of scores, constructor of the task, target of all samples
TASKS: dict[str, tuple[str, ScoreKind, Callable[..., Any], Any]] = {
    "classify": ("single", "classes", lambda **k: Classify(labels=LABELS, **k), 1),
    "multiple": ("multiple", "multiple", lambda **k: ClassifyMultiLabel(labels=LABELS, **k), [1.0, 0.0, 1.0]),
    "regress": ("regression", "numbers", lambda **k: Regress(labels=("stars",), **k), 2.0),
    "tag": ("tag", "tokens", lambda **k: Tag(labels=("O",), metric="f1", **k), ((1, 2), (0, 3))),
    "qa": ("span", "span", lambda **k: QuestionAnswering(has_unanswerable=False, **k), (1, 2)),
    "multiple-choice": ("choice", "choice", lambda **k: MultipleChoiceTask(**k), 0),
    "rank": ("regression", "ranking", lambda **k: Rank(**k), RankTarget((1.0, 0.0), (1, 1), (1.0, 0.0))),
    "embed": ("bare", "vectors", lambda **k: Embed(scored=True, **k), 0.5),
    "masked": ("masked", "masked", lambda **k: MaskedLM(tokenizer=k["tokenizer"]), None),
}
ALL_LOSSES = DistillationLosses(
    kd=1.0,
    temperature=TEMPERATURE,
    label=0.0,
    states=(
        HiddenStateLoss(weight=1.0, how="mse", pairs=((0, 0), (1, 1))),
        HiddenStateLoss(weight=1.0, how="cosine", pairs=((2, 2),)),
    ),
    relations=(
        RelationLoss(weight=1.0, of=("qq", "kk", "vv"), pair=(1, 1), heads=8, squares=False),
        RelationLoss(weight=1.0, of=("qk",), pair=(0, 0), heads=4, squares=True),
    ),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the directory of a tiny model of `make_model_dir`, written at its first use."""
    directories: dict[str, Path] = {}

    def find_or_make(name: str) -> Path:
        if name not in directories:
            directories[name] = make_model_dir(tmp_path_factory.mktemp(name), name)
        return directories[name]

    return find_or_make


def make_samples(name: str, target: Any) -> list[Sample]:
    """Return three samples of a task; those of candidates, documents and sentence pairs have two sequences each."""
    samples = []
    for index, size in enumerate((9, 4, 13)):
        ids = [2, *range(6 + index, 4 + index + size), 3]
        sequences = [ids, ids[::-1]] if name in ("multiple-choice", "embed", "rank") else [ids]
        types = [0] * 2 + [1] * (len(ids) - 2)
        samples.append(Sample.of(sequences, [types] * len(sequences), target=target))
    return samples


def make_distillation(
    name: str, student: ModelBundle, teacher: ModelBundle, losses: DistillationLosses
) -> tuple[Distillation, list[Sample]]:
    """Return the distillation objective of a task, and its training samples; the second sample has no label."""
    _, kind, make_task, target = TASKS[name]
    assert student.tokenizer is not None
    task = make_task(tokenizer=student.tokenizer, limit=48)
    samples = make_samples(name, target)
    distillation = Distillation(
        base_objective=task,
        kind=kind,
        losses=losses,
        alignment=SampleAlignment(same_tokens=True, teacher_indices=[(index,) for index in range(3)], words=None),
        run_teacher=online_teacher(Teacher(teacher, task, kind, losses.capture_spec("teacher")), samples),
        projections=state_projections(losses, (student.config.model.width, teacher.config.model.width), 1),
    )
    return distillation, distillation.add_teacher_targets(samples, [0, 1, 2], [True, name == "masked", True])


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_equal_models_is_0(name: str, model_dir: Callable[[str], Path]) -> None:
    teacher = load(model_dir(TASKS[name][0]), head=None)
    if name == "embed":
        teacher = with_head(teacher, "embedding")
    stack = teacher.config.model.encoder
    assert stack is not None and stack.layers >= 2
    last_layers = ((stack.layers, stack.layers),)
    losses = replace(ALL_LOSSES, states=(ALL_LOSSES.states[0], replace(ALL_LOSSES.states[1], pairs=last_layers)))
    student = student_from_layers(teacher, LayersStudent(layers=stack.layers))
    distillation, samples = make_distillation(name, student, teacher, losses)
    batch = distillation.batch(samples, [1, 2, 3])
    loss = distillation.loss(student, batch)
    assert abs(float(loss.sum.detach())) < 1e-4 and loss.count > 0
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    assert all(float(term.sum.detach()) > 1e-4 for term in distillation.terms(student, batch))
    assert not any(parameter.requires_grad for parameter in teacher.parameters()) and not teacher.training


def test_each_term_is_divided_by_its_own_count(model_dir: Callable[[str], Path]) -> None:
    """The counts are of words, of tokens, and of words that have a label."""
    teacher = load(model_dir("tag"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    losses = replace(
        ALL_LOSSES, label=0.5, states=(HiddenStateLoss(weight=2.0, how="cosine", pairs=((1, 2),)),), relations=()
    )
    distillation, samples = make_distillation("tag", student, teacher, losses)
    batch = distillation.batch(samples, [1, 2, 3])
    token_count = sum(len(sample) for sample in samples)
    assert batch.counts == (6.0, float(token_count), 4.0)
    student_rows, student_states = capture(student, batch.packed, CaptureSpec(states=(1,)))
    with torch.no_grad():
        teacher_rows, teacher_states = capture(teacher, batch.packed, CaptureSpec(states=(2,)))
        assert student.head is not None and teacher.head is not None
        s = student.head(student_rows, batch.packed)[batch.rows].numpy()  # type: ignore[misc]
        t = teacher.head(teacher_rows, batch.packed)[batch.rows].numpy()  # type: ignore[misc]
    kd_loss = TEMPERATURE**2 * divergence(t, s, TEMPERATURE).mean()
    x, y = student_states["states.1"].detach().numpy(), teacher_states["states.2"].numpy()
    cosine_loss = 1 - ((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).mean()
    labels = np.array([0, 3, 0, 3])
    label_loss = -np.log(softmax(s[[0, 1, 4, 5]])[range(4), labels]).mean()
    loss = distillation.loss(student, batch)
    expected = kd_loss + 2 * cosine_loss + 0.5 * label_loss
    assert math.isclose(float(loss.sum.detach()) / loss.count, expected, rel_tol=1e-4)


def test_the_teacher_reads_token_types_and_has_no_dropout(model_dir: Callable[[str], Path]) -> None:
    """The teacher reads the token types of the samples even if the student has no token types."""
    teacher = load(model_dir("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1, family="distilbert"))
    assert student.config.model.embedding.types == 0 < teacher.config.model.embedding.types
    before = {name: tensor.clone() for name, tensor in teacher.named_tensors().items()}
    teacher.train()
    samples = make_samples("classify", 1)
    assert teacher.tokenizer is not None
    task = Classify(labels=LABELS, tokenizer=teacher.tokenizer, limit=48)
    scores = torch.cat(Teacher(teacher, task, "classes", CaptureSpec()).outputs(samples, [0, 0, 0])["scores"])
    packed = Packed.of([sample.tokens.tolist() for sample in samples], [sample.types.tolist() for sample in samples])
    without_types = replace(packed, types=torch.zeros_like(packed.types))
    with torch.no_grad():
        expected, expected_without_types = (load(model_dir("single"))(batch) for batch in (packed, without_types))
    assert torch.allclose(scores, expected, atol=1e-6)
    assert not torch.allclose(scores, expected_without_types, atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.named_tensors().items())

    with_types = student_from_layers(teacher, LayersStudent(layers=1))
    assert torch.allclose(student.model(without_types), with_types.model(without_types), atol=1e-5), (
        "the embedding of token type 0 is not part of the student's position embeddings"
    )


def test_a_student_copies_layers_and_head_of_its_teacher(model_dir: Callable[[str], Path]) -> None:
    assert evenly_spread(12, 6) == (0, 2, 4, 7, 9, 11)
    teacher = load(model_dir("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1, teacher_layers=(1,)))
    teacher_tensors, student_tensors = teacher.named_tensors(), student.named_tensors()
    for name, tensor in student_tensors.items():
        assert torch.equal(tensor, teacher_tensors[name.replace("blocks.0.", "blocks.1.")]), name
    assert "head.out.weight" in student_tensors


def test_cached_outputs_equal_those_of_the_teacher(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Float16 outputs have a relative error below 2^-10. A missing file of the cache is computed again."""
    teacher = load(model_dir("single"))
    losses = replace(ALL_LOSSES, states=(ALL_LOSSES.states[0],), label=1.0)
    student = student_from_layers(teacher, LayersStudent(layers=2))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    live, training_samples = make_distillation("classify", student, teacher, losses)
    batch = live.batch(training_samples, [1, 2, 3])
    live_loss = live.loss(student, batch)
    samples = make_samples("classify", 1)
    caching_teacher = Teacher(teacher, live.base_objective, "classes", losses.capture_spec("teacher"))
    for half, tolerance in ((False, 1e-6), (True, 2e-3)):
        folder = tmp_path / str(half)
        from_cache = cache_teacher_outputs(folder, caching_teacher, samples, CacheFormat(half=half), {"weights": "x"})
        cached_loss = replace(live, run_teacher=from_cache).loss(student, batch)
        assert math.isclose(float(cached_loss.sum.detach()), float(live_loss.sum.detach()), rel_tol=tolerance), half
        cached_outputs, live_outputs = from_cache([2, 0], [0, 0]), live.run_teacher([2, 0], [0, 0])
        for name, live_tensors in live_outputs.items():
            for cached, expected in zip(cached_outputs[name], live_tensors, strict=True):
                assert torch.allclose(cached, expected, rtol=2**-10 if half else 1e-6, atol=1e-5), name
    half_folder = tmp_path / "True"
    (file,) = half_folder.glob("part-*")
    content = file.read_bytes()
    file.unlink()
    cache_teacher_outputs(half_folder, caching_teacher, samples, CacheFormat(half=True), {"weights": "x"})
    assert file.read_bytes() == content
    with pytest.raises(HeedfulError, match=r"outputs of another teacher, .*: weights changed"):
        cache_teacher_outputs(half_folder, caching_teacher, samples, CacheFormat(half=True), {"weights": "y"})


def test_progress_of_the_cache_is_logged_at_intervals(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, messages = [100.0], list[str]()
    monkeypatch.setattr(output_cache, "PART_ENTRIES", 2)
    monkeypatch.setattr(teacher_cache.time, "monotonic", lambda: times.append(times[-1] + 20) or times[-1])
    teacher = load(model_dir("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    losses = DistillationLosses(kd=1.0)
    live, _ = make_distillation("classify", student, teacher, losses)
    caching_teacher = Teacher(teacher, live.base_objective, "classes", losses.capture_spec("teacher"))
    samples = make_samples("classify", 1) * 3
    cache_teacher_outputs(
        tmp_path / "outputs", caching_teacher, samples, CacheFormat(), {"weights": "x"}, log=messages.append
    )
    assert messages[0] == "the teacher reads 9 samples, once; its outputs are kept"
    assert messages[1:] == ["the teacher has read 2 of 9", "the teacher has read 6 of 9"]


def test_samples_with_different_tokens_are_aligned_by_example_or_refused() -> None:
    student_samples = OwnedSamples(
        samples=[Sample.of([[1, 2]], [[0, 0]]), Sample.of([[1, 5]], [[0, 0]])], example_indices=[0, 1]
    )
    teacher_samples = OwnedSamples(samples=[Sample.of([[1, 2, 3]], [[0] * 3])] * 3, example_indices=[0, 0, 1])
    alignment = align_samples(student_samples, teacher_samples, "classes")
    assert alignment.teacher_indices == [(0, 1), (2,)] and not alignment.same_tokens
    outputs = [torch.tensor([[0.0, 2.0]]), torch.tensor([[2.0, 2.0]])]
    assert alignment.scores(0, outputs).tolist() == [[1.0, 2.0]], "not the mean over the windows"
    with pytest.raises(Exception, match="different tokens or windows, but states compare token with token"):
        align_samples(student_samples, teacher_samples, "classes", ["states"])
    with pytest.raises(Exception, match="soft labels of span"):
        align_samples(student_samples, teacher_samples, "span")

    def tagged(sample: Sample, word_count: int) -> Sample:
        return replace(sample, target=((0,) * word_count, (0,) * word_count))

    student_tags = [tagged(sample, count) for sample, count in zip(student_samples.samples, (2, 1), strict=True)]
    teacher_tags = [tagged(teacher_samples.samples[0], count) for count in (1, 1, 2)]
    alignment = align_samples(
        OwnedSamples(samples=student_tags, example_indices=[0, 1]),
        OwnedSamples(samples=teacher_tags, example_indices=[0, 0, 1]),
        "tokens",
    )
    assert alignment.words == [slice(0, 2), None] and [alignment.fits(n) for n in (0, 1)] == [True, False]


def test_captured_tensors_keep_the_autograd_graph(model_dir: Callable[[str], Path]) -> None:
    student = load(model_dir("single")).train(False)
    batch = Packed.of([[2, 7, 8, 3], [2, 9, 3]])
    rows, captured = capture(student, batch, CaptureSpec(states=(0, 2), attention=(1,)))
    assert set(captured) == {"states.0", "states.2", "q.1", "k.1", "v.1"} and torch.equal(captured["states.2"], rows)
    captured["q.1"].sum().backward()
    gradient = student.named_tensors()["encoder.blocks.0.attention.qkv.weight"].grad
    assert gradient is not None and gradient.abs().max() > 0
    assert isinstance(CaptureTrace(what=(), spec=CaptureSpec()), CaptureTrace)


def test_padding_has_no_weight(model_dir: Callable[[str], Path]) -> None:
    teacher = load(model_dir("tag"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    losses = replace(ALL_LOSSES, states=(HiddenStateLoss(weight=2.0, how="cosine", pairs=((1, 2),)),), relations=())
    distillation, samples = make_distillation("tag", student, teacher, losses)
    last = samples[-1]
    padded_sample = replace(
        last,
        tokens=np.pad(last.tokens, (0, 3)),
        types=np.pad(last.types, (0, 3)),
        bounds=(*last.bounds, len(last) + 3),
        filler=3,
    )
    plain, padded = (distillation.batch([*samples[:-1], sample], [1, 2, 3]) for sample in (last, padded_sample))
    token_count = plain.packed.bounds[-1]
    assert padded.packed.bounds[-1] == token_count + 3 and padded.counts == plain.counts
    assert padded.distillation.token_weights.tolist() == [1.0] * token_count + [0.0] * 3


def test_copied_layers_keep_global_and_local_attention() -> None:
    stack = StackConfig(width=8, layers=22, heads=2, head_width=4, inner_width=8, window=4, global_every=3)
    for count in range(1, 23):
        layers = _matching_layers(stack, evenly_spread(22, count))
        is_global = [layer % 3 == 0 for layer in layers]
        assert is_global == [position % 3 == 0 for position in range(count)]
        assert len(set(layers)) == count
    assert _matching_layers(stack, evenly_spread(22, 6)) == (0, 4, 8, 12, 17, 20)
    assert _matching_layers(replace(stack, window=None), evenly_spread(22, 6)) == evenly_spread(22, 6)


def test_layers_that_do_not_fit_their_position_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "modernbert", "ModernBertModel")
    teacher = load(tmp_path)
    assert student_from_layers(teacher, LayersStudent(layers=2)).config.model.encoder is not None
    with pytest.raises(HeedfulError, match="puts layer 3 in the place of layer 1"):
        student_from_layers(teacher, LayersStudent(layers=2, teacher_layers=(0, 3)))
    with pytest.raises(HeedfulError, match="name it first and only there"):
        student_from_layers(teacher, LayersStudent(layers=2, teacher_layers=(3, 1)))


def test_losses_do_not_multiply_in_half_precision(model_dir: Callable[[str], Path]) -> None:
    """In bfloat16, differences between the cosines of similar vectors would be lost to rounding."""
    student = random_normal(16, 32)
    teacher = student + 0.02 * random_normal(16, 32, seed=1)
    tokenizer = load(model_dir("bare")).tokenizer
    assert tokenizer is not None
    embed = Embed(tokenizer=tokenizer, limit=None, scored=False, group_size=16)
    pair_batch = Batch(packed=Packed.of([[1]]), targets=torch.arange(16), weights=torch.ones(16), groups=(2,) * 16)
    for loss in (
        lambda x: similarity_matrix_loss(x, teacher, 16),
        lambda x: relation_kl((x, x), (teacher, teacher), (0, 16), 4),
        lambda x: embed.target_losses(torch.stack([x, teacher], 1).flatten(0, 1), pair_batch),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            autocast_loss = loss(student)
        assert torch.equal(autocast_loss, loss(student))


def test_labels_are_learned_in_a_step_without_teacher_scores(model_dir: Callable[[str], Path]) -> None:
    """The count of the loss is that of the first term that has targets."""
    teacher = load(model_dir("tag"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    distillation, samples = make_distillation("tag", student, teacher, DistillationLosses(kd=1.0, label=0.5))
    distillation = replace(
        distillation, alignment=SampleAlignment(same_tokens=False, teacher_indices=[()] * 3, words=[None] * 3)
    )
    batch = distillation.batch(samples, [1, 2, 3])
    assert batch.counts == (0.0, 4.0)
    loss, (soft_term, label_term) = distillation.loss(student, batch), distillation.terms(student, batch)
    assert (soft_term.name, label_term.name) == ("kd", "label")
    assert float(soft_term.sum.detach()) == 0 and loss.count == 4 and float(label_term.sum.detach()) > 0
    assert math.isclose(float(loss.sum.detach()), 0.5 * float(label_term.sum.detach()), rel_tol=1e-6)

"""Losses of distillation: against formulas written out, zero for equals, and what the teacher is asked."""

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
from heedful.errors import HeedfulError
from heedful.model.config import StackConfig
from heedful.objectives import Batch, Sample
from heedful.objectives.distillation import losses as like
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
from heedful.runs.distil import teacher_cache as outputs
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
from tests.support.model_folders import make
from tests.support.tiny_models import save_tiny

T = 3.0


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def divergence(t: Any, s: Any) -> Any:
    """KL in float64, of scores."""
    p, q = softmax(t), softmax(s)
    return (p * (np.log(p) - np.log(q))).sum(-1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_soft_labels_are_kl_with_the_square_of_the_temperature() -> None:
    s, t = drawn(7, 5), drawn(7, 5, seed=1)
    a, b = s.double().numpy(), t.double().numpy()
    assert np.allclose(like.kd_kl(s, t, T), T**2 * divergence(b / T, a / T), atol=1e-5)
    theirs = torch.nn.functional.kl_div((s / T).log_softmax(-1), (t / T).softmax(-1), reduction="none").sum(-1) * T**2
    assert torch.allclose(like.kd_kl(s, t, T), theirs, atol=1e-5)
    two = np.stack([np.zeros_like(a), a], -1), np.stack([np.zeros_like(b), b], -1)  # softmax(0, x) is sigmoid(x)
    assert np.allclose(like.kd_kl_multi_label(s, t, T), T**2 * divergence(two[1] / T, two[0] / T).mean(-1), atol=1e-5)
    bounds, columns = (0, 3, 7), (drawn(7, 2), drawn(7, 2, seed=1))
    spans = [
        np.mean([divergence(columns[1][x:y, k].numpy() / T, columns[0][x:y, k].numpy() / T) for k in (0, 1)])
        for x, y in ((0, 3), (3, 7))
    ]
    assert np.allclose(like.kd_kl_spans(*columns, bounds, T), T**2 * np.array(spans), atol=1e-5)
    choices = like.kd_kl_choices(s[:, 0], t[:, 0], [3, 4], T)
    right = [divergence(b[x:y, 0] / T, a[x:y, 0] / T) for x, y in ((0, 3), (3, 7))]
    assert np.allclose(choices, T**2 * np.array(right), atol=1e-5)


def test_the_gradient_keeps_its_size_with_the_temperature() -> None:
    sizes = []
    for heat in (8.0, 16.0):
        s = drawn(4, 6).requires_grad_()
        like.kd_kl(s, drawn(4, 6, seed=1), heat).sum().backward()
        assert s.grad is not None
        sizes.append(float(s.grad.norm()))
    assert math.isclose(*sizes, rel_tol=0.15), "without the square it would fall to a quarter"


def test_all_but_the_foremost_classes_are_one() -> None:
    s, t = drawn(5, 9), drawn(5, 9, seed=1)
    ids, p = like.topk_with_rest(t, 9, T)
    assert torch.allclose(like.kd_kl_topk(s, ids, p, T), like.kd_kl(s, t, T), atol=1e-5)
    ids, p = like.topk_with_rest(t, 3, T)
    a, b = softmax(s.double().numpy() / T), softmax(t.double().numpy() / T)
    order = np.argsort(-b, -1)
    best = [np.take_along_axis(each, order[:, :3], 1) for each in (a, b)]
    grouped = [np.concatenate([each, 1 - each.sum(1, keepdims=True)], 1) for each in best]
    right = T**2 * (grouped[1] * np.log(grouped[1] / grouped[0])).sum(1)
    assert np.allclose(like.kd_kl_topk(s, ids, p, T), right, atol=1e-5)
    assert like.kd_kl_topk(t, ids, p, T).abs().max() < 1e-5


def test_states_and_relations_are_those_of_the_papers() -> None:
    s, t = drawn(6, 8), drawn(6, 12, seed=1)
    a, b = s[:, :4].double().numpy(), t[:, :4].double().numpy()
    assert np.allclose(like.row_mse(s[:, :4], t[:, :4]), ((a - b) ** 2).mean(1), atol=1e-5)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert np.allclose(like.cosine_distance(s[:, :4], t[:, :4]), 1 - cosine, atol=1e-5)
    bounds, heads = (0, 2, 6), 4  # 8 and 12 numbers in 4 heads, whatever the models have
    right = []
    for x, y in ((0, 2), (2, 6)):
        each = np.zeros(y - x)
        for head in range(heads):
            mine, theirs = (m[x:y, head * w : head * w + w].double().numpy() for m, w in ((s, 2), (t, 3)))
            each += divergence(theirs @ theirs.T / 3**0.5, mine @ mine.T / 2**0.5) / heads
        right.append(each)
    assert np.allclose(like.relation_kl((s, s), (t, t), bounds, heads), np.concatenate(right), atol=1e-5)
    mine, theirs = (m[2:6].double().numpy().reshape(4, heads, -1) for m in (s, t))
    gap = [[m[:, h] @ m[:, h].T / m.shape[2] ** 0.5 for m in (mine, theirs)] for h in range(heads)]
    squares = np.mean([(x - y) ** 2 for x, y in gap], (0, 2))
    assert np.allclose(like.relation_kl((s, s), (t, t), bounds, heads, squares=True)[2:], squares, atol=1e-5)
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (s.double().numpy(), t.double().numpy()))
    off = ((x[:4] @ x[:4].T - y[:4] @ y[:4].T) ** 2).sum(1) / 3
    assert np.allclose(like.similarity_matrix_loss(s, t, 4)[:4], off, atol=1e-5)


# -- models -------------------------------------------------------------------------------------------------------

LABELS = ("bad", "fair", "good")
TASKS: dict[str, tuple[str, ScoreKind, Callable[..., Any], Any]] = {  # folder, kind, task, targets
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
EVERYTHING = DistillationLosses(
    kd=1.0,
    temperature=T,
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models by name."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = make(tmp_path_factory.mktemp(name), name)
        return folders[name]

    return folder


def samples_of(name: str, target: Any) -> list[Sample]:
    """Three samples; of choices, vectors and documents two sequences each."""
    samples = []
    for number, size in enumerate((9, 4, 13)):
        ids = [2, *range(6 + number, 4 + number + size), 3]
        several = [ids, ids[::-1]] if name in ("multiple-choice", "embed", "rank") else [ids]
        samples.append(Sample.of(several, [[0] * 2 + [1] * (len(ids) - 2)] * len(several), target=target))
    return samples


def objective(
    name: str, student: ModelBundle, teacher: ModelBundle, losses: DistillationLosses, **more: Any
) -> tuple[Distillation, Any]:
    """Of a task, with the samples that it learns from; the second one has no label."""
    _, kind, task, target = TASKS[name]
    assert student.tokenizer is not None
    learner = task(tokenizer=student.tokenizer, limit=48)
    samples = samples_of(name, target)
    ask = online_teacher(Teacher(teacher, learner, kind, losses.capture_spec("teacher")), samples)
    pairing = SampleAlignment(same_tokens=True, teacher_indices=[(number,) for number in range(3)], words=None)
    widths = student.config.model.width, teacher.config.model.width
    fields: Any = {"run_teacher": ask, "projections": state_projections(losses, widths, 1)} | more
    distillation = Distillation(base_objective=learner, kind=kind, losses=losses, alignment=pairing, **fields)
    return distillation, distillation.add_teacher_targets(samples, [0, 1, 2], [True, name == "masked", True])


@pytest.mark.parametrize("name", TASKS)
def test_equal_models_lose_nothing(name: str, folders: Callable[[str], Path]) -> None:
    teacher = load(folders(TASKS[name][0]), head=None)
    if name == "embed":
        from heedful.checkpoint.new_head import with_head

        teacher = with_head(teacher, "embedding")
    layers = teacher.config.model.encoder
    assert layers is not None and layers.layers >= 2
    pairs = ((layers.layers, layers.layers),)
    losses = replace(EVERYTHING, states=(EVERYTHING.states[0], replace(EVERYTHING.states[1], pairs=pairs)))
    student = student_from_layers(teacher, LayersStudent(layers=layers.layers))
    same, samples = objective(name, student, teacher, losses)
    batch = same.batch(samples, [1, 2, 3])
    loss = same.loss(student, batch)
    assert abs(float(loss.sum.detach())) < 1e-4 and loss.count > 0
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    assert all(float(term.sum.detach()) > 1e-4 for term in same.terms(student, batch))
    assert not any(parameter.requires_grad for parameter in teacher.parameters()) and not teacher.training


def test_means_are_over_tokens_and_labels_of_the_step(folders: Callable[[str], Path]) -> None:
    """Each term is divided by its own count: of words, of rows, of samples that have a label."""
    teacher = load(folders("tag"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    losses = replace(
        EVERYTHING, label=0.5, states=(HiddenStateLoss(weight=2.0, how="cosine", pairs=((1, 2),)),), relations=()
    )
    distillation, samples = objective("tag", student, teacher, losses)
    batch = distillation.batch(samples, [1, 2, 3])
    sizes = [len(sample) for sample in samples]
    assert batch.counts == (6.0, float(sum(sizes)), 4.0), "words, rows, words with a label"
    rows, states = capture(student, batch.packed, CaptureSpec(states=(1,)))
    with torch.no_grad():
        trows, tstates = capture(teacher, batch.packed, CaptureSpec(states=(2,)))
        assert student.head is not None and teacher.head is not None
        s, t = (each.head(x, batch.packed)[batch.rows].numpy() for each, x in ((student, rows), (teacher, trows)))  # type: ignore[misc]
    soft = T**2 * divergence(t / T, s / T).mean()
    x, y = states["states.1"].detach().numpy(), tstates["states.2"].numpy()
    cosine = 1 - ((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).mean()
    gold = np.array([0, 3, 0, 3])
    kept = s[[0, 1, 4, 5]]
    hard = -np.log(softmax(kept)[range(4), gold]).mean()
    loss = distillation.loss(student, batch)
    assert math.isclose(float(loss.sum.detach()) / loss.count, soft + 2 * cosine + 0.5 * hard, rel_tol=1e-4)


def test_the_teacher_reads_its_own_types_and_drops_nothing_out(folders: Callable[[str], Path]) -> None:
    """A student without token types beside it changes nothing for the teacher."""
    teacher = load(folders("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1, family="distilbert"))
    assert student.config.model.embedding.types == 0 < teacher.config.model.embedding.types
    before = {name: each.clone() for name, each in teacher.named_tensors().items()}
    teacher.train()
    samples = samples_of("classify", 1)
    assert teacher.tokenizer is not None
    task = Classify(labels=LABELS, tokenizer=teacher.tokenizer, limit=48)
    asked = Teacher(teacher, task, "classes", CaptureSpec())
    scores = asked.outputs(samples, [0, 0, 0])["scores"]
    packed = Packed.of([each.tokens.tolist() for each in samples], [each.types.tolist() for each in samples])
    plain = replace(packed, types=torch.zeros_like(packed.types))
    with torch.no_grad():
        right, wrong = (load(folders("single"))(each) for each in (packed, plain))
    assert torch.allclose(torch.cat(scores), right, atol=1e-6) and not torch.allclose(
        torch.cat(scores), wrong, atol=1e-3
    )
    assert all(torch.equal(each, before[name]) for name, each in teacher.named_tensors().items())
    segment = student.model(plain), student_from_layers(teacher, LayersStudent(layers=1)).model(plain)
    assert torch.allclose(*segment, atol=1e-5), "the first segment's type is in its positions"


def test_layers_are_those_of_the_recipe(folders: Callable[[str], Path]) -> None:
    assert evenly_spread(12, 6) == (0, 2, 4, 7, 9, 11)
    teacher = load(folders("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1, teacher_layers=(1,)))
    known, mine = teacher.named_tensors(), student.named_tensors()
    for name, each in mine.items():
        assert torch.equal(each, known[name.replace("blocks.0.", "blocks.1.")]), name
    assert "head.out.weight" in mine, "the teacher's head too"


def test_kept_outputs_are_what_the_teacher_says(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """In float32 to rounding; in float16 within 2^-11 of each number. A part that is missing is made anew."""
    teacher = load(folders("single"))
    losses = replace(EVERYTHING, states=(EVERYTHING.states[0],), label=1.0)
    student = student_from_layers(teacher, LayersStudent(layers=2))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    live, samples = objective("classify", student, teacher, losses)
    batch = live.batch(samples, [1, 2, 3])
    want = live.loss(student, batch)
    plain = samples_of("classify", 1)
    asked = Teacher(teacher, live.base_objective, "classes", losses.capture_spec("teacher"))
    for half, near in ((False, 1e-6), (True, 2e-3)):
        folder = tmp_path / str(half)
        from_cache = cache_teacher_outputs(folder, asked, plain, CacheFormat(half=half), {"weights": "x"})
        cached_loss = replace(live, run_teacher=from_cache).loss(student, batch)
        assert math.isclose(float(cached_loss.sum.detach()), float(want.sum.detach()), rel_tol=near), half
        cached_outputs, new_outputs = from_cache([2, 0], [0, 0]), live.run_teacher([2, 0], [0, 0])
        for name, each in new_outputs.items():
            for mine, theirs in zip(cached_outputs[name], each, strict=True):
                assert torch.allclose(mine, theirs, rtol=2**-10 if half else 1e-6, atol=1e-5), name
    (part,) = folder.glob("part-*")
    first = part.read_bytes()
    part.unlink()
    cache_teacher_outputs(folder, asked, plain, CacheFormat(half=True), {"weights": "x"})
    assert part.read_bytes() == first
    with pytest.raises(HeedfulError, match=r"outputs of another teacher, .*: weights changed"):
        cache_teacher_outputs(folder, asked, plain, CacheFormat(half=True), {"weights": "y"})


def test_how_far_the_teacher_is_is_told_now_and_then(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, messages = [100.0], list[str]()
    monkeypatch.setattr(output_cache, "PART_ENTRIES", 2)
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now.append(now[-1] + 20) or now[-1])
    teacher = load(folders("single"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    live, _ = objective("classify", student, teacher, DistillationLosses(kd=1.0))
    asked = Teacher(teacher, live.base_objective, "classes", DistillationLosses(kd=1.0).capture_spec("teacher"))
    cache_teacher_outputs(
        tmp_path / "outputs", asked, samples_of("classify", 1) * 3, CacheFormat(), {"weights": "x"}, log=messages.append
    )
    assert messages[0] == "the teacher reads 9 samples, once; its outputs are kept"
    assert messages[1:] == ["the teacher has read 2 of 9", "the teacher has read 6 of 9"]


def test_other_tokens_are_paired_by_example_or_refused() -> None:
    mine = OwnedSamples(samples=[Sample.of([[1, 2]], [[0, 0]]), Sample.of([[1, 5]], [[0, 0]])], example_indices=[0, 1])
    theirs = OwnedSamples(samples=[Sample.of([[1, 2, 3]], [[0] * 3])] * 3, example_indices=[0, 0, 1])
    alignment = align_samples(mine, theirs, "classes")
    assert alignment.teacher_indices == [(0, 1), (2,)] and not alignment.same_tokens
    outputs = [torch.tensor([[0.0, 2.0]]), torch.tensor([[2.0, 2.0]])]
    assert alignment.scores(0, outputs).tolist() == [[1.0, 2.0]], "the mean over the windows"
    with pytest.raises(Exception, match="different tokens or windows, but states compare token with token"):
        align_samples(mine, theirs, "classes", ["states"])
    with pytest.raises(Exception, match="soft labels of span"):
        align_samples(mine, theirs, "span")
    tagged = [replace(each, target=((0,) * n, (0,) * n)) for each, n in zip(mine.samples, (2, 1), strict=True)]
    taught = [replace(theirs.samples[0], target=((0,) * n, (0,) * n)) for n in (1, 1, 2)]
    words = align_samples(
        OwnedSamples(samples=tagged, example_indices=[0, 1]),
        OwnedSamples(samples=taught, example_indices=[0, 0, 1]),
        "tokens",
    )
    assert words.words == [slice(0, 2), None] and [words.fits(n) for n in (0, 1)] == [True, False]


def test_looking_inside_keeps_the_graph(folders: Callable[[str], Path]) -> None:
    student = load(folders("single")).train(False)
    batch = Packed.of([[2, 7, 8, 3], [2, 9, 3]])
    rows, inside = capture(student, batch, CaptureSpec(states=(0, 2), attention=(1,)))
    assert set(inside) == {"states.0", "states.2", "q.1", "k.1", "v.1"} and torch.equal(inside["states.2"], rows)
    inside["q.1"].sum().backward()
    gradient = student.named_tensors()["encoder.blocks.0.attention.qkv.weight"].grad
    assert gradient is not None and gradient.abs().max() > 0
    assert isinstance(CaptureTrace(what=(), spec=CaptureSpec()), CaptureTrace)


def test_what_fills_a_row_up_is_not_compared(folders: Callable[[str], Path]) -> None:
    """A mean over tokens has no padding in it."""
    teacher = load(folders("tag"))
    losses = replace(EVERYTHING, states=(HiddenStateLoss(weight=2.0, how="cosine", pairs=((1, 2),)),), relations=())
    distillation, samples = objective("tag", student_from_layers(teacher, LayersStudent(layers=1)), teacher, losses)
    last = samples[-1]
    filled = replace(
        last,
        tokens=np.pad(last.tokens, (0, 3)),
        types=np.pad(last.types, (0, 3)),
        bounds=(*last.bounds, len(last) + 3),
        filler=3,
    )
    plain, more = (distillation.batch([*samples[:-1], each], [1, 2, 3]) for each in (last, filled))
    assert more.packed.bounds[-1] == plain.packed.bounds[-1] + 3
    assert (
        more.counts == plain.counts
        and more.distillation.token_weights.tolist() == [1.0] * plain.packed.bounds[-1] + [0.0] * 3
    )


def test_a_layer_sees_as_far_as_the_one_whose_place_it_takes() -> None:
    stack = StackConfig(width=8, layers=22, heads=2, head_width=4, inner_width=8, window=4, global_every=3)
    for count in range(1, 23):
        layers = _matching_layers(stack, evenly_spread(22, count))
        assert [each % 3 == 0 for each in layers] == [n % 3 == 0 for n in range(count)] and len({*layers}) == count
    assert _matching_layers(stack, evenly_spread(22, 6)) == (0, 4, 8, 12, 17, 20)
    assert _matching_layers(replace(stack, window=None), evenly_spread(22, 6)) == evenly_spread(22, 6)


def test_layers_that_cannot_stand_in_a_place_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "modernbert", "ModernBertModel")
    teacher = load(tmp_path)
    assert student_from_layers(teacher, LayersStudent(layers=2)).config.model.encoder is not None
    with pytest.raises(HeedfulError, match="puts layer 3 in the place of layer 1"):
        student_from_layers(teacher, LayersStudent(layers=2, teacher_layers=(0, 3)))
    with pytest.raises(HeedfulError, match="name it first and only there"):
        student_from_layers(teacher, LayersStudent(layers=2, teacher_layers=(3, 1)))


def test_products_in_losses_are_not_of_half_precision(folders: Callable[[str], Path]) -> None:
    """Where the model computes in bfloat16, cosines of near vectors would be rounded to nothing."""
    s = drawn(16, 32)
    t = s + 0.02 * drawn(16, 32, seed=1)
    tokenizer = load(folders("bare")).tokenizer
    assert tokenizer is not None
    pairs = Embed(tokenizer=tokenizer, limit=None, scored=False, group_size=16)
    in_pairs = Batch(packed=Packed.of([[1]]), targets=torch.arange(16), weights=torch.ones(16), groups=(2,) * 16)
    for loss in (
        lambda x: like.similarity_matrix_loss(x, t, 16),
        lambda x: like.relation_kl((x, x), (t, t), (0, 16), 4),
        lambda x: pairs.target_losses(torch.stack([x, t], 1).flatten(0, 1), in_pairs),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            half = loss(s)
        assert torch.equal(half, loss(s))


def test_labels_are_learned_in_a_step_of_which_the_teacher_says_nothing(folders: Callable[[str], Path]) -> None:
    """The count is that of the first term that has targets."""
    teacher = load(folders("tag"))
    student = student_from_layers(teacher, LayersStudent(layers=1))
    distillation, samples = objective("tag", student, teacher, DistillationLosses(kd=1.0, label=0.5))
    distillation = replace(
        distillation, alignment=SampleAlignment(same_tokens=False, teacher_indices=[()] * 3, words=[None] * 3)
    )
    batch = distillation.batch(samples, [1, 2, 3])
    assert batch.counts == (0.0, 4.0)
    loss, (soft, hard) = distillation.loss(student, batch), distillation.terms(student, batch)
    assert (soft.name, hard.name) == ("kd", "label")
    assert float(soft.sum.detach()) == 0 and loss.count == 4 and float(hard.sum.detach()) > 0
    assert math.isclose(float(loss.sum.detach()), 0.5 * float(hard.sum.detach()), rel_tol=1e-6)

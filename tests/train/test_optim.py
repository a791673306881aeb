"""The optimizer, compared with torch.optim.AdamW and a published formula; schedules, compared with transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from heedful import checkpoint, settings
from heedful.errors import HeedfulError
from heedful.model.config import Classes, EmbeddingConfig, ModelConfig, NextToken, StackConfig
from heedful.runs.overrides import override
from heedful.train import optim
from heedful.train.optim import (
    AdamW,
    Constant,
    Cosine,
    DecayFromStart,
    Linear,
    Noam,
    Optimizer,
    Schedule,
    layer_lrs,
    lr_factor,
)
from tests.support.tiny_models import MODELS, TINY

# -- schedules ------------------------------------------------------------------------------------------------


def transformers_schedule(name: str, warmup: int, total: int, **options: Any) -> Callable[[int], float]:
    """Return the function from step to learning rate factor of a schedule of transformers."""
    create = getattr(transformers, f"get_{name}")
    totals = {} if name.startswith("constant") else {"num_training_steps": total}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    factor: Callable[[int], float] = create(optimizer, num_warmup_steps=warmup, **totals, **options).lr_lambdas[0]
    return factor


@pytest.mark.parametrize(
    ("warmup_ratio", "total"), [(0.1, 30), (0.06, 1000), (0.0, 7), (0.25, 4), (1.0, 5), (0.29, 100)]
)
@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        (Constant(), "constant_schedule_with_warmup", {}),
        (Linear(), "linear_schedule_with_warmup", {}),
        (Cosine(), "cosine_schedule_with_warmup", {}),
        (Cosine(min_lr_ratio=0.2), "cosine_with_min_lr_schedule_with_warmup", {"min_lr_rate": 0.2}),
    ],
)
def test_schedules_equal_those_of_transformers(
    schedule: Any, name: str, options: Any, warmup_ratio: float, total: int
) -> None:
    expected = transformers_schedule(name, round(warmup_ratio * total), total, **options)
    schedule = replace(schedule, warmup_ratio=warmup_ratio)
    last = (
        total if warmup_ratio < 1 or isinstance(schedule, Constant) else total - 1
    )  # transformers ends a full warm-up at 1
    for step in range(last + 1):
        assert lr_factor(schedule, step, total) == pytest.approx(expected(step), rel=0, abs=1e-9), step


@pytest.mark.parametrize(("warmup_ratio", "total"), [(0.28, 25), (0.07, 100), (0.01, 1_000_000), (0.0, 7)])
def test_bert_schedule_decays_from_the_start(warmup_ratio: float, total: int) -> None:
    warmup = round(warmup_ratio * total)
    for step in {*range(min(total, 300)), warmup - 1, warmup, warmup + 1, total} - {-1}:
        decayed = (1.0 - 0.0) * (1 - min(step, total) / total) + 0.0  # polynomial decay of power 1, down to 0
        expected = step / warmup if step < warmup else decayed
        assert lr_factor(DecayFromStart(warmup_ratio=warmup_ratio), step, total) == pytest.approx(
            expected, rel=0, abs=1e-12
        ), step


def test_linear_and_bert_schedules_differ_after_the_warmup() -> None:
    factors = [
        (lr_factor(Linear(warmup_ratio=0.1), step, 100), lr_factor(DecayFromStart(warmup_ratio=0.1), step, 100))
        for step in (0, 9, 10, 55)
    ]
    assert [factor for pair in factors for factor in pair] == pytest.approx(
        [0.0, 0.0, 0.9, 0.9, 1.0, 0.9, 0.5, 0.45], abs=1e-12
    )


@pytest.mark.parametrize(("width", "warmup", "total"), [(512, 4000, 100_000), (256, 3, 20), (64, 20, 20)])
def test_noam_is_the_schedule_of_the_transformer(width: int, warmup: int, total: int) -> None:
    """width^-0.5 min(step^-0.5, step warmup^-1.5) (Vaswani et al. 2017, equation 3), where lr is the peak."""
    peak = (width * warmup) ** -0.5
    schedule = Noam(warmup_ratio=warmup / total)
    assert lr_factor(schedule, 0, total) == 0
    for step in (*range(1, min(total, 50) + 1), warmup, warmup + 1, total):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * lr_factor(schedule, step, total) == pytest.approx(paper, rel=1e-6), step
    with pytest.raises(HeedfulError, match="warmup_ratio is 0; expected a share above 0"):
        Noam(warmup_ratio=0.0)


@pytest.mark.parametrize("schedule", [Constant(warmup_ratio=0.1), Linear(), Cosine(), DecayFromStart(), Noam()])
def test_schedules_by_seconds_equal_schedules_by_steps(schedule: Schedule) -> None:
    for step in range(101):
        assert lr_factor(schedule, step * 0.37, 37.0) == pytest.approx(lr_factor(schedule, step, 100), abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "end"),
    [(Constant(), 1), (Linear(), 0), (Cosine(), 0), (Cosine(min_lr_ratio=0.1), 0.1), (DecayFromStart(), 0)],
)
def test_a_schedule_keeps_its_last_factor(schedule: Schedule, end: float) -> None:
    for progress in (100, 101, 150.5, 1e9):
        assert lr_factor(schedule, progress, 100) == pytest.approx(end, abs=1e-12)


@pytest.mark.parametrize("schedule", [Constant(warmup_ratio=0.1), Linear(), Cosine(), DecayFromStart(), Noam()])
@pytest.mark.parametrize("total", [1, 2, 9])
def test_a_warmup_of_less_than_a_step_is_skipped(schedule: Schedule, total: int) -> None:
    """Otherwise the first step, which may be the only one, would have a learning rate of 0."""
    factors = [lr_factor(schedule, step, total) for step in range(total)]
    assert factors[0] == 1.0 and min(factors) > 0 and factors == sorted(factors, reverse=True)
    if isinstance(schedule, Linear):
        assert factors == [1 - step / total for step in range(total)]


def test_invalid_schedules_are_refused() -> None:
    with pytest.raises(HeedfulError, match=r"warmup_ratio is 6\.0; expected a share from 0 to 1"):
        Linear(warmup_ratio=6.0)
    with pytest.raises(HeedfulError, match=r"min_lr_ratio is -0\.1; expected a share"):
        Cosine(min_lr_ratio=-0.1)
    for done, total in ((0, 0), (-1, 5), (math.nan, 5), (1, math.inf)):
        with pytest.raises(HeedfulError, match="progress is"):
            lr_factor(Linear(), done, total)


# -- the update -----------------------------------------------------------------------------------------------

SHAPES = {"embedding.tokens.weight": (33, 17), "embedding.norm.weight": (17,), "head.out.weight": (2, 17), "head.x": ()}


def make_parameters(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return random parameters of SHAPES."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def make_gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return gradients of SHAPES for a step; their sizes differ by factors of 10."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype) * 10.0 ** (index - 2)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def take_step(optimizer: Optimizer, gradients: dict[str, Tensor], factor: float = 1.0, scale: float = 1.0) -> float:
    """Update by gradients, which are scaled and clipped; returns their norm."""
    norm = optimizer.grad_norm(gradients, scale=scale)
    optimizer.step(gradients, lr_factor=factor, scale=scale, grad_norm=norm)
    return norm


def copy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(params=["fused", "not fused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fused kernel of PyTorch, or the one that is not fused."""
    if request.param == "not fused":
        monkeypatch.setattr(optim, "_FUSED_DEVICES", frozenset())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that tensors are equal up to a few units in the last place of their largest number."""
    for name, tensor in actual.items():
        tolerance = (5e-7 if tensor.dtype == torch.float32 else 1e-15) * max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [1.0, None])
def test_an_update_equals_that_of_torch(dtype: torch.dtype, clip: float | None) -> None:
    ours, reference = (
        make_parameters(dtype),
        {name: nn.Parameter(tensor) for name, tensor in make_parameters(dtype).items()},
    )
    optimizer = Optimizer(ours, AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3, max_grad_norm=clip))
    matrices = [tensor for tensor in reference.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in reference.values() if tensor.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    torch_optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.3, foreach=False)
    for step in range(20):
        factor = lr_factor(Linear(), step, 20)
        for name, gradient in make_gradients(step, dtype).items():
            reference[name].grad = gradient
        total = nn.utils.clip_grad_norm_(reference.values(), clip or math.inf)
        for group in torch_optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        torch_optimizer.step()
        assert take_step(optimizer, make_gradients(step, dtype), factor=factor) == pytest.approx(float(total), rel=1e-6)
    assert any(not torch.equal(ours[name], tensor) for name, tensor in make_parameters(dtype).items())
    if clip is None:
        assert_close(ours, {name: tensor.detach() for name, tensor in reference.items()})
    else:  # torch divides by norm + 1e-6
        for name, tensor in reference.items():
            torch.testing.assert_close(ours[name], tensor.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_without_bias_correction_is_the_published_formula(dtype: torch.dtype) -> None:
    ours, p = make_parameters(dtype), make_parameters(dtype)
    m, v = ({name: torch.zeros_like(tensor) for name, tensor in p.items()} for _ in range(2))
    optimizer = Optimizer(ours, AdamW.without_bias_correction(3e-2))
    for step in range(20):
        lr = 3e-2 * lr_factor(DecayFromStart(), step, 20)
        gradients = make_gradients(step, dtype)
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in gradients.values()))
        for name, gradient in gradients.items():
            g = gradient * (1.0 / max(norm, 1.0))
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g.square()
            update = m[name] / (v[name].sqrt() + 1e-6)
            if name.endswith(("tokens.weight", "out.weight")):
                update = update + 0.01 * p[name]
            p[name] = p[name] - lr * update
        take_step(optimizer, make_gradients(step, dtype), factor=lr_factor(DecayFromStart(), step, 20))
    assert_close(ours, p)


def test_without_bias_correction_the_first_step_is_three_times_as_large() -> None:
    distances = []
    for adamw in (AdamW.without_bias_correction(1e-2), AdamW(lr=1e-2)):
        ours = make_parameters()
        take_step(Optimizer(ours, replace(adamw, max_grad_norm=None)), make_gradients(0))
        distances.append(abs(float(ours["head.x"] - make_parameters()["head.x"])))
    assert distances[0] / distances[1] == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-4)


@pytest.mark.usefixtures("kernel")
def test_a_gradient_need_not_be_contiguous() -> None:
    ours, contiguous = ({"head.out.weight": torch.zeros(5, 3)} for _ in range(2))
    gradient = torch.arange(15.0).view(3, 5).t() - 4
    assert not gradient.is_contiguous()
    take_step(Optimizer(ours, AdamW(lr=0.1, eps=1.0)), {"head.out.weight": gradient})
    take_step(
        Optimizer(contiguous, AdamW(lr=0.1, eps=1.0)),
        {"head.out.weight": gradient.clone(memory_format=torch.contiguous_format)},
    )
    assert torch.equal(ours["head.out.weight"], contiguous["head.out.weight"]) and ours["head.out.weight"].any()


@pytest.mark.usefixtures("kernel")
def test_a_tensor_without_a_gradient_keeps_its_value_and_its_step_count() -> None:
    ours, expected = make_parameters(), make_parameters()
    late = "embedding.tokens.weight"
    first, second = (
        Optimizer(ours, AdamW(lr=0.1, max_grad_norm=None)),
        Optimizer(expected, AdamW(lr=0.1, max_grad_norm=None)),
    )
    for step in range(3):
        take_step(first, {name: tensor for name, tensor in make_gradients(step).items() if name != late})
    assert torch.equal(ours[late], expected[late])
    take_step(first, make_gradients(3))
    take_step(second, make_gradients(3))
    assert torch.equal(ours[late], expected[late]) and not torch.equal(ours[late], make_parameters()[late])
    take_step(first, {})  # nothing changes
    assert torch.equal(ours[late], expected[late])


# -- sums, norm, clipping -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("count", [8, 7, 4096 * 3])
def test_gradients_are_sums_and_scale_makes_means(count: int) -> None:
    sums, means = make_parameters(), make_parameters()
    of_sums, of_means = Optimizer(sums, AdamW(lr=0.1)), Optimizer(means, AdamW(lr=0.1))
    for step in range(5):
        summed = {name: tensor * count for name, tensor in make_gradients(step).items()}
        norm = take_step(of_sums, summed, scale=1 / count)
        assert norm == pytest.approx(take_step(of_means, make_gradients(step)), rel=1e-6)
    if count == 8:
        assert all(torch.equal(tensor, means[name]) for name, tensor in sums.items())
    assert_close(sums, means)


@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_clipping_is_that_of_torch(clip: float) -> None:
    ours = make_parameters()
    optimizer = Optimizer(ours, AdamW(lr=0.1, betas=(0.0, 0.0), max_grad_norm=clip))
    take_step(optimizer, make_gradients(0))
    reference = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    for tensor, gradient in zip(reference, make_gradients(0).values(), strict=True):
        tensor.grad = gradient
    nn.utils.clip_grad_norm_(reference, clip)
    state = optimizer.state()
    for name, tensor in zip(SHAPES, reference, strict=True):  # with betas of 0, m is the gradient itself
        torch.testing.assert_close(state[f"{name}.m"], tensor.grad, rtol=3e-6 + 1e-6 / clip, atol=0)


def test_the_norm_of_a_large_table_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    large = {"embedding.tokens.weight": torch.randn(30_522, 128, generator=generator), "head.bias": torch.ones(40_000)}
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in large.values()))
    assert Optimizer({}, AdamW(lr=0.1)).grad_norm(large, scale=0.5) == pytest.approx(0.5 * exact, rel=1e-6)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_that_are_not_finite_change_nothing(bad: float, name: str) -> None:
    ours = make_parameters()
    optimizer = Optimizer(ours, AdamW(lr=0.1))
    take_step(optimizer, make_gradients(0))
    before, state = copy_tensors(ours), copy_tensors(optimizer.state())
    gradients = make_gradients(1)
    gradients[name].view(-1)[-1] = bad
    norm = optimizer.grad_norm(gradients, scale=1.0)
    assert not math.isfinite(norm)
    with pytest.raises(HeedfulError, match=r"norm of the gradients is (nan|inf), and nothing was changed"):
        optimizer.step(gradients, lr_factor=1.0, scale=1.0, grad_norm=norm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state().items())


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"head.y": torch.zeros(2)}, "a gradient for head.y"),
        ({"head.x": torch.zeros(2)}, "the gradient of head.x is float32 [2]; expected float32 []"),
        ({"head.x": torch.zeros((), dtype=torch.bfloat16)}, "the gradient of head.x is bfloat16 []; expected float32"),
    ],
)
def test_gradients_that_do_not_fit_their_tensors_are_refused(gradients: dict[str, Tensor], message: str) -> None:
    ours = make_parameters()
    with pytest.raises(HeedfulError, match=re.escape(message)):
        take_step(Optimizer(ours, AdamW(lr=0.1)), make_gradients(0) | gradients)
    assert all(torch.equal(tensor, make_parameters()[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("tensor", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.long)])
def test_tensors_that_cannot_be_trained_are_refused(tensor: Tensor) -> None:
    with pytest.raises(HeedfulError, match=r"head.out is (bfloat16|int64) \[3\]; expected contiguous float32"):
        Optimizer({"head.out": tensor}, AdamW(lr=0.1))
    with pytest.raises(HeedfulError, match=r"head.out is float32 \[3, 2\], not contiguous; expected"):
        Optimizer({"head.out": torch.zeros(2, 3).t()}, AdamW(lr=0.1))


@pytest.mark.usefixtures("kernel")
def test_parameters_of_a_module_are_updated_in_place() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    before = layer.weight.detach().clone()
    take_step(
        Optimizer(dict(layer.named_parameters()), AdamW(lr=0.1)),
        {name: tensor.grad for name, tensor in layer.named_parameters()},
    )
    assert layer.weight.requires_grad and not torch.equal(layer.weight, before)


# -- state ----------------------------------------------------------------------------------------------------


def run(optimizer: Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        gradients = {
            name: tensor for index, (name, tensor) in enumerate(make_gradients(step).items()) if (step + index) % 3
        }
        take_step(optimizer, gradients, factor=lr_factor(Cosine(), step, 10), scale=1 / 3)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("adamw", [AdamW(lr=0.1), AdamW.without_bias_correction(0.1), AdamW(lr=0.1, layer_decay=0.9)])
@pytest.mark.parametrize("stop", range(0, 10, 3))
def test_a_restored_optimizer_continues_with_the_same_bits(tmp_path: Path, adamw: AdamW, stop: int) -> None:
    uninterrupted, interrupted = make_parameters(), make_parameters()
    run(Optimizer(uninterrupted, adamw), 0, 10)
    first = Optimizer(interrupted, adamw)
    run(first, 0, stop)
    safetensors.torch.save_file({**interrupted, **first.state()}, tmp_path / "state.safetensors")
    saved = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    restored = {name: saved.pop(name) for name in SHAPES}
    second = Optimizer(restored, adamw)
    second.load_state(saved)
    run(second, stop, 10)
    for name, tensor in uninterrupted.items():
        assert torch.equal(restored[name], tensor), name


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    ours = make_parameters()
    optimizer = Optimizer(ours, AdamW(lr=0.1))
    take_step(optimizer, make_gradients(0))
    before, state = copy_tensors(optimizer.state()), copy_tensors(optimizer.state())
    fresh = Optimizer(make_parameters(), AdamW(lr=0.1)).state()
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({name: tensor for name, tensor in fresh.items() if name != "head.x.v"}, "head.x.v is missing"),
        (fresh | {"head.y.m": torch.zeros(1)}, "head.y.m is not expected"),
        (fresh | {"head.x.m": torch.zeros(2)}, "head.x.m is float32 [2], expected float32 []"),
        (fresh | {"head.x.m": torch.zeros((), dtype=torch.float64)}, "head.x.m is float64 [], expected float32 []"),
        (Optimizer(make_parameters(), AdamW.without_bias_correction(0.1)).state(), "steps is missing"),
        ({}, "and 8 more"),
    ]
    for bad_state, message in cases:
        with pytest.raises(HeedfulError, match=re.escape(message)):
            optimizer.load_state(bad_state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
    optimizer.load_state(state)


# -- settings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Settings of a run with an optimizer and a schedule."""

    optimizer: AdamW
    schedule: Schedule


def test_settings_from_and_to_text() -> None:
    run_settings = settings.from_mapping(Run, {"optimizer": {"lr": 2e-5}, "schedule": {"kind": "bert"}}, source="test")
    assert run_settings == Run(optimizer=AdamW(lr=2e-5), schedule=DecayFromStart(warmup_ratio=0.1))
    run_settings = override(
        run_settings, ["schedule.kind=cosine", "schedule.min_lr_ratio=0.1", "optimizer.max_grad_norm=none"]
    )
    assert run_settings.schedule == Cosine(min_lr_ratio=0.1) and run_settings.optimizer.max_grad_norm is None
    for values in (
        run_settings,
        Run(optimizer=AdamW.without_bias_correction(1e-4), schedule=Constant(warmup_ratio=0.5)),
    ):
        text = settings.to_toml(values)  # checks that it reads back the same
        assert "betas = [0.9, 0.999]" in text
    with pytest.raises(HeedfulError, match=r"optimizer.lr is missing"):
        settings.from_mapping(Run, {"optimizer": {}}, source="test")
    with pytest.raises(HeedfulError, match=r'schedule.kind is "linea", .*did you mean "linear"'):
        override(run_settings, ["schedule.kind=linea"])
    with pytest.raises(HeedfulError, match=r"schedule.warmup_ratio is 10.0; expected a share from 0 to 1"):
        override(run_settings, ["schedule.warmup_ratio=10.0"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0; expected a number above 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0); expected two numbers from 0 to below 1"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -0.01}, "weight_decay is -0.01; expected a number from 0"),
        ({"max_grad_norm": 0.0}, 'max_grad_norm is 0.0; expected a number above 0, or "none"'),
        ({"layer_decay": 0.0}, "layer_decay is 0.0; expected a number above 0, up to 1"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1"),
    ],
)
def test_settings_out_of_range(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(HeedfulError, match=re.escape(message)):
        AdamW(**{"lr": 0.1, **changed})


# -- layer-wise learning rates -----------------------------------------------------------------------------------

HALVED = AdamW(lr=1.0, layer_decay=0.5)


def halvings(names: Any) -> dict[str, int]:
    """Return, by parameter name, how many times the learning rate is halved; parameters of the head have 0."""
    return {name: round(-math.log2(lr)) for name, lr in layer_lrs(names, HALVED).items()}


@pytest.mark.parametrize(("family", "architecture"), MODELS)
def test_layer_decay_and_weight_decay_of_every_family(family: str, architecture: str) -> None:
    kind, sizes = TINY[family]
    values = json.loads(kind(**sizes).to_json_string()) | {"architectures": [architecture]}
    loaded = checkpoint.create(checkpoint.read_config(values, "config.json"))
    named, model = loaded.named_tensors(), loaded.model
    levels = halvings(named)
    ids = {id(tensor): name for name, tensor in named.items()}
    blocks = [block for stack in (model.encoder, model.decoder) if stack is not None for block in stack.blocks]
    for depth, part in [(len(blocks) + 1, model.embedding), *zip(range(len(blocks), 0, -1), blocks, strict=True)]:
        names = {ids.pop(id(tensor)) for tensor in part.parameters()}
        assert names and {levels[name] for name in names} == {depth}
    if model.config.decoder_embedding:  # its token table may be that of the encoder
        own = [ids.pop(id(tensor)) for tensor in model.decoder_embedding.parameters() if id(tensor) in ids]
        assert {levels[name] for name in own} <= {len(blocks) + 1}
    below = {"encoder": len(blocks), "decoder": len(model.decoder.blocks) if model.decoder else 0}
    for name in list(ids.values()):
        if ".relations." in name:
            stack, _, number, *_ = name.split(".")
            assert levels[name] == below[stack] - int(number)
        elif not name.startswith("head."):
            assert name.split(".")[1] == "norm" and levels[name] == (
                1 if name.startswith("decoder") or not model.decoder else below["decoder"] + 1
            )
        else:
            assert levels[name] == 0

    without_decay = {
        id(tensor)
        for part in loaded.modules()
        for name, tensor in part.named_parameters(recurse=False)
        if name.endswith("bias") or name == "query" or isinstance(part, nn.LayerNorm | nn.RMSNorm)
    }
    for tensor in named.values():
        nn.init.normal_(tensor)  # since decay of zeros has no effect
    before = copy_tensors({name: tensor.detach() for name, tensor in named.items()})
    optimizer = Optimizer(named, AdamW(lr=0.1, weight_decay=0.5, layer_decay=0.5))
    take_step(optimizer, {name: torch.zeros_like(tensor) for name, tensor in named.items()})
    for name, tensor in named.items():
        decayed = 1.0 if id(tensor) in without_decay else 1 - 0.1 * 0.5 ** levels[name] * 0.5
        torch.testing.assert_close(tensor.detach(), before[name] * decayed, rtol=1e-6, atol=0)


STACK = StackConfig(width=8, layers=3, heads=2, head_width=4, inner_width=8, final_norm=True, norm_at="pre")
DECODER = replace(STACK, layers=2, causal=True, cross=True)
EMBEDDING = EmbeddingConfig(vocabulary=11, width=6, norm="layer")


def test_layer_decay_with_an_encoder_and_a_decoder() -> None:
    model = ModelConfig(embedding=EMBEDDING, encoder=STACK, decoder=DECODER, decoder_embedding=EMBEDDING)
    config = checkpoint.BundleConfig(family="heedful", model=model, head=Classes(labels=("a", "b")))
    levels = halvings(checkpoint.create(config).named_tensors())
    tops = {
        "embedding.tokens.weight": 6,
        "embedding.project.bias": 6,
        "decoder_embedding.norm.weight": 6,
        "encoder.blocks.0.attention.qkv.weight": 5,
        "encoder.blocks.2.mlp_norm.bias": 3,
        "encoder.norm.weight": 3,
        "decoder.blocks.0.cross.kv.weight": 2,
        "decoder.blocks.1.mlp.down.bias": 1,
        "decoder.norm.bias": 1,
        "head.out.weight": 0,
    }
    assert {name: levels[name] for name in tops} == tops
    assert {name.split(".")[0] for name in levels} == {name.split(".")[0] for name in tops}


def test_layer_decay_of_a_decoder() -> None:
    stack = replace(STACK, causal=True, layers=12)
    model = ModelConfig(embedding=replace(EMBEDDING, width=8), decoder=stack)
    loaded = checkpoint.create(
        checkpoint.BundleConfig(family="heedful", model=model, head=NextToken(tied=True, bias=True))
    )
    levels = halvings(loaded.named_tensors())
    assert levels["embedding.tokens.weight"] == 13 and levels["head.decoder.bias"] == 0
    assert [levels[f"decoder.blocks.{number}.mlp.up.weight"] for number in (0, 1, 10, 11)] == [12, 11, 2, 1]
    optimizer = Optimizer(loaded.named_tensors(), HALVED)
    assert optimizer.peak_lrs == layer_lrs(loaded.named_tensors(), HALVED) and len(optimizer._groups) == 2 * 14 - 1
    assert len(Optimizer(loaded.named_tensors(), AdamW(lr=0.1))._groups) == 2


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.blocks.0.mlp.up.weight",
        "embeddings.tokens",
        "encoder.blocks.x.mlp",
        "encoder.rows.0.w",
        "head",
        "",
    ],
)
def test_an_unknown_parameter_name_is_refused(name: str) -> None:
    with pytest.raises(HeedfulError, match=re.escape(f"the level of {name} ")):
        layer_lrs(["embedding.tokens.weight", name], HALVED)
    assert layer_lrs([name], AdamW(lr=0.1)) == {name: 0.1}


def test_noam_by_seconds_never_exceeds_the_peak() -> None:
    """A warm-up of less than a second is skipped, and the factor falls after the first second."""
    assert max(lr_factor(Noam(warmup_ratio=0.1), seconds / 100, 6.0) for seconds in range(601)) == 1.0


@pytest.mark.parametrize("beta2", [0.999, 0.9999, 0.99999])
@pytest.mark.usefixtures("native")
def test_kernels_compute_one_minus_beta_exactly(beta2: float) -> None:
    ours, generator = torch.zeros(100, 64), torch.Generator().manual_seed(1)
    settings = AdamW(lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, max_grad_norm=None)
    optimizer = Optimizer({"head.out": ours}, settings)
    p, m, v = (torch.zeros(100, 64, dtype=torch.float64) for _ in range(3))
    for step in range(1, 4):
        gradient = torch.randn(100, 64, generator=generator)
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        p = p - 1e-3 * (m / (1 - 0.9**step)) / ((v / (1 - beta2**step)).sqrt() + settings.eps)
        take_step(optimizer, {"head.out": gradient})
    assert float((ours.double() - p).norm() / p.norm()) < 6e-7

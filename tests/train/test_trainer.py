"""The trainer: updates do not depend on the micro-batches, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

from heedful.checkpoint import load
from heedful.data.sampler import split_microbatches
from heedful.device import resolve_dtype
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.families.names import to_hf_names
from heedful.objectives import Batch, Sample
from heedful.train import trainer as trainer_module
from heedful.train.optim import AdamW, Constant, Linear, lr_factor
from heedful.train.ranks import Ranks
from heedful.train.trainer import Step, StoppedError, Trainer, TrainSettings
from tests.support import tiny_runs
from tests.support.tiny_models import make_tiny, random_sequences
from tests.support.tiny_runs import (
    LARGE_EPS,
    RecordingObjective,
    copy_state,
    copy_weights,
    make_settings,
    make_trainer,
    records,
    relative_error,
    tensors_equal,
)

# -- updates for any micro-batches ------------------------------------------------------------------------------------


def equal_length_samples(trainer: Trainer, length: int = 9) -> list[Sample]:
    """Return samples of one length with very different numbers of targets, cut from those of a trainer."""
    samples = []
    for sample in trainer.samples:
        positions, labels = sample.target
        targets = [(position, label) for position, label in zip(positions, labels, strict=True) if position < length]
        if len(sample) >= length:
            targets = targets[: 1 + len(samples) * 2 % 7]
            target = tuple(zip(*targets, strict=True))
            samples.append(replace(sample, tokens=sample.tokens[:length], types=sample.types[:length], target=target))
    return [replace(sample, bounds=(0, length)) for sample in samples]


@pytest.mark.parametrize(("max_tokens", "sizes"), [(9, [1] * 8), (18, [2] * 4), (10**6, [8])])
def test_micro_batches_of_8x1_4x2_and_1x8_agree(max_tokens: int, sizes: list[int]) -> None:
    def train(max_tokens: int) -> tuple[Trainer, RecordingObjective, list[Step]]:
        trainer = make_trainer(
            "tag",
            0.0,
            max_tokens_per_microbatch=max_tokens,
            batch_size=8,
            max_steps=1,
            optimizer=LARGE_EPS,
        )
        samples = equal_length_samples(trainer)[:8]
        assert len({len(sample.target[0]) for sample in samples}) > 2
        trainer = Trainer(trainer.loaded, trainer.objective, samples, trainer.settings)
        return trainer, RecordingObjective(trainer), list(trainer)

    trainer, recorder, steps = train(max_tokens)
    assert list(map(len, recorder.batches)) == sizes
    single, _, expected = train(72)
    assert relative_error(copy_weights(trainer), copy_weights(single)) < 1e-6
    assert steps[0].loss == pytest.approx(expected[0].loss, rel=1e-6)


def train_with(task: str, max_tokens: int, dtype: torch.dtype, max_steps: int) -> tuple[Trainer, list[Step]]:
    trainer = make_trainer(task, 0.0, max_tokens_per_microbatch=max_tokens, max_steps=max_steps, optimizer=LARGE_EPS)
    samples = trainer.samples
    if task == "classify":  # with different weights, as windows of long texts have
        samples = [replace(sample, weight=1 / (1 + number % 3)) for number, sample in enumerate(samples)]
    trainer = Trainer(trainer.loaded.to(dtype), trainer.objective, samples, trainer.settings)
    return trainer, list(trainer)


@pytest.mark.parametrize(
    ("task", "dtype", "max_steps", "tolerance"),
    [
        ("classify", torch.float32, 5, 2e-6),
        ("tag", torch.float32, 5, 2e-6),
        ("classify", torch.float64, 8, 1e-12),
        ("tag", torch.float64, 8, 1e-12),
        ("partial head", torch.float64, 8, 1e-12),
    ],
)
def test_updates_agree_for_any_token_budget(task: str, dtype: torch.dtype, max_steps: int, tolerance: float) -> None:
    full, expected = train_with(task, 10**6, dtype, max_steps)
    for max_tokens in (1, 17, 40):
        trainer, steps = train_with(task, max_tokens, dtype, max_steps)
        assert relative_error(copy_weights(trainer), copy_weights(full)) < tolerance
        assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-6)
        assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in expected], rel=1e-5)
        assert [step.tokens for step in steps] == [step.tokens for step in expected]


def test_the_loss_is_the_mean_over_all_targets() -> None:
    trainer = make_trainer("tag", 0.0)
    for _ in range(4):
        losses: list[float] = []
        with torch.no_grad():
            for number in trainer.order.plan(trainer.step).indices:
                batch = trainer.objective.batch([trainer.samples[number]], [0])
                scores = trainer.loaded.head(trainer.loaded.model(batch.packed)[batch.rows], batch.packed)
                losses += F.cross_entropy(scores, batch.targets, reduction="none").tolist()
        assert trainer.train_step().loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_an_update_is_that_of_transformers_with_torch(tmp_path: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    reference = make_tiny("bert", "BertForSequenceClassification", **no_dropout)
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    ids, types = random_sequences("bert", (7, 23, 4, 12, 9, 30, 5, 16, 8, 11))
    labels = [number % 3 for number in range(len(ids))]
    samples = [Sample.of([i], [t], target=label) for i, t, label in zip(ids, types, labels, strict=True)]
    _, task, _ = tiny_runs.classify()
    train_settings = TrainSettings(
        max_steps=5,
        batch_size=4,
        max_tokens_per_microbatch=30,
        optimizer=AdamW(lr=1e-3, eps=1e-5),
        schedule=Linear(warmup_ratio=0.4),
        precision="float32",
    )
    trainer = Trainer(loaded, task, samples, train_settings)

    groups = [
        {"params": [tensor for tensor in reference.parameters() if tensor.ndim > 1], "weight_decay": 0.01},
        {"params": [tensor for tensor in reference.parameters() if tensor.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 5)
    for number in range(5):
        indices = trainer.order.plan(number).indices.tolist()
        longest = max(len(ids[index]) for index in indices)
        padded = [
            torch.tensor([[*rows[index], *[0] * (longest - len(ids[index]))] for index in indices])
            for rows in (ids, types)
        ]
        mask = torch.tensor([[1] * len(ids[index]) + [0] * (longest - len(ids[index])) for index in indices])
        target = torch.tensor([labels[index] for index in indices])
        loss = reference(input_ids=padded[0], token_type_ids=padded[1], attention_mask=mask, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        step = trainer.train_step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert step.lr == pytest.approx(lr)
    assert trainer.progress == 1
    ours = to_hf_names(FAMILIES["bert"].table(loaded.config.model, loaded.config.head), loaded.named_tensors())
    assert relative_error(ours, dict(reference.named_parameters())) < 1e-5
    initial = make_tiny("bert", "BertForSequenceClassification", **no_dropout)
    assert relative_error(ours, dict(initial.named_parameters())) > 1e-3


def test_a_step_without_targets_changes_no_weights() -> None:
    loaded, task, samples = tiny_runs.classify(0.0, weights=(0.0, 1.0))
    train_settings = make_settings({"optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.0}}, {})[0]
    trainer = Trainer(loaded, task, [sample for sample in samples if sample.target == 0], train_settings)
    before = copy_weights(trainer)
    trainer.train_step()
    step = trainer.train_step()
    assert (step.loss, step.grad_norm, step.updated) == (0.0, 0.0, True)
    assert tensors_equal(copy_weights(trainer), before)


# -- samples of a step -----------------------------------------------------------------------------------------------


def test_an_epoch_takes_every_sample_once_and_the_next_in_another_order() -> None:
    trainer = make_trainer(dropout=0.0)
    recorder = RecordingObjective(trainer)
    steps = list(trainer)
    assert [step.epoch for step in steps] == [number / 4 for number in range(1, 13)]
    indices = [trainer.order.plan(number).indices.tolist() for number in range(12)]
    assert list(map(len, indices)) == [5, 5, 5, 1] * 3
    epochs = [[number for batch in indices[start : start + 4] for number in batch] for start in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    batches = iter(recorder.batches)
    for step, numbers in zip(steps, indices, strict=True):
        step_samples: list[int] = []
        while len(step_samples) < len(numbers):
            step_samples += next(batches)
        assert sorted(step_samples) == sorted(numbers)
        assert step.tokens == sum(len(trainer.samples[number]) for number in numbers)
    assert len(set(recorder.keys)) == 48


def test_samples_of_one_group_are_never_split() -> None:
    trainer = make_trainer(dropout=0.0, max_tokens_per_microbatch=1, batch_size=7, max_steps=3)
    recorder = RecordingObjective(trainer, group_size=3)
    trainer = Trainer(trainer.loaded, recorder, trainer.samples, trainer.settings)
    assert trainer.order.batch_size == 6
    list(trainer)
    assert list(map(len, recorder.batches)) == [3, 3, 3, 3, 3, 1]
    for step in range(3):
        numbers, groups = trainer.order.plan(step).indices.tolist(), recorder.batches[2 * step : 2 * step + 2]
        assert sorted(groups) == sorted([numbers[:3], numbers[3:]])
    trainer = Trainer(trainer.loaded, recorder, trainer.samples, replace(trainer.settings, batch_size=2))
    assert trainer.order.batch_size == 3


def test_the_number_of_steps_follows_from_the_duration() -> None:
    loaded, task, samples = tiny_runs.classify()

    def total_steps(**duration: Any) -> int | None:
        return Trainer(loaded, task, samples, TrainSettings(batch_size=5, **duration)).total_steps

    assert [total_steps(epochs=epochs) for epochs in (2.0, 0.5, 0.01)] == [8, 2, 1]
    assert total_steps(max_steps=7) == 7 and total_steps(time_budget="1h") is None


# -- resuming after any step ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference_run() -> tuple[list[Step], list[tuple[dict[str, Tensor], dict[str, Any]]], list[list[int]]]:
    """A run of twelve steps over three epochs: the steps, the state before each and at the end, and all batches."""
    trainer = make_trainer()
    recorder = RecordingObjective(trainer)
    states, steps = [copy_state(trainer)], []
    for step in trainer:
        steps.append(step)
        states.append(copy_state(trainer))
    assert len(recorder.batches) > 24  # some steps have three micro-batches
    return steps, states, recorder.batches


def make_other_trainer() -> Trainer:
    """Return a trainer with other weights and moments, which a resume must replace."""
    trainer = make_trainer()
    trainer.train_step()
    trainer.train_step()
    with torch.no_grad():
        for tensor in trainer.loaded.named_tensors().values():
            tensor.normal_()
    torch.manual_seed(random.randrange(2**32))
    return trainer


@pytest.mark.parametrize("step", range(12))
def test_resuming_at_any_step_equals_an_uninterrupted_run(reference_run: Any, step: int) -> None:
    steps, states, batches = reference_run
    trainer = make_other_trainer()
    recorder = RecordingObjective(trainer)
    trainer.load_state(*states[step])
    assert records(list(trainer)) == records(steps[step:])
    assert recorder.batches == batches[len(batches) - len(recorder.batches) :]
    tensors, values = copy_state(trainer)
    del values["seconds"], states[-1][1]["seconds"]
    assert tensors_equal(tensors, states[-1][0]) and values == states[-1][1]
    states[-1][1]["seconds"] = 0.0


@pytest.mark.parametrize("stops", [(5, 6), (4, 5, 7), (1, 9, 10, 11)])
def test_resuming_several_times_in_an_epoch_equals_an_uninterrupted_run(
    reference_run: Any, stops: tuple[int, ...]
) -> None:
    steps, states, batches = reference_run
    state, resumed_steps, resumed_batches = copy_state(make_trainer()), [], []
    for stop in (*stops, 12):
        trainer = make_other_trainer()
        recorder = RecordingObjective(trainer)
        trainer.load_state(*state)
        while trainer.step < stop:
            resumed_steps.append(trainer.train_step())
        state = copy_state(trainer)
        trainer.train_step()  # this step is lost, since its state is not saved
        resumed_batches += recorder.batches[
            : len(recorder.batches)
            - len(split_microbatches([len(trainer.samples[n]) for n in trainer.order.plan(stop).indices], 30))
        ]
    assert records(resumed_steps) == records(steps)
    assert resumed_batches == batches
    assert tensors_equal(state[0], states[-1][0])


def test_dropout_differs_between_seeds_steps_and_micro_batches() -> None:
    def losses(dropout: float = 0.1, **settings: Any) -> list[float]:
        """Return the losses of four micro-batches in two steps, all of one sample, with a learning rate of almost 0."""
        train = {"max_steps": 2, "batch_size": 2, "max_tokens_per_microbatch": 1} | settings
        trainer = make_trainer(dropout=dropout, optimizer={"kind": "adamw", "lr": 1e-30}, **train)
        trainer = Trainer(trainer.loaded, trainer.objective, [trainer.samples[2]] * 2, trainer.settings)
        recorder = RecordingObjective(trainer)
        list(trainer)
        return recorder.losses

    default = losses()
    assert len(set(default)) == 4 and losses() == default
    assert not set(losses(seed=2)) & set(default)
    assert len({round(loss, 5) for loss in losses(0.0)}) == 1


def test_a_state_of_other_samples_or_another_model_is_refused() -> None:
    trainer = make_trainer()
    trainer.train_step()
    before = copy_state(trainer)
    tensors, values = copy_state(make_trainer())
    smaller = {name: tensor[:1] if tensor.ndim else tensor for name, tensor in tensors.items()}
    renamed = {name.replace("head", "tail"): tensor for name, tensor in tensors.items()}
    for changed, match in (
        ((tensors, values | {"samples": 1234}), "samples = 1,234, but now it is 16"),
        ((tensors, values | {"batch_size": 6}), "batch_size = 6, but now it is 5"),
        ((tensors, values | {"seed": 2}), "seed = 2, but now it is 1"),
        ((smaller, values), "of another model: its parameters have other names or shapes"),
        ((renamed, values), "of another model"),
        (
            ({name: tensor for name, tensor in tensors.items() if not name.endswith(".m")}, values),
            "the optimizer's state",
        ),
    ):
        with pytest.raises(HeedfulError, match=match):
            trainer.load_state(*changed)
    after = copy_state(trainer)
    assert tensors_equal(before[0], after[0]) and before[1] == after[1]


# -- stops --------------------------------------------------------------------------------------------------------


def test_a_stop_requested_between_steps() -> None:
    trainer = make_trainer()
    for step in trainer:
        trainer.stop_requested = step.number == 3
    assert trainer.step == 3
    assert list(trainer) == []
    with pytest.raises(StoppedError):
        trainer.train_step()
    trainer.stop_requested = False
    assert [step.number for step in trainer] == list(range(4, 13))


def test_a_stop_requested_during_a_step_abandons_it() -> None:
    trainer, uninterrupted = make_trainer(), make_trainer()

    def stop(batch: Batch) -> None:
        trainer.stop_requested = trainer.step == 5

    recorder = RecordingObjective(trainer, stop)
    assert len(list(trainer)) == 5
    assert (
        len(recorder.losses)
        == sum(
            len(split_microbatches([len(trainer.samples[n]) for n in trainer.order.plan(k).indices], 30))
            for k in range(5)
        )
        + 1
    )
    assert trainer.seconds > 0
    trainer.stop_requested = False
    trainer.objective = recorder.objective
    list(trainer)
    list(uninterrupted)
    assert tensors_equal(copy_state(trainer)[0], copy_state(uninterrupted)[0])


# -- state outside of the trainer -------------------------------------------------------------------------------------


def test_a_gpu_is_waited_for_before_its_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read by itself would wait forever for a sum in which a lost rank does not take part."""
    log: list[str] = []
    trainer = make_trainer()
    tolist, grad_norm = Tensor.tolist, trainer._optimizer.grad_norm

    def logged_tolist(tensor: Tensor) -> Any:
        if sys._getframe(1).f_code.co_name == "_accumulate_gradients":
            log.append("losses")
        return tolist(tensor)

    def logged_norm(*arguments: Any, **keywords: Any) -> float:
        log.append("norm")
        return grad_norm(*arguments, **keywords)

    monkeypatch.setattr(Ranks, "wait_for_gpu", lambda self, device: log.append(f"wait for {device}"))
    monkeypatch.setattr(Tensor, "tolist", logged_tolist)
    monkeypatch.setattr(trainer._optimizer, "grad_norm", logged_norm)
    trainer.train_step()
    assert log == ["wait for cpu", "losses", "wait for cpu", "norm"]


def test_training_does_not_change_global_random_generators() -> None:
    def seeded() -> None:
        torch.manual_seed(7)
        np.random.seed(7)

    def fail(batch: Batch) -> None:
        raise KeyError

    def draw() -> tuple[list[float], list[float]]:  # without `random`, from which beartype draws
        return torch.rand(3).tolist(), np.random.rand(3).tolist()

    seeded()
    expected = draw()
    trainer, failing = make_trainer(gradient_checkpointing=True), make_trainer()
    RecordingObjective(failing, fail)
    seeded()
    list(trainer)
    with pytest.raises(KeyError):
        failing.train_step()
    assert draw() == expected


def test_global_random_generators_do_not_affect_training(reference_run: Any) -> None:
    trainer = make_trainer()
    steps = []
    for step in trainer:
        torch.manual_seed(step.number)
        torch.rand(step.number)
        steps.append(step)
    assert records(steps) == records(reference_run[0])


def test_the_model_is_ready_to_answer_between_steps() -> None:
    loaded, task, samples = tiny_runs.classify()
    trainer = Trainer(loaded.train(), task, samples, make_settings({}, {})[0])
    assert not loaded.training
    modes: list[bool] = []
    RecordingObjective(trainer, lambda batch: modes.append(trainer.loaded.training))
    trainer.loaded.train()
    for _ in trainer:
        assert not any(module.training for module in trainer.loaded.modules())
        assert not any(tensor.grad is not None for tensor in trainer.loaded.parameters())  # gradients are freed
    assert all(modes)


def test_tensors_without_a_gradient_do_not_change() -> None:
    loaded, task, samples = tiny_runs.partial_head()
    trainer = Trainer(loaded, task, [sample for sample in samples if sample.target == 0], make_settings({}, {})[0])
    before = copy_weights(trainer)
    assert len(list(trainer)) == 12
    unchanged = {name for name, tensor in copy_weights(trainer).items() if torch.equal(tensor, before[name])}
    assert unchanged == {name for name in before if name.startswith("head.")}


def test_frozen_tensors_do_not_change() -> None:
    loaded, task, samples = tiny_runs.classify()
    loaded.model.embedding.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in loaded.named_tensors().items()}
    trainer = Trainer(loaded, task, samples, make_settings({}, {})[0])
    list(trainer)
    changed = {name for name, tensor in loaded.named_tensors().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not name.startswith("embedding.")}
    assert not [name for name in trainer.state()[0] if "embedding." in name]
    loaded.requires_grad_(False)
    with pytest.raises(HeedfulError, match="no parameter"):
        Trainer(loaded, task, samples, make_settings({}, {})[0])


# -- recomputation and precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradient_checkpointing_has_the_same_gradients(dropout: float) -> None:
    plain, checkpointed = make_trainer("tag", dropout), make_trainer("tag", dropout, gradient_checkpointing=True)
    calls = []
    for trainer in (plain, checkpointed):
        trainer.loaded.model.encoder.blocks[0].register_forward_pre_hook(
            lambda *arguments, trainer=trainer: calls.append(trainer)
        )
    assert records(list(plain)) == records(list(checkpointed))
    assert tensors_equal(copy_weights(plain), copy_weights(checkpointed))
    assert calls.count(checkpointed) == 2 * calls.count(plain) > 0


def gradients(trainer: Trainer) -> Tensor:
    """Return the gradients of the current step as one vector."""
    trainer._accumulate_gradients(trainer._step_batches())
    return torch.cat(
        [tensor.grad.flatten() for tensor in trainer.loaded.named_tensors().values() if tensor.grad is not None]
    )


def test_products_in_bfloat16() -> None:
    train = {"batch_size": 16, "max_tokens_per_microbatch": 10**6, "max_steps": 4}
    exact, rounded = make_trainer("tag", 0.0, **train), make_trainer("tag", 0.0, precision="bfloat16", **train)
    exact_gradients, rounded_gradients = gradients(exact), gradients(rounded)
    assert rounded.precision == torch.bfloat16
    assert F.cosine_similarity(exact_gradients, rounded_gradients, dim=0) > 0.99
    assert not torch.equal(exact_gradients, rounded_gradients)
    for step, rounded_step in zip(exact, rounded, strict=True):
        assert rounded_step.loss == pytest.approx(step.loss, rel=0.01)
    assert {tensor.dtype for tensor in rounded.state()[0].values()} == {torch.float32}
    recomputed = make_trainer("tag", 0.1, precision="bfloat16", gradient_checkpointing=True, **train)
    assert records(list(recomputed)) == records(list(make_trainer("tag", 0.1, precision="bfloat16", **train)))


def test_auto_precision_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, expected in (
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, torch.bfloat16),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, torch.float32),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        assert resolve_dtype("auto") == expected
        assert (resolve_dtype("float32"), resolve_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


# -- time budgets -----------------------------------------------------------------------------------------------------


def test_a_time_budget_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e6

    def clock() -> float:
        nonlocal now
        now += 1.5  # a step reads the clock at its start and at its end
        return now

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=clock))
    train_settings = TrainSettings(
        time_budget=0.5, batch_size=5, schedule=Linear(warmup_ratio=0.2), precision="float32"
    )
    loaded, task, samples = tiny_runs.classify()
    trainer = Trainer(loaded, task, samples, train_settings)
    assert trainer.total_steps is None and trainer.progress == 0
    steps = []
    for step in trainer:
        steps.append(step)
        assert trainer.progress == pytest.approx(len(steps) / 20)
        if len(steps) == 8:
            state = copy_state(trainer)
    assert len(steps) == 20 and trainer.seconds == pytest.approx(30)
    expected = [5e-5 * lr_factor(Linear(warmup_ratio=0.2), 1.5 * number, 30.0) for number in range(20)]
    assert [step.lr for step in steps] == pytest.approx(expected)
    resumed = Trainer(*tiny_runs.classify(), train_settings)
    resumed.load_state(*state)
    assert records(list(resumed)) == records(steps[8:])


def test_only_the_monotonic_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise AssertionError("the wall clock was read")

    trainer = Trainer(*tiny_runs.classify(), make_settings({"max_steps": None, "time_budget": 0.002}, {})[0])
    monkeypatch.setattr(time, "time", fail)
    assert list(trainer)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"batch_size": 0}, r"^batch_size is 0; expected a whole number from 1 below 2"),
        ({"max_tokens_per_microbatch": 0}, r"^max_tokens_per_microbatch is 0"),
        ({"seed": -1}, r"^seed is -1; expected a whole number from 0"),
        ({"seed": 2**63}, r"^seed is 9223372036854775808"),
        ({"max_nonfinite_steps": -1}, r"^max_nonfinite_steps is -1"),
        ({"epochs": 0.0}, r"^epochs is 0.0; expected a number above 0"),
        ({"time_budget": math.nan}, r"^time_budget is nan"),
        ({"time_budget": "0m"}, r'^time_budget is "0m"; expected a duration'),
        ({"epochs": math.inf}, r"^epochs is inf"),
        ({"max_steps": -5}, r"^max_steps is -5"),
        (
            {"epochs": None},
            r"^none of epochs, max_steps and time_budget is given: give exactly one of epochs, max_steps",
        ),
        (
            {"epochs": 3.0, "max_steps": 3},
            r"^epochs and max_steps are given: give exactly one of epochs, max_steps, time_budget",
        ),
    ],
)
def test_invalid_settings_are_refused(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        TrainSettings(**({} if changed.keys() & {"epochs", "max_steps", "time_budget"} else {"epochs": 3.0}) | changed)


def test_valid_settings_and_no_samples() -> None:
    assert TrainSettings(epochs=3.0).schedule == Linear(warmup_ratio=0.1)
    train_settings = TrainSettings(seed=2**63 - 1, schedule=Constant(), batch_size=5, max_steps=2, precision="float32")
    assert len(list(Trainer(*tiny_runs.classify(), train_settings))) == 2
    loaded, task, _ = tiny_runs.classify()
    with pytest.raises(HeedfulError, match="no samples"):
        Trainer(loaded, task, [], TrainSettings(epochs=3.0))


# -- worker processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [{}, {"max_tokens_per_microbatch": 20}])
def test_workers_prepare_the_batches_of_the_training_process(train: dict[str, Any]) -> None:
    without_workers, with_workers = make_trainer(**train), make_trainer(num_workers=2, **train)
    assert records(list(without_workers)) == records(list(with_workers))
    assert tensors_equal(copy_state(without_workers)[0], copy_state(with_workers)[0])


def test_workers_of_a_resumed_run_start_at_its_step() -> None:
    uninterrupted, trainer = make_trainer(), make_trainer(num_workers=1)
    list(uninterrupted)
    for _ in range(3):
        trainer.train_step()
    tensors, values = copy_state(trainer)
    for _ in range(2):
        trainer.train_step()
    trainer.load_state(tensors, values)
    list(trainer)
    assert tensors_equal(copy_state(uninterrupted)[0], copy_state(trainer)[0])


def test_an_error_in_a_worker_reaches_the_training_process() -> None:
    trainer = make_trainer(num_workers=1)
    recorder = RecordingObjective(trainer)
    recorder.sample_numbers = {}
    with pytest.raises(KeyError, match="DataLoader worker process 0"):
        trainer.train_step()

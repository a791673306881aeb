"""The trainer: an update depends neither on its micro-batches nor on a resume."""

from __future__ import annotations

import math
import random
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

# -- an update does not depend on how it was cut up -------------------------------------------------------------------


def evenly(made: Trainer, length: int = 9) -> list[Sample]:
    """Samples of one length, with very unequal counts of targets."""
    samples = []
    for sample in made.samples:
        places, labels = sample.target
        kept = [(place, label) for place, label in zip(places, labels, strict=True) if place < length]
        if len(sample) >= length:
            kept = kept[: 1 + len(samples) * 2 % 7]
            target = tuple(zip(*kept, strict=True))
            samples.append(replace(sample, tokens=sample.tokens[:length], types=sample.types[:length], target=target))
    return [replace(sample, bounds=(0, length)) for sample in samples]


@pytest.mark.parametrize(("budget", "cuts"), [(9, [1] * 8), (18, [2] * 4), (10**6, [8])])
def test_micro_batches_of_8x1_4x2_and_1x8_agree(budget: int, cuts: list[int]) -> None:
    def updated(budget: int) -> tuple[Trainer, RecordingObjective, list[Step]]:
        made = make_trainer(
            "tag",
            0.0,
            max_tokens_per_microbatch=budget,
            batch_size=8,
            max_steps=1,
            optimizer=LARGE_EPS,
        )
        samples = evenly(made)[:8]
        assert len({len(sample.target[0]) for sample in samples}) > 2
        made = Trainer(made.loaded, made.objective, samples, made.settings)
        return made, RecordingObjective(made), list(made)

    made, recorder, steps = updated(budget)
    assert list(map(len, recorder.batches)) == cuts
    one, _, expected = updated(72)
    assert relative_error(copy_weights(made), copy_weights(one)) < 1e-6
    assert steps[0].loss == pytest.approx(expected[0].loss, rel=1e-6)


def cut_up(task: str, budget: int, dtype: torch.dtype, count: int) -> tuple[Trainer, list[Step]]:
    made = make_trainer(task, 0.0, max_tokens_per_microbatch=budget, max_steps=count, optimizer=LARGE_EPS)
    samples = made.samples
    if task == "classify":  # as windows of longer texts weigh less
        samples = [replace(sample, weight=1 / (1 + number % 3)) for number, sample in enumerate(samples)]
    made = Trainer(made.loaded.to(dtype), made.objective, samples, made.settings)
    return made, list(made)


@pytest.mark.parametrize(
    ("task", "dtype", "count", "least"),
    [
        ("classify", torch.float32, 5, 2e-6),
        ("tag", torch.float32, 5, 2e-6),
        ("classify", torch.float64, 8, 1e-12),
        ("tag", torch.float64, 8, 1e-12),
        ("partial head", torch.float64, 8, 1e-12),
    ],
)
def test_updates_agree_for_any_token_budget(task: str, dtype: torch.dtype, count: int, least: float) -> None:
    whole, expected = cut_up(task, 10**6, dtype, count)
    for budget in (1, 17, 40):
        made, steps = cut_up(task, budget, dtype, count)
        assert relative_error(copy_weights(made), copy_weights(whole)) < least
        assert [step.loss for step in steps] == pytest.approx([step.loss for step in expected], rel=1e-6)
        assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in expected], rel=1e-5)
        assert [step.tokens for step in steps] == [step.tokens for step in expected]


def test_the_loss_is_the_mean_over_all_targets() -> None:
    made = make_trainer("tag", 0.0)
    for _ in range(4):
        losses: list[float] = []
        with torch.no_grad():
            for number in made.order.plan(made.step).indices:
                batch = made.objective.batch([made.samples[number]], [0])
                scores = made.loaded.head(made.loaded.model(batch.packed)[batch.rows], batch.packed)
                losses += F.cross_entropy(scores, batch.targets, reduction="none").tolist()
        assert made.train_step().loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_an_update_is_that_of_transformers_with_torch(tmp_path: Path) -> None:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    theirs = make_tiny("bert", "BertForSequenceClassification", **off)
    theirs.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    ids, types = random_sequences("bert", (7, 23, 4, 12, 9, 30, 5, 16, 8, 11))
    labels = [number % 3 for number in range(len(ids))]
    samples = [Sample.of([i], [t], target=label) for i, t, label in zip(ids, types, labels, strict=True)]
    _, task, _ = tiny_runs.classify()
    chosen = TrainSettings(
        max_steps=5,
        batch_size=4,
        max_tokens_per_microbatch=30,
        optimizer=AdamW(lr=1e-3, eps=1e-5),
        schedule=Linear(warmup_ratio=0.4),
        precision="float32",
    )
    made = Trainer(loaded, task, samples, chosen)

    groups = [
        {"params": [each for each in theirs.parameters() if each.ndim > 1], "weight_decay": 0.01},
        {"params": [each for each in theirs.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 5)
    for number in range(5):
        taken = made.order.plan(number).indices.tolist()
        longest = max(len(ids[each]) for each in taken)
        padded = [
            torch.tensor([[*given[each], *[0] * (longest - len(ids[each]))] for each in taken])
            for given in (ids, types)
        ]
        mask = torch.tensor([[1] * len(ids[each]) + [0] * (longest - len(ids[each])) for each in taken])
        target = torch.tensor([labels[each] for each in taken])
        loss = theirs(input_ids=padded[0], token_type_ids=padded[1], attention_mask=mask, labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        step = made.train_step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert step.lr == pytest.approx(rate)
    assert made.progress == 1
    ours = to_hf_names(FAMILIES["bert"].table(loaded.config.model, loaded.config.head), loaded.named_tensors())
    assert relative_error(ours, dict(theirs.named_parameters())) < 1e-5
    before = make_tiny("bert", "BertForSequenceClassification", **off)
    assert relative_error(ours, dict(before.named_parameters())) > 1e-3


def test_a_step_without_targets_moves_nothing_by_itself() -> None:
    loaded, task, samples = tiny_runs.classify(0.0, weights=(0.0, 1.0))
    chosen = make_settings({"optimizer": {"kind": "adamw", "lr": 1e-3, "weight_decay": 0.0}}, {})[0]
    made = Trainer(loaded, task, [sample for sample in samples if sample.target == 0], chosen)
    before = copy_weights(made)
    made.train_step()
    step = made.train_step()
    assert (step.loss, step.grad_norm, step.updated) == (0.0, 0.0, True)
    assert tensors_equal(copy_weights(made), before)


# -- which samples a step takes -----------------------------------------------------------------------------------


def test_an_epoch_takes_every_sample_once_and_the_next_in_another_order() -> None:
    made = make_trainer(dropout=0.0)
    recorder = RecordingObjective(made)
    steps = list(made)
    assert [step.epoch for step in steps] == [number / 4 for number in range(1, 13)]
    taken = [made.order.plan(number).indices.tolist() for number in range(12)]
    assert list(map(len, taken)) == [5, 5, 5, 1] * 3
    epochs = [[number for each in taken[start : start + 4] for number in each] for start in (0, 4, 8)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    seen = iter(recorder.batches)
    for step, numbers in zip(steps, taken, strict=True):
        found: list[int] = []
        while len(found) < len(numbers):
            found += next(seen)
        assert sorted(found) == sorted(numbers)
        assert step.tokens == sum(len(made.samples[number]) for number in numbers)
    assert len(set(recorder.keys)) == 48


def test_samples_that_belong_together_are_never_parted() -> None:
    made = make_trainer(dropout=0.0, max_tokens_per_microbatch=1, batch_size=7, max_steps=3)
    recorder = RecordingObjective(made, group_size=3)
    made = Trainer(made.loaded, recorder, made.samples, made.settings)
    assert made.order.batch_size == 6
    list(made)
    assert list(map(len, recorder.batches)) == [3, 3, 3, 3, 3, 1]
    for step in range(3):
        numbers, pairs = made.order.plan(step).indices.tolist(), recorder.batches[2 * step : 2 * step + 2]
        assert sorted(pairs) == sorted([numbers[:3], numbers[3:]])
    made = Trainer(made.loaded, recorder, made.samples, replace(made.settings, batch_size=2))
    assert made.order.batch_size == 3


def test_how_long_it_takes() -> None:
    loaded, task, samples = tiny_runs.classify()

    def total(**duration: Any) -> int | None:
        return Trainer(loaded, task, samples, TrainSettings(batch_size=5, **duration)).total_steps

    assert total(epochs=2.0) == 8 and total(epochs=0.5) == 2 and total(epochs=0.01) == 1
    assert total(max_steps=7) == 7 and total(time_budget="1h") is None


# -- any step can be the last before a resume -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def journey() -> tuple[list[Step], list[tuple[dict[str, Tensor], dict[str, Any]]], list[list[int]]]:
    """Twelve steps with dropout, in micro-batches, over three epochs: the state before each of them and at the end."""
    made = make_trainer()
    recorder = RecordingObjective(made)
    states, steps = [copy_state(made)], []
    for step in made:
        steps.append(step)
        states.append(copy_state(made))
    assert len(recorder.batches) > 24  # some steps are cut into three
    return steps, states, recorder.batches


def elsewhere() -> Trainer:
    """Another process would not have these weights, nor these moments."""
    made = make_trainer()
    made.train_step()
    made.train_step()
    with torch.no_grad():
        for tensor in made.loaded.named_tensors().values():
            tensor.normal_()
    torch.manual_seed(random.randrange(2**32))
    return made


@pytest.mark.parametrize("at", range(12))
def test_resuming_at_any_step_equals_an_uninterrupted_run(journey: Any, at: int) -> None:
    steps, states, seen = journey
    made = elsewhere()
    recorder = RecordingObjective(made)
    made.load_state(*states[at])
    assert records(list(made)) == records(steps[at:])
    assert recorder.batches == seen[len(seen) - len(recorder.batches) :]
    tensors, values = copy_state(made)
    del values["seconds"], states[-1][1]["seconds"]
    assert tensors_equal(tensors, states[-1][0]) and values == states[-1][1]
    states[-1][1]["seconds"] = 0.0


@pytest.mark.parametrize("stops", [(5, 6), (4, 5, 7), (1, 9, 10, 11)])
def test_resuming_several_times_in_an_epoch_equals_an_uninterrupted_run(journey: Any, stops: tuple[int, ...]) -> None:
    steps, states, seen = journey
    state, found, taken = copy_state(make_trainer()), [], []
    for stop in (*stops, 12):
        made = elsewhere()
        recorder = RecordingObjective(made)
        made.load_state(*state)
        while made.step < stop:
            found.append(made.train_step())
        state = copy_state(made)
        made.train_step()  # and this one is lost
        taken += recorder.batches[
            : len(recorder.batches)
            - len(split_microbatches([len(made.samples[n]) for n in made.order.plan(stop).indices], 30))
        ]
    assert records(found) == records(steps)
    assert taken == seen
    assert tensors_equal(state[0], states[-1][0])


def test_seeds_steps_and_micro_batches_drop_out_something_else() -> None:
    def losses(dropout: float = 0.1, **more: Any) -> list[float]:
        """Of four micro-batches, two in a step; all have the same sample, and nothing moves."""
        how = {"max_steps": 2, "batch_size": 2, "max_tokens_per_microbatch": 1} | more
        made = make_trainer(dropout=dropout, optimizer={"kind": "adamw", "lr": 1e-30}, **how)
        made = Trainer(made.loaded, made.objective, [made.samples[2]] * 2, made.settings)
        recorder = RecordingObjective(made)
        list(made)
        return recorder.losses

    found = losses()
    assert len(set(found)) == 4 and losses() == found
    assert not set(losses(seed=2)) & set(found)
    assert len({round(loss, 5) for loss in losses(0.0)}) == 1


def test_a_state_of_something_else_is_refused() -> None:
    made = make_trainer()
    made.train_step()
    before = copy_state(made)
    tensors, values = copy_state(make_trainer())
    smaller = {name: tensor[:1] if tensor.ndim else tensor for name, tensor in tensors.items()}
    renamed = {name.replace("head", "tail"): tensor for name, tensor in tensors.items()}
    for changed, match in (
        ((tensors, values | {"samples": 1234}), "samples = 1,234, but now it is 16"),
        ((tensors, values | {"batch_size": 6}), "batch_size = 6, but now it is 5"),
        ((tensors, values | {"seed": 2}), "seed = 2, but now it is 1"),
        ((smaller, values), "of another model: its parameters have other names or shapes"),
        ((renamed, values), "of another model"),
        (({name: each for name, each in tensors.items() if not name.endswith(".m")}, values), "the optimizer's state"),
    ):
        with pytest.raises(HeedfulError, match=match):
            made.load_state(*changed)
    after = copy_state(made)
    assert tensors_equal(before[0], after[0]) and before[1] == after[1]


# -- stops --------------------------------------------------------------------------------------------------------


def test_a_stop_that_is_asked_for_between_steps() -> None:
    made = make_trainer()
    for step in made:
        made.stop_requested = step.number == 3
    assert made.step == 3
    assert list(made) == []
    with pytest.raises(StoppedError):
        made.train_step()
    made.stop_requested = False
    assert [step.number for step in made] == list(range(4, 13))


def test_a_stop_leaves_the_step_that_is_running() -> None:
    made, whole = make_trainer(), make_trainer()

    def stop(batch: Batch) -> None:
        made.stop_requested = made.step == 5

    recorder = RecordingObjective(made, stop)
    assert len(list(made)) == 5
    assert (
        len(recorder.losses)
        == sum(
            len(split_microbatches([len(made.samples[n]) for n in made.order.plan(k).indices], 30)) for k in range(5)
        )
        + 1
    )
    assert made.seconds > 0
    made.stop_requested = False
    made.objective = recorder.objective
    list(made)
    list(whole)
    assert tensors_equal(copy_state(made)[0], copy_state(whole)[0])


# -- what the trainer leaves alone --------------------------------------------------------------------------------


def test_the_callers_generators_go_on_as_if_nothing_had_been() -> None:
    def seeded() -> None:
        torch.manual_seed(7)
        np.random.seed(7)

    def fail(batch: Batch) -> None:
        raise KeyError

    def drawn() -> tuple[list[float], list[float]]:  # not random's own: it is beartype that draws from it
        return torch.rand(3).tolist(), np.random.rand(3).tolist()

    seeded()
    expected = drawn()
    made, broken = make_trainer(gradient_checkpointing=True), make_trainer()
    RecordingObjective(broken, fail)
    seeded()
    list(made)
    with pytest.raises(KeyError):
        broken.train_step()
    assert drawn() == expected


def test_what_the_caller_draws_does_not_matter(journey: Any) -> None:
    made = make_trainer()
    steps = []
    for step in made:
        torch.manual_seed(step.number)
        torch.rand(step.number)
        steps.append(step)
    assert records(steps) == records(journey[0])


def test_the_model_is_ready_to_answer_between_steps() -> None:
    loaded, task, samples = tiny_runs.classify()
    made = Trainer(loaded.train(), task, samples, make_settings({}, {})[0])
    assert not loaded.training
    modes: list[bool] = []
    RecordingObjective(made, lambda batch: modes.append(made.loaded.training))
    made.loaded.train()
    for _ in made:
        assert not any(module.training for module in made.loaded.modules())
        assert not any(tensor.grad is not None for tensor in made.loaded.parameters())  # nor is memory held
    assert all(modes)


def test_tensors_without_a_gradient_stay() -> None:
    loaded, task, samples = tiny_runs.partial_head()
    made = Trainer(loaded, task, [sample for sample in samples if sample.target == 0], make_settings({}, {})[0])
    before = copy_weights(made)
    assert len(list(made)) == 12
    stayed = {name for name, tensor in copy_weights(made).items() if torch.equal(tensor, before[name])}
    assert stayed == {name for name in before if name.startswith("head.")}


def test_frozen_tensors_stay() -> None:
    loaded, task, samples = tiny_runs.classify()
    loaded.model.embedding.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in loaded.named_tensors().items()}
    made = Trainer(loaded, task, samples, make_settings({}, {})[0])
    list(made)
    moved = {name for name, tensor in loaded.named_tensors().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if not name.startswith("embedding.")}
    assert not [name for name in made.state()[0] if "embedding." in name]
    loaded.requires_grad_(False)
    with pytest.raises(HeedfulError, match="no parameter"):
        Trainer(loaded, task, samples, make_settings({}, {})[0])


# -- recomputation and precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputed_blocks_give_the_same_gradients(dropout: float) -> None:
    plain, again = make_trainer("tag", dropout), make_trainer("tag", dropout, gradient_checkpointing=True)
    calls = []
    for made in (plain, again):
        made.loaded.model.encoder.blocks[0].register_forward_pre_hook(lambda *given, made=made: calls.append(made))
    assert records(list(plain)) == records(list(again))
    assert tensors_equal(copy_weights(plain), copy_weights(again))
    assert calls.count(again) == 2 * calls.count(plain) > 0


def gradients(made: Trainer) -> Tensor:
    made._accumulate_gradients(made._step_batches())
    return torch.cat(
        [tensor.grad.flatten() for tensor in made.loaded.named_tensors().values() if tensor.grad is not None]
    )


def test_products_in_bfloat16() -> None:
    how = {"batch_size": 16, "max_tokens_per_microbatch": 10**6, "max_steps": 4}
    fine, coarse = make_trainer("tag", 0.0, **how), make_trainer("tag", 0.0, precision="bfloat16", **how)
    one, other = gradients(fine), gradients(coarse)
    assert coarse.precision == torch.bfloat16
    assert F.cosine_similarity(one, other, dim=0) > 0.99
    assert not torch.equal(one, other)
    for step, near in zip(fine, coarse, strict=True):
        assert near.loss == pytest.approx(step.loss, rel=0.01)
    assert {tensor.dtype for tensor in coarse.state()[0].values()} == {torch.float32}
    recomputed = make_trainer("tag", 0.1, precision="bfloat16", gradient_checkpointing=True, **how)
    assert records(list(recomputed)) == records(list(make_trainer("tag", 0.1, precision="bfloat16", **how)))


def test_precision_is_chosen_by_what_the_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, expected in (
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True, "avx512_bf16": False}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda features=features: features)
        assert resolve_dtype("auto") == expected
        assert (resolve_dtype("float32"), resolve_dtype("bfloat16")) == (torch.float32, torch.bfloat16)


# -- minutes ------------------------------------------------------------------------------------------------------


def test_minutes_follow_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e6

    def clock() -> float:
        nonlocal now
        now += 1.5  # it is asked at the start and at the end of a step
        return now

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=clock))
    chosen = TrainSettings(time_budget=0.5, batch_size=5, schedule=Linear(warmup_ratio=0.2), precision="float32")
    loaded, task, samples = tiny_runs.classify()
    made = Trainer(loaded, task, samples, chosen)
    assert made.total_steps is None and made.progress == 0
    steps = []
    for step in made:
        steps.append(step)
        assert made.progress == pytest.approx(len(steps) / 20)
        if len(steps) == 8:
            state = copy_state(made)
    assert len(steps) == 20 and made.seconds == pytest.approx(30)
    expected = [5e-5 * lr_factor(Linear(warmup_ratio=0.2), 1.5 * number, 30.0) for number in range(20)]
    assert [step.lr for step in steps] == pytest.approx(expected)
    again = Trainer(*tiny_runs.classify(), chosen)
    again.load_state(*state)
    assert records(list(again)) == records(steps[8:])


def test_only_the_monotonic_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def jumped() -> float:
        raise AssertionError("the time of day was asked for")

    made = Trainer(*tiny_runs.classify(), make_settings({"max_steps": None, "time_budget": 0.002}, {})[0])
    monkeypatch.setattr(time, "time", jumped)
    assert list(made)


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
def test_settings_that_make_no_sense(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(HeedfulError, match=match):
        TrainSettings(**({} if changed.keys() & {"epochs", "max_steps", "time_budget"} else {"epochs": 3.0}) | changed)


def test_settings_that_do() -> None:
    assert TrainSettings(epochs=3.0).schedule == Linear(warmup_ratio=0.1)
    chosen = TrainSettings(seed=2**63 - 1, schedule=Constant(), batch_size=5, max_steps=2, precision="float32")
    assert len(list(Trainer(*tiny_runs.classify(), chosen))) == 2
    loaded, task, _ = tiny_runs.classify()
    with pytest.raises(HeedfulError, match="no samples"):
        Trainer(loaded, task, [], TrainSettings(epochs=3.0))


# -- batches that are prepared ahead ----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"max_tokens_per_microbatch": 20}])
def test_workers_prepare_the_batches_of_the_training_process(more: dict[str, Any]) -> None:
    alone, with_workers = make_trainer(**more), make_trainer(num_workers=2, **more)
    assert records(list(alone)) == records(list(with_workers))
    assert tensors_equal(copy_state(alone)[0], copy_state(with_workers)[0])


def test_workers_start_anew_where_a_resumed_run_continues() -> None:
    whole, made = make_trainer(), make_trainer(num_workers=1)
    list(whole)
    for _ in range(3):
        made.train_step()
    tensors, values = copy_state(made)
    for _ in range(2):
        made.train_step()
    made.load_state(tensors, values)
    list(made)
    assert tensors_equal(copy_state(whole)[0], copy_state(made)[0])


def test_an_error_in_a_worker_reaches_the_training_process() -> None:
    made = make_trainer(num_workers=1)
    recorder = RecordingObjective(made)
    recorder.sample_numbers = {}
    with pytest.raises(KeyError, match="DataLoader worker process 0"):
        made.train_step()

"""Loss scaling for float16, tried in float32 on the CPU: gradients that overflow are injected."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from heedful.errors import HeedfulError
from heedful.train.fit import Reporter, fit
from heedful.train.loss_scale import GROWTH_INTERVAL, MIN_SCALE, LossScale
from heedful.train.trainer import DivergedError, Trainer
from tests.support.tiny_runs import (
    FAULTS,
    FaultyObjective,
    copy_state,
    copy_weights,
    make_settings,
    make_trainer,
    records,
    tensors_equal,
)


def make_scaling_trainer(task: str = "classify", **train: Any) -> Trainer:
    """Return a trainer in float32 that scales its loss as training in float16 does."""
    training = make_trainer(task, **train)
    training._loss_scale = LossScale.for_batch(training.order.batch_size)
    return training


def test_the_scale_grows_slowly_and_is_halved_at_once() -> None:
    loss_scale = LossScale(scale=8.0)
    assert not any(loss_scale.update(is_finite=True) for _ in range(GROWTH_INTERVAL - 1)) and loss_scale.scale == 8.0
    loss_scale.update(is_finite=True)
    assert (loss_scale.scale, loss_scale.steps, loss_scale.overflows) == (16.0, 0, 0)
    loss_scale.update(is_finite=True)
    assert loss_scale.update(is_finite=False)
    assert (loss_scale.scale, loss_scale.steps, loss_scale.overflows) == (8.0, 0, 1)
    loss_scale = LossScale(scale=MIN_SCALE)
    assert not loss_scale.update(is_finite=False) and loss_scale.scale == MIN_SCALE


@pytest.mark.parametrize("task", ["classify", "packed"])
def test_scaling_changes_no_bit(task: str) -> None:
    """The scale is a power of 2, which changes only exponents, and nothing overflows float32."""
    training, plain = make_scaling_trainer(task), make_trainer(task)
    steps, expected = list(training), list(plain)
    assert [step.loss_scale for step in steps] == [2.0**14] * 12
    assert [step._replace(loss_scale=None).record for step in steps] == records(expected)
    assert tensors_equal(copy_weights(training), copy_weights(plain))


def test_steps_that_overflow_are_skipped_and_halve_the_scale() -> None:
    training = make_scaling_trainer()
    training.objective = FaultyObjective(training.objective, training, FAULTS["nan gradient"], step=3, num_steps=2)
    before: dict[str, Any] = {}
    for step in training:
        if step.number == 2:
            before = copy_weights(training)
        if step.number in (3, 4):
            assert (
                tensors_equal(before, copy_weights(training))
                and not math.isfinite(step.grad_norm)
                and math.isfinite(step.loss)
            )
            assert step.record["skipped"] and step.record["loss_scale"] == 2.0 ** (17 - step.number)
        else:
            assert step.updated and "skipped" not in step.record
    assert training.overflows == 2 and step.loss_scale == 2.0**12
    assert {int(value) for name, value in training.state()[0].items() if name.endswith(".steps")} == {10}


def test_gradients_that_stay_infinite_end_training() -> None:
    training = make_scaling_trainer(max_steps=60)
    training.objective = FaultyObjective(training.objective, training, FAULTS["nan gradient"], step=1, num_steps=60)
    with pytest.raises(DivergedError, match=r"^step 29: the loss is"):  # when the scale 2^14 is halved down to 2^-14
        list(training)
    assert training.overflows == 28


def test_an_infinite_loss_is_no_overflow() -> None:
    training = make_scaling_trainer()
    training.objective = FaultyObjective(training.objective, training, FAULTS["infinite loss"], step=3)
    with pytest.raises(DivergedError, match=r"^step 3"):
        list(training)
    assert training.overflows == 0


def test_a_resumed_run_has_the_same_scale() -> None:
    outcomes = []
    for stop in (0, 4):
        training = make_scaling_trainer("packed")
        training.objective = FaultyObjective(training.objective, training, FAULTS["nan gradient"], step=2)
        steps = [training.train_step().record for _ in range(stop)]
        if stop:
            state = copy_state(training)
            assert state[1]["loss_scale"] == {"scale": 2.0**13, "steps": 2, "overflows": 1}
            training = make_scaling_trainer("packed")
            training.load_state(*state)
        outcomes.append((steps + records(list(training)), copy_state(training)))
    (steps, (tensors, values)), (resumed_steps, (resumed, resumed_values)) = outcomes
    assert repr(steps) == repr(resumed_steps)  # the norm of the skipped step is NaN
    assert tensors_equal(tensors, resumed) and values["loss_scale"] == resumed_values["loss_scale"]


def test_a_run_reports_the_steps_that_were_skipped(tmp_path: Path) -> None:
    messages: list[str] = []

    class MessageRecorder(Reporter):
        def message(self, text: str) -> None:
            messages.append(text)

    training = make_scaling_trainer()
    training.objective = FaultyObjective(training.objective, training, FAULTS["nan gradient"], step=2)
    fit(training, tmp_path, make_settings({}, {})[1], reporter=MessageRecorder())
    assert [text for text in messages if "1 of 12 steps were skipped: gradients were too large for float16" in text]
    assert (tmp_path / "journal.jsonl").read_text().count('"skipped"') == 1


def test_float16_is_refused_on_a_cpu() -> None:
    with pytest.raises(HeedfulError, match="the precision is float16, and the device is a CPU"):
        make_trainer(precision="float16", device="cpu")

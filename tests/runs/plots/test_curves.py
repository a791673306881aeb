"""Training curves: which values of a journal are drawn, and that unusual journals are drawn too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from heedful.runs.plots.curves import TrainingCurves, moving_mean, plot_curves, ranges
from heedful.runs.plots.figures import draw_run_plots
from tests.support import run_folders

NAN, INFINITY = float("nan"), float("inf")


def update_records(losses: list[Any]) -> list[run_folders.Line]:
    """Return the records of a journal for updates with these losses."""
    return [
        {"step": step, "epoch": step / 10, "loss": loss, "lr": 1e-4, "grad_norm": 1.0}
        for step, loss in enumerate(losses, start=1)
    ]


def eval_record(step: int, metric_value: Any, *, best: bool, **dev_metrics: float) -> run_folders.Line:
    """Return the record of a journal for an evaluation on dev."""
    return {"step": step, "dev": dev_metrics, "metric_value": metric_value, "best": best}


JOURNALS = {
    "one step": update_records([0.5]),
    "one step and one evaluation": [*update_records([0.5]), eval_record(1, 0.5, best=True, loss=0.4)],
    "constant": update_records([0.5] * 50),
    "zero": [record | {"lr": 0.0, "loss": 0.0} for record in update_records([0.0] * 50)],
    "all of it not finite": update_records([NAN] * 5),
    "some of it not finite": update_records([0.5, NAN, 0.4, INFINITY, 0.3, -INFINITY, *[0.2] * 100]),
    "a spike": update_records([0.5] * 99 + [1e6]),
    "huge": update_records([1e300, 1e301, 1e302]),
    "tiny": update_records([1e-300, 1e-301, 1e-302]),
    "negative": update_records([-0.5, -0.6, -1000.0]),
    "long": update_records([math.sin(step) + 2 for step in range(7001)]),
    "long and not finite": update_records([NAN] * 7001),
    "evaluations without a number": [*update_records([0.5] * 20), eval_record(10, "NaN", best=False)],
    "evaluations without a best one": [*update_records([0.5] * 20), eval_record(10, 0.5, best=False)],
    "left out": [record | {"skipped": True} for record in update_records([NAN, 0.5])],
    "no epochs": [record | {"epoch": 0.0} for record in update_records([0.5, 0.4])],
    "a formula in the name": [*update_records([0.5] * 20), eval_record(10, 0.5, best=True)],
}


@pytest.mark.parametrize("name", JOURNALS)
def test_every_journal_is_drawn(tmp_path: Path, name: str) -> None:
    metric = "$\\frac{$" if name == "a formula in the name" else "accuracy"
    results = run_folders.results_json("multiple-choice", metric, {})
    folder = run_folders.write_run_folder(tmp_path, results, [])
    run_folders.write_journal(folder, JOURNALS[name])
    (path,) = draw_run_plots(folder)
    assert path.name == "curves.png"
    assert path.stat().st_size > 5000


def test_an_empty_journal_is_not_drawn(tmp_path: Path) -> None:
    run_folders.write_journal(tmp_path, [])
    assert draw_run_plots(tmp_path) == []
    assert plot_curves([eval_record(3, 0.5, best=True)], "accuracy") is None


def test_the_columns_of_a_journal() -> None:
    records = [*update_records([0.5, "NaN"]), eval_record(2, 1.0, best=True, loss=0.3, accuracy=1)]
    records += [*update_records([0.1]), eval_record(3, 0.9, best=False)]
    curves = TrainingCurves.of(iter(records))
    assert curves.step.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(curves.loss, [0.5, NAN, 0.1])
    assert curves.eval_steps.tolist() == [2, 3]
    np.testing.assert_array_equal(curves.dev_loss, [0.3, NAN])
    assert curves.score.tolist() == [1.0, 0.9]
    assert curves.best == 2


def test_panels_and_axes() -> None:
    records = run_folders.journal_records(300, num_evaluations=6, epochs=3.0)
    updates = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "dev" in record]
    figure = plot_curves(records, "accuracy")
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy on dev", "learning rate"]
    assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
    loss_axes, score_axes, lr_axes = figure.axes
    raw_loss, _smoothed_loss, dev_loss = loss_axes.lines
    assert raw_loss.get_ydata().tolist() == [record["loss"] for record in updates]
    assert dev_loss.get_ydata().tolist() == [record["dev"]["loss"] for record in evaluations]
    scores, best_point = score_axes.lines
    assert scores.get_ydata().tolist() == [record["metric_value"] for record in evaluations]
    best = max(evaluations, key=lambda record: record["metric_value"])
    assert best_point.get_xydata().tolist() == [[best["step"], best["metric_value"]]]
    assert score_axes.texts[0].get_text() == f"best: {best['metric_value']:.4g}, step {best['step']}"
    (lr,) = lr_axes.lines
    assert lr.get_ydata().tolist() == [record["lr"] for record in updates]
    (epoch_axis,) = loss_axes.child_axes
    figure.draw_without_rendering()
    assert epoch_axis.get_xlabel() == "epoch"
    assert epoch_axis.get_xlim()[1] == pytest.approx(3.0 * 1.02)


def test_without_dev_there_are_two_panels() -> None:
    figure = plot_curves(run_folders.journal_records(100, num_evaluations=0), "accuracy")
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "learning rate"]


def test_what_is_not_finite_is_marked() -> None:
    figure = plot_curves(JOURNALS["some of it not finite"], "accuracy")
    assert figure is not None
    (crosses,) = [line for line in figure.axes[0].lines if line.get_label() == "not finite: left out"]
    assert crosses.get_xdata().tolist() == [2, 4, 6]


def test_a_spike_is_drawn_on_a_logarithmic_axis() -> None:
    spike, constant = (plot_curves(JOURNALS[name], "accuracy") for name in ("a spike", "constant"))
    assert spike is not None
    assert constant is not None
    assert spike.axes[0].get_yscale() == "log"
    assert "log" in spike.axes[0].get_ylabel()
    assert constant.axes[0].get_yscale() == "linear"


def test_few_points_are_marked_and_many_are_drawn_as_ranges() -> None:
    def loss_axes(num_steps: int) -> Axes:
        figure = plot_curves(update_records([0.5] * num_steps), "accuracy")
        assert figure is not None
        return figure.axes[0]

    assert loss_axes(1).lines[0].get_marker() == "."
    assert loss_axes(31).lines[0].get_marker() == "None"
    most_of_a_line = loss_axes(2000)
    assert most_of_a_line.lines[0].get_label() == "training, each step"
    assert not most_of_a_line.collections
    (band,) = loss_axes(2001).collections
    assert band.get_label() == "training, range of 3 steps"


def test_smoothed_is_the_mean_of_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=200)
    values[rng.integers(200, size=30)] = NAN
    values[50:60] = INFINITY
    for half_width in (1, 4, 500):
        for index, smoothed in enumerate(moving_mean(values, half_width)):
            window = values[max(0, index - half_width) : index + half_width + 1]
            finite = window[np.isfinite(window)]
            expected = finite.mean() if len(finite) else NAN
            assert smoothed == pytest.approx(expected, nan_ok=True)


def test_ranges_hold_every_value() -> None:
    values = np.array([3.0, 1, NAN, 2, NAN, NAN, NAN, 5])
    low, high, mean_positions = ranges(values, np.arange(1.0, 9), 3)
    np.testing.assert_array_equal(low, [1, 2, 5])
    np.testing.assert_array_equal(high, [3, 2, 5])
    np.testing.assert_array_equal(mean_positions, [2, 5, 7.5])
    low, high, _ = ranges(np.full(4, NAN), np.arange(4.0), 2)
    assert np.isnan(low).all()
    assert np.isnan(high).all()


@pytest.mark.parametrize(
    ("metric", "value", "lowest", "highest"),
    [("accuracy", 0.98, 0.0, 1.03), ("bleu", 1.0, 0.0, 1.03), ("matthews", -0.99, -1.03, 1.0), ("loss", -4.0, -9, 9)],
)
def test_the_axis_of_a_metric_ends_at_its_bounds(metric: str, value: float, lowest: float, highest: float) -> None:
    scores = {10: 0.6 * value, 20: 0.8 * value, 30: value}  # by step
    evaluations = [eval_record(step, score, best=False) for step, score in scores.items()]
    figure = plot_curves([*update_records([0.5] * 30), *evaluations], metric)
    assert figure is not None
    bottom, top = figure.axes[1].get_ylim()
    assert lowest <= bottom < top <= highest
    assert bottom < min(scores.values())
    assert max(scores.values()) < top

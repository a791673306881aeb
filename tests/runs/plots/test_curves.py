"""Curves of journals: what a point stands for, and every odd journal is drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful.runs.plots.curves import TrainingCurves, moving_mean, plot_curves, ranges
from heedful.runs.plots.figures import draw_run_plots
from tests.support import run_folders

NAN, INFINITY = float("nan"), float("inf")


def losses(values: list[Any]) -> list[run_folders.Line]:
    """A journal of updates with these losses."""
    return [
        {"step": n, "epoch": n / 10, "loss": value, "lr": 1e-4, "grad_norm": 1.0}
        for n, value in enumerate(values, start=1)
    ]


JOURNALS = {
    "one step": losses([0.5]),
    "one step and one look": [*losses([0.5]), {"step": 1, "dev": {"loss": 0.4}, "metric_value": 0.5, "best": True}],
    "constant": losses([0.5] * 50),
    "zero": [line | {"lr": 0.0, "loss": 0.0} for line in losses([0.0] * 50)],
    "all of it not finite": losses([NAN] * 5),
    "some of it not finite": losses([0.5, NAN, 0.4, INFINITY, 0.3, -INFINITY, *[0.2] * 100]),
    "a spike": losses([0.5] * 99 + [1e6]),
    "huge": losses([1e300, 1e301, 1e302]),
    "tiny": losses([1e-300, 1e-301, 1e-302]),
    "negative": losses([-0.5, -0.6, -1000.0]),
    "long": losses([math.sin(n) + 2 for n in range(7001)]),
    "long and not finite": losses([NAN] * 7001),
    "looks of no number": [*losses([0.5] * 20), {"step": 10, "dev": {}, "metric_value": "NaN", "best": False}],
    "looks without a best one": [*losses([0.5] * 20), {"step": 10, "dev": {}, "metric_value": 0.5, "best": False}],
    "left out": [line | {"skipped": True} for line in losses([NAN, 0.5])],
    "no epochs": [line | {"epoch": 0.0} for line in losses([0.5, 0.4])],
    "a formula in the name": [*losses([0.5] * 20), {"step": 10, "dev": {}, "metric_value": 0.5, "best": True}],
}


@pytest.mark.parametrize("name", JOURNALS)
def test_every_journal_is_drawn(tmp_path: Path, name: str) -> None:
    folder = run_folders.write_run_folder(
        tmp_path, run_folders.results_json("multiple-choice", "$\\frac{$" if "formula" in name else "accuracy", {}), []
    )
    run_folders.write_journal(folder, JOURNALS[name])
    (path,) = draw_run_plots(folder)
    assert path.name == "curves.png" and path.stat().st_size > 5000


def test_an_empty_journal_is_not_drawn(tmp_path: Path) -> None:
    run_folders.write_journal(tmp_path, [])
    assert draw_run_plots(tmp_path) == []
    assert plot_curves([{"step": 3, "dev": {}, "metric_value": 0.5, "best": True}], "accuracy") is None


def test_the_columns() -> None:
    lines = [*losses([0.5, "NaN"]), {"step": 2, "dev": {"loss": 0.3, "accuracy": 1}, "metric_value": 1.0, "best": True}]
    lines += [*losses([0.1])[:1], {"step": 3, "dev": {}, "metric_value": 0.9, "best": False}]
    course = TrainingCurves.of(iter(lines))
    assert course.step.tolist() == [1, 2, 1] and course.eval_steps.tolist() == [2, 3]
    np.testing.assert_array_equal(course.loss, [0.5, NAN, 0.1])
    np.testing.assert_array_equal(course.dev_loss, [0.3, NAN])
    assert course.score.tolist() == [1.0, 0.9] and course.best == 2


def test_panels_and_axes() -> None:
    lines = run_folders.journal_records(300, num_evaluations=6, epochs=3.0)
    figure = plot_curves(lines, "accuracy")
    assert figure is not None
    loss, score, rate = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy on dev", "learning rate"]
    updates = [line for line in lines if "loss" in line]
    assert loss.lines[0].get_ydata().tolist() == [line["loss"] for line in updates]
    looks = [line for line in lines if "dev" in line]
    assert loss.lines[2].get_ydata().tolist() == [line["dev"]["loss"] for line in looks]
    assert score.lines[0].get_ydata().tolist() == [line["metric_value"] for line in looks]
    best = max(looks, key=lambda line: line["metric_value"])
    assert score.lines[1].get_xydata().tolist() == [[best["step"], best["metric_value"]]]
    assert score.texts[0].get_text() == f"best: {best['metric_value']:.4g}, step {best['step']}"
    assert rate.lines[0].get_ydata().tolist() == [line["lr"] for line in updates]
    assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
    (top,) = loss.child_axes
    figure.draw_without_rendering()
    assert top.get_xlabel() == "epoch" and top.get_xlim()[1] == pytest.approx(3.0 * 1.02)


def test_without_dev_there_are_two_panels() -> None:
    figure = plot_curves(run_folders.journal_records(100, num_evaluations=0), "accuracy")
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "learning rate"]


def test_what_is_not_finite_is_marked() -> None:
    figure = plot_curves(JOURNALS["some of it not finite"], "accuracy")
    assert figure is not None
    (marks,) = [line for line in figure.axes[0].lines if line.get_label() == "not finite: left out"]
    assert marks.get_xdata().tolist() == [2, 4, 6]


def test_a_spike_is_drawn_on_a_logarithmic_axis() -> None:
    spike, calm = (plot_curves(JOURNALS[name], "accuracy") for name in ("a spike", "constant"))
    assert spike is not None and calm is not None
    assert spike.axes[0].get_yscale() == "log" and "log" in spike.axes[0].get_ylabel()
    assert calm.axes[0].get_yscale() == "linear"


def test_few_points_are_marked_and_many_are_drawn_as_ranges() -> None:
    figures = {count: plot_curves(losses([0.5] * count), "accuracy") for count in (1, 31, 2000, 2001)}
    (one, some, lines, bands) = (figure.axes[0] for figure in figures.values() if figure is not None)
    assert one.lines[0].get_marker() == "." and some.lines[0].get_marker() == "None"
    assert lines.lines[0].get_label() == "training, each step" and not lines.collections
    assert [band.get_label() for band in bands.collections] == ["training, range of 3 steps"]


def test_smoothed_is_the_mean_of_its_neighbours() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=200)
    values[draw.integers(200, size=30)] = NAN
    values[50:60] = INFINITY
    for width in (1, 4, 500):
        for place, smoothed in enumerate(moving_mean(values, width)):
            near = values[max(0, place - width) : place + width + 1]
            near = near[np.isfinite(near)]
            assert smoothed == pytest.approx(near.mean()) if len(near) else np.isnan(smoothed)


def test_ranges_hold_every_value() -> None:
    values = np.array([3.0, 1, NAN, 2, NAN, NAN, NAN, 5])
    low, high, at = ranges(values, np.arange(1.0, 9), 3)
    np.testing.assert_array_equal(low, [1, 2, 5])
    np.testing.assert_array_equal(high, [3, 2, 5])
    np.testing.assert_array_equal(at, [2, 5, 7.5])
    low, high, _ = ranges(np.full(4, NAN), np.arange(4.0), 2)
    assert np.isnan(low).all() and np.isnan(high).all()


@pytest.mark.parametrize(
    ("metric", "value", "lowest", "highest"),
    [("accuracy", 0.98, 0.0, 1.03), ("bleu", 1.0, 0.0, 1.03), ("matthews", -0.99, -1.03, 1.0), ("loss", -4.0, -9, 9)],
)
def test_the_axis_of_a_metric_ends_at_its_bounds(metric: str, value: float, lowest: float, highest: float) -> None:
    evals = [
        {"step": 10 * n, "dev": {}, "metric_value": value * share, "best": False}
        for n, share in enumerate((0.6, 0.8, 1.0), start=1)
    ]
    figure = plot_curves([*losses([0.5] * 30), *evals], metric)
    assert figure is not None
    bottom, top = figure.axes[1].get_ylim()
    assert lowest <= bottom < top <= highest
    assert min(value, 0.6 * value) > bottom and max(value, 0.6 * value) < top, "every marker is within the axes"

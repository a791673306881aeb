"""Plots of runs: which ones are drawn, what they show, that nothing is cut off, and that they are deterministic."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import parse

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from heedful.errors import HeedfulError
from heedful.runs.plots.figures import (
    _ideal_line,
    draw_run_plots,
    most_confused,
    plot_calibration,
    plot_confusion,
    plot_coverage,
    plot_scatter,
    plot_scores,
    wilson_interval,
)
from heedful.runs.plots.style import save_plot
from tests.support import run_folders

ROOT = Path(__file__).parents[3]
LABELS = ["negative", "neutral", "positive"]
UNUSUAL_LABELS = [
    "正面评价",
    "负面评价",
    "नकारात्मक",
    "ترجمة",
    "\ud800",
    "\x1b[31mred\nline",
    "$x_1$ and $\\frac{",
    "under_score",
    "<b>bold</b>",
    "",
    " ",
    "w" * 300,
    "w" * 299 + "x",
]


def png_size(path: Path) -> tuple[int, int]:
    """Return width and height of a file in pixels, after checking that it is a complete PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data[12:16] == b"IHDR"
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def draw_and_check(folder: Path) -> dict[str, Path]:
    """Draw the plots of a run, check their files, and return the PNG files by name of the plot.

    Each image has a reasonable size, and white edges, so that nothing is cut off.
    """
    png_files = draw_run_plots(folder)
    svg_files = [path.with_suffix(".svg") for path in png_files]
    assert sorted((folder / "plots").iterdir()) == sorted([*png_files, *svg_files])
    for path in svg_files:
        assert parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    for path in png_files:
        width, height = png_size(path)
        assert 400 <= width <= 2200, path
        assert 250 <= height <= 2200, path
        image = imread(path)  # values from 0 to 1; 1 is white
        for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
            assert (edge == 1).all(), path
        assert (image < 1).any(), path
    return {path.stem: path for path in png_files}


def all_text(figure: Figure) -> str:
    """Return all text in a figure."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_each_task_has_what_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_metrics, class_predictions = run_folders.classification_result(LABELS)
    number_metrics, number_predictions = run_folders.regression_result()
    # (main metric, metrics, predictions, expected plots besides the curves) by task
    tasks: dict[str, tuple[str, dict[str, Any], list[Any], set[str]]] = {
        "classify": (
            "accuracy",
            class_metrics,
            class_predictions,
            {"confusion", "calibration", "coverage", "scores"},
        ),
        "multiple": ("micro_f1", run_folders.multilabel_result(LABELS), [], {"scores"}),
        "tag": ("f1", run_folders.tagging_result(), [], {"scores"}),
        "regress": ("spearman", number_metrics, number_predictions, {"numbers"}),
        "embed": ("accuracy", {"accuracy": 0.5, "mrr": 0.6, "count": 10}, [], set()),
        "multiple-choice": ("accuracy", {"accuracy": 0.5, "correct": 5, "count": 10, "loss": 1.0}, [], set()),
        "qa": ("f1", {"exact": 0.5, "f1": 0.6, "count": 10}, [], set()),
    }
    for task, (main_metric, metrics, predictions, expected) in tasks.items():
        results = run_folders.results_json(task, main_metric, {"dev": metrics})
        folder = run_folders.write_run_folder(tmp_path / task, results, dev=predictions)
        if task in ("classify", "regress"):  # together they have all plots, whose files are checked
            plots = set(draw_and_check(folder))
        else:
            with monkeypatch.context() as patch:
                patch.setattr("heedful.runs.plots.figures.save_plot", lambda path, figure: path)
                plots = {path.stem for path in draw_run_plots(folder)}
        assert plots == {"curves"} | expected, task


def test_without_dev_and_test_coverage_is_that_of_the_folds(tmp_path: Path) -> None:
    metrics, _ = run_folders.classification_result(LABELS)
    comparison = {"methods": {"linear": {"numbers": metrics}}, "measured_on": "4 folds of train"}
    results = run_folders.results_json(
        "classify", "accuracy", {}, method_comparison=comparison, settings={"method": "linear"}
    )
    assert set(draw_and_check(run_folders.write_run_folder(tmp_path, results))) == {"curves", "coverage"}


@pytest.mark.slow
def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    class_metrics, _ = run_folders.classification_result(LABELS)
    number_metrics, number_predictions = run_folders.regression_result()
    results = run_folders.results_json("classify", "accuracy", {"dev": class_metrics | number_metrics})
    contents = []  # of all files, for each time that they are drawn
    for name in ("one", "two", "two"):
        folder = run_folders.write_run_folder(tmp_path / name, results, dev=number_predictions)
        png_files = draw_run_plots(folder)
        contents.append([path.read_bytes() for png in png_files for path in (png, png.with_suffix(".svg"))])
    first, other_folder, drawn_again = contents
    assert len(first) == 12, "six plots with two files each"
    assert first == other_folder
    assert other_folder == drawn_again


@pytest.mark.parametrize("count", [2, 30, 31, 200])
def test_any_number_of_labels(tmp_path: Path, count: int) -> None:
    labels = [f"a rather long label, number {index}" for index in range(count)]
    metrics, _ = run_folders.classification_result(labels, 10 * count)
    results = run_folders.results_json("classify", "accuracy", {"test": metrics})
    draw_and_check(run_folders.write_run_folder(tmp_path, results))


@pytest.mark.parametrize("labels", [["only"], ["only", "other"]])
def test_few_rows_of_scores(tmp_path: Path, labels: list[str]) -> None:
    scores = {label: {"precision": 0.0, "recall": 1.0, "f1": 1.0, "gold": 0} for label in labels}
    results = run_folders.results_json("tag", "f1", {"dev": {"f1": 1.0, "types": scores}}, labels=labels)
    draw_and_check(run_folders.write_run_folder(tmp_path, results))


def test_unusual_labels(tmp_path: Path) -> None:
    metrics, _ = run_folders.classification_result(UNUSUAL_LABELS)
    results = run_folders.results_json("classify", "accuracy", {"dev": metrics})
    plots = draw_and_check(run_folders.write_run_folder(tmp_path, results))
    assert set(plots) == {"curves", "confusion", "calibration", "coverage", "scores"}
    figure = plot_confusion(metrics, "dev")
    text = all_text(figure)
    assert "$x_1$ and $\\frac{" in text
    assert "under_score" in text
    assert "�" not in text
    names = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert len(set(names)) == len(UNUSUAL_LABELS), "each label has a name of its own"


def test_labels_are_not_read_as_formulas(tmp_path: Path) -> None:
    with_dollars, _ = run_folders.classification_result(["$\\alpha$", "b"])
    without_dollars, _ = run_folders.classification_result(["\\alpha", "b"])
    image = save_plot(tmp_path / "a.png", plot_confusion(with_dollars, "dev")).read_bytes()
    other_image = save_plot(tmp_path / "b.png", plot_confusion(without_dollars, "dev")).read_bytes()
    assert image != other_image
    for figure in (plot_confusion(with_dollars, "dev"), plot_scores(with_dollars["classes"], "dev", "class")):
        figure.draw_without_rendering()
        ticks = [tick for axes in figure.axes for tick in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        formulas = [tick.get_text() for tick in ticks if "$" in tick.get_text() and tick.get_parse_math()]
        assert formulas == []


def test_titles_name_the_split() -> None:
    metrics, _ = run_folders.classification_result(LABELS)
    for figure in (
        plot_confusion(metrics, "test"),
        plot_calibration(metrics, "test"),
        plot_scores(metrics["classes"], "test", "class"),
    ):
        assert "on test" in all_text(figure)


@pytest.mark.slow
def test_test_is_preferred_to_dev(tmp_path: Path) -> None:
    dev_metrics, _ = run_folders.classification_result(LABELS, seed=1)
    test_metrics, _ = run_folders.classification_result(LABELS, seed=2)
    confusion_plots = []
    for name, splits in (("both", {"dev": dev_metrics, "test": test_metrics}), ("test", {"test": test_metrics})):
        results = run_folders.results_json("classify", "accuracy", splits)
        plots = draw_and_check(run_folders.write_run_folder(tmp_path / name, results))
        confusion_plots.append(plots["confusion"].read_bytes())
    assert confusion_plots[0] == confusion_plots[1]


def test_confusion_says_what_it_counts() -> None:
    counts = [[8, 2, 0], [1, 9999, 0], [0, 0, 0]]
    numbers = {"classes": dict.fromkeys("abc"), "confusion": counts, "count": 10_010}
    figure = plot_confusion(numbers, "dev")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["a  (10)", "b  (10,000)", "c  (0)"]
    assert [text.get_text() for text in axes.texts] == ["8", "2", "0", "1", "9,999", "0", "0", "0", "0"]
    shares = axes.images[0].get_array()
    np.testing.assert_allclose(np.ma.filled(shares, -1), [[0.8, 0.2, 0], [1e-4, 0.9999, 0], [-1, -1, -1]])
    assert axes.images[0].get_clim() == (0, 1)


def test_many_labels_show_the_most_confused() -> None:
    """40 labels: 10 is confused with 11, 12 with 13, and so on. Labels 0 to 9 are hardly confused."""
    counts = np.diag(np.full(40, 5))
    for first in range(10, 40, 2):
        second = first + 1
        label, prediction = (first, second) if first % 4 else (second, first)  # in either direction
        counts[label, prediction] = 10
    counts[10, 0] = 5  # a smaller confusion, with a label that is not plotted
    assert most_confused(counts, 4) == [10, 11, 12, 13]
    classes = {f"c{label}": None for label in range(40)}
    metrics = {"classes": classes, "confusion": counts.tolist(), "count": int(counts.sum())}
    figure = plot_confusion(metrics, "dev")
    assert "the 30 most confused of 40 labels" in all_text(figure)
    ticks = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert [tick.split()[0] for tick in ticks] == [f"c{label}" for label in range(10, 40)]
    assert ticks[:2] == ["c10  (20)", "c11  (5)"], "the counts include labels that are not plotted"
    shares = figure.axes[0].images[0].get_array()
    assert shares[0, :2].tolist() == [0.25, 0.5]


def test_scores_are_sorted_and_counted() -> None:
    scores = {
        "low": {"precision": 0.1, "recall": 0.2, "f1": 0.13, "count": 1200},
        "high": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "count": 3},
        "bad": {"precision": "NaN", "recall": 0.0, "f1": 0.0, "count": 0},
    }
    left_axes, right_axes = plot_scores(scores, "dev", "class").axes
    assert [tick.get_text() for tick in left_axes.get_yticklabels()] == ["bad", "low", "high"]
    f1_and_counts = [tick.get_text() for tick in right_axes.get_yticklabels()]
    assert f1_and_counts == ["0.000  (0)", "0.130  (1,200)", "1.000  (3)"]
    assert [bar.get_width() for bar in left_axes.patches] == [0.0, 0.13, 1.0]
    assert left_axes.get_xlim() == (0, 1.02), "the whole scale, whatever the scores are"


def test_the_lowest_of_many_scores_are_shown() -> None:
    scores = {f"c{label}": {"precision": 0, "recall": 0, "f1": label / 80} for label in range(80)}
    figure = plot_scores(scores, "dev", "label")
    assert "the 50 lowest of 80" in all_text(figure)
    left_axes, right_axes = figure.axes
    assert left_axes.get_yticklabels()[0].get_text() == "c0"
    assert "(" not in right_axes.get_ylabel(), "these scores have no counts"


def test_calibration_is_drawn_where_it_was_measured() -> None:
    metrics, _ = run_folders.classification_result(LABELS)
    figure = plot_calibration(metrics, "dev")
    accuracy_axes, count_axes = figure.axes
    points = accuracy_axes.lines[1]
    table = metrics["calibration"]
    assert points.get_xdata().tolist() == [row["confidence"] for row in table]
    assert points.get_ydata().tolist() == [row["accuracy"] for row in table]
    assert [bar.get_height() for bar in count_axes.patches] == [row["count"] for row in table]
    assert f"ECE {metrics['ece']:.3f}" in all_text(figure)


def test_accuracy_over_coverage_is_drawn_where_it_was_measured() -> None:
    metrics, _ = run_folders.classification_result(LABELS)
    figure = plot_coverage(metrics, "dev")
    (axes,) = figure.axes
    table = metrics["coverage"]
    assert axes.lines[0].get_xdata().tolist() == [row["coverage"] for row in table]
    assert axes.lines[0].get_ydata().tolist() == [row["accuracy"] for row in table]
    texts = all_text(figure).splitlines()
    assert f"{table[0]['min_confidence']:.4g}" in texts
    assert f"{table[-1]['min_confidence']:.4g}" not in texts, "a tick too near to the one before it is left out"
    assert "Accuracy over coverage on dev, 400 examples" in texts


def test_wilson_is_scipys() -> None:
    from scipy.stats import binomtest

    counts = np.array([1.0, 5, 40, 1000])
    successes = np.array([0.0, 5, 13, 990])
    low, high = wilson_interval(successes / counts, counts)
    for index in range(len(counts)):
        expected = binomtest(int(successes[index]), int(counts[index])).proportion_ci(method="wilson")
        assert (low[index], high[index]) == pytest.approx((expected.low, expected.high), abs=1e-7)


@pytest.mark.slow
def test_predicted_numbers_are_drawn_over_labels(tmp_path: Path) -> None:
    metrics, predictions = run_folders.regression_result(100)
    pairs = np.array([[prediction["label"], prediction["prediction"]] for prediction in predictions])
    figure = plot_scatter(pairs, metrics, "dev", ((0.0, 0.0), (5.0, 1.0)))
    points, ideal_line = figure.axes[0].lines
    assert points.get_xydata().tolist() == pairs.tolist()
    assert ideal_line.get_xydata().tolist() == [[0, 0], [5, 1]]
    assert f"r {metrics['pearson']:.3f}" in all_text(figure)
    assert f"ρ {metrics['spearman']:.3f}" in all_text(figure)
    pairs[3, 1] = np.nan
    assert "99 of 100 examples are shown" in all_text(plot_scatter(pairs, metrics, "dev", None))


@pytest.mark.slow
def test_unusual_predictions_of_numbers_are_drawn(tmp_path: Path) -> None:
    metrics, predictions = run_folders.regression_result(100)
    predictions[0]["prediction"] = "NaN"
    equal = [prediction | {"label": 1.0, "prediction": 1.0} for prediction in predictions]
    infinite = [prediction | {"prediction": "Infinity"} for prediction in predictions]
    results = run_folders.results_json("regress", "pearson", {"dev": metrics})
    for index, dev_predictions in enumerate((predictions, equal, infinite, predictions[:1])):
        folder = run_folders.write_run_folder(tmp_path / str(index), results, dev=dev_predictions)
        assert set(draw_and_check(folder)) == {"curves", "numbers"}


def test_the_line_of_ideal_predictions() -> None:
    pairs = [(0.5, 4.0), (3.0, -1.0), (9.0, float("nan"))]
    diagonal = ((-1.0, -1.0), (4.0, 4.0))
    assert _ideal_line({"task": "regress"}, pairs) == diagonal
    scaled_cosines = {"task": "embed", "label_scaling": {"low": 0.0, "high": 5.0}}
    assert _ideal_line(scaled_cosines, pairs) == ((0.0, 0.0), (5.0, 1.0))
    assert _ideal_line({"task": "embed"}, pairs) is None, "labels are not known to be scaled cosines"
    assert _ideal_line({"task": "a task of a newer version"}, pairs) == diagonal


def test_a_run_that_has_not_ended_has_curves(tmp_path: Path) -> None:
    run_folders.write_journal(tmp_path, run_folders.journal_records(40))
    assert set(draw_and_check(tmp_path)) == {"curves"}


def test_a_run_without_dev_and_test(tmp_path: Path) -> None:
    results = run_folders.results_json("classify", "accuracy", {})
    folder = run_folders.write_run_folder(tmp_path, results, run_folders.journal_records(50, num_evaluations=0))
    assert set(draw_and_check(folder)) == {"curves"}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"has neither journal\.jsonl nor results\.json: it is not a run folder"):
        draw_run_plots(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_plot_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folders.write_journal(tmp_path, run_folders.journal_records(40))
    (path,) = draw_run_plots(tmp_path)
    before = path.read_bytes()
    run_folders.write_journal(tmp_path, run_folders.journal_records(20))

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("heedful.atomic_io._write", fail)
    with pytest.raises(OSError, match="no space left"):
        draw_run_plots(tmp_path)
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["curves.png", "curves.svg"]


@pytest.mark.slow
def test_matplotlib_s_settings_are_unchanged_and_pyplot_is_not_imported(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    metrics, predictions = run_folders.classification_result(LABELS)
    results = run_folders.results_json("classify", "accuracy", {"dev": metrics})
    folder = run_folders.write_run_folder(tmp_path, results, dev=predictions)
    draw_run_plots(folder)
    assert dict(matplotlib.rcParams) == before
    code = (
        "import sys; from pathlib import Path; from heedful.runs.card.finetuned import write_finetuned_card\n"
        "from heedful.runs.plots.figures import draw_run_plots\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw_run_plots(Path({str(folder)!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'tkinter' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, timeout=110)

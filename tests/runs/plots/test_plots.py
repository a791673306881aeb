"""What is drawn, that nothing is cut off, and that it is the same every time."""

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
THREE = ["negative", "neutral", "positive"]
ODD = [
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


def size(path: Path) -> tuple[int, int]:
    """Width and height, of a PNG and nothing else."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def drawn(folder: Path) -> dict[str, Path]:
    """What draw made, by name: each of sane size, and with an empty margin all around, so that nothing is cut off."""
    paths = draw_run_plots(folder)
    assert {path.parent for path in paths} == {folder / "plots"}
    drawings = [path.with_suffix(".svg") for path in paths]
    assert sorted([*paths, *drawings]) == sorted((folder / "plots").iterdir()), "something else was left there"
    for drawing in drawings:
        assert parse(drawing).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    for path in paths:
        width, height = size(path)
        assert 400 <= width <= 2200 and 250 <= height <= 2200, (path, width, height)
        image = imread(path)
        assert all((side == 1).all() for side in (image[0], image[-1], image[:, 0], image[:, -1])), path
        assert (image < 1).any()
    return {path.stem: path for path in paths}


def words(figure: Figure) -> str:
    """Everything that is written in a figure."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_each_task_has_what_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (numbers, lines), (pairs, scored) = run_folders.classification_result(THREE), run_folders.regression_result()
    tasks: dict[str, tuple[str, dict[str, Any], list[Any], set[str]]] = {
        "classify": ("accuracy", numbers, lines, {"confusion", "calibration", "coverage", "scores"}),
        "multiple": ("micro_f1", run_folders.multilabel_result(THREE), [], {"scores"}),
        "tag": ("f1", run_folders.tagging_result(), [], {"scores"}),
        "regress": ("spearman", pairs, scored, {"numbers"}),
        "embed": ("accuracy", {"accuracy": 0.5, "mrr": 0.6, "count": 10}, [], set()),
        "multiple-choice": ("accuracy", {"accuracy": 0.5, "correct": 5, "count": 10, "loss": 1.0}, [], set()),
        "qa": ("f1", {"exact": 0.5, "f1": 0.6, "count": 10}, [], set()),
    }
    for task, (main, run_results, predictions, expected) in tasks.items():
        folder = run_folders.write_run_folder(
            tmp_path / task, run_folders.results_json(task, main, {"dev": run_results}), dev=predictions
        )
        if task in ("classify", "regress"):  # which have all figures
            assert set(drawn(folder)) == {"curves"} | expected, task
        else:
            with monkeypatch.context() as patch:
                patch.setattr("heedful.runs.plots.figures.save_plot", lambda path, figure: path)
                assert {path.stem for path in draw_run_plots(folder)} == {"curves"} | expected, task


@pytest.mark.slow
def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    (numbers, _), (pairs, scored) = run_folders.classification_result(THREE), run_folders.regression_result()
    run_results = run_folders.results_json("classify", "accuracy", {"dev": numbers | pairs})
    seen = []
    for name in ("one", "two", "two"):
        folder = run_folders.write_run_folder(tmp_path / name, run_results, dev=scored)
        paths = draw_run_plots(folder)
        seen.append([path.read_bytes() for png in paths for path in (png, png.with_suffix(".svg"))])
    assert seen[0] == seen[1] and len(seen[0]) == 12
    assert seen[1] == seen[2], "drawn anew over what was there"


@pytest.mark.parametrize("count", [2, 30, 31, 200])
def test_any_number_of_labels(tmp_path: Path, count: int) -> None:
    numbers, _ = run_folders.classification_result(
        [f"a rather long label, number {n}" for n in range(count)], 10 * count
    )
    drawn(run_folders.write_run_folder(tmp_path, run_folders.results_json("classify", "accuracy", {"test": numbers})))


@pytest.mark.parametrize("labels", [["only"], ["only", "other"]])
def test_few_rows_of_scores(tmp_path: Path, labels: list[str]) -> None:
    rows = {label: {"precision": 0.0, "recall": 1.0, "f1": 1.0, "gold": 0} for label in labels}
    drawn(
        run_folders.write_run_folder(
            tmp_path, run_folders.results_json("tag", "f1", {"dev": {"f1": 1.0, "types": rows}}, labels=labels)
        )
    )


def test_odd_labels(tmp_path: Path) -> None:
    numbers, _ = run_folders.classification_result(ODD)
    folder = run_folders.write_run_folder(tmp_path, run_folders.results_json("classify", "accuracy", {"dev": numbers}))
    assert set(drawn(folder)) == {"curves", "confusion", "calibration", "coverage", "scores"}
    written = words(plot_confusion(numbers, "dev"))
    assert "$x_1$ and $\\frac{" in written and "under_score" in written and "�" not in written
    ticks = [text.get_text() for text in plot_confusion(numbers, "dev").axes[0].get_xticklabels()]
    assert len(set(ticks)) == len(ODD), "labels that look alike are told apart"


def test_labels_are_not_read_as_formulas(tmp_path: Path) -> None:
    numbers, _ = run_folders.classification_result(["$\\alpha$", "b"])
    plain, _ = run_folders.classification_result(["\\alpha", "b"])
    with_marks = save_plot(tmp_path / "a.png", plot_confusion(numbers, "dev")).read_bytes()
    assert with_marks != save_plot(tmp_path / "b.png", plot_confusion(plain, "dev")).read_bytes()
    for figure in (plot_confusion(numbers, "dev"), plot_scores(numbers["classes"], "dev", "class")):
        figure.draw_without_rendering()
        texts = [text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        assert not [text.get_text() for text in texts if "$" in text.get_text() and text.get_parse_math()]


def test_test_is_shown_rather_than_dev() -> None:
    numbers, _ = run_folders.classification_result(THREE)
    for figure in (
        plot_confusion(numbers, "test"),
        plot_calibration(numbers, "test"),
        plot_scores(numbers["classes"], "test", "class"),
    ):
        assert "on test" in words(figure)


@pytest.mark.slow
def test_test_split_is_preferred(tmp_path: Path) -> None:
    dev, test = run_folders.classification_result(THREE, seed=1)[0], run_folders.classification_result(THREE, seed=2)[0]
    both = drawn(
        run_folders.write_run_folder(
            tmp_path / "both", run_folders.results_json("classify", "accuracy", {"dev": dev, "test": test})
        )
    )
    alone = drawn(
        run_folders.write_run_folder(
            tmp_path / "alone", run_folders.results_json("classify", "accuracy", {"test": test})
        )
    )
    assert both["confusion"].read_bytes() == alone["confusion"].read_bytes()


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
    counts = np.diag(np.full(40, 5))
    for first in range(10, 40, 2):
        counts[(first, first + 1) if first % 4 else (first + 1, first)] = 10
    counts[10, 0] = 5  # a smaller confusion, with a label that is not among them
    assert most_confused(counts, 4) == [10, 11, 12, 13]
    numbers = {"classes": {f"c{n}": None for n in range(40)}, "confusion": counts.tolist(), "count": int(counts.sum())}
    figure = plot_confusion(numbers, "dev")
    assert "the 30 most confused of 40 labels" in words(figure)
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert [tick.split()[0] for tick in ticks] == [f"c{n}" for n in range(10, 40)]
    assert ticks[:2] == ["c10  (20)", "c11  (5)"]
    assert figure.axes[0].images[0].get_array()[0, :2].tolist() == [0.25, 0.5]


def test_scores_are_sorted_and_counted() -> None:
    rows = {
        "low": {"precision": 0.1, "recall": 0.2, "f1": 0.13, "count": 1200},
        "high": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "count": 3},
        "bad": {"precision": "NaN", "recall": 0.0, "f1": 0.0, "count": 0},
    }
    figure = plot_scores(rows, "dev", "class")
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["bad", "low", "high"]
    assert [text.get_text() for text in right.get_yticklabels()] == ["0.000  (0)", "0.130  (1,200)", "1.000  (3)"]
    assert [bar.get_width() for bar in left.patches] == [0.0, 0.13, 1.0]
    assert left.get_xlim() == (0, 1.02), "all of the scale, always"
    many = plot_scores({f"c{n}": {"precision": 0, "recall": 0, "f1": n / 80} for n in range(80)}, "dev", "label")
    assert "the 50 lowest of 80" in words(many)
    assert many.axes[0].get_yticklabels()[0].get_text() == "c0" and "(" not in many.axes[1].get_ylabel()


def test_calibration_is_drawn_where_it_was_measured() -> None:
    numbers, _ = run_folders.classification_result(THREE)
    figure = plot_calibration(numbers, "dev")
    above, below = figure.axes
    points = above.lines[1]
    table = numbers["calibration"]
    assert points.get_xdata().tolist() == [row["confidence"] for row in table]
    assert points.get_ydata().tolist() == [row["accuracy"] for row in table]
    assert [bar.get_height() for bar in below.patches] == [row["count"] for row in table]
    assert f"ECE {numbers['ece']:.3f}" in words(figure)


def test_accuracy_over_coverage_is_drawn_where_it_was_measured() -> None:
    numbers, _ = run_folders.classification_result(THREE)
    (axes,) = plot_coverage(numbers, "dev").axes
    table = numbers["coverage"]
    assert axes.lines[0].get_xdata().tolist() == [row["coverage"] for row in table]
    assert axes.lines[0].get_ydata().tolist() == [row["accuracy"] for row in table]
    written = words(plot_coverage(numbers, "dev")).splitlines()
    assert f"{table[0]['min_confidence']:.4g}" in written and f"{table[-1]['min_confidence']:.4g}" not in written
    assert "Accuracy over coverage on dev, 400 examples" in words(plot_coverage(numbers, "dev"))


def test_wilson_is_scipys() -> None:
    from scipy.stats import binomtest

    counts, right = np.array([1.0, 5, 40, 1000]), np.array([0.0, 5, 13, 990])
    low, high = wilson_interval(right / counts, counts)
    for each in range(4):
        truth = binomtest(int(right[each]), int(counts[each])).proportion_ci(method="wilson")
        assert (low[each], high[each]) == pytest.approx((truth.low, truth.high), abs=1e-7)


@pytest.mark.slow
def test_numbers_against_what_is_right(tmp_path: Path) -> None:
    numbers, lines = run_folders.regression_result(100)
    pairs = np.array([[line["label"], line["prediction"]] for line in lines])
    figure = plot_scatter(pairs, numbers, "dev", ((0.0, 0.0), (5.0, 1.0)))
    points, line = figure.axes[0].lines
    assert points.get_xydata().tolist() == pairs.tolist()
    assert line.get_xydata().tolist() == [[0, 0], [5, 1]]
    assert f"r {numbers['pearson']:.3f}" in words(figure) and f"ρ {numbers['spearman']:.3f}" in words(figure)
    pairs[3, 1] = np.nan
    assert "99 of 100 examples are shown" in words(plot_scatter(pairs, numbers, "dev", None))
    lines[0]["prediction"] = "NaN"
    equal = [line | {"label": 1.0, "prediction": 1.0} for line in lines]
    nothing = [line | {"prediction": "Infinity"} for line in lines]
    for number, each in enumerate((lines, equal, nothing, lines[:1])):
        folder = run_folders.write_run_folder(
            tmp_path / str(number), run_folders.results_json("regress", "pearson", {"dev": numbers}), dev=each
        )
        assert set(drawn(folder)) == {"curves", "numbers"}


def test_where_the_points_should_lie() -> None:
    pairs = [(0.5, 4.0), (3.0, -1.0), (9.0, float("nan"))]
    assert _ideal_line({"task": "regress"}, pairs) == ((-1.0, -1.0), (4.0, 4.0))
    assert _ideal_line({"task": "embed", "label_scaling": {"low": 0.0, "high": 5.0}}, pairs) == ((0.0, 0.0), (5.0, 1.0))
    assert _ideal_line({"task": "embed"}, pairs) is None, "a cosine is no score"
    assert _ideal_line({"task": "unknown"}, pairs) == ((-1.0, -1.0), (4.0, 4.0)), "of a newer version of Heedful"


def test_a_run_that_has_not_ended_has_curves(tmp_path: Path) -> None:
    run_folders.write_journal(tmp_path, run_folders.journal_records(40))
    assert set(drawn(tmp_path)) == {"curves"}


def test_a_run_without_dev_and_test(tmp_path: Path) -> None:
    folder = run_folders.write_run_folder(
        tmp_path,
        run_folders.results_json("classify", "accuracy", {}),
        run_folders.journal_records(50, num_evaluations=0),
    )
    assert set(drawn(folder)) == {"curves"}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"has neither journal\.jsonl nor results\.json: it is not a run folder"):
        draw_run_plots(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_picture_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folders.write_journal(tmp_path, run_folders.journal_records(40))
    (path,) = draw_run_plots(tmp_path)
    before = path.read_bytes()
    run_folders.write_journal(tmp_path, run_folders.journal_records(20))

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("heedful.atomic_io._write", broken)
    with pytest.raises(OSError, match="no space left"):
        draw_run_plots(tmp_path)
    assert path.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["curves.png", "curves.svg"]


@pytest.mark.slow
def test_no_state_outside(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    numbers, lines = run_folders.classification_result(THREE)
    folder = run_folders.write_run_folder(
        tmp_path, run_folders.results_json("classify", "accuracy", {"dev": numbers}), dev=lines
    )
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

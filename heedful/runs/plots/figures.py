"""Plots of a run: training curves, and the quality of the model on test, or on dev if there is no test split.

Every run calls `draw_run_plots` at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from heedful.atomic_io import make_folder
from heedful.errors import RunError
from heedful.runs.plots.curves import plot_curves
from heedful.runs.plots.labels import drawable_labels
from heedful.runs.plots.style import (
    BLUE,
    GREY,
    INK,
    MAX_VECTOR_POINTS,
    ORANGE,
    SKY,
    new_figure,
    save_plot,
    set_title,
    style_axes,
)
from heedful.runs.results import (
    JOURNAL,
    RESULTS,
    JsonObject,
    as_float,
    coverage_numbers,
    headline_split,
    read_predictions,
    read_results,
)
from heedful.tasks.metrics import Result
from heedful.tasks.specs import SPECS
from heedful.train.journal import read_journal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pairs = Float64[np.ndarray, "examples 2"]  # columns: label, prediction
Counts = NDArray[np.int64]
Shares = NDArray[np.float64]  # from 0 to 1
IdealLine = tuple[tuple[float, float], tuple[float, float]]  # two points (label, prediction)
MAX_CONFUSION_LABELS = 30  # maximum labels in a plot of a confusion matrix
MAX_SCORE_ROWS = 50  # maximum labels in a plot of precision, recall and F1
MIN_TICK_SPACING = 0.12  # minimum difference of coverage between two ticks on the axis of thresholds


def draw_run_plots(folder: Path) -> list[Path]:
    """Write plots of a run to its folder plots/ as PNG and SVG files.

    The plots are named curves, alignments, confusion, calibration, coverage, scores and numbers. Those that do not
    apply to the task are not drawn. An unfinished run has only curves.

    Returns:
        The paths of the PNG files.

    Raises:
        RunError: If the folder is not a run.
    """
    if not (folder / JOURNAL).is_file() and not (folder / RESULTS).is_file():
        raise RunError(f"{folder} has neither {JOURNAL} nor {RESULTS}: it is not a run folder")
    make_folder(folder / "plots")
    return [save_plot(folder / "plots" / f"{name}.png", figure) for name, figure in _figures(folder)]


def _figures(folder: Path) -> Iterator[tuple[str, Figure]]:
    """Yield (name of the plot, figure) for each plot."""
    results: JsonObject = {"task": "", "metric": "score", "splits": {}}
    if (folder / RESULTS).is_file():
        results = read_results(folder)
    if (folder / JOURNAL).is_file() and (figure := plot_curves(read_journal(folder / JOURNAL), results["metric"])):
        yield "curves", figure
    headline = headline_split(results)
    if headline is None:
        if covered := coverage_numbers(results):
            yield "coverage", plot_coverage(covered[1], covered[0])
        return
    split, numbers = headline
    spec = SPECS.get(results["task"])
    if spec is not None and spec.plots_alignments:
        from heedful.runs.plots.alignments import plot_run_alignments  # imports torch

        if figure := plot_run_alignments(folder, split):
            yield "alignments", figure
    if "confusion" in numbers:
        yield "confusion", plot_confusion(numbers, split)
    if numbers.get("calibration"):
        yield "calibration", plot_calibration(numbers, split)
    if numbers.get("coverage"):
        yield "coverage", plot_coverage(numbers, split)
    for key, row_kind in (("classes", "class"), ("labels", "label"), ("types", "type of entity")):
        if numbers.get(key):  # the metrics of a task have at most one of these keys
            yield "scores", plot_scores(numbers[key], split, row_kind)
    if "pearson" in numbers:
        pairs = [(as_float(line["label"]), as_float(line["prediction"])) for line in read_predictions(folder, split)]
        if pairs:
            yield "numbers", plot_scatter(np.array(pairs), numbers, split, _ideal_line(results, pairs))


def plot_confusion(numbers: Result, split: str) -> Figure:
    """Plot the confusion matrix. The color of a cell shows its share of all examples with the label of its row.

    Args:
        numbers: Metrics of the split, with "classes", "confusion" [label, prediction] and "count".
        split: Name of the split.
    """
    from matplotlib import colormaps

    labels = drawable_labels(numbers["classes"])
    all_counts = np.array(numbers["confusion"], dtype=np.int64)
    chosen = most_confused(all_counts)
    selection_note = ""
    if len(chosen) < len(all_counts):
        selection_note = (
            f"the {len(chosen)} most confused of {len(all_counts)} labels; shares and sums are of all examples"
        )
    size = len(chosen)
    support = all_counts.sum(1)[chosen]  # number of examples of each label
    counts = all_counts[np.ix_(chosen, chosen)]
    shares = np.where(support[:, None] > 0, counts / np.maximum(support[:, None], 1), np.nan)
    cell = min(1.1, max(0.38, 4 / size))  # width and height of a cell in inches
    names = [labels.names[index] for index in chosen]
    name_length = max(map(len, names))  # characters
    width = cell * size + 0.07 * name_length + 2.4  # inches: cells, names of labels, color bar
    height = cell * size + 0.055 * name_length + 1.5  # inches: cells, rotated names of predictions, title
    figure = new_figure(max(6.0, width), height)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap=colormaps["Blues"].with_extremes(bad="#F4F4F4"), vmin=0, vmax=1)
    style_axes(axes)
    text_style: dict[str, Any] = {"parse_math": False, "fontfamily": list(labels.fonts), "fontsize": 8}
    tick_rotation: dict[str, Any] = {}
    if size > 4 or name_length > 10:
        tick_rotation = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(size), names, **text_style, **tick_rotation)
    names_with_support = [f"{name}  ({count:,})" for name, count in zip(names, support, strict=True)]
    axes.set_yticks(range(size), names_with_support, **text_style)
    axes.set_xlabel("Prediction")
    axes.set_ylabel("Label (examples)", labelpad=8)
    axes.hlines(np.arange(size - 1) + 0.5, -0.5, size - 0.5, color="white", lw=1)
    axes.vlines(np.arange(size - 1) + 0.5, -0.5, size - 0.5, color="white", lw=1)
    _write_counts(axes, counts, shares, cell)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02)
    bar.set_label("share of the label's examples", fontsize=9)
    style_axes(bar.ax)
    set_title(figure, f"Confusion on {split}, {numbers['count']:,} examples", selection_note, labels.note)
    return figure


def most_confused(counts: Counts, max_labels: int = MAX_CONFUSION_LABELS) -> list[int]:
    """Return the indices of the labels that are confused most often, at most `max_labels`, in ascending order.

    Pairs of labels are added by decreasing number of confused examples, until there are `max_labels` labels.

    >>> most_confused(np.array([[9, 0, 2], [0, 9, 0], [1, 0, 9]]), 2)
    [0, 2]
    """
    if len(counts) <= max_labels:
        return list(range(len(counts)))
    confusions = np.triu(counts + counts.T, 1)  # examples of either label that were predicted as the other one
    order = np.argsort(-confusions, axis=None, kind="stable")
    chosen: dict[int, None] = {}  # used as an ordered set
    for pair in zip(*np.unravel_index(order, confusions.shape), strict=True):
        for label in pair:
            chosen[int(label)] = None
            if len(chosen) == max_labels:
                return sorted(chosen)
    return sorted(chosen)


def _write_counts(axes: Axes, counts: Counts, shares: Shares, cell: float) -> None:
    """Write the number of examples into each cell. Zeros are only written if the matrix has up to 10 labels.

    Args:
        axes: Axes of the matrix.
        counts: Number of examples, [label, prediction].
        shares: Share of the label's examples, [label, prediction], or NaN for a label without examples.
        cell: Width and height of a cell in inches.
    """
    max_characters = len(f"{counts.max():,}")
    font_size = min(9.0, cell * 72 / (0.66 * max_characters + 0.8))  # points, with 72 points per inch
    for row, column in np.ndindex(counts.shape):
        count = counts[row, column]
        if not count and len(counts) > 10:
            continue
        color = INK if count else "#A0A0A0"
        if shares[row, column] > 0.55:  # a dark cell
            color = "white"
        axes.text(column, row, f"{count:,}", ha="center", va="center", fontsize=font_size, color=color)


def plot_calibration(numbers: Result, split: str) -> Figure:
    """Plot accuracy over confidence (a reliability diagram), and the number of answers for each confidence.

    Args:
        numbers: Metrics of the split, with "calibration", the table of `Calibration.compute` with a row for each
            interval of confidence, and "ece".
        split: Name of the split.
    """
    table = numbers["calibration"]
    count = np.array([row["count"] for row in table], dtype=np.float64)
    confidence = np.array([as_float(row["confidence"]) for row in table])
    accuracy = np.array([as_float(row["accuracy"]) for row in table])
    low, high = wilson_interval(accuracy, count)
    figure = new_figure(5.6, 6.8)
    accuracy_axes, count_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1.0])
    accuracy_axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--", label="perfectly calibrated")
    accuracy_axes.vlines(confidence, low, high, color=SKY, lw=2.5, label="95 % interval")
    accuracy_axes.plot(confidence, accuracy, color=BLUE, marker="o", ms=5.5, ls="none", label="answers, by confidence")
    accuracy_axes.set_ylim(-0.02, 1.02)
    accuracy_axes.set_xlim(-0.02, 1.02)
    accuracy_axes.set_ylabel("accuracy")
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    edges = [as_float(row["low"]) for row in table]
    widths = [as_float(row["high"]) - as_float(row["low"]) for row in table]
    bars = count_axes.bar(edges, count, width=widths, align="edge", color=SKY, edgecolor="white")
    count_axes.bar_label(bars, [f"{int(value):,}" for value in count], fontsize=7, padding=2, color=INK)
    count_axes.margins(y=0.25)
    count_axes.set_ylabel("answers")
    count_axes.set_xlabel("confidence: the probability of the answer")
    style_axes(accuracy_axes, grid="both")
    style_axes(count_axes, grid="y")
    set_title(figure, f"Calibration on {split}: ECE {numbers['ece']:.3f}, {int(count.sum()):,} examples")
    return figure


def plot_coverage(numbers: Result, split: str) -> Figure:
    """Plot the accuracy of the most confident answers over their share of all answers.

    Args:
        numbers: Metrics of the split, with "coverage", the table of `Coverage.compute`. Its first row has all answers,
            and the coverage falls from row to row.
        split: Name of the split.
    """
    table = numbers["coverage"]
    count = np.array([as_float(row["count"]) for row in table])
    coverage = np.array([as_float(row["coverage"]) for row in table])
    accuracy = np.array([as_float(row["accuracy"]) for row in table])
    confidence = np.array([as_float(row["min_confidence"]) for row in table])
    low, high = wilson_interval(accuracy, count)
    figure = new_figure(5.6, 4.2)
    axes = figure.subplots()
    axes.fill_between(coverage, low, high, color=SKY, alpha=0.5, lw=0, label="95 % interval")
    axes.plot(coverage, accuracy, color=BLUE, marker="o", ms=4, label="accuracy of these answers")
    axes.set_xlim(0, 1.02)
    axes.set_ylabel("accuracy")
    axes.set_xlabel("coverage: share of texts that are answered")
    ticks: list[int] = []  # indices of the rows whose thresholds are on the axis
    for index in range(len(table)):
        if not ticks or coverage[ticks[-1]] - coverage[index] >= MIN_TICK_SPACING:
            ticks.append(index)
    threshold_axis = axes.secondary_xaxis("top")
    threshold_axis.set_xticks(coverage[ticks], [f"{confidence[index]:.4g}" for index in ticks])
    threshold_axis.set_xlabel("least confidence of an answer (min_confidence)")
    threshold_axis.spines["top"].set_visible(False)
    threshold_axis.tick_params(labelsize=8, color=GREY, labelcolor=INK)
    figure.legend(loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    style_axes(axes, grid="both")
    set_title(figure, f"Accuracy over coverage on {split}, {int(count[0]):,} examples")
    return figure


def wilson_interval(shares: Shares, counts: Shares, z: float = 1.959964) -> tuple[Shares, Shares]:
    """Return the Wilson score interval of each share p of n examples (Wilson 1927).

    It is (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n).

    Args:
        shares: p, from 0 to 1.
        counts: n, above 0.
        z: Quantile of the normal distribution (default: that of a 95 % interval).

    Returns:
        The lower and the upper bounds.

    >>> low, high = wilson_interval(np.array([0.5]), np.array([10.0]))
    >>> round(float(low[0]), 4), round(float(high[0]), 4)
    (0.2366, 0.7634)
    """
    centre = shares + z**2 / (2 * counts)
    half_width = z * np.sqrt(shares * (1 - shares) / counts + z**2 / (4 * counts**2))
    divisor = 1 + z**2 / counts
    return (centre - half_width) / divisor, (centre + half_width) / divisor


def plot_scores(scores: dict[str, JsonObject], split: str, row_kind: str) -> Figure:
    """Plot precision, recall and F1 of each label, sorted by F1 with the best label on top.

    If there are more than MAX_SCORE_ROWS labels, only those with the lowest F1 are plotted.

    Args:
        scores: Scores by label: "precision", "recall", "f1", and optionally the number of examples as "count" or
            "gold".
        split: Name of the split.
        row_kind: Word for a label in the title: "class", "label" or "type of entity".
    """
    labels = drawable_labels(scores)
    all_rows = list(zip(labels.names, scores.values(), strict=True))  # (name of the label, its scores)
    all_rows.sort(key=lambda name_and_scores: as_float(name_and_scores[1]["f1"]))
    rows = all_rows[:MAX_SCORE_ROWS]
    name_length = max(len(name) for name, _ in rows)  # characters
    figure = new_figure(6.4 + 0.085 * name_length, max(2.5, 1.5 + 0.27 * len(rows)))
    axes = figure.subplots()
    row_positions = np.arange(len(rows))
    precision = np.array([as_float(label_scores["precision"]) for _, label_scores in rows])
    recall = np.array([as_float(label_scores["recall"]) for _, label_scores in rows])
    f1 = np.array([as_float(label_scores["f1"]) for _, label_scores in rows])
    axes.barh(row_positions, f1, height=0.62, color=SKY, alpha=0.55, label="F1")
    marker_style: dict[str, Any] = {"ls": "none", "clip_on": False, "ms": 5, "mec": "white", "mew": 0.5}
    axes.plot(precision, row_positions + 0.17, marker="v", color=BLUE, label="precision", **marker_style)
    axes.plot(recall, row_positions - 0.17, marker="^", color=ORANGE, label="recall", **marker_style)
    axes.set_yticks(row_positions, [name for name, _ in rows], parse_math=False, fontfamily=list(labels.fonts))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.02)
    style_axes(axes, grid="x")
    f1_and_counts = [
        f"{score:.3f}{_count_in_parentheses(label_scores)}" for score, (_, label_scores) in zip(f1, rows, strict=True)
    ]
    right_axis = axes.twinx()
    style_axes(right_axis)
    right_axis.set_ylim(axes.get_ylim())
    right_axis.set_yticks(row_positions, f1_and_counts)
    right_axis.tick_params(length=0)
    right_axis.set_ylabel("F1 (count)" if _count_in_parentheses(rows[0][1]) else "F1", fontsize=9)
    figure.legend(loc="outside lower right", ncols=3, fontsize=8, frameon=False)
    selection_note = f"the {len(rows)} lowest of {len(all_rows)}" if len(rows) < len(all_rows) else ""
    set_title(figure, f"Precision, recall and F1 of each {row_kind} on {split}", selection_note, labels.note)
    return figure


def _count_in_parentheses(label_scores: JsonObject) -> str:
    """Format the number of examples or entities with a label, in parentheses, or return "" if it is unknown."""
    count = label_scores.get("count", label_scores.get("gold"))
    return "" if count is None else f"  ({count:,})"


def _ideal_line(results: JsonObject, pairs: list[tuple[float, float]]) -> IdealLine | None:
    """Return two points (label, prediction) on the line of ideal predictions.

    If the predictions are cosines, the line goes through the labels that correspond to the cosines 0 and 1; the result
    is None if these labels are unknown. Otherwise an ideal prediction equals its label, and the line goes from the
    smallest to the largest finite value in `pairs`.
    """
    spec = SPECS.get(results["task"])
    if spec is not None and spec.predicts_cosines:
        scaling = results.get("label_scaling")
        return ((scaling["low"], 0.0), (scaling["high"], 1.0)) if scaling else None
    finite_pairs = [pair for pair in pairs if np.isfinite(pair).all()]
    values = [value for pair in finite_pairs for value in pair] or [0.0, 1.0]
    least, greatest = min(values), max(values)
    return (least, least), (greatest, greatest)


def plot_scatter(pairs: Pairs, numbers: Result, split: str, ideal: IdealLine | None) -> Figure:
    """Plot predictions over labels, and the line of ideal predictions.

    Args:
        pairs: Labels and predictions. Pairs with a value that is not finite are left out.
        numbers: Metrics of the split, with "count", "pearson" and optionally "spearman".
        split: Name of the split.
        ideal: Two points on the line of ideal predictions. If None, no line is drawn.
    """
    finite = np.isfinite(pairs).all(1)
    label, prediction = pairs[finite].T
    figure = new_figure(6.0, 6.4)
    axes = figure.subplots()
    alpha = float(np.clip(600 / max(1, len(label)), 0.1, 0.75))
    point_style: dict[str, Any] = {"marker": "o", "ms": 4.5, "mec": "none", "ls": "none", "color": BLUE, "alpha": alpha}
    axes.plot(label, prediction, rasterized=len(label) > MAX_VECTOR_POINTS, **point_style)
    if ideal is not None:
        axes.plot(*np.transpose(ideal), color=GREY, lw=1, ls="--", label="ideal predictions")
        figure.legend(loc="outside lower right", fontsize=8, frameon=False)
    style_axes(axes, grid="both")
    axes.set_xlabel("label")
    axes.set_ylabel("prediction")
    title = f"Numbers on {split}: Pearson's r {numbers['pearson']:.3f}"
    if "spearman" in numbers:
        title += f", Spearman's ρ {numbers['spearman']:.3f}"
    count = numbers["count"]
    finite_count = int(finite.sum())
    examples = f"{finite_count:,} examples"
    if finite_count != count:
        examples = f"{finite_count:,} of {count:,} examples are shown"
    set_title(figure, title, examples)
    return figure

"""The verdict on a student: quality, speed and size compared with the teacher, and quality with the baseline.

The baseline is the same student trained without the teacher. `runs.distil.run` and `runs.distil.mlm` call this module
after training; `runs.distil.search` and `runs.distil.cascade` use its measurements of speed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from heedful.atomic_io import make_folder
from heedful.checkpoint import RUN_MODEL, ModelBundle
from heedful.data import Dataset, RankExample, TaggedExample
from heedful.data.examples import Example
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.precision import Precision
from heedful.infer.tuning.precision_gate import (
    Measurement,
    calibration_inputs,
    fastest_accepted,
    measure_precisions,
    open_in_precision,
)
from heedful.runs import timing
from heedful.runs.card.verdict import NAMES, VERDICT
from heedful.runs.distil.settings import DistilSettings, VerdictSettings
from heedful.runs.evaluate import build_eval_task
from heedful.runs.finetune.settings import LongInputs
from heedful.runs.plots.figures import wilson_interval
from heedful.runs.plots.style import BLUE, GREY, INK, ORANGE, new_figure, save_plot, set_title, style_axes
from heedful.runs.results import JsonObject, read_results, summarize_seeds
from heedful.runs.run_folder import environment, write_file
from heedful.runs.statistics import MIN_SEEDS, paired_t_interval
from heedful.tasks.metrics import Result, format_difference, format_metric, metric_bounds
from heedful.tasks.task import evaluate_task
from heedful.train.fit import Reporter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = "verdict.png"
RANKING_METRICS = ("ndcg@10", "map", "mrr")  # metrics in the verdict on a reranker
AXES_HEIGHT = 230.0  # approximate height of the axes of the plot, in points
WARM_UP_ROUNDS = 2  # latency measurements of each model that are discarded
MIN_BATCH_ROUNDS = 3  # minimum of timed batches of all texts, for the throughput of each model
MAX_BATCH_ROUNDS = 50  # maximum of timed batches
MAX_BATCH_SECONDS = 1.0  # no further batch is timed after the slowest model has taken this long


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpeed:
    """Speed of an engine, tokenization included."""

    precision: Precision
    p50: float  # median latency of one text, in milliseconds
    p99: float  # 99th percentile of the latency of one text, in milliseconds
    texts_per_second: float  # throughput of a batch of all texts
    tokens_per_second: float  # throughput of a batch of all texts, in tokens of the model's own tokenizer


def judge_student(
    folder: Path,
    teacher: ModelBundle,
    dataset: Dataset[Example],
    settings: DistilSettings,
    baseline: Path | None,
    reporter: Reporter,
) -> JsonObject:
    """Measure quality and speed of teacher, student and baseline, and write verdict.json and its plot.

    Args:
        folder: The run folder.
        teacher: The teacher, whose parameters are counted.
        dataset: The labelled data.
        settings: The settings of the distillation.
        baseline: The folder of the run without the teacher, if there is a baseline.
        reporter: Receives progress.

    Returns:
        The content of verdict.json.
    """
    results = read_results(folder)
    split = next(name for name in (settings.verdict.split, "test", "dev") if name in results["splits"])
    reporter.message("measuring speed, side by side")
    model_folders = {"teacher": settings.teacher, "student": str(folder / RUN_MODEL)}
    speeds = compare_speeds(model_folders, settings.verdict)
    seeds = [entry["seed"] for entry in results["seeds"]]
    models_by_role = {
        "teacher": ([settings.teacher], speeds["teacher"].precision),
        "student": (_seed_models(folder, seeds), speeds["student"].precision),
    }
    if baseline is not None:
        models_by_role["baseline"] = (_seed_models(baseline, seeds), speeds["student"].precision)
    quality, metric = {}, results["metric"]
    for role, (models, precision) in models_by_role.items():
        reporter.message(f"measuring {NAMES[role]} on {split} in {precision}")
        metrics_of_seeds = [_served_metrics(model, precision, dataset, split, settings.long_inputs) for model in models]
        quality[role] = quality_over_seeds([float(metrics[metric]) for metrics in metrics_of_seeds], precision)
        if dataset.kind is RankExample:
            quality[role]["metrics"] = {
                ranking_metric: summarize_seeds([float(metrics[ranking_metric]) for metrics in metrics_of_seeds])
                for ranking_metric in RANKING_METRICS
                if ranking_metric != metric
            }
    counts = {"teacher": teacher.count(), "student": results["model"]["parameters"]}
    is_share_of_examples = metric == "accuracy" and dataset.kind is not TaggedExample
    resolution = 1 / results["splits"][split]["numbers"]["count"] if is_share_of_examples else 0.0
    return write_verdict(folder, (metric, split), quality, counts, speeds, resolution)


def _seed_models(run: Path, seeds: Sequence[int]) -> list[str]:
    """Return the model folder of each seed of a run."""
    return [str((run / f"seed-{seed}" if len(seeds) > 1 else run) / RUN_MODEL) for seed in seeds]


def _served_metrics(
    model: str, precision: Precision, dataset: Dataset[Example], split: str, long_inputs: LongInputs
) -> Result:
    """Measure a model on a split, in the precision in which it is served."""
    engine = open_in_precision(model, precision)
    task, engine.loaded = build_eval_task(engine.loaded, dataset, split, long_inputs)
    engine.max_length = task.truncation_length
    return task.compute_metrics(evaluate_task(task, engine, dataset.examples(split)))


def quality_over_seeds(numbers: Sequence[float], precision: str) -> JsonObject:
    """Summarize the metric of one model over its seeds, for verdict.json.

    Args:
        numbers: The metric of each seed.
        precision: Precision of the evaluation.

    >>> quality_over_seeds([0.75], "int8")
    {'mean': 0.75, 'std': None, 'seeds': 1, 'numbers': [0.75], 'precision': 'int8'}
    """
    return summarize_seeds(numbers) | {"numbers": list(numbers), "precision": precision}


def write_verdict(
    folder: Path,
    metric_and_split: tuple[str, str],
    quality: JsonObject,
    counts: dict[str, int],
    speeds: dict[str, ServingSpeed],
    resolution: float = 0.0,
) -> JsonObject:
    """Compare the models and write verdict.json and its plot.

    Args:
        folder: The run folder.
        metric_and_split: The metric, and the split on which it was measured.
        quality: The value of `quality_over_seeds` for "teacher", "student" and perhaps "baseline".
        counts: Numbers of parameters of "teacher" and "student".
        speeds: Speeds of "teacher" and "student".
        resolution: The smallest difference that the metric can show, or 0 if it is unknown.

    Returns:
        The content of verdict.json.
    """
    verdict = compare_models(*metric_and_split, quality, speeds, counts, resolution)
    verdict |= {"machine": environment()["machine"]}
    make_folder(folder / "plots")
    save_plot(folder / "plots" / PLOT, plot_verdict(verdict))
    write_file(folder / VERDICT, verdict)  # after the plot, since a run with verdict.json is not judged again
    return verdict


# -- speed ----------------------------------------------------------------------------------------------------


def compare_speeds(
    model_folders: dict[str, str],
    settings: VerdictSettings,
    inputs: Sequence[object] | None = None,
    choose: Callable[[Sequence[Measurement]], Precision] = fastest_accepted,
) -> dict[str, ServingSpeed]:
    """Time several models, each in the precision in which it would be served.

    Args:
        model_folders: Model folders by name, "student" among them if `inputs` is None.
        settings: How many texts and rounds to use, and the precision.
        inputs: Texts. If None, a sample of the texts that the student's run was trained on.
        choose: Chooses a precision by its measurements, if the precision of `settings` is "auto".
    """
    engines: dict[str, BundleEngine] = {}
    precisions: dict[str, Precision] = {}
    for name, model_folder in model_folders.items():
        if settings.precision == "auto":
            precisions[name] = choose(measure_precisions(model_folder))
        else:
            precisions[name] = settings.precision
        engines[name] = open_in_precision(model_folder, precisions[name])
    if inputs is None:
        inputs = calibration_inputs(engines["student"], settings.texts)
    speeds = time_engines(engines, list(inputs)[: settings.texts], settings.rounds)
    return {name: ServingSpeed(precision=precisions[name], **numbers) for name, numbers in speeds.items()}


def time_engines(
    engines: dict[str, BundleEngine], inputs: Sequence[object], rounds: int | None = None
) -> dict[str, dict[str, float]]:
    """Measure latency and throughput of engines, which take turns so that all see the same load of the machine.

    Args:
        engines: Engines by name.
        inputs: Inputs of the engines. Latency is measured with one at a time, throughput with a batch of all.
        rounds: Latency measurements of each engine. If None, `timing.ROUNDS`.

    Returns:
        The measurements of `ServingSpeed`, by the name of the engine.
    """
    single_seconds: dict[str, list[float]] = {name: [] for name in engines}
    batch_seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    with timing.gc_disabled():
        for turn in range(WARM_UP_ROUNDS + (rounds or timing.ROUNDS)):
            for name in names if turn % 2 else names[::-1]:
                single_seconds[name].append(_seconds(engines[name], [inputs[turn % len(inputs)]]))
        for turn in range(1 + MAX_BATCH_ROUNDS):  # the first batch of each engine is discarded
            slowest = max(sum(seconds[1:]) for seconds in batch_seconds.values())
            if turn > MIN_BATCH_ROUNDS and slowest > MAX_BATCH_SECONDS:
                break
            for name in names if turn % 2 else names[::-1]:
                batch_seconds[name].append(_seconds(engines[name], inputs))
    speeds = {}
    for name, engine in engines.items():
        latencies = sorted(single_seconds[name][WARM_UP_ROUNDS:])
        median_batch_seconds = statistics.median(batch_seconds[name][1:])
        tokens = sum(encoded.tokens for encoded in engine.tokenize(inputs))
        speeds[name] = {
            "p50": round(1000 * statistics.median(latencies), 3),
            "p99": round(1000 * timing.percentile(latencies, 99), 3),
            "texts_per_second": round(len(inputs) / median_batch_seconds, 1),
            "tokens_per_second": round(tokens / median_batch_seconds),
        }
    return speeds


def _seconds(engine: BundleEngine, inputs: Sequence[object]) -> float:
    """Measure how many seconds the engine takes for the inputs."""
    start = time.perf_counter()
    engine(list(inputs))
    return time.perf_counter() - start


# -- comparison -----------------------------------------------------------------------------------------------


def compare_models(
    metric: str,
    split: str,
    quality: JsonObject,
    speeds: dict[str, ServingSpeed],
    counts: dict[str, int],
    resolution: float = 0.0,
) -> JsonObject:
    """Return the content of verdict.json without the description of the machine.

    Args:
        metric: The metric.
        split: The split on which it was measured.
        quality: The value of `quality_over_seeds` for "teacher", "student" and perhaps "baseline".
        speeds: Speeds of "teacher" and "student".
        counts: Numbers of parameters of "teacher" and "student".
        resolution: The smallest difference that the metric can show, or 0 if it is unknown.
    """
    models: JsonObject = {}
    for role, role_quality in quality.items():
        models[role] = {"quality": role_quality | {"interval": _quality_interval(role_quality, resolution)}}
        if role in speeds:
            models[role] |= asdict(speeds[role]) | {"parameters": counts[role]}
    teacher, student = models["teacher"], models["student"]
    teacher_mean, student_mean = teacher["quality"]["mean"], student["quality"]["mean"]
    verdict: JsonObject = {
        "metric": metric,
        "split": split,
        "models": models,
        "quality_ratio": student_mean / teacher_mean if teacher_mean > 0 else None,
        "throughput_ratio": student["texts_per_second"] / teacher["texts_per_second"],
        "latency_ratio": student["p50"] / teacher["p50"],
        "parameter_ratio": student["parameters"] / teacher["parameters"],
    }
    if "baseline" in models:
        verdict["delta_vs_baseline"] = delta_vs_baseline(student["quality"], models["baseline"]["quality"], resolution)
    return verdict | {"sentence": verdict_sentence(verdict)}


def _quality_interval(quality: JsonObject, resolution: float) -> dict[str, float] | None:
    """Return the 95 % confidence interval of a model's metric, or None if it is unknown.

    With at least MIN_SEEDS seeds, it is the interval of the mean over seeds (Student's t). With one seed, and a metric
    that is a share of the examples, it is the interval of that share (Wilson).
    """
    numbers = quality["numbers"]
    if len(numbers) >= MIN_SEEDS:
        interval = paired_t_interval(numbers, [0.0] * len(numbers), resolution=resolution)
        minimum, maximum = (0.0, 1.0) if resolution else (-inf, inf)
        return {"low": max(interval.low, minimum), "high": min(interval.high, maximum)}
    if not resolution or len(numbers) > 1:
        return None
    num_examples = 1 / resolution
    (low,), (high,) = wilson_interval(np.array([quality["mean"]]), np.array([num_examples]))
    return {"low": float(low), "high": float(high)}


def delta_vs_baseline(student: JsonObject, baseline: JsonObject, resolution: float) -> JsonObject:
    """Return the difference of student and baseline, paired by seed.

    Its 95 % interval is None if there are fewer than MIN_SEEDS seeds.
    """
    interval = paired_t_interval(student["numbers"], baseline["numbers"], resolution=resolution)
    has_interval = len(student["numbers"]) >= MIN_SEEDS
    return {
        "difference": interval.mean,
        "low": interval.low if has_interval else None,
        "high": interval.high if has_interval else None,
        "seeds": len(student["numbers"]),
    }


def verdict_sentence(verdict: JsonObject) -> str:
    """Summarise a verdict in a sentence."""
    teacher, student = (
        f"{format_metric(verdict['metric'], model['quality']['mean'])} in {model['quality']['precision']}"
        for model in (verdict["models"]["teacher"], verdict["models"]["student"])
    )
    metric = f"{verdict['metric']} on {verdict['split']}"
    quality = f"reaches {student} beside the teacher's {teacher} ({metric})"
    if verdict["quality_ratio"] is not None:
        quality = f"keeps {100 * verdict['quality_ratio']:.1f} % of the teacher's {metric} ({student} of {teacher})"
    throughput, latency = _format_ratio(verdict["throughput_ratio"]), _format_ratio(1 / verdict["latency_ratio"])
    text = (
        f"The student {quality}, answers {throughput} times as many texts a second and one text {latency} times as "
        f"fast, and has {100 * verdict['parameter_ratio']:.0f} % of the parameters"
    )
    if "delta_vs_baseline" not in verdict:
        return f"{text}; what it would have learned without the teacher was not measured."
    delta = verdict["delta_vs_baseline"]
    difference = format_difference(verdict["metric"], delta["difference"])
    comparison = f"{difference} compared with the same student trained without the teacher"
    if delta["seeds"] < MIN_SEEDS:
        seeds = "1 seed" if delta["seeds"] == 1 else f"{delta['seeds']} seeds"
        return f"{text}; {comparison}, from {seeds} each, too few for a verdict: {MIN_SEEDS} or more are needed."
    comparison += f" (95 % interval {format_difference(verdict['metric'], delta['low'], delta['high'])})"
    if delta["low"] <= 0 <= delta["high"]:
        return f"{text}; {comparison}: no difference seen."
    conclusion = "the teacher was worth it" if delta["low"] > 0 else "the teacher made it worse"
    return f"{text}; {comparison}: {conclusion}."


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


def plot_verdict(verdict: JsonObject, frontier: Sequence[JsonObject] = ()) -> Figure:
    """Plot quality over the latency of one text, with 95 % intervals and an arrow from the teacher to the student.

    Args:
        verdict: The content of verdict.json.
        frontier: Further students to plot as points, with "name", "p50" and "quality".
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(7.0, 4.6)
    axes = figure.subplots()
    models = verdict["models"]
    points: list[tuple[float, float, str, str]] = []  # latency, quality, name, colour
    markers = "sov"  # of teacher, student and baseline: square, circle, triangle
    for (role, model), colour, marker in zip(models.items(), (ORANGE, BLUE, GREY), markers, strict=False):
        latency = (model if "p50" in model else models["student"])["p50"]  # the baseline is as fast as the student
        quality = model["quality"]
        if interval := quality.get("interval"):
            axes.vlines([latency], interval["low"], interval["high"], color=colour, lw=2.5, alpha=0.4)
        axes.plot([latency], [quality["mean"]], color=colour, marker=marker, ms=7, ls="none", mec="white", zorder=4)
        points.append((latency, quality["mean"], NAMES.get(role, role), colour))
    for shape in frontier:
        axes.plot([shape["p50"]], [shape["quality"]], marker=".", color=GREY, ls="none")
        points.append((shape["p50"], shape["quality"], shape["name"], GREY))
    teacher_point, student_point = points[0][:2], points[1][:2]
    if teacher_point != student_point:
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.8, "shrinkA": 8, "shrinkB": 8, "alpha": 0.6}
        axes.annotate("", student_point, teacher_point, arrowprops=arrow, zorder=2)
    latencies = [latency for latency, *_ in points]
    axes.set_xscale("log")
    axes.set_xlim(min(latencies) / 2.5, max(latencies) * 2.5)  # with space for names
    axes.margins(y=0.12)
    minimum, maximum = metric_bounds(verdict["metric"])
    bottom, top = axes.get_ylim()
    margin = 0.02 * (top - bottom)  # shows the whole marker of a metric at its bound
    axes.set_ylim(max(bottom, minimum - margin), min(top, maximum + margin))
    _label_points(axes, points, len(models))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("milliseconds of one text, median")
    axes.set_ylabel(f"{verdict['metric']} on {verdict['split']}")
    style_axes(axes, grid="both")
    has_intervals = any(model["quality"].get("interval") for model in models.values())
    set_title(figure, _headline(verdict), "bars: 95 % intervals" if has_intervals else "")
    return figure


def _headline(verdict: JsonObject) -> str:
    """Return the title of the plot: how much faster the student is, and its share of the teacher's quality."""
    speed_ratio = 1 / verdict["latency_ratio"]
    if speed_ratio >= 1:
        headline = f"The student is {_format_ratio(speed_ratio)}x faster"
    else:
        headline = f"The student is {_format_ratio(1 / speed_ratio)}x slower"
    if verdict["quality_ratio"] is not None:
        headline += f", {100 * verdict['quality_ratio']:.0f} % of the quality kept"
    return headline


def _label_points(axes: Axes, points: Sequence[tuple[float, float, str, str]], num_models: int) -> None:
    """Write the name of each point beside it, moved apart vertically where names would overlap.

    Args:
        axes: The axes of the plot.
        points: (latency, quality, name, colour) of each point.
        num_models: How many of the first points have their names on the left, except the slowest of them. All other
            names are on the right.
    """
    bottom, top = axes.get_ylim()
    scale = AXES_HEIGHT / (top - bottom)  # typographic points for a unit of the metric
    slowest = max(latency for latency, *_ in points[:num_models])
    named_on_left = [point for point in points[:num_models] if point[0] < slowest]
    last_height = {"left": -inf, "right": -inf}  # height of the last name with each alignment
    for point in sorted(points, key=lambda point: point[1]):
        latency, quality, name, colour = point
        alignment: Literal["left", "right"] = "right" if point in named_on_left else "left"
        height = max(scale * (quality - bottom), last_height[alignment] + 12)
        last_height[alignment] = height
        axes.annotate(
            name,
            (latency, quality),
            xytext=(8 if alignment == "left" else -8, height - scale * (quality - bottom)),
            textcoords="offset points",
            ha=alignment,
            va="center",
            fontsize=8.5,
            color=colour,
            parse_math=False,
        )

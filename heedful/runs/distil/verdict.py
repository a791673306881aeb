"""The verdict on a student: its quality, speed and size beside the teacher, and whether the teacher was worth it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from heedful.runs.plots.figures import wilson
from heedful.runs.plots.style import BLUE, GREY, INK, ORANGE, new_figure, save_plot, set_title, style_axes
from heedful.runs.results import JsonObject, read_results, summarize_seeds
from heedful.runs.run_folder import environment, write_file
from heedful.runs.statistics import ENOUGH, paired_t_interval
from heedful.tasks.metrics import Result, format_difference, format_metric, metric_bounds
from heedful.tasks.task import evaluate_task
from heedful.train.fit import Reporter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT = "verdict.png"
RANKING_METRICS = ("ndcg@10", "map", "mrr")  # a verdict on rankings has all of them
NAMES_HEIGHT = 230.0  # about the height of the axes of the plot, in points
BATCHES = 3, 50  # least and greatest number of times that all texts are answered in one batch
LONG = 1.0  # seconds of the slowest model after which no further batch is timed


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpeed:
    """Speed of an engine from text to answer, tokenizing included."""

    precision: Precision
    p50: float  # milliseconds of one text
    p99: float
    texts_per_second: float  # of all texts in one batch
    tokens_per_second: float  # in the model's own tokens


def judge_student(
    folder: Path,
    teacher: ModelBundle,
    source: Dataset[Example],
    settings: DistilSettings,
    baseline: Path | None,
    reporter: Reporter,
) -> JsonObject:
    """Measure quality and speed, compare, and write verdict.json and its plot.

    Args:
        folder: The run folder.
        teacher: The teacher.
        source: The data.
        settings: Of the distillation.
        baseline: The folder of the run without the teacher, if there is one.
        reporter: Receives progress.
    """
    results = read_results(folder)
    split = next(name for name in (settings.verdict.split, "test", "dev") if name in results["splits"])
    reporter.message("measuring speed, side by side")
    places = {"teacher": settings.teacher, "student": str(folder / RUN_MODEL)}
    speeds = compare_speeds(places, settings.verdict)
    seeds = [entry["seed"] for entry in results["seeds"]]
    served = {
        "teacher": ([settings.teacher], speeds["teacher"].precision),
        "student": (_models(folder, seeds), speeds["student"].precision),
    }
    if baseline is not None:
        served["baseline"] = (_models(baseline, seeds), speeds["student"].precision)
    quality, metric = {}, results["metric"]
    for name, (models, precision) in served.items():
        reporter.message(f"measuring {NAMES[name]} on {split} in {precision}")
        score = partial(_served_metrics, source=source, split=split, long_inputs=settings.long_inputs)
        scores = [score(model, precision) for model in models]
        quality[name] = across_numbers([float(numbers[metric]) for numbers in scores], precision)
        if source.kind is RankExample:
            quality[name]["metrics"] = {
                ranking_metric: summarize_seeds([float(numbers[ranking_metric]) for numbers in scores])
                for ranking_metric in RANKING_METRICS
                if ranking_metric != metric
            }
    counts = {"teacher": teacher.count(), "student": results["model"]["parameters"]}
    is_share = results["metric"] == "accuracy" and source.kind is not TaggedExample  # a share of the examples
    resolution = 1 / results["splits"][split]["numbers"]["count"] if is_share else 0.0
    return write_verdict(folder, (results["metric"], split), quality, counts, speeds, resolution)


def _models(run: Path, seeds: Sequence[int]) -> list[str]:
    """The model folder of each seed of a run."""
    return [str((run / f"seed-{seed}" if len(seeds) > 1 else run) / RUN_MODEL) for seed in seeds]


def _served_metrics(
    place: str, precision: Precision, *, source: Dataset[Example], split: str, long_inputs: LongInputs
) -> Result:
    """The metrics of a model on a split, in the precision in which it is served."""
    engine = open_in_precision(place, precision)
    task, engine.loaded = build_eval_task(engine.loaded, source, split, long_inputs)
    engine.max_length = task.truncation_length
    return task.compute_metrics(evaluate_task(task, engine, source.examples(split)))


def across_numbers(numbers: Sequence[float], precision: str) -> JsonObject:
    """Mean, standard deviation and numbers of the metric over seeds.

    >>> across_numbers([0.75], "int8")
    {'mean': 0.75, 'std': None, 'seeds': 1, 'numbers': [0.75], 'precision': 'int8'}
    """
    return summarize_seeds(numbers) | {"numbers": list(numbers), "precision": precision}


def write_verdict(
    folder: Path,
    measured: tuple[str, str],
    quality: JsonObject,
    counts: dict[str, int],
    speeds: dict[str, ServingSpeed],
    resolution: float = 0.0,
) -> JsonObject:
    """Compare the models and write verdict.json and its plot; `measured`: metric and split."""
    verdict = compare_models(*measured, quality, speeds, counts, resolution) | {"machine": environment()["machine"]}
    make_folder(folder / "plots")
    save_plot(folder / "plots" / PLOT, plot_verdict(verdict))
    write_file(folder / VERDICT, verdict)  # last: a verdict has all of it
    return verdict


# -- speed ----------------------------------------------------------------------------------------------------


def compare_speeds(
    places: dict[str, str],
    settings: VerdictSettings,
    inputs: Sequence[object] | None = None,
    choose: Callable[[Sequence[Measurement]], Precision] = fastest_accepted,
) -> dict[str, ServingSpeed]:
    """Time engines in turns, each in the precision in which it would be served.

    Args:
        places: Model folders by name.
        settings: Number of texts and rounds, and the precision.
        inputs: Texts; None: a sample of the student's.
        choose: Chooses a precision by measurements, for "auto".
    """
    engines: dict[str, BundleEngine] = {}
    precisions: dict[str, Precision] = {}
    for name, place in places.items():
        chosen = settings.precision
        precisions[name] = choose(measure_precisions(place)) if chosen == "auto" else chosen
        engines[name] = open_in_precision(place, precisions[name])
    if inputs is None:
        inputs = calibration_inputs(engines["student"], settings.texts)
    times = time_engines(engines, list(inputs)[: settings.texts], settings.rounds)
    return {name: ServingSpeed(precision=precisions[name], **numbers) for name, numbers in times.items()}


def time_engines(
    engines: dict[str, BundleEngine], inputs: Sequence[object], rounds: int | None = None
) -> dict[str, dict[str, float]]:
    """p50 and p99 of a single input, and inputs and tokens a second in one batch; engines take turns."""
    single: dict[str, list[float]] = {name: [] for name in engines}
    batch: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    with timing.gc_disabled():
        for turn in range(2 + (rounds or timing.ROUNDS)):  # two warm-up rounds
            for name in names if turn % 2 else names[::-1]:
                single[name].append(_seconds(engines[name], [inputs[turn % len(inputs)]]))
        least, most = BATCHES
        for turn in range(1 + most):
            if turn > least and max(sum(seconds[1:]) for seconds in batch.values()) > LONG:
                break
            for name in names if turn % 2 else names[::-1]:
                batch[name].append(_seconds(engines[name], inputs))
    speeds = {}
    for name, engine in engines.items():
        latencies, batch_seconds = sorted(single[name][2:]), statistics.median(batch[name][1:])
        tokens = sum(encoded.tokens for encoded in engine.tokenize(inputs))
        speeds[name] = {
            "p50": round(1000 * statistics.median(latencies), 3),
            "p99": round(1000 * timing.percentile(latencies, 99), 3),
            "texts_per_second": round(len(inputs) / batch_seconds, 1),
            "tokens_per_second": round(tokens / batch_seconds),
        }
    return speeds


def _seconds(engine: BundleEngine, inputs: Sequence[object]) -> float:
    start = time.perf_counter()
    engine(list(inputs))
    return time.perf_counter() - start


# -- what follows ---------------------------------------------------------------------------------------------


def compare_models(
    metric: str,
    split: str,
    quality: JsonObject,
    speeds: dict[str, ServingSpeed],
    counts: dict[str, int],
    resolution: float = 0.0,
) -> JsonObject:
    """The contents of verdict.json; `resolution` is the smallest difference that the metric can show."""
    models = {
        name: {"quality": scores | {"interval": _interval(scores, resolution)}}
        | (asdict(speeds[name]) | {"parameters": counts[name]} if name in speeds else {})
        for name, scores in quality.items()
    }
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


def _interval(quality: JsonObject, resolution: float) -> dict[str, float] | None:
    """95 % interval: of the mean over ENOUGH seeds (Student's t), else of a share of examples (Wilson); else None."""
    numbers = quality["numbers"]
    if len(numbers) >= ENOUGH:
        ends = paired_t_interval(numbers, [0.0] * len(numbers), resolution=resolution)
        bounds = (0.0, 1.0) if resolution else (-inf, inf)
        return {"low": max(ends.low, bounds[0]), "high": min(ends.high, bounds[1])}
    if not resolution or len(numbers) > 1:
        return None
    (low,), (high,) = wilson(np.array([quality["mean"]]), np.array([1 / resolution]))
    return {"low": float(low), "high": float(high)}


def delta_vs_baseline(student: JsonObject, baseline: JsonObject, resolution: float) -> JsonObject:
    """Difference of student and baseline, paired by seed, with a 95 % interval from ENOUGH seeds on."""
    interval = paired_t_interval(student["numbers"], baseline["numbers"], resolution=resolution)
    enough = len(student["numbers"]) >= ENOUGH
    return {
        "difference": interval.mean,
        "low": interval.low if enough else None,
        "high": interval.high if enough else None,
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
    throughput, latency = _times(verdict["throughput_ratio"]), _times(1 / verdict["latency_ratio"])
    text = (
        f"The student {quality}, answers {throughput} times as many texts a second and one text {latency} times as "
        f"fast, and has {100 * verdict['parameter_ratio']:.0f} % of the parameters"
    )
    if "delta_vs_baseline" not in verdict:
        return f"{text}; what it would have learned without the teacher was not measured."
    delta = verdict["delta_vs_baseline"]
    difference = format_difference(verdict["metric"], delta["difference"])
    by = f"{difference} compared with the same student trained without the teacher"
    if delta["seeds"] < ENOUGH:
        few = "1 seed" if delta["seeds"] == 1 else f"{delta['seeds']} seeds"
        return f"{text}; {by}, from {few} each, too few for a verdict: {ENOUGH} or more are needed."
    by += f" (95 % interval {format_difference(verdict['metric'], delta['low'], delta['high'])})"
    if delta["low"] <= 0 <= delta["high"]:
        return f"{text}; {by}: no difference seen."
    return f"{text}; {by}: {'the teacher was worth it' if delta['low'] > 0 else 'the teacher made it worse'}."


def _times(factor: float) -> str:
    return f"{factor:.1f}" if factor >= 1 else f"{factor:.2f}"


def plot_verdict(verdict: JsonObject, frontier: Sequence[JsonObject] = ()) -> Figure:
    """Plot quality over the latency of one text, with 95 % intervals and an arrow from the teacher to the student.

    Args:
        verdict: The content of verdict.json.
        frontier: Further students with "name", "p50" and "quality".
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(7.0, 4.6)
    axes = figure.subplots()
    models = verdict["models"]
    points: list[tuple[float, float, str, str]] = []  # latency, quality, name, colour
    for (name, model), colour, mark in zip(models.items(), (ORANGE, BLUE, GREY), "sov", strict=False):
        latency = (model if "p50" in model else models["student"])["p50"]
        quality = model["quality"]
        if interval := quality.get("interval"):
            axes.vlines([latency], interval["low"], interval["high"], color=colour, lw=2.5, alpha=0.4)
        axes.plot([latency], [quality["mean"]], color=colour, marker=mark, ms=7, ls="none", mec="white", zorder=4)
        points.append((latency, quality["mean"], NAMES.get(name, name), colour))
    for shape in frontier:
        axes.plot([shape["p50"]], [shape["quality"]], marker=".", color=GREY, ls="none")
        points.append((shape["p50"], shape["quality"], shape["name"], GREY))
    if points[0][:2] != points[1][:2]:
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.8, "shrinkA": 8, "shrinkB": 8, "alpha": 0.6}
        axes.annotate("", points[1][:2], points[0][:2], arrowprops=arrow, zorder=2)
    times = [latency for latency, *_ in points]
    axes.set_xscale("log")
    axes.set_xlim(min(times) / 2.5, max(times) * 2.5)  # with room for names
    axes.margins(y=0.12)
    low, high = metric_bounds(verdict["metric"])
    bottom, top = axes.get_ylim()
    room = 0.02 * (top - bottom)  # so that a marker at the bound is whole
    axes.set_ylim(max(bottom, low - room), min(top, high + room))
    _name_points(axes, points, len(models))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("milliseconds of one text, median")
    axes.set_ylabel(f"{verdict['metric']} on {verdict['split']}")
    style_axes(axes, grid="both")
    about = "" if not any(model["quality"].get("interval") for model in models.values()) else "bars: 95 % intervals"
    set_title(figure, _headline(verdict), about)
    return figure


def _headline(verdict: JsonObject) -> str:
    """The speed of the student and what it keeps of the quality, in a few words."""
    ratio = 1 / verdict["latency_ratio"]
    speed = f"{_times(ratio)}x faster" if ratio >= 1 else f"{_times(1 / ratio)}x slower"
    quality = (
        "" if verdict["quality_ratio"] is None else f", {100 * verdict['quality_ratio']:.0f} % of the quality kept"
    )
    return f"The student is {speed}{quality}"


def _name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]], models: int) -> None:
    """Write the name of each point beside it, moved apart vertically where names would lie on each other.

    The names of the first `models` points are on the outside of the arrow, further ones on the right.
    """
    bottom, top = axes.get_ylim()
    scale = NAMES_HEIGHT / (top - bottom)  # points of a unit of the metric
    slowest = max(latency for latency, *_ in points[:models])
    outside = [point for point in points[:models] if point[0] < slowest]
    last = {"left": -inf, "right": -inf}  # height of the last name of each alignment
    for point in sorted(points, key=lambda point: point[1]):
        latency, quality, name, colour = point
        side: Literal["left", "right"] = "right" if point in outside else "left"
        height = max(scale * (quality - bottom), last[side] + 12)
        last[side] = height
        axes.annotate(
            name,
            (latency, quality),
            xytext=(8 if side == "left" else -8, height - scale * (quality - bottom)),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=8.5,
            color=colour,
            parse_math=False,
        )

"""The choice of a precision: one is accepted if it is faster on this machine and changes the scores little.

Precisions are measured on a calibration sample: inputs on which the model's run was evaluated, or texts that ship with
Heedful. The scores are the outputs of the head. Measurements are cached for each machine and model.
"""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from heedful.checkpoint import RUN_MODEL, ModelBundle, config_of, load, weight_files
from heedful.checkpoint.bundle import EarlyStage
from heedful.checkpoint.loading import overflows_in_float16
from heedful.command_line import command_line
from heedful.device import CPU
from heedful.errors import HeedfulError, InputError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import Chunk
from heedful.infer.precision import Precision, PrecisionOrAuto
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.autotune import autotune_enabled, median_times, tuned_plan
from heedful.infer.tuning.execution_plan import (
    ExecutionPlan,
    activation_dtype,
    apply_plan,
    default_precision,
    unsupported_reason,
)
from heedful.packed import Packed
from heedful.tasks.fill_mask import mask_name
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.metrics import format_difference, format_metric

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SAMPLE_INPUTS = 64  # maximum inputs in a calibration sample from a run's predictions
SAMPLE_TOKENS = 4096  # maximum tokens of a calibration sample
ROUNDS = 3  # timed runs of each precision
BRIEF_TOKENS = 256  # tokens of the first part of the sample, which is timed before the rest
# a precision that takes more than this many times as long as float32 for that part is measured no further
SLOW_RATIO = 3
NamedMetric = tuple[str, float]  # (name, value) of a metric; larger is better
TIMED_GENERATION = GenerationConfig(max_new_tokens=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """The largest changes from float32 with which a precision is accepted."""

    scores: float = 0.05  # root mean square change of the scores / standard deviation of the scores in float32
    metric: float = 0.005  # drop of the task's metric, if the metric is measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """The speed of one precision, and its changes from float32."""

    precision: Precision
    speed: float  # tokens per second on the calibration sample
    scores: float  # relative change of the scores, see `Tolerance.scores`
    metric_name: str = ""  # name of the task's metric, or "" if it was not measured
    metric_value: float | None = None  # value of the metric, or None if it was not measured
    refused: str = ""  # reason why the precision is refused, or "" if it is accepted
    brief: bool = False  # whether only the first BRIEF_TOKENS of the sample were measured

    def line(self) -> str:
        """Describe the measurement in one line."""
        value = self.metric_value
        metric = "" if value is None else f", {self.metric_name} {format_metric(self.metric_name, value)}"
        text = f"{self.precision}: {self.speed:,.0f} tokens/s, scores differ by {self.scores:.4f}{metric}"
        return text + (f"; refused: {self.refused}" if self.refused else "")


def precision_for(
    name: str | Path, *, revision: str | None = None, head: str | None = None, device: torch.device = CPU
) -> Precision:
    """Return the default precision of a model on a device.

    It is the default of the device, except for two kinds of models, which use float32: models without blocks, since
    rounding errors of a recurrent state add up over the steps; and models that overflow in float16.
    """
    precision = default_precision(device)
    if precision == "float32":
        return precision
    model = config_of(name, revision=revision, head=head).model
    has_blocks = model.encoder is not None or model.decoder is not None
    return precision if has_blocks and not (precision == "float16" and overflows_in_float16(model)) else "float32"


def choose_precision(
    name: str | Path,
    requested: PrecisionOrAuto,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
) -> tuple[Precision, tuple[Measurement, ...]]:
    """Return the precision for a model on this machine, and the measurements on which the choice depends.

    Args:
        name: A run, a folder, or a model on the hub.
        requested: A precision, or "auto" for the fastest accepted one. float32 and the device's default are accepted
            without a measurement.
        revision: Commit or branch on the hub.
        head: Kind of the head. If None, the head in config.json.
        device: Device that runs the model.

    Raises:
        HeedfulError: If the requested precision is not supported, or is refused because of its measurement.
    """
    if requested == "float32":
        return "float32", ()
    if requested == (default := default_precision(device)):
        return default, ()
    if requested != "auto":
        model = config_of(name, revision=revision, head=head).model
        if reason := unsupported_reason(requested, model, device):
            raise HeedfulError(f"{name}: {reason}")
    measurements = measure_precisions(name, revision=revision, head=head, device=device)
    if requested == "auto":
        return fastest_accepted(measurements), measurements
    by_precision = {measurement.precision: measurement for measurement in measurements}
    if refused := by_precision[requested].refused:
        lines = "\n  ".join(measurement.line() for measurement in measurements)
        raise HeedfulError(
            f"{name} is not answered in {requested} on this machine: {refused}. Measured:\n  {lines}\n"
            f"Use float32, or auto: the fastest that is not refused{_advice_on_sample(name)}"
        )
    return requested, measurements


def _advice_on_sample(name: str | Path) -> str:
    """Return advice to end a refusal with, or "" if the model's folder has predictions, whose texts were the sample."""
    if not Path(name).is_dir() or _prediction_files(name):
        return ""
    predictions = str(Path(name, "predictions-dev.jsonl"))
    command = command_line("heedful evaluate", [str(name)], [("--data", "DATA"), ("--predictions", predictions)])
    return f". Scores were compared on texts that ship with Heedful; to compare them on yours, first run: {command}"


def fastest_accepted(measurements: Sequence[Measurement]) -> Precision:
    """Return the fastest precision that is not refused; float32 is never refused."""
    accepted = (measurement for measurement in measurements if not measurement.refused)
    return max(accepted, key=lambda measurement: measurement.speed).precision


def measure_precisions(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
    tolerance: Tolerance | None = None,
    measure_metric: Callable[[BundleEngine], NamedMetric] | None = None,
    ignore_cache: bool = False,
) -> tuple[Measurement, ...]:
    """Return a measurement of every precision that the model supports, from the tuning cache or measured now.

    Args:
        name: A run, a folder, or a model on the hub.
        revision: Commit or branch on the hub.
        head: Kind of the head. If None, the head in config.json.
        device: Device that runs the model.
        tolerance: Largest changes with which a precision is accepted. If None, the defaults of `Tolerance`.
        measure_metric: Function that measures the task's metric with an engine; then the cache is not read. If None,
            metrics come from cached measurements of the same weights, if there are any.
        ignore_cache: Whether to measure even if the cache has measurements.
    """
    tolerance = tolerance or Tolerance()
    facts: dict[str, object] = {
        "machine": tuning_cache.machine_facts(device),
        "weights": _file_stamps(weight_files(name, revision=revision)),
        "sample": _file_stamps(_prediction_files(name)),
        "head": head,
        "bounds": asdict(tolerance),
        "measured": autotune_enabled(),
    }

    def read_cached() -> tuple[Measurement, ...] | None:
        return None if measure_metric is not None else tuning_cache.read_entry(facts, _measurements_from_record)

    if not ignore_cache and (cached := read_cached()) is not None:
        return cached
    # without the lock, processes that start together would disturb each other's measurements
    with tuning_cache.measuring_lock(facts) as can_keep:
        cached = read_cached()
        if cached is not None and not ignore_cache:
            return cached
        reference = BundleEngine(load(name, revision=revision, head=head))
        inputs, model = calibration_inputs(reference), reference.loaded.config.model
        engines = {
            precision: open_in_precision(name, precision, revision=revision, head=head, device=device)
            for precision in PRECISIONS
            if not unsupported_reason(precision, model, device)
        }
        metrics: dict[Precision, NamedMetric | Callable[[], NamedMetric] | None] = dict.fromkeys(engines)
        for measurement in cached or ():
            if measurement.metric_value is not None and measurement.precision in engines:
                metrics[measurement.precision] = measurement.metric_name, measurement.metric_value
        if measure_metric is not None:
            metrics = {precision: partial(measure_metric, engine) for precision, engine in engines.items()}
        measurements = tuple(_measure_engines(engines, inputs, tolerance, metrics))
        if can_keep:
            tuning_cache.write_entry(facts, {"trials": [asdict(measurement) for measurement in measurements]})
        return measurements


def _measurements_from_record(record: Any) -> tuple[Measurement, ...]:
    """Return measurements from plain data; raises a TypeError, KeyError or ValueError if the data is damaged."""
    measurements = tuple(Measurement(**fields) for fields in record["trials"])
    names = [measurement.precision for measurement in measurements]
    if names.count("float32") != 1 or len({*names}) != len(names) or not {*names} <= {*PRECISIONS}:
        raise ValueError(f"the precisions are {names}")
    for measurement in measurements:
        if not isinstance(measurement.refused, str) or not isinstance(measurement.brief, bool):
            raise ValueError(f"{measurement} has a field of another type")
        if measurement.refused and measurement.precision == "float32":
            raise ValueError("float32 is never refused")
        numbers = [measurement.scores]
        if measurement.metric_value is not None:
            numbers.append(measurement.metric_value)
        if any(isinstance(number, bool) for number in (measurement.speed, *numbers)):
            raise ValueError(f"{measurement} has no numbers")
        # infinite or NaN changes occur only with refused precisions
        if not 0 < measurement.speed < math.inf or not (measurement.refused or all(map(math.isfinite, numbers))):
            raise ValueError(f"{measurement} has numbers that cannot be measured")
    return measurements


def open_in_precision(
    name: str | Path,
    precision: Precision,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
) -> BundleEngine:
    """Return an engine in a precision, without a comparison with float32."""
    bundle, plan = load_with_plan(name, precision, revision=revision, head=head, device=device)
    return BundleEngine(bundle, plan=plan)


def load_with_plan(
    name: str | Path,
    precision: Precision,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
) -> tuple[ModelBundle, ExecutionPlan]:
    """Load a model for a precision; return the model, and its fastest plan, which is not applied yet.

    In a cascade, the plans of early stages are applied. An early stage uses the same precision, or float32 if that is
    faster for this stage or the precision is refused for it.
    """
    bundle = load(name, revision=revision, head=head, dtype=activation_dtype(precision), device=device)
    stages = []
    for stage in bundle.early_stages:
        stage_precision = early_stage_precision(stage.bundle.source, precision, device)
        stage_bundle, plan = load_with_plan(stage.bundle.source, stage_precision, device=device)
        apply_plan(stage_bundle, plan)
        stages.append(EarlyStage(bundle=stage_bundle, threshold=stage.threshold))
    bundle.early_stages = tuple(stages)
    return bundle, tuned_plan(bundle, precision)


def early_stage_precision(name: str | Path, precision: Precision, device: torch.device = CPU) -> Precision:
    """Return the precision of an early stage of a cascade: `precision` if accepted and faster than float32, or float32.

    The default precision of the device is used without a measurement.
    """
    if precision in ("float32", default_precision(device)):
        return precision
    measurements = measure_precisions(name, device=device)
    return fastest_accepted(
        [measurement for measurement in measurements if measurement.precision in ("float32", precision)]
    )


def _file_stamps(files: Iterable[Path]) -> list[list[str | int]]:
    """Return the path, size and modification time of each file."""
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _measure_engines(
    engines: dict[Precision, BundleEngine],
    inputs: Sequence[object],
    tolerance: Tolerance,
    metrics: Mapping[Precision, NamedMetric | Callable[[], NamedMetric] | None],
) -> list[Measurement]:
    """Measure each engine, and compare it with the engine in float32.

    Args:
        engines: Engines of the model by precision, including float32.
        inputs: The calibration sample.
        tolerance: Largest changes with which a precision is accepted.
        metrics: For each precision: the metric, a function that measures it, or None.

    Raises:
        HeedfulError: If the scores or the metric of float32 are not finite.
    """
    chunks = calibration_chunks(engines["float32"], inputs)
    brief_chunks = _first_chunks(chunks, BRIEF_TOKENS)
    brief_times = median_times(
        {name: partial(engine.score, brief_chunks, TIMED_GENERATION) for name, engine in engines.items()}, ROUNDS
    )
    # engines that are much slower than float32 are measured on the first chunks alone
    too_slow = {name for name in engines if brief_times[name] > SLOW_RATIO * brief_times["float32"]}
    fast_engines = {name: engine for name, engine in engines.items() if name not in too_slow}
    samples = {name: brief_chunks if name in too_slow else chunks for name in engines}
    scores = {name: _sample_scores(engine, samples[name]) for name, engine in engines.items()}
    times = median_times(
        {name: partial(engine.score, chunks, TIMED_GENERATION) for name, engine in fast_engines.items()}, ROUNDS
    )
    named_metrics = {name: _metric_value(metric) for name, metric in metrics.items() if name in fast_engines}
    values = {name: metric[1] for name, metric in named_metrics.items() if metric is not None}
    metric_name = named_metrics["float32"][0] if named_metrics["float32"] is not None else ""
    reference_value = values.get("float32")
    if not (scores["float32"].isfinite().all() and math.isfinite(reference_value or 0.0)):
        raise HeedfulError(
            f"{engines['float32'].loaded.source}: in float32 its scores, or its metric ({reference_value}), are not "
            "finite, so that no precision can be compared with them: check its weights, or use float32"
        )
    # counted once for each engine, since a model that generates text has to generate it for that
    tokens = {name: _count_tokens(engine, samples[name]) for name, engine in engines.items()}
    brief_reference_tokens = _count_tokens(engines["float32"], brief_chunks) if too_slow else 0
    measurements = []
    for name in engines:
        change = _relative_change(scores["float32"], scores[name])
        if name in too_slow:
            speed, reference_speed = tokens[name] / brief_times[name], brief_reference_tokens / brief_times["float32"]
        else:
            speed, reference_speed = tokens[name] / times[name], tokens["float32"] / times["float32"]
        value = values.get(name)
        refused = ""
        if name != "float32":
            refused = _refusal(change, metric_name, (reference_value, value), (reference_speed, speed), tolerance)
        measurements.append(
            Measurement(
                precision=name,
                speed=speed,
                scores=change,
                metric_name="" if value is None else metric_name,
                metric_value=value,
                refused=refused,
                brief=name in too_slow,
            )
        )
    return measurements


def _relative_change(scores: Tensor, changed: Tensor) -> float:
    """Return the root mean square of (changed - scores) / the standard deviation of the scores.

    If `changed` has fewer scores than `scores`, it is compared with the first ones.
    """
    std = scores.std(correction=0).clamp(min=1e-6)
    return float((changed - scores[: len(changed)]).square().mean().sqrt() / std)


def score_change(engine: BundleEngine, changed: BundleEngine) -> float:
    """Return the relative change of a changed model's scores on the calibration sample.

    It is the root mean square change / the standard deviation of the original scores.
    """
    chunks = calibration_chunks(engine, calibration_inputs(engine))
    return _relative_change(_sample_scores(engine, chunks), _sample_scores(changed, chunks))


def _metric_value(metric: NamedMetric | Callable[[], NamedMetric] | None) -> NamedMetric | None:
    """Return a metric, measured now if it is a function; its value is NaN if the engine's scores are not finite."""
    if not callable(metric):
        return metric
    try:
        return metric()
    except HeedfulError as error:
        if isinstance(error.__cause__, FloatingPointError):
            return "", math.nan
        raise


def _refusal(
    change: float,
    metric_name: str,
    metric_values: tuple[float | None, float | None],
    speeds: tuple[float, float],
    tolerance: Tolerance,
) -> str:
    """Return the reason why a precision is refused, or "" if it is accepted.

    Args:
        change: Relative change of its scores.
        metric_name: Name of the metric.
        metric_values: Values of the metric in float32 and in this precision, or None if it was not measured.
        speeds: Tokens per second in float32 and in this precision.
        tolerance: Largest changes with which a precision is accepted.
    """
    (reference_value, value), (reference_speed, speed) = metric_values, speeds
    if not change <= tolerance.scores:
        return f"its scores differ by {change:.4f} of their spread, and {tolerance.scores} is allowed"
    if reference_value is not None and value is not None and not value >= reference_value - tolerance.metric:
        before, after = format_metric(metric_name, reference_value), format_metric(metric_name, value)
        allowed = format_difference(metric_name, tolerance.metric, sign="")
        return f"{metric_name} falls from {before} to {after}, and {allowed} is allowed"
    if speed <= reference_speed:
        return f"it is not faster: {speed:,.0f} tokens/s of the sample texts against {reference_speed:,.0f} in float32"
    return ""


def calibration_chunks(engine: BundleEngine, inputs: Sequence[object], max_tokens: int = SAMPLE_TOKENS) -> list[Chunk]:
    """Return windows of inputs for one answer head, up to `max_tokens`, or BRIEF_TOKENS if the head generates text.

    An input that is too long for the head is truncated; an input that the model cannot read is skipped.

    Raises:
        HeedfulError: If the model can read none of the inputs.
    """
    chunks: list[Chunk] = []
    first_error: HeedfulError | None = None
    truncating_engine = copy.copy(engine)
    truncating_engine.max_length = engine.limit and engine.limit // 2  # leaves room for generated tokens
    for engine_input in inputs:
        try:
            try:
                encoded_inputs = engine.tokenize([engine_input])
            except InputError:
                encoded_inputs = truncating_engine.tokenize([engine_input])
        except HeedfulError as error:
            first_error = first_error or error
            continue
        chunks += (chunk for encoded_input in encoded_inputs for chunk in encoded_input.chunks)
    if not chunks:
        reason = "" if first_error is None else f"; the first error is: {first_error}"
        raise HeedfulError(
            f"{engine.loaded.source} can read none of {len(inputs)} sample inputs, so that no precision can be "
            f"compared with float32: use float32{reason}"
        ) from first_error
    answer_head = chunks[0].answer_head
    own_chunks = [chunk for chunk in chunks if chunk.answer_head is answer_head]
    return _first_chunks(own_chunks, max_tokens if answer_head.generate is None else min(max_tokens, BRIEF_TOKENS))


def _first_chunks(chunks: list[Chunk], max_tokens: int) -> list[Chunk]:
    """Return the first chunks with at most `max_tokens` in total, but at least one chunk."""
    totals = accumulate(len(chunk.encoded) for chunk in chunks)
    return [chunk for chunk, total in zip(chunks, totals, strict=True) if total <= max_tokens] or chunks[:1]


def _count_tokens(engine: BundleEngine, chunks: Sequence[Chunk]) -> int:
    """Return the number of tokens that an engine reads, and generates, for these chunks."""
    tokens_read = sum(len(chunk.encoded) for chunk in chunks)
    if chunks[0].answer_head.generate is None:
        return tokens_read
    generated = engine.score(chunks, TIMED_GENERATION)
    return tokens_read + sum(len(texts[0].tokens) for texts in generated if isinstance(texts, list))


def _sample_scores(engine: BundleEngine, chunks: Sequence[Chunk]) -> Tensor:
    """Return all scores of chunks in one vector; if the model generates text, the logits of each next token."""
    if chunks[0].answer_head.generate is None:
        return torch.cat([scores.flatten() for scores in engine.score(chunks) if isinstance(scores, Tensor)])
    device = next(engine.loaded.parameters()).device
    batch = Packed.of([chunk.encoded.ids for chunk in chunks]).to(device)
    with torch.inference_mode():
        scores: Tensor = engine.loaded(batch, batch if engine.loaded.needs_target else None)
    return scores.float().cpu().flatten()


# -- the calibration sample -----------------------------------------------------------------------------------


def calibration_inputs(engine: BundleEngine, count: int = SAMPLE_INPUTS) -> list[object]:
    """Return the calibration sample of a model.

    It consists of up to `count` evenly spaced inputs on which the model's run was evaluated, or else of all texts that
    ship with Heedful.
    """
    for path in _prediction_files(engine.loaded.source):
        if inputs := _evenly_spaced_inputs(path, count):
            if engine.kind == "token_classification":  # each input is a list of words
                return inputs
            # JSON has no tuples: each list is a pair of texts
            return [tuple(value) if isinstance(value, list) else value for value in inputs]
    return _shipped_inputs(engine)


def _prediction_files(name: str | Path) -> list[Path]:
    """Return the prediction files of the run that trained a model; none if the model is not from a run."""
    folder = Path(name).absolute()
    folders = [folder, folder.parent] if folder.name == RUN_MODEL else [folder]
    files = [parent / f"predictions-{split}.jsonl" for parent in folders for split in ("dev", "test")]
    return [path for path in files if path.is_file()]


def _evenly_spaced_inputs(path: Path, max_count: int) -> list[object]:
    """Return up to `max_count` evenly spaced inputs of a prediction file, in bit-reversed order.

    The file lists the worst mistakes first, and of long texts only the first few inputs are used (SAMPLE_TOKENS). In
    this order (0, 32, 16, 48, ... of 64), these are spread over the file too.
    """
    with path.open("rb") as file:
        num_lines = sum(1 for _ in file)
    num_inputs = min(max_count, num_lines)
    line_numbers = {index * num_lines // num_inputs for index in range(num_inputs)}
    with path.open("rb") as file:
        try:
            inputs = [json.loads(line)["input"] for number, line in enumerate(file) if number in line_numbers]
        except (ValueError, KeyError, TypeError) as error:
            raise HeedfulError(
                f"{path} is no file of predictions ({type(error).__name__}: {error}): evaluate the run again, or move "
                "the file away to measure precisions on texts that ship with Heedful"
            ) from None
    return [inputs[index] for index in sorted(range(num_inputs), key=lambda index: f"{index:064b}"[::-1])]


def _shipped_inputs(engine: BundleEngine) -> list[object]:
    """Return inputs for an engine, made from the sample data that ships with Heedful."""
    assets = files("heedful") / "assets"
    texts = [row["text"] for row in csv.DictReader((assets / "intents" / "dev.csv").read_text("utf-8").splitlines())]
    words_of_texts = [text.split() for text in texts]
    match engine.kind:
        case "next_sentence":
            return [
                (" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in words_of_texts
            ]
        case "masked_lm" | "pretraining":
            mask = mask_name(engine.tokenizer)
            return [" ".join([*words[:-1], mask]) for words in words_of_texts]
        case "multiple_choice":
            return [{"prompt": text, "choices": [text, following]} for text, following in pairwise(texts)]
        case "question_answering":
            articles = json.loads((assets / "questions" / "dev.json").read_text("utf-8"))["data"]
            paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
            return [
                {"question": qa["question"], "context": paragraph["context"]}
                for paragraph in paragraphs
                for qa in paragraph["qas"]
            ]
    return list(texts)

"""Which precision a model answers in: another than float32 is taken only where it is faster here and changes little.

Measured on a calibration sample: what the model was measured on, or what ships with Heedful. What was found holds for
this machine and these weights, and is tuning_cache.
"""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from heedful.checkpoint import RUN_MODEL, ModelBundle, load, weight_files
from heedful.checkpoint.bundle import EarlyStage
from heedful.device import CPU
from heedful.errors import HeedfulError, InputError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.encoded_input import Chunk
from heedful.infer.precision import Precision, PrecisionOrAuto
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.autotune import autotune_enabled, median_times, tuned_plan
from heedful.infer.tuning.execution_plan import ExecutionPlan, activation_dtype, apply_plan, unsupported_reason
from heedful.packed import Packed
from heedful.tasks.fill_mask import mask_name
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.metrics import format_difference, format_metric

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SAMPLE_INPUTS, SAMPLE_TOKENS, ROUNDS = 64, 4096, 3  # of the calibration sample; how often it is timed
BRIEF_TOKENS, HOPELESS_RATIO = 256, 3  # a precision that takes 3 times as long for 256 tokens is measured no further
NamedMetric = tuple[str, float]  # name and value; larger is better
TIMED_GENERATION = GenerationConfig(max_new_tokens=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest accepted changes of a precision."""

    scores: float = 0.05  # root mean square of the change over the standard deviation of float32's scores
    metric: float = 0.005  # largest drop of the task's metric, where it is measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Speed and changes of one precision."""

    precision: Precision
    speed: float  # tokens a second of the calibration sample, in batches
    scores: float  # by how much they differ from float32's
    metric_name: str = ""  # of the task; "": not measured
    metric_value: float | None = None
    refused: str = ""  # why it is not taken
    brief: bool = False  # only a look was taken, at a few texts

    def line(self) -> str:
        """Describe the measurement in one line."""
        value = self.metric_value
        metric = "" if value is None else f", {self.metric_name} {format_metric(self.metric_name, value)}"
        text = f"{self.precision}: {self.speed:,.0f} tokens/s, scores differ by {self.scores:.4f}{metric}"
        return text + (f"; refused: {self.refused}" if self.refused else "")


def choose_precision(
    name: str | Path,
    asked: PrecisionOrAuto,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
) -> tuple[Precision, tuple[Measurement, ...]]:
    """The precision to answer in, and what it was decided on; one that was asked for by name and is refused is an
    error with its measurement."""
    if asked == "float32":
        return "float32", ()
    measurements = measure_precisions(name, revision=revision, head=head, device=device)
    if asked == "auto":
        return fastest_accepted(measurements), measurements
    trial = next((measurement for measurement in measurements if measurement.precision == asked), None)
    if trial is None:
        model = load(name, revision=revision, head=head).config.model
        raise HeedfulError(f"{name}: {unsupported_reason(asked, model, device)}")
    if trial.refused:
        lines = "\n  ".join(measurement.line() for measurement in measurements)
        raise HeedfulError(
            f"{name} is not answered in {asked} on this machine: {trial.refused}. Measured:\n  {lines}\n"
            "Take float32, or auto: the fastest that is not refused"
        )
    return asked, measurements


def fastest_accepted(trials: Sequence[Measurement]) -> Precision:
    """Return the fastest precision that is not refused; float32 never is."""
    return max((trial for trial in trials if not trial.refused), key=lambda measurement: measurement.speed).precision


def measure_precisions(
    name: str | Path,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
    bounds: Tolerance | None = None,
    measure_metric: Callable[[BundleEngine], NamedMetric] | None = None,
    anew: bool = False,
) -> tuple[Measurement, ...]:
    """Every precision, measured in turn on this machine, or as it was measured before.

    `measure_metric` returns the metric of an engine on the task; with it, or `anew`,
    nothing that was kept is taken, but what `measure_metric` returned for these weights before, where it is not given.
    """
    limits = bounds or Tolerance()
    weights = _stamps(weight_files(name, revision=revision))
    facts: dict[str, object] = {
        "machine": tuning_cache.machine_facts(device),
        "weights": weights,
        "sample": _stamps(_predictions(name)),
    }
    facts |= {"head": head, "bounds": asdict(limits), "measured": autotune_enabled()}

    def before() -> tuple[Measurement, ...] | None:
        return None if measure_metric is not None else tuning_cache.read_entry(facts, _read)

    measurements = None if anew else before()
    if measurements is None:
        with tuning_cache.measuring_lock(
            facts
        ) as lasting:  # processes that begin at once would be measured beside each other
            measurements = before()
            if anew or measurements is None:
                plain = BundleEngine(load(name, revision=revision, head=head))
                inputs, model = calibration_inputs(plain), plain.loaded.config.model
                several = [precision for precision in PRECISIONS if not unsupported_reason(precision, model, device)]
                engines = {
                    precision: open_in_precision(name, precision, revision=revision, head=head, device=device)
                    for precision in several
                }
                known_metrics = {
                    measurement.precision: (measurement.metric_name, measurement.metric_value)
                    for measurement in measurements or ()
                    if measurement.metric_value is not None
                }
                metrics = {
                    precision: known_metrics.get(precision)
                    if measure_metric is None
                    else partial(measure_metric, engines[precision])
                    for precision in several
                }
                measurements = tuple(_trials(engines, inputs, limits, metrics))
                if lasting:
                    tuning_cache.write_entry(facts, {"trials": [asdict(measurement) for measurement in measurements]})
    return measurements


def _read(record: Any) -> tuple[Measurement, ...]:
    """Return trials from plain data; raises a TypeError, KeyError or ValueError for anything else."""
    trials = tuple(Measurement(**fields) for fields in record["trials"])
    names = [trial.precision for trial in trials]
    if names.count("float32") != 1 or len({*names}) != len(names) or not {*names} <= {*PRECISIONS}:
        raise ValueError(f"trials of {names}")
    for trial in trials:
        if not isinstance(trial.refused, str) or not isinstance(trial.brief, bool):
            raise ValueError(f"{trial} says neither yes nor no")
        if trial.refused and trial.precision == "float32":
            raise ValueError("float32 is never refused")
        numbers = [trial.scores] if trial.metric_value is None else [trial.scores, trial.metric_value]
        if any(isinstance(number, bool) for number in (trial.speed, *numbers)):
            raise ValueError(f"{trial} has no numbers")
        # numbers that are not finite are why a precision is refused
        if not 0 < trial.speed < math.inf or not (trial.refused or all(map(math.isfinite, numbers))):
            raise ValueError(f"{trial} has numbers that cannot be measured")
    return trials


def open_in_precision(
    name: str | Path,
    precision: Precision,
    *,
    revision: str | None = None,
    head: str | None = None,
    device: torch.device = CPU,
) -> BundleEngine:
    """Return an engine in a precision that is not checked against float32."""
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
    """Load a model for a precision, and return it with its fastest plan, which is yet to be applied.

    The early stages of a cascade answer in the same precision, or in float32 where it is refused for them.
    """
    bundle = load(name, revision=revision, head=head, dtype=activation_dtype(precision), device=device)
    stages = []
    for stage in bundle.early_stages:
        accepted = early_stage_precision(stage.bundle.source, precision, device)
        own, plan = load_with_plan(stage.bundle.source, accepted, device=device)
        apply_plan(own, plan)
        stages.append(EarlyStage(bundle=own, threshold=stage.threshold))
    bundle.early_stages = tuple(stages)
    return bundle, tuned_plan(bundle, precision)


def early_stage_precision(name: str | Path, precision: Precision, device: torch.device = CPU) -> Precision:
    """Return the faster of float32 and a precision that is not refused for a model on this machine."""
    if precision == "float32":
        return precision
    trials = measure_precisions(name, device=device)
    return fastest_accepted([trial for trial in trials if trial.precision in ("float32", precision)])


def _stamps(files: Iterable[Path]) -> list[list[str | int]]:
    """Return path, size and modification time of files."""
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _trials(
    engines: dict[Precision, BundleEngine],
    inputs: Sequence[object],
    bounds: Tolerance,
    metrics: Mapping[Precision, NamedMetric | Callable[[], NamedMetric] | None],
) -> list[Measurement]:
    chunks = calibration_chunks(engines["float32"], inputs)
    few = _first(chunks, BRIEF_TOKENS)
    looks = median_times(
        {name: partial(engine.score, few, TIMED_GENERATION) for name, engine in engines.items()}, ROUNDS
    )
    brief = {name for name in engines if looks[name] > HOPELESS_RATIO * looks["float32"]}
    whole = {name: engine for name, engine in engines.items() if name not in brief}
    scores = {name: _scores(engine, few if name in brief else chunks) for name, engine in engines.items()}
    times = median_times(
        {name: partial(engine.score, chunks, TIMED_GENERATION) for name, engine in whole.items()}, ROUNDS
    )
    measured = {name: _measure(metric) for name, metric in metrics.items() if name in whole}
    numbers = {name: metric[1] for name, metric in measured.items() if metric is not None}
    metric_name = measured["float32"][0] if measured["float32"] is not None else ""
    least, trials = numbers.get("float32"), []
    if not (scores["float32"].isfinite().all() and math.isfinite(least or 0.0)):
        raise HeedfulError(
            f"{engines['float32'].loaded.source}: in float32 its scores, or its metric ({least}), are not finite; "
            "expected finite ones, which other precisions are compared with: check its weights, or take float32"
        )
    for name in engines:
        off = _relative_change(scores["float32"], scores[name])
        read, seen = (few, looks) if name in brief else (chunks, times)
        speed, fair = (_tokens(engines[precision], read) / seen[precision] for precision in (name, "float32"))
        metric = numbers.get(name)
        refused = "" if name == "float32" else _refusal(off, metric_name, (least, metric), (fair, speed), bounds)
        trials.append(
            Measurement(
                precision=name,
                speed=speed,
                scores=off,
                metric_name="" if metric is None else metric_name,
                metric_value=metric,
                refused=refused,
                brief=name in brief,
            )
        )
    return trials


def _relative_change(scores: Tensor, changed: Tensor) -> float:
    """Return the root mean square of the change over the standard deviation of the scores; `changed` may be fewer."""
    spread = scores.std(correction=0).clamp(min=1e-6)
    return float((changed - scores[: len(changed)]).square().mean().sqrt() / spread)


def score_change(engine: BundleEngine, changed: BundleEngine) -> float:
    """Return by how much the scores of a changed model differ from the original's on the calibration sample.

    It is the root mean square of the change over the standard deviation of the original scores.
    """
    chunks = calibration_chunks(engine, calibration_inputs(engine))
    return _relative_change(_scores(engine, chunks), _scores(changed, chunks))


def _measure(metric: NamedMetric | Callable[[], NamedMetric] | None) -> NamedMetric | None:
    """Return the metric, measured where it is a callable; NaN where the engine's numbers are not finite."""
    if not callable(metric):
        return metric
    try:
        return metric()
    except HeedfulError as error:
        if isinstance(error.__cause__, FloatingPointError):
            return "", math.nan
        raise


def _refusal(
    off: float,
    metric_name: str,
    numbers: tuple[float | None, float | None],
    speeds: tuple[float, float],
    bounds: Tolerance,
) -> str:
    """Return why a precision is refused, or ""; `numbers` and `speeds` are those of float32 and its own."""
    (least, metric), (fair, speed) = numbers, speeds
    if not off <= bounds.scores:
        return f"its scores differ by {off:.4f} of their spread, and {bounds.scores} is allowed"
    if least is not None and metric is not None and not metric >= least - bounds.metric:
        before, after = (format_metric(metric_name, value) for value in (least, metric))
        allowed = format_difference(metric_name, bounds.metric, sign="")
        return f"{metric_name} falls from {before} to {after}, and {allowed} is allowed"
    if speed <= fair:
        return f"it is not faster: {speed:,.0f} tokens/s of the sample texts against {fair:,.0f} in float32"
    return ""


def calibration_chunks(engine: BundleEngine, inputs: Sequence[object], most: int = SAMPLE_TOKENS) -> list[Chunk]:
    """Return windows of inputs for one answerer, up to `most` tokens; fewer if it generates text.

    Of an input that is too long the beginning is taken, and what this model cannot read is passed over.
    """
    chunks: list[Chunk] = []
    cutting = copy.copy(engine)
    cutting.max_length = engine.limit and engine.limit // 2  # leaves room for generated tokens
    for engine_input in inputs:
        with suppress(HeedfulError):
            try:
                asked = engine.tokenize([engine_input])
            except InputError:
                asked = cutting.tokenize([engine_input])
            chunks += (chunk for encoded in asked for chunk in encoded.chunks)
    if not chunks:
        raise HeedfulError(f"{engine.loaded.source} can read none of {len(inputs)} inputs: take float32")
    answerer = chunks[0].answerer
    own = [chunk for chunk in chunks if chunk.answerer is answerer]
    return _first(own, most if answerer.generate is None else min(most, BRIEF_TOKENS))


def _first(chunks: list[Chunk], most: int) -> list[Chunk]:
    """Return the first chunks, up to `most` tokens, and at least one chunk."""
    totals = accumulate(len(chunk.encoded) for chunk in chunks)
    return [chunk for chunk, total in zip(chunks, totals, strict=True) if total <= most] or chunks[:1]


def _tokens(engine: BundleEngine, chunks: Sequence[Chunk]) -> int:
    """Return the number of tokens that are read and generated."""
    read = sum(len(chunk.encoded) for chunk in chunks)
    if chunks[0].answerer.generate is None:
        return read
    return read + sum(
        len(texts[0].tokens) for texts in engine.score(chunks, TIMED_GENERATION) if isinstance(texts, list)
    )


def _scores(engine: BundleEngine, chunks: Sequence[Chunk]) -> Tensor:
    if chunks[0].answerer.generate is None:
        return torch.cat([scores.flatten() for scores in engine.score(chunks) if isinstance(scores, Tensor)])
    device = next(engine.loaded.parameters()).device
    batch = Packed.of([chunk.encoded.ids for chunk in chunks]).to(device)
    with torch.inference_mode():
        scores: Tensor = engine.loaded(batch, batch if engine.loaded.needs_target else None)
    return scores.float().cpu().flatten()


# -- the calibration sample -----------------------------------------------------------------------------------


def calibration_inputs(engine: BundleEngine, count: int = SAMPLE_INPUTS) -> list[object]:
    """Return up to `count` inputs of the run that trained the model, spread over its split; else inputs that ship."""
    for path in _predictions(engine.loaded.source):
        if inputs := _spread(path, count):
            pairs = engine.kind != "token_classification"  # a list of two is a pair there, in JSON, and not two words
            return [
                tuple(engine_input) if pairs and isinstance(engine_input, list) else engine_input
                for engine_input in inputs
            ]
    return _shipped(engine)


def _predictions(name: str | Path) -> list[Path]:
    """Return the prediction files of the run that trained a model."""
    folder = Path(name).absolute()
    places = [folder, folder.parent] if folder.name == RUN_MODEL else [folder]
    files = [place / f"predictions-{split}.jsonl" for place in places for split in ("dev", "test")]
    return [path for path in files if path.is_file()]


def _spread(path: Path, most: int) -> list[object]:
    """Return up to `most` inputs of a prediction file, evenly spaced."""
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    with path.open("rb") as file:
        lines = islice(file, 0, None, max(1, count // most))
        try:
            return [json.loads(line)["input"] for line in islice(lines, most)]
        except (ValueError, KeyError, TypeError) as error:
            raise HeedfulError(
                f"{path} is no file of predictions ({type(error).__name__}: {error}): evaluate the run again, or move "
                "the file away to measure precisions on what ships"
            ) from None


def _shipped(engine: BundleEngine) -> list[object]:
    assets = files("heedful") / "assets"
    texts = [row["text"] for row in csv.DictReader((assets / "intents" / "dev.csv").read_text("utf-8").splitlines())]
    split = [text.split() for text in texts]
    match engine.kind:
        case "next_sentence":
            return [(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])) for words in split]
        case "masked_lm" | "pretraining":
            mask = mask_name(engine.tokenizer)
            return [" ".join([*words[:-1], mask]) for words in split]
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

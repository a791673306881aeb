"""`heedful bench`: latency, throughput, memory and quality of a model on this machine, in each precision."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from heedful.atomic_io import check_writable
from heedful.checkpoint import folder_of
from heedful.checkpoint.bundle import cascade_refusal
from heedful.checkpoint.notes import read_notes
from heedful.csrc import unused_note
from heedful.device import resolve_device
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.precision import Precision
from heedful.infer.tuning import tuning_cache
from heedful.infer.tuning.precision_gate import Measurement, fastest_accepted, measure_precisions, open_in_precision
from heedful.runs.data_settings import data_settings_for
from heedful.runs.evaluate import evaluate, run_generation
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import SETTINGS, write_file
from heedful.runs.timing import measure_latency

BENCH = "bench.json"
# script for a new process, which loads the model, predicts once and prints its resident memory
RESIDENT_CODE = """
import sys; sys.path[:] = {path!r}
from heedful.infer.tuning.precision_gate import calibration_chunks, calibration_inputs, open_in_precision
from heedful.device import resolve_device
device = resolve_device({device!r})
engine = open_in_precision({name!r}, {precision!r}, revision={revision!r}, head={head!r}, device=device)
engine.score(calibration_chunks(engine, calibration_inputs(engine), 512))
from heedful.runs.timing import resident_bytes
print(resident_bytes())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionBench:
    """Benchmark of a model in one precision on this machine. Its fields are keys of bench.json."""

    trial: Measurement  # speed and scores on the sample texts, by which precision "auto" is chosen
    # "p50" and "p99" in milliseconds, by the number of tokens in a text, without tokenizing; {} if `trial.brief`
    latency: dict[str, dict[str, float]]
    # tokens per second without tokenizing, for texts of 64 tokens; for the sample texts if `trial.brief`
    throughput: int
    resident_bytes: int  # resident memory of a process after one prediction, including PyTorch


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Benchmark of a model in all precisions on this machine, which is written as bench.json."""

    model: str  # folder or name of the model
    machine: JsonObject  # processor, threads, versions
    metric: str | None  # name of the task's metric; None without data
    split: str | None  # split that was evaluated; None without data
    results: tuple[PrecisionBench, ...]  # float32 first
    auto_precision: Precision  # precision that "auto" means from now on: the fastest one that is accepted


def bench(
    run: str | Path,
    *,
    data: object = None,
    split: str | None = None,
    revision: str | None = None,
    head: str | None = None,
    device: str = "auto",
    log: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Measure a run, or a model folder, in float32, bfloat16 and int8.

    In a run folder the result is written to bench.json. If that file cannot be written, `log` receives a warning.

    Args:
        run: A run, a model folder, or NAME[@REVISION] on the hub.
        data: Data on which quality is measured. If None, only speed and memory are measured.
        split: Split of the data. If None, test, else dev, else the first one.
        revision: Revision of a model on the hub.
        head: Kind of head, instead of the one that config.json names.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one.
        log: Receives progress, a line at a time.

    Raises:
        HeedfulError: If the model is a cascade, if the data do not fit the model, or if a new process cannot load it.
    """
    if read_notes(folder_of(run, revision)).stage_thresholds:
        raise cascade_refusal(run, "measured in each precision")
    evaluated: dict[str, str] = {}  # names of "metric" and "split", set by the first evaluation
    data_settings, long_inputs = data_settings_for(run, data)
    generation = run_generation(run)

    def measure_metric(engine: BundleEngine) -> tuple[str, float]:
        log(f"evaluating {engine.plan.precision if engine.plan else ''}")
        result = evaluate(
            engine.loaded, data, split=split, settings=data_settings, long_inputs=long_inputs, generation=generation
        )
        evaluated.update(metric=result.metric, split=result.split)
        return result.metric, float(result.numbers[result.metric])

    is_run_folder = (Path(run) / SETTINGS).is_file()
    with _warn_if_unwritable(run, log):
        if is_run_folder:
            check_writable(Path(run))
    if note := unused_note():
        log(note)
    log("comparing speed and scores")
    resolved_device = resolve_device(device)
    trials = measure_precisions(
        run,
        revision=revision,
        head=head,
        device=resolved_device,
        measure_metric=None if data is None else measure_metric,
        ignore_cache=True,
    )
    precision_benches = []
    for trial in trials:
        log(f"timing {trial.precision}")
        engine = open_in_precision(run, trial.precision, revision=revision, head=head, device=resolved_device)
        if trial.brief:  # far slower than float32, so that its latency is not measured
            speed: JsonObject = {"latency": {}, "throughput": round(trial.speed)}
        else:
            speed = measure_latency(engine.loaded, max_seconds=math.inf)
        precision_benches.append(
            PrecisionBench(
                trial=trial,
                latency=speed["latency"],
                throughput=speed["throughput"],
                resident_bytes=_resident_memory(run, trial.precision, revision, head, device),
            )
        )
    report = Bench(
        model=engine.loaded.source,
        machine=tuning_cache.machine_facts(resolved_device),
        metric=evaluated.get("metric"),
        split=evaluated.get("split"),
        results=tuple(precision_benches),
        auto_precision=fastest_accepted(trials),
    )
    with _warn_if_unwritable(run, log):
        if is_run_folder:
            write_file(Path(run) / BENCH, asdict(report))
    return report


@contextmanager
def _warn_if_unwritable(run: str | Path, log: Callable[[str], None]) -> Iterator[None]:
    """Report an I/O error to `log` instead of raising it, so that the results are shown nevertheless."""
    try:
        yield
    except OSError as error:
        log(f"{Path(run) / BENCH} cannot be written: {error.strerror or error}: results are shown and not saved")


def _resident_memory(run: str | Path, precision: Precision, revision: str | None, head: str | None, device: str) -> int:
    """Return the resident memory of a new process after one prediction, in bytes."""
    options = {"precision": precision, "revision": revision, "head": head, "device": device}
    code = RESIDENT_CODE.format(path=sys.path, name=str(run), **options)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise HeedfulError(f"a new process cannot predict with {run}: {reason}")
    return int(process.stdout.split()[-1])

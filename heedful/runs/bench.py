"""Benchmark of a model on this machine in each precision: latency, throughput, memory and quality."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from heedful.atomic_io import check_writable
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
RESIDENT = """
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
    """A model in one precision on this machine."""

    trial: Measurement
    # p50 and p99 in milliseconds by tokens of a text, without tokenizing; {} if the precision was timed briefly
    latency: dict[str, dict[str, float]]
    throughput: int  # tokens a second, of texts of 64 tokens, without tokenizing
    resident: int  # memory of a process that has answered, PyTorch included, in bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """All precisions, and the one that `precision="auto"` takes from now on."""

    model: str
    machine: JsonObject
    metric: str | None  # name of the task's metric; None without data
    split: str | None
    sheets: tuple[PrecisionBench, ...]
    taken: Precision


def bench(
    run: str | Path,
    *,
    data: object = None,
    split: str | None = None,
    revision: str | None = None,
    head: str | None = None,
    device: str = "cpu",
    log: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Measure a run, or a model folder, in float32, bfloat16 and int8.

    In a run folder the result is kept as bench.json; if that cannot be written, `log` gets a sentence.

    Args:
        run: A run, a model folder, or NAME[@REVISION] on the hub.
        data: On which quality is measured; None: only speed and memory are.
        split: Of the data.
        revision: Of a name on the hub.
        head: Kind of head, instead of the one that config.json names.
        device: "cpu" or "cuda".
        log: Receives progress.
    """
    numbers: dict[str, str] = {}

    usual, long_inputs = data_settings_for(run, data)
    writes = run_generation(run)

    def metric(engine: BundleEngine) -> float:
        log(f"evaluating {engine.plan.precision if engine.plan else ''}")
        result = evaluate(engine.loaded, data, split=split, settings=usual, long_inputs=long_inputs, generation=writes)
        numbers.update(metric=result.metric, split=result.split)
        return float(result.numbers[result.metric])

    keeps = (Path(run) / SETTINGS).is_file()
    with _told(run, log):
        if keeps:
            check_writable(Path(run))
    if note := unused_note():
        log(note)
    log("comparing speed and scores")
    place = resolve_device(device)
    trials = measure_precisions(
        run, revision=revision, head=head, device=place, measure_metric=None if data is None else metric, anew=True
    )
    sheets = []
    for trial in trials:
        log(f"timing {trial.precision}")
        engine = open_in_precision(run, trial.precision, revision=revision, head=head, device=place)
        times: JsonObject = (
            {"latency": {}, "throughput": round(trial.speed)} if trial.brief else measure_latency(engine.loaded)
        )
        size = _resident(run, trial.precision, revision, head, device)
        sheets.append(
            PrecisionBench(trial=trial, latency=times["latency"], throughput=times["throughput"], resident=size)
        )
    result = Bench(
        model=engine.loaded.source,
        machine=tuning_cache.machine_facts(place),
        metric=numbers.get("metric"),
        split=numbers.get("split"),
        sheets=tuple(sheets),
        taken=fastest_accepted(trials),
    )
    with _told(run, log):
        if keeps:
            write_file(Path(run) / BENCH, asdict(result))
    return result


@contextmanager
def _told(run: str | Path, log: Callable[[str], None]) -> Iterator[None]:
    """Report an I/O error of bench.json instead of losing the result."""
    try:
        yield
    except OSError as error:
        log(f"{Path(run) / BENCH} cannot be written: {error.strerror or error}: results are shown and not kept")


def _resident(run: str | Path, precision: Precision, revision: str | None, head: str | None, device: str) -> int:
    """Resident memory of a new process that has answered, in bytes."""
    asked = {"precision": precision, "revision": revision, "head": head, "device": device}
    code = RESIDENT.format(path=sys.path, name=str(run), **asked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HeedfulError(f"{run} does not answer in a process of its own: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.split()[-1])

"""Resuming: a run that was stopped for any reason ends with the same results if its command is repeated."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch

import heedful
from heedful.checkpoint import load
from heedful.checkpoint.folder_json import UnfinishedError
from heedful.data import MultiLabelExample
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.infer.precision import PrecisionOrAuto
from heedful.runs import run as run_module
from heedful.runs import run_folder
from heedful.runs.evaluate import evaluate_glue
from heedful.runs.finetune import run as finetune_module
from heedful.train.fit import Reporter
from heedful.train.ranks import Ranks
from heedful.train.run_lock import lock_run
from heedful.train.settings import TrainSettings
from heedful.train.trainer import DivergedError, Step, Trainer
from tests.support.generated_data import (
    assignments,
    classification_rows,
    finetune_tiny,
    multilabel_rows,
    write_csv,
    write_splits,
)
from tests.support.model_folders import make_model_dir
from tests.support.reporters import Messages

ROOT = Path(__file__).parents[2]
LATENCY = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}  # replaces measurements
TUNED = {"task.thresholds": "tuned"}  # settings of most runs here, which classify texts with several labels


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, as in the child processes of these tests, so that equal runs have equal results."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: LATENCY)
    threads = torch.get_num_threads()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would ignore this signal
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of data, and the content of an uninterrupted run on it. The folder of the run is its sibling "run"."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    data = write_splits("multiple", folder / "data")
    torch.set_num_threads(1)
    finetune_tiny("classify", data, folder / "run", TUNED)
    return data, lasting_content(folder / "run")


def lasting_content(run: Path) -> dict[str, Any]:
    """Return the content of the files of a finished run by path: bytes, or parsed JSON without times.

    It is None for files that differ in each run. Plots and the training state are left out.
    """
    content: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if path.name in ("results.json", "seed.json"):
            content[name] = without_times(json.loads(path.read_text()))
        elif path.name in ("run.lock", "environment.json", "README.md", "report.html"):
            content[name] = None
        elif not {"state", "plots"} & set(path.parts):
            content[name] = path.read_bytes()
    return content


def without_times(value: Any) -> Any:
    """Return JSON data without entries that are measured times or memory."""
    if isinstance(value, dict):
        measured = ("seconds", "latency", "throughput", "memory")
        return {name: without_times(item) for name, item in value.items() if name not in measured}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def one_thread_environment() -> dict[str, str]:
    """Return the environment of a child process that imports this checkout and uses one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python code in a child process with one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=one_thread_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(data: Path, run: Path, settings: dict[str, Any] = TUNED) -> list[str]:
    """Return the arguments of the command that corresponds to `finetune_tiny`."""
    return ["finetune", "classify", str(data), "--output", str(run), *assignments(settings)]


# -- finished runs, and runs with other settings or data ------------------------------------------------------------


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    pid = 2**22 + 1  # larger than the number of any process
    for name in (f".model.{pid}.part", f"model/.README.md.{pid}.part", f"seed-2/.model.old.{pid}.part"):
        (tmp_path / name).mkdir(parents=True)
    assert not run_folder.can_resume(tmp_path, {})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["model", "seed-2"]


def test_a_finished_run_is_not_run_again(uninterrupted: tuple[Path, Any]) -> None:
    messages: list[str] = []

    class NoSteps(Reporter):
        def step(self, step: Step, trainer: Trainer) -> None:
            raise AssertionError("a finished run was trained")

        def message(self, text: str) -> None:
            messages.append(text)

    data, _ = uninterrupted
    run = data.parent / "run"

    def modification_times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.lock"}

    before = modification_times()
    result = finetune_tiny("classify", data, run, TUNED, reporter=NoSteps())
    assert result.status == "completed"
    assert result.results == json.loads((run / "results.json").read_text())
    assert messages == [f"{run} is finished already"]
    assert modification_times() == before


def test_other_settings_are_refused_by_name(uninterrupted: tuple[Path, Any]) -> None:
    data, expected = uninterrupted
    run = data.parent / "run"
    for settings, message in (
        (
            {"train.batch_size": 4},
            r"holds a run with other settings: train\.batch_size was 16 and is 4 now\. Give another folder",
        ),
        ({"task.thresholds": 0.5}, r"task\.thresholds was 'tuned' and is 0.5 now\."),
        (
            {"train.max_steps": 9},
            r"train\.epochs was 2\.0 and is None now; train\.max_steps was None and is 9 now",
        ),
        (
            {"train.batch_size": 1, "train.seed": 9, "seeds": 3, "long_inputs": "truncate", "init.width": 64},
            "; and more",
        ),
    ):
        with pytest.raises(HeedfulError, match=message):
            finetune_module.finetune("classify", data, run, assignments=assignments(TUNED | settings))
    assert lasting_content(run) == expected


def test_other_settings_are_accepted_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(finetune_module, "build_task", Mock(side_effect=HeedfulError("no task")))
        for settings in ({}, {"seeds": 2, "init.width": 64}):
            with pytest.raises(HeedfulError, match="no task"):
                finetune_tiny("classify", data, run, settings)
    assert (run / "start").exists()
    assert finetune_tiny("classify", data, run, {"train.batch_size": 8}).status == "completed"
    assert load(run / "start").config.model.width == 32


def test_a_model_is_the_same_however_its_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model_dir(Path("one"), "bare")
    data = write_splits("single", tmp_path / "data")
    results = finetune_tiny("classify", data, Path("run"), model="./one/").results
    assert results["base"] == "one"
    assert finetune_tiny("classify", data, Path("run"), model="one").results == results
    assert finetune_tiny("classify", data, Path("run"), {"init.model": "data/../one"}).results == results


def test_an_error_about_an_unfinished_run_says_how_to_resume_it(
    tmp_path: Path, uninterrupted: tuple[Path, Any]
) -> None:
    data, _ = uninterrupted
    run = tmp_path / "SST-2"
    assert finetune_tiny("classify", data, run, TUNED, reporter=SignalAt(1)).status == "interrupted"
    message = r"SST-2 is a run that is not finished and has no model yet: the command that began it resumes it, heedful"
    with pytest.raises(UnfinishedError, match=message):
        heedful.Engine(run)
    with pytest.raises(UnfinishedError, match=message):
        heedful.evaluate(run, data)
    with pytest.raises(UnfinishedError, match=message):
        heedful.Engine(run, precision="auto")
    (tmp_path / "glue" / "SST-2").mkdir(parents=True)
    for precision in get_args(PrecisionOrAuto):
        with (
            pytest.warns(HeedfulWarning, match=f"^SST-2 is left out: .*{message}"),
            pytest.raises(HeedfulError, match="nothing to evaluate"),
        ):
            evaluate_glue(tmp_path, tmp_path / "glue", precision=precision)


def test_a_run_resumes_in_its_precision_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run began on a machine on which bfloat16 is fast, and is resumed on one on which it is not."""
    data, run, auto = write_splits("single", tmp_path / "data"), tmp_path / "run", {"train.precision": "auto"}
    monkeypatch.setattr(run_folder, "auto_precision", lambda device: "bfloat16")
    assert finetune_tiny("classify", data, run, auto, reporter=SignalAt(1)).status == "interrupted"
    monkeypatch.setattr(run_folder, "auto_precision", lambda device: "float32")
    reporter = Messages()
    resumed = finetune_tiny("classify", data, run, auto, reporter=reporter)
    assert resumed.status == "completed"
    assert resumed.results["settings"]["train"]["precision"] == "bfloat16"
    warning = f"{run} began with train.precision=bfloat16, and resumes with it, which is slow where there are"
    assert warning in reporter.messages[0]
    new_run = finetune_tiny("classify", data, tmp_path / "new", auto)
    assert new_run.results["settings"]["train"]["precision"] == "float32"
    with pytest.raises(HeedfulError, match=r"train\.precision was 'bfloat16' and is 'float32' now"):
        finetune_tiny("classify", data, run, {"train.precision": "float32"})


@pytest.mark.parametrize(
    ("second_rank_precision", "expected"),
    [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")],
)
def test_all_ranks_compute_in_one_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_rank_precision: str, expected: str
) -> None:
    """If two ranks have different fastest precisions, "auto" is float32. A precision that is set is not changed."""

    class TwoRanks(Ranks):
        def all_gather_object(self, value: Any) -> list[Any]:
            if isinstance(value, str):  # the fastest precision
                return [value, second_rank_precision]
            return [value, (True, ("cuda", "float32"))]  # what the second rank reads from the run folder is ignored

    monkeypatch.setattr(run_folder, "auto_precision", lambda device: "bfloat16")
    auto = TrainSettings(epochs=1.0, precision="auto")
    assert run_folder.resolve_auto(auto, tmp_path, TwoRanks(), print).precision == expected
    bfloat16 = TrainSettings(epochs=1.0, precision="bfloat16")
    assert run_folder.resolve_auto(bfloat16, tmp_path, TwoRanks(), print).precision == "bfloat16"


def test_changed_data_are_refused_by_name(tmp_path: Path) -> None:
    data, run = write_splits("multiple", tmp_path / "data"), tmp_path / "run"
    finetune_tiny("classify", data, run, TUNED)
    (data / "notes.md").write_text("a file that is not read as data")
    finetune_tiny("classify", data, run, TUNED)
    text = (data / "test.jsonl").read_text()
    (data / "test.jsonl").write_text(text.replace("cat", "dog"))
    with pytest.raises(HeedfulError, match=r"holds a run on other data: test\.jsonl changed\. Give another folder"):
        finetune_tiny("classify", data, run, TUNED)
    (data / "test.jsonl").write_text(text)
    (data / "dev.jsonl").rename(data / "valid.jsonl")
    with pytest.raises(HeedfulError, match=r"holds a run on other data: dev\.jsonl, valid\.jsonl changed"):
        finetune_tiny("classify", data, run, TUNED)


class Rows:
    """A data set with the interface of the `datasets` library."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names, self.features = rows, list(rows[0]), {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_objects_are_data_too_and_a_change_of_them_is_seen(tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = {"train": Rows(classification_rows(24)), "dev": Rows(classification_rows(8, 1))}
    results = finetune_tiny("classify", data, run).results
    assert set(results["data"]["files"]) == {"train (data set)", "dev (data set)"}
    assert finetune_tiny("classify", data, run).results == results
    with pytest.raises(HeedfulError, match=r"other data: dev \(data set\) changed"):
        finetune_tiny("classify", data | {"dev": Rows(classification_rows(8, 2))}, run)


def test_objects_with_several_labels_are_data_too(tmp_path: Path) -> None:
    results = finetune_tiny("classify", {"train": Rows(multilabel_rows(24))}, tmp_path / "run").results
    assert results["task"] == "multiple"
    assert MultiLabelExample.about in results["data"]["stated"][0]


# -- a run that is stopped ------------------------------------------------------------------------------------------


class FailAtCall:
    """A function that raises an error at its n-th call, and otherwise calls another function."""

    def __init__(self, function: Callable[..., Any], n: int, error: BaseException) -> None:
        self.function, self.n, self.error, self.calls = function, n, error, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.n:
            raise self.error
        return self.function(*arguments, **options)


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [
        (run_folder, "write_file", 1),  # the environment
        (run_folder, "write_file", 3),  # the settings
        (finetune_module, "initial_model", 1),
        (run_module, "save", 1),  # the initial model
        (finetune_module, "fit", 1),
        (finetune_module, "measure_split", 2),  # the second evaluation on dev during training
        (finetune_module, "tune_thresholds", 1),
        (finetune_module, "measure_split", 4),  # the evaluation on test
        (finetune_module, "save", 1),  # the trained model
        (finetune_module, "write_file", 1),  # the results of the only seed
        (finetune_module, "remove_training_state", 1),
        (run_module, "write_file", 2),  # results.json
        (run_module, "draw_run_plots", 1),
        (finetune_module, "write_finetuned_card", 1),
    ],
)
def test_a_run_resumes_wherever_it_stopped(
    tmp_path: Path, uninterrupted: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int
) -> None:
    """A run is stopped by an error in the `at`-th call of a function, and also by Ctrl-C in the first call."""
    data, expected = uninterrupted
    run = tmp_path / "run"
    disk_full = OSError(errno.ENOSPC, "No space left on device")
    message = rf"^{re.escape(str(run))}: the run stopped, since a file could not be written or read: No space left on"
    with monkeypatch.context() as patch:
        patch.setattr(where, name, FailAtCall(getattr(where, name), at, disk_full))
        with pytest.raises(HeedfulError, match=message) as raised:
            finetune_tiny("classify", data, run, TUNED)
        assert "give the same command" in str(raised.value)
        assert "\n" not in str(raised.value)
    if at == 1:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, FailAtCall(getattr(where, name), 1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                finetune_tiny("classify", data, run, TUNED)
    resumed = finetune_tiny("classify", data, run, TUNED)
    assert lasting_content(run) == expected
    assert without_times(resumed.results) == expected["results.json"]
    assert not list(run.rglob(".*")), "no temporary file is left"


class SignalAt(Reporter):
    """Sends a signal to this process at a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.at_step, self.signal_number = step, number

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.at_step:
            os.kill(os.getpid(), self.signal_number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_training_and_the_run_resumes(
    tmp_path: Path, uninterrupted: tuple[Path, Any], number: int
) -> None:
    data, expected = uninterrupted
    run = tmp_path / "run"
    start = time.monotonic()
    first = finetune_tiny("classify", data, run, TUNED, reporter=SignalAt(1, number))
    assert (first.status, first.results) == ("interrupted", {})
    assert time.monotonic() - start < 30
    assert (run / "state" / "latest").read_text() == "step-00000001\n"
    second = finetune_tiny("classify", data, run, TUNED, reporter=SignalAt(3, number))
    assert second.status == "interrupted"
    assert finetune_tiny("classify", data, run, TUNED).status == "completed"
    assert lasting_content(run) == expected


def test_a_signal_in_the_second_seed_stops_and_resumes(tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    whole = finetune_tiny("classify", data, tmp_path / "whole", {"seeds": 2})
    step_seeds: list[int] = []  # seed of each step
    messages: list[str] = []

    class SignalInSecondSeed(SignalAt):
        def step(self, step: Step, trainer: Trainer) -> None:
            step_seeds.append(trainer.settings.seed)
            if trainer.settings.seed == 2:
                super().step(step, trainer)

        def message(self, text: str) -> None:
            messages.append(text)

    interrupted = finetune_tiny("classify", data, run, {"seeds": 2}, reporter=SignalInSecondSeed(2))
    assert interrupted.status == "interrupted"
    assert step_seeds == [1, 1, 1, 1, 2, 2]
    step_seeds.clear()
    messages.clear()
    resumed = finetune_tiny("classify", data, run, {"seeds": 2}, reporter=SignalInSecondSeed(0))
    assert step_seeds == [2, 2], "the first seed is not trained again"
    assert messages.count("measuring dev") == 1, "the first seed is not evaluated again"
    assert without_times(resumed.results) == without_times(whole.results)
    assert lasting_content(run) == lasting_content(tmp_path / "whole")


# runs a command of heedful that gets SIGINT at its third step
INTERRUPTED = """
import os, signal
from heedful.cli import main, progress
def step(self, step, trainer):
    if step.number == 3:
        os.kill(os.getpid(), signal.SIGINT)
progress.Progress.step = step
signal.signal(signal.SIGINT, signal.default_int_handler)  # as on a terminal, also if the tests are a background job
main()
"""


def test_the_command_resumes_after_an_interrupt(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, expected = uninterrupted
    run = tmp_path / "run"
    process = start_process(INTERRUPTED, *command(data, run))
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130
    assert stdout == ""
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == f"stopped; all progress is saved in {run}. The same command resumes it."
    finetune_tiny("classify", data, run, TUNED)
    assert lasting_content(run) == expected


# -- the disk is full -------------------------------------------------------------------------------------------------

# runs a command of heedful once for each limit of the size of files, and prints its exit status
LIMITED = """
import json, os, resource, sys
from heedful.cli import main
import heedful.runs.finetune.run
for limit in json.loads(sys.argv.pop(1)):
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main()
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_run_resumes(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, expected = uninterrupted
    run = tmp_path / "run"
    limits = [300, 2_000, 50_000, 200_000]  # bytes: too few for the settings, a tokenizer, the model, a checkpoint
    process = start_process(LIMITED, json.dumps(limits), *command(data, run))
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "Traceback" not in stderr
    exit_statuses = [line for line in stderr.splitlines() if line.isdecimal()]
    assert exit_statuses == ["2"] * len(limits), stderr
    errors = [line for line in stderr.splitlines() if line.startswith("heedful: ")]
    assert len(errors) == len(limits)
    for error in errors:
        assert str(run) in error
        assert "File too large" in error
    assert "start could not be written, and nothing of it was kept" in errors[2]
    assert "step 2 could not be saved" in errors[3]
    finetune_tiny("classify", data, run, TUNED)
    assert lasting_content(run) == expected
    assert not list(run.rglob(".*")), "no temporary file is left"


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, _ = uninterrupted
    finished_run, new_run = data.parent / "run", tmp_path / "new"
    for run in (finished_run, new_run):
        with lock_run(run), pytest.raises(HeedfulError, match=rf"^another run, pid {os.getpid()}, .* holds "):
            finetune_tiny("classify", data, run, TUNED)
    assert [path.name for path in new_run.iterdir()] == ["run.lock"]
    assert finetune_tiny("classify", data, new_run, TUNED).status == "completed"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, _ = uninterrupted
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    no_lock_and_settings = r"home is not a run folder: it holds thesis\.tex, but no run\.lock and settings"
    with pytest.raises(HeedfulError, match=no_lock_and_settings):
        finetune_tiny("classify", data, home, TUNED)
    (home / "settings.toml").write_text("mine")
    with pytest.raises(HeedfulError, match=r"it holds settings\.toml, thesis\.tex, but no run\.lock; give another"):
        finetune_tiny("classify", data, home, TUNED)
    assert {path.name for path in home.iterdir()} == {"thesis.tex", "settings.toml"}
    assert (home / "settings.toml").read_text() == "mine"
    with pytest.raises(HeedfulError, match=r"thesis\.tex cannot be used: Not a directory"):
        finetune_tiny("classify", data, home / "thesis.tex", TUNED)
    with pytest.raises(HeedfulError, match=r"cannot (be used|hold a run): Not a directory"):
        finetune_tiny("classify", data, home / "thesis.tex" / "run", TUNED)
    with pytest.raises(HeedfulError, match=r"cannot hold a run: No such file or directory"):
        finetune_tiny("classify", data, Path("/proc/nothing/here"), TUNED)
    hidden = tmp_path / "hidden"
    (hidden / ".git").mkdir(parents=True)
    assert finetune_tiny("classify", data, hidden, TUNED).status == "completed", "hidden files are ignored"


def test_a_missing_model_is_refused_before_anything_is_written(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, _ = uninterrupted
    with pytest.raises(HeedfulError, match="'nowhere' is no folder here"):
        finetune_tiny("classify", data, tmp_path / "run", TUNED, model="nowhere")
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_is_replaced_by_one_with_other_settings(
    tmp_path: Path, uninterrupted: tuple[Path, Any]
) -> None:
    data, expected = uninterrupted
    run = tmp_path / "run"
    run.mkdir()
    for name in ("settings.toml", "data.json", "environment.json", "run.lock", "journal.jsonl"):
        (run / name).write_text("content of an earlier run")
    assert finetune_tiny("classify", data, run, TUNED).status == "completed"
    assert lasting_content(run) == expected


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is read-only for root")
    data, _ = uninterrupted
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match=r"run cannot hold a run: Permission denied"):
            finetune_tiny("classify", data, tmp_path / "run", TUNED)
    finally:
        tmp_path.chmod(0o755)


def test_links_and_relative_names_are_followed(
    tmp_path: Path, uninterrupted: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, expected = uninterrupted
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    (tmp_path / "data").symlink_to(data)
    assert finetune_tiny("classify", "data", Path("run"), TUNED).status == "completed"
    assert lasting_content(tmp_path / "elsewhere") == expected


# -- divergence -------------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops(tmp_path: Path, uninterrupted: tuple[Path, Any]) -> None:
    data, expected = uninterrupted
    run = tmp_path / "run"
    diverging = TUNED | {"train.optimizer.lr": 1e30, "train.schedule": "{kind = 'constant'}"}
    message = r"^step [23]: the loss is (nan|inf).* Lower train\.optimizer\.lr.* float32$"
    for _ in range(2):  # the same command fails again
        with pytest.raises(DivergedError, match=message):
            finetune_tiny("classify", data, run, diverging)
        last_record = json.loads((run / "journal.jsonl").read_text().splitlines()[-1])
        assert last_record["loss"] in ("NaN", "Infinity")
        assert last_record["skipped"] is True
        assert not (run / "model").exists()
        assert not (run / "results.json").exists()
    assert finetune_tiny("classify", data, run, TUNED).status == "completed", "other settings work in the same folder"
    assert lasting_content(run) == expected


def test_a_run_that_diverges_after_a_checkpoint_keeps_its_settings(
    tmp_path: Path, uninterrupted: tuple[Path, Any]
) -> None:
    data, _ = uninterrupted
    settings = TUNED | {
        "train.optimizer.lr": 1e30,
        "train.schedule": "{kind = 'constant'}",
        "fit.checkpoint_every_minutes": 0,
    }
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"run resumes with its own settings: .*--output$"):
            finetune_tiny("classify", data, tmp_path / "run", settings)


# -- several processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_make_one_run(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "a.csv", [*classification_rows(40), {"text": "x", "label": ""}])
    run = tmp_path / "run"
    arguments = ["--nproc-per-node", "2", "--module", "heedful", *command(data, run, {}), "--on-bad-row", "skip"]
    process = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env=one_thread_environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("The run is in") == 1, "only the first rank prints"
    results = json.loads((run / "results.json").read_text())
    assert results["data"]["bad_rows"] == {"a.csv": 1}
    single_process = finetune_tiny("classify", data, tmp_path / "single", on_bad_row="skip")
    assert results["splits"].keys() == single_process.results["splits"].keys()
    num_predictions = len((run / "predictions-dev.jsonl").read_text().splitlines())
    assert num_predictions == results["splits"]["dev"]["numbers"]["count"]

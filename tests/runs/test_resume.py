"""Resuming: a run that stopped for any reason ends with the same results when its command is given again."""

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
from heedful.runs import run_folder as folder_module
from heedful.runs.evaluate import evaluate_glue
from heedful.runs.finetune import run as module
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
TIMES = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
MANY = {"task.thresholds": "tuned"}  # what all tests here run on


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing; one thread, as in the processes that are started here, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: TIMES)
    threads = torch.get_num_threads()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background would ignore it
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Data, and what a run that nothing happens to leaves."""
    folder = tmp_path_factory.mktemp("steady")
    labelled = write_splits("multiple", folder / "data")
    torch.set_num_threads(1)
    finetune_tiny("classify", labelled, folder / "run", MANY)
    return labelled, left(folder / "run")


def left(run: Path) -> dict[str, Any]:
    """Every file that lasts, by its name: its bytes, or where times are written in it, what it says beside."""
    content: dict[str, Any] = {}
    for path in sorted(each for each in run.rglob("*") if each.is_file()):
        name = path.relative_to(run).as_posix()
        if path.name in ("results.json", "seed.json"):
            content[name] = timeless(json.loads(path.read_text()))
        elif path.name in ("run.lock", "environment.json", "README.md", "report.html"):
            content[name] = None
        elif not {"state", "plots"} & set(path.parts):
            content[name] = path.read_bytes()
    return content


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        times = ("seconds", "latency", "throughput", "memory")
        return {name: timeless(each) for name, each in value.items() if name not in times}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own, on one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(arguments: Path, run: Path, settings: dict[str, Any] = MANY) -> list[str]:
    """The same run on the command line."""
    sets = list(assignments(settings))
    return ["finetune", "classify", str(arguments), "--output", str(run), *sets]


# -- a run that is finished, and one that is another --------------------------------------------------------------


def test_what_a_killed_process_left_is_removed_wherever_it_lies(tmp_path: Path) -> None:
    gone = 2**22 + 1  # no process has that number
    for name in (f".model.{gone}.part", f"model/.README.md.{gone}.part", f"seed-2/.model.old.{gone}.part"):
        (tmp_path / name).mkdir(parents=True)
    assert not folder_module.can_resume(tmp_path, {})
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["model", "seed-2"]


def test_a_finished_run_is_not_run_again(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    messages: list[str] = []

    class Told(Reporter):
        def step(self, step: Step, trainer: Trainer) -> None:
            raise AssertionError("it trains")

        def message(self, text: str) -> None:
            messages.append(text)

    labelled, _ = steady
    run = labelled.parent / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.lock"}
    done = finetune_tiny("classify", labelled, run, MANY, reporter=Told())
    assert done.status == "completed" and done.results == json.loads((run / "results.json").read_text())
    assert messages == [f"{run} is finished already"]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.lock"} == before


def test_other_settings_are_refused_by_name(steady: tuple[Path, Any]) -> None:
    labelled, _ = steady
    run = labelled.parent / "run"
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
            module.finetune("classify", labelled, run, assignments=assignments(MANY | settings))
    assert left(run) == steady[1]


def test_before_anything_is_trained_other_settings_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(module, "build_task", Mock(side_effect=HeedfulError("no task")))
        for settings in ({}, {"seeds": 2, "init.width": 64}):
            with pytest.raises(HeedfulError, match="no task"):
                finetune_tiny("classify", labelled, run, settings)
    assert (run / "start").exists()
    assert finetune_tiny("classify", labelled, run, {"train.batch_size": 8}).status == "completed"
    assert load(run / "start").config.model.width == 32


def test_a_model_is_the_same_however_its_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model_dir(Path("one"), "bare")
    labelled = write_splits("single", tmp_path / "data")
    done = finetune_tiny("classify", labelled, Path("run"), model="./one/")
    assert done.results["base"] == "one"
    assert finetune_tiny("classify", labelled, Path("run"), model="one").results == done.results
    assert finetune_tiny("classify", labelled, Path("run"), {"init.model": "data/../one"}).results == done.results


def test_an_unfinished_run_says_what_goes_on_with_it(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, _ = steady
    assert finetune_tiny("classify", labelled, tmp_path / "SST-2", MANY, reporter=Leaves(1)).status == "interrupted"
    message = r"SST-2 is a run that is not finished and has no model yet: the command that began it resumes it, heedful"
    with pytest.raises(UnfinishedError, match=message):
        heedful.Engine(tmp_path / "SST-2")
    with pytest.raises(UnfinishedError, match=message):
        heedful.evaluate(tmp_path / "SST-2", labelled)
    with pytest.raises(UnfinishedError, match=message):
        heedful.Engine(tmp_path / "SST-2", precision="auto")
    (tmp_path / "glue" / "SST-2").mkdir(parents=True)
    for precision in get_args(PrecisionOrAuto):
        with (
            pytest.warns(HeedfulWarning, match=f"^SST-2 is left out: .*{message}"),
            pytest.raises(HeedfulError, match="nothing to evaluate"),
        ):
            evaluate_glue(tmp_path, tmp_path / "glue", precision=precision)


def test_a_run_goes_on_in_its_precision_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun where products of bfloat16 are fast, and started again by the same command where they are not."""
    reporter = Messages()
    labelled, run, auto = write_splits("single", tmp_path / "data"), tmp_path / "run", {"train.precision": "auto"}
    monkeypatch.setattr(folder_module, "auto_precision", lambda device: "bfloat16")
    assert finetune_tiny("classify", labelled, run, auto, reporter=Leaves(1)).status == "interrupted"
    monkeypatch.setattr(folder_module, "auto_precision", lambda device: "float32")
    done = finetune_tiny("classify", labelled, run, auto, reporter=reporter)
    assert (done.status, done.results["settings"]["train"]["precision"]) == ("completed", "bfloat16")
    assert (
        f"{run} began with train.precision=bfloat16, and resumes with it, which is slow where there are"
        in reporter.messages[0]
    )
    assert (
        finetune_tiny("classify", labelled, tmp_path / "new", auto).results["settings"]["train"]["precision"]
        == "float32"
    )
    with pytest.raises(HeedfulError, match=r"train\.precision was 'bfloat16' and is 'float32' now"):
        finetune_tiny("classify", labelled, run, {"train.precision": "float32"})


def test_all_ranks_compute_in_one_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    class Two(Ranks):
        def all_gather_object(self, value: Any) -> list[Any]:
            other = messages[-1] if isinstance(value, str) else (True, ("cuda", "float32"))
            return [value, other]  # that a rank other than the first reads something, counts for nothing

    monkeypatch.setattr(folder_module, "auto_precision", lambda device: "bfloat16")
    for others, expected in (("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")):
        messages.append(others)
        asked = TrainSettings(epochs=1.0, precision="auto"), TrainSettings(epochs=1.0, precision="bfloat16")
        for settings, resolved_precision in zip(asked, (expected, "bfloat16"), strict=True):
            assert folder_module.resolve_auto(settings, tmp_path, Two(), print).precision == resolved_precision


def test_changed_data_are_refused_by_name(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, run = write_splits("multiple", tmp_path / "data"), tmp_path / "run"
    finetune_tiny("classify", labelled, run, MANY)
    (tmp_path / "data" / "notes.md").write_text("not read by anybody")
    finetune_tiny("classify", labelled, run, MANY)
    text = (labelled / "test.jsonl").read_text()
    (labelled / "test.jsonl").write_text(text.replace("cat", "dog"))
    with pytest.raises(HeedfulError, match=r"holds a run on other data: test\.jsonl changed\. Give another folder"):
        finetune_tiny("classify", labelled, run, MANY)
    (labelled / "test.jsonl").write_text(text)
    (labelled / "dev.jsonl").rename(labelled / "valid.jsonl")
    with pytest.raises(HeedfulError, match=r"holds a run on other data: dev\.jsonl, valid\.jsonl changed"):
        finetune_tiny("classify", labelled, run, MANY)


class Rows:
    """A data set as the `datasets` library has it."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names, self.features = rows, list(rows[0]), {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_objects_are_data_too_and_a_change_of_them_is_seen(tmp_path: Path) -> None:
    data_objects = {"train": Rows(classification_rows(24)), "dev": Rows(classification_rows(8, 1))}
    done = finetune_tiny("classify", data_objects, tmp_path / "run")
    assert set(done.results["data"]["files"]) == {"train (data set)", "dev (data set)"}
    assert finetune_tiny("classify", data_objects, tmp_path / "run").results == done.results
    with pytest.raises(HeedfulError, match=r"other data: dev \(data set\) changed"):
        finetune_tiny("classify", data_objects | {"dev": Rows(classification_rows(8, 2))}, tmp_path / "run")
    many = finetune_tiny("classify", {"train": Rows(multilabel_rows(24))}, tmp_path / "many")
    assert many.results["task"] == "multiple" and MultiLabelExample.about in many.results["data"]["stated"][0]


# -- a run that stops -----------------------------------------------------------------------------------------------


class Fails:
    """The function, but at one call it raises."""

    def __init__(self, function: Callable[..., Any], at: int, error: BaseException) -> None:
        self.function, self.at, self.error, self.calls = function, at, error, 0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.function(*arguments, **more)


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [
        (folder_module, "write_file", 1),  # the environment
        (folder_module, "write_file", 3),  # the settings
        (module, "initial_model", 1),
        (run_module, "save", 1),  # the encoder on the spot
        (module, "fit", 1),
        (module, "measure_split", 2),  # in the second look
        (module, "tune_thresholds", 1),
        (module, "measure_split", 4),  # of test
        (module, "save", 1),  # the model
        (module, "write_file", 1),  # what one seed found
        (module, "remove_training_state", 1),
        (run_module, "write_file", 2),  # the results
        (run_module, "draw_run_plots", 1),
        (module, "write_finetuned_card", 1),
    ],
)
def test_a_run_resumes_wherever_it_stopped(
    tmp_path: Path, steady: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, where: Any, name: str, at: int
) -> None:
    labelled, expected = steady
    run = tmp_path / "run"
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, Fails(getattr(where, name), at, full))
        message = (
            rf"^{re.escape(str(run))}: the run stopped, since a file could not be written or read: No space left on"
        )
        with pytest.raises(HeedfulError, match=message) as raised:
            finetune_tiny("classify", labelled, run, MANY)
        assert "give the same command" in str(raised.value) and "\n" not in str(raised.value)
    if at == 1:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, Fails(getattr(where, name), 1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                finetune_tiny("classify", labelled, run, MANY)
    done = finetune_tiny("classify", labelled, run, MANY)
    assert left(run) == expected
    assert timeless(done.results) == expected["results.json"]
    assert not list(run.rglob(".*")), "nothing is left of what was not finished"


class Leaves(Reporter):
    """A signal at a step."""

    def __init__(self, at: int, number: int = signal.SIGTERM) -> None:
        self.at, self.number = at, number

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_training_and_the_run_resumes(tmp_path: Path, steady: tuple[Path, Any], number: int) -> None:
    labelled, expected = steady
    began = time.monotonic()
    done = finetune_tiny("classify", labelled, tmp_path / "run", MANY, reporter=Leaves(1, number))
    assert (done.status, done.results) == ("interrupted", {}) and time.monotonic() - began < 30
    assert (tmp_path / "run" / "state" / "latest").read_text() == "step-00000001\n"
    assert (
        finetune_tiny("classify", labelled, tmp_path / "run", MANY, reporter=Leaves(3, number)).status == "interrupted"
    )
    assert finetune_tiny("classify", labelled, tmp_path / "run", MANY).status == "completed"
    assert left(tmp_path / "run") == expected


def test_a_signal_in_the_second_seed_stops_and_resumes(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    whole = finetune_tiny("classify", labelled, tmp_path / "whole", {"seeds": 2})
    seeds: list[int] = []
    messages: list[str] = []

    class Second(Leaves):
        def step(self, step: Step, trainer: Trainer) -> None:
            seeds.append(trainer.settings.seed)
            if trainer.settings.seed == 2:
                super().step(step, trainer)

        def message(self, text: str) -> None:
            messages.append(text)

    assert (
        finetune_tiny("classify", labelled, tmp_path / "run", {"seeds": 2}, reporter=Second(2)).status == "interrupted"
    )
    assert seeds == [1, 1, 1, 1, 2, 2]
    seeds.clear()
    messages.clear()
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"seeds": 2}, reporter=Second(0))
    assert seeds == [2, 2] and messages.count("measuring dev") == 1, "the first seed is not done again"
    assert timeless(done.results) == timeless(whole.results)
    assert left(tmp_path / "run") == left(tmp_path / "whole")


INTERRUPTED = """
import os, signal
from heedful.cli import main, progress
def step(self, step, trainer):
    if step.number == 3:
        os.kill(os.getpid(), signal.SIGINT)
progress.Progress.step = step
signal.signal(signal.SIGINT, signal.default_int_handler)  # as on a terminal, wherever the tests run
main()
"""


def test_the_command_resumes_after_an_interrupt(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, expected = steady
    process = start(INTERRUPTED, *command(labelled, tmp_path / "run"))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and not out and "Traceback" not in err
    assert err.splitlines()[-1] == (
        f"stopped; all progress is saved in {tmp_path / 'run'}. The same command resumes it."
    )
    finetune_tiny("classify", labelled, tmp_path / "run", MANY)
    assert left(tmp_path / "run") == expected


# -- the disk is full -------------------------------------------------------------------------------------------------

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
def test_a_full_disk_is_an_error_and_the_run_resumes(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, expected = steady
    run = tmp_path / "run"
    limits = [300, 2_000, 50_000, 200_000]  # too little for the settings, a tokenizer, the encoder, a checkpoint
    process = start(LIMITED, json.dumps(limits), *command(labelled, run))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("heedful: ") or line.isdecimal()]
    assert [line for line in lines if line.isdecimal()] == ["2"] * 4, err
    messages = [line for line in lines if not line.isdecimal()]
    assert len(messages) == 4 and all(str(run) in line and "File too large" in line for line in messages)
    assert "start could not be written, and nothing of it was kept" in messages[2]
    assert "step 2 could not be saved" in messages[3]
    finetune_tiny("classify", labelled, run, MANY)
    assert left(run) == expected and not list(run.rglob(".*"))


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, _ = steady
    run = labelled.parent / "run"
    for folder in (run, tmp_path / "new"):
        with lock_run(folder), pytest.raises(HeedfulError, match=rf"^another run, pid {os.getpid()}, .* holds "):
            finetune_tiny("classify", labelled, folder, MANY)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.lock"]
    assert finetune_tiny("classify", labelled, tmp_path / "new", MANY).status == "completed"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, _ = steady
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(
        HeedfulError, match=r"home is not a run folder: it holds thesis\.tex, but no run\.lock and settings"
    ):
        finetune_tiny("classify", labelled, home, MANY)
    (home / "settings.toml").write_text("mine")
    with pytest.raises(HeedfulError, match=r"it holds settings\.toml, thesis\.tex, but no run\.lock; give another"):
        finetune_tiny("classify", labelled, home, MANY)
    assert {path.name for path in home.iterdir()} == {"thesis.tex", "settings.toml"}
    assert (home / "settings.toml").read_text() == "mine"
    with pytest.raises(HeedfulError, match=r"thesis\.tex cannot be used: Not a directory"):
        finetune_tiny("classify", labelled, home / "thesis.tex", MANY)
    with pytest.raises(HeedfulError, match=r"cannot (be used|hold a run): Not a directory"):
        finetune_tiny("classify", labelled, home / "thesis.tex" / "run", MANY)
    with pytest.raises(HeedfulError, match=r"cannot hold a run: No such file or directory"):
        finetune_tiny("classify", labelled, Path("/proc/nothing/here"), MANY)
    hidden = tmp_path / "hidden"
    (hidden / ".git").mkdir(parents=True)
    assert finetune_tiny("classify", labelled, hidden, MANY).status == "completed", "hidden files are in nobody's way"


def test_a_run_that_has_nothing_yet_may_become_another(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    labelled, expected = steady
    run = tmp_path / "run"
    with pytest.raises(HeedfulError, match="'nowhere' is no folder here"):
        finetune_tiny("classify", labelled, run, MANY, model="nowhere")
    assert not run.exists(), "told before anything is written"
    run.mkdir()
    for name in ("settings.toml", "data.json", "environment.json", "run.lock", "journal.jsonl"):
        (run / name).write_text("of a run that had nothing yet")
    assert finetune_tiny("classify", labelled, run, MANY).status == "completed", (
        "it becomes another, in the same folder"
    )
    assert left(run) == expected


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing is read-only for root")
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(HeedfulError, match=r"run cannot hold a run: Permission denied"):
            finetune_tiny("classify", steady[0], tmp_path / "run", MANY)
    finally:
        tmp_path.chmod(0o755)


def test_links_and_relative_names_are_followed(
    tmp_path: Path, steady: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled, expected = steady
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to("elsewhere")
    (tmp_path / "data").symlink_to(labelled)
    assert finetune_tiny("classify", "data", Path("run"), MANY).status == "completed"
    assert left(tmp_path / "elsewhere") == expected


# -- divergence -------------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_stops(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    settings = MANY | {"train.optimizer.lr": 1e30, "train.schedule": "{kind = 'constant'}"}
    for _ in range(2):  # the same command does not hide it
        with pytest.raises(
            DivergedError, match=r"^step [23]: the loss is (nan|inf).* Lower train\.optimizer\.lr.* float32$"
        ):
            finetune_tiny("classify", steady[0], tmp_path / "run", settings)
        last = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[-1])
        assert last["loss"] in ("NaN", "Infinity") and last["skipped"] is True
        assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "results.json").exists()
    assert finetune_tiny("classify", steady[0], tmp_path / "run", MANY).status == "completed", (
        "what was advised is taken there"
    )
    assert left(tmp_path / "run") == steady[1]


def test_a_run_that_diverges_after_a_checkpoint_keeps_its_settings(tmp_path: Path, steady: tuple[Path, Any]) -> None:
    settings = MANY | {
        "train.optimizer.lr": 1e30,
        "train.schedule": "{kind = 'constant'}",
        "fit.checkpoint_every_minutes": 0,
    }
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"run resumes with its own settings: .*--output$"):
            finetune_tiny("classify", steady[0], tmp_path / "run", settings)


# -- several processes ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_make_one_run(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", [*classification_rows(40), {"text": "x", "label": ""}])
    run = tmp_path / "run"
    words = ["--nproc-per-node", "2", "--module", "heedful", *command(labelled, run, {}), "--on-bad-row", "skip"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The run is in") == 1
    results = json.loads((run / "results.json").read_text())
    assert results["data"]["bad_rows"] == {"a.csv": 1}
    alone = finetune_tiny("classify", labelled, tmp_path / "alone", on_bad_row="skip")
    assert results["splits"].keys() == alone.results["splits"].keys()
    assert len((run / "predictions-dev.jsonl").read_text().splitlines()) == results["splits"]["dev"]["numbers"]["count"]

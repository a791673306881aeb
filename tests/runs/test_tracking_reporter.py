"""Trackers get the records of the journal, also of resumed runs, and a tracker that fails does not stop training."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import heedful
from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.runs import trackers
from heedful.runs.finetune.run import finetune
from heedful.runs.tracking_reporter import TRACKING, TrackingReporter
from heedful.train.fit import Reporter
from heedful.train.journal import read_journal

pytestmark = pytest.mark.usefixtures("quick")

SETTINGS = {
    "init.kind": "classic",
    "init.reader.kind": "bag",
    "init.words.width": 8,
    "eval_baseline": False,
    "train.epochs": 2,
    "train.batch_size": 8,
    "data.dev_fraction": 0.2,
}


class Messages(Reporter):
    """Keeps the messages of a run, and may stop its training after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self._stop_after = stop_after  # number of a step; 0: training is not stopped

    def step(self, step: Any, trainer: Any) -> None:
        trainer.stop_requested = step.number == self._stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file with 60 labelled texts."""
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"word {n} and {'good' if n % 2 else 'bad'}", "label": "ab"[n % 2]} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(texts: Path, folder: Path, names: list[str], reporter: Reporter | None = None) -> str:
    """Fine-tune a model with trackers, and return the status of the run."""
    tracking_reporter = TrackingReporter(reporter or Reporter(), names)
    return finetune("classify", texts, folder, overrides=SETTINGS, reporter=tracking_reporter).status


def csv_rows(folder: Path) -> list[dict[str, str]]:
    """Read metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def journal_scalar(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return (step, value) for each record of the journal that has a scalar, such as "train/loss" or "dev/accuracy"."""
    group, key = name.split("/")
    records = list(read_journal(folder / "journal.jsonl"))
    if group == "dev":
        return [(record["step"], float(record["dev"][key])) for record in records if "dev" in record]
    return [(record["step"], float(record[key])) for record in records if "dev" not in record]


def test_tensorboard_has_the_journal_also_after_a_resume(texts: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert train(texts, run, ["tensorboard"], Messages(stop_after=5)) == "interrupted"
    assert train(texts, run, ["tensorboard"]) == "completed"
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("train/loss", "dev/accuracy"):
        logged = events.Scalars(name)
        steps, values = zip(*journal_scalar(run, name), strict=True)
        assert [event.step for event in logged] == list(steps)
        assert [event.value for event in logged] == pytest.approx(list(values), rel=1e-6)
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_csv_has_a_row_for_each_record(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(texts, run, ["csv"], Messages(stop_after=5)) == "interrupted"
    assert len(csv_rows(run)) == 5
    assert train(texts, run, ["csv"]) == "completed"
    rows = csv_rows(run)
    assert len(rows) == len(list(read_journal(run / "journal.jsonl")))
    assert any(row["dev_accuracy"] for row in rows)


class FailingTracker:
    """A tracker that records how it was opened and closed, and fails at step 3."""

    opened: ClassVar[list[tuple[str, int, dict[str, Any]]]] = []  # (run id, step, settings) of each time
    closed: ClassVar[list[bool]] = []  # argument `finished` of each time

    def __init__(self, folder: Path, run_id: str, step: int, settings: dict[str, Any]) -> None:
        self.opened.append((run_id, step, settings))
        self.run_id = run_id or f"run-{len(self.opened)}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("no network")

    def close(self, finished: bool) -> None:
        self.closed.append(finished)


def test_a_tracker_that_fails_is_reported_once_and_training_goes_to_its_end(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "csv", FailingTracker)
    reporter = Messages()
    assert train(texts, tmp_path / "run", ["csv"], reporter) == "completed"
    (message,) = [message for message in reporter.messages if "tracker" in message]
    assert "tracker csv failed" in message
    assert "no network" in message


def test_a_resumed_run_keeps_its_name_at_the_tracker(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingTracker, "opened", [])
    monkeypatch.setattr(FailingTracker, "closed", [])
    monkeypatch.setattr(FailingTracker, "log", lambda self, step, values: None)  # which does not fail
    monkeypatch.setitem(trackers.TRACKERS, "csv", FailingTracker)
    assert train(texts, tmp_path / "run", ["csv"], Messages(stop_after=4)) == "interrupted"
    assert train(texts, tmp_path / "run", ["csv"]) == "completed"
    (first_id, first_step, settings), (second_id, second_step, _) = FailingTracker.opened
    assert (first_id, first_step) == ("", 0)
    assert (second_id, second_step) == ("run-1", 4)
    assert settings["train.seed"] == 1
    assert FailingTracker.closed == [False, True]
    assert json.loads((tmp_path / "run" / TRACKING).read_text()) == {"csv": "run-1"}


def test_a_tracker_that_cannot_be_opened_stops_the_run_before_its_first_step(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise PermissionError("not logged in")

    monkeypatch.setitem(trackers.TRACKERS, "csv", fail)
    with pytest.raises(HeedfulError, match="csv cannot be opened: PermissionError: not logged in"):
        train(texts, tmp_path / "run", ["csv"])
    assert not (tmp_path / "run" / "journal.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "pattern"), [("tensorbord", "tensorboard"), ("wandb", r"pip install 'heedful\[wandb\]'")]
)
def test_an_unknown_or_missing_tracker_is_named_before_training(
    name: str, pattern: str, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as stop:
        main(["finetune", "classify", str(texts), "--track", name])
    assert stop.value.code == 2
    assert re.search(pattern, capsys.readouterr().err)


PACKAGES = ("wandb", "mlflow-skinny", "sqlalchemy", "alembic", "trackio")
# trains and resumes a run with three trackers, and writes what they recorded to a JSON file; arguments: folder of this
# file, file of texts, run folder, JSON file
CHILD = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_tracking_reporter import Messages, train
texts, folder = Path(sys.argv[2]), Path(sys.argv[3])
names = ["wandb", "mlflow", "trackio"]
first = Messages(stop_after=5)
assert train(texts, folder, names, first) == "interrupted", first.messages
resumed = Messages()
assert train(texts, folder, names, resumed) == "completed"
messages = first.messages + resumed.messages
assert not [message for message in messages if "tracker" in message], messages
from mlflow.tracking import MlflowClient
import trackio
ids = json.loads((folder / "tracking.json").read_text())
client = MlflowClient()
mlflow_run = client.get_run(ids["mlflow"])
mlflow_loss = [(point.step, point.value) for point in client.get_metric_history(ids["mlflow"], "train/loss")]
trackio_rows = trackio.SQLiteStorage.get_logs("heedful", ids["trackio"])
records = {
    "status": mlflow_run.info.status,
    "params": mlflow_run.data.params,
    "mlflow": mlflow_loss,
    "trackio": [(row["step"], row["train/loss"]) for row in trackio_rows if "train/loss" in row],
    "wandb_files": len(list(folder.glob("wandb/offline-run-*/*.wandb"))),
}
Path(sys.argv[4]).write_text(json.dumps(records))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wandb_mlflow_and_trackio_take_a_run_and_its_resume(texts: Path, tmp_path: Path) -> None:
    """The trackers are installed in a new environment, which also sees the packages of this one."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    checkout = Path(heedful.__file__).parents[1]
    packages = [path for path in sys.path if "site-packages" in path]
    (site / "parent-environment.pth").write_text("\n".join([str(checkout), *packages]))
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    tracker_environment = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
    }
    run, records_file = tmp_path / "run", tmp_path / "records.json"
    child = subprocess.run(
        [python, "-c", CHILD, str(Path(__file__).parent), str(texts), str(run), str(records_file)],
        env=os.environ | tracker_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    records = json.loads(records_file.read_text())
    assert records["status"] == "FINISHED"
    assert records["params"]["train.seed"] == "1"
    losses = journal_scalar(run, "train/loss")
    assert [tuple(point) for point in records["mlflow"]] == losses
    assert dict(map(tuple, records["trackio"])) == dict(losses)
    assert records["wandb_files"] == 2, "one of the run, and one of its resume"

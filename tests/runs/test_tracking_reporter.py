"""Trackers get what the journal has, also over a resume; one that fails does not end training."""

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
    """Keeps messages; stops training after a step."""

    def __init__(self, stop_after: int = 0) -> None:
        self.messages: list[str] = []
        self._stop_after = stop_after

    def step(self, step: Any, trainer: Any) -> None:
        trainer.stop_requested = step.number == self._stop_after

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"word {n} and {'good' if n % 2 else 'bad'}", "label": "ab"[n % 2]} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(texts: Path, folder: Path, names: list[str], reporter: Reporter | None = None) -> str:
    return finetune(
        "classify", texts, folder, overrides=SETTINGS, reporter=TrackingReporter(reporter or Reporter(), names)
    ).status


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def series(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a scalar of the journal."""
    group, key = name.split("/")
    lines = list(read_journal(folder / "journal.jsonl"))
    rows = [
        (line["step"], line["dev"] if group == "dev" else line) for line in lines if ("dev" in line) == (group == "dev")
    ]
    return [(step, float(values[key])) for step, values in rows]


def test_tensorboard_has_the_journal_also_after_a_resume(texts: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert train(texts, run, ["tensorboard"], Messages(stop_after=5)) == "interrupted"
    assert train(texts, run, ["tensorboard"]) == "completed"
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("train/loss", "dev/accuracy"):
        assert [(each.step, each.value) for each in events.Scalars(name)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in series(run, name)
        ]
    assert "settings/text_summary" in events.Tags()["tensors"]


def test_csv_has_a_row_for_each_record(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(texts, run, ["csv"], Messages(stop_after=5)) == "interrupted"
    assert len(table(run)) == 5
    assert train(texts, run, ["csv"]) == "completed"
    rows = table(run)
    assert len(rows) == len(list(read_journal(run / "journal.jsonl")))
    assert any(row["dev_accuracy"] for row in rows)


class Recorder:
    """A tracker that keeps what it gets, and may fail at a step."""

    opened: ClassVar[list[tuple[str, int, dict[str, Any]]]] = []
    closed: ClassVar[list[bool]] = []

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
    monkeypatch.setitem(trackers.TRACKERS, "csv", Recorder)
    reporter = Messages()
    assert train(texts, tmp_path / "run", ["csv"], reporter) == "completed"
    assert [each for each in reporter.messages if "tracker csv failed" in each and "no network" in each] != []
    assert len([each for each in reporter.messages if "tracker" in each]) == 1


def test_a_resumed_run_keeps_its_name_at_the_tracker(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "opened", [])
    monkeypatch.setattr(Recorder, "closed", [])
    monkeypatch.setattr(Recorder, "log", lambda self, step, values: None)
    monkeypatch.setitem(trackers.TRACKERS, "csv", Recorder)
    assert train(texts, tmp_path / "run", ["csv"], Messages(stop_after=4)) == "interrupted"
    assert train(texts, tmp_path / "run", ["csv"]) == "completed"
    assert [(name, step) for name, step, _ in Recorder.opened] == [("", 0), ("run-1", 4)]
    assert Recorder.closed == [False, True]
    assert json.loads((tmp_path / "run" / TRACKING).read_text()) == {"csv": "run-1"}
    assert Recorder.opened[0][2]["train.seed"] == 1


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
    ("name", "words"), [("tensorbord", "tensorboard"), ("wandb", r"pip install 'heedful\[wandb\]'")]
)
def test_an_unknown_or_missing_tracker_is_named_before_training(
    name: str, words: str, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(SystemExit) as stop:
        main(["finetune", "classify", str(texts), "--track", name])
    assert stop.value.code == 2
    assert re.search(words, capsys.readouterr().err)


PACKAGES = ("wandb", "mlflow-skinny", "sqlalchemy", "alembic", "trackio")
CHILD = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_tracking_reporter import Messages, train
texts, folder = Path(sys.argv[2]), Path(sys.argv[3])
names = ["wandb", "mlflow", "trackio"]
reporter = Messages(stop_after=5)
assert train(texts, folder, names, reporter) == "interrupted", reporter.messages
again = Messages()
assert train(texts, folder, names, again) == "completed"
messages = reporter.messages + again.messages
assert not [each for each in messages if "tracker" in each], messages
from mlflow.tracking import MlflowClient
import trackio
ids = json.loads((folder / "tracking.json").read_text())
client = MlflowClient()
run = client.get_run(ids["mlflow"])
history = [(each.step, each.value) for each in client.get_metric_history(ids["mlflow"], "train/loss")]
rows = trackio.SQLiteStorage.get_logs("heedful", ids["trackio"])
local = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
offline = len(list(folder.glob("wandb/offline-run-*/*.wandb")))
found = {"status": run.info.status, "params": run.data.params, "history": history, "local": local, "offline": offline}
Path(sys.argv[4]).write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wandb_mlflow_and_trackio_take_a_run_and_its_resume(texts: Path, tmp_path: Path) -> None:
    """In an environment of their own, beside this one's packages; wandb writes offline, mlflow to a local store."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    here = Path(heedful.__file__).parents[1]
    (site / "beside.pth").write_text("\n".join([str(here), *(path for path in sys.path if "site-packages" in path)]))
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path / "trackio")}
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    done = subprocess.run(
        [
            python,
            "-c",
            CHILD,
            str(Path(__file__).parent),
            str(texts),
            str(tmp_path / "run"),
            str(tmp_path / "found.json"),
        ],
        env=os.environ | quiet | store,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["status"] == "FINISHED" and content["params"]["train.seed"] == "1"
    losses = series(tmp_path / "run", "train/loss")
    assert [tuple(each) for each in content["history"]] == losses
    assert dict(map(tuple, content["local"])) == dict(losses)
    assert content["offline"] == 2

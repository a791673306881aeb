"""Experiment trackers for --track: CSV, TensorBoard, Weights & Biases, MLflow, Trackio.

Each is a class here that adapts the tracker's package, which is an optional dependency. `TrackingReporter` calls them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from heedful.errors import HeedfulError, did_you_mean

PROJECT = "heedful"  # default name of the project or experiment; environment variables of the tracker override it
PACKAGES = {  # required package by name of the tracker, which is also the name of Heedful's extra
    "csv": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


class Tracker(Protocol):
    """Receives the scalars of a run: metrics and losses."""

    run_id: str  # the tracker's id of the run, stored so that a resumed run is logged under it; "": it has no ids

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step by name, such as "train/loss" or "dev/accuracy"."""

    def close(self, finished: bool) -> None:
        """End the run. `finished` is False if the run was interrupted and can be resumed."""


# (run folder, stored run id or "", step of the checkpoint that is resumed or 0, settings by full path) -> tracker
Opener = Callable[[Path, str, int, Mapping[str, object]], Tracker]


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of trackers, and return them without repeats.

    Raises:
        HeedfulError: If a name is unknown, or the package of a tracker is not installed.
    """
    for name in names:
        if name not in PACKAGES:
            known = ", ".join(PACKAGES)
            raise HeedfulError(f"--track is {name!r}{did_you_mean(name, list(PACKAGES))}: use one of {known}")
        if (package := PACKAGES[name]) and find_spec(package) is None:
            raise HeedfulError(f"--track {name} needs the package {package}: pip install 'heedful[{name}]'")
    return tuple(dict.fromkeys(names))


class _Csv:
    """Writes the journal as metrics.csv to the run folder, anew after each evaluation and at the end."""

    run_id = ""

    def __init__(self, folder: Path, run_id: str, step: int, settings: Mapping[str, object]) -> None:
        from heedful.runs.results import JOURNAL
        from heedful.runs.run_folder import journal_csv, write_file

        def rewrite() -> None:
            write_file(folder / "metrics.csv", journal_csv(folder / JOURNAL))

        self._rewrite = rewrite

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if any(name.startswith("dev/") for name in values):
            self._rewrite()

    def close(self, finished: bool) -> None:
        self._rewrite()


class _TensorBoard:
    """Writes event files to the folder tensorboard in the run folder.

    Steps after the resumed checkpoint are removed, since the resumed run logs them again.
    """

    run_id = ""

    def __init__(self, folder: Path, run_id: str, step: int, settings: Mapping[str, object]) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1
        )
        if not step:
            table = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{table}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, finished: bool) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases. WANDB_PROJECT, WANDB_MODE and its other environment variables apply."""

    def __init__(self, folder: Path, run_id: str, step: int, settings: Mapping[str, object]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=run_id or None,
            resume="allow",
            dir=str(folder),
            config=settings,
        )
        self.run_id = str(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # the default axis refuses steps that a resumed run repeats

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class _Mlflow:
    """A run of MLflow. The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply."""

    def __init__(self, folder: Path, run_id: str, step: int, settings: Mapping[str, object]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._metric = Metric
        self._last_step = 0  # last step that an earlier part of the run has logged; a resumed run repeats some steps
        if run_id:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            history = self._client.get_metric_history(run_id, "train/loss")
            self._last_step = max((entry.step for entry in history), default=0)
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.run_id = self._client.create_run(experiment_id, run_name=folder.name).info.run_id
        params = [Param(name, str(value)[:6000]) for name, value in settings.items()]
        for start in range(0, len(params), 100):  # MLflow's maximum per batch
            self._client.log_batch(self.run_id, params=params[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_step or any(name.startswith("dev/") for name in values):
            now = int(1000 * time.time())
            self._client.log_batch(self.run_id, metrics=[self._metric(*named, now, step) for named in values.items()])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.run_id, status="FINISHED" if finished else "KILLED")


class _Trackio:
    """A run of Trackio, a local dashboard (`trackio show`). The environment variable TRACKIO_DIR applies."""

    def __init__(self, folder: Path, run_id: str, step: int, settings: Mapping[str, object]) -> None:
        import trackio

        self.run_id = run_id or str(folder.absolute()).strip("/").replace("/", "-")
        self._run = trackio.init(
            project=PROJECT, name=self.run_id, config=settings, resume="allow", embed=False, auto_log_gpu=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Opener] = {
    "csv": _Csv,
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}

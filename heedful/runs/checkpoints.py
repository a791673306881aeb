"""Checkpoints of a finished run: their entry in results.json, notes about their choice, and their folders.

Runs write the entry; `heedful evaluate` and `predict` find the folder of a checkpoint with `find_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from heedful.atomic_io import remove
from heedful.errors import RunError
from heedful.runs.results import RESULTS, read_results
from heedful.tasks.metrics import format_difference

CHECKPOINTS = "checkpoints"  # folder in a run, for weights other than those of the run's model
LAST = "last"  # folder in CHECKPOINTS with the weights of the last step
STATE = "state"  # folder in a run with the training state


class ScoredStep(TypedDict):
    """A training step, and the metric on dev of the weights after it."""

    step: int
    metric_value: float | None  # None: the step was not evaluated


class CheckpointEntry(TypedDict):
    """The entry "checkpoints" of results.json: the best and the last step, and the one whose weights the model has."""

    model: Literal["best", "last"]
    best: ScoredStep | None  # None: nothing was evaluated on dev during training
    last: ScoredStep


def checkpoint_entry(
    best_step: int, best_metric: float | None, last_step: int, last_metric: float | None, load_best: bool
) -> CheckpointEntry:
    """Return the entry "checkpoints" of results.json.

    Args:
        best_step: Step of the best weights on dev.
        best_metric: Metric of the best weights, or None if there were no evaluations.
        last_step: Step of the last weights.
        last_metric: Metric of the last weights, or None if there were no evaluations.
        load_best: Whether the model gets the best weights (`fit.load_best_at_end`).
    """
    chosen: Literal["best", "last"] = "best" if load_best and best_metric is not None else "last"
    best: ScoredStep | None = None if best_metric is None else {"step": best_step, "metric_value": best_metric}
    return {"model": chosen, "best": best, "last": {"step": last_step, "metric_value": last_metric}}


def small_dev_note(entry: CheckpointEntry, metric: str, interval: Mapping[str, float] | None) -> str:
    """Return a warning if dev is too small to prefer the best checkpoint to the last one, else "".

    Dev is too small if the 95 % interval of the metric is wider than the gain of the best checkpoint over the last one.

    Args:
        entry: The checkpoints of a run.
        metric: Name of the metric.
        interval: "low" and "high" of the metric of the model on dev, or None if the interval is unknown.
    """
    best, last = entry["best"], entry["last"]
    if entry["model"] != "best" or best is None or best["step"] == last["step"] or interval is None:
        return ""
    if best["metric_value"] is None or last["metric_value"] is None:
        return ""
    gain = best["metric_value"] - last["metric_value"]
    interval_width = interval["high"] - interval["low"]
    if interval_width <= gain:
        return ""
    gain_text = format_difference(metric, gain, sign="")
    width_text = format_difference(metric, interval_width, sign="")
    return (
        f"dev is too small to choose a checkpoint: the {metric} of the best one (step {best['step']:,}) is {gain_text} "
        f"above that of the last one (step {last['step']:,}), but its 95 % interval is {width_text} wide; evaluate and "
        "predict take the last one with --checkpoint last"
    )


def continued_run_note(model: str, task: str) -> str:
    """Return a note if `model`, from which training starts, is a finished run of the same task, else ""."""
    folder = Path(model)
    if not model or not (folder / RESULTS).is_file() or read_results(folder)["task"] != task:
        return ""
    return f"training starts from the weights of the run {model}; the optimizer and its schedule start anew"


def remove_training_state(folder: Path) -> None:
    """Remove the training state of a finished run. If its folder is a link, the target of the link is emptied."""
    state = folder / STATE
    if state.is_symlink():
        for path in state.iterdir() if state.exists() else ():
            remove(path)
    elif state.exists():
        remove(state)


def find_checkpoint(run: str | Path, which: str) -> Path:
    """Return the folder of a checkpoint of a finished run, for `load`.

    Args:
        run: The run folder.
        which: "best", "last", or a step such as "120".

    Raises:
        RunError: If the run is not finished, or does not have that checkpoint.
    """
    if which not in ("best", LAST) and not which.isdecimal():
        raise RunError(f'--checkpoint is "{which}": use best, last, or the number of a step')
    folder = Path(run)
    if not (folder / RESULTS).is_file():
        raise RunError(f"{run} is not a finished run and has no checkpoint {which}: leave --checkpoint out")
    results = read_results(folder)
    seed_folder = folder / f"seed-{results.get('seed')}"
    folder = seed_folder if seed_folder.is_dir() else folder  # a run of several seeds has the model of one seed
    entry = results[CHECKPOINTS]
    steps = {name: entry[name]["step"] for name in ("best", LAST) if entry[name] is not None}
    if which.isdecimal():
        step = int(which)
    elif which in steps:
        step = steps[which]
    else:
        raise RunError(f"{run} was not evaluated on dev while it trained, so it has no best checkpoint: use last")
    if step == steps[entry["model"]]:
        return folder
    if step == steps[LAST] and (folder / CHECKPOINTS / LAST).is_dir():
        return folder / CHECKPOINTS / LAST
    states: dict[int, Path] = {}  # folders of training states by step
    for path in sorted((folder / STATE).glob("step-*")):
        if (state_step := _step(path)) is not None:
            states[state_step] = path
    if step in states:
        return states[step]
    available = sorted({steps[entry["model"]], *([steps[LAST]] if (folder / CHECKPOINTS).is_dir() else ()), *states})
    wanted = f"step {step}" if which.isdecimal() else f"its {which} checkpoint, step {step}"
    raise RunError(
        f"{run} has no weights of {wanted}: it has those of step{'s' * (len(available) != 1)} "
        f"{', '.join(map(str, available))}; a run keeps more with fit.keep_checkpoints"
    )


def _step(path: Path) -> int | None:
    """Return the step of a folder with a training state, such as step-00000120, or None for any other path."""
    match = re.fullmatch(r"step-([0-9]{8,18})(?:-[0-9]+)?", path.name)
    return int(match[1]) if match else None

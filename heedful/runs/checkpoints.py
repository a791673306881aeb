"""Checkpoints of a finished run: which are kept, whether dev is large enough to choose one, and their folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from heedful.atomic_io import remove
from heedful.errors import RunError
from heedful.runs.results import RESULTS, read_results
from heedful.tasks.metrics import format_difference

CHECKPOINTS, STATE = "checkpoints", "state"  # folders of a run: weights beside those of its model, and training state
LAST = "last"  # in CHECKPOINTS


class ScoredStep(TypedDict):
    """A step, and the metric of its weights."""

    step: int
    metric_value: float | None


class CheckpointEntry(TypedDict):
    """An entry of results.json: the best and the last weights, and which of them the model has."""

    model: Literal["best", "last"]
    best: ScoredStep | None
    last: ScoredStep


def checkpoint_entry(
    best_step: int, best: float | None, last_step: int, last: float | None, load_best: bool
) -> CheckpointEntry:
    """The entry of results.json: step and metric of the best and the last weights, and which of them the model has."""
    chosen: Literal["best", "last"] = "best" if load_best and best is not None else "last"
    best_entry: ScoredStep | None = None if best is None else {"step": best_step, "metric_value": best}
    return {"model": chosen, "best": best_entry, "last": {"step": last_step, "metric_value": last}}


def small_dev_note(entry: CheckpointEntry, metric: str, interval: Mapping[str, float] | None) -> str:
    """A sentence if dev is too small to prefer the best checkpoint to the last one; "" if it is not.

    It is too small if the 95 % interval of the metric is wider than the gain of the best checkpoint over the last one.
    """
    best, last = entry["best"], entry["last"]
    if entry["model"] != "best" or best is None or best["step"] == last["step"] or interval is None:
        return ""
    if best["metric_value"] is None or last["metric_value"] is None:
        return ""
    gain, width = best["metric_value"] - last["metric_value"], interval["high"] - interval["low"]
    if width <= gain:
        return ""
    above, wide = (format_difference(metric, value, sign="") for value in (gain, width))
    return (
        f"dev is too small to choose a checkpoint: its {metric} of the best one (step {best['step']:,}) is {above} "
        f"above that of the last one (step {last['step']:,}), but its 95 % interval is {wide} wide; evaluate and "
        "predict take the last one with --checkpoint last"
    )


def continued_run_note(model: str, task: str) -> str:
    """A sentence if a finished run of the same task is trained further, else ""."""
    folder = Path(model)
    if not model or not (folder / RESULTS).is_file() or read_results(folder)["task"] != task:
        return ""
    return f"training starts from the weights of the run {model}; the optimizer and its schedule start anew"


def remove_training_state(folder: Path) -> None:
    """Remove the training state of a finished run; if its folder is a link, the folder that it points to is emptied."""
    state = folder / STATE
    if state.is_symlink():
        for path in state.iterdir() if state.exists() else ():
            remove(path)
    elif state.exists():
        remove(state)


def find_checkpoint(run: str | Path, which: str) -> Path:
    """The folder of a checkpoint of a finished run, for `load`.

    Args:
        run: The run folder.
        which: "best", "last", or the number of a step.

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
    folder = seed_folder if seed_folder.is_dir() else folder  # the model of several seeds is that of one of them
    entry = results[CHECKPOINTS]
    steps = {name: entry[name]["step"] for name in ("best", LAST) if entry[name] is not None}
    named = which if which.isdecimal() else None
    if named is None and which not in steps:
        raise RunError(f"{run} was not evaluated on dev while it trained, so it has no best checkpoint: use last")
    step = int(named) if named is not None else steps[which]
    if step == steps[entry["model"]]:
        return folder
    if step == steps[LAST] and (folder / CHECKPOINTS / LAST).is_dir():
        return folder / CHECKPOINTS / LAST
    states = {number: path for path in sorted((folder / STATE).glob("step-*")) if (number := _step(path)) is not None}
    if step in states:
        return states[step]
    known = sorted({steps[entry["model"]], *([steps[LAST]] if (folder / CHECKPOINTS).is_dir() else ()), *states})
    raise RunError(
        f"{run} has no weights of {f'step {step}' if named else f'its {which} checkpoint, step {step}'}: it has "
        f"{'those of step' if len(known) == 1 else 'those of steps'} {', '.join(map(str, known))}; a run keeps more "
        "with fit.keep_checkpoints"
    )


def _step(path: Path) -> int | None:
    match = re.fullmatch(r"step-([0-9]{8,18})(?:-[0-9]+)?", path.name)
    return int(match[1]) if match else None

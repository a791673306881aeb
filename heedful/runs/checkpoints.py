"""Checkpoints of a finished run: which are kept, whether dev could choose between them, and where each lies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.atomic_io import remove
from heedful.errors import HeedfulError
from heedful.runs.results import RESULTS, read_results

CHECKPOINTS, STATE = "checkpoints", "state"  # folders of a run: weights beside those of its model, and training state
LAST = "last"  # in CHECKPOINTS


def checkpoint_entry(
    best_step: int, best: float | None, last_step: int, last: float | None, load_best: bool
) -> dict[str, dict[str, Any] | str | None]:
    """The entry of results.json: step and metric of the best and the last weights, and which the model has."""
    chosen = "best" if load_best and best is not None else "last"
    about = None if best is None else {"step": best_step, "metric_value": best}
    return {"model": chosen, "best": about, "last": {"step": last_step, "metric_value": last}}


def small_dev_note(entry: Mapping[str, Any], metric: str, interval: Mapping[str, float] | None) -> str:
    """A sentence where dev is too small to choose the best checkpoint over the last one; "" where it is not.

    Too small: the 95 % interval of the metric is wider than what the best checkpoint gained over the last one.
    """
    best, last = entry["best"], entry["last"]
    if entry["model"] != "best" or best["step"] == last["step"] or last["metric_value"] is None or interval is None:
        return ""
    gain, width = best["metric_value"] - last["metric_value"], interval["high"] - interval["low"]
    if width <= gain:
        return ""
    return (
        f"dev is too small to choose a checkpoint: its {metric} of the best one (step {best['step']:,}) is {gain:.4f} "
        f"above that of the last one (step {last['step']:,}), but its 95 % interval is {width:.4f} wide; evaluate and "
        "predict take the last one with --checkpoint last"
    )


def continued_run_note(model: str, task: str) -> str:
    """A sentence where a finished run of the same task is trained further; "" where something else begins."""
    folder = Path(model)
    if not model or not (folder / RESULTS).is_file() or read_results(folder)["task"] != task:
        return ""
    return f"training starts from the weights of the run {model}; the optimizer and its schedule start anew"


def remove_training_state(folder: Path) -> None:
    """Remove the training state of a finished run; where the folder of it is a link, what it leads to is emptied."""
    state = folder / STATE
    if state.is_symlink():
        for path in state.iterdir() if state.exists() else ():
            remove(path)
    elif state.exists():
        remove(state)


def find_checkpoint(run: str | Path, which: str) -> Path:
    """The folder of a checkpoint of a finished run, which `load` reads: "best", "last", or the number of a step."""
    if which not in ("best", LAST) and not which.isdecimal():
        raise HeedfulError(f'--checkpoint is "{which}": use best, last, or the number of a step')
    folder = Path(run)
    if not (folder / RESULTS).is_file():
        raise HeedfulError(f"{run} is no finished run, so it has no checkpoint {which}: leave --checkpoint out")
    found = read_results(folder)
    inner = folder / f"seed-{found.get('seed')}"
    folder = inner if inner.is_dir() else folder  # the model of several seeds is that of one of them
    entry = found[CHECKPOINTS]
    steps = {name: entry[name]["step"] for name in ("best", LAST) if entry[name] is not None}
    named = which if which.isdecimal() else None
    if named is None and which not in steps:
        raise HeedfulError(f"{run} was not evaluated on dev while it trained, so no checkpoint is the best: use last")
    step = int(named) if named is not None else steps[which]
    if step == steps[entry["model"]]:
        return folder
    if step == steps[LAST] and (folder / CHECKPOINTS / LAST).is_dir():
        return folder / CHECKPOINTS / LAST
    states = {number: path for path in sorted((folder / STATE).glob("step-*")) if (number := _step(path)) is not None}
    if step in states:
        return states[step]
    known = sorted({steps[entry["model"]], *([steps[LAST]] if (folder / CHECKPOINTS).is_dir() else ()), *states})
    raise HeedfulError(
        f"{run} has no weights of {f'step {step}' if named else f'its {which} checkpoint, step {step}'}: it has "
        f"{'those of step' if len(known) == 1 else 'those of steps'} {', '.join(map(str, known))}; a run keeps more "
        "with fit.keep_checkpoints"
    )


def _step(path: Path) -> int | None:
    match = re.fullmatch(r"step-([0-9]{8,18})(?:-[0-9]+)?", path.name)
    return int(match[1]) if match else None

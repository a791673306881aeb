"""quickstart: the main job on what ships with Heedful."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import Any

from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.finetune.run import finetune
from heedful.train.checkpoint import lock_run
from heedful.train.fit import Reporter

MARK = ".gitignore"
MARKED = "# made by heedful quickstart, which may replace this folder\n*\n"
ASKED = [
    "what time do you close on sundays?",
    "the zip on the tent I borrowed is broken, sorry!",
    "could I keep the projector for another week",
]
SHOWN = 3  # mistakes


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartResult:
    """What was made and found."""

    folder: Path
    results: dict[str, Any]
    mistakes: tuple[dict[str, Any], ...]  # the worst ones on test
    answers: tuple[dict[str, Any], ...]  # to texts that nobody labelled


def quickstart(folder: Path, reporter: Reporter | None = None) -> QuickstartResult | None:
    """Fine-tune on the shipped messages, measure, and answer a few more; None: stopped by a signal.

    The same run each time, in a folder that is replaced if an earlier quickstart made it.
    """
    _make(folder)
    with as_file(files("heedful") / "assets" / "intents") as data:
        done = finetune("classify", data, folder, reporter=reporter)
    if done.status == "interrupted":
        return None
    with (folder / "predictions-test.jsonl").open(encoding="utf-8") as file:
        worst = list(islice((line for line in map(json.loads, file) if not line["correct"]), SHOWN))
    return QuickstartResult(
        folder=folder,
        results=done.results,
        mistakes=tuple(worst),
        answers=tuple({"text": text} | answer for text, answer in zip(ASKED, Engine(folder)(ASKED), strict=True)),
    )


def _make(folder: Path) -> None:
    """An empty folder with the mark of a quickstart."""
    mark = folder / MARK
    try:
        if mark.is_file() and mark.read_bytes() == MARKED.encode():
            with lock_run(folder):  # no other one is at work there
                shutil.rmtree(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise HeedfulError(f"{folder} exists, and no quickstart made it: give another folder with --output")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(MARKED, encoding="utf-8")
    except OSError as error:
        raise HeedfulError(
            f"{folder} cannot be written: {error.strerror or error}: give another folder with --output"
        ) from None

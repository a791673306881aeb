"""The quickstart: fine-tuning, evaluation and prediction on the bundled sample data."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

from heedful.errors import RunError
from heedful.infer.engine import Engine
from heedful.runs.finetune.run import finetune
from heedful.runs.results import JsonObject
from heedful.train.fit import Reporter
from heedful.train.run_lock import lock_run

MARK = ".gitignore"
MARKED = "# made by heedful quickstart, which may replace this folder\n*\n"
UNSEEN_TEXTS = [
    "what time do you close on sundays?",
    "one leg of the tripod has snapped off, sorry!",
    "could I keep the projector for another week",
]
MISTAKES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartResult:
    """A run, its worst mistakes, and predictions for new texts."""

    folder: Path
    results: JsonObject
    mistakes: tuple[JsonObject, ...]  # the worst ones on test
    answers: tuple[JsonObject, ...]  # to texts that nobody labelled


def quickstart(folder: Path, reporter: Reporter | None = None) -> QuickstartResult | None:
    """Fine-tune on the bundled messages, evaluate, and predict labels of new ones; None if a signal interrupted it.

    The run is the same each time. Its folder is replaced if an earlier quickstart made it.
    """
    _make(folder)
    with as_file(files("heedful") / "assets" / "intents") as data:
        done = finetune("classify", data, folder, reporter=reporter)
    if done.status == "interrupted":
        return None
    with (folder / "predictions-test.jsonl").open(encoding="utf-8") as file:
        worst = list(islice((line for line in map(json.loads, file) if not line["correct"]), MISTAKES))
    predictions = zip(UNSEEN_TEXTS, Engine(folder)(UNSEEN_TEXTS), strict=True)
    return QuickstartResult(
        folder=folder,
        results=done.results,
        mistakes=tuple(worst),
        answers=tuple({"text": text} | answer for text, answer in predictions),
    )


def _make(folder: Path) -> None:
    """Make an empty folder with the mark of a quickstart."""
    mark = folder / MARK
    try:
        if mark.is_file() and mark.read_bytes() == MARKED.encode():
            with lock_run(folder):  # no other quickstart is running there
                shutil.rmtree(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists, and no quickstart made it: give another folder with --output")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(MARKED, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written: {error.strerror or error}: give another folder with --output"
        ) from None

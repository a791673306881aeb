"""`heedful quickstart`: fine-tuning, evaluation and prediction on the bundled sample data."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path

from heedful.errors import RunError
from heedful.infer.engine import Engine
from heedful.runs.finetune.run import finetune
from heedful.runs.results import JsonObject, read_predictions
from heedful.train.fit import Reporter
from heedful.train.run_lock import lock_run

MARK = ".gitignore"  # file that marks the folder of a quickstart
MARK_CONTENT = "# made by heedful quickstart, which may replace this folder\n*\n"
UNSEEN_TEXTS = [
    "what time do you close on sundays?",
    "one leg of the tripod has snapped off, sorry!",
    "could I keep the projector for another week",
]
MAX_MISTAKES = 3  # maximum mistakes in the result


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartResult:
    """The results of a run, its worst mistakes, and predictions for new texts."""

    folder: Path
    results: JsonObject  # contents of results.json
    mistakes: tuple[JsonObject, ...]  # lines of predictions-test.jsonl
    answers: tuple[JsonObject, ...]  # predictions for UNSEEN_TEXTS, each with the text


def quickstart(folder: Path, reporter: Reporter | None = None) -> QuickstartResult | None:
    """Fine-tune a classifier on the bundled messages, evaluate it, and predict labels of new messages.

    The run is deterministic. A folder of an earlier quickstart is replaced.

    Returns:
        The results, or None if a signal interrupted training.

    Raises:
        RunError: If the folder has files that are not from a quickstart, or if it cannot be written.
    """
    _make_folder(folder)
    with as_file(files("heedful") / "assets" / "intents") as data:
        result = finetune("classify", data, folder, reporter=reporter)
    if result.status == "interrupted":
        return None
    mistakes = (prediction for prediction in read_predictions(folder, "test") if not prediction["correct"])
    answers = Engine(folder)(UNSEEN_TEXTS)
    return QuickstartResult(
        folder=folder,
        results=result.results,
        mistakes=tuple(islice(mistakes, MAX_MISTAKES)),
        answers=tuple({"text": text} | answer for text, answer in zip(UNSEEN_TEXTS, answers, strict=True)),
    )


def _make_folder(folder: Path) -> None:
    """Create an empty folder with the mark of a quickstart. A folder with the mark is replaced."""
    mark = folder / MARK
    try:
        if mark.is_file() and mark.read_bytes() == MARK_CONTENT.encode():
            with lock_run(folder):  # fails if another quickstart is running there
                shutil.rmtree(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{folder} exists, and no quickstart made it: give another folder with --output")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(MARK_CONTENT, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written: {error.strerror or error}: give another folder with --output"
        ) from None

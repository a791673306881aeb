"""Replace a run by a new one in the same folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heedful.atomic_io import remove, sync_folder
from heedful.errors import HeedfulError
from heedful.runs.distil.search import BEST_FOLDER, SEARCH_FILE
from heedful.runs.results import RESULTS
from heedful.runs.run_folder import SETTINGS, check_run_folder, visible_names
from heedful.train.ranks import Ranks
from heedful.train.run_lock import LOCK, lock_run


@contextmanager
def overwriting(folder: Path, ranks: Ranks, log: Callable[[str], None]) -> Iterator[None]:
    """Move the run in a folder aside until a new run there has written its results; all ranks call this.

    A new run that was interrupted is resumed by the same command. If a new run fails before it begins, the old one is
    put back.

    Args:
        folder: A run folder, or one that is empty or missing.
        ranks: The processes that train together; the first one moves folders.
        log: Receives a sentence about where the old run is.

    Raises:
        HeedfulError: If the folder is not a run, or a process is training in it.
    """
    aside = folder.absolute().with_name(f".{folder.absolute().name}.replaced")
    if ranks.is_main:
        _move_aside(folder, aside)
    ranks.barrier()
    try:
        yield
    finally:
        if ranks.is_main and aside.exists():
            if _finished(folder):
                remove(aside)
            elif (folder / SETTINGS).exists() or (folder / SEARCH_FILE).exists():
                log(f"the run that {folder} had before is in {aside} until the new one has finished")
            else:
                if folder.exists():
                    remove(folder)
                os.rename(aside, folder)
                log(f"the run that {folder} had before was put back")


def _finished(folder: Path) -> bool:
    """Whether a run, or a search for a student, has written its results."""
    return (folder / RESULTS).exists() or (folder / BEST_FOLDER / RESULTS).exists()


def _move_aside(folder: Path, aside: Path) -> None:
    names = visible_names(folder)
    if names and not {LOCK, SEARCH_FILE} <= names:
        check_run_folder(folder)
    if aside.exists():
        if not _finished(folder):  # a new run that was interrupted
            return
        remove(aside)
    if names:
        try:
            with lock_run(folder):
                os.rename(folder, aside)
                sync_folder(aside.parent)
        except OSError as error:
            raise HeedfulError(f"{folder} cannot be moved to {aside}: {error.strerror}") from None

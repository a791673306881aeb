"""Replacement of a run by a new one in the same folder, for the option --overwrite of commands that train."""

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
    """Move the run in a folder aside within a `with` block, in which a new run is trained there. All ranks call this.

    The old run is removed when the new run has written its results. If the new run is interrupted, the old run stays
    aside, and the same command resumes the new run. If the new run fails before it has written its settings, the old
    run is put back.

    Args:
        folder: A run folder, an empty folder or a missing folder.
        ranks: The processes that train together. The first rank moves the folders.
        log: Receives a sentence that says where the old run is, if it is not removed.

    Raises:
        HeedfulError: If the folder is not a run, or a process is training in it.
    """
    old_run = folder.absolute().with_name(f".{folder.absolute().name}.replaced")
    if ranks.is_main:
        _move_aside(folder, old_run)
    ranks.barrier()
    try:
        yield
    finally:
        if ranks.is_main and old_run.exists():
            if _is_finished(folder):
                remove(old_run)
            elif (folder / SETTINGS).exists() or (folder / SEARCH_FILE).exists():
                log(f"the run that {folder} had before is in {old_run} until the new one has finished")
            else:  # the new run has not written its settings
                if folder.exists():
                    remove(folder)
                os.rename(old_run, folder)
                log(f"the run that {folder} had before was put back")


def _is_finished(folder: Path) -> bool:
    """Whether a run, or a search for a student, has written its results."""
    return (folder / RESULTS).exists() or (folder / BEST_FOLDER / RESULTS).exists()


def _move_aside(folder: Path, old_run: Path) -> None:
    """Move the run in `folder` to `old_run`, unless `folder` has a new run that was interrupted and may be resumed.

    Raises:
        HeedfulError: If the folder is not a run, cannot be moved, or a process is training in it.
    """
    names = visible_names(folder)
    is_search = {LOCK, SEARCH_FILE} <= names  # search for a student, whose folder lacks the settings of a run
    if names and not is_search:
        check_run_folder(folder)
    if old_run.exists():
        if not _is_finished(folder):
            return
        remove(old_run)
    if names:
        try:
            with lock_run(folder):
                os.rename(folder, old_run)
                sync_folder(old_run.parent)
        except OSError as error:
            raise HeedfulError(f"{folder} cannot be moved to {old_run}: {error.strerror}") from None

"""Models on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION. `load` calls `fetch` for these names."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from heedful.bundled import bundled_model
from heedful.errors import HeedfulWarning, ModelError

# files to download, those in subfolders included: no pickles and no code
FILES = ["*.json", "*.txt", "*.safetensors", "*.model", "*.spm", "README.md"]
MAIN = "main"  # branch to fetch for a name without a revision
NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_resolved: dict[str, Path] = {}  # name without a revision -> snapshot, so that a process uses one commit


def name_and_revision(source: str | Path) -> tuple[str, str | None]:
    """Split NAME@REVISION into its parts. The revision of a folder, or of a name without "@", is None.

    >>> name_and_revision("someone/model@v1"), name_and_revision("folder")
    (('someone/model', 'v1'), ('folder', None))
    """
    name, separator, revision = str(source).rpartition("@")
    return (str(source), None) if not separator or os.path.isdir(source) else (name, revision)


def unpinned(name: str) -> bool:
    """Return whether a source is a name on the hub without a revision, and no folder, path or bundled model."""
    if not NAME.fullmatch(name) or os.path.isdir(name) or bundled_model(name):
        return False
    return "/" not in name or not os.path.isdir(name.partition("/")[0])  # otherwise it is the path of a missing folder


def pinned(name: str) -> str:
    """Return NAME@COMMIT, with the commit of `main`, for a name without a revision; other sources are unchanged."""
    return f"{name}@{fetch(name, None).name}" if unpinned(name) else name


def fetch(name: str, revision: str | None) -> Path:
    """Return the local folder of a revision, from the cache or the network; HF_HUB_OFFLINE=1 is respected.

    If no revision is given, it is `main`. A warning reports the commit of `main`, which is used until the process ends.

    Raises:
        ModelError: If the name is not a name on the hub, or the revision cannot be fetched.
    """
    if revision is not None:
        return _snapshot(name, revision)
    if not unpinned(name):
        raise ModelError(f"{name!r} is neither a folder here nor a name on the hub: give OWNER/NAME, or a folder")
    if name not in _resolved:
        _resolved[name] = _snapshot(name, MAIN)
        commit = _resolved[name].name
        note = f"{name} has no revision: using {MAIN}, which is commit {commit}; {name}@{commit[:12]} would pin it"
        warnings.warn(note, HeedfulWarning, stacklevel=2)
    return _resolved[name]


def _snapshot(name: str, revision: str) -> Path:
    """Return the local folder of a revision, downloaded if it is not in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except HFValidationError:
        raise ModelError(f"{name!r} is neither a folder here nor a name on the hub") from None
    except Exception as error:  # network errors have no common base class, and some have no message
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{name!r} is no folder here, and revision {revision!r} of it is not in the local cache and could not be "
            f"fetched: {reason}"
        ) from None

"""Names on the Hugging Face hub, always with a revision."""

from __future__ import annotations

import os
from pathlib import Path

from heedful.errors import HeedfulError

# what a model folder may hold; no pickles, no code
FILES = ["*.json", "*.txt", "*.safetensors", "*.model", "README.md", "*_Pooling/config.json", "*_Normalize/config.json"]


def name_and_revision(source: str | Path) -> tuple[str, str | None]:
    """A folder here, or the parts of NAME@REVISION.

    >>> name_and_revision("someone/model@v1"), name_and_revision("folder")
    (('someone/model', 'v1'), ('folder', None))
    """
    name, at, revision = str(source).rpartition("@")
    return (str(source), None) if not at or os.path.isdir(source) else (name, revision)


def fetch(name: str, revision: str | None) -> Path:
    """The local folder of that revision, from the cache or the network; HF_HUB_OFFLINE=1 is honoured."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    if revision is None:
        raise HeedfulError(
            f"{name!r} is no folder here, and as a name on the hub it needs a revision: a commit, a tag or a branch, "
            f"for example {name}@main; what it resolved to is recorded in .source"
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except HFValidationError:
        raise HeedfulError(f"{name!r} is neither a folder here nor a name on the hub") from None
    except Exception as error:  # those of its network have no base in common, and some have no text
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HeedfulError(
            f"{name!r} at revision {revision!r} is not in the local cache and could not be fetched: {first}"
        ) from None

"""Models that ship with Heedful, by the names that `load` and `--model` accept: the default encoder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

BUNDLED_ENCODER = "heedful-mini-en"


def bundled_model(name: str) -> Path | None:
    """Return the folder of the bundled model with this name, or None if there is no such model."""
    folder = Path(str(files("heedful"))) / "assets" / name
    return folder if name == BUNDLED_ENCODER else None

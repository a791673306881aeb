"""Models that ship with Heedful: the default encoder, by the name that `load` and `--model` know."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

BUNDLED_ENCODER = "heedful-mini-en"


def bundled_model(name: str) -> Path | None:
    """The folder of a model that ships; None: none has that name."""
    folder = Path(str(files("heedful"))) / "assets" / name
    return folder if name == BUNDLED_ENCODER else None

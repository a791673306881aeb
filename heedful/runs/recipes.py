"""Recipes and sample data that ship with Heedful, to be copied and changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from heedful.errors import HeedfulError, did_you_mean

SAMPLES = {  # folders of sample data: description and task
    "intents": ("data: 600 messages to a lending library, of 8 kinds", "classify"),
    "tags": ("data: 150 sentences with names of people, places and things", "tag"),
    "questions": ("data: 120 questions on 40 texts, one in six without an answer", "qa"),
}
COMMANDS = {  # by the first part of a recipe's name
    "pretrain": "pretrain DATA",
    "distil": "distil TEACHER DATA",
    "translate": "finetune seq2seq DATA",
}


class Asset(NamedTuple):
    """A recipe, or a folder of sample data."""

    name: str
    about: str
    place: Traversable
    use: str  # the command for a copy; {} is its path


def list_assets() -> Iterator[Asset]:
    """Yield recipes by name, then sample data."""
    assets = files("heedful") / "assets"
    for path in sorted((assets / "recipes").iterdir(), key=lambda path: path.name):
        about = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        use = COMMANDS.get(path.name.partition("-")[0], "finetune TASK DATA")
        yield Asset(path.name.removesuffix(".toml"), about, path, f"heedful {use} --recipe {{}}")
    for name, (about, task) in SAMPLES.items():
        yield Asset(name, about, assets / name, f"heedful finetune {task} {{}}")


def copy_asset(name: str, to: Path | None = None) -> tuple[Path, Asset]:
    """Copy a recipe to a new file, or sample data to a new folder, in the working directory unless `to` is given.

    Raises:
        HeedfulError: If there is no such recipe, or the path exists or cannot be written.
    """
    known = {offer.name: offer for offer in list_assets()}
    if name not in known:
        raise HeedfulError(f'there is no recipe "{name}"{did_you_mean(name, list(known))}: {", ".join(known)}')
    place, folder = known[name].place, name in SAMPLES
    path = to or Path(name if folder else f"{name}.toml")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            with as_file(place) as source:
                shutil.copytree(source, path)
        else:
            with path.open("xb") as file:
                file.write(place.read_bytes())
    except FileExistsError:
        raise HeedfulError(f"{path} exists: give another place with --output") from None
    except OSError as error:
        raise HeedfulError(f"{path} cannot be written: {error.strerror or error}") from None
    return path, known[name]

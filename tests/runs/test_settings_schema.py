"""The schema of settings: path, type, default, meaning and choices, read from dataclasses and their comments."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, replace
from typing import Literal

from heedful.runs.distil.settings import DistilSettings, MaskedDistilSettings
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.settings_schema import describe_settings, setting_paths


@dataclass(frozen=True, kw_only=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float = 1.0  # metres


@dataclass(frozen=True, kw_only=True)
class Square:
    kind: Literal["square"] = "square"
    # length of a side,
    # in metres
    side: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Base:
    name: str  # name of the drawing


@dataclass(frozen=True, kw_only=True)
class Drawing(Base):
    shape: Circle | Square = Square(side=3.0)
    colour: Literal["red", "blue"] | None = None  # colour of the lines
    roles: dict[str, int] | None = None
    frame: Circle | None = None  # circle around the shape
    bare: int = 0


def test_every_setting_has_path_type_default_meaning_and_choices() -> None:
    settings = {setting.path: setting for setting in describe_settings(Drawing)}
    assert list(settings) == [
        "name", "shape.kind", "shape.radius", "shape.side", "colour", "roles", "frame", "frame.kind", "frame.radius",
        "bare",
    ]  # fmt: skip
    name = settings["name"]
    assert (name.annotation, name.default, name.doc) == (str, MISSING, "name of the drawing")
    kind = settings["shape.kind"]
    assert (kind.default, kind.choices) == ("square", ("circle", "square"))
    radius = settings["shape.radius"]
    assert (radius.when, radius.default) == (('shape.kind = "circle"',), 1.0)
    side = settings["shape.side"]
    assert (side.when, side.default) == (('shape.kind = "square"',), 3.0)
    assert (side.name, side.doc) == ("side", "length of a side, in metres"), "the comment lines above the field"
    colour = settings["colour"]
    assert (colour.default, colour.choices, colour.doc) == (None, ("red", "blue"), "colour of the lines")
    assert settings["frame"].table
    assert settings["bare"].doc == "", "the field has no comment"


def test_defaults_are_those_of_an_instance() -> None:
    drawing = Drawing(name="a", shape=Circle(radius=5.0))
    defaults = {setting.path: setting.default for setting in describe_settings(drawing)}
    assert (defaults["name"], defaults["shape.kind"]) == ("a", "circle")
    assert defaults["shape.radius"] == 5.0
    assert defaults["shape.side"] == 2.0, "the default of the class, since the instance has another kind"
    changed = {setting.path: setting.default for setting in describe_settings(replace(drawing, bare=3))}
    assert changed["bare"] == 3


def test_paths_say_what_may_lie_below_them() -> None:
    paths = setting_paths(Drawing)
    assert (paths["shape"], paths["frame"], paths["roles"], paths["bare"]) == ("table", "table", "dict", "value")


def test_the_settings_of_all_runs_can_be_described() -> None:
    for cls in (FinetuneSettings, PretrainSettings, DistilSettings, MaskedDistilSettings):
        settings = describe_settings(cls)
        assert {setting.path for setting in settings} <= setting_paths(cls).keys()
        docs = {setting.path: setting.doc for setting in settings}
        (batch_size_path,) = (path for path in docs if path.endswith("train.batch_size"))
        assert docs[batch_size_path].startswith("samples of an update")

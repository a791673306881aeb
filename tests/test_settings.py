"""Reading settings from mappings, files and assignments, and writing them; wrong ones are refused with these errors."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful import settings
from heedful.errors import HeedfulError
from heedful.model.config import ModelConfig
from heedful.runs.overrides import override


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    kind: Literal["learned"] = "learned"
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinusoidal:
    kind: Literal["sinusoidal"] = "sinusoidal"
    base: float = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    layers: int
    rate: float = 0.1

    def __post_init__(self) -> None:
        assert self.layers != 13, "our own mistake"
        if self.layers < 1:
            raise HeedfulError(f"layers is {self.layers}, expected at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    name: str
    stack: Stack | None = None
    positions: Learned | Sinusoidal | None = Sinusoidal()
    betas: tuple[float, float] = (0.9, 0.999)
    width: int | Literal["auto"] = "auto"
    stacks: tuple[Stack, ...] = ()
    labels: dict[str, float] = field(default_factory=dict)
    note: str | None = "a note"
    warm_up: float | Stack = 0.5
    speed: Literal["fast", "exact"] = "exact"
    quiet: bool = False


KNOWN = "name, stack, positions, betas, width, stacks, labels, note, warm_up, speed, quiet"


def error_lines(cls: Any, mapping: Any) -> list[str]:
    """Return the lines of the error for a mapping, without the name of the source, with which each begins."""
    with pytest.raises(HeedfulError) as caught:
        settings.from_mapping(cls, mapping, source="x.toml")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("x.toml: ") for line in lines)
    return [line.removeprefix("x.toml: ") for line in lines]


# -- reading --------------------------------------------------------------------------------------------------


def test_settings_that_are_not_given_have_their_defaults() -> None:
    assert settings.from_mapping(Model, {"name": "a"}, source="here") == Model(name="a")


def test_values_of_all_types_are_read() -> None:
    mapping = {
        "name": "a",
        "stack": {"layers": 2},
        "positions": {"kind": "learned", "count": 512},
        "betas": [1, 0.5],
        "width": 3,
        "stacks": [{"layers": 1}, {"layers": 2, "rate": 0}],
        "labels": {"a label": 1},
        "note": None,
        "warm_up": {"layers": 3},
        "speed": "fast",
        "quiet": True,
    }
    model = settings.from_mapping(Model, mapping, source="here")
    assert model == Model(
        name="a",
        stack=Stack(layers=2),
        positions=Learned(count=512),
        betas=(1.0, 0.5),
        width=3,
        stacks=(Stack(layers=1), Stack(layers=2, rate=0.0)),
        labels={"a label": 1.0},
        note=None,
        warm_up=Stack(layers=3),
        speed="fast",
        quiet=True,
    )
    assert isinstance(model.betas[0], float)
    assert isinstance(model.labels["a label"], float)


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    first: Stack | None = Stack(layers=3, rate=0.5)
    second: Learned | Sinusoidal = Learned(count=8)


def test_a_table_changes_the_default_value_of_its_setting() -> None:
    """`{"layers": 4}` keeps the rate of `Halves.first`'s default, not that of `Stack`; another kind starts anew."""
    halves = settings.from_mapping(Halves, {"first": {"layers": 4}, "second": {"count": 9}}, source="f")
    assert halves == Halves(first=Stack(layers=4, rate=0.5), second=Learned(count=9))
    assert settings.from_mapping(Halves, {"second": {"kind": "sinusoidal"}}, source="f").second == Sinusoidal()
    assert override(Halves(first=None), ["first.rate=0.1"]).first == Stack(layers=3, rate=0.1)
    with pytest.raises(HeedfulError, match=r'^f: second.kind is missing, expected one of "learned", "sinusoidal"$'):
        settings.from_mapping(Halves, {"second": {"base": 3.0}}, source="f")


@pytest.mark.parametrize("nothing", [None, "none"])
def test_the_word_none_is_read_as_none_where_none_is_allowed(nothing: str | None) -> None:
    model = settings.from_mapping(Model, {"name": "none", "positions": nothing, "note": nothing}, source="here")
    assert (model.name, model.positions, model.note) == ("none", None, None)


def test_the_models_own_config_is_read() -> None:
    mapping = {
        "embedding": {"vocabulary": 100, "width": 8, "positions": {"kind": "learned", "count": 16}},
        "encoder": {"width": 8, "layers": 2, "heads": 2, "head_width": 4, "inner_width": 16},
    }
    config = settings.from_mapping(ModelConfig, mapping, source="config.json")
    assert config.encoder is not None
    assert config.encoder.layers == 2
    assert settings.from_mapping(ModelConfig, settings.to_mapping(config), source="again") == config


# -- refusing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "line"),
    [
        ([1], f"the top level is [1], expected a table of {KNOWN}"),
        ({}, "name is missing, expected text"),
        ({"name": 3}, "name is 3, expected text"),
        ({"name": True}, "name is true, expected text"),
        ({"name": None}, "name is null, expected text"),
        ({"name": ["a"]}, 'name is ["a"], expected text'),
        ({"name": "a", "stak": 1}, 'stak is not a setting (did you mean "stack"?)'),
        ({"name": "a", "zzz": 1}, f"zzz is not a setting; known here: {KNOWN}"),
        ({"name": "a", "stack": {"layer": 1, "layers": 1}}, 'stack.layer is not a setting (did you mean "layers"?)'),
        ({"name": "a", "stack": {}}, "stack.layers is missing, expected a whole number"),
        ({"name": "a", "stack": {"layers": "3"}}, 'stack.layers is "3", expected a whole number'),
        ({"name": "a", "stack": {"layers": 3.0}}, "stack.layers is 3.0, expected a whole number"),
        ({"name": "a", "stack": {"layers": True}}, "stack.layers is true, expected a whole number"),
        ({"name": "a", "stack": {"layers": 0}}, "stack.layers is 0, expected at least 1"),
        ({"name": "a", "stack": {"layers": 1, "rate": "0.1"}}, 'stack.rate is "0.1", expected a number'),
        ({"name": "a", "stack": {"layers": 1, "rate": True}}, "stack.rate is true, expected a number"),
        ({"name": "a", "stack": 3}, 'stack is 3, expected a table of layers, rate or "none"'),
        (
            {"name": "a", "positions": {"count": 1}},
            'positions.kind is missing, expected one of "learned", "sinusoidal"',
        ),
        (
            {"name": "a", "positions": {"kind": "lerned"}},
            'positions.kind is "lerned", expected one of "learned", "sinusoidal" (did you mean "learned"?)',
        ),
        (
            {"name": "a", "positions": {"kind": ["learned"]}},
            'positions.kind is ["learned"], expected one of "learned", "sinusoidal" (did you mean "learned"?)',
        ),
        (
            {"name": "a", "positions": "learned"},
            'positions is "learned", expected a table of kind "learned", a table of kind "sinusoidal" or "none"',
        ),
        ({"name": "a", "positions": {"kind": "learned"}}, "positions.count is missing, expected a whole number"),
        (
            {"name": "a", "positions": {"kind": "sinusoidal", "count": 1}},
            "positions.count is not a setting; known here: kind, base",
        ),
        ({"name": "a", "betas": [1]}, "betas is [1], expected a list of 2"),
        ({"name": "a", "betas": [1, 2, 3]}, "betas is [1, 2, 3], expected a list of 2"),
        ({"name": "a", "betas": 1}, "betas is 1, expected a list of 2"),
        ({"name": "a", "betas": [1, "2"]}, 'betas.1 is "2", expected a number'),
        ({"name": "a", "width": "wide"}, 'width is "wide", expected a whole number or "auto"'),
        ({"name": "a", "width": 1.5}, 'width is 1.5, expected a whole number or "auto"'),
        ({"name": "a", "stacks": {"layers": 1}}, 'stacks is {"layers": 1}, expected a list'),
        ({"name": "a", "stacks": [{"layers": 1}, {}]}, "stacks.1.layers is missing, expected a whole number"),
        ({"name": "a", "labels": []}, "labels is [], expected a table"),
        ({"name": "a", "labels": {"b": "c"}}, 'labels.b is "c", expected a number'),
        ({"name": "a", "note": 1}, 'note is 1, expected text or "none"'),
        ({"name": "a", "warm_up": "x"}, 'warm_up is "x", expected a number or a table of layers, rate'),
        ({"name": "a", "warm_up": {"layers": "x"}}, 'warm_up.layers is "x", expected a whole number'),
        ({"name": "a", "speed": "fastest"}, 'speed is "fastest", expected one of "fast", "exact"'),
        ({"name": "a", "quiet": 1}, "quiet is 1, expected true or false"),
        ({"name": float("nan")}, "name is nan, expected a finite number"),
        ({"name": "a", "betas": [0, float("inf")]}, "betas.1 is inf, expected a finite number"),
        ({"name": "a", "labels": {1: 2}}, "labels has the key 1, expected text"),
        (
            {"name": b"a"},
            "name is b'a', expected text, a number, true, false, a list or a table (put a date in quotes)",
        ),
        (
            {"name": "\ud800"},
            r'name is "\ud800", expected text, a number, true, false, a list or a table (put a date in quotes)',
        ),
        ({"name": {}, "\x1b[31m": 1}, rf"\x1b[31m is not a setting; known here: {KNOWN}"),
        ({"name": "a", "speed": "x" * 1000}, f'speed is "{"x" * 78}…, expected one of "fast", "exact"'),
    ],
)
def test_invalid_values_and_unknown_settings_are_refused(mapping: Any, line: str) -> None:
    assert error_lines(Model, mapping)[-1] == line


def test_one_error_names_all_problems() -> None:
    assert error_lines(Model, {"name": 1, "quiet": "yes", "nam": 2}) == [
        "name is 1, expected text",
        'quiet is "yes", expected true or false',
        'nam is not a setting (did you mean "name"?)',
    ]


def test_an_error_names_at_most_ten_problems() -> None:
    lines = error_lines(Model, {"name": "a"} | {f"zz{number}": 0 for number in range(100_000)})
    assert len(lines) == 11
    assert lines[-1] == "and more"


def test_programming_errors_are_not_setting_errors() -> None:
    with pytest.raises(AssertionError, match="our own mistake"):
        settings.from_mapping(Model, {"name": "a", "stack": {"layers": 13}}, source="x")


def test_values_that_are_nested_too_deep_are_refused() -> None:
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    assert error_lines(Model, {"name": nested}) == ["is nested more than 100 deep"]


# -- files ----------------------------------------------------------------------------------------------------


def test_toml_and_json_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('# a comment with "\nname = "a"\n[stack]\nlayers = 2\n')
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"name": "a", "stack": {"layers": 2}}')
    expected = Model(name="a", stack=Stack(layers=2))
    assert settings.from_file(Model, tmp_path / "a.toml") == expected
    assert settings.from_file(Model, str(tmp_path / "a.json")) == expected
    assert settings.load_mapping(tmp_path / "a.json") == {"name": "a", "stack": {"layers": 2}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"", "a settings file ends in .toml or .json"),
        ("folder.toml", None, "is not a file"),
        ("absent.toml", None, "there is no such file"),
        ("a.toml", b"#" * 1_000_001, "is larger than 1 MB, the most that a settings file may have"),
        ("a.toml", b"name = '\xff'", "is not UTF-8 text (byte 8)"),
        ("a.toml", b"name = 1", "name is 1, expected text"),
        ("a.toml", b"name = a", "is not TOML: Invalid value (at line 1, column 8)"),
        ("a.toml", b"name = 'a'\nname = 'b'\n", "is not TOML: Cannot overwrite a value (at line 2, column 11)"),
        (
            "a.toml",
            b"name = 2020-01-01",
            'name is "2020-01-01", expected text, a number, true, false, a list or a table (put a date in quotes)',
        ),
        ("a.toml", b"name = nan", "name is nan, expected a finite number"),
        ("a.toml", b"name = " + b"[" * 10_000 + b"]" * 10_000, "is nested more than 100 deep"),
        ("a.toml", b"name = " + b"{a=" * 10_000 + b"1" + b"}" * 10_000, "is nested more than 100 deep"),
        ("a.toml", b"a" + b".a" * 400_000 + b" = 1", "is nested more than 100 deep"),
        ("a.toml", b'x = {y = "\\"", a' + b' . "a,"' * 100_000 + b" = 1}", "is nested more than 100 deep"),
        ("a.toml", b'x = {y = """ " """, a' + b".a" * 300_000 + b'."b" = 1}', "is nested more than 100 deep"),
        ("a.json", b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("a.json", b"[1]", "the top level is [1], expected a table"),
        ("a.json", b'{"name": "a", "name": "b"}', 'the key "name" is given twice in one table'),
        ("a.json", b'{"name": NaN}', "name is nan, expected a finite number"),
        ("a.json", b'{"labels": {"a": 1e999}}', "labels.a is inf, expected a finite number"),
        ("a.json", b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "is nested more than 100 deep"),
        ("a.json", b'{"name": "a", "width": "3"}', 'width is "3", expected a whole number or "auto"'),
    ],
)
def test_files_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    (tmp_path / "folder.toml").mkdir()
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HeedfulError) as caught:
        settings.from_file(Model, path)
    assert str(caught.value) == f"{path}: {message}"


def test_numbers_with_thousands_of_digits(tmp_path: Path) -> None:
    for name, text in {"a.json": '{"width": %s}', "a.toml": "width = %s"}.items():
        (tmp_path / name).write_text(text % ("9" * 5000))
        with pytest.raises(HeedfulError, match=f"{name}: is not (JSON|TOML): Exceeds the limit"):
            settings.from_file(Model, tmp_path / name)


# -- assignments ----------------------------------------------------------------------------------------------

START = Model(name="a", positions=Learned(count=7))


@pytest.mark.parametrize(
    ("assignments", "changes"),
    [
        ([], {}),
        (["name=b"], {"name": "b"}),
        (["name = b c"], {"name": "b c"}),
        (['name="b"'], {"name": "b"}),
        (["name=2020-01-01"], {"name": "2020-01-01"}),
        (["name=a=b"], {"name": "a=b"}),
        (["name=b\nquiet=true"], {"name": "b\nquiet=true"}),
        (["quiet=true", "width=3", "betas=[0, 1]"], {"quiet": True, "width": 3, "betas": (0.0, 1.0)}),
        (["stack.layers=3"], {"stack": Stack(layers=3)}),
        (["stack={layers=3, rate=1}"], {"stack": Stack(layers=3, rate=1.0)}),
        (["positions.count=8"], {"positions": Learned(count=8)}),
        (["positions.kind=learned"], {}),
        (["positions.base=3", "positions.kind=sinusoidal"], {"positions": Sinusoidal(base=3.0)}),
        (["positions=none", "note=none"], {"positions": None, "note": None}),
        (["labels.x=1"], {"labels": {"x": 1.0}}),
    ],
)
def test_assignments(assignments: list[str], changes: dict[str, Any]) -> None:
    expected = replace(START, **changes)
    assert override(START, assignments) == expected
    assert override(START, assignments[::-1]) == expected


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("name", '"name" is not of the form name=value or table.name=value'),
        ("=3", '"=3" is not of the form name=value or table.name=value'),
        ("stack..layers=3", '"stack..layers=3" is not of the form name=value or table.name=value'),
        ("name.x=3", 'name is {"x": 3}, expected text'),
        ("nam=x", 'nam is not a setting (did you mean "name"?)'),
        ("stak.layers=3", 'stak.layers is not a setting (did you mean "stack.layers"?)'),
        ("name=1e5", "name is 100000.0, expected text"),
        ("width=wide", 'width is "wide", expected a whole number or "auto"'),
        ("betas=[1,", 'betas is "[1,", expected a list of 2'),
        ("quiet=yes", 'quiet is "yes", expected true or false'),
        ("stack.rate=inf", 'stack.rate is "inf", expected a number'),
        (
            "positions.base=3",
            'positions.base is for positions.kind = "sinusoidal": choose that kind, or leave positions.base out',
        ),
    ],
)
def test_assignments_refused(assignment: str, message: str) -> None:
    with pytest.raises(HeedfulError) as caught:
        override(START, [assignment])
    assert str(caught.value).split("\n")[-1].removeprefix(f"{assignment}: ") == message


def test_a_setting_cannot_be_assigned_twice() -> None:
    with pytest.raises(HeedfulError, match=r"both set stack\.layers: give one"):
        override(START, ["stack.layers=1", "stack.layers=2"])


def test_an_assignment_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(HeedfulError, match="is not of the form"):
        override(START, ["a." * 100_000 + "a=1"])


# -- writing --------------------------------------------------------------------------------------------------

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec="utf-8"))
stacks = st.builds(Stack, layers=st.integers(14), rate=numbers)
models = st.builds(
    Model,
    name=texts,
    stack=st.none() | stacks,
    positions=st.none() | st.builds(Learned, count=st.integers()) | st.builds(Sinusoidal, base=numbers),
    betas=st.tuples(numbers, numbers),
    width=st.integers() | st.just("auto"),
    stacks=st.lists(stacks, max_size=3).map(tuple),
    labels=st.dictionaries(texts, numbers, max_size=3),
    note=st.none() | texts.filter(lambda text: text != "none"),
    warm_up=numbers | stacks,
    speed=st.sampled_from(["fast", "exact"]),
    quiet=st.booleans(),
)


@given(models)
def test_written_settings_are_read_as_the_same_values(model: Model) -> None:
    mapping = settings.to_mapping(model)
    assert settings.from_mapping(Model, mapping, source="here") == model
    assert override(model, []) == model
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {"a.json": json.dumps(mapping), "a.toml": settings.to_toml(model)}.items():
            (Path(folder) / name).write_text(text, encoding="utf-8", newline="")
            assert settings.from_file(Model, Path(folder) / name) == model


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(KNOWN.split(", ")), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(KNOWN.split(", ")), plain), plain)
def test_arbitrary_values_are_refused_with_an_error(mapping: dict[str, Any], anything: Any) -> None:
    for data in (mapping, anything, {"name": "a", "positions": anything, "stacks": [anything], "warm_up": anything}):
        try:
            model = settings.from_mapping(Model, data, source="here")
        except HeedfulError:
            pass
        else:
            assert settings.from_mapping(Model, settings.to_mapping(model), source="again") == model


def test_toml_looks_as_a_person_would_write_it() -> None:
    assert settings.to_toml(Model(name='a "b"\n', stack=None, stacks=(Stack(layers=2),), labels={"c d": 1e-5})) == (
        'name = "a \\"b\\"\\n"\n'
        'stack = "none"\n'
        "betas = [0.9, 0.999]\n"
        'width = "auto"\n'
        "stacks = [{layers = 2, rate = 0.1}]\n"
        'note = "a note"\n'
        "warm_up = 0.5\n"
        'speed = "exact"\n'
        "quiet = false\n"
        "\n"
        "[positions]\n"
        'kind = "sinusoidal"\n'
        "base = 10000.0\n"
        "\n"
        "[labels]\n"
        '"c d" = 1e-05\n'
    )


def test_values_that_toml_cannot_hold_are_refused() -> None:
    with pytest.raises(HeedfulError, match=r'^to_toml: the text "none" would be read as None'):
        settings.to_toml(Model(name="a", note="none"))
    with pytest.raises(HeedfulError, match=r"^to_toml: betas\.0 is inf, expected a finite number$"):
        settings.to_toml(Model(name="a", betas=(float("inf"), 0.0)))

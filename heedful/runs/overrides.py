"""Settings given by hand, laid over defaults: a recipe, then flags, assignments and Python values.

A setting may be given by its full path, "train.optimizer.lr", or without the tables in front of it, "lr", wherever
what is left is unique. Values of assignments are TOML; what is not TOML is text. Imports nothing heavy, so that a
wrong setting is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from heedful.errors import HeedfulError, SettingError
from heedful.runs.aliases import ALIASES, ForeignName
from heedful.runs.settings_schema import Kind, describe_settings, setting_paths
from heedful.settings import exclusive_paths, from_mapping, is_set, load_mapping, merge, to_mapping
from heedful.toml_json import MAX_DEPTH, Json, as_json, cut, parse, to_plain_data

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
SUGGESTED = 5  # paths that an error lists


class Entry(NamedTuple):
    """One value and where it was given."""

    path: tuple[str, ...]
    value: Json
    source: str  # for errors about the value: an assignment, a flag, the file of a recipe
    text: str  # as it was given


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[Settings]):
    """Settings, and what of them was given by hand."""

    settings: Settings
    sources: Mapping[str, str]  # source by full path, in the order recipe, presets, flags, assignments, values
    renamed: Mapping[str, str]  # full path by the foreign name that was used for it

    def has(self, path: str) -> bool:
        """Whether a setting, or one below it, was given."""
        return any(f"{name}.".startswith(f"{path}.") for name in self.sources)


class Overrides:
    """All that was given by hand; read once, laid over defaults with `resolve`.

    Args:
        recipe: Path of a .toml or .json file, or its table. Everything else lies over it.
        presets: Tables of settings by what names them, as {"--loss logits": {"loss": {...}}}. Other flags, assignments
            and values lie over them.
        flags: Values by full path, by the flag that gives them, as {"--lr 0.1": {"train.optimizer.lr": 0.1}}.
        assignments: Texts such as "lr=0.1".
        values: Python values by path or short name, or nested mappings.

    A setting may be given once among flags, assignments and values. Of settings that exclude each other, as epochs and
    max_steps, one may be given there, and one in the recipe, which it replaces.

    Raises:
        SettingError: If the form of an assignment is wrong.
        HeedfulError: If the recipe cannot be read.
    """

    def __init__(
        self,
        *,
        recipe: str | Path | Mapping[str, object] | None = None,
        presets: Mapping[str, Mapping[str, object]] | None = None,
        flags: Mapping[str, Mapping[str, object]] | None = None,
        assignments: Sequence[str] = (),
        values: Mapping[str, object] | None = None,
    ) -> None:
        source = "" if recipe is None else "recipe" if isinstance(recipe, Mapping) else str(recipe)
        table = recipe if isinstance(recipe, Mapping) else load_mapping(recipe) if recipe else {}
        self._recipe = _entries(_plain(table, source), source)
        self._presets, self._given = list[Entry](), list[Entry]()
        for layer, named in ((self._presets, presets), (self._given, flags)):
            for name, named_table in (named or {}).items():
                layer += _entries(_plain(named_table, name), name)
        for assignment in assignments:
            self._given += _assignment(assignment)
        for name, value in _plain(values or {}, "values").items():
            self._given += _entries({name: value}, f"{name}={as_json(value)}")
        self._last: list[Entry] = []
        self._located: dict[type, tuple[list[list[Entry]], dict[str, str]]] = {}
        self._resolved: list[tuple[object, Resolved[Any]]] = []

    @classmethod
    def of(cls, values: Overrides | Mapping[str, object] | None, **others: Any) -> Overrides:
        """Overrides that were collected before, or new ones from Python values and other arguments of Overrides."""
        if isinstance(values, cls):
            assert not any(others.values()), "collected overrides include everything"
            return values
        return cls(values=values, **others)  # type: ignore[arg-type]

    def with_values(self, values: Mapping[str, object]) -> Overrides:
        """Return overrides with Python values laid over everything else, which may set them too."""
        changed = copy(self)
        changed._last = [*self._last, *_entries(_plain(values, "values"), "values")]
        changed._located, changed._resolved = {}, []
        return changed

    @property
    def renamed(self) -> dict[str, str]:
        """Full paths by the foreign names that were used for them, as far as settings were resolved."""
        return {name: path for _, renamed in self._located.values() for name, path in renamed.items()}

    def mentions(self, name: str) -> bool:
        """Whether the name of a top-level setting was used, known or not."""
        return any(entry.path[0] == name for layer in (self._recipe, self._presets, self._given) for entry in layer)

    def resolve(self, defaults: Settings, fixed: Mapping[str, str] | None = None) -> Resolved[Settings]:
        """Lay everything over defaults; the same defaults are resolved once.

        Args:
            defaults: Settings for everything that is not given.
            fixed: What decides the settings that may not be changed, by path.

        Raises:
            SettingError: If a name is unknown or ambiguous, a setting is given twice, or a value is refused.
        """
        resolved = next((known for before, known in self._resolved if _equal(before, defaults)), None)
        if resolved is None:
            resolved = self._lay_over(defaults)
            self._resolved.append((defaults, resolved))
        for path, decided_by in (fixed or {}).items():
            if (value := setting_at(resolved.settings, path)) != setting_at(defaults, path):
                raise SettingError(f"{path} is {as_json(value)}, but {decided_by}: leave it out", path=path)
        return resolved

    def _lay_over(self, defaults: Settings) -> Resolved[Settings]:
        layers, renamed = self._locate(type(defaults))
        mapping = to_mapping(defaults)
        for layer in layers:
            merge(mapping, _nested(layer), type(defaults))
        entries = [entry for layer in layers for entry in layer]
        try:
            settings = from_mapping(type(defaults), mapping, source=lambda path: _source(entries, path))
        except SettingError as error:
            raise _of_other_kind(type(defaults), error) or error from None
        cls: type = type(defaults)
        replaced = {path for group in exclusive_paths(cls) for path in group if not _has(mapping, path)}
        sources = {".".join(entry.path): entry.text for entry in entries if entry.path not in replaced}
        return Resolved(settings=settings, sources=sources, renamed=renamed)

    def _locate(self, cls: type) -> tuple[list[list[Entry]], dict[str, str]]:
        """Layers with full paths, checked against a settings class; full paths by foreign names."""
        if cls not in self._located:
            renamed: dict[str, str] = {}
            parts = (self._recipe, self._presets, self._given, self._last)
            layers = [[_located(cls, entry, renamed) for entry in layer] for layer in parts]
            for layer in layers:
                _refuse_duplicates(layer)
                _refuse_exclusive(cls, layer)
            self._located[cls] = layers, renamed
        return self._located[cls]


def _equal(settings: object, others: object) -> bool:
    return type(settings) is type(others) and settings == others


def find_setting(cls: type, name: str) -> str:
    """Return the full path of the setting of a class that a name means.

    Raises:
        SettingError: If it means none, or several.
    """
    entry = Entry(path=tuple(name.split(".")), value=None, source="", text="")
    return ".".join(_located(cls, entry, {}).path)


def override(defaults: Settings, assignments: Sequence[str] = ()) -> Settings:
    """Return settings with assignments such as "limits.max_concurrent_requests=7" laid over them."""
    return Overrides(assignments=assignments).resolve(defaults).settings


# -- settings by path -----------------------------------------------------------------------------------


def flatten_settings(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Settings by their whole names.

    >>> list(flatten_settings({"seeds": 1, "train": {"optimizer": {"lr": 0.1}}}))
    [('seeds', 1), ('train.optimizer.lr', 0.1)]
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed_settings(settings: DataclassInstance, usual: DataclassInstance) -> list[str]:
    """List settings that differ from others, as arguments of a command.

    >>> from heedful.train.settings import AdamW
    >>> changed_settings(AdamW(lr=0.1), AdamW(lr=0.2))
    ['lr=0.1']
    """
    now, before = (dict(flatten_settings(to_mapping(side))) for side in (settings, usual))
    return [f"{name}={value}" for name, value in now.items() if name not in before or value != before[name]]


def setting_at(settings: object, path: str) -> object:
    """Return the value at a path, None if there is no such setting."""
    for name in path.split("."):
        settings = getattr(settings, name, None)
    return settings


def replace_setting(settings: Settings, path: str, value: object) -> Settings:
    """Return frozen settings with another value at a path."""
    assert is_dataclass(settings) and not isinstance(settings, type)
    name, _, rest = path.partition(".")
    return replace(settings, **{name: replace_setting(getattr(settings, name), rest, value) if rest else value})


# -- reading --------------------------------------------------------------------------------------------------------


def _plain(table: Mapping[str, object], source: str) -> dict[str, Json]:
    plain = to_plain_data(_as_data(table), (), source)
    assert isinstance(plain, dict)
    return plain


def _as_data(value: object) -> object:
    """Dataclasses as tables, paths as text."""
    if isinstance(value, Mapping):
        return {key: _as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_data(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return to_mapping(value) if is_dataclass(value) and not isinstance(value, type) else value


def _entries(table: Mapping[str, Json], source: str) -> list[Entry]:
    """The values of a table; dots in its own keys, not in those of tables inside it, separate the parts of a path."""
    return [
        Entry(path=(*key.split("."), *rest), value=value, source=source, text=source)
        for key, branch in table.items()
        for rest, value in _leaves(branch)
    ]


def _leaves(value: Json) -> Iterator[tuple[tuple[str, ...], Json]]:
    if isinstance(value, dict) and value:
        for key, branch in value.items():
            yield from (((key, *rest), leaf) for rest, leaf in _leaves(branch))
    else:
        yield (), value


def _assignment(assignment: str) -> list[Entry]:
    name, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise SettingError(
            f"{as_json(assignment)} is not of the form name=value or table.name=value", source=cut(assignment)
        )
    whole = cut(assignment)
    leaves = _leaves(toml_value(text.strip()))
    return [Entry(path=(*path, *rest), value=value, source=whole, text=whole) for rest, value in leaves]


def toml_value(text: str) -> Json:
    try:
        value = parse(f"value = {text}", "TOML", text)
        return to_plain_data(value["value"], (), text) if len(value) == 1 else text
    except HeedfulError:
        return text


# -- names ----------------------------------------------------------------------------------------------------------


def _located(cls: type, entry: Entry, renamed: dict[str, str]) -> Entry:
    """The entry with the full path of its setting."""
    known, name = setting_paths(cls), cut(".".join(entry.path))
    if _leads_to_setting(known, entry.path):
        return entry
    full = sorted({full for path, kind in known.items() if (full := _completed(path.split("."), kind, entry.path))})
    if len(full) == 1:
        return entry._replace(path=full[0])
    foreign = ALIASES.get(entry.path[-1].replace("-", "_"))
    prefix = f"{entry.source}: " if entry.source else ""
    if foreign is not None and not full:
        path = foreign.path(known)
        if path and foreign.accepted and len(entry.path) == 1:
            renamed[name] = path
            return entry._replace(path=tuple(path.split(".")))
        raise _foreign_error(prefix, name, foreign, path, entry.source)
    if full:
        candidates = tuple(".".join(path) for path in full)
        message = f"{prefix}{name} is the name of several settings: give one of {', '.join(candidates)}"
        raise SettingError(message, path=name, source=entry.source, code="ambiguous", candidates=candidates)
    candidates = _similar(known, entry.path)
    message = f"{prefix}{name} is not a setting"
    if candidates:
        message += f" (did you mean {' or '.join(map(as_json, candidates))}?)"
    else:
        parent = ".".join(entry.path[:-1])
        siblings = _children(known, parent if parent in known else "")
        message += f"; known here: {', '.join(path.rpartition('.')[2] for path in siblings)}"
    raise SettingError(message, path=name, source=entry.source, code="unknown", candidates=candidates)


def _foreign_error(prefix: str, name: str, foreign: ForeignName, path: str, source: str) -> SettingError:
    """The error for a foreign name that is not accepted; `path` is the setting that is meant, or ""."""
    advice = f": {foreign.advice}" if foreign.advice else ""
    if path or not foreign.is_setting:
        message = f"{prefix}{name} is not a setting (did you mean {as_json(path or foreign.meant[0])}?){advice}"
    else:
        message = f"{prefix}{name} is not a setting of this command; other commands have {' or '.join(foreign.meant)}"
    candidates = (path,) if path else ()
    return SettingError(message, path=name, source=source, code="unknown", candidates=candidates)


def _leads_to_setting(known: Mapping[str, Kind], path: tuple[str, ...]) -> bool:
    """Whether a path is one of a setting, or lies inside its value, which is checked later."""
    longest = next((depth for depth in range(len(path), 0, -1) if ".".join(path[:depth]) in known), 0)
    return longest == len(path) or (longest > 0 and known[".".join(path[:longest])] != "table")


def _completed(path: list[str], kind: Kind, name: tuple[str, ...]) -> tuple[str, ...] | None:
    """The full path if a short name means this setting, or a key of it where it is a dict."""
    for depth in range(1, len(name) + 1) if kind == "dict" else (len(name),):
        if tuple(path[-depth:]) == name[:depth] and name != ("kind",):
            return (*path, *name[depth:])
    return None


def _similar(known: Mapping[str, Kind], name: tuple[str, ...]) -> tuple[str, ...]:
    """Full paths that may have been meant by an unknown name."""
    *before, last = name
    full = ".".join(name)
    same = [path for path in known if path.rpartition(".")[2] == last]
    same = get_close_matches(full[:200], same, n=1) or same
    here = _children(known, ".".join(before)) if ".".join(before) in known or not before else []
    for some in (same, _close(last, here), _close(last, known), get_close_matches(full[:200], known, n=1)):
        if some:
            return tuple(some[:SUGGESTED])
    return tuple(path for alias in get_close_matches(last[:200], ALIASES, n=1) if (path := ALIASES[alias].path(known)))


def _close(last: str, among: Iterable[str]) -> list[str]:
    """Paths whose last component is the closest one to a name."""
    by_last: dict[str, list[str]] = {}
    for path in among:
        by_last.setdefault(path.rpartition(".")[2], []).append(path)
    return [path for close in get_close_matches(last[:200], by_last, n=1) for path in by_last[close]]


def _children(known: Mapping[str, Kind], parent: str) -> list[str]:
    """The settings and tables directly below a path, "" for the root."""
    return [path for path in known if path.rpartition(".")[0] == parent]


def _refuse_duplicates(entries: Sequence[Entry]) -> None:
    """Refuse two values for one setting, or for a table and a setting in it."""
    seen: dict[tuple[str, ...], Entry] = {}
    for entry in sorted((entry for entry in entries if entry.value != {}), key=lambda entry: len(entry.path)):
        for depth in range(1, len(entry.path) + 1):
            if (earlier := seen.get(entry.path[:depth])) is not None:
                path = ".".join(earlier.path)
                message = f"{earlier.text} and {entry.text} both set {path}: give one of them"
                raise SettingError(message, path=path, source=entry.source, code="duplicate")
        seen[entry.path] = entry


def _refuse_exclusive(cls: type, entries: Sequence[Entry]) -> None:
    """Raise a SettingError if one source sets two mutually exclusive settings."""
    for group in exclusive_paths(cls):
        conflicting = [entry for entry in entries if entry.path in group and is_set(entry.value)]
        if len(conflicting) > 1:
            last = conflicting[-1]
            names, path = [".".join(setting_path) for setting_path in group], ".".join(last.path)
            both = " and ".join(dict.fromkeys(entry.text for entry in conflicting))
            if len({entry.text for entry in conflicting}) == 1:
                paths = " and ".join(".".join(entry.path) for entry in conflicting)
                both = f"{last.source}: {paths}" if last.source else paths
            message = f"{both} are given: give one of {', '.join(names)}"
            raise SettingError(message, path=path, source=last.source, code="duplicate")


def _of_other_kind(cls: type, error: SettingError) -> SettingError | None:
    """An error that names the kinds that have a setting, where another kind of its table was chosen."""
    parent = error.path.rpartition(".")[0]
    below = [setting for setting in describe_settings(cls) if f"{setting.path}.".startswith(f"{error.path}.")]
    kinds = [kind for setting in below for kind in setting.when if kind.startswith(f"{parent}.kind = ")]
    if error.code != "unknown" or not kinds:
        return None
    prefix, wanted = f"{error.source}: " if error.source else "", " or ".join(dict.fromkeys(kinds))
    message = f"{prefix}{error.path} is for {wanted}: choose that kind, or leave {error.path} out"
    return SettingError(message, path=error.path, source=error.source, code="unknown")


# -- laying over ----------------------------------------------------------------------------------------------------


def _nested(entries: Sequence[Entry]) -> dict[str, Json]:
    """The table that entries make."""
    root: dict[str, Json] = {}
    for entry in sorted(entries, key=lambda entry: len(entry.path)):
        table = root
        for part in entry.path[:-1]:
            inner = table.setdefault(part, {})
            assert isinstance(inner, dict), "duplicates are refused"
            table = inner
        if entry.value != {}:
            table[entry.path[-1]] = entry.value
        else:
            table.setdefault(entry.path[-1], {})
    return root


def _has(table: object, path: Sequence[str]) -> bool:
    """Whether a table has a value at a path, and not none."""
    for part in path:
        table = table.get(part) if isinstance(table, dict) else None
    return is_set(table)


def _source(entries: Sequence[Entry], path: Sequence[str | int]) -> str:
    """Where the value at a path, or the last one below or above it, was given; "" if nothing was."""
    wanted = tuple(str(part) for part in path)
    for entry in reversed(entries):
        depth = min(len(entry.path), len(wanted))
        if entry.path[:depth] == wanted[:depth]:
            return str(entry.source)
    return ""

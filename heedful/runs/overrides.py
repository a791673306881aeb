"""Settings that a user gives, merged over defaults: a recipe, then flags, assignments and Python values.

Every command that has settings resolves them with `Overrides`. A setting may be given by its full path,
"train.optimizer.lr", or by a short name if only one setting has it. A short name is the end of a path, such as "lr" or
"optimizer.lr". A name that another library uses, such as "learning_rate", is a foreign name. The value of an assignment
such as "lr=0.1" is parsed as TOML, and is a text if it is not TOML. This module imports nothing heavy, so that a wrong
setting is refused immediately.
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
MAX_SUGGESTIONS = 5  # maximum paths that an error suggests
MAX_COMPARED_CHARS = 200  # characters of an unknown name that are compared with known names


class Entry(NamedTuple):
    """A value for one setting, and the place where it was given."""

    path: tuple[str, ...]  # components of a full path, a short name or a foreign name
    value: Json
    source: str  # for errors: the assignment or the flag with its value, or the recipe file; "": unknown


class Located(NamedTuple):
    """All entries of some overrides, with the full paths of one settings class."""

    layers: list[list[Entry]]  # of `Overrides`, and then that of `with_values`; a later layer has priority
    renamed: dict[str, str]  # full path by foreign name, for the foreign names that were used


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(Generic[Settings]):
    """Settings, and which of them the user gave."""

    settings: Settings
    # `Entry.source` by full path of each setting that the user gave: first those of the recipe, then of presets, flags,
    # assignments and values
    sources: Mapping[str, str]
    renamed: Mapping[str, str]  # full path by foreign name, for the foreign names that were used

    def has(self, path: str) -> bool:
        """Whether the user gave the setting at a path, or a setting in the table at this path."""
        return any(f"{name}.".startswith(f"{path}.") for name in self.sources)


class Overrides:
    """Settings that a user gives. They are read once; `resolve` merges them over defaults.

    They are merged in three layers, each over the ones before it: the recipe; the presets; and flags, assignments and
    values. A layer may give each setting only once. If settings exclude each other, such as epochs and max_steps, a
    layer may give only one of them, which replaces the one in an earlier layer.

    Args:
        recipe: Path of a .toml or .json file, or its content as a mapping.
        presets: Tables of settings by the flag that chooses them, as {"--loss logits": {"loss": {...}}}.
        flags: Values by flag and full path, as {"--lr 0.1": {"train.optimizer.lr": 0.1}}.
        assignments: Texts such as "lr=0.1".
        values: Python values by path or short name, or nested mappings.

    Raises:
        SettingError: If an assignment is not of the form name=value.
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
        self._recipe = _recipe_entries(recipe)
        self._presets = _flag_entries(presets or {})
        self._by_hand = _flag_entries(flags or {})
        for assignment in assignments:
            self._by_hand += _parse_assignment(assignment)
        for name, value in _as_plain_table(values or {}, "values").items():
            self._by_hand += _entries({name: value}, f"{name}={as_json(value)}")
        self._over_all: list[Entry] = []  # values given to `with_values`
        self._located: dict[type, Located] = {}  # by settings class
        self._resolved: list[tuple[object, Resolved[Any]]] = []  # (defaults, result) of earlier calls of `resolve`

    @classmethod
    def of(cls, values: Overrides | Mapping[str, object] | None, **arguments: Any) -> Overrides:
        """Return `values` if it is an `Overrides` object, else `Overrides` of `values` and the other arguments."""
        if isinstance(values, cls):
            assert not any(arguments.values()), "collected overrides include everything"
            return values
        return cls(values=values, **arguments)  # type: ignore[arg-type]

    def with_values(self, values: Mapping[str, object]) -> Overrides:
        """Return a copy of the overrides with more Python values, which have priority over all others."""
        changed = copy(self)
        changed._over_all = [*self._over_all, *_entries(_as_plain_table(values, "values"), "values")]
        changed._located, changed._resolved = {}, []
        return changed

    @property
    def renamed(self) -> dict[str, str]:
        """Full paths by foreign name, for the foreign names that were resolved so far."""
        return {name: path for located in self._located.values() for name, path in located.renamed.items()}

    def mentions(self, name: str) -> bool:
        """Whether a path in the overrides begins with the component `name`, such as "init" in "init.model"."""
        return any(entry.path[0] == name for layer in (self._recipe, self._presets, self._by_hand) for entry in layer)

    def resolve(self, defaults: Settings, fixed: Mapping[str, str] | None = None) -> Resolved[Settings]:
        """Merge everything over defaults. The result is cached for equal defaults.

        Args:
            defaults: Settings for everything that is not given by hand.
            fixed: Why a setting may not be changed, by path of the setting.

        Raises:
            SettingError: If a name is unknown or ambiguous, if a setting is given twice, or if a value is refused.
        """
        resolved = next((result for known, result in self._resolved if _same_settings(known, defaults)), None)
        if resolved is None:
            resolved = self._merge_over(defaults)
            self._resolved.append((defaults, resolved))
        for path, reason in (fixed or {}).items():
            if (value := setting_at(resolved.settings, path)) != setting_at(defaults, path):
                raise SettingError(f"{path} is {as_json(value)}, but {reason}: leave it out", path=path)
        return resolved

    def _merge_over(self, defaults: Settings) -> Resolved[Settings]:
        """Return the defaults with the entries of all layers merged over them, without a cache."""
        layers, renamed = self._locate(type(defaults))
        table = to_mapping(defaults)
        for layer in layers:
            merge(table, _as_nested_table(layer), type(defaults))
        entries = [entry for layer in layers for entry in layer]
        try:
            settings = from_mapping(type(defaults), table, source=lambda path: _source_of(entries, path))
        except SettingError as error:
            raise _other_kind_error(type(defaults), error) or error from None
        cls: type = type(defaults)
        # an exclusive setting has no value in the table if a setting of a later layer has replaced it
        replaced = {path for group in exclusive_paths(cls) for path in group if not _has_value(table, path)}
        sources = {".".join(entry.path): entry.source for entry in entries if entry.path not in replaced}
        return Resolved(settings=settings, sources=sources, renamed=renamed)

    def _locate(self, cls: type) -> Located:
        """Find the full path of each entry in a settings class. The result is cached by class.

        Raises:
            SettingError: If a name is unknown or ambiguous, or if a layer gives a setting twice.
        """
        if cls not in self._located:
            renamed: dict[str, str] = {}
            unlocated = (self._recipe, self._presets, self._by_hand, self._over_all)
            layers = [[_locate_entry(cls, entry, renamed) for entry in layer] for layer in unlocated]
            for layer in layers:
                _refuse_duplicates(layer)
                _refuse_exclusive(cls, layer)
            self._located[cls] = Located(layers, renamed)
        return self._located[cls]


def _same_settings(first: object, second: object) -> bool:
    """Whether two settings are of the same class and equal."""
    return type(first) is type(second) and first == second


def find_setting(cls: type, name: str) -> str:
    """Return the full path of the setting of a class with this path, short name or foreign name.

    Raises:
        SettingError: If no setting or several settings have the name.
    """
    entry = Entry(path=tuple(name.split(".")), value=None, source="")
    return ".".join(_locate_entry(cls, entry, {}).path)


def override(defaults: Settings, assignments: Sequence[str] = ()) -> Settings:
    """Return settings changed by assignments such as "limits.max_concurrent_requests=7"."""
    return Overrides(assignments=assignments).resolve(defaults).settings


# -- settings by path -----------------------------------------------------------------------------------


def flatten_settings(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (full path, value) for each value in a nested table.

    >>> list(flatten_settings({"seeds": 1, "train": {"optimizer": {"lr": 0.1}}}))
    [('seeds', 1), ('train.optimizer.lr', 0.1)]
    """
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def changed_settings(settings: DataclassInstance, defaults: DataclassInstance) -> list[str]:
    """List the settings that differ from defaults, as arguments of a command.

    >>> from heedful.train.settings import AdamW
    >>> changed_settings(AdamW(lr=0.1), AdamW(lr=0.2))
    ['lr=0.1']
    """
    values = dict(flatten_settings(to_mapping(settings)))
    default_values = dict(flatten_settings(to_mapping(defaults)))
    return [
        f"{path}={value}"
        for path, value in values.items()
        if path not in default_values or value != default_values[path]
    ]


def setting_at(settings: object, path: str) -> object:
    """Return the value at a path, or None if there is no such setting."""
    for name in path.split("."):
        settings = getattr(settings, name, None)
    return settings


def replace_setting(settings: Settings, path: str, value: object) -> Settings:
    """Return frozen settings with another value at a path."""
    assert is_dataclass(settings) and not isinstance(settings, type)
    name, _, rest = path.partition(".")
    return replace(settings, **{name: replace_setting(getattr(settings, name), rest, value) if rest else value})


# -- reading --------------------------------------------------------------------------------------------------------


def _as_plain_table(table: Mapping[str, object], source: str) -> dict[str, Json]:
    """Convert a table of Python values to plain data. Errors name `source`."""
    plain = to_plain_data(_without_classes(table), (), source)
    assert isinstance(plain, dict)
    return plain


def _without_classes(value: object) -> object:
    """Convert dataclasses in a value to tables, and paths to texts."""
    if isinstance(value, Mapping):
        return {key: _without_classes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_classes(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    return value


def _recipe_entries(recipe: str | Path | Mapping[str, object] | None) -> list[Entry]:
    """Return the entries of a recipe: of a file, of its content, or of no recipe for None or ""."""
    if not recipe:
        return []
    if isinstance(recipe, Mapping):
        return _entries(_as_plain_table(recipe, "recipe"), "recipe")
    source = str(recipe)
    return _entries(_as_plain_table(load_mapping(recipe), source), source)


def _flag_entries(tables: Mapping[str, Mapping[str, object]]) -> list[Entry]:
    """Return the entries of flags, from a table of settings by flag."""
    return [entry for flag, table in tables.items() for entry in _entries(_as_plain_table(table, flag), flag)]


def _entries(table: Mapping[str, Json], source: str) -> list[Entry]:
    """Return an entry for each value of a table.

    A dot in a key of the table separates the components of a path. A dot in a key of an inner table is part of the key.
    """
    return [
        Entry(path=(*key.split("."), *rest), value=value, source=source)
        for key, branch in table.items()
        for rest, value in _leaves(branch)
    ]


def _leaves(value: Json) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield (path, value) for each value in nested tables, or ((), value) if the value itself is not a table."""
    if isinstance(value, dict) and value:
        for key, branch in value.items():
            yield from (((key, *rest), leaf) for rest, leaf in _leaves(branch))
    else:
        yield (), value


def _parse_assignment(assignment: str) -> list[Entry]:
    """Return the entries of "name=value". A value that is a table has an entry for each value in the table."""
    name, equals, text = assignment.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise SettingError(
            f"{as_json(assignment)} is not of the form name=value or table.name=value", source=cut(assignment)
        )
    source = cut(assignment)
    leaves = _leaves(toml_value(text.strip()))
    return [Entry(path=(*path, *rest), value=value, source=source) for rest, value in leaves]


def toml_value(text: str) -> Json:
    """Parse a value as TOML. Text that is not TOML is returned unchanged.

    >>> toml_value("[1, 2]"), toml_value("cosine")
    ([1, 2], 'cosine')
    """
    try:
        table = parse(f"value = {text}", "TOML", text)
        has_only_this_value = len(table) == 1  # a text with line breaks could contain further keys
        return to_plain_data(table["value"], (), text) if has_only_this_value else text
    except HeedfulError:
        return text


# -- names ----------------------------------------------------------------------------------------------------------


def _locate_entry(cls: type, entry: Entry, renamed: dict[str, str]) -> Entry:
    """Return an entry with the full path of its setting.

    Args:
        cls: The settings class.
        entry: An entry with a full path, a short name or a foreign name.
        renamed: Receives the full path of the setting if the entry has a foreign name.

    Raises:
        SettingError: If no setting or several settings have this name, or if it is a foreign name with another meaning.
    """
    known = setting_paths(cls)
    name = cut(".".join(entry.path))
    if _leads_to_setting(known, entry.path):
        return entry
    matches = _matching_paths(known, entry.path)
    if len(matches) == 1:
        return entry._replace(path=matches[0])
    prefix = f"{entry.source}: " if entry.source else ""
    if matches:
        candidates = tuple(".".join(path) for path in matches)
        message = f"{prefix}{name} is the name of several settings: give one of {', '.join(candidates)}"
        raise SettingError(message, path=name, source=entry.source, code="ambiguous", candidates=candidates)
    foreign = ALIASES.get(entry.path[-1].replace("-", "_"))
    if foreign is None:
        raise _unknown_error(known, prefix, name, entry)
    path = foreign.path(known)
    if not path or not foreign.accepted or len(entry.path) > 1:
        raise _foreign_error(prefix, name, foreign, path, entry.source)
    renamed[name] = path
    return entry._replace(path=tuple(path.split(".")))


def _unknown_error(known: Mapping[str, Kind], prefix: str, name: str, entry: Entry) -> SettingError:
    """Return the error for an unknown name. It suggests similar paths, or else lists the names in the same table."""
    candidates = _similar_paths(known, entry.path)
    message = f"{prefix}{name} is not a setting"
    if candidates:
        message += f" (did you mean {' or '.join(map(as_json, candidates))}?)"
    else:
        parent = ".".join(entry.path[:-1])
        siblings = _children(known, parent if parent in known else "")
        message += f"; known here: {', '.join(path.rpartition('.')[2] for path in siblings)}"
    return SettingError(message, path=name, source=entry.source, code="unknown", candidates=candidates)


def _foreign_error(prefix: str, name: str, foreign: ForeignName, path: str, source: str) -> SettingError:
    """Return the error for a foreign name that is not accepted.

    Args:
        prefix: Beginning of the message, with the source of the entry, or "".
        name: The foreign name.
        foreign: What the foreign name means.
        path: Path of the setting of this command with the same meaning, or "" if there is no such setting.
        source: Source of the entry.
    """
    advice = f": {foreign.advice}" if foreign.advice else ""
    if path or not foreign.is_setting:
        message = f"{prefix}{name} is not a setting (did you mean {as_json(path or foreign.meant[0])}?){advice}"
    else:
        message = f"{prefix}{name} is not a setting of this command; other commands have {' or '.join(foreign.meant)}"
    candidates = (path,) if path else ()
    return SettingError(message, path=name, source=source, code="unknown", candidates=candidates)


def _leads_to_setting(known: Mapping[str, Kind], path: tuple[str, ...]) -> bool:
    """Whether a path is that of a setting or a table, or begins with the path of a setting.

    In the latter case the other components are keys in the value of the setting, which is checked later.
    """
    for depth in range(len(path), 0, -1):
        kind = known.get(".".join(path[:depth]))
        if kind is not None:
            return depth == len(path) or kind != "table"
    return False


def _matching_paths(known: Mapping[str, Kind], name: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the full paths that a short name may mean, sorted."""
    matches = set()
    for path, kind in known.items():
        full_path = _complete(path.split("."), kind, name)
        if full_path is not None:
            matches.add(full_path)
    return sorted(matches)


def _complete(path: list[str], kind: Kind, name: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the full path that a short name means if the setting at `path` has this name, else None.

    The setting has the name if its path ends with it. A key may follow the name of a dict: "columns.text" means
    "data.columns.text" for the dict at "data.columns".
    """
    if name == ("kind",):  # many tables have a setting of this name, so it is never a short name
        return None
    possible_lengths = range(1, len(name) + 1) if kind == "dict" else (len(name),)
    for length in possible_lengths:  # number of components before the keys of a dict
        if tuple(path[-length:]) == name[:length]:
            return (*path, *name[length:])
    return None


def _similar_paths(known: Mapping[str, Kind], name: tuple[str, ...]) -> tuple[str, ...]:
    """Return full paths to suggest for an unknown name: the first of these groups that is not empty.

    1. Paths with the same last component, or the most similar one of them if one is similar.
    2. Paths in the same table with a similar last component.
    3. Any paths with a similar last component.
    4. The most similar path.
    5. The path of the setting with the most similar foreign name.
    """
    *table, last = name
    full_name, parent = ".".join(name), ".".join(table)
    same_last = [path for path in known if path.rpartition(".")[2] == last]
    siblings = _children(known, parent) if parent in known or not table else []
    for paths in (
        _most_similar(full_name, same_last) or same_last,
        _paths_with_similar_end(last, siblings),
        _paths_with_similar_end(last, known),
        _most_similar(full_name, known),
    ):
        if paths:
            return tuple(paths[:MAX_SUGGESTIONS])
    foreign_paths = [ALIASES[foreign_name].path(known) for foreign_name in _most_similar(last, ALIASES)]
    return tuple(path for path in foreign_paths if path)


def _most_similar(name: str, candidates: Iterable[str]) -> list[str]:
    """Return a list with the candidate that is most similar to a name, or [] if no candidate is similar."""
    return get_close_matches(name[:MAX_COMPARED_CHARS], list(candidates), n=1)


def _paths_with_similar_end(name: str, paths: Iterable[str]) -> list[str]:
    """Return the paths with the last component that is most similar to a name, or [] if no component is similar."""
    paths_by_end: dict[str, list[str]] = {}
    for path in paths:
        paths_by_end.setdefault(path.rpartition(".")[2], []).append(path)
    return [path for end in _most_similar(name, paths_by_end) for path in paths_by_end[end]]


def _children(known: Mapping[str, Kind], parent: str) -> list[str]:
    """Return the paths of the settings and tables directly in a table. The root has the path ""."""
    return [path for path in known if path.rpartition(".")[0] == parent]


def _refuse_duplicates(entries: Sequence[Entry]) -> None:
    """Raise a SettingError if a layer has two values for one setting, or for a table and a setting in it."""
    entry_by_path: dict[tuple[str, ...], Entry] = {}
    with_values = [entry for entry in entries if entry.value != {}]
    for entry in sorted(with_values, key=lambda entry: len(entry.path)):  # a table before the settings in it
        for depth in range(1, len(entry.path) + 1):
            earlier = entry_by_path.get(entry.path[:depth])
            if earlier is not None:
                path = ".".join(earlier.path)
                message = f"{earlier.source} and {entry.source} both set {path}: give one of them"
                raise SettingError(message, path=path, source=entry.source, code="duplicate")
        entry_by_path[entry.path] = entry


def _refuse_exclusive(cls: type, entries: Sequence[Entry]) -> None:
    """Raise a SettingError if a layer sets two mutually exclusive settings."""
    for group in exclusive_paths(cls):
        conflicting = [entry for entry in entries if entry.path in group and is_set(entry.value)]
        if len(conflicting) > 1:
            last = conflicting[-1]
            names, path = [".".join(setting_path) for setting_path in group], ".".join(last.path)
            sources = list(dict.fromkeys(entry.source for entry in conflicting))
            if len(sources) > 1:
                conflict = " and ".join(sources)
            else:  # all values are from one table, so the message has their paths
                paths = " and ".join(".".join(entry.path) for entry in conflicting)
                conflict = f"{last.source}: {paths}" if last.source else paths
            message = f"{conflict} are given: give one of {', '.join(names)}"
            raise SettingError(message, path=path, source=last.source, code="duplicate")


def _other_kind_error(cls: type, error: SettingError) -> SettingError | None:
    """Return the error for a setting that only other kinds of its table have, or None if no kind has it.

    Args:
        cls: The settings class.
        error: The error about an unknown setting. For errors of another code, the result is None.
    """
    if error.code != "unknown":
        return None
    parent = error.path.rpartition(".")[0]
    settings = [setting for setting in describe_settings(cls) if f"{setting.path}.".startswith(f"{error.path}.")]
    conditions = [condition for setting in settings for condition in setting.when]  # such as 'init.kind = "scratch"'
    kinds = dict.fromkeys(condition for condition in conditions if condition.startswith(f"{parent}.kind = "))
    if not kinds:
        return None
    prefix = f"{error.source}: " if error.source else ""
    message = f"{prefix}{error.path} is for {' or '.join(kinds)}: choose that kind, or leave {error.path} out"
    return SettingError(message, path=error.path, source=error.source, code="unknown")


# -- merging --------------------------------------------------------------------------------------------------------


def _as_nested_table(entries: Sequence[Entry]) -> dict[str, Json]:
    """Return the values of entries as nested tables."""
    root: dict[str, Json] = {}
    for entry in sorted(entries, key=lambda entry: len(entry.path)):  # a table before the settings in it
        table = root
        for key in entry.path[:-1]:
            inner = table.setdefault(key, {})
            assert isinstance(inner, dict), "_refuse_duplicates refuses a value and a table at the same path"
            table = inner
        if entry.value != {}:
            table[entry.path[-1]] = entry.value
        else:
            table.setdefault(entry.path[-1], {})
    return root


def _has_value(table: object, path: Sequence[str]) -> bool:
    """Whether nested tables have a value at a path that is neither None nor "none"."""
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return is_set(table)


def _source_of(entries: Sequence[Entry], path: Sequence[str | int]) -> str:
    """Return the source of the value at a path, or "" if no entry gave it.

    It is the source of the last entry for this path, for a table that contains it, or for a value inside it.
    """
    keys = tuple(str(key) for key in path)
    for entry in reversed(entries):
        depth = min(len(entry.path), len(keys))
        if entry.path[:depth] == keys[:depth]:
            return str(entry.source)
    return ""

"""Compare two checkouts to the bit: outputs, losses, weights, random draws, texts, predictions and server replies.

before.py runs in the other checkout and now.py in this one, each with .venv/bin/python of its checkout if there is one.
key_map.toml maps old names to new ones. Values of the other checkout are cached under build/compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SECTIONS = (
    "outputs",
    "training",
    "pretraining",
    "distillation",
    "ranks",
    "drawing",
    "decoding",
    "predictions",
    "server",
    "resuming",
    "defaults",
)
MAX_SHOWN = 5  # differences of a section that are printed
Keys = tuple[str, ...]  # path of a value in nested data

# -- names ------------------------------------------------------------------------------------------------------------


def parts(path: str) -> tuple[str, Keys]:
    """Return the section of a path, or "" if it names none, and the keys of the path."""
    section, colon, rest = path.partition(":")
    return (section, tuple(rest.split("/"))) if colon and section in SECTIONS else ("", tuple(path.split("/")))


def fits(rule: Keys, keys: Keys) -> bool:
    """Return whether keys match a rule, in which * matches any key."""
    return len(rule) == len(keys) and all(part in ("*", key) for part, key in zip(rule, keys, strict=True))


def matches_within(rule: Keys, keys: Keys) -> bool:
    """Return whether consecutive keys match a rule."""
    return any(fits(rule, keys[start : start + len(rule)]) for start in range(len(keys) - len(rule) + 1))


@dataclass(kw_only=True)
class KeyMap:
    """The rules of key_map.toml for one section."""

    keys: list[tuple[Keys, Keys]] = field(default_factory=list)  # old and new keys
    values: list[tuple[Keys, Mapping[str, Any]]] = field(default_factory=list)  # keys, and new values by old ones
    removed: list[Keys] = field(default_factory=list)  # keys that only the old checkout has
    added: list[Keys] = field(default_factory=list)  # keys that only the new checkout has

    @classmethod
    def read(cls, section: str, path: Path = HERE / "key_map.toml") -> KeyMap:
        """Read the rules of a section; rules of keys are sorted by length, the longest first."""
        table = tomllib.loads(path.read_text())
        key_map = cls()
        for old, new in table.get("keys", {}).items():
            (rule_section, before), (_, now) = parts(old), parts(new)
            if before.count("*") != now.count("*"):
                raise SystemExit(f'{path}: "{old}" and "{new}" differ in how many * they have')
            if rule_section in ("", section):
                key_map.keys.append((before, now))
        key_map.keys.sort(key=lambda rule: -len(rule[0]))
        for rule_path, new_values in table.get("values", {}).items():
            rule_section, keys = parts(rule_path)
            if rule_section in ("", section):
                key_map.values.append((keys, new_values))
        for name, rules in (("removed", key_map.removed), ("added", key_map.added)):
            rules += [keys for rule_section, keys in map(parts, table.get(name, {})) if rule_section in ("", section)]
        return key_map

    def renamed(self, keys: Keys) -> Keys:
        """Return keys of the old checkout under the names of the new one."""
        index, new_keys = 0, list[str]()
        while index < len(keys):
            for pattern, replacement in self.keys:
                matched = keys[index : index + len(pattern)]
                if fits(pattern, matched):
                    wildcards = iter([key for key, rule in zip(matched, pattern, strict=True) if rule == "*"])
                    new_keys += [next(wildcards) if key == "*" else key for key in replacement]
                    index += len(pattern)
                    break
            else:
                new_keys.append(keys[index])
                index += 1
        return tuple(new_keys)

    def moved(self, old: Mapping[Keys, Any]) -> dict[Keys, Any]:
        """Return the values of the old checkout under the names of the new one, without removed ones."""
        flat: dict[Keys, Any] = {}
        for keys, value in old.items():
            if any(matches_within(rule, keys) for rule in self.removed):
                continue
            path = self.renamed(keys)
            if path in flat:
                raise SystemExit(f"key_map.toml: two values of the old tree become {'/'.join(path)}")
            for rule, new_values in self.values:
                if isinstance(value, str) and fits(rule, path[-len(rule) :]):
                    value = new_values.get(value, value)
            flat[path] = value
        return flat

    def without_added(self, new: Mapping[Keys, Any]) -> dict[Keys, Any]:
        """Return the values of the new checkout that the old one has too."""
        return {
            keys: value for keys, value in new.items() if not any(matches_within(rule, keys) for rule in self.added)
        }


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield the values of nested data with their paths; empty tables and lists are values too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner:
        yield path, value
    for key, item in inner:
        yield from leaves(item, (*path, str(key)))


def differences(section: str, before: Any, now: Any) -> list[str]:
    """Describe the values that are not equal."""
    names = KeyMap.read(section)
    old, new = names.moved(dict(leaves(before))), names.without_added(dict(leaves(now)))
    lines = []
    for keys in [*old, *(keys for keys in new if keys not in old)]:
        old_text, new_text = (json.dumps(values[keys]) if keys in values else "(nothing)" for values in (old, new))
        if old_text != new_text:  # as text, so that 1 differs from 1.0 and NaN equals itself
            lines.append(f"{'/'.join(keys)}\n    before: {old_text[:200]}\n    now:    {new_text[:200]}")
    return lines


# -- runs -------------------------------------------------------------------------------------------------------------


def python_of(checkout: Path) -> str:
    """Return the interpreter of a checkout, or this one if it has no environment."""
    own = checkout / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def probe(script: str, checkout: Path, sections: list[str], quick: bool) -> dict[str, Any]:
    """Run a script of probes in a checkout, and return the values of the sections."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HEEDFUL_MEASURE": "off",  # old name of the next one: no kernels are chosen by timing
        "HEEDFUL_AUTOTUNE": "off",
    }
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        arguments = ["--checkout", str(checkout), "--work", folder, *(["--quick"] if quick else [])]
        arguments += [word for name in sections for word in ("--section", name)]
        done = subprocess.run([python_of(checkout), str(HERE / script), *arguments], env=environment)
        if done.returncode:
            raise SystemExit(f"{script} ended with {done.returncode} in {checkout}")
        text = Path(folder, "values.json").read_text().replace(folder, "WORK")
    result: dict[str, Any] = json.loads(text)
    return result


def fingerprint(checkout: Path, quick: bool) -> str | None:
    """Return a digest of everything on which a checkout's values depend, or None if it has uncommitted changes."""
    git = ["git", "-C", str(checkout)]
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if changed.returncode or head.returncode or changed.stdout.strip():
        return None
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.exists() else []
    machine = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "tokenizers")]
    scripts = [(HERE / name).read_text() for name in ("before.py", "shared.py")]
    about = [head.stdout, python_of(checkout), sys.version, *machine, *versions, *scripts, str(quick)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:20]


def values_before(checkout: Path, sections: list[str], quick: bool, fresh: bool) -> dict[str, Any]:
    """Return the values of the other checkout, from the cache unless `fresh`."""
    key = fingerprint(checkout, quick)
    files = {name: ROOT / "build" / "compare" / f"{name}-{key}.json" for name in sections}
    reusable = [name for name in sections if key and not fresh and files[name].exists()]
    probes = {name: json.loads(files[name].read_text()) for name in reusable}
    if missing := [name for name in sections if name not in reusable]:
        fresh_probes = probe("before.py", checkout, missing, quick)
        probes |= fresh_probes
        for name in missing:
            if key and "error" not in fresh_probes[name]:
                files[name].parent.mkdir(parents=True, exist_ok=True)
                files[name].write_text(json.dumps(fresh_probes[name]))
    return probes


def report(section: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Print the comparison of a section, and return whether both sides are equal."""
    for name, side in (("before", before), ("now", now)):
        if "error" in side:
            print(f"{section}: the probe failed, {name}:\n{side['error']}")
            return False
    difference_lines = differences(section, before["values"], now["values"])
    count = sum(1 for _ in leaves(now["values"]))
    seconds = f"{before['seconds']:.0f} s and {now['seconds']:.0f} s"
    if not difference_lines:
        print(f"{section}: equal ({len(now['values'])} probes, {count:,} values; {seconds})")
        return True
    print(f"{section}: {len(difference_lines):,} of {count:,} values differ ({seconds})")
    for line in difference_lines[:MAX_SHOWN]:
        print(f"  {line}")
    return False


def main() -> None:
    """Compare all sections; exit with status 1 if one differs."""
    parser = argparse.ArgumentParser(prog="scripts/compare_trees", description=__doc__)
    parser.add_argument("before", metavar="BEFORE_CHECKOUT", type=Path, help="a clone at the tag before-names")
    parser.add_argument("--only", metavar="SECTION", action="append", choices=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="fewer probes of each section; no ranks, no resuming")
    parser.add_argument("--fresh", action="store_true", help="run the other checkout again, without the cache")
    parser.add_argument("--frozen", action="store_true", help="run before.py on both sides: whether probes are stable")
    options = parser.parse_args()
    checkout = options.before.resolve()
    if not (checkout / "heedful" / "__init__.py").exists():
        raise SystemExit(f"{options.before} is no checkout of Heedful: give a clone at the tag before-names")
    skipped = ("ranks", "resuming") if options.quick else ()
    sections = options.only or [name for name in SECTIONS if name not in skipped]
    before = values_before(checkout, sections, options.quick, options.fresh)
    if options.frozen:
        now = probe("before.py", checkout, sections, options.quick)
    else:
        now = probe("now.py", ROOT, sections, options.quick)
    equal = [report(name, before[name], now[name]) for name in sections]
    raise SystemExit(0 if all(equal) else 1)


if __name__ == "__main__":
    main()

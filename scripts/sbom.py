"""Print a software bill of materials of Heedful's dependencies, as CycloneDX 1.6 JSON, from installed metadata.

    python scripts/sbom.py > heedful.cdx.json

The bill lists the dependencies in pyproject.toml and of the extras in EXTRAS, and their dependencies, in the installed
versions, but not those of tests and development. It is made without a network, and the same environment gives the same
bytes.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import heedful

ROOT = "heedful"  # name of the distribution
EXTRAS = ("export", "notebook", "ray", "serve", "translate")
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Walk:
    """The distributions that Heedful needs with some extras, directly and indirectly, and the needs of each."""

    def __init__(self, *extras: str) -> None:
        self.installed: dict[str, Distribution] = {}  # by name
        self.needs: dict[str, set[str]] = {}  # names of the distributions that each distribution needs
        self.missing: set[str] = set()  # names of requirements that are not installed
        self._seen: set[tuple[str, str]] = set()
        lines = [
            *PROJECT["dependencies"],
            *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
        ]
        self._require(ROOT, lines, "")

    def follow(self, name: str, extra: str = "") -> None:
        """Add a distribution and its requirements, without extras or with one extra."""
        key = canonicalize_name(name)
        if (key, extra) in self._seen:
            return
        self._seen.add((key, extra))
        try:
            self.installed[key] = distribution(name)
        except PackageNotFoundError:
            self.missing.add(key)
            return
        self._require(key, self.installed[key].requires or [], extra)

    def _require(self, key: str, lines: list[str], extra: str) -> None:
        """Follow the requirements of a distribution that apply to this environment and to an extra, or to none ("")."""
        needs = self.needs.setdefault(key, set())
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needs.add(canonicalize_name(requirement.name))
                for selected in ("", *requirement.extras):
                    self.follow(requirement.name, selected)


def identifier(name: str, version: str) -> dict[str, Any]:
    """Return the fields of CycloneDX that identify a package."""
    purl = f"pkg:pypi/{name}@{quote(version, safe='.')}"
    return {"type": "library", "bom-ref": name, "name": name, "version": version, "purl": purl}


def component(dist: Distribution, *, optional: bool) -> dict[str, Any]:
    """Describe a distribution in the form of CycloneDX."""
    name = canonicalize_name(dist.metadata["Name"])
    record = identifier(name, dist.version) | {"scope": "optional" if optional else "required"}
    if summary := dist.metadata.get("Summary"):
        record["description"] = summary
    if expression := dist.metadata.get("License-Expression"):
        record["licenses"] = [{"expression": expression}]
    else:
        names = [
            classifier.rpartition(" :: ")[2]
            for classifier in dist.metadata.get_all("Classifier") or []
            if classifier.startswith("License :: ")
        ]
        text = (dist.metadata.get("License") or "").strip()
        if not names and text and "\n" not in text and len(text) < 80:  # a name, not the text of a license
            names = [text]
        if names:
            record["licenses"] = [{"license": {"name": name}} for name in sorted(set(names))]
    return record


def bill() -> tuple[dict[str, Any], set[str]]:
    """Return the document, and the names of requirements that are not installed."""
    core, complete = Walk(), Walk(*EXTRAS)
    root = identifier(ROOT, heedful.__version__) | {"licenses": [{"expression": PROJECT["license"]}]}
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": [
            component(dist, optional=name not in core.installed) for name, dist in sorted(complete.installed.items())
        ],
        "dependencies": [
            {"ref": name, "dependsOn": sorted(needs & complete.installed.keys())}
            for name, needs in sorted(complete.needs.items())
        ],
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))}"
    return document, complete.missing


if __name__ == "__main__":
    document, missing = bill()
    if missing:
        print(f"not installed, and not listed: {', '.join(sorted(missing))}", file=sys.stderr)
    print(json.dumps(document, indent=2, ensure_ascii=False))

"""A software bill of materials of what Heedful runs with, as CycloneDX 1.6 JSON, from installed metadata.

    python scripts/sbom.py > heedful.cdx.json

It lists the dependencies in pyproject.toml and those of the extras in EXTRAS, with theirs, in the versions that are
installed; not those of tests and development. Nothing is fetched, and the same environment gives the same bytes.
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

ROOT, EXTRAS = "heedful", ("export", "notebook", "ray", "serve", "translate")
PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Walk:
    """Follows requirements through the installed distributions."""

    def __init__(self, *extras: str) -> None:
        self.found: dict[str, Distribution] = {}
        self.needs: dict[str, set[str]] = {}
        self.missing: set[str] = set()
        self._seen: set[tuple[str, str]] = set()
        lines = [
            *PROJECT["dependencies"],
            *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
        ]
        self._require(ROOT, lines, "")

    def follow(self, name: str, extra: str = "") -> None:
        """Add a distribution, and what it requires without extras or with this one."""
        key = canonicalize_name(name)
        if (key, extra) in self._seen:
            return
        self._seen.add((key, extra))
        try:
            self.found[key] = distribution(name)
        except PackageNotFoundError:
            self.missing.add(key)
            return
        self._require(key, self.found[key].requires or [], extra)

    def _require(self, key: str, lines: list[str], extra: str) -> None:
        needs = self.needs.setdefault(key, set())
        for line in lines:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needs.add(canonicalize_name(requirement.name))
                for selected in ("", *requirement.extras):
                    self.follow(requirement.name, selected)


def named(name: str, version: str) -> dict[str, Any]:
    """The identifier of a package."""
    purl = f"pkg:pypi/{name}@{quote(version, safe='.')}"
    return {"type": "library", "bom-ref": name, "name": name, "version": version, "purl": purl}


def component(dist: Distribution, *, optional: bool) -> dict[str, Any]:
    """One distribution as CycloneDX describes it."""
    name = canonicalize_name(dist.metadata["Name"])
    record = named(name, dist.version) | {"scope": "optional" if optional else "required"}
    if summary := dist.metadata.get("Summary"):
        record["description"] = summary
    if expression := dist.metadata.get("License-Expression"):
        record["licenses"] = [{"expression": expression}]
    else:
        classifiers = [
            license_texts
            for license_texts in dist.metadata.get_all("Classifier") or []
            if license_texts.startswith("License :: ")
        ]
        names = [classifier.rpartition(" :: ")[2] for classifier in classifiers]
        text = (dist.metadata.get("License") or "").strip()
        names = names or [text] * bool(text and "\n" not in text and len(text) < 80)
        if names:
            record["licenses"] = [{"license": {"name": name}} for name in sorted(set(names))]
    return record


def bill() -> tuple[dict[str, Any], set[str]]:
    """The whole document, and what is required and not installed."""
    core, every = Walk(), Walk(*EXTRAS)
    root = named(ROOT, heedful.__version__) | {"licenses": [{"expression": PROJECT["license"]}]}
    others = [component(dist, optional=name not in core.found) for name, dist in sorted(every.found.items())]
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": others,
        "dependencies": [
            {"ref": name, "dependsOn": sorted(needs & every.found.keys())}
            for name, needs in sorted(every.needs.items())
        ],
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))}"
    return document, every.missing


if __name__ == "__main__":
    document, missing = bill()
    if missing:
        print(f"not installed, and not listed: {', '.join(sorted(missing))}", file=sys.stderr)
    print(json.dumps(document, indent=2, ensure_ascii=False))

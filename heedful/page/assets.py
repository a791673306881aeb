"""Helpers that put scripts, styles and JSON into one HTML file, for the pages of this package and of `look`."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

WEB = Path(__file__).parent / "web"
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|const|class)", re.MULTILINE)


def bundle_modules(sources: Iterable[str]) -> str:
    """Join ES modules into one script. The modules share one scope, so that imports and exports are removed."""
    return "".join(EXPORT.sub("", IMPORT.sub("", source)) for source in sources)


def scoped_modules(name: str, sources: Iterable[str], exports: Iterable[str]) -> str:
    """Join ES modules into a script with its own scope, which defines the object `name` of the exported names."""
    return f"const {name} = (() => {{\n{bundle_modules(sources)}return {{ {', '.join(exports)} }};\n}})();\n"


def escape_json(value: object) -> str:
    """Return JSON in which no text can begin or end an HTML element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def source_hash(content: str) -> str:
    """Return the source expression of an inline script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

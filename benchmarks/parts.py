"""Keep each finished result of a long benchmark in a file, so that a run that was stopped continues after it.

A record names the commits at which its results were measured: several, if the benchmark was continued at another one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import ROOT, current_commit

FOLDER = ROOT / "build" / "benchmarks"  # default folder of the results of all benchmarks; git ignores it


class Parts:
    """The finished results of a benchmark, each in a file of its own.

    Args:
        folder: The folder of the files, which is made when the first result is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: set[str] = set()  # commits at which the results that `result` has returned were measured
        self._commit = current_commit(ROOT)  # that of the code which this process has loaded

    def result(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the result with this name from its file, or measure it and write the file.

        Args:
            name: Name of the result, with everything that the result depends on except the commit.
            measure: Measures the result, and returns it as JSON data.

        Raises:
            ValueError: If another name, which differs only in punctuation or white space, has the same file.
        """
        path = self.folder / (re.sub(r"[^\w.=-]+", "-", name) + ".json")
        if path.exists():
            part = json.loads(path.read_text(encoding="utf-8"))
            if part["name"] != name:
                raise ValueError(f"{path} has the result {part['name']!r}, not {name!r}: give another name")
            print(f"{name}: from {path}, measured at {part['commit'][:8]}", flush=True)
        else:
            text = json.dumps({"name": name, "commit": self._commit, "result": measure()}, indent=1)
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, path)
            part = json.loads(text)
        self.commits.add(part["commit"])
        return part["result"]


def add_parts_option(parser: argparse.ArgumentParser, benchmark: str) -> None:
    """Add the option --parts to the options of a script."""
    parser.add_argument(
        "--parts",
        type=Path,
        default=FOLDER / benchmark,
        help="folder of the finished results, which are not measured again (default: %(default)s)",
    )

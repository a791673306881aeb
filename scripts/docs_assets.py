"""Run the commands in docs/tasks, and write their output below each block.

usage: python scripts/docs_assets.py [PAGE ...]      (default: docs/tasks/*.md)

Blocks of `sh` and `python` run in order in an empty folder, on data that ships with Heedful or that the page writes.
The output of a block, without notes and progress, replaces the text between the markers below the block.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tasks"
BLOCK = re.compile(
    r"(^```(\w+)\n(.*?)^```\n)(\n<!-- output -->\n.*?<!-- end of output -->\n)?", re.MULTILINE | re.DOTALL
)
PROGRESS = re.compile(r"^(note: compiling|.*\r)|^\s*$")  # lines of output that are not shown
MAX_LINES = 24  # lines of output of one block that are shown


def fill(page: Path) -> str:
    """Run the blocks of a page, and return its text with their output."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
        }

        def replace(block: re.Match[str]) -> str:
            text, language, code = block[1], block[2], block[3]
            command = [sys.executable, "-c", code] if language == "python" else ["sh", "-ec", code]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{page}: {code}\n{done.stderr}")
            lines = [line.rstrip() for line in done.stdout.splitlines() if not PROGRESS.match(line)]
            if not lines:
                return text
            if len(lines) > MAX_LINES:
                lines[MAX_LINES:] = ["..."]
            output = "\n".join(f"    {line}" for line in lines)
            return f"{text}\n<!-- output -->\n\n{output}\n\n<!-- end of output -->\n"

        return BLOCK.sub(replace, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or sorted(PAGES.glob("*.md")):
        path.write_text(fill(path), encoding="utf-8")

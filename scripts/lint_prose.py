#!/usr/bin/env python3
"""Find docstrings, comments, messages and names that do not read as plain technical English.

usage: scripts/lint_prose.py [--count] [--no-names] [FILE or FOLDER ...]      (default: heedful)

The script prints a line for each finding and exits with status 1 if there is any. `--count` prints totals only,
`--no-names` leaves out the names of variables.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = re.compile(
    r"(Of|The same|What|Both|With more|In words|Those|Them|Nothing|One that|All of|As|So|And|Also)\b"
)
HABITS = {
    r"\bso many\b": "give the number or its name",
    r"\bwhat is no\b": "say which values are refused",
    r"\bthere (is|are) none\b": 'write "missing"',
    r"\b(goes|go|going|went) on\b": 'write "resume" or "continue"',
    r"\b(is|are|be|was|were) (told|said)\b": 'write "reports"',
    r"\bparted\b": 'write "split"',
    r"\bstands?\b": 'write "is"',
    r"\bin words\b": "say what the message contains",
    r"\b(CORRECTNESS|RELIABILITY|DESIGN|trap\s\d+|the\sdecks)\b": "refer to nothing outside the repository",
}
PRONOUNS = {
    "each",
    "found",
    "given",
    "said",
    "made",
    "told",
    "these",
    "those",
    "theirs",
    "ours",
    "kept",
    "one",
    "other",
}
Finding = tuple[int, str, str]  # line, rule, text


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each docstring with the line that it starts on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text:
                yield node.body[0].lineno, text


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each string literal of at least two words, docstrings included, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def local_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that are assigned, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def findings(path: Path, *, names: bool) -> list[Finding]:
    """Return the findings in a Python file in the order of lines.

    Args:
        names: Whether to check the names of variables too.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    result: list[Finding] = []
    for line, text in docstrings(tree):
        if match := FIRST_WORDS.match(text):
            result.append((line, "first word", f'docstring begins with "{match.group()}": use a verb or a noun'))
    for line, text in (*texts(tree), *comments(path)):
        for pattern, advice in HABITS.items():
            if match := re.search(pattern, text):
                result.append((line, "habit", f'"{match.group()}": {advice}'))
    for line, name in local_names(tree) if names else ():
        if name in PRONOUNS:
            result.append((line, "name", f"the variable {name}: name its value"))
    return sorted(result)


def main(arguments: list[str]) -> int:
    """Lint the files and folders of the arguments, and return the exit status."""
    count = "--count" in arguments
    roots = [Path(name) for name in arguments if not name.startswith("--")] or [Path("heedful")]
    paths = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    totals: Counter[str] = Counter()
    for path in paths:
        for line, rule, text in findings(path, names="--no-names" not in arguments):
            totals[rule] += 1
            if not count:
                print(f"{path}:{line}: {text}")
    if count:
        print(dict(totals))
    return 1 if totals else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

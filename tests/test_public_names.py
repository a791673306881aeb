"""Every public class and function of the library has a name of its own, and no two modules import each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPEATED_BY_DESIGN = {  # functions that modules of one kind share
    *("read", "write", "size", "body"),  # of families
    *("run", "build_model"),  # of studies
    *("register", "unregister"),  # of families and tasks
    "main",
}
VERBS = {path.stem for path in (ROOT / "heedful" / "cli").glob("*.py")}  # a command is named as the function it calls


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its dotted name."""
    trees = {}
    for path in sorted((ROOT / "heedful").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield each module of the library that a tree imports, at its top, in a function or for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def repeated(kind: type[ast.stmt]) -> dict[str, list[str]]:
    """Map each public name that several modules define at their top to those modules."""
    modules_by_name = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, kind) and not (name := getattr(node, "name", "_")).startswith("_"):
                modules_by_name[name].append(module)
    return {name: places for name, places in modules_by_name.items() if len(places) > 1}


def test_each_class_has_a_name_of_its_own() -> None:
    assert not repeated(ast.ClassDef)


def test_each_function_has_a_name_of_its_own() -> None:
    twice = repeated(ast.FunctionDef)
    assert not {name: places for name, places in twice.items() if name not in REPEATED_BY_DESIGN | VERBS}


def test_no_two_modules_import_each_other() -> None:
    imports = {module: set(imported(tree)) for module, tree in modules().items()}
    pairs = [(a, b) for a, names in imports.items() for b in names if a < b and a in imports.get(b, ())]
    assert not pairs

"""Write the source of the site: the Markdown of docs/, and pages, notebooks and live pages that are made from the code.

usage: python scripts/docs_pages.py FOLDER

`make docs` runs this script, and Sphinx on the folder that it writes. FOLDER-live caches the live pages. Pages in docs/
are plain Markdown; links that leave docs/ are rewritten to the pages of the site that contain their targets.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import live_pages  # noqa: E402

DOCS = ROOT / "docs"
PACKAGE = ROOT / "heedful"
RECORDS = ROOT / "benchmarks" / "results"
EXAMPLES = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples" / "plain").glob("*.py"))]
API = {
    "heedful": "Public names: load and save models, train, predict, look inside",
    "heedful.sklearn": "Estimators with scikit-learn's interface",
    "heedful.nn": "Mathematics on packed tensors",
    "heedful.model": "The Transformer, its heads, models from before it, text generation",
    "heedful.objectives": "From samples to a loss",
    "heedful.tasks": "Tasks that learn, answer and are measured",
    "heedful.train": "The training loop, optimizers, ranks and checkpoints",
    "heedful.infer": "From a model folder to answers",
    "heedful.serve": "The HTTP service",
}
HOUSE = {  # files in the root of the repository, and their pages
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")


def write_pages(folder: Path) -> None:
    """Write the source of the site to the folder; unchanged files keep their time, for a quick build."""
    pages = generated_pages()
    texts = dict(pages)
    for name, target in HOUSE.items():
        texts[target] = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for path in DOCS.rglob("*.md"):
        page = path.relative_to(DOCS)
        texts[page.as_posix()] = _inner_links(path.read_text(encoding="utf-8"), "../" * (len(page.parts) - 1))
    texts["extra/llms.txt"] = llms(texts)
    texts |= {f"notebooks/{name}": text for name, text in notebooks().items()}
    files = {name: text.encode() for name, text in texts.items()}
    files |= {f"pictures/{path.name}": path.read_bytes() for path in (DOCS / "pictures").iterdir()}
    live = live_pages.live_pages(folder.with_name(f"{folder.name}-live"))
    files |= {f"extra/live/{name}": page for name, page in live.items()}
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
    for name, data in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def generated_pages() -> dict[str, str]:
    """Return all pages that are made from the code, by their paths in the site's source."""
    return {
        "cli.md": cli_page(),
        "live.md": live_pages.index_page(),
        **api_pages(),
        **gallery_pages(),
        **record_pages(),
    }


def _inner_links(text: str, up: str) -> str:
    """Rewrite links to records, examples and the files of HOUSE, and link the names of examples.

    Args:
        up: The path from the page to the root of the site, such as "../".
    """
    text = re.sub(r"\]\((?:\.\./)+benchmarks/results/([^)]+\.md)\)", rf"]({up}records/\1)", text)
    text = re.sub(r"\]\((?:\.\./)+benchmarks/results/?\)", f"]({up}records/index.md)", text)
    text = re.sub(r"\]\((?:\.\./)+examples/?\)", f"]({up}gallery.md)", text)
    for name, target in HOUSE.items():
        text = re.sub(rf"\]\((?:\.\./)+{name}\)", f"]({up}{target})", text)
    names = {path.relative_to(ROOT).as_posix(): path for path in EXAMPLES}
    names |= {path.name: path for path in EXAMPLES if path.parent.name == "examples"}

    def link(match: re.Match[str]) -> str:
        path = names.get(match[1])
        return f"[`{match[1]}`]({up}{_gallery_name(path)})" if path else match[0]

    return re.sub(r"(?<!\[)`((?:examples/)?(?:plain/)?\w+\.py)`", link, text)


# Command line


def cli_page() -> str:
    """Return the page with the help of all commands."""
    from click import Context
    from typer.main import get_command

    from heedful.cli import app

    def help_of(command: Any, name: str, parent: Context | None) -> Iterator[str]:
        settings = {**command.context_settings, "terminal_width": 88, "max_content_width": 88}
        context = Context(command, info_name=name, parent=parent, **settings)
        path = context.command_path
        yield f"{'##' if parent else '#'} {path if parent else 'Command line'}\n"
        yield f"```text\n{command.get_help(context).strip()}\n```\n"
        if hasattr(command, "commands"):
            for subcommand_name in command.list_commands(context):
                subcommand = command.get_command(context, subcommand_name)
                if subcommand is not None and not subcommand.hidden:
                    yield from help_of(subcommand, subcommand_name, context)

    return "\n".join(help_of(get_command(app), "heedful", None))


# API


@dataclass
class Module:
    """A module that is read without importing it."""

    name: str
    path: Path
    tree: ast.Module = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        source = self.path.read_text(encoding="utf-8")
        self.tree = ast.parse(source)
        self.lines = source.splitlines()

    @property
    def definitions(self) -> dict[str, ast.stmt]:
        """Public functions and classes, by name."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return {node.name: node for node in self.tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def api_pages() -> dict[str, str]:
    """Return the pages of the public modules, and their index."""
    rows = [f"| [`{name}`](api/{name}.md) | {about} |" for name, about in API.items()]
    contents = "\n".join(f"api/{name}" for name in API)
    index = "# API\n\nPublic modules, from their docstrings. Names that begin with `_` are private.\n\n"
    index += (
        "| module | content |\n|---|---|\n" + "\n".join(rows) + "\n\n```{toctree}\n:hidden:\n\n" + contents + "\n```\n"
    )
    pages = {"api.md": index}
    for name, about in API.items():
        parts = [f"# {name}\n\n{about}.\n"]
        if name == "heedful":
            parts += _public_names()
        else:
            for module in _modules(name):
                definitions = [_definition(module, node, module.name) for node in module.definitions.values()]
                if not any(definitions):
                    continue
                if module.name != name:
                    parts.append(f"## {module.name}\n")
                parts += [f"{_prose(ast.get_docstring(module.tree))}\n", *definitions]
        pages[f"api/{name}.md"] = "\n".join(parts)
    return pages


def _modules(name: str) -> Iterator[Module]:
    """Yield a module, or the public modules of a package."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    if not path.is_dir():
        yield Module(name, path.with_suffix(".py"))
        return
    for file in sorted(path.rglob("*.py")):
        parts = [part for part in file.relative_to(PACKAGE.parent).with_suffix("").parts if part != "__init__"]
        if not any(part.startswith("_") for part in parts):
            yield Module(".".join(parts), file)


def _public_names() -> Iterator[str]:
    """Yield the definitions of the names of `heedful`, from the modules that define them."""
    import heedful

    for name in sorted(heedful._MODULES, key=str.lower):
        definition = _find(heedful._MODULES[name], name)
        if definition is not None:
            yield _definition(*definition, owner="heedful")


def _find(module_name: str, name: str) -> tuple[Module, ast.stmt] | None:
    """Follow imports to the definition of a name; return its module and node, or None if there is no definition."""
    path = PACKAGE.joinpath(*module_name.split(".")[1:])
    module = Module(module_name, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    if name in module.definitions:
        return module, module.definitions[name]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("heedful"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _find(node.module, alias.name)
    return None


def _definition(module: Module, node: ast.stmt, owner: str) -> str:
    """Return a function or a class as a directive of Sphinx's Python domain, or "" if it has no docstring."""
    if isinstance(node, ast.ClassDef):
        return _class(module, node, owner)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    doc = ast.get_docstring(node)
    return _directive("function", f"{owner}.{node.name}{_signature(node)}", _prose(doc)) if doc else ""


def _class(module: Module, node: ast.ClassDef, owner: str) -> str:
    """Return a class with its public properties and methods as a directive, or "" if it has no docstring."""
    doc = ast.get_docstring(node)
    if not doc:
        return ""
    body, arguments = [_prose(doc)], ""
    functions = [member for member in node.body if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)]
    init = next((function for function in functions if function.name == "__init__"), None)
    fields = list(_fields(module, node))
    if init is not None:
        arguments = _signature(init, skip=1, result=False)
        if text := ast.get_docstring(init):
            body.append(_prose(text))
    elif fields:
        body.append("\n".join(fields))
    for member in functions:
        text = ast.get_docstring(member)
        if member.name.startswith("_") or not text:
            continue
        decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
        if any(decorator.split(".")[-1] in ("property", "cached_property") for decorator in decorators):
            head, kind = member.name, "property"
        else:
            head, kind = member.name + _signature(member, skip=int("staticmethod" not in decorators)), "method"
        body.append(_directive(kind, head, _prose(text)))
    return _directive("class", f"{owner}.{node.name}{arguments}", "\n\n".join(body))


def _fields(module: Module, node: ast.ClassDef) -> Iterator[str]:
    """Yield the public annotated fields of a class as list items, with their defaults and comments."""
    for member in node.body:
        if (
            isinstance(member, ast.AnnAssign)
            and isinstance(member.target, ast.Name)
            and not member.target.id.startswith("_")
        ):
            rest_of_line = module.lines[(member.end_lineno or member.lineno) - 1][member.end_col_offset or 0 :]
            comment = rest_of_line.partition("#")[2].strip() if rest_of_line.lstrip().startswith("#") else ""
            comment = "" if comment.startswith(("type:", "noqa")) else comment
            value = f" = {ast.unparse(member.value)}" if member.value else ""
            code = f"`{member.target.id}: {ast.unparse(member.annotation)}{value}`"
            yield f"- {code}{': ' + _escape(comment) if comment else ''}"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, skip: int = 0, result: bool = True) -> str:
    """Return the signature of a function.

    Args:
        skip: How many parameters to leave out, such as self.
        result: Whether to add the type of the result.
    """
    args = node.args
    copy = ast.arguments(
        posonlyargs=args.posonlyargs[skip:],
        args=args.args[max(0, skip - len(args.posonlyargs)) :],
        vararg=args.vararg,
        kwonlyargs=args.kwonlyargs,
        kw_defaults=args.kw_defaults,
        kwarg=args.kwarg,
        defaults=args.defaults,
    )
    back = f" -> {ast.unparse(node.returns)}" if result and node.returns is not None else ""
    return f"({ast.unparse(copy)}){back}"


def _directive(kind: str, head: str, body: str) -> str:
    """Return a directive whose fence is longer than those of the directives in its body."""
    fence = ":" * (3 + max((len(run) for run in re.findall(r"^:{3,}", body, re.MULTILINE)), default=0))
    return f"{fence}{{py:{kind}}} {head}\n\n{body}\n{fence}\n"


def _prose(doc: str | None) -> str:
    """Return a docstring as Markdown: sections become bold headings over lists, doctests become code."""
    lines, out = (doc or "").splitlines(), []
    index = 0
    while index < len(lines):
        line = lines[index]
        if section := SECTION.match(line):
            block = _indented(lines, index + 1)
            index += 1 + len(block)
            out += ["", f"**{section[1]}**", "", *_items(textwrap.dedent("\n".join(block)).splitlines()), ""]
        elif line.startswith(">>>"):
            code = []
            while index < len(lines) and lines[index].strip():
                code.append(lines[index])
                index += 1
            out += ["", "```pycon", *code, "```", ""]
        else:
            out.append(line if line.startswith("    ") else _escape(line))
            index += 1
    return "\n".join(out).strip()


def _indented(lines: list[str], start: int) -> list[str]:
    """Return the lines from a start that are indented or empty."""
    block = []
    for line in lines[start:]:
        if line.strip() and not line.startswith(" "):
            break
        block.append(line)
    return block


def _items(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a section, in which each "name: text" becomes a list item."""
    for line in lines:
        if item := re.match(r"^(\*{0,2}[\w.]+(?:, \*{0,2}\w+)*): (.*)$", line):
            yield f"- `{item[1]}`: {_escape(item[2])}"
        else:
            yield _escape(line)


def _escape(text: str) -> str:
    """Escape < and * outside code, which would begin HTML and emphasis."""
    parts = re.split(r"(`+[^`]*`+)", text)
    return "".join(part if part.startswith("`") else part.replace("<", r"\<").replace("*", r"\*") for part in parts)


# Examples


def _gallery_name(path: Path) -> str:
    """Return the page of an example."""
    return f"gallery/{'plain-' if path.parent.name == 'plain' else ''}{path.stem}.md"


def _notebook_name(path: Path) -> str:
    """Return the file name of an example's notebook."""
    return Path(_gallery_name(path)).stem + ".ipynb"


def gallery_pages() -> dict[str, str]:
    """Return a page for each example, with its code, and their index."""
    pages: dict[str, str] = {}
    tables: dict[str, list[str]] = {"examples": [], "plain": []}
    for path in EXAMPLES:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        doc = ast.get_docstring(tree) or ""
        title, _, rest = doc.partition("\n\n")
        about = " ".join(title.split()).rstrip(".")
        title, _, more = about.partition(":")
        title, more = (title, more.strip()) if len(title) < 60 else (about, "")
        name = path.relative_to(ROOT).as_posix()
        code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
        rest = re.sub(r"^(Idea|Code|Expect): ", r"\n**\1.** ", _escape(rest), flags=re.MULTILINE).strip()
        pages[_gallery_name(path)] = (
            f"# {_escape(title)}\n\n{_escape(more[:1].upper() + more[1:] + '.') if more else ''}\n\n{rest}\n\n"
            f"Run it with `python {name}`, or {{download}}`as a notebook <../notebooks/{_notebook_name(path)}>`.\n\n"
            f"```python\n{code}\n```\n"
        )
        tables[path.parent.name].append(f"| [`{path.name}`]({_gallery_name(path)}) | {_escape(about)} |")
    index = (
        "# Examples\n\nPrograms of a clone's folder `examples`. Each page has the code, and the same code as a notebook"
        " to download; open it with Jupyter in an environment where Heedful is installed. D0 to D4 are lectures of the"
        " [course](course/README.md).\n\n## With the library\n\n"
        "| program | what it shows |\n|---|---|\n" + "\n".join(tables["examples"]) + "\n\n## In bare PyTorch\n\n"
        "Each ends by comparing its result with the library's.\n\n| program | what it shows |\n|---|---|\n"
        + "\n".join(tables["plain"])
        + "\n\n```{toctree}\n:hidden:\n\n"
        + "\n".join(_gallery_name(path).removesuffix(".md") for path in EXAMPLES)
        + "\n```\n"
    )
    return {"gallery.md": index, **pages}


def notebook_source(path: Path) -> str:
    """Return an example as cells in the percent format.

    The docstring becomes text, and the `if __name__ == "__main__"` at the end becomes a cell without the condition.
    """
    source = path.read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    cells = ["# %% [markdown]\n" + textwrap.indent(ast.get_docstring(tree) or "", "# ", lambda line: True)]
    nodes = tree.body[1:]
    start, group = nodes[0].lineno, None
    for index, node in enumerate(nodes):
        is_guard = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        kind = "guard" if is_guard else "def" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "rest"
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
        if group is not None and (kind != group or kind != "rest"):
            cells.append("# %%\n" + "\n".join(lines[start - 1 : first - 1]).strip())
            start = first
        group = kind
        if is_guard:
            assert isinstance(node, ast.If) and index == len(nodes) - 1, path
            body = "\n".join(lines[node.body[0].lineno - 1 : node.end_lineno])
            cells.append("# %%\n" + textwrap.dedent(body))
    if group != "guard":
        cells.append("# %%\n" + "\n".join(lines[start - 1 :]).strip())
    return "\n\n".join(cells) + "\n"


def notebooks() -> dict[str, str]:
    """Return all examples as notebooks, by file name."""
    import jupytext  # type: ignore[import-untyped]

    texts = {}
    for path in EXAMPLES:
        notebook = jupytext.reads(notebook_source(path), fmt="py:percent")
        for index, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{index}"  # jupytext would draw a random id
        texts[_notebook_name(path)] = jupytext.writes(notebook, fmt="ipynb")
    return texts


# Records


def record_pages() -> dict[str, str]:
    """Return the pages of the records of measurements, and their index."""
    files = sorted(RECORDS.glob("*.md"))
    pages, rows = {}, []
    for path in files:
        text = path.read_text(encoding="utf-8")
        title = next((line[2:] for line in text.splitlines() if line.startswith("# ")), None)
        if title is None:
            text = f"# {path.stem}\n\n{text}"
        pages[f"records/{path.name}"] = re.sub(r"\]\(([\w.-]+\.json)\)", r" \1", text)
        rows.append(f"| [{path.stem}]({path.name}) | {title or ''} |")
    contents = "\n".join(path.stem for path in files)
    index = (
        "# Records\n\nMeasurements that pages cite, as the benchmarks of a clone's folder `benchmarks` wrote them.\n\n"
    )
    index += (
        "| record | content |\n|---|---|\n" + "\n".join(rows) + "\n\n```{toctree}\n:hidden:\n\n" + contents + "\n```\n"
    )
    return {"records/index.md": index, **pages}


# For language models


def groups() -> dict[str, list[str]]:
    """Return the pages of each group of docs/index.md, in order."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {}
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        caption = re.search(r"^:caption: (.+)$", block, re.MULTILINE)
        assert caption, block
        pages[caption[1]] = [line for line in block.splitlines() if line and not line.startswith(":")]
    return pages


def llms(pages: dict[str, str]) -> str:
    """Return the text of llms.txt: each page of the site with its title and the first sentence of its text."""
    about = "Pre-train, fine-tune, distil, explain and serve attention models in Python or on the command line."
    parts = [f"# Heedful\n\n> {about}\n"]
    for caption, names in groups().items():
        parts.append(f"## {caption}\n")
        for name in names:
            text = pages[f"{name}.md"]
            title = re.search(r"^# (.+)$", text, re.MULTILINE)
            plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
            prose = (" ".join(block.split()) for block in re.split(r"\n\s*\n", plain) if re.match(r"[A-Z`\[]", block))
            sentence = re.split(r"(?<=[.?])\s", next(prose, ""))[0].rstrip(":")
            sentence = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", sentence)
            parts.append(f"- [{title[1] if title else name}]({name}.html){': ' + sentence if sentence else ''}")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_pages(Path(sys.argv[1]))

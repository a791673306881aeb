"""The documentation site has every page of docs/, and its generated pages agree with the code."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "docs_pages.py"
TOOLS = ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "jupytext")  # the extra `docs`
missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
needs_tools = pytest.mark.skipif(bool(missing), reason=f"needs heedful[docs]; missing: {', '.join(missing)}")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("docs_pages", SCRIPT)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(script: Any) -> dict[str, str]:
    generated: dict[str, str] = script.generated_pages()
    return generated


def test_every_page_is_in_one_group(script: Any, pages: dict[str, str]) -> None:
    groups = script.groups()
    assert list(groups) == ["Start", "Tasks", "Train", "Serve", "Understand", "Reference"]
    named = Counter(name for names in groups.values() for name in names)
    written = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    generated = {name.removesuffix(".md") for name in pages if "/" not in name or name.endswith("/index.md")}
    house = {name.removesuffix(".md") for name in script.HOUSE.values()}
    assert set(named.values()) == {1}
    assert set(named) == (written - {"index"}) | generated | house
    assert not set(named) & {"search", "genindex", "py-modindex"}, "Sphinx writes pages of these names itself"


def test_the_command_line_page_has_every_verb(pages: dict[str, str]) -> None:
    from typer.main import get_command

    from heedful.cli import app

    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for name in (name for name, verb in verbs.items() if not verb.hidden):
        assert f"\n## heedful {name}\n" in pages["cli.md"], name


def test_the_api_pages_have_the_public_names_and_their_docstrings(script: Any, pages: dict[str, str]) -> None:
    import heedful

    for name in heedful._MODULES:
        assert re.search(rf"\{{py:(class|function)\}} heedful\.{name}\b", pages["api/heedful.md"]), name
    for name in script.API:
        assert len(pages[f"api/{name}.md"].split()) > 100, name


def test_the_gallery_and_the_records_are_complete(script: Any, pages: dict[str, str]) -> None:
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "plain").glob("*.py")]
    assert sum(name.startswith("gallery/") for name in pages) == len(examples)
    records = list((ROOT / "benchmarks" / "results").glob("*.md"))
    assert sum(name.startswith("records/") for name in pages) == len(records) + 1


def test_notebooks_hold_the_whole_example(script: Any) -> None:
    for path in script.EXAMPLES:
        cells = re.split(r"^# %%.*\n", script.notebook_source(path), flags=re.MULTILINE)[2:]
        body = ast.parse(path.read_text(encoding="utf-8")).body[1:]
        if isinstance(body[-1], ast.If) and "__main__" in ast.unparse(body[-1].test):
            body[-1:] = body[-1].body
        statements = [ast.unparse(node) for node in ast.parse("\n".join(cells)).body]
        assert statements == [ast.unparse(node) for node in body], path.name


def test_live_pages_are_made_again_only_when_their_sources_change(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, written = script.live_pages, []

    def write(folder: Path) -> None:
        written.append(folder)
        for name in live.PAGES:
            (folder / name).write_text(name)

    monkeypatch.setattr(live, "_write", write)
    for digest, count in (("a", 1), ("a", 1), ("b", 2)):
        monkeypatch.setattr(live, "_digest", lambda digest=digest: digest)
        assert live.live_pages(tmp_path / "live") == {name: name.encode() for name in live.PAGES}
        assert len(written) == count
    assert re.findall(r'href="live/([\w.]+)"', live.index_page()) == list(live.PAGES)


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    source, site = tmp_path / "docs", tmp_path / "site"
    subprocess.run([sys.executable, SCRIPT, source], check=True, cwd=ROOT)
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-c",
        ROOT / "docs",
        source,
        site,
    ]
    built = subprocess.run([*sphinx, "-D", f"html_extra_path={source / 'extra'}"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (site / "llms.txt").read_text(encoding="utf-8").startswith("# Heedful\n")
    assert (site / "searchindex.js").exists()
    index = (site / "live.html").read_text(encoding="utf-8")
    for name in ("sentiment", "tags", "explorer"):
        assert f'<a href="live/{name}.html">' in index
        assert "'wasm-unsafe-eval'" in (site / "live" / f"{name}.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert not loaded, (page.name, loaded)


def strings_of(constant: object) -> Iterator[str]:
    """Yield the strings in a constant of compiled code, which may be code itself."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType | tuple | frozenset):
        for inner in constant.co_consts if isinstance(constant, CodeType) else constant:
            yield from strings_of(inner)


def test_troubleshooting_quotes_messages_of_the_program() -> None:
    """The longest text between words in capitals, which are placeholders, is in a string of the code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    strings = {
        text
        for path in (ROOT / "heedful").rglob("*.py")
        for text in strings_of(compile(path.read_text(encoding="utf-8"), path, "exec", dont_inherit=True))
    }
    assert len(messages) > 15
    for message in messages:
        fixed_text = max(re.split(r"\b[A-Z]+\b", message), key=len).strip()
        assert len(fixed_text) > 9 and any(fixed_text in text for text in strings), message

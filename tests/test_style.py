"""The rules of style that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # scripts/check runs them too
ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "heedful").rglob("*.py"))
FAMILY_NAMES = {
    *("bert", "roberta", "distilbert", "albert", "electra", "xlnet"),
    *("deberta", "mpnet", "nomic", "gte", "jina", "t5", "gpt2", "gpt", "modernbert", "camembert", "xlm"),
    *("bart", "mbart", "marian"),
    *("eurobert", "llama", "qwen", "qwen3", "smollm"),
}
LIBRARY_NAMES = re.compile(  # what other libraries call their classes and files is not ours to rename
    r"\b((Bert|Roberta)(Normalizer|PreTokenizer|Processing)|sentence_bert_config\.json)\b"
)
METHODS = {  # values of settings that name a published method, and the help that lists them
    "train/settings.py": {"bert"},
    "runs/distil/settings.py": {"distilbert"},
    "cli/distil.py": {"Loss: logits, distilbert, minilm, minilmv2 or tinybert."},
}
PRIVATE_PATH = re.compile(r"(?<![\w.}])/(?:work|home|root|Users)/\w")


def words(text: str) -> set[str]:
    """The lower-case words of an identifier or a text: parts between underscores and between capitals."""
    plain = re.findall(r"[A-Za-z0-9]+", LIBRARY_NAMES.sub(" ", text))
    camel = [part for word in plain for part in re.findall(r"[A-Z]+\d+(?![a-z])|[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])", word)]
    return {word.lower() for word in (*plain, *camel)}


def names_and_literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every identifier and every text that is no docstring, with its line."""
    remarks = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield line, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name
            case ast.ImportFrom(module=str(name)) | ast.MatchAs(name=str(name)) | ast.keyword(arg=str(name)):
                yield line, name
            case ast.Constant(value=str(text)) if id(node) not in remarks:
                yield line, text
        if isinstance(node, ast.alias) and node.asname:
            yield line, node.asname


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 600, "split the file by idea"
    if path.parent.name != "families":
        methods = METHODS.get(str(path.relative_to(ROOT / "heedful")), set())
        named = [(line, name) for line, name in names_and_literals(tree) if name not in methods]
        matches = [(line, name) for line, name in named if words(name) & FAMILY_NAMES]
        assert not matches, "families are data: their names stay in heedful/families"
    elif path.name not in ("config_reader.py", "family.py", "family_facts.py", "names.py"):
        assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)], "families are data"


def test_no_private_paths() -> None:
    folders = ["heedful", "tests", "scripts", "examples", "benchmarks", "docs", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    names_found = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore") if path.stat().st_size < 2_000_000 else ""
        if path.suffix not in (".pyc", ".png") and (match := PRIVATE_PATH.search(text)):
            names_found.append(f"{path.relative_to(ROOT)}: {match.group()}")
    assert not names_found


def test_the_checks_see_what_they_should() -> None:
    code = 'def load_bert(x): """bert"""; GPT2Model.t5 = f"roberta-{x}"\nfrom a.xlm import BertNormalizer, albert as b'
    names_found = {name for _, name in names_and_literals(ast.parse(code)) if words(name) & FAMILY_NAMES}
    assert names_found == {"load_bert", "GPT2Model", "t5", "roberta-", "a.xlm", "albert"}
    assert PRIVATE_PATH.search('open("/home' + '/someone/x")')
    assert not PRIVATE_PATH.search("https://example.org/home/page and model/work/x")

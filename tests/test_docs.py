"""Every snippet and command of the README and the docs runs, in order, in one folder for each page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import heedful
from heedful.cli import main
from heedful.runs import timing

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EPOCHS = 0.3  # of fine-tuning, instead of those that the pages' commands make
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "ROUNDS", 5)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    usual = heedful.finetune
    shorter = (f"train.length.count={EPOCHS}",)
    monkeypatch.setattr(heedful, "finetune", lambda *given, **more: usual(*given, assignments=shorter, **more))
    Path("corpus.txt").write_text(
        "".join(f"Rain fell on harbour {n}.\nBoat {n} came home before dark.\n\n" for n in range(60))
    )
    names: dict[str, object] = {"__name__": "snippet"}
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert language in ("python", "sh"), f"a block of {language} is not run by any test"
        if language == "python":
            exec(compile(code, page.name, "exec"), names)
        else:
            for line in code.splitlines():
                run(shlex.split(line, comments=True))


def run(words: list[str]) -> None:
    """Run a heedful command; of make, only see that the target exists."""
    if words and words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words:
        assert words[0] == "heedful", words
        length = "train.length.count="
        long = words[1] == "finetune" and not any(word.startswith(length) for word in words)
        shorter = ["--set", f"{length}{EPOCHS}"] if long else []
        with pytest.raises(SystemExit) as ended:  # in this process: another one would import PyTorch for each command
            main(words[1:] + shorter)
        assert not ended.value.code, words


def test_links_lead_somewhere() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)

"""Every snippet and command of the README and the docs runs, in order, in a folder per page; what they name exists."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from click import Context
from typer.core import TyperGroup
from typer.main import get_command

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import BundleConfig, create
from heedful.checkpoint.new_head import with_head
from heedful.cli import app, main
from heedful.data import DataSettings
from heedful.runs.finetune import training_time as expected
from heedful.runs.finetune.init_settings import TransformerInit
from heedful.runs.finetune.seq2seq import transformer_config
from heedful.study import STUDIES
from heedful.tokenizer import TokenizerSettings, train_tokenizer

ROOT = Path(__file__).parents[1]
COURSE = sorted((ROOT / "docs" / "course").glob("d?.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("*/*.md"))]
EPOCHS = 0.1  # of fine-tuning, instead of the epochs that the pages' commands train
REPLACED_WORDS = {"NAME@REVISION": BUNDLED_ENCODER, "intents/": "intents"}  # of commands
# a fenced block, with its language, or an indented command or shell variable
BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$|^ {4}((?:heedful |\w+=").*?[^\\\n])$', re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(expected, "TIMED_STEPS", 1)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    finetune = heedful.finetune
    monkeypatch.setattr(heedful, "finetune", lambda *args, **kwargs: finetune(*args, **(kwargs | {"epochs": EPOCHS})))
    Path("corpus.txt").write_text(
        "".join(f"Rain fell on harbour {n}.\nBoat {n} came home before dark.\n\n" for n in range(60))
    )
    names: dict[str, object] = {"__name__": "snippet"}
    for language, code, indented in BLOCK.findall(page.read_text(encoding="utf-8")):
        if indented:
            check_indented_command(indented, monkeypatch)
            continue
        assert language in ("python", "sh"), f"a block of {language} is not run by any test"
        if language == "python":
            exec(compile(code, page.name, "exec"), names)
        else:
            for line in code.splitlines():
                run(shlex.split(line, comments=True))


def run(words: list[str]) -> None:
    """Run a command of heedful; for make, check that the target exists; ignore the activation of an environment."""
    if words and words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words and words != [".", ".venv/bin/activate"]:
        assert words[0] == "heedful", words
        durations = ("--epochs", "--max-steps", "--time-budget", "--method")  # a method decides the number of epochs
        trains_long = words[1] == "finetune" and not any(word.startswith(durations) for word in words)
        options = ["--epochs", str(EPOCHS)] if trains_long else []
        with pytest.raises(SystemExit) as stop:  # in this process, since another one would have to import PyTorch
            main(words[1:] + options)
        assert not stop.value.code, words


def check_indented_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a command that is not in a fenced block; it may need files that the page does not make.

    Fine-tuning is a dry run on small files; a study with --toy has 80 training texts; of other commands, only the
    options are parsed. A shell variable is set in the environment.
    """
    if (name := command.partition("=")[0]).isidentifier():
        monkeypatch.setenv(name, command.partition("=")[2].strip('"'))
        return
    words = shlex.split(os.path.expandvars(command.replace("\\\n", " ")), comments=True)
    words = [REPLACED_WORDS.get(word, word) for word in words]
    if words[1] == "finetune":
        for word in words:
            make_small_substitute(Path(word))
        index = words.index("--nproc") if "--nproc" in words else len(words)
        run([*words[:index], *words[index + 2 :], "--dry-run"])
    elif "--toy" in words:
        run([*words[: words.index("--train")], "--train", "80"])
    else:
        group = get_command(app)
        assert isinstance(group, TyperGroup)
        _, verb, options = group.resolve_command(Context(group), words[1:])
        assert verb is not None
        verb.make_context(words[1], options)


def make_small_substitute(path: Path) -> None:
    """Make a small file or folder with this path, if it does not exist and is one that the pages' commands name."""
    texts = [(f"It was {a} . I call it {a} and {b} .", b) for a in ("good", "fine", "bad") for b in "abcdefgh"]
    if path.exists():
        return
    if path == Path("intents"):
        run(["heedful", "recipe", "cp", "intents"])
    elif path.name == "t5-small":
        tokenizer = train_tokenizer([text for text, _ in texts], TokenizerSettings(algorithm="unigram", vocab_size=60))
        model = transformer_config(TransformerInit(layers=1, width=16, heads=2, inner=16), tokenizer.size)
        heedful.save(
            with_head(create(BundleConfig(family="heedful", model=model), tokenizer, seed=0), "language_model"), path
        )
    elif path.is_relative_to("path/to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(ROOT / "heedful" / "assets" / BUNDLED_ENCODER)
    elif path.suffix == ".csv":
        names = ("source", "target") if path.stem == "pairs" else ("text", "label")
        path.write_text("".join(f"{a},{b}\n" for a, b in (names, *texts)))
    elif "=" in path.name and path.name.endswith("100d.txt"):
        numbers = " ".join(["0.5"] * 100)
        Path(path.name.partition("=")[2]).write_text("".join(f"{word} {numbers}\n" for word in ("it", "good", "bad")))


def test_the_table_of_data_settings_has_all_fields() -> None:
    table = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Settings")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields(DataSettings)]


def test_the_comparison_counts_the_lines_of_the_models() -> None:
    match = re.search(r"about ([\d,]+)\s+lines", (ROOT / "docs/comparison.md").read_text(encoding="utf-8"))
    files = [file for folder in ("nn", "model", "families") for file in (ROOT / "heedful" / folder).rglob("*.py")]
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    assert match and abs(int(match[1].replace(",", "")) - lines) < 0.02 * lines


def test_named_records_exist() -> None:
    """Each measurement record that the docs or other records name exists in benchmarks/results."""
    records = ROOT / "benchmarks" / "results"
    for page in (*PAGES, *records.glob("shares*.md")):
        for name in re.findall(r"[\w.-]+-20\d\d-\d\d-\d\d\b", page.read_text(encoding="utf-8")):
            assert list(records.rglob(f"{name}.*")), (page.name, name)


def test_the_road_names_existing_files_and_code() -> None:
    lines = (ROOT / "docs" / "road.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| ") and "| decks |" not in line]
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "heedful").rglob("*.py"))
    assert len(rows) > 40
    for _, decks, code, example, where in rows:
        assert re.fullmatch(r" (all|D[0-4](, D[0-4])*) ", decks), decks
        for name in re.findall(r"`([^`]+)`", code):
            exists = (ROOT / "heedful" / name).exists() if "/" in name else re.search(rf"\b{name}\b", source)
            assert exists or name.startswith("heedful "), name
        assert all((ROOT / "examples" / name).exists() for name in re.findall(r"`([^`]+)`", example)), example
        assert all(name in STUDIES or name.startswith("heedful ") for name in re.findall(r"`([^`]+)`", where)), where


@pytest.mark.parametrize("page", COURSE, ids=lambda page: f"course-{page.name}")
def test_course_pages_name_existing_files_and_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert 1200 <= len(text.split()) <= 3300 and text.count("assert ") >= 3
    for name in re.findall(r"`([\w.]+(?:/[\w.]+)*(?:\.py|/))`", text):
        assert any((ROOT / start / name).exists() for start in ("heedful", "")), name
    for names, file in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", text):
        source = (ROOT / "heedful" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"\b{name}\b", source), (name, file)
    for study in re.findall(r"heedful study (\w+)", text):
        assert study in STUDIES, study


def test_links_have_targets() -> None:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_sections_of_the_course_that_are_linked_exist() -> None:
    for page in (*COURSE, COURSE[0].with_name("questions.md"), ROOT / "docs" / "glossary.md"):
        for target, section in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            text = (page.parent / target if target else page).read_text(encoding="utf-8")
            headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
            slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert section in slugs, (page.name, target, section)

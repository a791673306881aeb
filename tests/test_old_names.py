"""No file has a name from before the first release: of settings, flags, keys of JSON, values, routes or variables."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = """
    data.dev data.longest
    fit.behind fit.checkpoints fit.evaluate fit.keep_state fit.save_minutes
    corpus.column corpus.documents corpus.duplicates corpus.shard corpus.shortest corpus.similarity
    deadlines.body deadlines.drain deadlines.headers deadlines.idle deadlines.linger deadlines.longest
    deadlines.request deadlines.write
    limits.batch_tokens limits.body limits.candidates limits.characters limits.connections limits.headers limits.inputs
    limits.queued_characters limits.queued_tokens limits.readers limits.received limits.requests limits.tokens
    limits.unsent limits.weights limits.written
    loss.hard loss.soft more.best more.model more.rate more.times outputs.keep outputs.precision outputs.top
    objective.choose objective.mean objective.part objective.rate objective.short objective.versions objective.weight
    model.start start.classic start.layers start.model start.pieces start.redraw start.revision start.steps
    start.transformer start.vocabulary start.width start.words
    student.steps student.take student.words.vocabulary
    task.beams task.main task.most task.negatives task.smoothing task.threshold task.weights
    tokenizer.kind
    vocabulary.alphabet vocabulary.characters vocabulary.kind vocabulary.max_length vocabulary.sentinels
    vocabulary.special vocabulary.vocabulary
    train.length train.length.kind train.length.count fit.keep
    train.batch train.halve train.optimiser train.recompute train.schedule.floor train.schedule.warmup train.shard
    train.skip train.sums train.tokens
    optimiser.betas optimiser.bias_correction optimiser.clip optimiser.decay optimiser.eps optimiser.layer_decay
    optimiser.rate schedule.floor schedule.warmup
"""
TABLES = (
    "vocabulary start start.classic start.transformer start.words start.pieces train.optimiser deadlines more outputs"
)
FLAGS = "--bad-rows --beams --for --keep --keep-state --most --out --set --under"
WORDS = "held_tokens skip_bad_rows keep_state soft_loss hard_loss HEEDFUL_PATIENCE HEEDFUL_MEASURE"
VALUES = "google extract rewrite taught masked+next masked+order calibrated squared"
KEYS = "badness sooner faster between"
ROUTES = "/answer /fill /follows /choose /tag"
VERBS = "extract choose rewrite"
LOSSES = "soft triple relations"
HEADS = "classes tokens span choice next masked"
PROBLEMS = "single multiple"
KEYWORDS = "watch told tell but among"  # of Python functions
CLASSES = "Watch"
REASONS = "asked patience done"
LEFT_OUT = {  # files that may have old names, by the beginning of their path
    "benchmarks/results/": "records of measurements, with the commands of their day",
    "scripts/compare/": "runs the commit of before the renames",
    "benchmarks/checkouts.py": "runs the command line of before the renames",
    "tests/test_compare_trees.py": "maps of old names to new ones",
    "CHANGELOG.md": "may say what something was called",
    "heedful/assets/heedful-mini-en/tokenizer.json": "words of a vocabulary",
    "tests/test_old_names.py": "this list",
}
ALLOWED = {  # what looks like an old name in one file, and what it is there
    ("benchmarks/", "--out"): "flag of the benchmarks' own scripts",
    ("heedful/cli/settings_command.py", "--set"): "its error says how a setting is written",
    ("tests/cli/test_cli_settings.py", "--set"): "the test of that error",
    ("tests/runs/finetune/test_finetune_settings.py", "train.optimiser"): "a misspelt path that is answered",
    ("tests/runs/finetune/test_finetune.py", "task.weights"): "an attribute of a Task",
    ("heedful/runs/finetune/few_labels.py", "task.weights"): "an attribute of a Task",
    ("", "corpus.documents"): "an attribute of a Corpus",
    ("", "model.start"): "an attribute of a ModelConfig",
}


FORMS = (  # old names, and patterns of what is before and after them
    (SETTINGS, r"(?<![\w.])(?:pretrain\.)?", r"(?![\w(])"),
    (TABLES, r"^\[(?:pretrain\.)?", r"\]"),
    (FLAGS, r"(?<![\w-])", r"(?![\w-])"),
    (WORDS, r"(?<!\w)", r"(?!\w)"),
    (f"{VALUES} {KEYS} {ROUTES}", "[\"'`]", "[\"'`]"),
    (VERBS, r"finetune[\"',]* +[\"']?", r"(?![\w-])"),
    (LOSSES, r"--loss[= ]", r"(?!\w)"),
    (HEADS, r"(?:\bhead=[\"']|--head-kind[= ])", r"(?!\w)"),
    (PROBLEMS, r"problem(?:_type)?[\"']?\]?(?: ?=?= ?|: )[\"']", r"[\"']"),
    (KEYWORDS, r"(?<=[(, ])", r"=(?![= ])"),
    (CLASSES, r"(?<![\w.])", r"(?=[\]),:(]| \|)"),
    (REASONS, r"(?:stop_reason|why)[\"']?\]?(?: ?[=!]= ?|=)[\"']", r"[\"']"),
)


def found(text: str) -> list[tuple[int, str]]:
    """Return the line numbers and the old names that a text has."""
    lines = []
    for names, before, after in FORMS:
        if words := [re.escape(word) for word in names.split() if word in text]:
            pattern = f"{before}({'|'.join(sorted(words, key=len, reverse=True))}){after}"
            matches = re.finditer(pattern, text, re.MULTILINE)
            lines += [(text.count("\n", 0, match.start()) + 1, match[1]) for match in matches]
    return lines


def test_no_old_name_is_left() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout, whose files it reads")
    left, used = list[str](), set[tuple[str, str]]()
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if name.startswith(tuple(LEFT_OUT)) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for line, word in found(text):
            reasons = {key for key in ALLOWED if name.startswith(key[0]) and key[1] == word}
            used |= reasons
            if not reasons:
                left.append(f"{name}:{line}: {word}")
    assert not left, "\n".join(left)
    assert used == set(ALLOWED), "each exception is needed"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("heedful finetune classify a.csv --train.batch=8", "train.batch"),
        ('"pretrain.train.optimiser.rate": 1', "train.optimiser"),
        ("[start.classic]\nkind = 1", "start.classic"),
        ("heedful evaluate run --bad-rows skip", "--bad-rows"),
        ('row["badness"]', "badness"),
        ("POST `/fill`", "/fill"),
        ("heedful finetune choose a.csv", "choose"),
        ("heedful pretrain a.txt vocabulary.vocabulary=400", "vocabulary.vocabulary"),
        ('load(folder, head="masked")', "masked"),
        ('"problem_type": "single"', "single"),
        ("fit(trainer, watch=None)", "watch"),
        ("class Progress(Watch):", "Watch"),
        ('assert done.why == "asked"', "asked"),
        ('line["soft_loss"]', "soft_loss"),
    ],
)
def test_an_old_name_is_found(text: str, name: str) -> None:
    assert {word for _, word in found(text)} == {name}


@pytest.mark.parametrize(
    "text",
    [
        "train.batch_size",
        "--output run",
        "--keep-checkpoints",
        "[starting]",
        "trainer.batch(8)",
        "a choose b",
        "finetune qa",
        'load(folder, head="masked_lm")',
        '"problem_type": "single_label_classification"',
        "Watch what it does. const told = 1",
        'end.stop_reason == "completed"',
    ],
)
def test_a_current_name_is_not_reported(text: str) -> None:
    assert not found(text)

"""Settings as flags and as NAME=VALUE arguments, short flags for common settings, and names of other libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from heedful.cli import app, main
from heedful.cli.settings_command import SettingsCommand, context_assignments
from heedful.cli.verb_group import SECTIONS, VERB_ADVICE, VERB_ALIASES
from heedful.errors import HeedfulError, SettingError
from heedful.runs.finetune.settings import finetune_defaults
from heedful.runs.overrides import Overrides, find_setting
from heedful.runs.pretrain.settings import pretrain_defaults
from heedful.serve.settings import ServeSettings
from heedful.settings import from_file

GROUP: Any = typer.main.get_command(app)
TRAINING = ("finetune", "pretrain", "distil")
REQUIRED = {"finetune": ("classify", "a.csv"), "pretrain": ("a.txt",), "distil": ("teacher", "a.csv")}


def parse(verb: str, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """Parse the arguments of a command; return the settings among them, as NAME=VALUE, and the other parameters."""
    context = GROUP.commands[verb].make_context(verb, [*REQUIRED.get(verb, ()), *arguments])
    return context_assignments(context), context.params


@pytest.mark.parametrize("verb", TRAINING)
def test_common_settings_have_flags(verb: str) -> None:
    flags = {"--lr": "0.1", "--batch-size": "8", "--seed": "7", "--device": "cpu", "--precision": "float32"}
    assignments, params = parse(verb, *(word for pair in flags.items() for word in pair), "-o", "run", "--overwrite")
    assert params["out"] == Path("run") and params["overwrite"]
    defaults: Any = finetune_defaults("classify", 1, random_init=False)[0]
    if verb == "pretrain":
        defaults = pretrain_defaults("mlm", 256, continued=False)
    train: Any = Overrides(assignments=assignments).resolve(defaults).settings.train
    assert (train.optimizer.lr, train.batch_size, train.seed) == (0.1, 8, 7)
    assert (train.device, train.precision) == ("cpu", "float32")


@pytest.mark.parametrize("verb", TRAINING)
def test_each_flag_takes_a_value(verb: str) -> None:
    command: SettingsCommand = GROUP.commands[verb]
    for flag in command.flags:
        (assignment,), _ = parse(verb, flag.name, "3")
        assert "3" in assignment and "{}" not in assignment


@pytest.mark.parametrize("verb", TRAINING)
def test_each_flag_is_one_setting_that_its_help_names(verb: str) -> None:
    command: SettingsCommand = GROUP.commands[verb]
    assert len(command.flags) >= 8
    for flag in command.flags:
        name = flag.assignment.partition("=")[0]
        path = find_setting(command.settings_classes()[0], name)
        assert f"({path})" in flag.help or f"({name})" in flag.help
        assert "  " not in flag.help and flag.help.endswith(".")


@pytest.mark.parametrize("verb", TRAINING)
def test_help_lists_the_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    for name in ("epochs", "max-steps", "time-budget", "lr", "batch-size", "max-length", "seed", "device"):
        assert f"  --{name} " in text
    assert "--precision" in text and "-o, --output" in text and "--overwrite" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.optimizer.weight_decay", "0.5"], ["train.optimizer.weight_decay=0.5"]),
        (["--train.optimizer.weight_decay=0.5"], ["train.optimizer.weight_decay=0.5"]),
        (["--weight_decay", "0.5"], ["weight_decay=0.5"]),
        (["--weight-decay=0.5"], ["weight_decay=0.5"]),
        (["weight_decay=0.5"], ["weight_decay=0.5"]),
        (["--ema_decay", "-1"], ["ema_decay=-1"]),
        (["--compile"], ["compile=true"]),
        (["--compile", "False"], ["compile=false"]),
        (["--compile", "--json"], ["compile=true"]),
        (["--columns.text=my review"], ["columns.text=my review"]),
        (["--learning-rate", "0.5"], ["learning_rate=0.5"]),
        (["--betas", "[0.9, 0.98]"], ["betas=[0.9, 0.98]"]),
    ],
)
def test_a_setting_is_a_flag_or_an_argument(arguments: list[str], expected: list[str]) -> None:
    assignments, params = parse("finetune", *arguments)
    assert assignments == expected and params["data"] == [Path("a.csv")]


def test_arguments_after_a_boolean_setting_are_data() -> None:
    assignments, params = parse("finetune", "--compile", "b.csv")
    assert assignments == ["compile=true"] and params["data"] == [Path("a.csv"), Path("b.csv")]


def test_splits_and_paths_are_data_and_other_assignments_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=1.csv").write_text("")
    splits = ["train=b.csv", "Dev=c.csv", "test=d=e.csv"]
    assignments, params = parse("finetune", *splits, "./x=1.csv", "lr=1.csv", "lr=0.5")
    assert assignments == ["lr=0.5"]
    _, *files = params["data"]  # the first one is in REQUIRED
    assert files == [*map(Path, splits), Path("x=1.csv"), Path("lr=1.csv")]


def test_everything_after_two_dashes_is_data() -> None:
    assignments, params = parse("finetune", "--", "lr=0.5", "--compile")
    assert not assignments and params["data"] == [Path("a.csv"), Path("lr=0.5"), Path("--compile")]


def test_values_of_flags_are_not_settings() -> None:
    assignments, params = parse("distil", "--student", "layers=3", "--output", "lr=0.5")
    assert not assignments and (params["student"], params["out"]) == ("layers=3", Path("lr=0.5"))


def test_texts_with_an_equals_sign_are_texts() -> None:
    assignments, params = parse("predict", "run", "lr=0.5", "--data.columns.text=a")
    assert assignments == ["data.columns.text=a"] and params["texts"] == ["lr=0.5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epohcs", "3"], "did you mean --epochs?"),
        (["--ltr", "3"], "did you mean --lr?"),
        (["--weight-decya", "3"], "did you mean --train.optimizer.weight_decay?"),
        (["--outptu", "run"], "did you mean --output?"),
        (["--learning_rat", "3"], "did you mean --train.optimizer.lr?"),
        (["--warmup_steps", "100"], 'did you mean "train.schedule.warmup_ratio"'),
        (["--per-device-train-batch-size", "8"], 'did you mean "train.batch_size"'),
        (["lrr=3"], 'did you mean "train.optimizer.lr"'),
        (["a=b.csv"], "a is not a setting"),
        (["--data.columns"], "--data.columns needs a value"),
        (["--weight_decay"], "--weight_decay needs a value"),
        (["--lr"], "--lr needs a value"),
        (["--set", "lr=3"], "--set is not needed"),
        (["--layers", "3"], "init.layers"),
    ],
)
def test_unknown_or_incomplete_arguments_get_a_suggestion(arguments: list[str], message: str) -> None:
    with pytest.raises(HeedfulError) as caught:
        parse("finetune", *arguments)
    assert message in str(caught.value)


def test_a_flag_and_an_assignment_for_one_setting_are_refused() -> None:
    assignments, _ = parse("finetune", "--lr", "3", "learning_rate=4")
    with pytest.raises(SettingError, match=r"both set train\.optimizer\.lr") as caught:
        Overrides(assignments=assignments).resolve(finetune_defaults("classify", 1, random_init=False)[0])
    assert caught.value.code == "duplicate"


@pytest.mark.parametrize(
    ("word", "flag"), [("--output_dir", "--output"), ("--report-to", "--track"), ("--default_root_dir", "--output")]
)
def test_flags_of_other_libraries_are_accepted_and_translated(
    word: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, params = parse("finetune", word, "csv")
    assert capsys.readouterr().err == f"{word} is {flag} here\n"
    assert params["out"] == Path("csv") if flag == "--output" else params["track"] == ["csv"]


def test_foreign_names_are_noted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "ner", str(tmp_path / "no.csv"), "--learning_rate", "1e-4", "lr0=1e-4"])
    assert "both set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "ner", str(tmp_path / "no.csv"), "--learning_rate", "1e-4"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "train is finetune here",
        "ner is the task tag here",
        "learning_rate is train.optimizer.lr here",
    ]
    assert len(lines) == 4 and "there is no such file" in lines[3]


def test_verbs_are_listed_by_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert [title for title in SECTIONS if f"\n{title}:\n" in text] == list(SECTIONS)
    listed = [name for names in SECTIONS.values() for name in names]
    assert set(GROUP.commands) <= set(listed), "each verb is in a section"
    assert len(listed) == len(set(listed))
    for name, command in GROUP.commands.items():  # the help of each command is one sentence in one line
        assert re.fullmatch(r"[A-Z][a-z-]+[^.;:]*\.", command.get_short_help_str(66)), name


def test_names_of_verbs_in_other_libraries() -> None:
    assert set(VERB_ALIASES.values()) <= set(GROUP.commands)
    assert not (VERB_ALIASES.keys() | VERB_ADVICE.keys()) & set(GROUP.commands)
    for advice in VERB_ADVICE.values():
        assert not advice.startswith("heedful ") or advice.split()[1] in GROUP.commands


@pytest.mark.parametrize(("verb", "advice"), [("val", "--split dev"), ("test", "--split test"), ("encode", "predict")])
def test_a_verb_of_another_library_gets_advice(verb: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([verb, "run"])
    assert stop.value.code == 2 and advice in capsys.readouterr().err


def test_init_prints_the_settings_of_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["init", "serve"])
    assert not stop.value.code
    (file := tmp_path / "serve.toml").write_text(re.sub(r"(?m)^#(?=\w)", "", capsys.readouterr().out))
    assert from_file(ServeSettings, file) == ServeSettings()
    assert "max_batch_tokens = " in file.read_text()


@pytest.mark.parametrize(
    "verb", [name for name, command in GROUP.commands.items() if isinstance(command, SettingsCommand)]
)
def test_help_says_what_lists_all_settings(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    listed = re.search(r"unique\. (?:heedful init (\w+)|docs/settings\.md) lists them", text)
    assert listed
    if (name := listed[1]) and name != "TASK":
        with pytest.raises(SystemExit) as stop:
            main(["init", name])
        assert not stop.value.code


def test_a_command_imports_only_its_own_module() -> None:
    code = """
import sys
from typer.main import get_command
from heedful.cli import app
group = get_command(app)
group.commands["kernels"]
print([name for name in group.commands if f"heedful.cli.{name}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['kernels']\n"

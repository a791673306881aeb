"""`heedful completion`: the scripts complete commands in bash, zsh and fish, and have every option and setting."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from heedful.cli import app
from heedful.cli.completion import SHELLS, CompletionItem, _known_values, candidate_tables, completion_script
from heedful.cli.settings_command import SettingsCommand, context_assignments
from heedful.runs.settings_schema import describe_settings

GROUP: Any = typer.main.get_command(app)
SECONDS = 30.0  # maximum seconds that a shell may take to answer, on a busy machine
CASES = [  # (typed before the tab key, the line after it)
    ("heedful finet", "heedful finetune "),
    ("heedful finetune class", "heedful finetune classify "),
    ("heedful init pre", "heedful init pretrain "),
    ("heedful recipe c", "heedful recipe cp "),
    ("heedful recipe cp pretrain-dom", "heedful recipe cp pretrain-domain "),
    ("heedful pretrain --objective span", "heedful pretrain --objective span_corruption "),
    ("heedful check a.csv --data.columns.text_", "heedful check a.csv --data.columns.text_pair "),
    ("heedful evaluate run --data.header=f", "heedful evaluate run --data.header=false "),
    ("heedful train --keep-ch", "heedful train --keep-checkpoints "),
    ("heedful finetune classify a.csv --train.opt", "heedful finetune classify a.csv --train.optimizer."),
    ("heedful finetune classify --train.optimizer.weight", "heedful finetune classify --train.optimizer.weight_decay "),
    ("heedful finetune classify --weight_d", "heedful finetune classify --weight_decay "),
    ("heedful finetune --precision bfl", "heedful finetune --precision bfloat16 "),
    ("heedful finetune --train.schedule.kind=cos", "heedful finetune --train.schedule.kind=cosine "),
    (
        "heedful finetune --keep-checkpoints --lr=0.1 --seed 1 reg",
        "heedful finetune --keep-checkpoints --lr=0.1 --seed 1 regress ",
    ),
    ("heedful serve run --limits.max_batch_t", "heedful serve run --limits.max_batch_tokens "),
    ("heedful finetune tag exam", "heedful finetune tag example.csv "),
    ("heedful finetune classify a.csv train.opt", "heedful finetune classify a.csv train.optimizer."),
    ("heedful finetune classify a.csv weight_dec", "heedful finetune classify a.csv weight_decay="),
    ("heedful finetune classify a.csv batch_s", "heedful finetune classify a.csv batch_size="),
    ("heedful finetune classify a.csv precision=bfl", "heedful finetune classify a.csv precision=bfloat16 "),
    (
        "heedful finetune classify a.csv lr=0.1 train.schedule.kind=cos",
        "heedful finetune classify a.csv lr=0.1 train.schedule.kind=cosine ",
    ),
    ("heedful pretrain a.txt tokenizer.vocab_", "heedful pretrain a.txt tokenizer.vocab_size="),
    ("heedful evaluate exam", "heedful evaluate example.csv "),
    ("heedful finetune tag --recipe exam", "heedful finetune tag --recipe example.csv "),
]
PROMPT = "@go@"
# first line of a shell: sets the prompt, replaces heedful by a function that prints its arguments, as "<predict><run>",
# and loads the completion script; the prompt is written in two parts, so that an echo of the line does not contain it
FIRST_LINE = "PS1='@g''o@'; heedful() {{ printf '<%s>' \"$@\"; echo; }}; {}; . ./script.{}\n"
INTERACTIVE_SHELLS = {  # command that starts the shell without files of the user, and its settings
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'"),
    "zsh": (["zsh", "-f", "-i"], "unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D"),
}


class Terminal:
    """A shell on a pseudo-terminal."""

    def __init__(self, shell: str, folder: Path) -> None:
        command, shell_settings = INTERACTIVE_SHELLS[shell]
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 250, 0, 0))
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.send(FIRST_LINE.format(shell_settings, shell))

    def send(self, keys: str) -> str:
        """Send keys, and return the output of the shell until its next prompt."""
        os.write(self._master, keys.encode())
        text, end = "", time.monotonic() + SECONDS
        while PROMPT not in text and time.monotonic() < end:
            if select.select([self._master], [], [], 0.2)[0]:
                text += os.read(self._master, 65536).decode(errors="replace")
        return text

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the completion scripts, and with the file example.csv to complete."""
    path = tmp_path_factory.mktemp("completion")
    (path / "example.csv").touch()
    for shell in SHELLS:
        (path / f"script.{shell}").write_text(completion_script(shell, GROUP))
    return path


@pytest.fixture(scope="module", params=INTERACTIVE_SHELLS)
def terminal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    shell = Terminal(request.param, folder)
    yield shell
    shell.close()


@pytest.mark.parametrize(("typed", "line"), CASES)
def test_a_tab_completes_in_the_shell(terminal: Terminal, typed: str, line: str) -> None:
    arguments = "".join(f"<{word}>" for word in f"{line}END".split()[1:])
    assert arguments in terminal.send(f"{typed}\tEND\n")


def fish_candidates(folder: Path, typed: str) -> list[str]:
    """Return the words that fish offers after a typed text."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"source script.fish; complete -C '{typed}'"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"}
    process = subprocess.run(
        ["fish", "--no-config", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert not process.stderr
    return [line.partition("\t")[0] for line in process.stdout.splitlines()]


@pytest.mark.parametrize(("typed", "line"), CASES)
def test_fish_offers_what_completes_a_word(folder: Path, typed: str, line: str) -> None:
    assert fish_candidates(folder, typed) == [line.split()[-1]]


SAMPLING_STEP = 7  # every seventh word of a table is parsed


@pytest.fixture(scope="module")
def tables() -> dict[str, list[CompletionItem]]:
    return candidate_tables(GROUP)


@pytest.mark.parametrize("verb", GROUP.commands)
def test_every_option_and_setting_is_in_the_table(tables: dict[str, list[CompletionItem]], verb: str) -> None:
    command = GROUP.commands[verb]
    words = {item.word for item in tables[verb]}
    options = {option for param in command.params if hasattr(param, "is_flag") for option in param.opts}
    assert options | {"--help"} <= words
    if not isinstance(command, SettingsCommand):
        return
    settings = [setting for cls in command.settings_classes() for setting in describe_settings(cls)]
    paths = {setting.path for setting in settings if not setting.table}
    assert {f"--{path}" for path in paths - {"data.columns"}} <= words


SETTINGS_VERBS = [verb for verb, command in GROUP.commands.items() if isinstance(command, SettingsCommand)]


@pytest.mark.parametrize("verb", SETTINGS_VERBS)
def test_the_command_accepts_the_settings_in_its_table(tables: dict[str, list[CompletionItem]], verb: str) -> None:
    """A word that begins with "?" is a flag of a setting, and one with "=" is the name in NAME=VALUE."""
    command = GROUP.commands[verb]
    sampled_words = sorted({item.word for item in tables[verb]})[::SAMPLING_STEP]
    flags = [word[1:] for word in sampled_words if word.startswith("?")]
    names = [word[1:] for word in sampled_words if word.startswith("=")]
    assert command.accepts_assignments or not names
    assert not any(name.startswith("-") for name in names)
    arguments = [argument for flag in flags for argument in (flag, "true")] + [f"{name}=true" for name in names]
    context: Any = command.make_context(verb, arguments, resilient_parsing=True)
    assert len(context_assignments(context)) == len(flags) + len(names)


def test_known_values_belong_to_options_that_exist() -> None:
    options = {option for command in GROUP.commands.values() for param in command.params for option in param.opts}
    assert set(_known_values()) <= options


@pytest.mark.slow
def test_a_script_is_printed_without_torch() -> None:
    code = "import sys; from heedful.cli import main\nmain(['completion', 'zsh'])\nassert 'torch' not in sys.modules"
    script = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert script == completion_script("zsh", GROUP)
    assert "@" not in script.partition("\n")[0], "the placeholder for the version is replaced"

"""Completion scripts, in the shells themselves."""

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
SECONDS = 30.0  # that a shell may take on a busy machine
CASES = [  # what is typed before the tab, and what the line becomes
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
FIRST = "PS1='@g''o@'; heedful() {{ printf '<%s>' \"$@\"; echo; }}; {}; . ./script.{}\n"
START = {  # a shell without the user's files, and its first lines; heedful prints its arguments
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'"),
    "zsh": (["zsh", "-f", "-i"], "unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -D"),
}
PROMPT = "@go@"


class Terminal:
    """A shell on a pseudo-terminal."""

    def __init__(self, shell: str, folder: Path) -> None:
        command, first = START[shell]
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 250, 0, 0))
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.answer(FIRST.format(first, shell))

    def answer(self, keys: str) -> str:
        """Send keys and return what appears until the next prompt."""
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
    place = tmp_path_factory.mktemp("completion")
    (place / "example.csv").touch()
    for shell in SHELLS:
        (place / f"script.{shell}").write_text(completion_script(shell, GROUP))
    return place


@pytest.fixture(scope="module", params=START)
def terminal(request: pytest.FixtureRequest, folder: Path) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    shell = Terminal(request.param, folder)
    yield shell
    shell.close()


@pytest.mark.parametrize(("typed", "line"), CASES)
def test_a_tab_completes_in_the_shell(terminal: Terminal, typed: str, line: str) -> None:
    arguments = "".join(f"<{word}>" for word in f"{line}END".split()[1:])
    assert arguments in terminal.answer(f"{typed}\tEND\n")


def completed(folder: Path, typed: str) -> list[str]:
    """The candidates of fish."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = f"source script.fish; complete -C '{typed}'"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("typed", "line"), CASES)
def test_fish_offers_what_completes_a_word(folder: Path, typed: str, line: str) -> None:
    candidates = completed(folder, typed)
    assert candidates == [line.split()[-1]]


SAMPLED = 7  # every seventh word of a table is parsed


@pytest.fixture(scope="module")
def tables() -> dict[str, list[CompletionItem]]:
    return candidate_tables(GROUP)


@pytest.mark.parametrize("verb", GROUP.commands)
def test_every_option_and_setting_is_in_the_table(tables: dict[str, list[CompletionItem]], verb: str) -> None:
    command = GROUP.commands[verb]
    words = {row.word for row in tables[verb]}
    options = {option for param in command.params if hasattr(param, "is_flag") for option in param.opts}
    assert options | {"--help"} <= words
    if isinstance(command, SettingsCommand):
        known = {
            setting.path
            for cls in command.settings_classes()
            for setting in describe_settings(cls)
            if not setting.table
        }
        assert {f"--{path}" for path in known - {"data.columns"}} <= words
        sampled = sorted(words)[::SAMPLED]
        flags = [word[1:] for word in sampled if word.startswith("?")]
        names = [word[1:] for word in sampled if word.startswith("=")]
        assert not names or (command.accepts_assignments and not any(name.startswith("-") for name in names))
        arguments = [argument for flag in flags for argument in (flag, "true")] + [f"{name}=true" for name in names]
        context: Any = command.make_context(verb, arguments, resilient_parsing=True)
        assert len(context_assignments(context)) == len(flags) + len(names)


def test_values_are_of_options_that_exist() -> None:
    options = {option for command in GROUP.commands.values() for param in command.params for option in param.opts}
    assert set(_known_values()) <= options


@pytest.mark.slow
def test_a_script_is_printed_without_torch() -> None:
    code = "import sys; from heedful.cli import main\nmain(['completion', 'zsh'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == completion_script("zsh", GROUP) and "@" not in done.stdout.partition("\n")[0]

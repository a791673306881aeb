"""`heedful pretrain`: lazy imports, output, error messages, and how an interrupted run is resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from heedful.cli import main
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.settings import from_file
from tests.support.corpora import make_documents, write_documents

ROOT = Path(__file__).parents[2]
SMALL = {  # settings of a small model, by path
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "train.batch_size": 8,
    "train.precision": "float32",
    "max_seq_length": 32,
    "pack_length": 64,
    "eval_fraction": 0.1,
    "eval_every_steps": 4,
    "tokenizer.vocab_size": 400,
    "corpus.sample_by": "paragraph",
}
STEPS = {"train.max_steps": 6}


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread, as in the processes that are started here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command in this process, without timing."""
    times = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: times)

    def run_command(*arguments: object) -> CommandResult:
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return CommandResult(int(exit_info.value.code or 0), captured.out, captured.err)

    return run_command


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 120 documents."""
    return write_documents(tmp_path_factory.mktemp("text") / "harbour.txt", make_documents(120, seed=1))


def flags(**settings: Any) -> list[str]:
    """Return flags for the settings SMALL and these."""
    return [f"--{name}={value}" for name, value in (SMALL | settings).items()]


def run_in_process(*arguments: str) -> tuple[int, str, str]:
    """Run the command in a new process; return its exit code, its stderr, and the set of heavy imports as text."""
    script = (
        "import sys\n"
        "from heedful.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: code = int(stop.code or 0)\n"
        "print({'torch', 'tokenizers', 'rich', 'numpy'} & set(sys.modules))\n"
        "raise SystemExit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.returncode, process.stderr, process.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy() -> None:
    assert run_in_process("pretrain", "--help") == (0, "", "set()")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["x", "--max_seq_lenght=3"],
            "--max_seq_lenght is neither a flag nor a setting of heedful pretrain (did you mean --max_seq_length?)",
        ),
        (["x", "--objective", "mlmm"], '"mlmm" is not an objective (did you mean "mlm"?)'),
        (["x", "--time-budget", "soon"], 'time_budget is "soon"; expected a duration as 45s, 10m, 2h or 1h30m'),
        (["x", "--size", "huge"], 'model.size is "huge"'),
        ([], "no text was given: heedful pretrain FILES, or a recipe with data"),
        (["no.toml"], "no.toml: there is no such file"),
        (["one.toml", "--recipe", "two.toml"], "two recipes were given, one.toml and two.toml: give one"),
        (["my.toml", "books"], "my.toml is a recipe among text files: give it alone"),
        (
            ["x", "--time-budget", "1h", "--train.max_steps=9"],
            "train.time_budget=1h and train.max_steps=9 are given: give one of train.epochs, train.max_steps",
        ),
        (
            ["x", "--model", "a", "model={init_from='b'}"],
            "both set model.init_from",
        ),
        (["x", "--data=['y']"], "DATA x and data="),
    ],
)
def test_pretrain_reports_errors_before_torch_is_imported(arguments: list[str], message: str) -> None:
    code, err, heavy_imports = run_in_process("pretrain", *arguments)
    assert code == 2 and err.startswith("heedful: ") and message in err and err.count("\n") == 1
    assert "torch" not in heavy_imports and "tokenizers" not in heavy_imports


def test_output_for_people(run: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("pretrain", text, "--objective", "mlm+nsp", *flags(**STEPS))
    result = run(*command)
    assert result.code == 0
    assert re.match(r"validation, \d+ targets\n  loss  ", result.out)
    assert re.search(r"^  mlm_accuracy +0\.\d{4}\n", result.out, re.MULTILINE) and "nsp_loss" in result.out
    assert "The run is in pretrain-harbour: model, plots, report.html, model card." in result.out
    assert "heedful pretrain MORE-TEXT --model pretrain-harbour" in result.out
    messages = result.err.splitlines()
    assert messages[0].startswith(
        "training a tokenizer on the text (wordpiece, up to 400 tokens); --tokenizer takes one"
    )
    assert re.match(r"120 documents of .* rows of up to 64 tokens, 8 in a step$", messages[1])
    assert [line.split(",")[0] for line in messages if line.startswith("step")] == ["step 4", "step 6"]
    again = run(*command)
    assert again.out == result.out and "pretrain-harbour is finished already" in again.err
    other_objective = run("pretrain", text, *flags(**STEPS))
    assert other_objective.code == 2
    assert "holds a run with other settings: objective.kind was 'mlm+nsp'" in other_objective.err


def test_json(run: Any, text: Path, tmp_path: Path) -> None:
    result = run("pretrain", text, "--output", tmp_path / "run", "--json", *flags(**STEPS))
    assert result.code == 0 and not result.err
    (line,) = result.out.splitlines()
    record = json.loads(line)
    assert record["folder"] == str(tmp_path / "run") and record["steps"] == 6 and record["objective"] == "mlm"
    assert record["splits"]["validation"]["numbers"]["mlm_loss"] > 0


def test_a_time_budget(run: Any, text: Path, tmp_path: Path) -> None:
    result = run("pretrain", text, "--output", tmp_path / "run", "--json", "--time-budget", "1s", *flags())
    record = json.loads(result.out)
    assert record["seconds"] >= 1 and record["steps"] > 2, "as many steps as fit"
    settings = from_file(PretrainSettings, tmp_path / "run" / "settings.toml")
    assert settings.train.time_budget == 1 / 60 and settings.train.max_steps is None
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    learning_rates = [entry["lr"] for entry in journal if "lr" in entry]
    assert learning_rates[-1] < 0.3 * max(learning_rates), "the schedule follows the clock"


def test_a_recipe_alone(run: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        f'data = ["{text}"]\nmax_seq_length = 32\n[objective]\nkind = "mlm+sop"\n[train]\nbatch_size = 8\n',
        encoding="utf-8",
    )
    in_recipe = ("max_seq_length", "train.batch_size")
    further = {name: value for name, value in (SMALL | STEPS).items() if name not in in_recipe}
    result = run("pretrain", "mine.toml", "--json", *(f"--{name}={value}" for name, value in further.items()))
    record = json.loads(result.out)
    assert record["objective"] == "mlm+sop" and record["folder"] == "pretrain-harbour"


# a script that runs the command and interrupts it at step 3
INTERRUPTED = """
import os, signal
from heedful.cli import main, progress
def step(self, step, trainer):
    if step.number == 3:
        os.kill(os.getpid(), signal.SIGINT)
progress.Progress.step = step
signal.signal(signal.SIGINT, signal.default_int_handler)  # as on a terminal, wherever the tests run
main()
"""


@pytest.mark.slow
def test_the_same_command_resumes(run: Any, text: Path, tmp_path: Path) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background would ignore it
    try:
        command = ["pretrain", str(text), "--objective", "mlm+nsp", *flags(**STEPS), "--output"]
        stopped = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, *command, str(tmp_path / "run")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stopped.returncode == 130 and not stopped.stdout and "Traceback" not in stopped.stderr
    folder = tmp_path / "run"
    message = f"stopped; all progress is saved in {folder}. The same command resumes it."
    assert stopped.stderr.splitlines()[-1] == message
    assert run(*command, folder).code == 0
    uninterrupted = tmp_path / "uninterrupted"
    assert run(*command, uninterrupted).code == 0
    for name in ("journal.jsonl", "model/model.safetensors"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_bad_rows(run: Any, tmp_path: Path) -> None:
    rows = [json.dumps({"text": " ".join(document)}) for document in make_documents(80)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{broken"]) + "\n")
    arguments = [tmp_path / "a.jsonl", "--output", tmp_path / "run", *flags(**STEPS)]
    result = run("pretrain", *arguments)
    assert result.code == 2 and "a.jsonl" in result.err and "81" in result.err
    assert run("pretrain", *arguments, "--on-bad-row", "skip").code == 0
    assert "broken" in (tmp_path / "run" / "bad-rows.jsonl").read_text()

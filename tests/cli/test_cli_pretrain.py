"""heedful pretrain on the command line: what it imports, prints and refuses, and how it resumes."""

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
SMALL = {
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


class Done(NamedTuple):
    """How a command ended."""

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

    def call(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        done = capsys.readouterr()
        assert "Traceback" not in done.err
        return Done(int(stop.value.code or 0), done.out, done.err)

    return call


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 documents."""
    return write_documents(tmp_path_factory.mktemp("text") / "harbour.txt", make_documents(120, seed=1))


def sets(**more: Any) -> list[str]:
    """SMALL settings, and more."""
    return [f"--{name}={value}" for name, value in (SMALL | more).items()]


def imported(*arguments: str) -> tuple[int, str, str]:
    """The command in a process of its own: how it ended, what it said, and which heavy modules it imported."""
    code = (
        "import sys\n"
        "from heedful.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: code = int(stop.code or 0)\n"
        "print({'torch', 'tokenizers', 'rich', 'numpy'} & set(sys.modules))\n"
        "raise SystemExit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, done.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy() -> None:
    code, err, heavy = imported("pretrain", "--help")
    assert (code, err, heavy) == (0, "", "set()")


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
    code, err, heavy = imported("pretrain", *arguments)
    assert code == 2 and err.startswith("heedful: ") and message in err and err.count("\n") == 1
    assert "torch" not in heavy and "tokenizers" not in heavy


def test_output_for_people(run: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("pretrain", text, "--objective", "mlm+nsp", *sets(**STEPS))
    assert done.code == 0
    assert re.match(r"validation, \d+ targets\n  loss  ", done.out)
    assert re.search(r"^  mlm_accuracy +0\.\d{4}\n", done.out, re.MULTILINE) and "nsp_loss" in done.out
    assert "The run is in pretrain-harbour: model, plots, report.html, model card." in done.out
    assert "heedful pretrain MORE-TEXT --model pretrain-harbour" in done.out
    messages = done.err.splitlines()
    assert messages[0].startswith(
        "training a tokenizer on the text (wordpiece, up to 400 tokens); --tokenizer takes one"
    )
    assert re.match(r"120 documents of .* rows of up to 64 tokens, 8 in a step$", messages[1])
    assert [line.split(",")[0] for line in messages if line.startswith("step")] == ["step 4", "step 6"]
    again = run("pretrain", text, "--objective", "mlm+nsp", *sets(**STEPS))
    assert again.out == done.out and "pretrain-harbour is finished already" in again.err
    second_run = run("pretrain", text, *sets(**STEPS))
    assert second_run.code == 2 and "holds a run with other settings: objective.kind was 'mlm+nsp'" in second_run.err


def test_json(run: Any, text: Path, tmp_path: Path) -> None:
    done = run("pretrain", text, "--output", tmp_path / "run", "--json", *sets(**STEPS))
    assert done.code == 0 and not done.err
    (line,) = done.out.splitlines()
    record = json.loads(line)
    assert record["folder"] == str(tmp_path / "run") and record["steps"] == 6 and record["objective"] == "mlm"
    assert record["splits"]["validation"]["numbers"]["mlm_loss"] > 0


def test_a_time_budget(run: Any, text: Path, tmp_path: Path) -> None:
    done = run("pretrain", text, "--output", tmp_path / "run", "--json", "--time-budget", "1s", *sets())
    record = json.loads(done.out)
    assert record["seconds"] >= 1 and record["steps"] > 2, "as many steps as fit"
    settings = from_file(PretrainSettings, tmp_path / "run" / "settings.toml")
    assert settings.train.time_budget == 1 / 60 and settings.train.max_steps is None
    last = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    rates = [entry["lr"] for entry in last if "lr" in entry]
    assert rates[-1] < 0.3 * max(rates), "the schedule follows the clock"


def test_a_recipe_alone(run: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        f'data = ["{text}"]\nmax_seq_length = 32\n[objective]\nkind = "mlm+sop"\n[train]\nbatch_size = 8\n',
        encoding="utf-8",
    )
    more = {
        name: value for name, value in (SMALL | STEPS).items() if name not in ("max_seq_length", "train.batch_size")
    }
    flags = [f"--{name}={value}" for name, value in more.items()]
    done = run("pretrain", "mine.toml", "--json", *flags)
    record = json.loads(done.out)
    assert record["objective"] == "mlm+sop" and record["folder"] == "pretrain-harbour"


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
        words = ["pretrain", str(text), "--objective", "mlm+nsp", *sets(**STEPS), "--output"]
        stopped = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, *words, str(tmp_path / "run")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stopped.returncode == 130 and not stopped.stdout and "Traceback" not in stopped.stderr
    place = tmp_path / "run"
    assert stopped.stderr.splitlines()[-1] == f"stopped; all progress is saved in {place}. The same command resumes it."
    assert run(*words, place).code == run(*words, tmp_path / "whole").code == 0
    for name in ("journal.jsonl", "model/model.safetensors"):
        assert (place / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_bad_rows(run: Any, tmp_path: Path) -> None:
    rows = [json.dumps({"text": " ".join(document)}) for document in make_documents(80)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, "{broken"]) + "\n")
    arguments = [tmp_path / "a.jsonl", "--output", tmp_path / "run", *sets(**STEPS)]
    done = run("pretrain", *arguments)
    assert done.code == 2 and "a.jsonl" in done.err and "81" in done.err
    assert run("pretrain", *arguments, "--on-bad-row", "skip").code == 0
    assert "broken" in (tmp_path / "run" / "bad-rows.jsonl").read_text()

"""--nproc N: torchrun runs the same command in N processes, which train one run together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from heedful.cli import main
from tests.support.corpora import make_corpus, make_documents, train_on
from tests.support.generated_data import classification_rows, write_csv

# settings of a small pre-training
PRETRAIN = ["--model.layers=1", "--model.width=16", "--model.heads=2"]
PRETRAIN += ["--max_seq_length=32", "--pack_length=64", "--eval_fraction=0.1"]
PRETRAIN += ["--train.max_steps=2", "--train.batch_size=12"]


def exit_code(arguments: list[str]) -> Any:
    """Run the command in this process; return its exit code, None or 0 after success."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    return exit_info.value.code


@pytest.mark.parametrize("verb", [["pretrain"], ["finetune", "classify"], ["distil", "teacher"]])
def test_the_command_runs_under_torchrun(verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_calls: list[Any] = []  # the arguments of each call
    monkeypatch.setattr("torch.distributed.run.run", torchrun_calls.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    command = [*verb, str(data), "--output", str(tmp_path / "run"), "--train.batch_size=4"]
    assert not exit_code([*command[:2], "--nproc", "3", *command[2:]])
    (call,) = torchrun_calls
    assert (call.nproc_per_node, call.standalone, call.module) == ("3", True, True)
    assert [call.training_script, *call.training_script_args] == ["heedful", *command]
    assert "OMP_NUM_THREADS" not in os.environ and not (tmp_path / "run").exists()


def test_gpu_is_a_process_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun_calls: list[Any] = []  # the arguments of each call
    monkeypatch.setattr("torch.distributed.run.run", torchrun_calls.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert not exit_code(["finetune", "classify", str(data), "--nproc", "gpu", "--output", str(tmp_path / "run")])
    (call,) = torchrun_calls
    assert call.nproc_per_node == "4" and "--nproc" not in call.training_script_args


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "PyTorch sees no GPU: give a number of processes"),
        ("many", '"many" is not a number of processes'),
        ("-1", '"-1" is not a number of processes'),
    ],
)
def test_other_numbers_of_processes_are_refused(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert exit_code(["finetune", "classify", str(data), f"--nproc={text}"]) == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())  # without the box that typer draws
    assert message in error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_in_the_exit_code(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchrun_that_is_stopped(args: Any) -> None:
        raise SignalException("stopped", number)

    monkeypatch.setattr("torch.distributed.run.run", torchrun_that_is_stopped)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert exit_code(["finetune", "classify", str(data), "--nproc", "2", "--output", str(tmp_path / "run")]) == code


@pytest.mark.parametrize(("status", "code"), [(-signal.SIGKILL, 137), (-signal.SIGTERM, 143), (2, 2)])
def test_the_exit_code_is_that_of_the_first_process_that_failed(
    status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code of a process that a signal ended is 128 + the number of the signal, as in a shell."""

    def run(args: Any) -> None:
        failures = {1: ProcessFailure(1, 1234, status, "none"), 0: ProcessFailure(0, 1233, -signal.SIGTERM, "none")}
        failures[0].timestamp = failures[1].timestamp + 1
        raise ChildFailedError("heedful", failures)

    monkeypatch.setattr("torch.distributed.run.run", run)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert exit_code(["finetune", "classify", str(data), "--nproc", "2", "--output", str(tmp_path / "run")]) == code


def test_nproc_is_refused_inside_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert exit_code(["pretrain", str(tmp_path), "--nproc", "2"]) == 2
    assert "torchrun has started" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["1", '"all"'])
def test_two_processes_make_one_run(tmp_path: Path, shard: str) -> None:
    """Two processes write the same files as one process, and weights that are equal up to rounding.

    With `shard` "1" each process has all parameters; with "all" they are divided between the processes (FSDP).
    """
    documents = make_documents(90)
    data = make_corpus(tmp_path, documents, train_on(documents)).folder
    # with a large epsilon, Adam does not amplify differences of rounding
    stable = ["--train.optimizer.eps=1e-2", "--train.optimizer.lr=2e-2", "--train.precision=float32"]
    options = {"two": ["--nproc", "2", f"--train.data_parallel_shard_degree={shard}"], "one": []}
    files: dict[str, dict[str, bytes]] = {}  # for each run the files of its model by name, without the model card
    results: dict[str, Any] = {}
    for name, nproc in options.items():
        folder = tmp_path / name
        assert not exit_code(["pretrain", str(data), "--output", str(folder), *PRETRAIN, *stable, *nproc])
        files[name] = {
            path.name: path.read_bytes() for path in (folder / "model").iterdir() if path.name != "README.md"
        }
        results[name] = json.loads((folder / "results.json").read_text())
    assert results["two"]["tokens"] == results["one"]["tokens"] and results["two"]["steps"] == 2
    weights = {name: load(model_files.pop("model.safetensors")) for name, model_files in files.items()}
    assert files["two"] == files["one"]
    assert weights["two"].keys() == weights["one"].keys()
    for name, weight in weights["one"].items():
        assert float((weights["two"][name] - weight).abs().max()) < 1e-5, name


@pytest.mark.slow
def test_an_error_in_a_process_fails_the_command(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.txt")
    assert exit_code(["pretrain", missing, "--output", str(tmp_path / "run"), "--nproc", "2"]) == 2

"""--nproc: the same command under torchrun, as many processes as asked for, one run."""

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

PRETRAIN = ["--model.layers=1", "--model.width=16", "--model.heads=2"]
PRETRAIN += ["--max_seq_length=32", "--pack_length=64", "--eval_fraction=0.1"]
PRETRAIN += ["--train.max_steps=2", "--train.batch_size=12"]


def ended(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as error:
        main(words)
    return error.value.code


@pytest.mark.parametrize("verb", [["pretrain"], ["finetune", "classify"], ["distil", "teacher"]])
def test_it_calls_torchrun(verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.run", called.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    rest = [*verb, str(data), "--output", str(tmp_path / "run"), "--train.batch_size=4"]
    assert not ended([*rest[:2], "--nproc", "3", *rest[2:]])
    (args,) = called
    assert (args.nproc_per_node, args.standalone, args.module) == ("3", True, True)
    assert [args.training_script, *args.training_script_args] == ["heedful", *rest]
    assert "OMP_NUM_THREADS" not in os.environ and not (tmp_path / "run").exists()


def test_gpu_is_a_process_for_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr("torch.distributed.run.run", called.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert not ended(["finetune", "classify", str(data), "--nproc", "gpu", "--output", str(tmp_path / "run")])
    assert called[0].nproc_per_node == "4" and "--nproc" not in called[0].training_script_args


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
    assert ended(["finetune", "classify", str(data), f"--nproc={text}"]) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_in_the_exit_code(
    number: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: Any) -> None:
        raise SignalException("stopped", number)

    monkeypatch.setattr("torch.distributed.run.run", run)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert ended(["finetune", "classify", str(data), "--nproc", "2", "--output", str(tmp_path / "run")]) == code


@pytest.mark.parametrize(("status", "code"), [(-signal.SIGKILL, 137), (-signal.SIGTERM, 143), (2, 2)])
def test_the_exit_code_is_that_of_the_first_process_that_failed(
    status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that a signal ended, it is 128 + the number of the signal, as in a shell."""

    def run(args: Any) -> None:
        failures = {1: ProcessFailure(1, 1234, status, "none"), 0: ProcessFailure(0, 1233, -signal.SIGTERM, "none")}
        failures[0].timestamp = failures[1].timestamp + 1
        raise ChildFailedError("heedful", failures)

    monkeypatch.setattr("torch.distributed.run.run", run)
    data = write_csv(tmp_path / "a.csv", classification_rows(4))
    assert ended(["finetune", "classify", str(data), "--nproc", "2", "--output", str(tmp_path / "run")]) == code


def test_nproc_is_refused_inside_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert ended(["pretrain", str(tmp_path), "--nproc", "2"]) == 2
    assert "torchrun has started" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["1", '"all"'])
def test_two_processes_make_one_run(tmp_path: Path, shard: str) -> None:
    """The folder that is published has the same files and the same names, whoever had which part."""
    documents_ = make_documents(90)
    data = make_corpus(tmp_path, documents_, train_on(documents_)).folder
    calm = ["--train.optimizer.eps=1e-2", "--train.optimizer.lr=2e-2"]
    calm += ["--train.precision=float32"]
    left = []
    for number, more in enumerate([["--nproc", "2", f"--train.data_parallel_shard_degree={shard}"], []]):
        out = tmp_path / str(number)
        assert not ended(["pretrain", str(data), "--output", str(out), *PRETRAIN, *calm, *more])
        files = {path.name: path.read_bytes() for path in (out / "model").iterdir() if path.name != "README.md"}
        left.append((files, json.loads((out / "results.json").read_text())))
    (files, results), (others, alone) = left
    assert files.keys() == others.keys() and results["tokens"] == alone["tokens"] and results["steps"] == 2
    assert all(files[name] == others[name] for name in files if name != "model.safetensors")
    mine, theirs_ = (load(path["model.safetensors"]) for path in (files, others))
    assert mine.keys() == theirs_.keys()
    assert max(float((mine[name] - theirs_[name]).abs().max()) for name in mine) < 1e-5


@pytest.mark.slow
def test_an_error_in_a_process_fails_the_command(tmp_path: Path) -> None:
    assert ended(["pretrain", str(tmp_path / "none.txt"), "--output", str(tmp_path / "run"), "--nproc", "2"]) == 2

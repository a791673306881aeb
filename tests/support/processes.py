"""Processes that train a tiny model: one process, or several ranks that can fail at a given step.

Run as a program with a job as argument (a JSON object, see `Job`), this module runs the job, in each rank under
torchrun. With module names as arguments it is a fork server: it imports these modules once, reads jobs from stdin, and
forks a process for each rank of each job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.errors import HeedfulError, HeedfulWarning
from heedful.train.fit import EvalResult, Reporter, fit
from heedful.train.ranks import Ranks, connect_ranks
from heedful.train.trainer import Step, Trainer
from tests.support.tiny_runs import FAULTS, TASKS, FaultyObjective, evaluate_with_peak, make_settings


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a process, and the faults that happen during it."""

    output_dir: str  # folder for outcome, weights, log and process id of each rank
    kind: str = "fit"  # a key of JOB_KINDS, "pretrain" or "finetune"
    folder: str = ""  # run folder
    task: str = "classify"  # a key of TASKS
    dropout: float = 0.1
    train: dict[str, Any] = field(default_factory=dict)  # settings that override TRAIN
    fit: dict[str, Any] = field(default_factory=dict)  # settings that override FIT
    evaluate: str = ""  # "" for no evaluation, "peak" for the best near step 7, "slow" for one that takes a minute
    kill_before: int = 0  # number of the disk operation before which the process kills itself, or 0
    fault: str = ""  # a key of FAULTS, or ""
    fault_step: int = 0  # number of the step with the fault, from 1
    stop_step: int = 0  # number of the step in which the process sends itself SIGTERM, or 0
    faulty_rank: int = 0  # rank with the fault, which it has only when torchrun starts it first
    dist_timeout: float = 60.0  # seconds that a rank waits for another
    float64: bool = False  # train in float64
    gather_rounded: bool = False  # gather weights of blocks in half precision, as on GPUs
    data: str = ""  # training data of "pretrain" and "finetune"
    assignments: tuple[str, ...] = ()  # settings of "pretrain" and "finetune"


def count_disk_operations(kill_before: int) -> list[int]:
    """Count the disk operations of this process, and kill it before the one with number `kill_before`.

    Returns:
        A list whose only item is the number of operations so far.
    """
    count = [0]

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            count[0] += 1
            if count[0] == kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        return call

    for name in ("open", "write", "fsync", "mkdir", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return count


# -- running a job ------------------------------------------------------------------------------------------------


def run_fit(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Train by `fit`, with evaluations and checkpoints."""

    def evaluate_slowly() -> EvalResult:
        for _ in range(600):
            time.sleep(0.1)
        return evaluate_with_peak(trainer)

    evaluate = {"": None, "peak": lambda: evaluate_with_peak(trainer), "slow": evaluate_slowly}[job.evaluate]
    result = fit(trainer, Path(job.folder), make_settings({}, job.fit)[1], evaluate=evaluate)
    return {"stop_reason": result.stop_reason, "best_step": result.best_step, "resumed_from": result.resumed_from}


def run_updates(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Take all steps, without evaluations and checkpoints."""
    steps = list(trainer)
    values = [(step.loss, step.grad_norm, step.tokens) for step in steps]
    return dict(zip(("losses", "norms", "tokens"), map(list, zip(*values, strict=True)), strict=True))


def measure_memory(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Take all steps; from a tenth of them on, measure memory and open files after every twentieth of them."""
    measurements = []
    assert trainer.total_steps is not None
    for step in trainer:
        if step.number % (trainer.total_steps // 20) == 0 and step.number >= trainer.total_steps // 10:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            open_files = len(os.listdir("/proc/self/fd"))
            measurements.append((step.number, pages * os.sysconf("SC_PAGE_SIZE"), open_files))
    return {"measurements": measurements}


def run_collectives(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Return the results of each collective operation of `Ranks`."""
    ranks = trainer.ranks
    tensors = [torch.arange(5.0), torch.ones(6) * ranks.rank, torch.zeros(0), torch.full((2,), 0.5).double()]
    works = [ranks.all_reduce_async(tensor) for tensor in tensors]
    for work in works:
        assert work is not None
        ranks.wait_until(work.is_completed)
        ranks.wait(work)
    ranks.barrier()
    return {
        "sums": [tensor.tolist() for tensor in tensors],
        "scalars": ranks.all_gather_scalars(ranks.rank, 0.1, True, 2**53),
        "no_scalars": ranks.all_gather_scalars(),
        "objects": ranks.all_gather_object({"rank": ranks.rank, "text": "ü" * ranks.rank}),
        "is_main": ranks.is_main,
    }


def poll_suspended_rank(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Wait for a sum in which one rank, which is suspended, does not take part."""
    ranks = trainer.ranks
    if ranks.rank == job.faulty_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = ranks.all_reduce_async(torch.ones(3))
    assert work is not None
    ranks.wait_until(work.is_completed)
    return {}


def gather_weights(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Gather all weights after a step, and return the devices that were waited for before they can be read."""
    devices: list[str] = []
    trainer.train_step()
    Ranks.wait_for_gpu = lambda self, device: devices.append(str(device))  # type: ignore[method-assign]
    with trainer.full_params():
        return {"devices": list(devices)}


JOB_KINDS = {
    "fit": run_fit,
    "updates": run_updates,
    "memory": measure_memory,
    "collectives": run_collectives,
    "poll": poll_suspended_rank,
    "gather": gather_weights,
}


class StopAfter(Reporter):
    """Sends SIGTERM to this process after step number `step`, or never if `step` is 0."""

    def __init__(self, step: int) -> None:
        self.last_step = step

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.last_step:
            os.kill(os.getpid(), signal.SIGTERM)


def run_command(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Run pretrain or finetune, from data files to a run folder, without plots, timing and a model card."""
    from heedful.runs import run as run_module
    from heedful.runs.finetune import run as finetune
    from heedful.runs.pretrain import run as pretrain

    run_module.draw_run_plots = lambda folder: []  # type: ignore[attr-defined]
    run_module.measure_latency = lambda loaded: {"latency": {}, "throughput": 1}  # type: ignore[attr-defined]
    pretrain.write_pretrained_card = finetune.write_finetuned_card = lambda folder: None  # type: ignore[attr-defined]
    keywords: dict[str, Any] = {"assignments": job.assignments, "reporter": StopAfter(job.stop_step), "ranks": ranks}
    if job.kind == "pretrain":
        return {"stop_reason": pretrain.pretrain([job.data], job.folder, **keywords).status}
    return {"stop_reason": finetune.finetune("classify", job.data, job.folder, **keywords).status}


def run(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Run a job on one rank, write the final weights to a file, and return the outcome."""
    if job.kind in ("pretrain", "finetune"):
        return run_command(job, ranks)
    loaded, task, samples = TASKS[job.task](job.dropout)
    if job.float64:
        loaded.double()
    if job.gather_rounded:
        import_module("heedful.train.fsdp").ROUNDED_DEVICES = {"cpu"}  # type: ignore[attr-defined]
    trainer = Trainer(loaded, task, samples, make_settings(job.train, {})[0], ranks)
    was_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_faulty = ranks.rank == job.faulty_rank and not was_restarted
    if is_faulty:
        if job.fault:
            trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS[job.fault], job.fault_step)
        if job.stop_step:
            trainer.objective = FaultyObjective(trainer.objective, trainer, FAULTS["SIGTERM"], job.stop_step)
    operations = count_disk_operations(job.kill_before) if job.kill_before and is_faulty else [0]
    outcome = JOB_KINDS[job.kind](job, trainer) | {"operations": operations[0]}
    with trainer.full_params():
        torch.save(
            {name: tensor.detach() for name, tensor in loaded.named_tensors().items()},
            Path(job.output_dir) / f"rank-{ranks.rank}.pt",
        )
    return outcome | {"step": trainer.step, "max_tokens": trainer.state()[1]["tokens"]}


def main(job: Job) -> int:
    """Run a job and write its outcome to a file; returns an exit code, as commands do."""
    os.environ["HEEDFUL_DIST_TIMEOUT"] = str(job.dist_timeout)
    warnings.simplefilter("always", HeedfulWarning)  # all other warnings are errors
    with connect_ranks() as ranks:
        with (Path(job.output_dir) / f"rank-{ranks.rank}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        try:
            outcome, code = run(job, ranks), 0
        except HeedfulError as error:
            outcome, code = {"error": str(error), "kind": type(error).__name__}, 3
        except KeyboardInterrupt:
            outcome, code = {"error": "interrupted"}, 130
        (Path(job.output_dir) / f"rank-{ranks.rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    return code


def serve_forks() -> None:
    """Serve the requests on stdin: fork a process for each rank of jobs, or wait for processes and reply exit codes."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            reply: Any = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["wait"]]
        else:
            jobs = [Job(**job) for job in request["jobs"]]
            reply = [_fork(job, rank, len(jobs), request["port"]) for rank, job in enumerate(jobs)]
        print(json.dumps(reply), flush=True)


def _fork(job: Job, rank: int, size: int, port: int) -> int:
    """Fork a process that runs a job as one of `size` ranks, and return its process id."""
    if (pid := os.fork()) > 0:
        return pid
    code = 1
    try:
        log = os.open(Path(job.output_dir) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for handle in (1, 2):
            os.dup2(log, handle)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= rendezvous | {"RANK": str(rank), "WORLD_SIZE": str(size)}
        code = main(job)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# -- helpers of tests ----------------------------------------------------------------------------------------------

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ForkServer:
    """A process that forks a process for each rank of a job; `close` kills it and all of these."""

    def __init__(self, *modules: str) -> None:
        environment = os.environ | ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "tests.support.processes", *modules]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )

    def begin(self, job: Job | list[Job], ranks: int = 1) -> list[int]:
        """Start a job on this number of ranks, or a list with one job for each rank; returns the process ids."""
        jobs = job if isinstance(job, list) else [job] * ranks
        Path(jobs[0].output_dir).mkdir(parents=True, exist_ok=True)
        pids: list[int] = self._request({"jobs": [asdict(job) for job in jobs], "port": free_port()})
        return pids

    def wait(self, pids: list[int]) -> list[int]:
        """Wait for processes, and return their exit codes; -N if signal N killed a process."""
        codes: list[int] = self._request({"wait": pids})
        return codes

    def run(self, job: Job | list[Job], ranks: int = 1) -> list[int]:
        """Start a job as `begin` does, and return the exit codes of its processes."""
        return self.wait(self.begin(job, ranks))

    def _request(self, request: dict[str, Any]) -> Any:
        """Send a request, and return the reply."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Kill the fork server and all processes that it has forked."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def fork_server(*modules: str) -> Iterator[ForkServer]:
    """Context with a running fork server that has imported these modules."""
    server = ForkServer(*modules)
    try:
        yield server
    finally:
        server.close()


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def read_outcome(job: Job, rank: int = 0) -> dict[str, Any]:
    """Return the outcome of one rank of a job, after its process has ended."""
    result: dict[str, Any] = json.loads((Path(job.output_dir) / f"rank-{rank}.json").read_text(encoding="utf-8"))
    return result


def final_weights(job: Job, rank: int = 0) -> dict[str, Tensor]:
    """Return the final weights on one rank of a job."""
    tensors: dict[str, Tensor] = torch.load(Path(job.output_dir) / f"rank-{rank}.pt")
    return tensors


def reproducible_files(folder: str | Path) -> dict[str, Any]:
    """Return the parts of a run folder that must be equal in equal runs: all but times."""
    folder = Path(folder)
    newest = max((folder / "state").glob("step-*"))
    values = json.loads((newest / "values.json").read_text())
    del values["seconds"]
    return {
        "step": newest.name[: len("step-00000000")],  # without the number of the attempt
        "tensors": b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors"))),
        "values": values,
        "journal": (folder / "journal.jsonl").read_bytes(),
    }


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        sys.exit(main(Job(**json.loads(sys.argv[1]))))
    for module in sys.argv[1:]:
        import_module(module)
    serve_forks()

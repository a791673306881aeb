"""Processes that train a tiny model: alone, in ranks, hurt on purpose.

With a job as argument (a JSON object, see Job) it runs that job, in each rank under torchrun. With module names it is a
fork server: it imports them once, reads jobs from stdin and forks a process for each rank of each job.
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
from tests.support.tiny_runs import FAULTS, MADE, Faulty, settings, wave


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a process, and what happens to it on the way."""

    out: str  # a folder for what this process has to say: rank-N.json and rank-N.log
    what: str = "fit"  # see DONE
    folder: str = ""  # of the run
    task: str = "classify"
    dropout: float = 0.1
    train: dict[str, Any] = field(default_factory=dict)  # as in TOML, over TRAIN
    fit: dict[str, Any] = field(default_factory=dict)
    evaluate: str = ""  # "": none, "wave": the best is in the middle, "slow": a minute
    kill: int = 0  # the operation on the disk, from 1, before which the process is killed; 0: never
    fault: str = ""  # see FAULTS
    at: int = 0  # the step of the fault, from 1
    stop: int = 0  # the step in which the process receives the signal to end, too
    rank: int = 0  # which one is hurt, at its first start under torchrun
    patience: float = 60.0  # seconds that one rank waits for another
    double: bool = False  # train in float64
    rounded: bool = False  # gather rounded weights of blocks, as on GPUs
    data: str = ""  # of a whole run
    sets: tuple[str, ...] = ()  # its assignments


def killed_before(operation: int) -> list[int]:
    """Let this process die before the operation of that number; return a list with the count of operations."""
    count = [0]

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            count[0] += 1
            if count[0] == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **more)

        return call

    for name in ("open", "write", "fsync", "mkdir", "replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return count


# -- a job ------------------------------------------------------------------------------------------------------


def fitted(job: Job, trainer: Trainer) -> dict[str, Any]:
    """fit."""

    def slow() -> EvalResult:
        for _ in range(600):
            time.sleep(0.1)
        return wave(trainer)

    evaluate = {"": None, "wave": lambda: wave(trainer), "slow": slow}[job.evaluate]
    end = fit(trainer, Path(job.folder), settings({}, job.fit)[1], evaluate=evaluate)
    return {"stop_reason": end.stop_reason, "best_step": end.best_step, "resumed_from": end.resumed_from}


def updated(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Updates alone."""
    steps = list(trainer)
    values = [(step.loss, step.grad_norm, step.tokens) for step in steps]
    return dict(zip(("losses", "norms", "tokens"), map(list, zip(*values, strict=True)), strict=True))


def soaked(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Updates, and what memory and open files there are at 20 moments after the first tenth."""
    seen = []
    assert trainer.total_steps is not None
    for step in trainer:
        if step.number % (trainer.total_steps // 20) == 0 and step.number >= trainer.total_steps // 10:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append((step.number, pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))))
    return {"seen": seen}


def together(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Return what the ranks exchange."""
    mine = trainer.ranks
    tensors = [torch.arange(5.0), torch.ones(6) * mine.rank, torch.zeros(0), torch.full((2,), 0.5).double()]
    begun = [mine.all_reduce_async(tensor) for tensor in tensors]
    for process in begun:
        assert process is not None
        mine.wait_until(process.is_completed)
        mine.wait(process)
    mine.barrier()
    return {
        "added": [tensor.tolist() for tensor in tensors],
        "numbers": mine.all_gather_scalars(mine.rank, 0.1, True, 2**53),
        "none": mine.all_gather_scalars(),
        "gathered": mine.all_gather_object({"rank": mine.rank, "text": "ü" * mine.rank}),
        "first": mine.is_main,
    }


def polled(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Wait for a sum in which one rank, which is suspended, does not take part."""
    mine = trainer.ranks
    if mine.rank == job.rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    work = mine.all_reduce_async(torch.ones(3))
    assert work is not None
    mine.wait_until(work.is_completed)
    return {}


DONE = {"fit": fitted, "updates": updated, "soak": soaked, "together": together, "polled": polled}


class Stop(Reporter):
    """Ends this process's run after the step of that number; 0: never."""

    def __init__(self, after: int) -> None:
        self.after = after

    def step(self, step: Step, trainer: Trainer) -> None:
        if step.number == self.after:
            os.kill(os.getpid(), signal.SIGTERM)


def whole_run(job: Job, ranks: Ranks) -> dict[str, Any]:
    """pretrain or finetune, from files to a folder; without plots and timing."""
    from heedful.runs import run as run_module
    from heedful.runs.finetune import run as finetune
    from heedful.runs.pretrain import run as pretrain

    run_module.draw_run_plots = lambda folder: []  # type: ignore[attr-defined]
    run_module.measure_latency = lambda loaded: {"latency": {}, "throughput": 1}  # type: ignore[attr-defined]
    pretrain.write_pretrained_card = finetune.write_finetuned_card = lambda folder: None  # type: ignore[attr-defined]
    how: dict[str, Any] = {"assignments": job.sets, "reporter": Stop(job.stop), "ranks": ranks}
    if job.what == "pretrain":
        return {"stop_reason": pretrain.pretrain([job.data], job.folder, **how).status}
    return {"stop_reason": finetune.finetune("classify", job.data, job.folder, **how).status}


def run(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Do the job and return its outcome; the weights are left in a file."""
    if job.what in ("pretrain", "finetune"):
        return whole_run(job, ranks)
    loaded, task, samples = MADE[job.task](job.dropout)
    if job.double:
        loaded.double()
    if job.rounded:
        import_module("heedful.train.fsdp").ROUNDED_DEVICES = {"cpu"}  # type: ignore[attr-defined]
    trainer = Trainer(loaded, task, samples, settings(job.train, {})[0], ranks)
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if ranks.rank == job.rank and not again:
        if job.fault:
            trainer.objective = Faulty(trainer.objective, trainer, FAULTS[job.fault], job.at)
        if job.stop:
            trainer.objective = Faulty(trainer.objective, trainer, FAULTS["SIGTERM"], job.stop)
    operations = killed_before(job.kill) if job.kill and ranks.rank == job.rank and not again else [0]
    outcome = DONE[job.what](job, trainer) | {"operations": operations[0]}
    with trainer.full_params():
        torch.save(
            {name: tensor.detach() for name, tensor in loaded.named_tensors().items()},
            Path(job.out) / f"rank-{ranks.rank}.pt",
        )
    return outcome | {"step": trainer.step, "budget": trainer.state()[1]["tokens"]}


def main(job: Job) -> int:
    """Run a job; an exit code, as a command's."""
    os.environ["HEEDFUL_DIST_TIMEOUT"] = str(job.patience)
    warnings.simplefilter("always", HeedfulWarning)  # all others are errors
    with connect_ranks() as mine:
        with (Path(job.out) / f"rank-{mine.rank}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        try:
            outcome, code = run(job, mine), 0
        except HeedfulError as error:
            outcome, code = {"error": str(error), "kind": type(error).__name__}, 3
        except KeyboardInterrupt:
            outcome, code = {"error": "interrupted"}, 130
        (Path(job.out) / f"rank-{mine.rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    return code


def serve_forks() -> None:
    """Fork a process for each rank of each job that stdin names, or tell how such processes ended."""
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            reply: Any = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in asked["wait"]]
        else:
            jobs = [Job(**job) for job in asked["jobs"]]
            reply = [_forked(job, rank, len(jobs), asked["port"]) for rank, job in enumerate(jobs)]
        print(json.dumps(reply), flush=True)


def _forked(job: Job, rank: int, size: int, port: int) -> int:
    if (pid := os.fork()) > 0:
        return pid
    code = 1
    try:
        log = os.open(Path(job.out) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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


# -- for the tests ----------------------------------------------------------------------------------------------

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ForkServer:
    """The process that forks others; those that are still there at the end are killed."""

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
        """The processes of a job, or of one for each rank."""
        jobs = job if isinstance(job, list) else [job] * ranks
        Path(jobs[0].out).mkdir(parents=True, exist_ok=True)
        codes: list[int] = self._ask({"jobs": [asdict(job) for job in jobs], "port": free_port()})
        return codes

    def wait(self, pids: list[int]) -> list[int]:
        """How they ended: exit codes, or minus the signal that killed one."""
        codes: list[int] = self._ask({"wait": pids})
        return codes

    def run(self, job: Job | list[Job], ranks: int = 1) -> list[int]:
        """Begin the jobs and wait for their exit statuses."""
        return self.wait(self.begin(job, ranks))

    def _ask(self, what: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def fork_server(*modules: str) -> Iterator[ForkServer]:
    """A running fork server that has imported these modules."""
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


def told(job: Job, rank: int = 0) -> dict[str, Any]:
    """Read the outcome of a process that has finished."""
    result: dict[str, Any] = json.loads((Path(job.out) / f"rank-{rank}.json").read_text(encoding="utf-8"))
    return result


def weights(job: Job, rank: int = 0) -> dict[str, Tensor]:
    """The weights that a process ended with."""
    tensors: dict[str, Tensor] = torch.load(Path(job.out) / f"rank-{rank}.pt")
    return tensors


def left(folder: str | Path) -> dict[str, Any]:
    """All that a run leaves and that has to be the same in every run: no times."""
    folder = Path(folder)
    newest = max((folder / "state").glob("step-*"))
    values = json.loads((newest / "values.json").read_text())
    del values["seconds"]
    return {
        "step": newest.name[: len("step-00000000")],  # there may be a second turn of it
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

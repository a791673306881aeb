"""Runs that are killed at any moment and resumed: at the end, their files equal those of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heedful.train.journal import read_journal
from tests.support.processes import ForkServer, Job, final_weights, fork_server, read_outcome, reproducible_files
from tests.support.tiny_runs import tensors_equal

# number of ranks -> number of runs killed at any moment, number of runs killed before a disk operation
QUICK = {1: (3, 3), 2: (3, 3)}
FULL = {1: (50, 50), 2: (50, 20)}
COUNTS = [pytest.param(QUICK, id="quick"), pytest.param(FULL, id="full", marks=pytest.mark.slow)]
RANKS = [1, 2]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The fork server that starts the processes of runs."""
    with fork_server() as running:
        yield running


class Reference(NamedTuple):
    """Facts about an uninterrupted run."""

    files: dict[str, Any]  # result of reproducible_files
    seconds: float  # duration of the run
    disk_operations: int  # number of disk operations of rank 0


class ReferenceRuns:
    """Uninterrupted runs by number of ranks, each made when it is first needed."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.references: dict[int, Reference] = {}

    def __getitem__(self, ranks: int) -> Reference:
        if ranks not in self.references:
            job = make_job(self.folder / str(ranks))
            counting_job = replace(job, folder=f"{job.folder}-counted", kill_before=10**9)
            seconds = []
            for run in (job, counting_job):  # the shorter duration counts, since the machine may be busy
                started = time.monotonic()
                assert self.server.run(run, ranks) == [0] * ranks
                seconds.append(time.monotonic() - started)
            files = reproducible_files(job.folder)
            assert reproducible_files(counting_job.folder) == files
            self.references[ranks] = Reference(files, min(seconds), read_outcome(counting_job)["operations"])
        return self.references[ranks]


@pytest.fixture(scope="module")
def references(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> ReferenceRuns:
    """Uninterrupted runs by number of ranks."""
    return ReferenceRuns(server, tmp_path_factory.mktemp("whole"))


def make_job(folder: Path, **fields: Any) -> Job:
    """Return a job with its run folder and its output in `folder`."""
    return Job(output_dir=str(folder / "out"), folder=str(folder / "run"), evaluate="peak", **fields)


def finish(server: ForkServer, job: Job, ranks: int) -> None:
    """Resume a run to its end; at most the running step was lost, and no temporary file remains."""
    last_step = last_journal_step(Path(job.folder) / "journal.jsonl")
    assert server.run(job, ranks) == [0] * ranks
    assert {read_outcome(job, rank)["stop_reason"] for rank in range(ranks)} == {"completed"}
    assert read_outcome(job)["resumed_from"] >= max(last_step, 1) - 1
    assert all(tensors_equal(final_weights(job), final_weights(job, rank)) for rank in range(1, ranks))
    assert not list(Path(job.folder).rglob("*.part"))


def last_journal_step(journal: Path) -> int:
    """Return the number of the last step in a journal, or 0 without one."""
    return max((line["step"] for line in read_journal(journal) if "loss" in line), default=0) if journal.exists() else 0


def kill_some(rng: random.Random, pids: list[int]) -> None:
    """Kill all of these processes, or one of them."""
    for pid in pids if rng.random() < 0.3 else rng.sample(pids, 1):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_run_killed_at_any_moment_resumes_exactly(
    server: ForkServer, references: ReferenceRuns, tmp_path: Path, counts: dict[int, tuple[int, int]], ranks: int
) -> None:
    reference = references[ranks]
    rng = random.Random(ranks)
    kills = runs = starts = 0
    while runs < counts[ranks][0] or not kills:
        runs += 1
        job = make_job(tmp_path / str(runs))
        for _ in range(rng.choice((1, 2, 3))):
            starts += 1
            pids = server.begin(job, ranks)
            time.sleep(rng.uniform(0, reference.seconds))
            kill_some(rng, pids)
            kills += -9 in server.wait(pids)
        finish(server, job, ranks)
        assert reproducible_files(job.folder) == reference.files
    print(
        f"{ranks} ranks: {runs} runs of {reference.seconds:.1f} s, killed {kills} times in {starts} starts, all equal"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_killed_200_times_resumes_exactly(server: ForkServer, tmp_path: Path, ranks: int) -> None:
    """400 steps, with about 200 kills spread over all of them."""
    steps, max_kills = 400, 200
    job, steady = (make_job(tmp_path / name, train={"max_steps": steps}) for name in ("killed", "steady"))
    journal, rng = Path(job.folder) / "journal.jsonl", random.Random(ranks)
    started = time.monotonic()
    assert server.run(steady, ranks) == [0] * ranks
    step_seconds = (time.monotonic() - started) / steps
    kills = starts = done = 0
    start_seconds = 1.0  # estimated seconds from a start to its first step
    while kills < max_kills and done < steps:
        starts += 1
        is_early = done > steps * kills / max_kills  # steps are ahead of kills, so this start is killed before a step
        ahead = 2 * step_seconds * (steps - done) / (max_kills - kills)
        pids = server.begin(job, ranks)
        time.sleep(rng.uniform(0, start_seconds / 2 if is_early else start_seconds + ahead))
        kill_some(rng, pids)
        kills += -9 in server.wait(pids)
        before, done = done, last_journal_step(journal)
        if not is_early:
            start_seconds *= 0.9 if done > before else 1.1  # so that about half of these starts reach a step
    assert kills >= 0.9 * max_kills, f"the run was finished after {kills} kills"  # the load of the machine varies
    finish(server, job, ranks)
    assert reproducible_files(job.folder) == reproducible_files(steady.folder)
    print(f"{ranks} ranks: killed {kills} times in {starts} starts, the last time after step {done} of {steps}")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_run_killed_inside_a_commit_resumes_exactly(
    server: ForkServer, references: ReferenceRuns, tmp_path: Path, counts: dict[int, tuple[int, int]], ranks: int
) -> None:
    reference = references[ranks]
    operations = reference.disk_operations
    assert operations > 100
    rng = random.Random(ranks)
    kills = 0
    for number, operation in enumerate(rng.sample(range(1, operations), counts[ranks][1])):
        job = make_job(tmp_path / str(number))
        second = rng.randrange(1, operations - operation + 100)  # counted from the resume
        for kill_before in (operation, second):
            codes = server.run(replace(job, kill_before=kill_before), ranks)
            assert set(codes) <= {-9, 3} or (codes == [0] * ranks and kill_before != operation)
            kills += -9 in codes
        finish(server, job, ranks)
        assert reproducible_files(job.folder) == reference.files
    print(f"{ranks} ranks: {counts[ranks][1]} runs of {operations} disk operations, killed {kills} times, all equal")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_killed_run_with_rare_checkpoints_resumes_exactly(server: ForkServer, tmp_path: Path, ranks: int) -> None:
    rare = {"checkpoint_every_minutes": 60.0, "eval_every_epochs": 1.25}
    job, steady = make_job(tmp_path / "killed", fit=rare), make_job(tmp_path / "steady", fit=rare)
    for step in (4, 9, 12):
        assert -9 in server.run(replace(job, fault="SIGKILL", fault_step=step, faulty_rank=0), ranks)
    assert server.run(job, ranks) == server.run(steady, ranks) == [0] * ranks
    assert read_outcome(job)["resumed_from"] == 10
    assert reproducible_files(job.folder) == reproducible_files(steady.folder)

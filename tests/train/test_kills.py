"""A run that is killed at any moment and resumed ends as an uninterrupted one, to the last byte."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.train.journal import read_journal
from tests.support.processes import ForkServer, Job, final_weights, fork_server, read_outcome, reproducible_files
from tests.support.tiny_runs import tensors_equal

# kills at any moment, and kills before an operation of a commit: of one rank, and of two
QUICK, FULL = {1: (3, 3), 2: (3, 3)}, {1: (50, 50), 2: (50, 20)}
COUNTS = [pytest.param(QUICK, id="quick"), pytest.param(FULL, id="full", marks=pytest.mark.slow)]
RANKS = [1, 2]
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Where processes come from."""
    with fork_server() as made:
        yield made


class Whole:
    """Runs that nothing happened to: what they left, how long they took, and what they did on the disk."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.found: dict[int, tuple[dict[str, Any], float, int]] = {}

    def __getitem__(self, ranks: int) -> tuple[dict[str, Any], float, int]:
        if ranks not in self.found:  # twice, since one of them may have to wait for the machine
            job = job_in(self.folder / str(ranks))
            counted = replace(job, folder=f"{job.folder}-counted", kill_before=10**9)
            seconds = []
            for each in (job, counted):
                started = time.monotonic()
                assert self.server.run(each, ranks) == [0] * ranks
                seconds.append(time.monotonic() - started)
            assert reproducible_files(counted.folder) == reproducible_files(job.folder)
            self.found[ranks] = reproducible_files(job.folder), min(seconds), read_outcome(counted)["operations"]
        return self.found[ranks]


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """For each number of ranks."""
    return Whole(server, tmp_path_factory.mktemp("whole"))


def job_in(folder: Path, **more: Any) -> Job:
    return Job(output_dir=str(folder / "out"), folder=str(folder / "run"), evaluate="peak", **more)


def ended(server: ForkServer, job: Job, ranks: int) -> None:
    """Started once more, it comes to its end; at most the step that was running is lost, and nothing is left over."""
    journal = Path(job.folder) / "journal.jsonl"
    done = [line["step"] for line in read_journal(journal) if "loss" in line] if journal.exists() else []
    assert server.run(job, ranks) == [0] * ranks
    assert {read_outcome(job, rank)["stop_reason"] for rank in range(ranks)} == {"completed"}
    assert read_outcome(job)["resumed_from"] >= max(done, default=1) - 1
    assert all(tensors_equal(final_weights(job), final_weights(job, rank)) for rank in range(1, ranks))
    assert not list(Path(job.folder).rglob("*.part"))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_run_killed_at_any_moment_resumes_exactly(
    server: ForkServer, whole: Whole, tmp_path: Path, counts: dict[int, tuple[int, int]], ranks: int
) -> None:
    expected, seconds, _ = whole[ranks]
    chance = random.Random(ranks)
    killed = runs = starts = 0
    while runs < counts[ranks][0] or not killed:
        runs += 1
        job = job_in(tmp_path / str(runs))
        for _ in range(chance.choice((1, 2, 3))):
            starts += 1
            pids = server.begin(job, ranks)
            time.sleep(chance.uniform(0, seconds))
            for pid in pids if chance.random() < 0.3 else chance.sample(pids, 1):  # the whole group, or one of it
                os.kill(pid, signal.SIGKILL)
            killed += -9 in server.wait(pids)
        ended(server, job, ranks)
        assert reproducible_files(job.folder) == expected
    print(f"{ranks} ranks: {runs} runs of {seconds:.1f} s, killed {killed} times in {starts} starts, all the same")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_run_killed_200_times_resumes_exactly(server: ForkServer, tmp_path: Path, ranks: int) -> None:
    """400 steps, and 200 kills spread over all of them, or nearly so many."""
    steps, kills = 400, 200
    job, steady = (job_in(tmp_path / name, train={"max_steps": steps}) for name in ("killed", "steady"))
    journal, chance = Path(job.folder) / "journal.jsonl", random.Random(ranks)
    started = time.monotonic()
    assert server.run(steady, ranks) == [0] * ranks
    one = (time.monotonic() - started) / steps
    killed = starts = done = 0
    begin = 1.0  # seconds until the first step of a start, at first a guess
    while killed < kills and done < steps:
        starts += 1
        early = done > steps * killed / kills  # more steps than kills: this start comes to none
        ahead = 2 * one * (steps - done) / (kills - killed)
        pids = server.begin(job, ranks)
        time.sleep(chance.uniform(0, begin / 2 if early else begin + ahead))
        for pid in pids if chance.random() < 0.3 else chance.sample(pids, 1):
            os.kill(pid, signal.SIGKILL)
        killed += -9 in server.wait(pids)
        before, done = done, _last(journal)
        if not early:
            begin *= 0.9 if done > before else 1.1  # about half of these starts come to a step
    assert killed >= 0.9 * kills, f"at its end after {killed} kills"  # a busy machine is not met at every moment
    ended(server, job, ranks)
    assert reproducible_files(job.folder) == reproducible_files(steady.folder)
    print(f"{ranks} ranks: killed {killed} times in {starts} starts, the last time after step {done} of {steps}")


def _last(journal: Path) -> int:
    return max((line["step"] for line in read_journal(journal) if "loss" in line), default=0) if journal.exists() else 0


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("counts", COUNTS)
def test_a_run_killed_inside_a_commit_resumes_exactly(
    server: ForkServer, whole: Whole, tmp_path: Path, counts: dict[int, tuple[int, int]], ranks: int
) -> None:
    expected, _, operations = whole[ranks]
    assert operations > 100
    chance = random.Random(ranks)
    killed = 0
    for number, operation in enumerate(chance.sample(range(1, operations), counts[ranks][1])):
        job = job_in(tmp_path / str(number))
        for kill in (
            operation,
            chance.randrange(1, operations - operation + 100),
        ):  # the second one soon after a resume
            codes = server.run(replace(job, kill_before=kill), ranks)
            assert set(codes) <= {-9, 3} or (codes == [0] * ranks and kill != operation)
            killed += -9 in codes
        ended(server, job, ranks)
        assert reproducible_files(job.folder) == expected
    print(f"{ranks} ranks: {counts[ranks][1]} runs of {operations} operations, killed before {killed}, all the same")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_killed_run_with_rare_checkpoints_resumes_exactly(server: ForkServer, tmp_path: Path, ranks: int) -> None:
    rare = {"checkpoint_every_minutes": 60.0, "eval_every_epochs": 1.25}
    job, steady = job_in(tmp_path / "killed", fit=rare), job_in(tmp_path / "steady", fit=rare)
    for at in (4, 9, 12):
        assert -9 in server.run(replace(job, fault="SIGKILL", fault_step=at, faulty_rank=0), ranks)
    assert server.run(job, ranks) == server.run(steady, ranks) == [0] * ranks
    assert read_outcome(job)["resumed_from"] == 10
    assert reproducible_files(job.folder) == reproducible_files(steady.folder)

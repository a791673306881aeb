"""Training on several ranks: processes connected by gloo, and ranks started by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError, HashStore

from heedful.errors import HeedfulError, RunError
from heedful.train import heartbeat as heartbeat_module
from heedful.train import ranks as ranks_module
from heedful.train.heartbeat import Heartbeat
from heedful.train.ranks import SINGLE_PROCESS, Ranks, _gpu_of_each_rank, _new_store, connect_ranks
from tests.support.processes import (
    ONE_THREAD,
    ForkServer,
    Job,
    final_weights,
    fork_server,
    free_port,
    read_outcome,
    reproducible_files,
)
from tests.support.tiny_runs import LARGE_EPS, make_trainer, relative_error, tensors_equal

LOST_RANK = r"rank {} waits for rank 1, which has ended, or hangs: "


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The fork server that starts the processes of ranks."""
    with fork_server() as running:
        yield running


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run of twelve steps, with evaluations whose best is near step 7."""
    return Job(output_dir=str(tmp_path / "out"), folder=str(tmp_path / "run"), evaluate="peak")


# -- collective operations -------------------------------------------------------------------------------------------


def test_a_single_process_needs_no_connection() -> None:
    with connect_ranks() as ranks:
        assert ranks is SINGLE_PROCESS and ranks == Ranks() and ranks.is_main
    SINGLE_PROCESS.barrier()
    assert SINGLE_PROCESS.all_gather_scalars(1, 0.5, True) == [
        [1.0, 0.5, 1.0]
    ] and SINGLE_PROCESS.all_gather_scalars() == [[]]
    assert SINGLE_PROCESS.all_gather_object({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_several_ranks(server: ForkServer, job: Job, size: int) -> None:
    job = replace(job, kind="collectives")
    assert server.run(job, size) == [0] * size
    for rank in range(size):
        outcome = read_outcome(job, rank)
        assert outcome["sums"] == [
            [0.0, size, 2.0 * size, 3.0 * size, 4.0 * size],
            [float(sum(range(size)))] * 6,
            [],
            [0.5 * size] * 2,
        ]
        assert outcome["scalars"] == [[float(other), 0.1, 1.0, 2.0**53] for other in range(size)]
        assert outcome["no_scalars"] == [[]] * size
        assert outcome["objects"] == [{"rank": other, "text": "ü" * other} for other in range(size)]
        assert outcome["is_main"] == (rank == 0)


@pytest.mark.parametrize(
    ("other_ranks", "expected"),
    [
        (("host/a", "host/c"), torch.device("cuda", 0)),
        (("host/a", ""), None),
        (("host/b", "host/c"), None),  # which share a GPU, so that `resolve_auto` chooses the CPU
    ],
)
def test_nccl_connects_at_once_if_every_rank_has_a_gpu(
    other_ranks: tuple[str, str], expected: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "gpu_identity", lambda: "host/b")
    monkeypatch.setattr(ranks_module.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(ranks_module, "resolve_device", lambda name: torch.device(name, 0))
    store = HashStore()
    for rank, value in zip((0, 2), other_ranks, strict=True):
        store.set(f"gpu/{rank}", value)
    assert _gpu_of_each_rank(store, 1, 3) == expected
    assert store.get("gpu/1") == b"host/b"
    if "host/b" in other_ranks:
        with pytest.raises(HeedfulError, match="ranks 0 and 1 share a GPU with each other: start at most one process"):
            _gpu_of_each_rank(store, 1, 3, "cuda")


def test_memory_that_runs_out_in_nccl_is_no_lost_connection() -> None:
    text = "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    with pytest.raises(RuntimeError, match=r"^NCCL error"), SINGLE_PROCESS.translate_errors():
        raise RuntimeError(text)


# -- updates for any number of ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "size"), [("classify", 3), ("tag", 2), ("partial head", 2)])
def test_updates_on_several_ranks_equal_one_process(server: ForkServer, job: Job, task: str, size: int) -> None:
    train: dict[str, Any] = {"max_steps": 5, "optimizer": LARGE_EPS, "max_tokens_per_microbatch": 25}
    job = replace(job, kind="updates", task=task, dropout=0.0, train=train)
    assert server.run(job, size) == [0] * size
    assert all(tensors_equal(final_weights(job), final_weights(job, rank)) for rank in range(1, size))
    single = make_trainer(task, 0.0, **train)
    steps = list(single)  # the fourth step has one sample, so all ranks but one have none
    assert relative_error(final_weights(job), single.loaded.named_tensors()) < (
        1e-6 if task != "partial head" else 1e-5
    )
    for rank in range(size):
        assert read_outcome(job, rank)["losses"] == pytest.approx([step.loss for step in steps], rel=1e-6)
        assert read_outcome(job, rank)["tokens"] == [step.tokens for step in steps]


def test_a_run_resumes_on_other_numbers_of_ranks(server: ForkServer, job: Job, tmp_path: Path) -> None:
    job = replace(job, dropout=0.0, train={"optimizer": LARGE_EPS})
    assert server.run(replace(job, folder=str(tmp_path / "uninterrupted"))) == [0]
    for size, stop in ((1, 3), (2, 7), (4, 9), (1, 0)):
        assert server.run(replace(job, stop_step=stop), size) == [0] * size
        assert {read_outcome(job, rank)["stop_reason"] for rank in range(size)} == {
            "interrupted" if stop else "completed"
        }
    lines, expected = (
        [json.loads(line) for line in reproducible_files(folder)["journal"].splitlines()]
        for folder in (job.folder, tmp_path / "uninterrupted")
    )
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    losses, expected_losses = (
        [record["loss"] for record in records if "loss" in record] for records in (lines, expected)
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)


def test_dropout_differs_between_ranks_and_runs_are_the_same(server: ForkServer, job: Job, tmp_path: Path) -> None:
    repeated = replace(job, folder=str(tmp_path / "repeated"), output_dir=str(tmp_path / "repeated-out"))
    assert server.run(job, 2) == server.run(repeated, 2) == [0, 0]
    assert reproducible_files(job.folder) == reproducible_files(repeated.folder)
    assert all(
        tensors_equal(final_weights(job), final_weights(run, rank)) for run in (job, repeated) for rank in (0, 1)
    )
    # two ranks with one sample each: if both had the same mask, so would one rank with two micro-batches
    pair = replace(
        job,
        kind="updates",
        train={"batch_size": 2, "max_tokens_per_microbatch": 1, "max_steps": 1},
    )
    server.run(pair, 2)
    assert read_outcome(pair)["losses"] != [step.loss for step in make_trainer(**pair.train)]


# -- faults and signals on one rank ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "rank"), [("nan loss", 1), ("nan gradient", 0), ("infinite loss", 1)])
def test_all_ranks_stop_at_the_same_nonfinite_step(server: ForkServer, job: Job, fault: str, rank: int) -> None:
    job = replace(job, fault=fault, fault_step=6, faulty_rank=rank)
    assert server.run(job, 2) == [3, 3]
    for number in (0, 1):
        assert read_outcome(job, number)["kind"] == "DivergedError" and read_outcome(job, number)["error"].startswith(
            "step 6: "
        )
    files = reproducible_files(job.folder)
    assert files["step"] == "step-00000005" and b"NaN" not in files["tensors"]
    last = json.loads(files["journal"].splitlines()[-1])
    assert last["step"] == 6 and last["skipped"] and last["grad_norm"] in ("NaN", "Infinity")


def test_all_ranks_skip_the_same_nonfinite_step(server: ForkServer, job: Job) -> None:
    job = replace(job, fault="nan gradient", fault_step=6, faulty_rank=1, train={"max_nonfinite_steps": 1})
    assert server.run(job, 2) == [0, 0]
    assert tensors_equal(final_weights(job), final_weights(job, 1))
    assert reproducible_files(job.folder)["journal"].count(b"skipped") == 1


@pytest.mark.parametrize(("signal_name", "rank"), [("SIGTERM", 1), ("SIGINT", 0), ("SIGUSR1", 1)])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    server: ForkServer, job: Job, tmp_path: Path, signal_name: str, rank: int
) -> None:
    uninterrupted = replace(job, folder=str(tmp_path / "uninterrupted"))
    job = replace(job, fault=signal_name, fault_step=6, faulty_rank=rank)
    assert server.run(uninterrupted, 2) == server.run(job, 2) == [0, 0]
    assert [(read_outcome(job, number)["stop_reason"], read_outcome(job, number)["step"]) for number in (0, 1)] == [
        ("interrupted", 5)
    ] * 2
    assert reproducible_files(job.folder)["step"] == "step-00000005"
    assert server.run(replace(job, fault=""), 2) == [0, 0]
    assert reproducible_files(job.folder) == reproducible_files(uninterrupted.folder)


def test_a_second_sigint_stops_at_once(server: ForkServer, job: Job) -> None:
    job = replace(job, evaluate="slow", fit={"eval_every_epochs": 1.0})
    pids = server.begin(job, 2)
    wait_for(Path(job.folder) / "journal.jsonl", b'"step": 4')
    for _ in range(2):
        os.kill(pids[1], signal.SIGINT)
        time.sleep(0.3)
    started = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)  # rank 0 is in its evaluation
    assert server.wait(pids) == [-9, 130]
    assert time.monotonic() - started < 10
    assert reproducible_files(job.folder)["step"] == "step-00000003"


def test_a_signal_stops_an_evaluation_on_all_ranks(server: ForkServer, job: Job, tmp_path: Path) -> None:
    uninterrupted = replace(job, folder=str(tmp_path / "uninterrupted"), fit={"eval_every_epochs": 1.0})
    assert server.run(uninterrupted, 2) == [0, 0]
    pids = server.begin(replace(job, evaluate="slow", fit={"eval_every_epochs": 1.0}), 2)
    wait_for(Path(job.folder) / "journal.jsonl", b'"step": 4')
    time.sleep(0.3)  # an evaluation takes a minute
    started = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert server.wait(pids) == [0, 0] and time.monotonic() - started < 30
    assert [read_outcome(job, number)["stop_reason"] for number in (0, 1)] == ["interrupted"] * 2
    assert reproducible_files(job.folder)["step"] == "step-00000004"
    assert server.run(replace(job, fit={"eval_every_epochs": 1.0}), 2) == [0, 0]
    assert reproducible_files(job.folder) == reproducible_files(uninterrupted.folder)


def wait_for(path: Path, text: bytes) -> None:
    """Wait until a file contains a text."""
    for _ in range(3000):
        if path.exists() and text in path.read_bytes():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path.name} did not contain {text!r} in time")


@pytest.mark.slow
def test_oom_on_one_rank_shrinks_micro_batches_on_all(server: ForkServer, job: Job, tmp_path: Path) -> None:
    train = {"shrink_batch_on_oom": True, "max_tokens_per_microbatch": 40}
    uninterrupted = replace(
        job, folder=str(tmp_path / "uninterrupted"), train=train, fault="out of memory", fault_step=2, faulty_rank=1
    )
    assert server.run(uninterrupted, 2) == [0, 0]
    assert read_outcome(uninterrupted)["max_tokens"] == read_outcome(uninterrupted, 1)["max_tokens"] < 40
    stopped = replace(uninterrupted, folder=job.folder)
    assert server.run(replace(stopped, stop_step=7), 2) == [0, 0]
    assert read_outcome(stopped)["stop_reason"] == "interrupted"
    assert server.run(replace(stopped, fault=""), 2) == [0, 0]
    assert reproducible_files(stopped.folder) == reproducible_files(uninterrupted.folder)


# -- lost ranks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "code", "step"), [("SIGKILL", -9, 1), ("SIGKILL", -9, 6), ("error", 3, 6)])
def test_other_ranks_stop_and_name_the_lost_rank(
    server: ForkServer, job: Job, fault: str, code: int, step: int
) -> None:
    job = replace(job, fault=fault, fault_step=step, faulty_rank=1)
    started = time.monotonic()
    codes = server.run(job, 3)
    assert time.monotonic() - started < 30
    assert codes == [3, code, 3]
    for rank in (0, 2):
        assert read_outcome(job, rank)["error"].startswith(LOST_RANK.format(rank))
        assert read_outcome(job, rank)["error"].endswith("resumes the run from its newest checkpoint")
        assert len(read_outcome(job, rank)["error"]) < 300


def test_a_hanging_rank_is_detected(server: ForkServer, job: Job) -> None:
    job = replace(job, fault="SIGSTOP", fault_step=6, faulty_rank=1, dist_timeout=6.0)
    pids = server.begin(job, 2)
    started = time.monotonic()
    assert server.wait(pids[:1]) == [3], (Path(job.output_dir) / "rank-0.log").read_text()
    assert time.monotonic() - started < 60
    os.kill(pids[1], signal.SIGKILL)
    assert server.wait(pids[1:]) == [-9]
    assert read_outcome(job)["error"].startswith(LOST_RANK.format(0))
    assert (
        "imed out" in read_outcome(job)["error"] or "Application timeout" in read_outcome(job)["error"]
    )  # whichever comes first


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("Application timeout caused pair closure", True),  # gloo, without and with its source line
        ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2", True),
        ("Timed out waiting 6000ms for recv operation to complete", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_connection_errors_are_recognised(message: str, is_lost: bool) -> None:
    kind, text = (HeedfulError, "rank 0 waits for") if is_lost else (RuntimeError, message)
    with pytest.raises(kind, match=text), SINGLE_PROCESS.translate_errors():
        raise RuntimeError(message)


class Work:
    """Work that is complete when it is asked for the time of that number."""

    def __init__(self, times: int) -> None:
        self.times = times

    def is_completed(self) -> bool:
        self.times -= 1
        return self.times <= 0


def test_work_is_polled_with_a_deadline() -> None:
    work = Work(5)
    Ranks(size=2).wait_until(work.is_completed)
    assert work.times == 0
    mine = Ranks(size=2, timeout=timedelta(seconds=0.1))
    with pytest.raises(HeedfulError, match=r"^rank 0 waits for another rank, which has ended, or hangs: timed out"):
        mine.wait_until(Work(10**9).is_completed)
    SINGLE_PROCESS.wait_for_gpu(torch.device("cuda", 0))  # without other ranks, and on a CPU, nothing is waited for
    mine.wait_for_gpu(torch.device("cpu"))


def test_a_wait_ends_when_a_rank_sends_no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (heartbeat_module, ranks_module):
        monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.03)
    monkeypatch.setattr(heartbeat_module, "LOST_READINGS", 2)
    store = HashStore()
    beats = [Heartbeat(store, rank, 3) for rank in range(3)]
    mine, end = Ranks(size=3, heartbeat=beats[0]), time.monotonic() + 1.5
    try:
        mine.wait_until(lambda: time.monotonic() > end)
        beats[2].stop()
        expected = r"^rank 0 waits for rank 2, which has ended, or hangs: connection lost: no heartbeat, after \d s"
        with pytest.raises(HeedfulError, match=expected):
            mine.wait_until(lambda: False)
    finally:
        for heartbeat in beats:
            heartbeat.stop()


def test_a_wait_ends_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "SILENCE_SECONDS", 0.01)
    heartbeat = Heartbeat(HashStore(), 1, 2)
    heartbeat.stop()  # and the store never has heartbeats of rank 0
    lost = []
    for _ in range(heartbeat_module.LOST_READINGS):
        time.sleep(0.02)
        lost.append(heartbeat.is_rank_lost())
    assert lost == [False] * 4 + [True]


@pytest.mark.slow
def test_a_suspended_rank_is_named_within_30_seconds(server: ForkServer, job: Job) -> None:
    job = replace(job, kind="poll", faulty_rank=1, dist_timeout=100.0)
    started = time.monotonic()
    pids = server.begin(job, 2)
    try:
        wait_for(Path(job.output_dir) / "rank-0.json", b"rank 0 waits for rank 1")
        assert time.monotonic() - started < 30
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        server.wait(pids)


def test_an_error_leaves_sums_by_nccl_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for a lost rank, and to destroy the process group would wait for them."""
    ended: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks_module, "rendezvous", lambda *_, **__: iter([(SimpleNamespace(clone=HashStore), 0, 1)]))
    monkeypatch.setattr(ranks_module, "_new_store", lambda store, *_: store)
    monkeypatch.setattr(ranks_module.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(ranks_module.dist, "init_process_group", lambda backend, **_: ended.append(backend))
    monkeypatch.setattr(ranks_module.dist, "destroy_process_group", lambda: ended.append("destroyed"))
    for has_gpu, fails in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(RunError) if fails else nullcontext(), connect_ranks("cpu"):
            if fails:
                raise RunError("lost")
    assert ended == ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", "destroyed", "gloo", "destroyed"]


def test_ranks_that_do_not_connect_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.train.ranks.RENDEZVOUS_TIMEOUT", timedelta(seconds=1))
    port = str(free_port())
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in (environment | {"HEEDFUL_DIST_TIMEOUT": "1"}).items():
        monkeypatch.setenv(name, value)
    expected = rf"rank 0 of 2 .* 127\.0\.0\.1:{port}: Timed out"
    with pytest.raises(HeedfulError, match=expected), connect_ranks():
        pass


def test_ranks_ignore_ranks_of_an_earlier_start() -> None:
    """The store of torchrun outlives a start with all of its keys; ranks connect at different times."""
    store = HashStore()
    values: dict[tuple[int, int], list[bytes]] = {}

    def connect(start: int, rank: int) -> None:
        shared = _new_store(store, rank, 3, timedelta(seconds=5))
        shared.set(f"value/{rank}", f"{start}")
        values[start, rank] = [shared.get(f"value/{other}") for other in range(3)]

    for start in range(3):
        threads = [threading.Thread(target=connect, args=(start, rank), daemon=True) for rank in range(3)]
        for rank, thread in enumerate(threads):
            time.sleep(0.2 * (rank == start))
            thread.start()
        for thread in threads:
            thread.join(10)
    assert values == {(start, rank): [f"{start}".encode()] * 3 for start in range(3) for rank in range(3)}
    with pytest.raises(DistStoreError, match="ranks 1 and 2"):
        _new_store(store, 0, 3, timedelta(seconds=0.2))


def test_ranks_with_different_checkpoints_are_refused(server: ForkServer, job: Job, tmp_path: Path) -> None:
    assert server.run(replace(job, stop_step=3)) == [0]
    assert server.run([job, replace(job, folder=str(tmp_path / "another"))]) == [3, 3]
    for rank in (0, 1):
        assert "the numbers of their samples are [[2.0, 16.0], [0.0, 16.0]]" in read_outcome(job, rank)["error"]


# -- torchrun -----------------------------------------------------------------------------------------------------


def torchrun(job: Job, restarts: int, size: int = 2) -> subprocess.Popen[str]:
    """Start a job on `size` ranks by torchrun."""
    Path(job.output_dir).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    script = [f"--max-restarts={restarts}", "-m", "tests.support.processes", json.dumps(asdict(job))]
    return subprocess.Popen(
        command + script,
        env=os.environ | ONE_THREAD,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def has_ended(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def rank_pids(job: Job, size: int, start: int) -> list[int]:
    """Wait until all ranks have started `start` + 1 times, and return their process ids of start number `start`."""
    for _ in range(6000):
        files = [Path(job.output_dir) / f"rank-{rank}.pids" for rank in range(size)]
        ids = [path.read_text().split() if path.exists() else [] for path in files]
        if all(len(starts) > start for starts in ids):
            return [int(starts[start]) for starts in ids]
        time.sleep(0.01)
    raise AssertionError(ids)


def wait_until(condition: Callable[[], bool], error: str) -> float:
    """Wait until a condition is true, and return the time."""
    for _ in range(6000):
        if condition():
            return time.monotonic()
        time.sleep(0.01)
    raise AssertionError(error)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fault", "shard"),
    [
        (2, {"fault": "SIGKILL", "fault_step": 6, "faulty_rank": 1}, 1),
        *(
            slow(size, fault, shard)
            for size in (2, 4)
            for shard in (1, "all")
            for fault in (
                {"fault": "SIGKILL", "fault_step": 1, "faulty_rank": size - 1},  # before the first update
                {"fault": "SIGKILL", "fault_step": 6, "faulty_rank": 0},
                {"kill_before": 140, "faulty_rank": 0},  # during a save
            )
        ),
    ],
)
def test_torchrun_restarts_a_killed_rank(
    server: ForkServer, job: Job, tmp_path: Path, size: int, fault: dict[str, Any], shard: Any
) -> None:
    job = replace(job, train={"data_parallel_shard_degree": shard}, evaluate="")
    slower = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # on a busy machine
    process = torchrun(replace(job, **fault), restarts=1, size=size)
    try:
        first = rank_pids(job, size, 0)
        killed = wait_until(lambda: has_ended(first[fault["faulty_rank"]]), "the rank was not killed")
        down = wait_until(lambda: all(map(has_ended, first)), "other ranks do not end")
        second = rank_pids(job, size, 1)
        journal = Path(job.folder) / "journal.jsonl"
        before = journal.read_bytes()
        training = wait_until(
            lambda: b'"step": 12' in journal.read_bytes() or len(journal.read_bytes()) > len(before),
            "no step after the restart",
        )
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    print(
        f"{size} ranks: down after {down - killed:.1f} s, training after {training - killed:.1f} s, load {slower:.1f}"
    )
    assert down - killed < 10 * slower and training - killed < 30 * slower
    assert all(map(has_ended, [*first, *second])), "a rank still runs"
    if "fault_step" in fault:
        assert [read_outcome(job, rank)["resumed_from"] for rank in range(size)] == [fault["fault_step"] - 1] * size
    uninterrupted = replace(job, folder=str(tmp_path / "uninterrupted"))
    assert server.run(uninterrupted, size) == [0] * size
    assert reproducible_files(job.folder) == reproducible_files(uninterrupted.folder)


@pytest.mark.slow
def test_sigterm_to_torchrun_makes_a_checkpoint(server: ForkServer, job: Job, tmp_path: Path) -> None:
    long = replace(
        job,
        train={"max_steps": 100_000},
        fit={"checkpoint_every_minutes": 60.0, "eval_every_epochs": 1e6},
    )
    process = torchrun(long, restarts=0)
    wait_for(Path(job.folder) / "journal.jsonl", b'"step": 9')
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - started < 30
    assert [read_outcome(job, rank)["stop_reason"] for rank in (0, 1)] == ["interrupted", "interrupted"]
    assert (
        read_outcome(job)["step"]
        == read_outcome(job, 1)["step"]
        == int(reproducible_files(job.folder)["step"][5:])
        >= 9
    )

"""Worker processes that tokenise shards: started here, connected by pipes, ended with their parent."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from heedful.data.corpus.shards import Ids, ShardSpec, ShardWriter
from heedful.errors import DataError, HeedfulError

if TYPE_CHECKING:
    import tokenizers


def available_cores() -> int:
    """Number of processor cores that this process may use (macOS has no affinity: all)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A worker process, seen from its parent; messages are sent only when it waits for one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.busy = False
        self.number = -1  # number of its chunk
        assert process.stdout is not None
        self.answers = process.stdout

    def send(self, message: object, number: int) -> None:
        """Send a message about chunk `number`."""
        self.busy, self.number = True, number
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_exit()

    def receive(self) -> object:
        """Receive an answer; an error of the worker is raised here."""
        try:
            answer = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError):
            self._raise_exit()
        if isinstance(answer, HeedfulError):
            raise answer
        return answer

    def _raise_exit(self) -> NoReturn:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        hint = ": there may be too little memory, so give fewer processes or a smaller shard" if code == -9 else ""
        raise DataError(
            f"a worker {how}, at shard {self.number}{hint}; finished shards are kept: call it again, and it resumes"
        )


@contextmanager
def start_workers(count: int, job: ShardSpec, tokenizer: Path) -> Iterator[list[Worker]]:
    """Start workers, and end them on exit.

    They have their own sessions, so that Ctrl-C reaches only this process, and end when it does.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from heedful.data.corpus.workers import serve; serve()"
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    pipe = subprocess.PIPE
    try:
        for _ in range(count):
            command = [sys.executable, "-c", code]
            processes.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            )
        workers = [Worker(process) for process in processes]
        for worker in workers:
            worker.send((job, tokenizer), -1)
            worker.busy = False
        yield workers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


# ---------------------------------------------------------------------------------------------------- the other side


def library_ids(backend: tokenizers.Tokenizer) -> Ids:
    """Return a function from texts to token ids without special tokens, by the `tokenizers` library."""

    def ids(texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encodings], np.int64)
        tokens = np.empty(lengths.sum(), np.int32)
        at = 0
        for encoding in encodings:
            tokens[at : (at := at + len(encoding))] = encoding.ids
        return tokens, lengths

    return ids


def serve() -> None:
    """Main function of a worker: receive a ShardSpec and a tokenizer file, then chunks; send DedupKeys and counts.

    It imports neither torch nor the rest of Heedful, and ends when its parent does.
    """
    import tokenizers

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    parent = os.getppid()

    def check() -> None:
        if os.getppid() != parent:
            os._exit(1)

    def say(answer: object) -> None:
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()

    with suppress(EOFError, BrokenPipeError):
        job, path = pickle.load(sys.stdin.buffer)
        maker = ShardWriter(job, library_ids(tokenizers.Tokenizer.from_file(str(path))), check)
        while True:
            number, chunk = pickle.load(sys.stdin.buffer)
            try:
                offer, verdict = maker.begin(chunk), None
                if job.judged:
                    say(offer)
                    verdict = pickle.load(sys.stdin.buffer)
                say(maker.end(number, verdict))
            except HeedfulError as error:
                say(error)

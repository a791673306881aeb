"""Worker processes that tokenise shards, connected with their parent by pipes; they end when it does."""

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

from heedful.data.corpus.shards import ShardSpec, ShardWriter, Tokenise
from heedful.errors import DataError, HeedfulError

if TYPE_CHECKING:
    import tokenizers


def available_cores() -> int:
    """Return the number of processor cores that this process may use; on macOS, which has no affinity, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """A worker process, seen from its parent; a message may be sent only while it waits for one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.busy = False  # whether it has a chunk
        self.number = -1  # number of its chunk
        assert process.stdout is not None
        self.answers = process.stdout

    def send(self, message: object, number: int) -> None:
        """Send a message about the chunk `number`."""
        self.busy, self.number = True, number
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_exit()

    def receive(self) -> object:
        """Receive an answer; a HeedfulError of the worker is raised here."""
        try:
            answer = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError):
            self._raise_exit()
        if isinstance(answer, HeedfulError):
            raise answer
        return answer

    def _raise_exit(self) -> NoReturn:
        """Raise DataError that the worker has ended."""
        code = self._process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        hint = ": there may be too little memory, so give fewer processes or a smaller shard" if code == -9 else ""
        raise DataError(
            f"a worker {end}, at shard {self.number}{hint}; finished shards are kept: call it again, and it resumes"
        )


@contextmanager
def start_workers(count: int, spec: ShardSpec, tokenizer: Path) -> Iterator[list[Worker]]:
    """Start workers, and end them on exit.

    Each worker has a session of its own, so that Ctrl-C reaches this process alone; it ends when this process does.

    Args:
        count: number of workers.
        spec: how chunks become shards.
        tokenizer: file tokenizer.json.
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
            worker.send((spec, tokenizer), -1)
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


# ---------------------------------------------------------------------------------------------------- in the worker


def library_tokenise(backend: tokenizers.Tokenizer) -> Tokenise:
    """Return a function from texts to token ids without special tokens, which calls the `tokenizers` library."""

    def tokenise(texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encodings], np.int64)
        tokens = np.empty(lengths.sum(), np.int32)
        start = 0
        for encoding in encodings:
            stop = start + len(encoding)
            tokens[start:stop] = encoding.ids
            start = stop
        return tokens, lengths

    return tokenise


def serve() -> None:
    """Run a worker: receive a ShardSpec and a tokenizer file, then chunks; send keys and counts of each chunk.

    It imports neither torch nor the rest of Heedful, and ends when its parent does.
    """
    import tokenizers

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    parent = os.getppid()

    def exit_without_parent() -> None:
        if os.getppid() != parent:
            os._exit(1)

    def send(answer: object) -> None:
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()

    with suppress(EOFError, BrokenPipeError):
        spec, path = pickle.load(sys.stdin.buffer)
        writer = ShardWriter(spec, library_tokenise(tokenizers.Tokenizer.from_file(str(path))), exit_without_parent)
        while True:
            number, chunk = pickle.load(sys.stdin.buffer)
            try:
                keys, verdicts = writer.clean(chunk), None
                if spec.is_deduplicated:
                    send(keys)
                    verdicts = pickle.load(sys.stdin.buffer)
                send(writer.write(number, verdicts))
            except HeedfulError as error:
                send(error)

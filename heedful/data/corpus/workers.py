"""Worker processes that tokenise the shards of a corpus. They talk to the parent process over pipes, and end with it.

`build` starts them with `start_workers`. The second part of this module runs in the workers.
"""

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
    """Return how many processor cores this process may use. On macOS, which has no affinity, these are all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Worker:
    """The parent's view of a worker process. A message may be sent only while the worker waits for one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.busy = False  # whether the worker has a chunk
        self.chunk_index = -1  # index of the worker's chunk; -1: no chunk yet
        assert process.stdout is not None
        self.answers = process.stdout

    def send(self, message: object, chunk_index: int) -> None:
        """Send a message about a chunk."""
        self.busy = True
        self.chunk_index = chunk_index
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_exit()

    def receive(self) -> object:
        """Receive an answer. A HeedfulError of the worker is raised in this process."""
        try:
            answer = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError):
            self._raise_exit()
        if isinstance(answer, HeedfulError):
            raise answer
        return answer

    def _raise_exit(self) -> NoReturn:
        """Raise DataError because the worker has ended."""
        code = self._process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        hint = ": there may be too little memory, so give fewer processes or a smaller shard" if code == -9 else ""
        raise DataError(
            f"a worker {end}, at shard {self.chunk_index}{hint}; finished shards are kept: call it again, and it "
            "resumes"
        )


@contextmanager
def start_workers(count: int, spec: ShardSpec, tokenizer: Path) -> Iterator[list[Worker]]:
    """Start workers, and end them on exit.

    Each worker has a separate session, so that Ctrl-C reaches only this process. Workers end when this process ends.

    Args:
        count: how many workers are started.
        spec: how chunks become shards.
        tokenizer: path of tokenizer.json.
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
    """Run a worker: receive a ShardSpec and a tokenizer file, then chunks. Send the keys and the counts of each chunk.

    A worker imports neither torch nor the rest of Heedful, and ends when its parent ends.
    """
    import tokenizers

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output that libraries print must not mix with the answers
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
            chunk_index, chunk = pickle.load(sys.stdin.buffer)
            try:
                keys = writer.clean(chunk)
                verdicts = None
                if spec.is_deduplicated:
                    send(keys)
                    verdicts = pickle.load(sys.stdin.buffer)
                send(writer.write(chunk_index, verdicts))
            except HeedfulError as error:
                send(error)

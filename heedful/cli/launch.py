"""--nproc: run the same command in several processes, started by torchrun, for data parallel training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from heedful.errors import HeedfulError


def parse_process_count(text: object) -> int:
    """Return the number of processes, 0 or more; "gpu" means one process for each GPU that PyTorch finds.

    Raises:
        BadParameter: If the text is not such a number, or if PyTorch finds no GPU for "gpu".
    """
    if text == "gpu":
        from torch.cuda import device_count

        if not (count := device_count()):
            raise typer.BadParameter("PyTorch sees no GPU: give a number of processes, or leave --nproc out")
        return count
    if not str(text).isdecimal():
        raise typer.BadParameter(f'"{text}" is not a number of processes: give a whole number, 0 or more, or gpu')
    return int(str(text))


Nproc = Annotated[
    int,
    typer.Option(
        parser=parse_process_count,
        metavar="N|gpu",
        help="Number of processes on this machine for data parallel training; gpu: one for each GPU; 0: only this "
        "process.",
    ),
]


def launch(count: int, arguments: Sequence[str]) -> None:
    """Run the command in several processes by torchrun, and return when all of them have succeeded.

    Args:
        count: Number of processes.
        arguments: Arguments of the command, with --nproc.

    Raises:
        HeedfulError: If this process was started by torchrun itself.
        SystemExit: If a process fails, with the exit code of the first one that failed. If a signal ends that process,
            or torchrun, with 128 + the number of the signal, as in a shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise HeedfulError("--nproc was given in a process that torchrun has started: leave --nproc out")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    torchrun_flags = ["--standalone", f"--nproc-per-node={count}", "--module", "heedful"]
    try:
        with _limited_threads(count):
            run(get_args_parser().parse_args([*torchrun_flags, *without_nproc(arguments)]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode  # minus the number of the signal that ended the process, or its exit code
        raise SystemExit(128 - code if code < 0 else code or 1) from None
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None


def without_nproc(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without --nproc and its value.

    >>> without_nproc(["pretrain", "a", "--nproc", "2", "--nproc=3", "--json"])
    ['pretrain', 'a', '--json']
    """
    remaining = list(arguments)
    while "--nproc" in remaining:
        position = remaining.index("--nproc")
        del remaining[position : position + 2]
    return [argument for argument in remaining if not argument.startswith("--nproc=")]


@contextmanager
def _limited_threads(count: int) -> Iterator[None]:
    """Divide the cores among `count` processes by OMP_NUM_THREADS, unless the user has set that variable.

    Without it, torchrun would give each process a single thread.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    from heedful.data.corpus.workers import available_cores

    os.environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // count))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]

"""--nproc: run the same command in several processes for data parallel training, started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from heedful.errors import HeedfulError


def parse_process_count(text: object) -> int:
    """Return the number of processes: a number from 0, or "gpu", one for each GPU that PyTorch sees."""
    if text == "gpu":
        from torch.cuda import device_count

        if not (count := device_count()):
            raise typer.BadParameter("PyTorch sees no GPU: give a number of processes, or leave it out")
        return count
    if not str(text).isdecimal():
        raise typer.BadParameter(f'"{text}" is no number of processes: give a whole number from 0, or gpu')
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
    """Run the command in several processes by torchrun; if one fails, exit with its exit code.

    Args:
        count: Number of processes.
        arguments: Arguments of the command, with --nproc.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise HeedfulError("--nproc was given in a process that torchrun has started: leave it out")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    torchrun_flags = ["--standalone", f"--nproc-per-node={count}", "--module", "heedful"]
    try:
        with _limited_threads(count):
            run(get_args_parser().parse_args([*torchrun_flags, *without_nproc(arguments)]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None
    except SignalException:
        raise SystemExit(130) from None


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
    """Context in which OMP_NUM_THREADS divides the cores among `count` processes, unless it is set already."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    from heedful.data.corpus.workers import available_cores

    os.environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // count))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]

"""--nproc: the same command in several processes, which torchrun starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from heedful.errors import HeedfulError

Nproc = Annotated[
    int, typer.Option(min=0, help="Number of processes on this machine that train together; 0: only this one.")
]


def launch(count: int, given: Sequence[str]) -> None:
    """Run the command in several processes; if one fails, exit with its status."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise HeedfulError("--nproc starts processes, but torchrun has started this one already: leave it out")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    flags = ["--standalone", f"--nproc-per-node={count}", "--module", "heedful"]
    try:
        with _threads(count):
            run(get_args_parser().parse_args([*flags, *without_nproc(given)]))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        raise SystemExit(first.exitcode if first.exitcode > 0 else 1) from None
    except SignalException:
        raise SystemExit(130) from None


def without_nproc(given: Sequence[str]) -> list[str]:
    """The words of a command but --nproc and its number.

    >>> without(["pretrain", "a", "--nproc", "2", "--nproc=3", "--json"])
    ['pretrain', 'a', '--json']
    """
    left = list(given)
    while "--nproc" in left:
        at = left.index("--nproc")
        del left[at : at + 2]
    return [word for word in left if not word.startswith("--nproc=")]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Cores are shared by the processes, unless somebody has said otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    from heedful.data.corpus.workers import cores

    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // count))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]

"""The command `heedful`, one module for each of its commands. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from heedful.cli.output import note, show_warning
from heedful.cli.streams import drop_stdout, open_streams
from heedful.cli.verb_group import VerbGroup
from heedful.errors import HeedfulError, HeedfulWarning

SPIN_COUNT = "10000"  # iterations that a waiting thread of GNU's OpenMP spins before it sleeps; its default is 300,000

app = typer.Typer(
    cls=VerbGroup,
    help="Tokenise, pre-train, fine-tune, distil, inspect and serve attention models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Exit codes: 0 success, 1 stdout was closed by its reader, 2 a HeedfulError, 130 interrupted. --nproc: see `launch`.

    Args:
        arguments: Arguments after `heedful`. If None, the arguments of the process.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP reads this when torch is imported. With the default, its threads would spin most of the time while
        # other processes need the processor.
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        try:
            open_streams()
            with warnings.catch_warnings():
                warnings.simplefilter("default", HeedfulWarning)  # show each message once
                warnings.showwarning = show_warning
                try:
                    app(arguments, prog_name="heedful", obj=list(sys.argv[1:] if arguments is None else arguments))
                finally:
                    sys.stdout.flush()
        except HeedfulError as error:
            note(f"heedful: {error}")
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    except BrokenPipeError:
        drop_stdout()
        raise SystemExit(1) from None


def _print_version(requested: bool) -> bool:
    """Print the version and exit if --version was given."""
    if requested:
        from heedful._version import __version__

        print(f"heedful {__version__}")
        raise typer.Exit
    return requested


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass

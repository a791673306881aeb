"""The command `heedful kernels`: show or build the C++ kernels."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import print_json, print_table
from heedful.errors import HeedfulError


def kernels(
    what: Annotated[
        Literal["show", "build"],
        typer.Argument(help="show: report whether they are used; build: build them now, not on first use."),
    ] = "show",
    as_json: AsJson = False,
) -> None:
    """Show or build the C++ kernels.

    They are built for this processor when they are first needed and kept under HEEDFUL_CACHE, from where they are
    loaded later, with or without a compiler. HEEDFUL_KERNELS=off disables them. `build` fails if they cannot be built.
    """
    from heedful.csrc import library

    loaded = library.kernels()  # builds and loads them if that is possible
    reason = library.unavailable_reason()
    if what == "build" and loaded is None:
        raise HeedfulError(f"the kernels were not built: {reason}")
    facts = {
        "used": loaded is not None,
        "why_not": reason or None,
        "library": None if loaded is None else str(loaded.path),
        "compiler": None if loaded is None else loaded.compiler,
        "bfloat16": loaded is not None and loaded.has_bfloat16,
        "amx": loaded is not None and loaded.has_tiles,
        "vector": 0 if loaded is None else loaded.lanes,
    }
    if as_json:
        return print_json(facts)
    if loaded is None:
        return print_table([["kernels", "not used"], ["reason", reason]])
    print_table(
        [
            ["kernels", str(loaded.path)],
            ["compiler", str(loaded.compiler)],
            ["vectors", f"{loaded.lanes} numbers"],
            ["bfloat16", "multiplied" if loaded.has_bfloat16 else "not multiplied by this processor"],
            ["AMX", "used" if loaded.has_tiles else "not used: the processor, the compiler or the system lacks it"],
        ]
    )

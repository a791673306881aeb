"""The verb about the kernels in C++."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from heedful.cli.output import print_table, write_json
from heedful.cli.train import AsJson


def kernels(
    what: Annotated[
        Literal["show", "build"], typer.Argument(help="show: whether there are any; build: now, not on first use.")
    ] = "show",
    as_json: AsJson = False,
) -> None:
    """Show or build the C++ kernels.

    They are built when they are first wanted, for this processor, and kept under HEEDFUL_CACHE, where they are used
    with or without a compiler; HEEDFUL_KERNELS=off does without them. It is an error if they are to be built and
    cannot.
    """
    from heedful.csrc import library
    from heedful.errors import HeedfulError

    found, reason = library.kernels(), library.why()
    if what == "build" and found is None:
        raise HeedfulError(f"the kernels were not built: {reason}")
    facts = {
        "used": found is not None,
        "why_not": reason or None,
        "library": None if found is None else str(found.path),
        "compiler": None if found is None else found.compiler,
        "bfloat16": found is not None and found.half,
        "vector": 0 if found is None else found.lanes,
    }
    if as_json:
        return write_json(facts)
    if found is None:
        return print_table([["kernels", "not used"], ["why", reason]])
    bfloat16 = "multiplied" if found.half else "not multiplied by this processor"
    print_table(
        [
            ["kernels", str(found.path)],
            ["compiler", str(found.compiler)],
            ["vectors", f"{found.lanes} numbers"],
            ["bfloat16", bfloat16],
        ]
    )

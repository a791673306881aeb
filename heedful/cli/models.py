"""The verb that lists families and sizes: models."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any

import typer

from heedful.cli.output import note, print_table, write_json
from heedful.cli.train import AsJson


def models(
    family: Annotated[bool, typer.Option("--family", help="Compare the families side by side.")] = False,
    as_json: AsJson = False,
) -> None:
    """List model families, sizes and parameter counts.

    The published sizes of each family, and the exact number of parameters of the bare model; with --family also
    objectives, sharing, positions, and published and recorded results.
    """
    if family:
        from heedful.cli.family_table import print_family_table as compare

        return compare(as_json)
    from heedful.checkpoint.published_sizes import published

    found: list[dict[str, Any]] = []
    for size in published():
        model = size.config.model
        stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
        found.append(
            {
                "family": size.family,
                "size": size.name,
                "layers": [stack.layers for stack in stacks],
                "width": model.width,
                "heads": stacks[0].heads,
                "vocab_size": model.embedding.vocabulary,
                "parameters": size.parameters,
            }
        )
    if as_json:
        return write_json(found)
    rows: list[list[str]] = []
    for name, sizes in groupby(found, key=lambda each: each["family"]):
        rows.append([name])
        for each in sizes:
            numbers = (f"{each[what]:,}" for what in ("width", "heads", "vocab_size", "parameters"))
            rows.append([f"  {each['size']}", " + ".join(map(str, each["layers"])), *numbers])
    print_table(rows, head=["size", "layers", "width", "heads", "tokens", "parameters"], right={1, 2, 3, 4, 5})
    note("Parameters of the bare model, counted on it; what is shared counts once.")

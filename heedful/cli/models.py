"""The command `heedful models`: list model families, sizes and parameter counts."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, TypedDict

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import note, print_json, print_table


class SizeFacts(TypedDict):
    """One published size of a family."""

    family: str
    size: str
    layers: list[int]  # layers of each stack: [encoder, decoder], or of the only one
    width: int  # hidden size
    heads: int  # attention heads of each layer
    vocab_size: int
    parameters: int


def models(
    family: Annotated[bool, typer.Option("--family", help="Compare the families side by side.")] = False,
    as_json: AsJson = False,
) -> None:
    """List model families, sizes and parameter counts.

    Lists the published sizes of each family with the exact number of parameters of the model without a task head; with
    --family also objectives, parameter sharing, positions, published results, and results of Heedful's benchmarks.
    """
    if family:
        from heedful.cli.family_table import print_family_table  # imports torch

        print_family_table(as_json)
        return
    sizes = _published_sizes()
    if as_json:
        print_json(sizes)
        return
    rows: list[list[str]] = []
    for family_name, family_sizes in groupby(sizes, key=lambda facts: facts["family"]):  # already grouped
        rows.append([family_name])
        for facts in family_sizes:
            counts = (facts["width"], facts["heads"], facts["vocab_size"], facts["parameters"])
            layers = " + ".join(map(str, facts["layers"]))
            rows.append([f"  {facts['size']}", layers, *(f"{count:,}" for count in counts)])
    print_table(rows, head=["size", "layers", "width", "heads", "tokens", "parameters"], right={1, 2, 3, 4, 5})
    note("Parameters of the bare model; shared parameters count once.")


def _published_sizes() -> list[SizeFacts]:
    """Return the facts of all published sizes, family by family."""
    from heedful.checkpoint.published_sizes import published  # imports torch

    sizes: list[SizeFacts] = []
    for size in published():
        model = size.config.model
        stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
        (heads,) = {stack.heads for stack in stacks}  # an encoder and a decoder have the same number
        sizes.append(
            {
                "family": size.family,
                "size": size.name,
                "layers": [stack.layers for stack in stacks],
                "width": model.width,
                "heads": heads,
                "vocab_size": model.embedding.vocabulary,
                "parameters": size.parameters,
            }
        )
    return sizes

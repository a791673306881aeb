"""The verb that exports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from heedful.cli.output import model_facts, print_table, write_json
from heedful.cli.train import AsJson


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A model folder, or NAME[@REVISION] on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file.onnx, or a folder with the tokenizer beside it.")],
    head_kind: Annotated[
        str | None, typer.Option(help="Kind of head to load instead of the one in config.json, e.g. masked_lm.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export an encoder and its head to ONNX.

    For other runtimes, which take padded batches of any size. The file is run and compared with the model first, and
    not written where they differ.
    """
    from heedful.checkpoint import load
    from heedful.infer.export import TOLERANCE
    from heedful.infer.export import export as write

    loaded = load(run, head=head_kind)
    made = write(loaded, out, overwrite=overwrite)
    facts: dict[str, Any] = model_facts(loaded) | {
        "inputs": list(made.inputs),
        "outputs": list(made.outputs),
        "max_length": made.max_length,
        "difference": made.difference,
        "tolerance": TOLERANCE,
        "bytes": made.size,
        "written": str(made.path),
    }
    if as_json:
        return write_json(facts)
    rows = {
        **{name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()},
        **{name: ", ".join(facts[name]) for name in ("inputs", "outputs")},
        "max_length": "any" if made.max_length is None else f"{made.max_length:,} tokens",
        "difference": f"{made.difference:.1e} of the largest number, from the model's outputs",
        "tolerance": f"{TOLERANCE:.0e}",
    }
    print_table([[name.replace("_", " "), value] for name, value in rows.items()])

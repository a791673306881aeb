"""The verb export: export an encoder or a decoder and its head to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson, HeadKind, Overwrite
from heedful.cli.output import model_facts, print_json, print_table


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A model folder, or NAME[@REVISION] on the hub.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A file.onnx, or a folder, where the tokenizer is written too.")
    ],
    head_kind: HeadKind = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Export an encoder or a decoder, with its head, to ONNX.

    For other runtimes, with padded batches of any size. The exported model is run and compared with the original first;
    the file is not written if they differ.
    """
    from heedful.checkpoint import load
    from heedful.infer.export import TOLERANCE
    from heedful.infer.export import export as write

    loaded = load(run, head=head_kind)
    exported = write(loaded, out, overwrite=overwrite)
    facts: dict[str, object] = model_facts(loaded) | {
        "inputs": list(exported.inputs),
        "outputs": list(exported.outputs),
        "max_length": exported.max_length,
        "difference": exported.difference,
        "tolerance": TOLERANCE,
        "bytes": exported.size,
        "written": str(exported.path),
    }
    if as_json:
        return print_json(facts)
    rows = {
        **{name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()},
        "inputs": ", ".join(exported.inputs),
        "outputs": ", ".join(exported.outputs),
        "max_length": "any" if exported.max_length is None else f"{exported.max_length:,} tokens",
        "difference": f"{exported.difference:.1e} of the largest output of the model",
        "tolerance": f"{TOLERANCE:.0e}",
    }
    print_table([[name.replace("_", " "), value] for name, value in rows.items()])

"""The command `heedful export`: export an encoder or a decoder to ONNX, or an encoder to a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson, HeadKind, Overwrite
from heedful.cli.output import model_facts, print_json, print_table
from heedful.errors import HeedfulError


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A model folder, or NAME[@REVISION] on the hub.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="A file.onnx, or a folder, where the tokenizer is written too.")
    ] = None,
    head_kind: HeadKind = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML file instead, which answers in a browser, offline.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Precision of the weight matrices with --html: auto (default), int8, float16 or float32."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Export to ONNX, or an encoder to a self-contained HTML page.

    The head is exported too. ONNX is for other runtimes, with padded batches of any size. The ONNX model is run and
    compared with the original first, and its file is not written if they differ. A page (--html) contains the model,
    and needs no server and no network.
    """
    if (out is None) == (html is None):
        raise HeedfulError("give OUT for ONNX, or --html FILE for a page, and not both")
    if html is not None:
        return _export_page(run, html, head_kind, precision or "auto", overwrite, as_json)
    if precision is not None:
        raise HeedfulError("--precision is for --html; ONNX is exported in float32")
    from heedful.checkpoint import load
    from heedful.infer.export import TOLERANCE
    from heedful.infer.export import export as write

    assert out is not None
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
    _print_facts(
        facts
        | {
            "inputs": ", ".join(exported.inputs),
            "outputs": ", ".join(exported.outputs),
            "max_length": "any" if exported.max_length is None else f"{exported.max_length:,} tokens",
            "difference": f"{exported.difference:.1e} of the largest output of the model",
            "tolerance": f"{TOLERANCE:.0e}",
        }
    )


def _export_page(run: str, html: Path, head_kind: str | None, precision: str, overwrite: bool, as_json: bool) -> None:
    """Write an HTML file with a model in it, and print facts about the file."""
    from heedful.checkpoint import load
    from heedful.look.model_title import model_title
    from heedful.page.html import export_page

    loaded = load(run, head=head_kind)
    exported = export_page(loaded, html, precision=precision, title=model_title(run), overwrite=overwrite)
    facts = model_facts(loaded) | {
        "precision": exported.precision,
        "score_change": exported.score_change,
        "bytes": exported.size,
        "written": str(exported.path),
    }
    if as_json:
        return print_json(facts)
    change = exported.score_change
    facts["score_change"] = "not measured" if change is None else f"{change:.4f} of their spread, by int8"
    _print_facts(facts)


def _print_facts(facts: dict[str, object]) -> None:
    """Print a table of names and values."""
    rows = {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in facts.items()}
    print_table([[name.replace("_", " "), value] for name, value in rows.items()])

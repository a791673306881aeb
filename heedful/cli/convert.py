"""The command `heedful convert`: convert a model folder to safetensors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson, HeadKind, Overwrite, check_free
from heedful.cli.output import model_facts, note, print_json, print_table
from heedful.errors import HeedfulError, ModelError, did_you_mean

DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A model folder, or NAME[@REVISION] on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    head_kind: HeadKind = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that a LoRA adapter is for, if not the one it names.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Type of the written weights: {', '.join(DTYPES)}.")] = "float32",
    pickle: Annotated[
        bool, typer.Option("--pickle", help="Read pickled weights, from a folder that you trust.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model folder to safetensors.

    transformers loads the written folder if it knows the family. A LoRA adapter is merged into its model.
    """
    import torch

    from heedful.checkpoint import load, save

    if dtype not in DTYPES:
        raise HeedfulError(f"--dtype is {dtype!r}{did_you_mean(dtype, DTYPES)}: use one of {', '.join(DTYPES)}")
    check_free(out, overwrite)
    folder = source
    with tempfile.TemporaryDirectory(prefix="heedful-") as temporary:
        if pickle:
            from heedful.checkpoint.unpickle import convert_pickles

            if not os.path.isdir(source):
                raise ModelError(f"{source} is not a folder: --pickle only reads local folders")
            converted = Path(temporary) / "safe"
            note(str(convert_pickles(Path(source), converted)))
            folder = str(converted)
        loaded = load(folder, head=head_kind, dtype=getattr(torch, dtype), base=base)
        save(loaded, out, overwrite=overwrite)
    facts = {**model_facts(loaded), "read": source if pickle else loaded.source, "dtype": dtype, "written": str(out)}
    if as_json:
        return print_json(facts | {"left_out": list(loaded.unused_tensors)})
    facts["left out"] = ", ".join(loaded.unused_tensors) or "nothing"
    print_table([[name, f"{value:,}" if isinstance(value, int) else str(value)] for name, value in facts.items()])

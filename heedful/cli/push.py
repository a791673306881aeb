"""The command that uploads a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.output import escape, note, print_table, write_json


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub; it is created.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody see it; else it is private.")] = False,
    with_examples: Annotated[
        bool, typer.Option("--with-examples", help="Also upload what quotes texts of the data: predictions, mistakes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded, and send nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")] = False,
) -> None:
    """Upload a model to the Hugging Face hub.

    Model card, safetensors and tokenizer go into a new private repository. Texts of the data are left out. Needs a
    token: hf auth login, or HF_TOKEN.
    """
    from heedful.runs.push import plan_push
    from heedful.runs.push import push as upload

    planned = plan_push(run, repository, private=not public, with_examples=with_examples)
    if not as_json:
        what = "would upload" if dry_run else "uploads"
        note(f"{what} to {repository} ({'private' if planned.private else 'public'}):")
        note("\n".join(f"  {escape(each.name)}, {each.size:,} bytes" for each in planned.files))
        note("\n".join(["left out:", *(f"  {escape(name)}: {why}" for name, why in planned.left_out.items())]))
    url = None if dry_run else upload(planned)
    if as_json:
        return write_json(
            {
                "repository": repository,
                "private": planned.private,
                "files": [{"name": each.name, "bytes": each.size} for each in planned.files],
                "left_out": planned.left_out,
                "url": url,
            }
        )
    if url:
        print_table([["uploaded", url]])

"""The command `heedful push`: upload a model to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import escape, note, print_json, print_table


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if it does not exist.")
    ],
    public: Annotated[bool, typer.Option("--public", help="Make the repository public; by default it is private.")] = (
        False
    ),
    with_examples: Annotated[
        bool, typer.Option("--with-examples", help="Also upload files that quote the data: predictions, mistakes.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be uploaded; upload nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Upload a model to the Hugging Face hub.

    Uploads model card, safetensors and tokenizer to a private repository, without texts of the data. Needs a token: hf
    auth login, or HF_TOKEN.
    """
    from heedful.runs.push import plan_push
    from heedful.runs.push import push as upload

    plan = plan_push(run, repository, private=not public, with_examples=with_examples)
    if not as_json:
        action = "would upload" if dry_run else "uploading"
        note(f"{action} to {repository} ({'private' if plan.private else 'public'}):")
        note("\n".join(f"  {escape(file.name)}, {file.size:,} bytes" for file in plan.files))
        note("\n".join(["left out:", *(f"  {escape(name)}: {reason}" for name, reason in plan.left_out.items())]))
    url = None if dry_run else upload(plan)
    if as_json:
        return print_json(
            {
                "repository": repository,
                "private": plan.private,
                "files": [{"name": file.name, "bytes": file.size} for file in plan.files],
                "left_out": plan.left_out,
                "url": url,
            }
        )
    if url:
        print_table([["uploaded", url]])

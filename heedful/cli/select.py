"""The command `heedful select`: choose the unlabelled texts to label next."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from heedful.cli.options import AsJson, Device
from heedful.cli.output import escape, note, note_data_settings, print_json, print_table, text_cell
from heedful.cli.settings_command import context_assignments

MAX_SHOWN = 10  # maximum texts in the printed table; the file lists all of them


def select(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    pool: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files or folders of unlabelled texts.")],
    count: Annotated[int, typer.Option("--count", "-n", help="Number of texts to select.")] = 50,
    out: Annotated[
        Path, typer.Option("--output", "-o", help="CSV file with the texts, whose labels are filled in by hand.")
    ] = Path("to-label.csv"),
    seed: Annotated[int, typer.Option(help="Random seed of the clusters.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Select the unlabelled texts to label next.

    The texts with the smallest margin between the two most probable labels are clustered by the vectors of the model,
    and one of each cluster is selected. Fill in the column "label" of the file, and give it to finetune beside the
    labelled data.
    """
    from heedful.data import DataOptions
    from heedful.data.labelled.corrections import check_review_path

    check_review_path(out)
    from heedful.infer.engine import Engine
    from heedful.runs.data_settings import input_settings_for
    from heedful.runs.overrides import override
    from heedful.runs.text_selection import select_texts

    assignments = context_assignments(context)
    engine = Engine(run, device=device)
    overrides = override(DataOptions(), assignments).data
    run_settings = input_settings_for(run, engine.kind, pool, overrides)
    if not as_json:
        note_data_settings(run_settings)
    settings = override(DataOptions(data=run_settings), assignments).data
    selected = select_texts(engine, pool, count, seed=seed, settings=settings)
    selected.to_csv(out)
    if as_json:
        facts = {"pool": selected.pool, "left_out": selected.left_out, "bad_rows": selected.bad_rows}
        return print_json(facts | {"output": str(out), "texts": [text.to_dict() for text in selected.texts]})
    if selected.bad_rows:
        note(f"{selected.bad_rows:,} rows cannot be read and were left out")
    print(f"{len(selected.texts):,} of {selected.pool:,} texts; {selected.left_out:,} are empty or repeat another one")
    rows = [
        [f"{text.margin:.3f}", escape(text.suggested_label), text_cell(text.text, text.text_pair)]
        for text in selected.texts[:MAX_SHOWN]
    ]
    print_table(rows, head=["margin", "suggested", "text"], right=[0], indent=2)
    note(
        f'\nFill in the column "label" of {out} and delete the rows that you leave empty. Next:\n'
        f"  heedful finetune classify train=TRAIN.csv train={quote(str(out))}"
    )

"""The command `heedful prune`: measure how many tokens upper layers need, and save the model with token pruning."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import AsJson, DataFiles, Device, Overwrite, Precision, check_free, check_precision_option
from heedful.cli.output import escape, note, print_json, print_table, print_text

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject


def prune(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run or a model folder that classifies texts, or scores them.")
    ],
    data: Annotated[
        list[Path], typer.Argument(metavar="DATA", help="Labelled data with rows that the run was not trained on.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the pruned model.")],
    max_loss: Annotated[
        float,
        typer.Option(metavar="POINTS", help="Points of the metric that may be lost on held-out rows."),
    ] = 0.5,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            help="Lower layers that compute all tokens; repeat it. By default a third, half and two thirds of them."
        ),
    ] = None,
    keep_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of the tokens that the other layers compute, such as 0.3; repeat it. By default 0.2 to 0.7."
        ),
    ] = None,
    precision: Precision = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a classifier faster on long texts by token pruning.

    After some layers, only the tokens that receive most attention are computed. Several numbers of layers and shares of
    tokens are timed; the fastest that loses at most --max-loss on dev is saved, and reported on test. Nothing is
    trained. Texts of up to 16 tokens are not pruned.
    """
    from heedful.data.labelled.split_files import parse_data_arguments

    checked_precision = check_precision_option(precision)
    files: DataFiles = parse_data_arguments(data)
    check_free(output, overwrite)

    from heedful.runs.prune import KEEP_RATES
    from heedful.runs.prune import prune as choose

    report = choose(
        run,
        files,
        output,
        max_loss=max_loss,
        layers=layer or (),
        keep_rates=keep_rate or KEEP_RATES,
        precision=checked_precision,
        device=device,
        overwrite=overwrite,
        log=note,
    )
    if as_json:
        return print_json({"folder": str(output)} | report)
    _show(report)
    print_text(f"\nThe model is in {output}: predict, evaluate, serve and bench use its pruning.\nNext:")
    print(f"  heedful predict {quote(str(output))} TEXT")


def _show(report: JsonObject) -> None:
    """Print the trials and the summary."""
    from heedful.runs.card.pruning import pruning_table

    head, rows = pruning_table(report)
    print_text(f"On {escape(report['fitted_on'])} ({report['fitted_rows']:,} rows)")
    print_table([list(map(escape, row)) for row in rows], head=list(map(escape, head)), right={0, 1, 2, 3, 4})
    print_text(f"\n{escape(report['sentence'])}")

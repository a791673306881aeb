"""The verb that measures speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.output import note, print_table, write_json
from heedful.cli.train import AsJson, Device
from heedful.errors import HeedfulError


def bench(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    data: Annotated[Path | None, typer.Option(help="Data of the task, to measure quality on too.")] = None,
    split: Annotated[str | None, typer.Option(help="Which split of it; else test, dev, or all there is.")] = None,
    head_kind: Annotated[
        str | None, typer.Option(help="Kind of head to load instead of the one in config.json, e.g. masked_lm.")
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure speed, memory and quality of precisions.

    float32, bfloat16 and int8 on this machine: tokens a second, milliseconds of one text, memory, and what each
    changes. One that is no faster, or changes too much, is refused, with its figures.
    """
    if split is not None and data is None:
        raise HeedfulError("--split is of --data, and none was given: give both, or leave it out")
    from dataclasses import asdict

    from heedful.runs.bench import bench as measure

    found = measure(run, data=data, split=split, head=head_kind, device=device, log=note)
    if as_json:
        return write_json(asdict(found))
    lengths = list(found.sheets[0].latency)
    rows = []
    for sheet in found.sheets:
        trial = sheet.trial
        timed = [sheet.latency.get(each) for each in lengths]
        times = ["–" if each is None else f"{each['p50']:.1f} / {each['p99']:.1f}" for each in timed]
        quality = [] if found.metric is None else ["–" if trial.metric_value is None else f"{trial.metric_value:.4f}"]
        memory = f"{sheet.resident / 1e6:,.0f}"
        verdict = "taken by auto" if trial.precision == found.taken else trial.refused or "slower"
        speed, change = f"{sheet.throughput:,}", f"{trial.scores:.4f}"
        rows.append([trial.precision, speed, *times, memory, change, *quality, verdict])
    quality = [] if found.metric is None else [f"{found.metric} ({found.split})"]
    names = ["", "tokens/s", *(f"ms at {each}" for each in lengths), "MB", "change", *quality, ""]
    print_table(rows, head=names, right=set(range(1, len(names) - 1)))
    note(
        "Tokens a second of texts of 64 tokens; milliseconds of one text, p50 / p99; neither with tokenizing. MB: all "
        "that a process that answers holds. Change: of the scores, as a share of their spread. –: so slow that only a "
        "few texts were tried."
    )

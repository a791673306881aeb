"""The command `heedful study`: run an experiment on how attention models learn, or write the toy data."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import AsJson
from heedful.cli.output import note, print_json, print_table, print_text
from heedful.errors import DataError, HeedfulError, RunError, did_you_mean

if TYPE_CHECKING:
    from heedful.study.runner import Scale


def study(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The study to run; without it studies are listed.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds, from 1 on; by default 3 (translation: 8, with --full 1), with --quick 2."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="The folder for table, plots and numbers.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A test run of seconds without meaningful results.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On real data, if the study has some; takes hours.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder of real data; by default the folder that HEEDFUL_DATA names.")
    ] = None,
    toy: Annotated[Path | None, typer.Option(help="Write the toy data to this folder instead.")] = None,
    train: Annotated[int | None, typer.Option(help="With --toy: number of training examples (20,000).")] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment on how attention models learn.

    Writes a table, conclusions, plots and all numbers as JSON. With --toy, the toy data of the studies is written as
    files for heedful finetune: a made-up language to translate, and texts whose class depends on word order and
    negation. The same command resumes an interrupted study.
    """
    if toy is not None:
        if name is not None:
            raise HeedfulError(f"--toy only writes files, and {name} is a study to run: leave one of them out")
        study_options = {"--seeds": seeds, "--output": out, "--quick": quick, "--full": full, "--data": data}
        if unused := [option for option, value in study_options.items() if value]:
            raise HeedfulError(f"{unused[0]} would change nothing: --toy only writes files; leave one of them out")
        return _write_toy(toy, train, as_json)
    if train is not None:
        raise HeedfulError("--train would change nothing: it is for --toy; give --toy FOLDER too")

    from heedful.study import STUDIES

    if name is None:
        if as_json:
            return print_json([{"name": study_name, "about": about} for study_name, about in STUDIES.items()])
        return print_table(list(STUDIES.items()))
    if name not in STUDIES:
        raise HeedfulError(
            f'"{name}" is not a study{did_you_mean(name, list(STUDIES))}: use one of {", ".join(STUDIES)}'
        )
    scale, default_seeds = _choose_scale(name, quick=quick, full=full, has_data=data is not None)
    num_seeds = default_seeds if seeds is None else seeds
    if num_seeds < 1:
        raise HeedfulError(f"--seeds is {num_seeds}; expected a whole number from 1")

    from heedful.study.runner import StudyConfig, no_log, run_study
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    config = StudyConfig(
        seeds=tuple(range(1, num_seeds + 1)),
        scale=scale,
        data=_real_data(data) if full else None,
        log=no_log if as_json else note,
    )
    folder = out or Path(f"study-{name}")
    completed = run_study(name, config, folder)
    head, rows = completed.result.table()
    if as_json:
        print_json(
            {
                "study": name,
                "folder": str(folder),
                "seconds": round(completed.seconds, 1),
                "seeds": list(config.seeds),
                "table": [list(head), *map(list, rows)],
                "verdicts": list(completed.result.verdicts),
            }
        )
    else:
        print_text(f"{STUDIES[name]}\n\n{completed.result.about}\n")
        print_table(rows, head=head, right=set(range(1, len(head))))
        print("")
        for sentence in completed.result.verdicts:
            print_text(f"* {sentence}")
        print_text(f"\n{completed.seconds:.0f} s. Table, plots and numbers: {', '.join(map(str, completed.files))}")
    if completed.write_error:
        raise RunError(f"{completed.write_error}: results are printed above but were not all saved")


def _choose_scale(name: str, *, quick: bool, full: bool, has_data: bool) -> tuple[Scale, int]:
    """Return the scale of a study, and its default number of seeds.

    Args:
        name: Name of the study.
        quick: Whether --quick was given.
        full: Whether --full was given.
        has_data: Whether --data was given.

    Raises:
        HeedfulError: If these options exclude each other, or the study has no real data for --full.
    """
    from heedful.study import REAL, SEEDS

    if quick and full:
        raise HeedfulError("--quick and --full were given: leave one of them out")
    if full and name not in REAL:
        raise HeedfulError(f"{name} has no real data: --full is for {', '.join(REAL)}")
    if has_data and not full:
        raise HeedfulError(f"--data would change nothing: it is for --full; give --full too, for {', '.join(REAL)}")
    if quick:
        return "quick", 2
    return ("full", REAL[name]) if full else ("usual", SEEDS.get(name, 3))


def _real_data(folder: Path | None) -> Path:
    """Return the folder of real data, from --data or HEEDFUL_DATA.

    Raises:
        HeedfulError: If neither is set, or there is no such folder.
    """
    path = folder or Path(os.environ.get("HEEDFUL_DATA", ""))
    if not (folder or os.environ.get("HEEDFUL_DATA")):
        raise HeedfulError("--full needs real data: give --data FOLDER, or set HEEDFUL_DATA to the folder")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    return path


def _write_toy(folder: Path, train: int | None, as_json: bool) -> None:
    """Write the toy data, and print its files and commands that use them."""
    from heedful.study.toy.files import ORDER, TRANSLATION, write_toy_files

    files = write_toy_files(folder, train=20_000 if train is None else train)
    if as_json:
        return print_json({"folder": str(folder), "files": [str(file) for file in files]})
    print_table([[str(file)] for file in files])
    order, translation = quote(str(folder / ORDER)), quote(str(folder / TRANSLATION))
    print(f"\nNext:\n  heedful finetune classify {order} --init.kind=classic")
    print(f"  heedful finetune classify {order}\n  heedful check {translation}")

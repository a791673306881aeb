"""The verb of the road's experiments: study."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer

from heedful.cli.output import note, print_table, write_json
from heedful.cli.train import AsJson
from heedful.errors import HeedfulError, did_you_mean


def study(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without it they are listed.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many, from 1 on; else 3 (translation: 8, or full 1), quickly 2.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder for table, picture and numbers.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A rehearsal of seconds, which shows nothing.")] = False,
    full: Annotated[bool, typer.Option("--full", help="On real data, where the study has some; hours.")] = False,
    data: Annotated[
        Path | None, typer.Option(help="Where real data are; else the folder that HEEDFUL_DATA names.")
    ] = None,
    toy: Annotated[Path | None, typer.Option(help="Write the toy world's files to this folder instead.")] = None,
    train: Annotated[int | None, typer.Option(help="Of the toy world: how many training examples (20,000).")] = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment on how attention models learn.

    Ends in a table, sentences that say what was seen, a picture and all numbers as JSON. With --toy, the texts that
    studies learn from are written as files that heedful finetune reads: a made-up language to translate, and texts of
    which order and negation decide the class. The same command resumes a study that was stopped.
    """
    if toy is not None:
        if name is not None:
            raise HeedfulError(f"--toy writes files, and {name} is a study: give one of them")
        given = {"--seeds": seeds, "--output": out, "--quick": quick, "--full": full, "--data": data}
        if idle := [option for option, value in given.items() if value]:
            raise HeedfulError(f"{idle[0]} is of studies, and --toy writes files to its folder: give one of them")
        return _write_toy(toy, train, as_json)
    if train is not None:
        raise HeedfulError("--train is of the toy world's files: give --toy FOLDER too")

    from heedful.study import REAL, SEEDS, STUDIES

    if name is None:
        if as_json:
            return write_json([{"name": each, "about": about} for each, about in STUDIES.items()])
        return print_table([[each, about] for each, about in STUDIES.items()])
    if name not in STUDIES:
        raise HeedfulError(f'there is no study "{name}"{did_you_mean(name, list(STUDIES))}: use one of {_known()}')
    if quick and full:
        raise HeedfulError("--quick and --full were given: give one of them")
    if full and name not in REAL:
        raise HeedfulError(f"{name} is of made-up data alone: --full is for {', '.join(REAL)}")
    if data is not None and not full:
        raise HeedfulError(f"--data is for real data: give --full too, which {', '.join(REAL)} take")
    scale: Literal["quick", "usual", "full"] = "quick" if quick else "full" if full else "usual"
    usual = 2 if quick else REAL[name] if full else SEEDS.get(name, 3)
    count = usual if seeds is None else seeds
    if count < 1:
        raise HeedfulError(f"--seeds is {count}; expected a whole number from 1")
    folder = out or Path(f"study-{name}")

    from heedful.study.runner import StudyConfig
    from heedful.study.runner import run_study as run
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    plan = StudyConfig(
        seeds=tuple(range(1, count + 1)), scale=scale, data=_data(data) if full else None, log=_said(as_json)
    )
    done = run(name, plan, folder)
    head, rows = done.result.table()
    if as_json:
        write_json(
            {"study": name, "folder": str(folder), "seconds": round(done.seconds, 1), "seeds": list(plan.seeds)}
            | {"table": [list(head), *map(list, rows)], "verdicts": list(done.result.verdicts)}
        )
        return _whole(done.write_error)
    print(f"{STUDIES[name]}\n\n{done.result.about}\n")
    print_table([list(each) for each in rows], head=list(head), right=set(range(1, len(head))))
    print("")
    for sentence in done.result.verdicts:
        print(f"* {sentence}")
    print(f"\n{done.seconds:.0f} s. Table, picture and numbers: {', '.join(map(str, done.files))}")
    _whole(done.write_error)


def _whole(lost: str) -> None:
    """What was found was shown; a file that is missing is an error all the same."""
    if lost:
        raise HeedfulError(f"{lost}: what was found stands above alone")


def _known() -> str:
    from heedful.study import STUDIES

    return ", ".join(STUDIES)


def _said(as_json: bool) -> Callable[[str], None]:
    return (lambda text: None) if as_json else note


def _data(given: Path | None) -> Path:
    import os

    place = given or Path(os.environ.get("HEEDFUL_DATA", ""))
    if not (given or os.environ.get("HEEDFUL_DATA")):
        raise HeedfulError("--full needs real data: give --data FOLDER, or name it in HEEDFUL_DATA")
    if not place.exists():
        raise HeedfulError(f"{place}: there is no such file or folder")
    return place


def _write_toy(folder: Path, train: int | None, as_json: bool) -> None:
    from heedful.study.toy.files import ORDER, TRANSLATION, write_toy_files

    files = write_toy_files(folder, train=20_000 if train is None else train)
    if as_json:
        return write_json({"folder": str(folder), "files": [str(each) for each in files]})
    print_table([[str(each)] for each in files])
    order, translation = quote(str(folder / ORDER)), quote(str(folder / TRANSLATION))
    print(f"\nNext:\n  heedful finetune classify {order} --init.kind=classic")
    print(f"  heedful finetune classify {order}\n  heedful check {translation}")

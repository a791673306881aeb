"""The verb that looks inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.options import Checkpoint, checkpoint_path
from heedful.cli.output import escape, note, print_table, write_json
from heedful.errors import HeedfulError

if TYPE_CHECKING:
    from heedful.checkpoint import Loaded
    from heedful.look.page_api import PageAPI


BUDGET = 2_000_000  # bytes of data in the page of a report


def look(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="What is read; a second one stands beside the first.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    question: Annotated[str | None, typer.Option(help="The question that TEXT is searched for.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="A candidate beside TEXT, of which one is chosen; repeat it.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="What the decoder reads; else what the model writes.")] = None,
    against: Annotated[str | None, typer.Option(help="Another RUN, or RUN/state/step-..., beside the first.")] = None,
    checkpoint: Checkpoint = None,
    word: Annotated[str, typer.Option(help="A word to follow through all TEXTs.")] = "",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained file instead.")] = None,
    layer: Annotated[list[int] | None, typer.Option(help="A layer, from 0, that the file keeps; repeat it.")] = None,
    head: Annotated[list[int] | None, typer.Option(help="A head, from 0, that the file keeps; repeat it.")] = None,
    megabytes: Annotated[int | None, typer.Option(help="Of data that the file keeps at most; else 16.", min=1)] = None,
    heads: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Name all heads by what they do on DATA; weigh them.")
    ] = None,
    max_texts: Annotated[
        int | None, typer.Option(help="Maximum texts of DATA to read; 400 unless given.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="The folder for the report on heads.")] = None,
    port: Annotated[int | None, typer.Option(help="Where the page is; else any free port.", min=0, max=65535)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the report as JSON, for machines.")] = False,
) -> None:
    """Show attention and hidden states of a model.

    A page on this machine, behind a random token, or with --html one file: heads, layers, queries and keys, each step
    of a block, positions, the prediction and what it rests on. With --heads a report on what each head does.
    """
    place = checkpoint_path(run, checkpoint)
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise HeedfulError(f"{html} is no place for a file: give the name of one, in a folder that is there")
    if html is None:
        said = "they say what the file of --html keeps, and a page shows all"
        _without(said, layer=layer, head=head, megabytes=megabytes)
    else:
        _without("a file is at no port", port=port)
    if heads is None:
        _without("they are for the report of --heads DATA", out=out, json=as_json, max_texts=max_texts)
    else:
        why = "the report of --heads takes a RUN, and beside it one TEXT, --max-texts, --output and --json"
        _without(why, html=html, pair=pair, question=question, choice=choice, target=target, against=against, word=word)
        _without(why, port=port)
        if texts and len(texts) > 1:
            raise HeedfulError(f"{len(texts)} texts were given: {why}")
        return _report(
            run, place, heads, out or Path(f"heads-{heads.absolute().stem}"), texts, max_texts or 400, as_json
        )
    if not texts:
        raise HeedfulError("no text was given: write one after the model, or name data with --heads")
    if question is not None and pair is not None:
        raise HeedfulError("--question and --pair were given: a question is the first text of a pair, give one of them")
    if choice:
        if len(texts) > 1 or pair or question or against or word:
            raise HeedfulError("--choice was given: candidates stand beside one TEXT, without another one to compare")
        asks = _among(place, texts[0], choice, target)
    else:
        asks = _asks(place, texts, pair, question, target, against, word)
    if html is not None:
        from heedful.atomic_io import whole
        from heedful.look.page import render_html as page

        made = page(asks, layers=layer, heads=head, budget=1_000_000 * (megabytes or 16))
        try:
            with whole(html) as part:
                part.write_text(made, encoding="utf-8")
        except OSError as error:
            raise HeedfulError(f"{html} cannot be written: {error.strerror or error}") from None
        note(f"{html} ({len(made.encode()) / 1e6:.1f} MB) opens in any browser, without a network")
        return
    _serve(asks, port or 0)


def _without(why: str, **options: Any) -> None:
    """A HeedfulError where any of these was given."""
    if given := ["--" + name.replace("_", "-") for name, value in options.items() if value]:
        raise HeedfulError(f"{' and '.join(given)} {'was' if len(given) == 1 else 'were'} given: {why}")


def _serve(asks: PageAPI, port: int) -> None:
    import threading

    from heedful.look.local_server import serve_in_background

    with serve_in_background(asks, port) as server:
        print(server.url, flush=True)
        note("open it in a browser on this machine; Ctrl-C ends it")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            note("ended")


def _load(name: str) -> Loaded:
    from heedful.checkpoint import load

    return load(name)


def _among(run: str, prompt: str, choices: list[str], target: str | None) -> PageAPI:
    from heedful.look.inspection import inspect_choices
    from heedful.look.page_api import PageAPI

    return PageAPI(inspect_choices(_load(run), prompt, choices, target=target, name=run))


def _asks(
    run: str,
    texts: list[str],
    pair: str | None,
    question: str | None,
    target: str | None,
    against: str | None,
    word: str,
) -> PageAPI:
    from heedful.look.inspection import Inspection
    from heedful.look.page_api import PageAPI

    def item(text: str) -> Any:
        if question is not None:
            return (question, text)
        return text if pair is None else (text, pair)

    loaded = _load(run)
    first, *rest = [Inspection(loaded, item(text), target=target, name=run) for text in texts]
    looks = [first]
    if against is not None:
        if rest and not word:
            raise HeedfulError("--against was given: two models stand side by side with one TEXT, give one")
        other = _load(against)
        looks.append(Inspection(other, item(texts[0]), target=target, name=against))
    elif rest and not word:
        looks.append(rest[0])
    return PageAPI(looks, extra=rest, word=word)


def _report(
    run: str, place: str, data: Path, out: Path, texts: list[str] | None, max_texts: int, as_json: bool
) -> None:
    from heedful.atomic_io import whole
    from heedful.look.head_report import head_report
    from heedful.look.inspection import Inspection
    from heedful.look.page import render_html as page
    from heedful.look.page_api import PageAPI
    from heedful.runs.data_settings import data_settings_for

    loaded = _load(place)
    given = [Inspection(loaded, text, name=place) for text in texts or ()]  # refused, if at all, before the work begins
    found = head_report(loaded, data, max_texts=max_texts, settings=data_settings_for(run, data)[0])
    asks = PageAPI(given or [Inspection(loaded, found["example"], name=place)], report=found)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in (
            ("heads.json", json.dumps(found, allow_nan=False)),
            ("heads.html", page(asks, budget=BUDGET)),
        ):
            with whole(out / name) as part:
                part.write_text(content, encoding="utf-8")
    except OSError as error:
        raise HeedfulError(f"{out} cannot be written: {error.strerror or error}") from None
    if as_json:
        return write_json(found)
    rows = []
    for each in found["heads"]:
        strong = each["patterns"].get(each["name"])
        row = [each["part"], str(each["layer"]), str(each["head"]), escape(each["name"])]
        row += ["", "", ""] if strong is None else [f"{strong[key]:.2f}" for key in ("score", "chance", "lift")]
        row += [f"{each['effect']:+.4f}"] if "effect" in each else []
        rows.append(row)
    titles = ["part", "layer", "head", "name", "share", "by chance", "lift"]
    print_table(rows, head=[*titles, "masked"] if found["measure"] else titles, right={1, 2, 4, 5, 6, 7})
    print("\nthe strongest of each pattern")
    best = []
    for each in found["strongest"]:
        name, one = each["name"], each["patterns"][each["name"]]
        figures = [f"{one[key]:.2f}" for key in ("score", "chance", "lift")] + [f"{one['z']:.0f}" if one["z"] else ""]
        best.append([name, each["part"], str(each["layer"]), str(each["head"]), *figures])
    print_table(
        best, head=["pattern", "part", "layer", "head", "share", "by chance", "lift", "z"], right={2, 3, 4, 5, 6, 7}
    )
    told = ", ".join(f"{count} {name}" for name, count in found["counts"].items())
    print(f"\n{told}")
    if found["price"]:
        print(found["price"]["said"])
    if found["passed_over"] or not found["price"]:
        print(found["said"])
    note(f"{out}: heads.json, and heads.html to look at")

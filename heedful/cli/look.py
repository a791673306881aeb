"""The command `heedful look`: show attention and hidden states of a model, or report on its attention heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.options import Checkpoint, HeadKind, checkpoint_path
from heedful.cli.output import escape, note, print_json, print_table, print_text
from heedful.errors import HeedfulError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from heedful.checkpoint import ModelBundle
    from heedful.look.head_patterns import HeadRecord
    from heedful.look.head_report import HeadReport
    from heedful.look.page_api import PageAPI


REPORT_MAX_BYTES = 2_000_000  # maximum bytes of the precomputed data in the page of a report on heads
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 63)  # distances of two positions that --positions prints


def look(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, a model folder, or NAME[@REVISION] on the hub.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Text to show; a second one is compared with the first.")
    ] = None,
    pair: Annotated[str | None, typer.Option(help="The second text of a pair.")] = None,
    question: Annotated[str | None, typer.Option(help="The question to answer from TEXT.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A candidate answer to TEXT; give it twice or more.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Text that the decoder reads; by default what the model generates.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Another RUN, or RUN/state/step-..., to compare with the first.")
    ] = None,
    checkpoint: Checkpoint = None,
    head_kind: HeadKind = None,
    word: Annotated[str, typer.Option(help="A word to follow through all TEXTs.")] = "",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file instead.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write the attention of one layer as a figure instead: .svg, .png or .pdf.")
    ] = None,
    part: Annotated[
        str, typer.Option(help="With --figure: encoder, decoder or cross; by default that of the shown head.")
    ] = "",
    layer: Annotated[
        list[int] | None,
        typer.Option(help="A layer, from 0, for --html (repeat it; all unless given) or --figure (one)."),
    ] = None,
    head: Annotated[list[int] | None, typer.Option(help="A head, from 0, for --html or --figure; repeat it.")] = None,
    with_model: Annotated[
        bool, typer.Option("--with-model", help="Put the model into the file of --html, so that it takes new texts.")
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(help="Precision of the weights with --with-model: auto (default), int8, float16 or float32."),
    ] = None,
    megabytes: Annotated[int | None, typer.Option(help="Maximum data in the file; 16 unless given.", min=1)] = None,
    heads: Annotated[
        Path | None,
        typer.Option(metavar="DATA", help="Report on all heads: their patterns on DATA, and their importance."),
    ] = None,
    max_texts: Annotated[
        int | None, typer.Option(help="Maximum texts of DATA to read; 400 unless given.", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="The folder for the report on heads.")] = None,
    analogy: Annotated[
        tuple[str, str, str] | None,
        typer.Option(metavar="A B C", help="Print the tokens whose static vectors are nearest to A - B + C."),
    ] = None,
    positions: Annotated[bool, typer.Option("--positions", help="Print how the model represents positions.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port of the page; by default any free port.", min=0, max=65535)
    ] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address of the page and open no browser.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write what is printed as JSON, for machines.")] = False,
) -> None:
    """Show attention and hidden states of a model.

    Serves a page on this machine, or writes it as one file with --html, or one picture of it with --figure: attention
    heads, layers, queries and keys, each step of a block, positions, the prediction and its attribution to tokens. With
    --heads writes a report on the heads. With --analogy or --positions prints a table and serves nothing.
    """
    folder = checkpoint_path(run, checkpoint)
    options: dict[str, object] = {  # options that not every kind of output accepts
        "head_kind": head_kind,
        "html": html,
        "figure": figure,
        "heads": heads,
        "pair": pair,
        "question": question,
        "choice": choice,
        "word": word,
        "target": target,
        "against": against,
        "layer": layer,
        "head": head,
        "part": part,
        "port": port,
        "no_browser": no_browser,
        "with_model": with_model,
        "precision": precision,
        "output": out,
        "max_texts": max_texts,
        "megabytes": megabytes,
        "json": as_json,
    }
    if analogy is not None or positions:
        refused = {name: value for name, value in options.items() if name != "json"}
        _refuse(
            "--analogy and --positions take a RUN, --checkpoint and --json alone, one of them at a time",
            **refused,
            analogy=analogy if positions else None,
        )
        if texts:
            raise HeedfulError(f'the text "{texts[0]}" was given: --analogy and --positions take no text, leave it out')
        return _print_positions(folder, as_json) if analogy is None else _print_analogy(folder, analogy, as_json)
    for file in (html, figure):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise HeedfulError(f"{file} cannot be written: give the name of a file in an existing folder")
    _check_page_options(options)
    if figure is not None:
        _check_figure_options(options, layer or [], texts or [])
    if heads is not None:
        _check_report_options(options, texts or [])
        output = out or Path(f"heads-{heads.absolute().stem}")
        return _write_report(run, folder, heads, output, texts, max_texts or 400, as_json, head_kind)
    _refuse("only for --heads DATA", output=out, json=as_json, max_texts=max_texts)
    if not texts:
        raise HeedfulError("no text was given: write one after the model, or name data with --heads")
    if question is not None and pair is not None:
        raise HeedfulError("--question and --pair were given: a question is the first text of a pair, give one of them")
    if choice:
        if len(texts) > 1 or pair or question or against or word:
            raise HeedfulError("--choice was given: candidates need one TEXT, and nothing to compare it with")
        api = _choices_api(folder, texts[0], choice, target, head_kind)
    else:
        api = _texts_api(folder, texts, pair, question, target, against, word, head_kind)
    if figure is not None:
        return _write_figure(api, figure, part, layer, head)
    if html is None:
        return _serve(api, port or 0, browser=not no_browser)
    max_bytes = 1_000_000 * (megabytes or 16)
    if with_model:
        from heedful.look.page_with_model import render_html_with_model

        content = render_html_with_model(api, precision=precision or "auto", max_bytes=max_bytes)
    else:
        from heedful.look.page import render_html

        content = render_html(api, layers=layer, heads=head, max_bytes=max_bytes)
    _write_html(html, content)


def _check_page_options(options: Mapping[str, object]) -> None:
    """Raise a HeedfulError if an option does not apply to the chosen kind of page or file.

    Args:
        options: Value of each option of `look` by its name with underscores.
    """
    if not options["html"] and not options["figure"]:
        _refuse("only --html and --figure select layers and heads", **_select(options, "layer", "head"))
    else:
        reason = "only the page that is served has a port and opens in a browser"
        _refuse(reason, **_select(options, "port", "no_browser"))
    if not options["html"]:
        _refuse("only for --html", **_select(options, "megabytes", "with_model"))
    if options["with_model"]:
        reason = "a file with a model has all layers and heads of one model"
        _refuse(reason, **_select(options, "layer", "head", "against"))
    else:
        _refuse("only for --with-model", **_select(options, "precision"))
    if not options["figure"]:
        _refuse("only for --figure", **_select(options, "part"))


def _check_figure_options(options: Mapping[str, object], layers: list[int], texts: list[str]) -> None:
    """Raise a HeedfulError if --figure was given with an option, layers or texts that it cannot show.

    Args:
        options: Value of each option of `look` by its name with underscores.
        layers: Values of --layer.
        texts: The texts to show.
    """
    _refuse("a figure shows one text in one model", **_select(options, "html", "against", "word", "choice"))
    if len(layers) > 1:
        raise HeedfulError(f"{len(layers)} layers were given: a figure shows one layer")
    if len(texts) > 1:
        raise HeedfulError(f"{len(texts)} texts were given: a figure shows one text")


def _check_report_options(options: Mapping[str, object], texts: list[str]) -> None:
    """Raise a HeedfulError if --heads was given with an option or texts that do not apply to its report.

    Args:
        options: Value of each option of `look` by its name with underscores.
        texts: The texts to show.
    """
    reason = "the report of --heads takes a RUN, one TEXT, --max-texts, --head-kind, --output and --json"
    names = ("html", "figure", "pair", "question", "choice", "target", "against", "word", "part", "port", "no_browser")
    _refuse(reason, **_select(options, *names))
    if len(texts) > 1:
        raise HeedfulError(f"{len(texts)} texts were given: {reason}")


def _write_html(file: Path, content: str) -> None:
    """Write the page as one file."""
    from heedful.atomic_io import atomic_path

    try:
        with atomic_path(file) as unfinished:
            unfinished.write_text(content, encoding="utf-8")
    except OSError as error:
        raise HeedfulError(f"{file} cannot be written: {error.strerror or error}") from None
    note(f"{file} ({len(content.encode()) / 1e6:.1f} MB) opens in any browser, without a network")


def _write_figure(api: PageAPI, file: Path, part: str, layer: list[int] | None, heads: list[int] | None) -> None:
    """Write the attention of one layer as a figure."""
    from heedful.look.head_figure import write_head_figure

    try:
        write_head_figure(api.inspections[0], file, part=part, layer=layer[0] if layer else None, heads=heads or ())
    except OSError as error:
        raise HeedfulError(f"{file} cannot be written: {error.strerror or error}") from None
    note(f"{file} is written")


def _refuse(reason: str, **options: object) -> None:
    """Raise a HeedfulError if any of these options was given.

    Args:
        reason: Why the options cannot be used, for the end of the message.
        options: Value of each option by its name with underscores. None, False, "" and [] are options that were not
            given.
    """
    if names := ["--" + name.replace("_", "-") for name, value in options.items() if value]:
        raise HeedfulError(f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} given: {reason}")


def _select(options: Mapping[str, object], *names: str) -> dict[str, object]:
    """Return the options with these names."""
    return {name: options[name] for name in names}


def _serve(api: PageAPI, port: int, *, browser: bool) -> None:
    """Serve the page until Ctrl-C.

    Args:
        api: Computes the data that the page requests.
        port: Port on 127.0.0.1, or 0 for any free port.
        browser: Whether to open the page in a browser, if the machine has a screen.
    """
    import threading

    from heedful.cli.browser import has_screen, open_in_browser
    from heedful.look.local_server import serve_in_background

    with serve_in_background(api, port) as server:
        url = server.url if browser and has_screen() else None
        with open_in_browser(url) as is_open:
            print(server.url, flush=True)
            note(f"{'it is open in a browser' if is_open else 'open it in a browser here'}; Ctrl-C stops it")
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                note("stopped")


def _choices_api(folder: str, prompt: str, choices: list[str], target: str | None, head_kind: str | None) -> PageAPI:
    """Return the data of a page for all candidates of a multiple-choice prompt. See `look` for the arguments."""
    from heedful.checkpoint import load
    from heedful.look.inspection import inspect_choices
    from heedful.look.page_api import PageAPI

    return PageAPI(inspect_choices(load(folder, head=head_kind), prompt, choices, target=target, name=folder))


def _texts_api(
    folder: str,
    texts: list[str],
    pair: str | None,
    question: str | None,
    target: str | None,
    against: str | None,
    word: str,
    head_kind: str | None,
) -> PageAPI:
    """Return the data of a page for one text, two texts to compare, or all texts with a word. See `look`."""
    from heedful.look.inspection import Inspection
    from heedful.look.page_api import PageAPI

    def item(text: str) -> str | tuple[str, str]:  # the input of the model: a text, or a pair
        if question is not None:
            return (question, text)
        return text if pair is None else (text, pair)

    loaded = _load_unpruned(folder, head_kind)
    if loaded.early_stages:
        note(f"{folder} is a cascade: what is shown is its last stage")
    first, *further = [Inspection(loaded, item(text), target=target, name=folder) for text in texts]
    compared = [first]  # one inspection to show, or two to compare
    if against is not None:
        if further and not word:
            raise RequestError("--against was given: two models are compared on one TEXT, give one")
        compared.append(Inspection(_load_unpruned(against, head_kind), item(texts[0]), target=target, name=against))
    elif further and not word:
        compared.append(further[0])
    return PageAPI(compared, extra=further, word=word)


def _load_unpruned(folder: str, head_kind: str | None) -> ModelBundle:
    """Load a model without its token pruning, so that every layer shows all tokens."""
    from heedful.checkpoint import load

    loaded = load(folder, head=head_kind)
    if loaded.token_pruning is not None:
        note(f"{folder} prunes tokens: what is shown is the model with all of them")
        loaded.prune_tokens(None)
    return loaded


def _print_analogy(folder: str, words: tuple[str, str, str], as_json: bool) -> None:
    """Print the tokens whose vectors are nearest to that of the first word minus the second plus the third."""
    from heedful.checkpoint import load
    from heedful.look.word_vectors import analogy

    first, second, third = words
    nearest = analogy(load(folder), second, first, third)  # computes b - a + c
    if as_json:
        return print_json(nearest)
    print(escape(f"{first} - {second} + {third}"))
    print_table([[escape(token["text"]), f"{token['cosine']:.3f}"] for token in nearest], right={1}, indent=3)


def _print_positions(folder: str, as_json: bool) -> None:
    """Print each representation of positions in the model, with its similarities or biases by distance."""
    from heedful.checkpoint import load
    from heedful.look.positions_view import positions_view

    views = positions_view(load(folder))
    if as_json:
        records: list[dict[str, object]] = []
        for view in views:
            tensors = {name: tensor.tolist() for name, tensor in view.tensors.items()}
            records.append({"name": view.name, "description": view.description, **tensors})
        return print_json(records)
    if not views:
        print_text("The model does not represent positions: the order of its tokens changes nothing.")
    for view in views:
        print_text(f"{view.name}\n{view.description}")
        if "similarity_by_distance" in view.tensors:
            _print_similarity(view.tensors["similarity_by_distance"])
        elif "bias" in view.tensors:
            _print_bias(view.tensors["distances"], view.tensors["bias"])


def _print_similarity(similarity: Tensor) -> None:
    """Print a table of similarities by distance. `similarity` has the values for distances 0, 1, ..."""
    distances = [distance for distance in DISTANCES if distance < len(similarity)]
    rows = [[str(distance), f"{float(similarity[distance]):+.3f}"] for distance in distances]
    print_table(rows, head=["distance", "similarity"], right={0, 1}, indent=3)


def _print_bias(distances: Tensor, bias: Tensor) -> None:
    """Print a table of the biases of attention scores by distance, from [heads, distances]."""
    rows = []
    for distance, biases in zip(distances.tolist(), bias.T.tolist(), strict=True):
        if abs(distance) in DISTANCES:
            rows.append([f"{distance:+d}", *(f"{value:+.2f}" for value in biases)])
    head = ["distance", *(f"head {index}" for index in range(len(bias)))]
    print_table(rows, head=head, right=set(range(len(head))), indent=3)


def _write_report(
    run: str,
    folder: str,
    data: Path,
    out: Path,
    texts: list[str] | None,
    max_texts: int,
    as_json: bool,
    head_kind: str | None,
) -> None:
    """Write heads.json and heads.html, and print the report.

    Args:
        run: Name or path of the model, from the command line.
        folder: Folder of the model, or of the checkpoint from the command line.
        data: A file or folder of data.
        out: Folder to write.
        texts: The text that the page shows first. If None, a text of the data.
        max_texts: Maximum number of texts to read.
        as_json: Whether to print JSON.
        head_kind: Kind of head to load. If None, that of config.json.
    """
    from heedful.atomic_io import atomic_path
    from heedful.look.head_report import head_report
    from heedful.look.inspection import Inspection
    from heedful.look.page import render_html
    from heedful.look.page_api import PageAPI
    from heedful.runs.data_settings import data_settings_for

    loaded = _load_unpruned(folder, head_kind)
    inspections = [Inspection(loaded, text, name=folder) for text in texts or ()]  # raises early if a text is too long
    report = head_report(loaded, data, max_texts=max_texts, settings=data_settings_for(run, data)[0])
    api = PageAPI(inspections or [Inspection(loaded, report["example"], name=folder)], report=report)
    contents = {
        "heads.json": json.dumps(report, allow_nan=False),
        "heads.html": render_html(api, max_bytes=REPORT_MAX_BYTES),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with atomic_path(out / name) as unfinished:
                unfinished.write_text(content, encoding="utf-8")
    except OSError as error:
        raise HeedfulError(f"{out} cannot be written: {error.strerror or error}") from None
    if as_json:
        return print_json(report)
    _print_report(report)
    note(f"the report is in {out}: heads.json, and heads.html for a browser")


def _print_report(report: HeadReport) -> None:
    """Print a table of all heads, the strongest head of each pattern, and summaries."""
    rows = []
    for record in report["heads"]:
        row = [*_head_cells(record), escape(record["name"]), *_score_cells(record)]
        row += [f"{record['effect']:+.4f}"] if "effect" in record else []
        rows.append(row)
    head = ["part", "layer", "head", "name", "share", "by chance", "lift"]
    print_table(rows, head=[*head, "masked"] if report["measure"] else head, right={1, 2, 4, 5, 6, 7})
    print("\nthe strongest head of each pattern")
    rows = []
    for record in report["strongest"]:
        z = record["patterns"][record["name"]]["z"]
        rows.append([record["name"], *_head_cells(record), *_score_cells(record), f"{z:.0f}" if z else ""])
    head = ["pattern", "part", "layer", "head", "share", "by chance", "lift", "z"]
    print_table(rows, head=head, right={2, 3, 4, 5, 6, 7})
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    print_text(f"\n{counts}")
    if report["price"]:
        print_text(report["price"]["summary"])
    if report["passed_over"] or not report["price"]:
        print_text(report["summary"])


def _head_cells(record: HeadRecord) -> list[str]:
    """Return part, layer and index of a head."""
    return [record["part"], str(record["layer"]), str(record["head"])]


def _score_cells(record: HeadRecord) -> list[str]:
    """Return share, chance and lift of the pattern that a head is named after, or empty cells for a mixed head."""
    pattern = record["patterns"].get(record["name"])
    if pattern is None:
        return ["", "", ""]
    return [f"{value:.2f}" for value in (pattern["score"], pattern["chance"], pattern["lift"])]

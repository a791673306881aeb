"""The command `heedful`: verbs in the order of a model's life. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli import (
    bench,
    commands,
    completion,
    distil,
    export,
    init,
    kernels,
    look,
    models,
    pretrain,
    push,
    serve,
    study,
    train,
)
from heedful.cli.commands import context_assignments
from heedful.cli.generation import writing_of
from heedful.cli.output import escape, model_facts, note, print_table, show_answer, show_warning, write_json
from heedful.cli.streams import drop_stdout, open_streams
from heedful.errors import HeedfulError, HeedfulWarning, did_you_mean

if TYPE_CHECKING:
    from heedful.infer.engine import Engine

CHUNK = 256  # lines of stdin that are answered at once
DTYPES = ("float32", "bfloat16", "float16")
SPINS = "10000"  # how often a thread of GNU's OpenMP looks for work before it sleeps; its own default is 300,000

app = typer.Typer(
    cls=commands.VerbGroup,
    help="Tokenise, pre-train, fine-tune, distil, inspect and serve attention models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = train.AsJson
OnDevice = train.Device
Overwrite = train.Overwrite


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: 0 is success, 2 what the user can mend, 130 an interruption, 1 a reader that went away."""
    if "OMP_WAIT_POLICY" not in os.environ:  # read when torch is imported: beside one busy process of two cores its
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # threads would wait for each other most of the time
    try:
        try:
            open_streams()
            with warnings.catch_warnings():
                warnings.simplefilter("default", HeedfulWarning)  # the same words once
                warnings.showwarning = show_warning
                try:
                    app(arguments, prog_name="heedful", obj=list(sys.argv[1:] if arguments is None else arguments))
                finally:
                    sys.stdout.flush()
        except HeedfulError as error:
            note(f"heedful: {error}")
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    except BrokenPipeError:
        drop_stdout()
        raise SystemExit(1) from None


def _print_version(wanted: bool) -> bool:
    if wanted:
        from heedful import __version__

        print(f"heedful {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


# -- verbs ----------------------------------------------------------------------------------------------------


app.command()(train.quickstart)
app.command()(init.init)
app.command()(train.recipe)
app.command()(models.models)


@app.command(cls=commands.TokenizerCommand)
def tokenizer(
    context: typer.Context,
    corpus: Annotated[
        list[Path], typer.Argument(help="Text files, UTF-8, one text on each line (.gz, .xz, .bz2 too).")
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    settings: Annotated[Path | None, typer.Option(help="Settings as a .toml or .json file.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer on text files.

    WordPiece; with --algorithm bpe byte-level BPE, with --algorithm unigram Unigram.
    """
    from heedful.runs.overrides import override
    from heedful.settings import from_file
    from heedful.tokenizer import TokenizerSettings

    chosen = override(
        from_file(TokenizerSettings, settings) if settings else TokenizerSettings(), context_assignments(context)
    )
    _check_free(out, overwrite)

    from heedful.tokenizer.training import lines
    from heedful.tokenizer.training import train as train_on

    trained = train_on(corpus, chosen)
    try:
        trained.save(out)
    except OSError as error:
        raise HeedfulError(f"{out} cannot be written: {error.strerror}") from error
    text = next((line for line in lines(corpus) if line.strip()), "")[:200]
    tokens = [trained.name(id) for id in trained.encode(text).ids]
    facts: dict[str, Any] = {"vocab_size": trained.size, "fingerprint": trained.fingerprint, "folder": str(out)}
    if as_json:
        return write_json(facts | {"example": {"text": text, "tokens": tokens}})
    print_table([[name, str(value)] for name, value in facts.items()])
    print(f"\n{escape(text)}\n{' '.join(map(escape, tokens))}")


@app.command(cls=commands.DataCommand)
def check(
    context: typer.Context,
    data: Annotated[
        list[Path],
        typer.Argument(metavar="DATA", help="A file, a folder with splits, or train=FILE dev=FILE test=FILE."),
    ],
    task: Annotated[str | None, typer.Option(help="What the data is for; found out where it is not given.")] = None,
    limit: Annotated[int, typer.Option(help="From how many words on a text counts as too long.")] = 384,
    as_json: AsJson = False,
) -> None:
    """Report what is in labelled data, and its problems.

    Label counts, repeats, leaks between splits, contradictions, empty and long texts, odd characters, bad rows.
    """
    from dataclasses import asdict

    from heedful.data import DataOptions, DataSettings, LeaveOut, Plain, read, source_of
    from heedful.data import check as run
    from heedful.data.labelled.split_files import as_said
    from heedful.runs.overrides import override
    from heedful.tasks.specs import SPECS

    kinds = {name: spec.example for name, spec in SPECS.items()} | {"plain": Plain}
    if task is not None and task not in kinds:
        raise HeedfulError(f"--task is {task!r}{did_you_mean(task, list(kinds))}: use one of {', '.join(kinds)}")
    chosen = override(DataOptions(data=DataSettings(dev_fraction=0.0)), context_assignments(context)).data
    given, bad = as_said(data), LeaveOut()
    source = source_of(kinds[task], given, chosen, bad) if task else read(given, None, chosen, on_bad_row=bad)
    report = run(source, limit=limit)
    if as_json:
        return write_json(asdict(report))
    print("\n".join(map(escape, report.lines())))


app.command(cls=commands.PretrainCommand)(pretrain.pretrain)
app.command(cls=commands.FinetuneCommand)(train.finetune)
app.command(cls=commands.DistilCommand)(distil.distil)
app.command(cls=commands.DataCommand)(train.evaluate)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A model folder, or NAME[@REVISION] on the hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    head_kind: Annotated[
        str | None, typer.Option(help="Kind of head to load instead of the one in config.json, e.g. masked_lm.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"How weights are written: {', '.join(DTYPES)}.")] = "float32",
    pickle: Annotated[bool, typer.Option("--pickle", help="Read pickled weights, of a folder that you trust.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Convert a model folder to safetensors.

    What is written has safetensors, and transformers reads it where it knows the family.
    """
    import tempfile

    import torch

    from heedful.checkpoint import load, save

    if dtype not in DTYPES:
        raise HeedfulError(f"--dtype is {dtype!r}{did_you_mean(dtype, DTYPES)}: use one of {', '.join(DTYPES)}")
    _check_free(out, overwrite)
    name = source
    with tempfile.TemporaryDirectory(prefix="heedful-") as temporary:
        if pickle:
            from heedful.checkpoint.unpickle import unpickle

            if not os.path.isdir(name):
                raise HeedfulError(f"{name} is no folder here: --pickle reads folders on this machine only")
            note(str(unpickle(Path(name), Path(temporary) / "safe")))
            name = str(Path(temporary) / "safe")
        loaded = load(name, head=head_kind, dtype=getattr(torch, dtype))
        save(loaded, out, overwrite=overwrite)
    facts = {**model_facts(loaded), "read": source if pickle else loaded.source, "dtype": dtype, "written": str(out)}
    if as_json:
        return write_json(facts | {"left_out": list(loaded.unused)})
    facts["left out"] = ", ".join(loaded.unused) or "nothing"
    print_table([[name, f"{value:,}" if isinstance(value, int) else str(value)] for name, value in facts.items()])


@app.command(cls=commands.DataCommand)
def predict(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A model folder, or NAME[@REVISION] on the hub.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; without any, one on each line of stdin.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Predict on this file or folder of files; further arguments are files too."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --file: a folder, or one file that ends in .csv, .jsonl or .conll."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Of a folder that --output names: parquet, jsonl, csv or conll.")
    ] = "parquet",
    rows: Annotated[int, typer.Option(help="Rows in each part of that folder.")] = 10_000,
    without_inputs: Annotated[
        bool, typer.Option("--without-inputs", help="Write predictions without the input.")
    ] = False,
    pair: Annotated[str | None, typer.Option(help="The second text of each pair.")] = None,
    question: Annotated[str | None, typer.Option(help="The question that each TEXT is searched for.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A candidate; give it twice or more.")] = None,
    head_kind: Annotated[
        str | None, typer.Option(help="Kind of head to load instead of the one in config.json, e.g. masked_lm.")
    ] = None,
    checkpoint: train.Checkpoint = None,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, int8, or auto: the fastest that changes little.")
    ] = "float32",
    device: OnDevice = "cpu",
    top_k: Annotated[int, typer.Option(help="How many tokens to list for each mask, or texts of the beams.")] = 5,
    num_beams: Annotated[int | None, typer.Option(help="Beam search with N beams; greedy unless given.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (> 0).")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum new tokens; 128 unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict on texts or files with a model.

    Its head decides how: filled masks, next sentence, classes, tags, found answers, choices, embeddings, or a text. An
    empty line is an empty text and is answered too, so that answer N belongs to line N. With --file, rows of CSV, TSV,
    JSON lines or Parquet are answered into a folder of parts; the same command resumes an interrupted one, and
    several at once share the work.
    """
    how = train.check_precision(precision)
    if file is None and (named := _of_files(out, form, rows, without_inputs, context_assignments(context))):
        raise HeedfulError(f"{named} is for files: name them with --file")
    chunks = iter(()) if file else _texts(texts)
    from heedful.csrc import unused
    from heedful.infer.engine import Engine

    engine = Engine(train.checkpoint_path(run, checkpoint), head=head_kind, precision=how, device=device)
    if said := unused():
        note(said)
    options = {"pair": pair, "question": question, "choice": choice or None}
    manner: dict[str, Any] = {
        "num_beams": num_beams,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    given = {name for name, value in (options | manner).items() if value is not None}
    if file and (fixed := sorted(given & options.keys())):
        raise HeedfulError(f"--{fixed[0]} is for texts; of files a column says it")
    _check_options(engine, given, needed=not file)
    engine.writing = writing_of(top_k, **manner)
    if file:
        from heedful.cli.predict_files import predict_files

        return predict_files(
            run,
            engine,
            [*file, *map(Path, texts or ())],
            out,
            rows=rows,
            form=form,
            without_inputs=without_inputs,
            assignments=context_assignments(context),
            top_k=top_k,
            as_json=as_json,
        )
    for text in texts or ():
        if os.path.isfile(text):
            note(f"{text} is answered as a text; to predict on the file of that name, use --file {quote(text)}")
    if not as_json:
        facts = model_facts(engine.loaded) | {"parameters": engine.parameters}
        note(f"{facts['read']}: {facts['family']}, {facts['head']}, {facts['parameters']:,} parameters\n")
    for first, chunk in chunks:
        inputs = [_input(text, **options) for text in chunk]
        for given, answer in zip(inputs, _answers(engine, inputs, top_k, first), strict=True):
            if as_json:
                write_json({"input": given} | answer)
            else:
                show_answer(given, answer, top_k)
        sys.stdout.flush()


app.command()(look.look)
app.command()(bench.bench)
app.command()(kernels.kernels)
app.command()(export.export)
app.command()(push.push)
app.command(cls=commands.ServeCommand)(serve.serve)
app.command()(study.study)
app.command()(completion.completion)


def _answers(engine: Engine, inputs: list[Any], top_k: int, first: int) -> Iterable[dict[str, Any]]:
    """All at once; where a line is at fault, those before it are answered, and the error names it."""
    try:
        return engine(inputs, top_k=top_k)
    except HeedfulError:
        if not first:
            raise
        return _one_by_one(engine, inputs, top_k, first)


def _one_by_one(engine: Engine, inputs: list[Any], top_k: int, first: int) -> Iterator[dict[str, Any]]:
    for number, given in enumerate(inputs, start=first):
        try:
            yield from engine([given], top_k=top_k)
        except HeedfulError as error:
            raise HeedfulError(f"stdin, line {number}: {error}") from None


def _check_free(out: Path, overwrite: bool) -> None:
    try:
        if overwrite or not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
    except OSError as error:
        raise HeedfulError(f"{out} cannot be written: {error.strerror}") from None
    raise HeedfulError(f"{out} exists and is not empty: give another folder, or --overwrite to replace it")


# -- input ----------------------------------------------------------------------------------------------------


def _texts(given: list[str] | None) -> Iterator[tuple[int, list[str]]]:
    """Texts in chunks, each with the number of its first line; 0 where they are no lines."""
    if given:
        return iter([(0, given)])
    if sys.stdin.isatty():
        raise HeedfulError("no text was given: write texts after the model, or send one on each line of stdin")
    return _lines(sys.stdin.buffer)


def _lines(stream: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    lines = enumerate(stream, start=1)
    while chunk := list(islice(lines, CHUNK)):
        yield chunk[0][0], [_line(number, raw) for number, raw in chunk]


def _line(number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise HeedfulError(f"stdin, line {number} is not UTF-8 ({error.reason}): convert it first") from None


_TAKES: dict[str, tuple[str, ...]] = {
    "question_answering": ("question",),
    "multiple_choice": ("choice",),
    "next_sentence": ("pair",),
    "sequence_classification": ("pair",),
    "pretraining": ("pair",),
    "embedding": ("pair",),
    "language_model": ("num_beams", "temperature", "max_new_tokens", "seed"),
}
_NEEDS = ("question_answering", "multiple_choice", "next_sentence")


def _of_files(out: Path | None, form: str, rows: int, without_inputs: bool, assignments: list[str]) -> str:
    """An option that was given and is for files alone."""
    names = {"--output": out, "--format": form != "parquet", "--rows": rows != 10_000, "a setting of data": assignments}
    return next((name for name, given in (names | {"--without-inputs": without_inputs}).items() if given), "")


def _check_options(engine: Engine, given: set[str], *, needed: bool = True) -> None:
    taken = _TAKES.get(engine.kind, ())
    for name in sorted(given.difference(taken)):
        raise HeedfulError(
            f"--{name.replace('_', '-')} is not for this model: its {engine.kind} head expects {engine.expects}"
        )
    if needed and engine.kind in _NEEDS and not given:
        raise HeedfulError(f"this model's {engine.kind} head needs --{taken[0]} beside the texts")


def _input(text: str, pair: Any, question: Any, choice: Any) -> Any:
    if question is not None:
        return {"question": question, "context": text}
    if choice is not None:
        return {"prompt": text, "choices": choice}
    return text if pair is None else (text, pair)

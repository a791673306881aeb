"""The command `heedful predict`: predict on texts given as arguments or on stdin, or on files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from heedful.cli.options import Checkpoint, Device, HeadKind, Precision, check_precision_option, checkpoint_path
from heedful.cli.output import escape, model_facts, note, print_json, show_answer
from heedful.cli.settings_command import context_assignments
from heedful.command_line import command_line
from heedful.errors import HeedfulError, RequestError

if TYPE_CHECKING:
    from heedful.cli.output import EngineInput
    from heedful.infer.engine import Engine
    from heedful.infer.precision import PrecisionOrAuto
    from heedful.infer.static_classifier import StaticClassifier
    from heedful.tasks.answering import Answer
    from heedful.tasks.generation import GenerationConfig

    Predictor: TypeAlias = Engine | StaticClassifier

LINES_PER_CHUNK = 256  # lines of stdin in a chunk, whose predictions are computed together
OPTIONS_BY_HEAD: dict[str, tuple[str, ...]] = {  # options that each kind of head accepts
    "question_answering": ("question",),
    "multiple_choice": ("choice",),
    "next_sentence": ("pair",),
    "sequence_classification": ("pair",),
    "pretraining": ("pair",),
    "embedding": ("pair",),
    "language_model": ("num_beams", "temperature", "max_new_tokens", "seed", "src_lang", "tgt_lang"),
}
HEADS_NEEDING_OPTION = ("question_answering", "multiple_choice", "next_sentence")  # heads that need their first option


def predict(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="A model folder, or NAME[@REVISION] on the hub.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="Texts; by default one on each line of stdin.")
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Predict on this file or folder of files; further arguments are files too."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --file: a folder, or one file that ends in .csv, .jsonl or .conll."),
    ] = None,
    file_format: Annotated[
        str, typer.Option("--format", help="Format of the files in the --output folder: parquet, jsonl, csv or conll.")
    ] = "parquet",
    rows: Annotated[int, typer.Option(help="Rows per file in the --output folder.")] = 10_000,
    without_inputs: Annotated[
        bool, typer.Option("--without-inputs", help="Write predictions without the input.")
    ] = False,
    pair: Annotated[str | None, typer.Option(help="The second text of each pair.")] = None,
    question: Annotated[str | None, typer.Option(help="The question to answer from each TEXT.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="A candidate answer; give it twice or more.")] = None,
    head_kind: HeadKind = None,
    checkpoint: Checkpoint = None,
    precision: Precision = None,
    device: Device = "auto",
    min_confidence: Annotated[
        float | None, typer.Option(help="Abstain where the probability of the label is below this (0 to 1).")
    ] = None,
    prediction_set: Annotated[
        float | None,
        typer.Option(
            metavar="PROBABILITY",
            help="List labels that contain the right one with this probability (0 to 1).",
        ),
    ] = None,
    candidate_labels: Annotated[
        str | None,
        typer.Option(
            metavar="LABELS",
            help='Labels the model was not trained on: "billing, bug", or a .json or .csv file of descriptions.',
        ),
    ] = None,
    template: Annotated[str | None, typer.Option(help='Text around a candidate label, e.g. "It is about {}."')] = None,
    multi_label: Annotated[
        bool, typer.Option("--multi-label", help="Any number of the candidate labels may be right.")
    ] = False,
    top_k: Annotated[int, typer.Option(help="Number of tokens to list for each mask, or of beams to list.")] = 5,
    num_beams: Annotated[
        int | None,
        typer.Option(help="Beam search with N beams; unless given, as the model's folder says, else greedy."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature (> 0).")] = None,
    src_lang: Annotated[str | None, typer.Option(help="Language of the texts, as the model's code: en_XX.")] = None,
    tgt_lang: Annotated[str | None, typer.Option(help="Language to translate into, as the model's code.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum new tokens; unless given, as the model's folder says, else 128.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")] = False,
) -> None:
    """Predict on texts or files with a model.

    The head of the model determines the kind of prediction: masked tokens, next sentence, classes, tags, answers to a
    question, choices, embeddings, or generated text. An empty line is an empty text, so that prediction N belongs to
    line N. With --file, rows of CSV, TSV, JSON lines or Parquet files are read and predictions are written to a folder;
    the same command resumes an interrupted one, and several processes at once share the work.
    """
    checked_precision = check_precision_option(precision)
    assignments = context_assignments(context)
    if file is None and (option := _file_option(out, file_format, rows, without_inputs, assignments)):
        raise HeedfulError(f"{option} needs files: name them with --file")
    chunks = iter(()) if file else _text_chunks(texts)
    inputs: dict[str, object] = {"pair": pair, "question": question, "choice": choice or None}
    generation_options: dict[str, object] = {
        "num_beams": num_beams,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "src_lang": src_lang,
        "tgt_lang": tgt_lang,
    }
    options = {name for name, value in (inputs | generation_options).items() if value is not None}
    engine_options = (file, head_kind, checkpoint, min_confidence, prediction_set, candidate_labels, template)
    needs_engine = (
        bool(options)
        or multi_label
        or any(value is not None for value in engine_options)
        or top_k < 1
        or checked_precision not in (None, "float32")
        or device not in ("auto", "cpu")
    )
    if not needs_engine:
        from heedful.infer.static_classifier import StaticClassifier

        static = StaticClassifier.open(run)
        if static is not None and static.reads(texts):  # starts without torch
            return _show_answers(run, static, static.facts, texts, chunks, top_k=top_k, inputs=inputs, as_json=as_json)
    from heedful.csrc import unused_note

    engine = _open_engine(
        checkpoint_path(run, checkpoint),
        head_kind,
        checked_precision,
        device,
        min_confidence=min_confidence or 0.0,
        prediction_set=prediction_set,
        candidate_labels=candidate_labels,
        template=template,
        multi_label=multi_label,
    )
    for line in filter(None, (engine.gpu_line(), unused_note())):
        note(line)
    if file and (input_options := sorted(options & inputs.keys())):
        raise HeedfulError(f"--{input_options[0]} cannot be used with --file: put it in a column of the file")
    _check_options(engine, options, needed=not file)
    if src_lang is not None or tgt_lang is not None:
        engine.set_languages(src_lang, tgt_lang)
    engine.writing = generation_settings(engine.writing, top_k, num_beams, temperature, max_new_tokens, seed)
    if file:
        from heedful.cli.predict_files import predict_files

        return predict_files(
            run,
            engine,
            [*file, *map(Path, texts or ())],
            out,
            rows=rows,
            file_format=file_format,
            without_inputs=without_inputs,
            assignments=assignments,
            top_k=top_k,
            as_json=as_json,
        )
    facts = model_facts(engine.loaded) | {"parameters": engine.parameters}
    look_options = {"--head-kind": head_kind, "--checkpoint": checkpoint}
    _show_answers(
        run, engine, facts, texts, chunks, top_k=top_k, inputs=inputs, look_options=look_options, as_json=as_json
    )


def _open_engine(
    folder: str,
    head_kind: str | None,
    precision: PrecisionOrAuto | None,
    device: str,
    *,
    min_confidence: float,
    prediction_set: float | None,
    candidate_labels: str | None,
    template: str | None,
    multi_label: bool,
) -> Engine:
    """Open the model; with --candidate-labels, as a zero-shot classifier.

    Args:
        folder: The model, or a checkpoint of it.
        head_kind: Value of --head-kind.
        precision: Value of --precision.
        device: Value of --device.
        min_confidence: Value of --min-confidence, or 0.
        prediction_set: Value of --prediction-set.
        candidate_labels: Value of --candidate-labels.
        template: Value of --template.
        multi_label: Value of --multi-label.

    Raises:
        HeedfulError: If the model cannot be opened, or options exclude each other.
    """
    if candidate_labels is not None and prediction_set is not None:
        raise HeedfulError("--prediction-set is for the labels that a model was trained on, not for --candidate-labels")
    if candidate_labels is None and (template is not None or multi_label):
        raise HeedfulError("--template and --multi-label are for --candidate-labels: give the labels too")
    labels = None if candidate_labels is None else _parse_labels(candidate_labels)
    from heedful.infer.engine import Engine

    engine = Engine(
        folder,
        head=head_kind,
        precision=precision,
        device=device,
        min_confidence=min_confidence if labels is None else 0.0,  # for candidate labels it is set below
        prediction_set=prediction_set,
    )
    if labels is None:
        return engine
    from heedful.infer.zero_shot import CandidateLabels, zero_shot_engine

    engine.min_confidence = min_confidence
    return zero_shot_engine(engine, CandidateLabels.of(labels, template, multi_label))


def _show_answers(
    run: str,
    predictor: Predictor,
    facts: Mapping[str, object],
    texts: list[str] | None,
    chunks: Iterator[tuple[int, list[str]]],
    *,
    top_k: int,
    inputs: Mapping[str, Any],
    look_options: Mapping[str, str | None] = MappingProxyType({}),
    as_json: bool,
) -> None:
    """Predict on texts, print the predictions, and recommend a command for `heedful look`.

    Args:
        run: Name or path of the model, from the command line.
        predictor: The model.
        facts: Facts about the model, from `model_facts`.
        texts: Arguments that are texts, or None if texts are lines of stdin.
        chunks: All texts, from `_text_chunks`.
        top_k: Maximum number of candidates to list.
        inputs: Values of --pair, --question and --choice.
        look_options: Options of the recommended command. Options with the value None are left out.
        as_json: Whether to print JSON.
    """
    for text in texts or ():
        if os.path.isfile(text):
            note(f"{text} is read as a text; to predict on the file of that name, use --file {quote(text)}")
    if not as_json:
        note(f"{facts['read']}: {facts['family']}, {facts['head']}, {facts['parameters']:,} parameters\n")
    for first_line, chunk in chunks:
        items = [_engine_input(text, **inputs) for text in chunk]
        for item, answer in zip(items, _predict_chunk(predictor, items, top_k, first_line), strict=True):
            if as_json:
                print_json({"input": item} | answer)
            else:
                show_answer(item, answer, top_k)
        sys.stdout.flush()
    if texts and texts[0].strip() and not as_json:
        options = [*look_options.items(), ("--pair", inputs["pair"]), ("--question", inputs["question"])]
        options += [("--choice", candidate) for candidate in inputs["choice"] or ()]
        escaped = [(name, escape(value)) for name, value in options if value is not None]
        note(f"Next:\n  {command_line('heedful look', [run, escape(texts[0])], escaped)}")


def generation_settings(
    defaults: GenerationConfig,
    top_k: int,
    num_beams: int | None,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int | None,
) -> GenerationConfig:
    """Return the generation settings of the model's folder, with the values of options.

    Args:
        defaults: Settings of the model's folder. They apply where an option is None.
        top_k: Number of texts that beam search returns.
        num_beams: Value of --num-beams.
        temperature: Value of --temperature.
        max_new_tokens: Value of --max-new-tokens.
        seed: Value of --seed.

    Raises:
        HeedfulError: If options exclude each other.
    """
    from heedful.model.decode import Sampling

    if num_beams is not None and temperature is not None:
        raise HeedfulError(
            "--num-beams and --temperature were given: beam search does not sample; leave one of them out"
        )
    config = defaults.with_choices(
        num_beams=num_beams,
        num_return_sequences=top_k,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    if seed is not None and not isinstance(config.how, Sampling):
        raise HeedfulError("--seed is for sampling, which needs --temperature: give both or none")
    return config


def _parse_labels(value: str) -> list[str] | dict[str, str]:
    """Return the labels of a comma-separated list, or the description of each label from a .json or .csv file."""
    if not value.casefold().endswith((".json", ".csv")):
        if os.path.isfile(value):
            raise HeedfulError(
                f"--candidate-labels is the file {value}; expected labels, or a .json or .csv file of descriptions"
            )
        return [label.strip() for label in value.split(",")]
    from heedful.data.labelled.label_descriptions import read_label_descriptions

    return read_label_descriptions(Path(value))


def _predict_chunk(predictor: Predictor, items: list[EngineInput], top_k: int, first_line: int) -> Iterable[Answer]:
    """Predict on all items together. If a line of stdin fails, predict on each item until that line.

    Args:
        predictor: The model.
        items: Inputs.
        top_k: Number of candidates that each prediction lists.
        first_line: Line number of the first item on stdin, or 0 if the items are arguments.
    """
    try:
        return predictor(items, top_k=top_k)
    except HeedfulError:
        if not first_line:
            raise
        return _predict_singly(predictor, items, top_k, first_line)


def _predict_singly(predictor: Predictor, items: list[EngineInput], top_k: int, first_line: int) -> Iterator[Answer]:
    """Yield the prediction of each item; raise a RequestError with the line number of the first item that fails."""
    for line_number, item in enumerate(items, start=first_line):
        try:
            yield from predictor([item], top_k=top_k)
        except HeedfulError as error:
            raise RequestError(f"stdin, line {line_number}: {error}") from None


def _text_chunks(arguments: list[str] | None) -> Iterator[tuple[int, list[str]]]:
    """Return chunks of texts, each with the line number of its first text on stdin, or 0 if texts are arguments."""
    if arguments:
        return iter([(0, arguments)])
    if sys.stdin.isatty():
        raise HeedfulError("no text was given: write texts after the model, or send one on each line of stdin")
    return _line_chunks(sys.stdin.buffer)


def _line_chunks(stream: Iterable[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of stdin in chunks, each with the line number of its first line, from 1."""
    lines = enumerate(stream, start=1)
    while chunk := list(islice(lines, LINES_PER_CHUNK)):
        yield chunk[0][0], [_decode_line(line_number, line) for line_number, line in chunk]


def _decode_line(line_number: int, line: bytes) -> str:
    """Return a line of stdin without its line ending. The first line may begin with a byte order mark."""
    try:
        return line.decode("utf-8-sig" if line_number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin, line {line_number} is not UTF-8 ({error.reason}): convert it first") from None


def _file_option(out: Path | None, file_format: str, rows: int, without_inputs: bool, assignments: list[str]) -> str:
    """Return the name of an option that was given although it only applies to files, or ""."""
    options = {
        "--output": out,
        "--format": file_format != "parquet",
        "--rows": rows != 10_000,
        "a setting of data": assignments,
        "--without-inputs": without_inputs,
    }
    return next((name for name, value in options.items() if value), "")


def _check_options(engine: Engine, options: set[str], *, needed: bool) -> None:
    """Check that the head of a model accepts the options.

    Args:
        engine: The model.
        options: Names of the options that were given.
        needed: Whether to raise an error if an option that the head needs is missing.

    Raises:
        HeedfulError: If the head does not accept an option, or needs another one.
    """
    accepted = OPTIONS_BY_HEAD.get(engine.kind, ())
    for name in sorted(options.difference(accepted)):
        raise HeedfulError(
            f"--{name.replace('_', '-')} cannot be used with this model: its {engine.kind} head expects "
            f"{engine.expects}"
        )
    if needed and engine.kind in HEADS_NEEDING_OPTION and not options:
        raise HeedfulError(f"the {engine.kind} head of this model needs --{accepted[0]} beside the texts")


def _engine_input(text: str, pair: str | None, question: str | None, choice: list[str] | None) -> EngineInput:
    """Return the input that the engine expects for a text and its options."""
    if question is not None:
        return {"question": question, "context": text}
    if choice is not None:
        return {"prompt": text, "choices": choice}
    return text if pair is None else (text, pair)

"""`heedful evaluate`: scores of a model on a split of data, of rankings against relevance judgments, or on GLUE.

Its entry points are `evaluate` and `evaluate_glue`. Other commands (`bench`, `prune`, `distil`, `look`) use the
functions that open data for a model and build the task that evaluates it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from heedful.checkpoint import ModelBundle, load
from heedful.checkpoint.folder_json import UnfinishedError
from heedful.data import Dataset, DataSettings, Raise, read
from heedful.data.bad_rows import BadRowPolicy
from heedful.data.examples import Example, TaggedExample
from heedful.data.labelled.columns import MissingColumnError
from heedful.data.labelled.statistics import compute_stats
from heedful.data.retrieval.beir import beir_folder
from heedful.data.retrieval.trec import ranking_file_of, read_rankings
from heedful.data.tag_schemes import unknown_labels
from heedful.device import resolve_device
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.infer.engine import Engine
from heedful.infer.precision import Precision, PrecisionOrAuto, check_precision
from heedful.infer.tuning.precision_gate import fastest_accepted, measure_precisions, open_in_precision, precision_for
from heedful.model.config import Classes, TokenClasses
from heedful.runs.checkpoints import find_checkpoint
from heedful.runs.data_settings import data_settings_for
from heedful.runs.evaluate_retrieval import (
    Relevance,
    rank_by_index,
    rank_by_reranker,
    rank_by_vectors,
    read_relevance,
    retrieval_notes,
    save_rankings,
    score_rankings,
)
from heedful.runs.finetune.settings import LongInputs, run_data_settings
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import DATA, SETTINGS, files_trained_on, read_run_json
from heedful.runs.scoring import measure_split
from heedful.search.index import METHODS, SearchIndex
from heedful.search.store import is_index
from heedful.settings import load_mapping, overlay
from heedful.tasks.answering import require_tokenizer
from heedful.tasks.metrics import GLUE
from heedful.tasks.spec import TaskSpec
from heedful.tasks.specs import specs_of_head
from heedful.tasks.specs.seq2seq import Seq2SeqSettings, has_bleu
from heedful.tasks.task import Task

GLUE_FOLDERS = {  # entries of GLUE by folder of the task, each with the split on which it is scored
    "CoLA": {"cola": "dev"},
    "SST-2": {"sst2": "dev"},
    "MRPC": {"mrpc": "dev"},
    "STS-B": {"stsb": "dev"},
    "QQP": {"qqp": "dev"},
    "MNLI": {"mnli": "dev", "mnli-mm": "dev-mismatched"},
    "QNLI": {"qnli": "dev"},
    "RTE": {"rte": "dev"},
    "WNLI": {"wnli": "dev"},
}
DEFAULT_LONG_INPUTS: LongInputs = "stride"
DEFAULT_GENERATION = Seq2SeqSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The scores of a model on one split."""

    split: str  # name of the split, or of the file of relevance judgments
    metric: str  # name of the metric that ranks models
    numbers: JsonObject  # metrics by name, and the "count" of examples
    intervals: JsonObject  # 95 % intervals by metric, each with "low" and "high"
    stated: tuple[str, ...]  # sentences about how the data was read
    bad_rows: dict[str, int]  # rows left out, by file
    trained_on: tuple[str, ...] = ()  # files of the split that the run was trained on
    precision: Precision = "float32"  # precision of the answers

    def to_dict(self) -> JsonObject:
        """Convert to plain data for JSON."""
        return asdict(self)


def evaluate(
    run: str | Path | ModelBundle,
    data: object,
    *,
    checkpoint: str | int | None = None,
    split: str | None = None,
    settings: DataSettings | None = None,
    long_inputs: LongInputs | None = None,
    generation: Seq2SeqSettings | None = None,
    on_bad_row: BadRowPolicy | None = None,
    predictions: Path | None = None,
    overwrite: bool = False,
    precision: PrecisionOrAuto | None = None,
    revision: str | None = None,
    device: str = "auto",
    reranker: str | Path | None = None,
) -> Evaluated:
    """Evaluate a run, or a model folder, on a split of the data.

    Memory does not grow with the data except for Spearman's rho, thresholds and retrieval. Results do not depend on the
    batch size.

    Retrieval is evaluated in three ways. A model of sentence embeddings, or an index, ranks the documents of a data set
    in BEIR's layout. A TREC run is compared with a file of relevance judgments, or with such a data set.

    Args:
        run: A run, a model folder, NAME[@REVISION] on the hub, a loaded model, an index of `heedful index`,
            or a file with a TREC run.
        data: Labelled data in any form that `heedful.data.read` accepts, or a folder in BEIR's layout.
        checkpoint: "best", "last" or a step of a finished run, instead of the weights of the run's model.
        split: Name of the split. If None, test, else dev, else the first one.
        settings: How data are read. If None, as the run read its data.
        long_inputs: "stride" or "truncate". If None, as in the run.
        generation: Settings of generation of a seq2seq model. If None, as in the run.
        on_bad_row: Policy for rows that cannot be read. If None, such a row is an error.
        predictions: File for all predictions, the worst mistakes first; in retrieval, for a TREC run.
        overwrite: Whether an existing file of predictions is replaced.
        precision: Precision of the answers. "auto" is the one that an `Engine` uses on this machine. If None, the
            default of an `Engine` on this device.
        revision: Revision of a model on the hub.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one.
        reranker: With an index: a cross-encoder that ranks the best documents of hybrid search again. Metrics of the
            new ranking are added as "reranked_NAME", and `predictions` gets the new ranking.

    Raises:
        HeedfulError: If the data do not fit the model, or if a file cannot be read or written.
    """
    if predictions is not None and predictions.exists() and not overwrite:
        raise HeedfulError(f"{predictions} exists: give another file, or --overwrite to replace it")
    beir_data = beir_folder(data)
    ranking_file = None if isinstance(run, ModelBundle) else ranking_file_of(run)
    index_folder = None if isinstance(run, ModelBundle) or ranking_file or not is_index(run) else run
    if reranker is not None and index_folder is None:
        raise HeedfulError(
            f"reranker is {str(reranker)!r}, but {run if isinstance(run, str | Path) else run.source} is not an index: "
            "give a folder of heedful index, or leave the reranker out"
        )
    if beir_data or ranking_file:
        _refuse_without_effect(settings=settings, long_inputs=long_inputs, generation=generation, on_bad_row=on_bad_row)
    if ranking_file:
        _refuse_without_effect(checkpoint=checkpoint, predictions=predictions, revision=revision)
        return _evaluate_rankings(read_rankings(ranking_file), read_relevance(data, split))
    if index_folder is not None:
        not_float32 = None if precision in (None, "float32") else precision
        _refuse_without_effect(checkpoint=checkpoint, revision=revision, precision=not_float32)
        cross_encoder = None if reranker is None else Engine(reranker, device=device)
        return _evaluate_index(SearchIndex(index_folder, device=device), data, split, predictions, cross_encoder)
    loaded, loaded_precision = _load_checkpoint(run, checkpoint, precision, revision, device)
    if beir_data:
        relevance = read_relevance(data, split)
        rankings = rank_by_vectors(Engine(loaded), beir_data.documents(), beir_data.queries(relevance.split))
        if predictions is not None:
            save_rankings(predictions, rankings, loaded.source)
        return _evaluate_rankings(rankings, relevance, loaded_precision)
    if isinstance(run, ModelBundle):
        run_settings, run_long_inputs = DataSettings(dev_fraction=0.0), DEFAULT_LONG_INPUTS
    else:
        run_settings, run_long_inputs = data_settings_for(run, data)
    dataset = open_for_model(loaded, data, settings or run_settings, on_bad_row or Raise())
    if predictions is not None and predictions.exists():
        _refuse_overwriting_data(predictions, dataset)
    split = split or next((name for name in ("test", "dev") if name in dataset.splits), dataset.splits[0])
    generation = generation or (DEFAULT_GENERATION if isinstance(run, ModelBundle) else run_generation(run))
    task, loaded = build_eval_task(loaded, dataset, split, long_inputs or run_long_inputs, generation)
    examples = dataset.examples(split)
    try:
        metrics = measure_split(task, loaded, examples, predictions=predictions)
    except OSError as error:
        raise HeedfulError(f"{predictions or data} cannot be written or read: {error.strerror or error}") from error
    split_files = dataset.names_by_split.get(split, ())
    return Evaluated(
        split=split,
        metric=task.metric,
        numbers=task.report(metrics),
        intervals=metrics.intervals(),
        stated=dataset.stated,
        bad_rows=dict(dataset.row_errors.bad),
        trained_on=() if isinstance(run, ModelBundle) else files_trained_on(run, split_files),
        precision=loaded_precision,
    )


def _load_checkpoint(
    run: str | Path | ModelBundle,
    checkpoint: str | int | None,
    precision: PrecisionOrAuto | None,
    revision: str | None,
    device: str,
) -> tuple[ModelBundle, Precision]:
    """Return the model of a run, or of one of its checkpoints, with its precision. A loaded model is not changed."""
    if not isinstance(run, ModelBundle):
        folder = run if checkpoint is None else find_checkpoint(run, str(checkpoint))
        return load_in_precision(folder, precision, revision, device)
    if precision not in (None, "float32"):
        raise HeedfulError(f"this model is loaded already: to measure it in {precision}, give its folder")
    if checkpoint is not None:
        raise HeedfulError(f"this model is loaded already: for its checkpoint {checkpoint}, give the run's folder")
    return run, "float32"


def _refuse_without_effect(**options: object) -> None:
    """Raise a HeedfulError for an option that is not None, since the options have no effect on retrieval."""
    if name := next((name for name, value in options.items() if value is not None), None):
        raise HeedfulError(
            f"{name} is {options[name]!r}, which has no effect on the evaluation of retrieval: leave it out"
        )


def _evaluate_index(
    index: SearchIndex, data: object, split: str | None, predictions: Path | None, reranker: Engine | None
) -> Evaluated:
    """Evaluate each search method of an index, and with a reranker also "reranked": hybrid search, ranked again.

    Metrics of methods other than hybrid, the default, are named METHOD_NAME.
    """
    beir_data = beir_folder(data)
    if beir_data is None:
        raise HeedfulError(
            f"{data} has no queries with relevance judgments, on which an index is evaluated: give a folder in BEIR's "
            "layout with corpus.jsonl, queries.jsonl and qrels/test.tsv"
        )
    relevance = read_relevance(data, split)
    queries = beir_data.queries(relevance.split)
    rankings: dict[str, Mapping[str, Mapping[str, float]]]
    rankings = {method: rank_by_index(index, queries, method) for method in METHODS}
    if reranker is not None:
        rankings["reranked"] = rank_by_reranker(index, queries, reranker)
    default_method, *other_methods = rankings
    if predictions is not None:
        save_rankings(predictions, rankings[default_method if reranker is None else "reranked"], str(index.folder))
    evaluated = {method: _evaluate_rankings(ranking, relevance) for method, ranking in rankings.items()}
    default = evaluated[default_method]
    other_numbers = _with_method_names({method: evaluated[method].numbers for method in other_methods})
    other_intervals = _with_method_names({method: evaluated[method].intervals for method in other_methods})
    judged_documents = {document for judged in relevance.judgments.values() for document in judged}
    missing = sum(document not in index for document in judged_documents)
    notes = [f"judged documents that the index does not have: {missing:,}"] if missing else []
    return replace(
        default,
        numbers=default.numbers | other_numbers,
        intervals=default.intervals | other_intervals,
        stated=(*default.stated, *notes),
    )


def _with_method_names(tables: Mapping[str, JsonObject]) -> JsonObject:
    """Merge the metrics of several methods into one dict with the keys METHOD_NAME.

    "count" is left out, since it is the same for all methods.
    """
    return {
        f"{method}_{name}": value
        for method, table in tables.items()
        for name, value in table.items()
        if name != "count"
    }


def _evaluate_rankings(
    rankings: Mapping[str, Mapping[str, float]], relevance: Relevance, precision: Precision = "float32"
) -> Evaluated:
    """Compare rankings with relevance judgments."""
    scores = score_rankings(rankings, relevance.judgments)
    return Evaluated(
        split=relevance.split,
        metric=scores.names[0],
        numbers=scores.compute(),
        intervals=scores.intervals(0),
        stated=tuple(retrieval_notes(scores, rankings, relevance.judgments)),
        bad_rows={},
        precision=precision,
    )


def load_in_precision(
    run: str | Path, precision: PrecisionOrAuto | None, revision: str | None = None, device: str = "auto"
) -> tuple[ModelBundle, Precision]:
    """Load a model with its weights in a precision, as an `Engine` does. None and "auto" mean the same as there.

    Returns:
        The model, and the precision, which is not "auto".
    """
    resolved_device = resolve_device(device)
    requested = precision or precision_for(run, revision=revision, device=resolved_device)
    check_precision(requested)
    if requested == "auto":
        resolved = fastest_accepted(measure_precisions(run, revision=revision, device=resolved_device))
    else:
        resolved = requested
    if resolved == "float32":
        return load(run, revision=revision, device=resolved_device), resolved
    return open_in_precision(run, resolved, revision=revision, device=resolved_device).loaded, resolved


def _refuse_overwriting_data(predictions: Path, dataset: Dataset[Example]) -> None:
    """Raise a HeedfulError if the file of predictions is a file of the data."""
    for paths in dataset.names_by_split.values():
        if any(Path(path).exists() and predictions.samefile(path) for path in paths):
            raise HeedfulError(f"{predictions} is the data itself: give another file")


def open_for_model(
    loaded: ModelBundle, data: object, settings: DataSettings, on_bad_row: BadRowPolicy
) -> Dataset[Example]:
    """Open data for the task of the model's head. Labels are matched by name, so their order does not matter.

    Rows with a label that the model does not know are bad rows. Tags of the data and tags in answers are both converted
    to IOB2.

    Raises:
        HeedfulError: If the model knows none of the labels, or if it lacks some of them and `on_bad_row` is `Raise`.
    """
    dataset = _read_for_head(loaded, data, settings, on_bad_row)
    head = loaded.config.head
    known = head.labels if isinstance(head, Classes | TokenClasses) else dataset.labels
    unknown = unknown_labels(dataset.labels, known, tags=dataset.kind is TaggedExample)
    all_unknown = len(unknown) == len(dataset.labels)
    if unknown and (isinstance(on_bad_row, Raise) or all_unknown):
        skip_advice = "" if all_unknown else ", or skip the rows that have them: --on-bad-row skip"
        raise HeedfulError(
            f"the data has the labels {', '.join(dataset.labels[:10])}, but {loaded.source} knows "
            f"{', '.join(known[:10])}: {', '.join(unknown[:5])} could never be correct. Rename them in the data"
            f"{skip_advice}"
        )
    dataset.known_labels = known
    return dataset


def _read_for_head(
    loaded: ModelBundle, data: object, settings: DataSettings, on_bad_row: BadRowPolicy
) -> Dataset[Example]:
    """Open data as examples of the first task of the model's head for which the data has the columns."""
    *specs, last = task_specs_of(loaded)
    for spec in specs:
        try:
            return read(data, spec.example, settings, on_bad_row=on_bad_row)
        except MissingColumnError:
            continue
    return read(data, last.example, settings, on_bad_row=on_bad_row)


def task_specs_of(loaded: ModelBundle) -> tuple[TaskSpec, ...]:
    """Return the specifications of the tasks that a model's head can do.

    Raises:
        HeedfulError: If the model cannot be evaluated on data.
    """
    if specs := specs_of_head(loaded.config.head):
        return specs
    match loaded.config.head:
        case Classes(labels=labels):
            problem = f"gives {len(labels)} numbers, and data has one"
        case head:
            problem = f"has {'no head' if head is None else f'a {head.kind} head'}, which no data can score"
    raise HeedfulError(f"{loaded.source} {problem}: fine-tune it first, or load it with another head")


def run_generation(run: str | Path) -> Seq2SeqSettings:
    """Return the generation settings with which a seq2seq run was evaluated, or the defaults for anything else.

    If the run ranked models by BLEU, and sacrebleu is not installed here, a warning says that F1 replaces BLEU.
    """
    path, settings = Path(run) / SETTINGS, DEFAULT_GENERATION
    task_table = load_mapping(path).get("task") if path.is_file() else None
    if isinstance(task_table, dict) and task_table.get("kind") == settings.kind:
        settings = overlay(settings, task_table, source=f"{path}: task")
    if settings.metric == "bleu" and not has_bleu():
        message = (
            f"{run} ranked models by BLEU, but sacrebleu is not installed: F1 is the metric here; for BLEU pip install "
            "'heedful[translate]'"
        )
        warnings.warn(message, HeedfulWarning, stacklevel=3)
        return replace(settings, metric="f1")
    return settings


def build_eval_task(
    loaded: ModelBundle,
    dataset: Dataset[Example],
    split: str,
    long_inputs: LongInputs = DEFAULT_LONG_INPUTS,
    generation: Seq2SeqSettings = DEFAULT_GENERATION,
) -> tuple[Task, ModelBundle]:
    """Return the task and the model for evaluating a split. A seq2seq model uses the settings `generation`."""
    task_class = next(spec.task for spec in task_specs_of(loaded) if spec.example is dataset.kind)
    split_stats = cache(lambda: compute_stats(dataset, [split]))
    fields = {"long_inputs": long_inputs, **task_class.evaluation_fields(loaded, split_stats, generation)}
    task = task_class(tokenizer=require_tokenizer(loaded), limit=loaded.max_length, **fields)
    return task.for_split(loaded, split_stats, split)


def evaluate_glue(
    run: str | Path, data: str | Path, *, precision: PrecisionOrAuto | None = None, device: str = "auto"
) -> dict[str, JsonObject]:
    """Evaluate on every GLUE task that has both data and a model.

    Args:
        run: A run on one of the tasks, or a folder with a run for each task, under the task's name.
        data: The folder with GLUE's folders.
        precision: Precision of the answers, as in `evaluate`.
        device: "cpu", "cuda" or "cuda:1"; "auto": a GPU where there is one.

    Returns:
        Official scores by entry of the suite, each with the split, the count, the model and the precision.

    Raises:
        HeedfulError: If no task has both data and a model.
    """
    results: dict[str, JsonObject] = {}
    for folder, split_by_entry in GLUE_FOLDERS.items():
        data_folder, model_folder = Path(data) / folder, _find_glue_run(Path(run), folder)
        if not data_folder.is_dir() or model_folder is None:
            continue
        try:
            loaded, loaded_precision = load_in_precision(model_folder, precision, device=device)
        except UnfinishedError as unfinished:
            warnings.warn(f"{folder} is left out: {unfinished}", HeedfulWarning, stacklevel=2)
            continue
        _, long_inputs = run_data_settings(model_folder)
        for entry, split in split_by_entry.items():
            evaluated = evaluate(loaded, data_folder, split=split, long_inputs=long_inputs)
            official_scores = GLUE[entry].scores(_glue_numbers(entry, evaluated.numbers))
            results[entry] = official_scores | {
                "split": split,
                "count": evaluated.numbers["count"],
                "model": str(model_folder),
                "precision": loaded_precision,
            }
    if not results:
        data_folders = ", ".join(name for name in GLUE_FOLDERS if (Path(data) / name).is_dir())
        raise HeedfulError(
            f"nothing to evaluate: of {', '.join(GLUE_FOLDERS)}, {data} has {data_folders or 'none'}, and {run} is "
            "neither a run on one of them nor a folder with runs of those names"
        )
    return results


def _glue_numbers(entry: str, numbers: JsonObject) -> JsonObject:
    """Return metrics in which "f1" is the F1 of GLUE's positive class, regardless of the model's label order."""
    positive = getattr(GLUE[entry].metric, "positive", None)
    if positive is None:
        return numbers
    return numbers | {"f1": numbers["classes"][positive]["f1"]}


def _find_glue_run(run: Path, folder: str) -> Path | None:
    """Return the run on a task of GLUE: a subfolder of `run`, `run` itself if it was trained on the task, or None."""
    for candidate in (run / folder, run / folder.casefold(), run / folder.replace("-", "").casefold()):
        if candidate.is_dir():
            return candidate
    if not (run / DATA).is_file():
        return None
    return run if any(note.startswith(f"GLUE's {folder};") for note in read_run_json(run / DATA)["stated"]) else None

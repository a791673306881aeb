"""`heedful prune`: choose a token pruning for a model by its speed and its loss of quality.

With token pruning, the lower layers compute all tokens, and the other layers compute only the tokens that receive most
attention. The candidates, called trials, are pairs of a number of lower layers and a share of tokens. All trials are
timed. They are evaluated from the fastest one on until one loses no more of the metric than allowed, both by the labels
and by the probabilities of the model with all tokens (see `expected_loss`). The trial is chosen on some labelled
examples, and its scores are reported on others: on dev and test, or on two halves of the only split. The model is not
trained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from heedful.atomic_io import atomic_path, write_synced
from heedful.checkpoint import ModelBundle, folder_of, load, save
from heedful.checkpoint.atomic_folder import check_target
from heedful.checkpoint.bundle import cascade_refusal
from heedful.data import Dataset, Raise
from heedful.data.examples import Example
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.engine import Engine
from heedful.infer.precision import PrecisionOrAuto
from heedful.model.token_pruning import TokenPruning
from heedful.runs.card.pruning import HEADING, PRUNING, pruning_section, pruning_sentence
from heedful.runs.data_settings import data_settings_for
from heedful.runs.distil.cascade import split_rows
from heedful.runs.distil.plan import dev_split_settings
from heedful.runs.evaluate import build_eval_task, open_for_model
from heedful.runs.finetune.settings import LongInputs
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import DATA, SETTINGS, files_trained_on, write_file
from heedful.tasks.answering import Answer
from heedful.tasks.classify import Classify
from heedful.tasks.metrics import format_difference, format_metric
from heedful.tasks.metrics.bootstrap import paired_difference
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, evaluate_task

LAYER_SHARES = (1 / 3, 1 / 2, 2 / 3)  # shares of the layers that compute all tokens, for the default trials
KEEP_RATES = (0.2, 0.3, 0.4, 0.5, 0.7)  # shares of the tokens that the other layers compute, for the default trials
TRIAL_TEXTS = 64  # texts with which the trials are timed to sort them
REPORT_TEXTS = 256  # texts with which the chosen trial is timed for the report
ROUNDS = 5  # timed calls with all texts, after one that is not timed
CARD = "README.md"  # model card in a model folder


Probabilities = Float64[np.ndarray, "examples labels"]


class Measured(NamedTuple):
    """Scores of a model with one pruning on labelled examples."""

    metrics: EvalMetrics
    value: float  # value of the task's main metric
    probabilities: Probabilities | None  # None unless texts have one label each, and the metric is accuracy


def prune(
    run: str | Path,
    data: object,
    output_dir: str | Path,
    *,
    max_loss: float = 0.5,
    layers: Sequence[int] = (),
    keep_rates: Sequence[float] = KEEP_RATES,
    precision: PrecisionOrAuto | None = None,
    device: str = "auto",
    overwrite: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> JsonObject:
    """Choose a token pruning for a model, and save the model with it.

    The folder is a model folder with the data settings of the run, the report as pruning.json, and a model card.

    Args:
        run: A run or a model folder that classifies or scores texts by their first token.
        data: Labelled data that the run was not trained on. If it was trained on these files, its dev split is used.
        output_dir: The folder for the model.
        max_loss: Percentage points of the task's metric (hundredths of a correlation) that may be lost.
        layers: Numbers of lower layers that compute all tokens. If empty, a third, half and two thirds of the layers.
        keep_rates: Shares of the tokens that the other layers compute, from 0 to 1. Each is tried with each of
            `layers`.
        precision: Precision in which quality and speed are measured; see `Engine`.
        device: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one.
        overwrite: Whether to replace a model folder in `output_dir`.
        log: Receives progress, a line at a time.

    Returns:
        The content of pruning.json.

    Raises:
        HeedfulError: If tokens of the model cannot be pruned, the data do not fit it, no trial is both faster and
            within the allowed loss, or the folder cannot be written.
    """
    if not 0 <= max_loss < 100:
        raise HeedfulError(f"max_loss is {max_loss}; expected percentage points from 0 to below 100")
    check_target(Path(output_dir), overwrite=overwrite)
    engine = Engine(run, precision=precision, device=device)
    bundle = engine.loaded
    if bundle.early_stages:
        raise cascade_refusal(run, "pruned")
    trials = [
        TokenPruning(layer=layer, keep_rate=keep_rate)
        for layer in layers or _layers_to_try(bundle)
        for keep_rate in keep_rates
    ]
    for trial in trials:
        bundle.prune_tokens(trial)  # raises an error before anything is measured
    source, long_inputs = _open_held_out(run, bundle, data)
    fitted, reported, description = split_rows(source, source.splits, source.settings.seed)
    task, engine.loaded = build_eval_task(bundle, source, description["split"], long_inputs)
    engine.max_length = task.truncation_length
    report: JsonObject = description | {"metric": task.metric, "max_loss": max_loss, "precision": engine.precision}
    if max_loss * len(fitted) < 100:
        log(
            f"the pruning is chosen on few rows ({len(fitted)}): a single row changes {task.metric} by more than "
            f"{max_loss:g} points"
        )
    log(f"measuring the model with all tokens on {report['fitted_on']} ({len(fitted):,} rows)")
    chosen = _choose(engine, task, fitted, trials, report, log)
    log(f"measuring it on {report['reported_on']} ({len(reported):,} rows)")
    report |= _compare_with_all_tokens(engine, task, reported, chosen)
    report["sentence"] = pruning_sentence(report)
    engine.loaded.prune_tokens(chosen)
    _save(run, Path(output_dir), chosen, task.calibration(engine, fitted), report, overwrite=overwrite)
    return report


def _choose(
    engine: BundleEngine,
    task: Task,
    examples: Sequence[Example],
    trials: Sequence[TokenPruning],
    report: JsonObject,
    log: Callable[[str], None],
) -> TokenPruning:
    """Return the fastest trial that loses at most `report["max_loss"]`.

    The results of all trials that are evaluated are added to the report as "trials".

    Raises:
        HeedfulError: If no trial is both faster than the model with all tokens and within the allowed loss.
    """
    full = _measure(engine, task, examples, None)
    report["trials"] = []
    for trial, speedup in _faster(engine, task, examples[:TRIAL_TEXTS], trials):
        pruned = _measure(engine, task, examples, trial)
        entry = _trial_entry(engine, task, examples, trial, pruned, full) | {"speedup": speedup}
        report["trials"].append(entry)
        log(_trial_line(task.metric, entry))
        largest_loss = max(-entry["difference"], entry["expected_loss"] or 0.0)
        if largest_loss <= report["max_loss"] / 100 + 1e-9:
            return trial  # the trials after it are slower
    raise _nothing_chosen(report)


def _compare_with_all_tokens(
    engine: BundleEngine, task: Task, examples: Sequence[Example], chosen: TokenPruning
) -> JsonObject:
    """Return quality and speed of the model with all tokens and with the chosen pruning, for the report."""
    full, pruned = _measure(engine, task, examples, None), _measure(engine, task, examples, chosen)
    speeds = _texts_per_second(engine, task, examples[:REPORT_TEXTS], [None, chosen])
    return {
        "all_tokens": _model_numbers(task.metric, full) | {"texts_per_second": round(speeds[None], 1)},
        "pruned": _model_numbers(task.metric, pruned) | {"texts_per_second": round(speeds[chosen], 1)},
        "chosen": _trial_entry(engine, task, examples, chosen, pruned, full)
        | {"speedup": speeds[chosen] / speeds[None]},
    }


def _layers_to_try(bundle: ModelBundle) -> list[int]:
    """Return the shares LAYER_SHARES of the number of layers, each from 1 to one less than the number of layers.

    For a model without an encoder, the result is [1].
    """
    encoder = bundle.config.model.encoder
    layers = 2 if encoder is None else encoder.layers
    most = max(layers - 1, 1)
    return sorted({min(max(round(share * layers), 1), most) for share in LAYER_SHARES})


def _open_held_out(run: str | Path, bundle: ModelBundle, data: object) -> tuple[Dataset[Example], LongInputs]:
    """Open labelled data, and return it with the run's treatment of long texts.

    If the data has no dev and no test split, but files that the run was trained on, the dev split that the run made
    from them is made again.

    Raises:
        HeedfulError: If the run was trained on all rows of such files.
    """
    settings, long_inputs = data_settings_for(run, data)
    source = open_for_model(bundle, data, settings, Raise())
    has_only_train = {"dev", "test"}.isdisjoint(source.splits)
    if has_only_train and any(files_trained_on(run, source.names_by_split.get(split, ())) for split in source.splits):
        source = open_for_model(bundle, data, replace(settings, **dev_split_settings(str(run))), Raise())
        if "dev" not in source.splits:
            raise HeedfulError(f"{run} was trained on all rows of {data}: give rows that it was not trained on")
    return source, long_inputs


def _faster(
    engine: BundleEngine, task: Task, examples: Sequence[Example], trials: Sequence[TokenPruning]
) -> list[tuple[TokenPruning, float]]:
    """Return (trial, speedup) for the trials that are faster than the model with all tokens, the fastest first.

    A speedup of 2 means twice as many texts per second.
    """
    speeds = _texts_per_second(engine, task, examples, [None, *trials])
    speedups = [(trial, speeds[trial] / speeds[None]) for trial in trials]
    faster = [(trial, speedup) for trial, speedup in speedups if speedup > 1]
    return sorted(faster, key=lambda trial_and_speedup: -trial_and_speedup[1])


def _measure(engine: BundleEngine, task: Task, examples: Sequence[Example], pruning: TokenPruning | None) -> Measured:
    """Evaluate an engine on examples with a pruning (None: all tokens). The engine keeps this pruning afterwards."""
    engine.loaded.prune_tokens(pruning)
    rows: list[list[float]] = []

    def record(index: int, example: Example, answer: Answer, scored: ScoredAnswer) -> None:
        rows.append(list(answer["probabilities"].values()))

    has_probabilities = isinstance(task, Classify) and task.metric == "accuracy"
    metrics = evaluate_task(task, engine, examples, on_answer=record if has_probabilities else None)
    probabilities = np.array(rows) if has_probabilities else None
    return Measured(metrics, float(task.compute_metrics(metrics)[task.metric]), probabilities)


def expected_loss(full: Probabilities, pruned: Probabilities) -> float:
    """Return the loss of accuracy that is expected if the probabilities of the model with all tokens are right.

    An example on which the models disagree loses the difference of the probabilities of the two labels. Accuracies
    count it as one example gained or lost instead; since the models disagree on few examples, the difference of the
    accuracies is mostly chance. The expected loss varies much less. It tends to be larger than the loss, since the
    pruned model is right more often than the probabilities of the other model say.

    Args:
        full: Probabilities by the model with all tokens.
        pruned: Probabilities by the pruned model for the same examples.
    """
    rows = np.arange(len(full))
    return float(np.mean(full[rows, full.argmax(1)] - full[rows, pruned.argmax(1)]))


def _texts_per_second(
    engine: BundleEngine, task: Task, examples: Sequence[Example], prunings: Sequence[TokenPruning | None]
) -> dict[TokenPruning | None, float]:
    """Return the texts per second of the engine with each pruning, tokenizing included, as the median of ROUNDS calls.

    The prunings take turns, so that a change in the load of the machine affects all of them. None means all tokens.
    """
    inputs = [task.engine_input(example) for example in examples]
    seconds: dict[TokenPruning | None, list[float]] = {pruning: [] for pruning in prunings}
    for round_index in range(1 + ROUNDS):
        for pruning in prunings:
            engine.loaded.prune_tokens(pruning)
            start = time.perf_counter()
            engine(inputs)
            if round_index > 0:  # the first round is a warm-up
                seconds[pruning].append(time.perf_counter() - start)
    return {pruning: len(inputs) / statistics.median(times) for pruning, times in seconds.items()}


def _trial_entry(
    engine: BundleEngine,
    task: Task,
    examples: Sequence[Example],
    pruning: TokenPruning,
    pruned: Measured,
    full: Measured,
) -> JsonObject:
    """Return the result of a trial as data for JSON.

    The keys are those of the pruning; "tokens_left", a share from 0 to 1; "value", the metric; "difference" to the
    model with all tokens; "low" and "high", the 95 % interval of the difference, None if the metric has none; and the
    `expected_loss`, None unless texts have one label each and the metric is accuracy.

    Args:
        engine: The engine, for its tokenizer.
        task: The task.
        examples: The examples with which the scores were measured.
        pruning: The pruning of the trial.
        pruned: Scores with this pruning.
        full: Scores with all tokens.
    """
    inputs = [task.engine_input(example) for example in examples[:REPORT_TEXTS]]
    lengths = [len(chunk.encoded) for encoded_input in engine.tokenize(inputs) for chunk in encoded_input.chunks]
    interval: JsonObject = {"low": None, "high": None}
    if task.metric in full.metrics.bootstraps:
        replicates = (measured.metrics.bootstraps[task.metric].values() for measured in (pruned, full))
        interval = paired_difference(*replicates, count=len(examples))
    expected = None
    if full.probabilities is not None and pruned.probabilities is not None:
        expected = expected_loss(full.probabilities, pruned.probabilities)
    return asdict(pruning) | {
        "tokens_left": sum(map(pruning.count, lengths)) / sum(lengths),
        "value": pruned.value,
        "difference": pruned.value - full.value,
        "low": interval["low"],
        "high": interval["high"],
        "expected_loss": expected,
    }


def _trial_line(metric: str, entry: JsonObject) -> str:
    """Describe the result of a trial (see `_trial_entry`) on one line."""
    expected = ""
    if entry["expected_loss"] is not None:
        expected = f"; expected {format_difference(metric, -entry['expected_loss'])}"
    return (
        f"layer {entry['layer']}, keep rate {entry['keep_rate']:g}: {metric} "
        f"{format_metric(metric, entry['value'])} ({format_difference(metric, entry['difference'])}{expected}), "
        f"{entry['speedup']:.2f} times as fast"
    )


def _nothing_chosen(report: JsonObject) -> HeedfulError:
    """Return the error for trials that are all too slow or lose too much."""
    if not report["trials"]:  # only trials that are faster were evaluated
        return HeedfulError("no pruning is faster on these texts: keep all tokens; only long texts gain")
    best = min(report["trials"], key=lambda entry: max(-entry["difference"], entry["expected_loss"] or 0.0))
    return HeedfulError(
        f"every pruning that is faster loses more than {report['max_loss']:g} points of {report['metric']} on "
        f"{report['fitted_on']}. The least loss is that of {_trial_line(report['metric'], best)}. Allow more by "
        "max_loss, or keep all tokens"
    )


def _model_numbers(metric: str, measured: Measured) -> JsonObject:
    """Return the metric of a model as data for JSON, with its 95 % interval, or None if the metric has none."""
    return {"value": measured.value, "interval": measured.metrics.intervals().get(metric)}


def _save(
    run: str | Path,
    folder: Path,
    pruning: TokenPruning,
    calibration: tuple[float, ...],
    report: JsonObject,
    *,
    overwrite: bool,
) -> None:
    """Save the model with its pruning, the data settings of the run, the report and the model card."""
    bundle = load(run)
    bundle.prune_tokens(pruning)
    bundle.calibration, bundle.training_vectors = calibration, None  # pruning changes the hidden states
    card = folder_of(run, None) / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {folder.absolute().name}"
    # with these files, commands read data for the pruned model as for the run
    copied = {name: (Path(run) / name).read_text("utf-8") for name in (SETTINGS, DATA) if (Path(run) / name).is_file()}
    save(bundle, folder, overwrite=overwrite)  # removes the files above if the run is in this folder
    for name, content in copied.items():
        write_file(folder / name, content)
    write_file(folder / PRUNING, report)
    text, *_ = text.split(f"\n{HEADING}\n")  # drops the section of a model that was pruned before
    blocks = [text.rstrip("\n"), *("\n".join(lines) for lines in pruning_section(report))]
    with atomic_path(folder / CARD) as temporary:
        write_synced(temporary, ["\n\n".join(blocks).encode("utf-8", "replace"), b"\n"])

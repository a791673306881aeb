"""Choice of the training method for few labels: methods are compared on dev, or by cross-validation on train.

The first method is used unless another one is better by more than chance.

`finetune` calls `compare_methods` before it begins the run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heedful.checkpoint import ModelBundle
from heedful.data.examples import Example
from heedful.data.sampler import epoch_order
from heedful.device import resolve_device, resolve_dtype
from heedful.errors import DataError
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.few_labels import body_objective, fit_last_layer, with_vector_head
from heedful.runs.finetune.plan import FinetunePlan
from heedful.runs.finetune.settings import Method
from heedful.runs.finetune.training_time import estimate_seconds
from heedful.runs.results import RESULTS, JsonObject
from heedful.runs.run import Run
from heedful.runs.run_folder import METHOD, read_run_json, read_settings
from heedful.runs.scoring import engine_for, eval_result
from heedful.settings import to_mapping
from heedful.tasks.answering import Answer, AnswerInputs
from heedful.tasks.classify import Classify
from heedful.tasks.metrics import format_metric
from heedful.tasks.metrics.calibration import with_temperature
from heedful.tasks.task import EvalMetrics, Task, evaluate_task
from heedful.train.trainer import Trainer

METHODS: tuple[Method, ...] = ("contrastive", "linear", "finetune")  # in the order of the comparison
FOLDS = 4  # default count of folds


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """Examples to train on, and held-out examples to evaluate on."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    indices: Sequence[int]  # indices of the held-out examples in their split


def compare_methods(plan: FinetunePlan, run: Run, replan: Callable[[Method], FinetunePlan]) -> FinetunePlan:
    """Return the plan for the method that is chosen on held-out examples, with the comparison of methods.

    If the settings name a method, only that method is evaluated, and only if they have folds. A resumed run does not
    compare again. If the folder has a finished run with other settings or data, nothing is compared, and `Run.begin`
    raises the error.

    Args:
        plan: The plan. It is returned unchanged unless its method is "auto" or it has folds.
        run: The run, whose folder is locked.
        replan: Returns the plan for a method.
    """
    if plan.settings.method != "auto" and not plan.settings.folds:
        return plan
    key = _fingerprint(plan)
    path = run.folder / METHOD
    record: JsonObject = {}
    finished_method: Method | None = None
    if run.ranks.is_main:
        record = read_run_json(path) if path.exists() else record
        if (run.folder / RESULTS).exists():
            finished_method = read_settings(run.folder, type(plan.settings)).method
    gathered: list[tuple[JsonObject, Method | None]] = run.ranks.all_gather_object((record, finished_method))
    record, finished_method = gathered[0]
    if record.get("key") != key:
        if finished_method is not None:
            return plan if plan.settings.method != "auto" else replan(finished_method)
        record = {"key": key, **_compare(plan, run, replan)}
    record = run.ranks.all_gather_object(record)[0]  # durations differ between ranks, and so may the methods compared
    chosen = plan if plan.settings.method != "auto" else replan(record["method"])
    return replace(chosen, why="; ".join([record["why"], chosen.why]), comparison=record)


def public_comparison(comparison: Mapping[str, object]) -> JsonObject:
    """Return the comparison without the hash of settings and data, and without what the saved model has."""
    return {name: value for name, value in comparison.items() if name not in ("key", "temperature", "calibration")}


def _fingerprint(plan: FinetunePlan) -> str:
    """Return a hash of the settings and of the examples of train and dev."""
    digest = hashlib.blake2b(json.dumps(to_mapping(plan.settings), sort_keys=True).encode(), digest_size=16)
    for split in ("train", "dev"):
        for example in plan.source.examples(split) if split in plan.stats.non_empty_splits else ():
            digest.update(repr((split, example.texts, example.target)).encode(errors="backslashreplace"))
    return digest.hexdigest()


def _compare(plan: FinetunePlan, run: Run, replan: Callable[[Method], FinetunePlan]) -> JsonObject:
    """Evaluate the methods for which there is time, and return the record of the comparison: method.json."""
    settings = plan.settings
    is_auto = settings.method == "auto"
    comparison_start = time.monotonic()
    folds, held_out_name = _make_folds(plan)
    candidates = METHODS if is_auto else (settings.method,)
    results: dict[str, Any] = {}
    answers: dict[str, HeldOutAnswers] = {}
    for method in candidates:
        method_plan = replan(method) if is_auto else plan
        method_plan = replace(method_plan, settings=run.resolve(method_plan.settings))
        method_start = time.monotonic()
        if is_auto:
            trainings = sum(len(fold.train) for fold in folds) / plan.stats.counts["train"]  # in trainings on all rows
            expected_seconds = trainings * _training_seconds(method_plan, list(plan.source.examples("train")))
            if method_start - comparison_start + expected_seconds > settings.method_seconds:
                if not results:
                    return _choose_without_comparison(plan, method, expected_seconds)
                continue
        answers[method] = _answer(method_plan, folds)
        seconds = time.monotonic() - method_start
        results[method] = _scores(answers[method]) | {"seconds": round(seconds, 1)}
        run.reporter.message(f"{method}: {_format_score(results[method])} on {held_out_name} ({seconds:.0f} s)")
    best = choose_method(answers)
    scores = ", ".join(f"{method} {_format_score(result)}" for method, result in results.items())
    why = f"{scores} on {held_out_name}"
    if is_auto:
        untried = [method for method in METHODS if method not in results]
        limit = f"; {' and '.join(untried)} not tried within {settings.method_seconds:g} s" if untried else ""
        chance = "; higher scores are within a standard error" if best != _highest(results) else ""
        why = f"method {best}, chosen for {plan.stats.counts['train']:,} examples ({why}{chance}{limit})"
    record = {"method": best, "why": why, "folds": len(folds), "measured_on": held_out_name, "methods": results}
    if "dev" not in plan.stats.non_empty_splits and settings.task.fits_temperature():
        calibrated, calibration = _calibrate(answers[best])
        results[best] |= _scores(calibrated)  # thresholds in its table of coverage are those of the calibrated model
        record |= calibration
    return record


def _choose_without_comparison(plan: FinetunePlan, method: Method, seconds: float) -> JsonObject:
    """Return a record that chooses a method because a comparison would take longer than `method_seconds`."""
    why = (
        f"method {method} for {plan.stats.counts['train']:,} examples; comparing methods would take about "
        f"{seconds:.0f} s or more (--method-seconds)"
    )
    return {"method": method, "why": why, "folds": 0, "measured_on": "", "methods": {}}


def _training_seconds(plan: FinetunePlan, examples: Sequence[Example]) -> float:
    """Estimate the duration of one training on examples in seconds, from a few steps."""
    settings = plan.settings
    if settings.method == "linear":
        return 0.0
    base = initial_model(
        settings.init, plan.source, plan.stats.counts, settings.train.seed, settings.max_length, lambda text: None
    )
    task, model = build_task(settings, plan.source, plan.stats, base, plan.labels)
    if settings.method != "finetune":
        model = with_vector_head(model, base)
    encoded = task.encode_split(examples)
    trainer = Trainer(model, body_objective(settings, task), encoded.samples, settings.train)
    return estimate_seconds(trainer, encoded.tokens)[0]


def _format_score(result: JsonObject) -> str:
    """Return the name and the value of the main metric, from the result of a method."""
    return f"{result['metric']} {format_metric(result['metric'], result['metric_value'])}"


def _make_folds(plan: FinetunePlan) -> tuple[list[Fold], str]:
    """Return the folds, and a name for all held-out examples.

    With a dev split there is a single fold, train and dev, unless the settings have folds of train.

    Raises:
        DataError: If train has fewer different texts than folds.
    """
    train = list(plan.source.examples("train"))
    if "dev" in plan.stats.non_empty_splits and not plan.settings.folds:
        dev = list(plan.source.examples("dev"))
        return [Fold(train=train, held_out=dev, indices=range(len(dev)))], "dev"
    num_texts = len({example.texts for example in train})
    num_folds = plan.settings.folds or min(FOLDS, num_texts)
    if num_folds < 2 or num_texts < num_folds:
        raise DataError(
            f"train has {num_texts} different text{'s' * (num_texts != 1)}, too few for {max(2, num_folds)} folds: "
            "give more examples, or set method=finetune and no folds"
        )
    fold_numbers = assign_folds(train, num_folds, plan.settings.train.seed)  # of the examples
    folds = []
    for number in range(num_folds):
        indices = [index for index, fold_number in enumerate(fold_numbers) if fold_number == number]
        rest = [example for example, fold_number in zip(train, fold_numbers, strict=True) if fold_number != number]
        folds.append(Fold(train=rest, held_out=[train[index] for index in indices], indices=indices))
    return folds, f"{num_folds} folds of train"


def assign_folds(examples: Sequence[Example], folds: int, seed: int) -> list[int]:
    """Return the fold of each example, from 0, stratified by target. Examples with equal texts are in the same fold.

    Args:
        examples: Examples in any order.
        folds: How many folds, at most as many as different texts.
        seed: Seed of the order in which examples with the same target are assigned to folds.
    """
    shuffled = epoch_order(len(examples), seed, 0).tolist()
    order = sorted(shuffled, key=lambda index: examples[index].target)
    fold_by_texts: dict[tuple[str, ...], int] = {}
    for index in order:
        fold_by_texts.setdefault(examples[index].texts, len(fold_by_texts) % folds)
    return [fold_by_texts[example.texts] for example in examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutAnswers:
    """The answers of models to the held-out examples of all folds, in the order of their split."""

    task: Task
    ids: Sequence[int]  # indices of the examples in their split
    examples: Sequence[Example]
    answers: Sequence[Answer]


def _answer(plan: FinetunePlan, folds: Sequence[Fold]) -> HeldOutAnswers:
    """Train once per fold, and answer the held-out examples of all folds."""
    settings = plan.settings
    base = initial_model(
        settings.init, plan.source, plan.stats.counts, settings.train.seed, settings.max_length, lambda text: None
    )
    answered: list[tuple[int, Example, Answer]] = []  # (index in the split, held-out example, answer)
    for fold in folds:
        task, model = train_in_memory(plan, base, fold.train)

        def record(index: int, example: Example, answer: Answer, scored: object, fold: Fold = fold) -> None:
            answered.append((fold.indices[index], example, answer))

        engine = engine_for(task, model, resolve_dtype(settings.eval_precision, next(model.parameters()).device))
        evaluate_task(task, engine, fold.held_out, on_answer=record)
    answered.sort(key=lambda entry: entry[0])
    ids, examples, answers = (list(column) for column in zip(*answered, strict=True))
    return HeldOutAnswers(task=task, ids=ids, examples=examples, answers=answers)


def _measure(held_out: HeldOutAnswers) -> EvalMetrics:
    """Return the metrics of a method on the held-out examples of all folds together."""
    task = held_out.task
    return task.update_metrics(task.new_metrics(), held_out.examples, held_out.answers, held_out.ids)


def _scores(held_out: HeldOutAnswers) -> JsonObject:
    """Return the scores of a method on the held-out examples of all folds together."""
    task, metrics = held_out.task, _measure(held_out)
    result = eval_result(task, [metrics])
    coverage = task.compute_metrics(metrics).get("coverage")  # None with several labels
    return {
        "metric": task.metric,
        "metric_value": result.metric_value,
        "tie_breaker": result.tie_breaker,
        "numbers": result.metrics | ({"coverage": coverage} if coverage else {}),
        "intervals": metrics.intervals(),
    }


def _highest(results: Mapping[str, JsonObject]) -> str:
    """Return the method with the highest score."""
    return max(results, key=lambda method: (results[method]["metric_value"], results[method]["tie_breaker"]))


def choose_method(answers: Mapping[str, HeldOutAnswers]) -> str:
    """Return the first method, or the best of those that beat it by more than a standard error of the difference.

    Differences on a few dozen examples are mostly chance, so the method that is the best one with few labels on most
    data (Tunstall et al. 2022) is kept unless there is evidence for another. The rule of one standard error is that of
    Breiman et al. 1984; the standard error is estimated by bootstrap, paired by example.

    Args:
        answers: The answers of each method to the same examples, in the order of METHODS.
    """
    first, *others = answers
    gains = {first: 0.0}
    metric, metrics = answers[first].task.metric, {method: _measure(held_out) for method, held_out in answers.items()}
    for method in others:
        differences = metrics[method].bootstraps[metric].values() - metrics[first].bootstraps[metric].values()
        if differences.mean() > differences.std():
            gains[method] = float(differences.mean())
    return max(gains, key=lambda method: gains[method])


def _calibrate(held_out: HeldOutAnswers) -> tuple[HeldOutAnswers, JsonObject]:
    """Fit a temperature and prediction sets on out-of-fold answers.

    Returns:
        The answers with calibrated probabilities, and the entries "temperature", which is None if none was fitted, and
        "calibration" of method.json.
    """
    task, answers = held_out.task, held_out.answers
    temperature = task.fit_temperature(_replayed(answers), held_out.examples)
    if temperature is not None and isinstance(task, Classify):  # with several labels, only the loss depends on it
        answers = [_with_temperature(answer, temperature) for answer in answers]
    calibration = task.calibration(_replayed(answers), held_out.examples)
    return replace(held_out, answers=answers), {"temperature": temperature, "calibration": calibration}


def _with_temperature(answer: Answer, temperature: float) -> Answer:
    """Return an answer with one label with the probabilities that a temperature gives."""
    probabilities = with_temperature(answer["probabilities"], temperature)
    return {**answer, "probabilities": probabilities, "probability": probabilities[answer["label"]]}


def _replayed(answers: Sequence[Answer]) -> AnswerInputs:
    """Return an engine that gives these answers, whatever the inputs are."""
    remaining = iter(answers)
    return lambda inputs: [next(remaining) for _ in inputs]


def train_in_memory(plan: FinetunePlan, base: ModelBundle, examples: Sequence[Example]) -> tuple[Task, ModelBundle]:
    """Train a copy of a model with the method of a plan, without a run folder.

    Args:
        plan: Settings and data.
        base: The initial model, which is not changed.
        examples: The training examples.

    Returns:
        The task, and the model in eval mode.
    """
    settings = plan.settings
    task, model = build_task(settings, plan.source, plan.stats, base, plan.labels)
    if settings.method != "finetune":
        model = with_vector_head(model, base)
    model.to(resolve_device(settings.train.device))
    samples = task.encode_split(examples).samples
    if settings.method != "linear":
        trainer = Trainer(model, body_objective(settings, task), samples, settings.train)
        deque(trainer, maxlen=0)  # makes all training steps
    model.eval()
    if settings.method != "finetune":
        fit_last_layer(model, samples, task)
    return task, task.for_inference(model)

"""A cascade of models from student to teacher. Each stage answers the texts for which it is confident enough.

A stage answers if the probability of its most probable label reaches its threshold; otherwise the next stage is run.
The teacher is the last stage and answers all remaining texts. Thresholds are fitted on one set of labelled rows, and
accuracy is reported on another: dev and test, or two halves of the only split. `runs.distil.run` calls `build_cascade`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile

import numpy as np
from jaxtyping import Bool, Float64

from heedful.checkpoint import RUN_MODEL, ModelBundle, load, save
from heedful.checkpoint.bundle import EarlyStage, check_stage
from heedful.data import Dataset
from heedful.data.examples import Example
from heedful.errors import DataError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.precision import Precision
from heedful.infer.tuning.precision_gate import early_stage_precision, open_in_precision
from heedful.runs.card.cascade import CASCADE, cascade_sentence
from heedful.runs.distil.settings import CascadeSettings, DistilSettings
from heedful.runs.distil.verdict import time_engines
from heedful.runs.evaluate import build_eval_task
from heedful.runs.results import JsonObject
from heedful.runs.run_folder import DATA, SETTINGS, write_file
from heedful.tasks.answering import Answer
from heedful.tasks.metrics import mean_of
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES, calibration_probabilities
from heedful.tasks.task import ScoredAnswer, bootstrap_stat, evaluate_task
from heedful.train.fit import Reporter

CASCADE_MODEL = "cascade"  # folder of the cascade in the run folder
BOUND = 1.645  # standard errors from a mean to its one-sided 95 % bound
UNREACHABLE = 2.0  # threshold of a stage that answers no text
MAX_SPEED_TEXTS = 512  # texts for measuring speed, answered in one call: enough for whole batches in each stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageScores:
    """Scores of the answers of one engine to labelled rows."""

    confidences: Float64[np.ndarray, " rows"]  # probability of the most probable label
    gold_probabilities: Float64[np.ndarray, " rows"]  # probability of the correct label
    correct: Bool[np.ndarray, " rows"]  # whether the answer is the label
    stages: list[int]  # for a cascade, the index of the stage that answered each row, from 1; else []
    accuracy: float
    interval: JsonObject  # 95 % confidence interval of the accuracy


def check_cascade(settings: CascadeSettings, teacher: ModelBundle) -> None:
    """Check that the teacher, and the models between student and teacher, can be stages of a cascade.

    Raises:
        ModelError: If one of them cannot be loaded, predicts several labels or a number, or has other labels.
    """
    check_stage(teacher, teacher)
    for name in settings.stages:
        check_stage(load(name), teacher)


def build_cascade(
    folder: Path,
    dataset: Dataset[Example],
    splits: Sequence[str],
    settings: DistilSettings,
    precision: Precision,
    reporter: Reporter,
) -> JsonObject:
    """Fit the thresholds, save the cascade, measure it, and write cascade.json.

    Args:
        folder: The run folder, with the student's model.
        dataset: The labelled data.
        splits: Names of its non-empty splits.
        settings: The settings of the distillation, with those of the cascade.
        precision: Precision of the teacher. An earlier stage uses float32 instead, if that is faster for it or the
            precision changes its answers too much.
        reporter: Receives progress.

    Returns:
        The content of cascade.json.

    Raises:
        HeedfulError: If a stage cannot be used, or if there are too few rows.
    """
    cascade_settings = settings.cascade
    assert cascade_settings is not None
    fitted, reported, description = split_rows(dataset, splits, settings.train.seed)
    split = description["split"]
    if cascade_settings.max_loss * len(fitted) < 100:
        reporter.message(
            f"thresholds of the cascade are fitted on {len(fitted)} rows, and one row is more than the allowed loss of "
            f"{cascade_settings.max_loss:g} points: the cascade may give no more wrong answers there than the teacher "
            "alone"
        )
    models = [str(folder / RUN_MODEL), *cascade_settings.stages, settings.teacher]
    precisions = [*(early_stage_precision(model, precision) for model in models[:-1]), precision]
    engines = [
        open_in_precision(model, stage_precision) for model, stage_precision in zip(models, precisions, strict=True)
    ]
    reporter.message(f"fitting the thresholds of the cascade on {description['fitted_on']}")
    stage_scores = [_score(engine, fitted, dataset, split, settings) for engine in engines]
    thresholds = fit_thresholds(
        np.stack([scores.confidences for scores in stage_scores[:-1]]),
        np.stack([scores.correct for scores in stage_scores]),
        cascade_settings.max_loss / 100,
    )
    gold_probabilities = np.stack([scores.gold_probabilities for scores in stage_scores])  # [stages, rows]
    cascade_gold_probabilities = gold_probabilities[_answering_stages(stage_scores, thresholds), np.arange(len(fitted))]
    _save_cascade(folder, models, thresholds, cascade_gold_probabilities)
    reporter.message(f"measuring the cascade on {description['reported_on']} in {precision}")
    names = ["student", *(Path(model).name for model in cascade_settings.stages), "teacher"]
    cascade = open_in_precision(folder / CASCADE_MODEL, precision)
    report = description | {"metric": "accuracy", "max_loss": cascade_settings.max_loss, "precision": precision}
    report |= _measure([*engines, cascade], reported, dataset, split, settings)
    for stage_report, name, model, threshold, stage_precision in zip(
        report["stages"], names, models, [*thresholds, 0.0], precisions, strict=True
    ):
        stage_report |= {"name": name, "model": model, "threshold": threshold, "precision": stage_precision}
    report["sentence"] = cascade_sentence(report)
    write_file(folder / CASCADE, report)
    return report


def _save_cascade(
    folder: Path,
    models: Sequence[str],
    thresholds: Sequence[float],
    gold_probabilities: Float64[np.ndarray, " rows"],
) -> None:
    """Save the cascade in the run folder.

    Args:
        folder: The run folder.
        models: Model folders of all stages. The teacher's is the last.
        thresholds: A threshold for each early stage.
        gold_probabilities: For each row, the probability of the correct label by the stage that answers the row. They
            calibrate conformal prediction.
    """
    last = load(models[-1])
    early = [load(model) for model in models[:-1]]
    for bundle in early:
        check_stage(bundle, last)
    last.early_stages = tuple(
        EarlyStage(bundle=bundle, threshold=threshold) for bundle, threshold in zip(early, thresholds, strict=True)
    )
    is_enough = len(gold_probabilities) >= MIN_SET_EXAMPLES
    last.calibration = calibration_probabilities(gold_probabilities) if is_enough else ()
    save(last, folder / CASCADE_MODEL, overwrite=True)
    for name in (SETTINGS, DATA):  # commands read data for the cascade as for the run
        copyfile(folder / name, folder / CASCADE_MODEL / name)


def check_row_counts(counts: Mapping[str, int], splits: Sequence[str]) -> None:
    """Check that `split_rows` finds rows to fit thresholds on, and others to report on, before anything is trained.

    Args:
        counts: Number of rows of each split.
        splits: Names of the non-empty splits.

    Raises:
        DataError: If there is only one split to evaluate on, and it has a single row.
    """
    split = _only_split(splits)
    if split is not None and counts[split] < 2:
        raise DataError(
            f"{split} has too few rows ({counts[split]}): some are needed to choose by, and others to report on; give "
            "a dev and a test file"
        )


def _only_split(splits: Sequence[str]) -> str | None:
    """Return the split whose rows are halved to fit and to report, or None if there are both dev and test."""
    if "dev" in splits and "test" in splits:
        return None
    return next((name for name in ("test", "dev") if name in splits), splits[0])


def split_rows(
    dataset: Dataset[Example], splits: Sequence[str], seed: int
) -> tuple[list[Example], list[Example], JsonObject]:
    """Return rows to fit thresholds on, other rows to report accuracy on, and a description of both for cascade.json.

    Raises:
        DataError: If there is only one split with labels to evaluate on, and it has a single row.
    """
    split = _only_split(splits)
    if split is None:
        fitted, reported = list(dataset.examples("dev")), list(dataset.examples("test"))
        split, fitted_on, reported_on = "test", "dev", "test"
    else:
        examples = list(dataset.examples(split))
        check_row_counts({split: len(examples)}, splits)
        order = np.random.default_rng(seed).permutation(len(examples))
        middle = len(order) // 2
        fitted = [examples[index] for index in sorted(order[:middle])]
        reported = [examples[index] for index in sorted(order[middle:])]
        fitted_on, reported_on = f"half of {split}", f"the other half of {split}"
    description = {"split": split, "fitted_on": fitted_on, "reported_on": reported_on}
    return fitted, reported, description | {"fitted_rows": len(fitted), "reported_rows": len(reported)}


def fit_thresholds(
    confidences: Float64[np.ndarray, "early rows"], correct: Bool[np.ndarray, "stages rows"], max_loss: float
) -> tuple[float, ...]:
    """Return a threshold for each early stage, so that the cascade loses at most `max_loss` of accuracy.

    All stages but the last are early stages. They are added to the cascade in turn, from the last early stage to the
    first. The k-th added of n takes over rows in the order of decreasing confidence, as long as the upper bound of the
    cascade's loss is at most k / n of `max_loss`: the one-sided 95 % bound of the mean of independent rows, by its
    standard error. With the loss itself, other rows would lose more than the limit half of the time. The stage stops
    before the first group of equally confident rows that would exceed the limit, although with more rows the loss may
    be within the limit again by chance.

    Args:
        confidences: Probability of the most probable label for each row, by each early stage.
        correct: Whether each stage, the last one included, is correct on each row.
        max_loss: Maximum loss of accuracy compared with the last stage alone, as a share of the rows.

    >>> confidence, correct = np.array([[0.9, 0.8, 0.6]]), np.array([[True, True, False], [True, True, True]])
    >>> fit_thresholds(confidence, correct, 0.0), fit_thresholds(confidence, correct, 0.8)
    ((0.7,), (0.0,))
    """
    num_early, num_rows = confidences.shape
    cascade_correct = correct[-1].astype(np.int64)  # 1 if the cascade of the stages added so far is correct, else 0
    thresholds: list[float] = []
    for added in range(1, num_early + 1):
        confidence, stage_correct = confidences[num_early - added], correct[num_early - added].astype(np.int64)
        order = np.argsort(-confidence, kind="stable")
        decreasing = confidence[order]
        # correct answers of the last stage minus those of the cascade, and their squares (1 where only one of the two
        # is correct), if the added stage answers the i + 1 most confident rows
        before, after = correct[-1] - cascade_correct, correct[-1] - stage_correct
        lost = before.sum() + np.cumsum((after - before)[order])
        squares = (before**2).sum() + np.cumsum((after**2 - before**2)[order])
        bound = lost + BOUND * np.sqrt(squares - lost**2 / num_rows)  # the root is the standard error
        allowed = max_loss * added / num_early * num_rows + 1e-9
        is_group_end = np.append(decreasing[1:] != decreasing[:-1], True)  # rows of equal confidence are a group
        group_ends = np.flatnonzero(is_group_end)
        exceeding_ends = np.flatnonzero(is_group_end & (bound > allowed))
        num_answered = num_rows
        if len(exceeding_ends):
            num_answered = int(group_ends[group_ends < exceeding_ends[0]].max(initial=-1)) + 1
        thresholds.insert(0, _threshold_after(decreasing, num_answered))
        cascade_correct = np.where(confidence >= thresholds[0], stage_correct, cascade_correct)
    return tuple(thresholds)


def _threshold_after(decreasing: Float64[np.ndarray, " rows"], count: int) -> float:
    """Return a threshold that exactly the first `count` of some decreasing confidences reach."""
    if count == len(decreasing):
        return 0.0
    return UNREACHABLE if count == 0 else float(decreasing[count - 1] + decreasing[count]) / 2


def _answering_stages(stage_scores: Sequence[StageScores], thresholds: Sequence[float]) -> list[int]:
    """Return the index of the stage, from 0, that answers each row: the first that reaches its threshold."""
    is_confident = np.stack(
        [scores.confidences >= threshold for scores, threshold in zip(stage_scores, [*thresholds, 0.0], strict=True)]
    )
    first: list[int] = is_confident.argmax(0).tolist()
    return first


def _score(
    engine: BundleEngine, examples: Sequence[Example], dataset: Dataset[Example], split: str, settings: DistilSettings
) -> StageScores:
    """Score an engine on examples of a split. Long texts are treated as in the run."""
    task, engine.loaded = build_eval_task(engine.loaded, dataset, split, settings.long_inputs)
    engine.max_length = task.truncation_length
    answers: list[Answer] = []
    scored_answers: list[ScoredAnswer] = []

    def record(index: int, example: Example, answer: Answer, scored: ScoredAnswer) -> None:
        answers.append(answer)
        scored_answers.append(scored)

    metrics = evaluate_task(task, engine, examples, on_answer=record)
    gold_probabilities = [
        answer["probabilities"][scored.label] for answer, scored in zip(answers, scored_answers, strict=True)
    ]
    return StageScores(
        confidences=np.array([answer["probability"] for answer in answers], np.float64),
        gold_probabilities=np.array(gold_probabilities),
        correct=np.array([bool(scored.correct) for scored in scored_answers]),
        stages=[answer["stage"] for answer in answers if "stage" in answer],
        accuracy=float(task.compute_metrics(metrics)["accuracy"]),
        interval=metrics.intervals()["accuracy"],
    )


def _measure(
    engines: Sequence[BundleEngine],
    reported: Sequence[Example],
    dataset: Dataset[Example],
    split: str,
    settings: DistilSettings,
) -> JsonObject:
    """Measure accuracy and speed of each stage alone and of the cascade.

    Args:
        engines: The stages from student to teacher, and then the cascade.
        reported: Rows to measure on.
        dataset: The labelled data.
        split: The split of the rows.
        settings: The settings of the distillation.

    Returns:
        "stages" and "cascade" have accuracy with its interval and speed; a stage also has the share of rows that it
        answers. "delta_vs_teacher" is the difference of accuracy, paired by row, with a bootstrap interval.
    """
    all_scores = [_score(engine, reported, dataset, split, settings) for engine in engines]
    task, _ = build_eval_task(engines[-1].loaded, dataset, split, settings.long_inputs)
    inputs = [task.engine_input(example) for example in reported[:MAX_SPEED_TEXTS]]
    engines_by_name = {str(index): engine for index, engine in enumerate(engines)}
    speeds = time_engines(engines_by_name, inputs, settings.verdict.rounds)
    reports: list[JsonObject] = [
        {"accuracy": scores.accuracy, "interval": scores.interval, **speeds[str(index)]}
        for index, scores in enumerate(all_scores)
    ]
    *stage_reports, cascade_report = reports
    *_, teacher_scores, cascade_scores = all_scores
    for stage_index, stage_report in enumerate(stage_reports, start=1):
        stage_report["share"] = cascade_scores.stages.count(stage_index) / len(reported)
    differences = cascade_scores.correct.astype(np.float64) - teacher_scores.correct
    bootstrap = bootstrap_stat(2, mean_of).update(range(len(differences)), [(value, 1) for value in differences])
    delta = {"difference": float(differences.mean()), **bootstrap.interval()}
    return {"stages": stage_reports, "cascade": cascade_report, "delta_vs_teacher": delta}

"""A cascade of models from student to teacher. Each stage answers the texts for which it is confident enough.

A stage answers if the probability of its most probable label reaches its threshold; otherwise the next stage is run.
The teacher is the last stage and answers all remaining texts. Thresholds are fitted on one set of labelled rows, and
accuracy is reported on another: dev and test, or two halves of the only split. `runs.distil.run` calls `build_cascade`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    source: Dataset[Example],
    splits: Sequence[str],
    settings: DistilSettings,
    precision: Precision,
    reporter: Reporter,
) -> JsonObject:
    """Fit the thresholds, save the cascade, measure it, and write cascade.json.

    Args:
        folder: The run folder, with the student's model.
        source: The labelled data.
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
    fitted, reported, rows = split_rows(source, splits, settings.train.seed)
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
    reporter.message(f"fitting the thresholds of the cascade on {rows['fitted_on']}")
    scores = [_score(engine, fitted, source, rows, settings) for engine in engines]
    thresholds = fit_thresholds(
        np.stack([stage.confidences for stage in scores[:-1]]),
        np.stack([stage.correct for stage in scores]),
        cascade_settings.max_loss / 100,
    )
    stage_gold = np.stack([stage.gold_probabilities for stage in scores])  # [stages, rows]
    cascade_gold = stage_gold[_answering_stages(scores, thresholds), np.arange(len(fitted))]
    _save_cascade(folder, models, thresholds, cascade_gold)
    reporter.message(f"measuring the cascade on {rows['reported_on']} in {precision}")
    names = ["student", *(Path(model).name for model in cascade_settings.stages), "teacher"]
    cascade = open_in_precision(folder / CASCADE_MODEL, precision)
    report = rows | {"metric": "accuracy", "max_loss": cascade_settings.max_loss, "precision": precision}
    report |= _measure([*engines, cascade], reported, source, rows, settings)
    for stage, name, model, threshold, stage_precision in zip(
        report["stages"], names, models, [*thresholds, 0.0], precisions, strict=True
    ):
        stage |= {"name": name, "model": model, "threshold": threshold, "precision": stage_precision}
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
        gold_probabilities: Probability that the answering stage gives the correct label, for conformal prediction.
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


def split_rows(
    source: Dataset[Example], splits: Sequence[str], seed: int
) -> tuple[list[Example], list[Example], JsonObject]:
    """Return rows to fit thresholds on, other rows to report accuracy on, and a description of both for cascade.json.

    Raises:
        DataError: If there is only one split with labels to evaluate on, and it has a single row.
    """
    if "dev" in splits and "test" in splits:
        fitted, reported = list(source.examples("dev")), list(source.examples("test"))
        split, fitted_on, reported_on = "test", "dev", "test"
    else:
        split = next((name for name in ("test", "dev") if name in splits), splits[0])
        examples = list(source.examples(split))
        if len(examples) < 2:
            raise DataError(
                f"{split} has {len(examples)} rows: some are needed to choose by, and others to report on; give a dev "
                "and a test file"
            )
        order = np.random.default_rng(seed).permutation(len(examples))
        middle = len(order) // 2
        fitted, reported = ([examples[row] for row in sorted(half)] for half in (order[:middle], order[middle:]))
        fitted_on, reported_on = f"half of {split}", f"the other half of {split}"
    description = {"split": split, "fitted_on": fitted_on, "reported_on": reported_on}
    return fitted, reported, description | {"fitted_rows": len(fitted), "reported_rows": len(reported)}


def fit_thresholds(
    confidences: Float64[np.ndarray, "early rows"], correct: Bool[np.ndarray, "stages rows"], max_loss: float
) -> tuple[float, ...]:
    """Return a threshold for each early stage, so that the cascade loses at most `max_loss` of accuracy.

    Early stages are added in turn, from the last one to the first. The k-th of n answers rows by decreasing confidence,
    while the cascade loses at most k / n of `max_loss`. It stops before the first group of equally confident rows that
    would exceed this limit, although with more rows the loss may be within the limit again by chance.

    Args:
        confidences: Probability of the most probable label for each row, by each early stage.
        correct: Whether each stage, the last one included, is correct on each row.
        max_loss: Maximum loss of accuracy compared with the last stage alone, as a share of the rows.

    >>> confidence, correct = np.array([[0.9, 0.8, 0.6]]), np.array([[True, True, False], [True, True, True]])
    >>> fit_thresholds(confidence, correct, 0.0), fit_thresholds(confidence, correct, 0.5)
    ((0.7,), (0.0,))
    """
    early, rows = confidences.shape
    cascade_correct = correct[-1].astype(np.int64)  # correct answers of the cascade of the stages added so far
    thresholds: list[float] = []
    for added in range(1, early + 1):
        confidence, stage_correct = confidences[early - added], correct[early - added].astype(np.int64)
        order = np.argsort(-confidence, kind="stable")
        decreasing = confidence[order]
        # lost[i]: rows that the cascade loses compared with the last stage, if the new stage answers rows 0 to i
        lost = correct[-1].sum() - cascade_correct.sum() + np.cumsum(cascade_correct[order] - stage_correct[order])
        is_group_end = np.append(decreasing[1:] != decreasing[:-1], True)  # rows of equal confidence are a group
        too_many = np.flatnonzero(is_group_end & (lost > max_loss * added / early * rows + 1e-9))
        group_ends = np.flatnonzero(is_group_end)
        answered = int(group_ends[group_ends < too_many[0]].max(initial=-1)) + 1 if len(too_many) else rows
        thresholds.insert(0, _threshold_after(decreasing, answered))
        cascade_correct = np.where(confidence >= thresholds[0], stage_correct, cascade_correct)
    return tuple(thresholds)


def _threshold_after(decreasing: Float64[np.ndarray, " rows"], count: int) -> float:
    """Return a threshold that the first `count` of these confidences reach, and none after them."""
    if count == len(decreasing):
        return 0.0
    return UNREACHABLE if count == 0 else float(decreasing[count - 1] + decreasing[count]) / 2


def _answering_stages(scores: Sequence[StageScores], thresholds: Sequence[float]) -> list[int]:
    """Return the index of the stage, from 0, that answers each row: the first that reaches its threshold."""
    is_confident = np.stack(
        [stage.confidences >= threshold for stage, threshold in zip(scores, [*thresholds, 0.0], strict=True)]
    )
    first: list[int] = is_confident.argmax(0).tolist()
    return first


def _score(
    engine: BundleEngine,
    examples: Sequence[Example],
    source: Dataset[Example],
    rows: JsonObject,
    settings: DistilSettings,
) -> StageScores:
    """Score an engine on rows. Long texts are treated as in the run."""
    task, engine.loaded = build_eval_task(engine.loaded, source, rows["split"], settings.long_inputs)
    engine.max_length = task.truncation_length
    answers: list[Answer] = []
    scored_answers: list[ScoredAnswer] = []

    def record(index: int, example: Example, answer: Answer, scored: ScoredAnswer) -> None:
        answers.append(answer)
        scored_answers.append(scored)

    metrics = evaluate_task(task, engine, examples, on_answer=record)
    return StageScores(
        confidences=np.array([answer["probability"] for answer in answers], np.float64),
        gold_probabilities=np.array(
            [answer["probabilities"][scored.label] for answer, scored in zip(answers, scored_answers, strict=True)]
        ),
        correct=np.array([bool(scored.correct) for scored in scored_answers]),
        stages=[answer["stage"] for answer in answers if "stage" in answer],
        accuracy=float(task.compute_metrics(metrics)["accuracy"]),
        interval=metrics.intervals()["accuracy"],
    )


def _measure(
    engines: Sequence[BundleEngine],
    reported: Sequence[Example],
    source: Dataset[Example],
    rows: JsonObject,
    settings: DistilSettings,
) -> JsonObject:
    """Measure accuracy and speed of each stage alone and of the cascade.

    Args:
        engines: The stages from student to teacher, and then the cascade.
        reported: Rows to measure on.
        source: The labelled data.
        rows: The description of the rows by `split_rows`.
        settings: The settings of the distillation.

    Returns:
        "stages" and "cascade" have accuracy with its interval and speed; a stage also has the share of rows that it
        answers. "delta_vs_teacher" is the difference of accuracy, paired by row, with a bootstrap interval.
    """
    scores = [_score(engine, reported, source, rows, settings) for engine in engines]
    task, _ = build_eval_task(engines[-1].loaded, source, rows["split"], settings.long_inputs)
    inputs = [task.engine_input(example) for example in reported[:MAX_SPEED_TEXTS]]
    engines_by_name = {str(index): engine for index, engine in enumerate(engines)}
    speeds = time_engines(engines_by_name, inputs, settings.verdict.rounds)
    reports: list[JsonObject] = [
        {"accuracy": stage.accuracy, "interval": stage.interval, **speeds[str(index)]}
        for index, stage in enumerate(scores)
    ]
    *stage_reports, cascade_report = reports
    cascade, teacher = scores[-1], scores[-2]
    for stage_index, stage_report in enumerate(stage_reports, start=1):
        stage_report["share"] = cascade.stages.count(stage_index) / len(reported)
    differences = cascade.correct.astype(np.float64) - teacher.correct
    bootstrap = bootstrap_stat(2, mean_of).update(range(len(differences)), [(value, 1) for value in differences])
    delta = {"difference": float(differences.mean()), **bootstrap.interval()}
    return {"stages": stage_reports, "cascade": cascade_report, "delta_vs_teacher": delta}

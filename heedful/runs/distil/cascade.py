"""A cascade that ends with the teacher: the student answers where it is confident, the next model elsewhere.

Thresholds are fitted on rows that are not reported: dev if there is a test split too, else half of the only split.
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

CASCADE_MODEL = "cascade"  # the folder of the cascade in that of the run
NEVER = 2.0  # a threshold that no probability reaches
SPEED_TEXTS = 512  # answered in one call: enough that each stage has whole batches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageScores:
    """Answers of one engine to rows with labels, and their accuracy."""

    confidences: Float64[np.ndarray, " rows"]  # probabilities of the most probable labels
    gold: Float64[np.ndarray, " rows"]  # probabilities of the right labels
    correct: Bool[np.ndarray, " rows"]
    stages: list[int]  # of a cascade, the stage that answered each row; else empty
    accuracy: float
    interval: JsonObject  # 95 %, over the rows


def check_cascade(settings: CascadeSettings, teacher: ModelBundle) -> None:
    """Check that the teacher, and the models that are named, can be stages of a cascade.

    Raises:
        ModelError: If one of them cannot be loaded, does not choose one label, or has other labels.
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
        source: The data.
        splits: Names of its splits.
        settings: Of the distillation, with those of the cascade.
        precision: In which the teacher is served, and the other stages where it is not refused for them.
        reporter: Receives progress.

    Raises:
        HeedfulError: If a stage cannot be used, or there are too few rows.
    """
    wanted = settings.cascade
    assert wanted is not None
    fitted, reported, rows = split_rows(source, splits, settings.train.seed)
    if wanted.max_loss * len(fitted) < 100:
        reporter.message(
            f"thresholds of the cascade are fitted on {len(fitted)} rows, and one row is more than the allowed loss "
            f"of {wanted.max_loss:g} points: the cascade may give no more wrong answers there than the teacher alone"
        )
    places = [str(folder / RUN_MODEL), *wanted.stages, settings.teacher]
    precisions = [*(early_stage_precision(place, precision) for place in places[:-1]), precision]
    engines = [open_in_precision(place, chosen) for place, chosen in zip(places, precisions, strict=True)]
    reporter.message(f"fitting the thresholds of the cascade on {rows['fitted_on']}")
    scores = [_score(engine, fitted, source, rows, settings) for engine in engines]
    thresholds = fit_thresholds(
        np.stack([stage.confidences for stage in scores[:-1]]),
        np.stack([stage.correct for stage in scores]),
        wanted.max_loss / 100,
    )
    last = load(places[-1])
    stages = [load(place) for place in places[:-1]]
    for stage in stages:
        check_stage(stage, last)
    last.early_stages = tuple(
        EarlyStage(bundle=stage, threshold=threshold) for stage, threshold in zip(stages, thresholds, strict=True)
    )
    gold = np.stack([stage.gold for stage in scores])[_answering(scores, thresholds), np.arange(len(fitted))]
    last.calibration = calibration_probabilities(gold) if len(gold) >= MIN_SET_EXAMPLES else ()
    save(last, folder / CASCADE_MODEL, overwrite=True)
    for name in (SETTINGS, DATA):  # so that data are read for the cascade as for the run
        copyfile(folder / name, folder / CASCADE_MODEL / name)
    reporter.message(f"measuring the cascade on {rows['reported_on']} in {precision}")
    names = ["student", *(Path(name).name for name in wanted.stages), "teacher"]
    cascade = open_in_precision(folder / CASCADE_MODEL, precision)
    report = rows | {"metric": "accuracy", "max_loss": wanted.max_loss, "precision": precision}
    report |= _measure([*engines, cascade], reported, source, rows, settings)
    for stage, name, place, threshold, chosen in zip(
        report["stages"], names, places, [*thresholds, 0.0], precisions, strict=True
    ):
        stage |= {"name": name, "model": place, "threshold": threshold, "precision": chosen}
    report["sentence"] = cascade_sentence(report)
    write_file(folder / CASCADE, report)
    return report


def split_rows(
    source: Dataset[Example], splits: Sequence[str], seed: int
) -> tuple[list[Example], list[Example], JsonObject]:
    """Return the rows that thresholds are fitted on, the rows that are reported, and what they are.

    Raises:
        DataError: If the only split has a single row.
    """
    if "dev" in splits and "test" in splits:
        fitted, reported = list(source.examples("dev")), list(source.examples("test"))
        split, fitted_on, reported_on = "test", "dev", "test"
    else:
        split = "test" if "test" in splits else "dev"
        examples = list(source.examples(split))
        if len(examples) < 2:
            raise DataError(
                f"{split} has {len(examples)} rows, and a cascade needs some for its thresholds and others to be "
                "measured on: give a dev and a test file"
            )
        order = np.random.default_rng(seed).permutation(len(examples))
        middle = len(order) // 2
        fitted, reported = ([examples[row] for row in sorted(half)] for half in (order[:middle], order[middle:]))
        fitted_on, reported_on = f"half of {split}", f"the other half of {split}"
    about = {"split": split, "fitted_on": fitted_on, "reported_on": reported_on}
    return fitted, reported, about | {"fitted_rows": len(fitted), "reported_rows": len(reported)}


def fit_thresholds(
    confidences: Float64[np.ndarray, "early rows"], correct: Bool[np.ndarray, "stages rows"], max_loss: float
) -> tuple[float, ...]:
    """Return a threshold for each early stage, with which no more accuracy is lost than allowed.

    Thresholds are fitted from the last early stage to the first. A stage takes rows by falling confidence, as long as
    the accuracy of the whole stays within its share of the loss: k / n of it for the k-th of n stages that are added.
    Thresholds that are lower still, with which the loss is by chance within it again, are not considered.

    Args:
        confidences: Probabilities of the most probable labels, of all stages but the last one.
        correct: Whether each stage is right on each row.
        max_loss: Greatest difference to the last stage's accuracy, as a share of the rows.

    >>> confidence, correct = np.array([[0.9, 0.8, 0.6]]), np.array([[True, True, False], [True, True, True]])
    >>> fit_thresholds(confidence, correct, 0.0), fit_thresholds(confidence, correct, 0.5)
    ((0.7,), (0.0,))
    """
    early, rows = confidences.shape
    whole = correct[-1].astype(np.int64)  # by the stages that were added already
    thresholds: list[float] = []
    for added in range(1, early + 1):
        confidence, own = confidences[early - added], correct[early - added].astype(np.int64)
        order = np.argsort(-confidence, kind="stable")
        falling = confidence[order]
        wrong_more = correct[-1].sum() - whole.sum() + np.cumsum(whole[order] - own[order])
        last_of_equal = np.append(falling[1:] != falling[:-1], True)
        lost = np.flatnonzero(last_of_equal & (wrong_more > max_loss * added / early * rows + 1e-9))
        ends = np.flatnonzero(last_of_equal)
        taken = rows if not len(lost) else int(ends[ends < lost[0]].max(initial=-1)) + 1
        thresholds.insert(0, _between(falling, taken))
        whole = np.where(confidence >= thresholds[0], own, whole)
    return tuple(thresholds)


def _between(falling: Float64[np.ndarray, " rows"], taken: int) -> float:
    """Return a threshold that the first confidences reach, as many as are taken, and no other."""
    if taken == len(falling):
        return 0.0
    return NEVER if taken == 0 else float(falling[taken - 1] + falling[taken]) / 2


def _answering(scores: Sequence[StageScores], thresholds: Sequence[float]) -> list[int]:
    """Return the number of the stage, from 0, that answers each row."""
    confident = np.stack(
        [stage.confidences >= threshold for stage, threshold in zip(scores, [*thresholds, 0.0], strict=True)]
    )
    first: list[int] = confident.argmax(0).tolist()
    return first


def _score(
    engine: BundleEngine,
    examples: Sequence[Example],
    source: Dataset[Example],
    rows: JsonObject,
    settings: DistilSettings,
) -> StageScores:
    """Answer rows by an engine, long texts as in the run, and score the answers."""
    task, engine.loaded = build_eval_task(engine.loaded, source, rows["split"], settings.long_inputs)
    engine.max_length = task.truncation_length
    answers: list[Answer] = []
    scored_answers: list[ScoredAnswer] = []

    def record(number: int, example: Example, answer: Answer, scored: ScoredAnswer) -> None:
        answers.append(answer)
        scored_answers.append(scored)

    metrics = evaluate_task(task, engine, examples, on_answer=record)
    return StageScores(
        confidences=np.array([answer["probability"] for answer in answers], np.float64),
        gold=np.array(
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
    """Measure accuracy and speed of each stage alone and of the cascade, which is the last of the engines."""
    scores = [_score(engine, reported, source, rows, settings) for engine in engines]
    task, _ = build_eval_task(engines[-1].loaded, source, rows["split"], settings.long_inputs)
    inputs = [task.engine_input(example) for example in reported[:SPEED_TEXTS]]
    named = {str(number): engine for number, engine in enumerate(engines)}
    speeds = time_engines(named, inputs, settings.verdict.rounds)
    measured: list[JsonObject] = [
        {"accuracy": stage.accuracy, "interval": stage.interval, **speeds[str(number)]}
        for number, stage in enumerate(scores)
    ]
    *stages, cascade = measured
    for number, stage in enumerate(stages, start=1):
        stage["share"] = scores[-1].stages.count(number) / len(reported)
    differences = scores[-1].correct.astype(np.float64) - scores[-2].correct
    pairs = bootstrap_stat(2, mean_of).update(range(len(differences)), [(value, 1) for value in differences])
    delta = {"difference": float(differences.mean()), **pairs.interval()}
    return {"stages": stages, "cascade": cascade, "delta_vs_teacher": delta}

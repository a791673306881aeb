"""Measure cascades of students and the fine-tuned MiniLM: their accuracy, and their speed beside OpenVINO in int8.

HEEDFUL_DATA=folder python benchmarks/cascade.py --folder runs --train     # train the models; beside other work
HEEDFUL_DATA=folder python benchmarks/cascade.py --folder runs --quality   # also measure accuracy; beside other work
HEEDFUL_DATA=folder python benchmarks/cascade.py --folder runs             # also measure speed; on a quiet machine

Runs that were stopped resume, and finished results are kept in files. The teachers are those of `distil.py pruned` if
both have the same --folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import peers
import torch
from distil import Run, common, fine_tuned, held_out_data
from encode import token_ids_of, tokenized_encode
from engines import BOUNDS, SIZES, Job
from finetune_data import PLANS, load
from forward import prepared
from harness import Arm, Prepared, measure, serve
from numpy.typing import NDArray
from parts import Parts, add_parts_option
from report import RESULTS, Spread, Table, check_destination, grid, write

from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.infer.precision import Precision
from heedful.runs.distil.cascade import fit_thresholds
from heedful.runs.distil.run import distil
from heedful.runs.results import read_predictions
from heedful.tasks.metrics import mean_of
from heedful.tasks.task import bootstrap_stat

TASKS = ("SST-2", "AG News", "IMDB")
STUDENTS = ("static", "layers=2", "static, layers=2")  # the last one has both before the teacher
EPOCHS = {"SST-2": 4, "AG News": 12, "IMDB": 4}  # of students
MAX_LOSS = 0.3  # points of accuracy that a cascade may lose on the held-out rows
COUNTS = {"SST-2": 872, "AG News": 1000, "IMDB": 256}  # texts of a round
CALIBRATION = 128  # texts of train that calibrate OpenVINO's int8 models
STARTS = 5  # first answers that are timed
NO_VERDICT = ("verdict.texts=8", "verdict.rounds=1")  # speeds that nobody reads
TRAIN_ONLY = ("verdict.precision=float32", *NO_VERDICT)
ABOUT = """Cascades of students and all-MiniLM-L6-v2, fine-tuned on {tasks}, whose thresholds were fitted on rows held
out of train, so that the 95 % bound of the loss there is at most {max_loss:g} points (SST-2: 6,000 rows, whose texts
occur in no text that is left in train; IMDB: 2,500; AG News: a quarter of its rows). Accuracy is that of the answers of
all models in float32 on the official test (SST-2: dev); the difference to the teacher is paired by text, with a 95 %
bootstrap interval.

Speed is that from texts to answers of the models of the first seed, in int8 where the precision gate accepts it; each
arm is a process of its own, one runs at a time, and ratios are taken in each round. OpenVINO's models are quantised to
int8 by nncf with {calibration} texts of train, and compute mean-pooled vectors of the same body instead of the head,
from token ids of `encode_batch_fast` of `tokenizers`; they take the batch size of {sizes} that is fastest on all texts,
in the faster of their two modes. First answer: seconds of `heedful predict` for one text with the static student, from
the start of the process. Measured at
{commits}."""


# -- models -------------------------------------------------------------------------------------------------------


def student_folder(task: str, name: str, seed: int, run: Run) -> Path:
    """Return the folder of a student's run."""
    return run.folder / f"{task}-cascade-{name.replace(', ', '-')}-{seed}"


def distilled(task: str, name: str, seed: int, run: Run, *more: str, cascade: bool = False) -> dict[str, Any]:
    """Distil a student of the teacher, or add a cascade to its finished run; return the results.

    Args:
        task: The task.
        name: The student, or "static, layers=2", which is the static student in another folder.
        seed: The seed of teacher and student.
        run: The options that all trainings share.
        more: Further settings.
        cascade: Whether to build a cascade.
    """
    data_path = held_out_data(task, run)
    teacher, folder = fine_tuned(task, data_path, seed, run), student_folder(task, name, seed, run)
    settings = [setting for setting in common(task, EPOCHS[task], run) if "dev_fraction" not in setting]
    settings += [f"train.seed={seed}", "seeds=1", "verdict.baseline=none", "verdict.split=dev"]
    settings += TRAIN_ONLY if run.rehearsed else more
    student, *stages = name.split(", ")
    if stages:
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(student_folder(task, student, seed, run), unfinished)
            unfinished.rename(folder)
        models = [str(student_folder(task, stage, seed, run) / "model") for stage in stages]
        settings.append(f"cascade.stages={json.dumps(models)}")
    if cascade:
        settings.append(f"cascade.max_loss={MAX_LOSS}")
    done = distil(teacher, data_path, folder, student=student, assignments=settings, cascade=cascade)
    if done.status != "completed":
        raise SystemExit(130)
    return done.results


def scores(folder: Path, split: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the confidence of a run's answers to a split, in float32, and whether they are correct, in its order."""
    lines = sorted(read_predictions(folder, split), key=lambda line: line["id"])
    return np.array([line["answer"]["probability"] for line in lines]), np.array([line["correct"] for line in lines])


def quality(task: str, name: str, seed: int, run: Run) -> dict[str, Any]:
    """Fit the thresholds of a cascade on dev, and return its accuracy on test, from the answers of each model."""
    data_path = held_out_data(task, run)
    folders = [student_folder(task, stage, seed, run) for stage in name.split(", ")]
    folders.append(fine_tuned(task, data_path, seed, run))
    dev, test = ([scores(folder, split) for folder in folders] for split in ("dev", "test"))
    fitted = fit_thresholds(
        np.stack([confidence for confidence, _ in dev[:-1]]), np.stack([correct for _, correct in dev]), MAX_LOSS / 100
    )
    thresholds = np.array([*fitted, 0.0])
    stages = (np.stack([confidence for confidence, _ in test]) >= thresholds[:, None]).argmax(0)  # that answer each row
    correct = np.stack([correct for _, correct in test])
    teacher_correct = correct[-1].astype(np.float64)
    cascade_correct = correct[stages, np.arange(len(stages))].astype(np.float64)
    return {
        "thresholds": thresholds.tolist(),
        "fitted rows": len(dev[0][0]),
        "dev accuracies": [float(stage_correct.mean()) for _, stage_correct in dev],
        "test accuracies": [float(stage_correct.mean()) for _, stage_correct in test],
        "shares": [float((stages == number).mean()) for number in range(len(thresholds))],
        "accuracy": float(cascade_correct.mean()),
        "teacher": float(teacher_correct.mean()),
        **difference(cascade_correct, teacher_correct),
    }


def served(task: str, name: str, run: Run) -> dict[str, Any]:
    """Build the cascade of the first seed, and return its report, with the precision in which it is served."""
    report: dict[str, Any] = distilled(task, name, 0, run, *NO_VERDICT, cascade=True)["cascade"]
    return report


def difference(correct: NDArray[np.float64], teacher_correct: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean difference of two arrays of 0 and 1, paired by row, and its 95 % bootstrap interval."""
    differences = correct - teacher_correct
    bootstrap = bootstrap_stat(2, mean_of).update(range(len(differences)), [(value, 1) for value in differences])
    interval = bootstrap.interval()
    return {"difference": float(differences.mean()), "low": interval["low"], "high": interval["high"]}


def first_answer(folder: Path) -> list[float]:
    """Return the seconds of some calls of `heedful predict` with one text; a first call warms up the disk."""
    seconds = []
    for _ in range(STARTS + 1):
        start = time.perf_counter()
        command = [sys.executable, "-m", "heedful", "predict", str(folder), "a film that nobody will forget"]
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


# -- speed --------------------------------------------------------------------------------------------------------


def texts_of(task: str, count: int) -> list[str]:
    """Return texts of the test split, evenly spread over it."""
    held = [row.text for row in load(task).held if isinstance(row, LabelledExample)]
    return [held[index * len(held) // count] for index in range(min(count, len(held)))]


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm: read its texts and load its engine."""
    texts, longest = texts_of(job.distribution, job.count), PLANS[job.distribution].longest
    token_ids = token_ids_of(texts, longest)
    if job.engine in peers.ENGINES:
        encode, settings = tokenized_encode(peers.ENGINES[job.engine], job, texts, longest)
        return prepared(lambda: encode(texts), token_ids, settings)
    engine = Engine(job.folder, precision=cast("Precision", job.precision), max_length=longest)

    def run() -> NDArray[np.float32]:
        return np.array([list(answer["probabilities"].values()) for answer in engine(texts)], np.float32)

    return prepared(run, token_ids, f"{len(engine.stages)} stages")


def jobs_of(task: str, run: Run, models: Path, reports: dict[str, dict[str, Any]]) -> dict[str, Job]:
    """Return the job of each arm: the teacher, the cascades, and OpenVINO with the teacher and with a student."""
    data_path = held_out_data(task, run)
    teacher = fine_tuned(task, data_path, 0, run)
    of_teacher = Job(engine="heedful", precision="int8", folder=str(teacher), distribution=task, count=COUNTS[task])
    jobs = {"the teacher": of_teacher}
    for name, report in reports.items():
        folder = student_folder(task, name, 0, run) / "cascade"
        jobs[name] = replace(of_teacher, folder=str(folder), precision=report["precision"])
    calibration = models / f"{task}-calibration.json"
    models.mkdir(parents=True, exist_ok=True)
    train = [row.text for row in load(task).train if isinstance(row, LabelledExample)]
    texts = [train[index * len(train) // CALIBRATION] for index in range(CALIBRATION)]
    calibration.write_text(json.dumps(token_ids_of(texts, PLANS[task].longest)), encoding="utf-8")
    converted = {"the teacher": teacher, "layers=2": student_folder(task, "layers=2", 0, run)}
    for name, folder in converted.items():
        if not (folder / "model").exists():
            continue  # --students leaves out this student
        out = models / f"{task}-{name.replace(' ', '-')}"
        available, reason = peers.make_models("minilm", ["openvino"], str(folder / "model"), out, calibration)
        if not available:
            raise SystemExit(reason.strip())
        for engine in ("openvino latency", "openvino throughput"):
            job = replace(of_teacher, engine=engine, folder=str(out / "openvino"))
            jobs[f"{engine.replace('openvino', 'OpenVINO int8,')}: {name}"] = job
    return jobs


def speed(task: str, run: Run, models: Path, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Time all arms of a task in turn, and return their table with the ratios of the cascades to OpenVINO."""
    reports = {name: served(task, name, run) for name in names}
    jobs = jobs_of(task, run, models, reports)
    arms = [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "heedful",
            bound=BOUNDS["int8"],
            like=name,  # the arms compute different models
        )
        for name, job in jobs.items()
    ]
    table = measure(task, arms, rounds)
    ratios = {name: ratios_to_openvino(table, name) for name in (*names, "the teacher")}
    static = student_folder(task, "static", 0, run)
    first = first_answer(static) if "static" in names else []
    return {
        "text": table.text(),
        "table": asdict(table),
        "ratios": ratios,
        "reports": reports,
        "first answer": first,
    }


def ratios_to_openvino(table: Table, name: str) -> dict[str, dict[str, Any]]:
    """Return how many times as many texts a second an arm answers as OpenVINO with the teacher, and with a student."""
    seconds = {row.name: row.seconds for row in table.rows}
    ratios = {}
    for model in ("the teacher", "layers=2"):
        of_peers = [seconds[peer] for peer in seconds if peer.startswith("OpenVINO") and peer.endswith(f": {model}")]
        if of_peers:
            rounds = zip(seconds[name], *of_peers, strict=True)
            ratios[model] = asdict(Spread.of([min(peer_seconds) / own for own, *peer_seconds in rounds]))
    return ratios


# -- the record ---------------------------------------------------------------------------------------------------


def quality_table(results: dict[str, dict[str, Any]]) -> str:
    """Format a row for each cascade as Markdown."""
    columns = ["data, stages before the teacher, seed", "answered by each stage", "each model alone: dev", "test"]
    rows = []
    for name, result in results.items():
        low, high = 100 * result["low"], 100 * result["high"]
        rows.append(
            [
                name,
                " / ".join(f"{100 * share:.1f} %" for share in result["shares"]),
                *(
                    " / ".join(f"{100 * accuracy:.2f}" for accuracy in result[f"{split} accuracies"])
                    for split in ("dev", "test")
                ),
                f"{100 * result['accuracy']:.2f}",
                f"{100 * result['difference']:+.2f} ({low:+.2f} to {high:+.2f})",
            ]
        )
    return grid([*columns, "cascade: test", "difference to the teacher (95 %)"], rows)


def speed_text(task: str, result: dict[str, Any]) -> str:
    """Format the speeds of a task as Markdown."""
    rows = [
        [name, *(f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" for ratio in ratios.values())]
        for name, ratios in result["ratios"].items()
    ]
    columns = [f"times the texts/s of OpenVINO int8 with {model}" for model in next(iter(result["ratios"].values()))]
    text = f"{result['text']}\n{grid([task, *columns], rows)}\n"
    for name, report in result["reports"].items():
        text += f"* {name}: {report['sentence']}\n"
    if result["first answer"]:
        text += f"\nFirst answer of the static student: {statistics.median(result['first answer']):.2f} s.\n"
    return text


def results_of(
    task: str, names: Sequence[str], run: Run, parts: Parts, stop: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train the models of a task, and yield the name and the quality of each cascade, unless `stop` is "train"."""
    for seed in range(run.seeds):
        for name in names:
            for student in name.split(", "):
                if not (student_folder(task, student, seed, run) / "results.json").exists():
                    distilled(task, student, seed, run, *TRAIN_ONLY)
            if stop != "train":
                yield (
                    f"{task}, {name}, seed {seed}",
                    parts.result(f"quality, {task}, {name}, seed {seed}", partial(quality, task, name, seed, run)),
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure quality and speed of each task, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=STUDENTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--speeds", nargs="*", choices=TASKS, default=TASKS, help="tasks whose speed is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the runs, so that they can resume")
    parser.add_argument("--train", dest="stop", action="store_const", const="train", default="", help="only train")
    parser.add_argument("--quality", dest="stop", action="store_const", const="quality", help="no speeds, no record")
    parser.add_argument("--rehearse", action="store_true", help="a few steps on a few rows, without speeds and record")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    add_parts_option(parser, "cascade")
    options = parser.parse_args(arguments)
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if options.folder is None and not options.rehearse:
        parser.error("--folder is needed, since training takes hours")
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.rehearse else options.folder
        parts = Parts(Path(scratch, "parts") if options.rehearse else options.parts)
        run = Run(folder=folder, seeds=1 if options.rehearse else options.seeds, rehearsed=options.rehearse)
        qualities: dict[str, dict[str, Any]] = {}
        speeds: dict[str, dict[str, Any]] = {}
        for task in options.tasks:
            for name, result in results_of(task, options.students, run, parts, options.stop):
                qualities[name] = result
                print(name, json.dumps(result), flush=True)
            if options.stop or options.rehearse or task not in options.speeds:
                continue
            work: Callable[[], Any] = partial(speed, task, run, folder / "peers", options.students, options.rounds)
            part = f"speed, {task}, {'; '.join(options.students)}"
            part += f", {options.rounds} rounds" if options.rounds != parser.get_default("rounds") else ""
            speeds[task] = parts.result(part, work)
        if qualities:
            print(quality_table(qualities))
        if not options.stop and not options.rehearse:
            about = ABOUT.format(
                tasks=", ".join(options.tasks),
                max_loss=MAX_LOSS,
                calibration=CALIBRATION,
                sizes=", ".join(map(str, SIZES)),
                commits=", ".join(sorted(parts.commits)),
            )
            tables = [quality_table(qualities), *(speed_text(name, result) for name, result in speeds.items())]
            name = "cascade" if options.tasks == TASKS else f"cascade-{'-'.join(options.tasks).casefold()}"
            print(
                write(name.replace(" ", "-"), about, tables, {"quality": qualities, "speed": speeds}, options.output),
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Is a teacher worth it? Students of MiniLM on three tasks, each beside the same student without the teacher.

HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --folder runs          # also CoNLL-2003, STS-B
HEEDFUL_DATA=folder python benchmarks/distil.py unlabelled --folder runs     # the curve, with the teacher of SST-2
HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --rehearse             # a few steps, and how long all would take
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from finetune_data import PLANS, load
from report import RESULTS, facts

import heedful
from heedful.data import Labelled, Scored, Tagged

KINDS = {"SST-2": "classify", "CoNLL-2003": "tag", "STS-B": "embed"}
STUDENTS = {
    "SST-2": ("layers=3", "layers=2", "bilstm", "attention"),
    "CoNLL-2003": ("layers=3", "layers=2", "bilstm"),
    "STS-B": ("layers=3", "tiny"),
}
EPOCHS = 4  # of students; the teacher has those of the fine-tuning benchmark
LABELLED, CURVE = 1000, 4000  # labelled texts, and steps, of the curve
AMOUNTS = (0, 1000, 4000, 16_000, 64_000)  # texts without labels
QUICK, STEPS = 160, 6  # examples and steps of a rehearsal
SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where, with what, and whether it is a rehearsal."""

    folder: Path
    seeds: int
    rehearsed: bool

    def few(self, rows: Sequence[Any]) -> Sequence[Any]:
        """All, or those of a rehearsal."""
        return rows[:QUICK] if self.rehearsed else rows


def write(task: str, folder: Path, name: str, rows: Sequence[Any]) -> None:
    """A split, in a format that heedful reads; a list of texts is without labels."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        for number, row in enumerate(rows):
            match row:
                case Labelled():
                    if not number:
                        csv.writer(file).writerow(("text", "label"))
                    csv.writer(file).writerow((row.text, row.label))
                case Scored():
                    file.write(json.dumps({"a": row.text, "b": row.pair, "score": row.score}) + "\n")
                case Tagged():
                    file.writelines(f"{word} {tag}\n" for word, tag in zip(row.words, row.tags, strict=True))
                    file.write("\n")
                case str():
                    file.write(json.dumps({"text": row}) + "\n")


def data(task: str, run: Run) -> Path:
    """Train and test as files; test is what is measured, and nothing is chosen by it."""
    found, folder = load(task), run.folder / f"{task}-data"
    suffix = {"classify": "csv", "tag": "conll", "embed": "jsonl"}[KINDS[task]]
    for name, rows in (("train", found.train), ("test", found.held)):
        write(task, folder, f"{name}.{suffix}", run.few(rows))
    return folder


def common(task: str, epochs: float, run: Run, steps: int = 0) -> list[str]:
    """Settings that teacher and students share; so many steps instead of epochs, if given."""
    plan = PLANS[task]
    length = [f"train.length.count={epochs}"]
    if run.rehearsed or steps:
        length = ["train.length.kind=steps", f"train.length.count={STEPS if run.rehearsed else steps}"]
    cut = [] if KINDS[task] == "embed" else ["long=cut"]
    return [*length, *cut, f"train.batch={plan.batch}", f"max_length={plan.longest}", "data.dev=0", "fit.keep=last"]


def teacher(task: str, run: Run) -> Path:
    """MiniLM, fine-tuned once."""
    folder = run.folder / f"{task}-teacher"
    more = [*common(task, PLANS[task].epochs, run), f"train.optimiser.rate={PLANS[task].rate}"]
    if heedful.finetune(KINDS[task], data(task, run), folder, model=minilm(), assignments=more).why != "done":
        raise SystemExit(130)
    return folder


def student(
    task: str, name: str, folder: Path, given: Path, run: Run, *more: str, steps: int = 0, **options: Any
) -> dict[str, Any]:
    """The verdict on one student, and what it took."""
    wishes = [*common(task, EPOCHS, run, steps), f"seeds={run.seeds}", *more]
    if run.rehearsed:
        quick = ("verdict.rounds=3", "verdict.precision=float32", "verdict.alone=none")
        wishes += [each for each in quick if each not in more]
    if not name.startswith(("bilstm", "attention", "tiny")):
        wishes.append("train.optimiser.rate=1e-4")
    began = time.monotonic()
    done = heedful.distil(run.folder / f"{task}-teacher", given, folder, student=name, assignments=wishes, **options)
    if done.why != "done":
        raise SystemExit(130)
    seeds = done.results["seeds"]
    step = sum(each["seconds"] for each in seeds) / sum(each["steps"] for each in seeds)
    print(f"{task}, {name}: {done.results['verdict']['sentence']}", flush=True)
    return {"verdict": done.results["verdict"], "step": step, "seconds": time.monotonic() - began}


def tasks(task: str, run: Run) -> dict[str, Any]:
    """All students of a task."""
    place = data(task, run)
    teacher(task, run)
    return {name: student(task, name, run.folder / f"{task}-{name}", place, run) for name in STUDENTS[task]}


def unlabelled(run: Run) -> dict[str, Any]:
    """Quality over the amount of text: sentences of SST-2 without their labels, and of IMDB's unlabelled part."""
    teacher("SST-2", run)
    found = load("SST-2")
    place = run.folder / "few-data"
    write("SST-2", place, "train.csv", found.train[:LABELLED])
    write("SST-2", place, "test.csv", run.few(found.held))
    rest = [each.text for each in found.train[LABELLED:] if isinstance(each, Labelled)]
    sources = {"SST-2": rest, "IMDB": reviews(max(AMOUNTS))}
    made: dict[str, Any] = {}
    for source, texts in sources.items():
        for amount in AMOUNTS[:2] if run.rehearsed else AMOUNTS:
            if not amount and made:
                continue  # the same for both
            path = run.folder / f"{source}-{amount}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:amount]), encoding="utf-8")
            for name in ("layers=2", "bilstm"):
                key = f"{source} {amount} {name}"
                more = {"unlabelled": [path]} if amount else {}
                alone = ["verdict.alone=none"] if amount else []
                under = run.folder / key.replace(" ", "-")
                made[key] = student("SST-2", name, under, place, run, *alone, steps=CURVE, **more)
    return made


def reviews(count: int) -> list[str]:
    """Sentences of reviews that nobody labelled."""
    found: list[str] = []
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "imdb", "unsupervised.jsonl.xz")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            text = " ".join(json.loads(line)["text"].replace("<br />", " ").split())
            found += [each for each in SENTENCE.split(text) if 3 <= len(each.split()) <= 60]
            if len(found) >= count:
                break
    return found[:count]


def estimated(task: str, found: dict[str, Any], run: Run) -> None:
    """How long all would take, from the time of a step."""
    name = "SST-2" if task == "unlabelled" else task
    steps = CURVE if task == "unlabelled" else EPOCHS * -(-len(load(name).train) // PLANS[name].batch)
    total = 0.0
    for student_name, each in found.items():
        arms = 1 if task == "unlabelled" and " 0 " not in student_name else 2
        hours = arms * run.seeds * steps * each["step"] / 3600
        total += hours * (1 if task != "unlabelled" else len(AMOUNTS) / 2)
        took = f"{each['step']:.3f} s a step, {steps:,} steps, {hours:.1f} h for {arms} x {run.seeds}"
        print(f"{task}, {student_name}: {took}")
    print(f"{task}: about {total:.1f} h in all, without the teacher")


def main() -> None:
    """One task, or the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*KINDS, "unlabelled"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for the runs, so that they can go on; else one for the moment")
    parser.add_argument("--rehearse", action="store_true", help="a few steps, and how long all would take; no record")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if given.rehearse or given.folder is None else given.folder
        run = Run(folder=folder, seeds=1 if given.rehearse else given.seeds, rehearsed=given.rehearse)
        found = unlabelled(run) if given.task == "unlabelled" else tasks(given.task, run)
    if given.rehearse:
        estimated(given.task, found, Run(folder=folder, seeds=given.seeds, rehearsed=True))
    else:
        out = RESULTS / f"distil-{given.task.casefold()}.json"
        out.write_text(json.dumps({"facts": facts(), "seeds": given.seeds, "students": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()

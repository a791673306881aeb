"""Is a teacher worth it? Students of MiniLM on three tasks, each beside the same student without the teacher.

HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --folder runs          # also CoNLL-2003, STS-B
HEEDFUL_DATA=folder python benchmarks/distil.py unlabelled --folder runs     # the curve, with the teacher of SST-2
HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --rehearse             # a few steps, and how long all would take
HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --folder runs --judge  # what is finished is measured again

Runs that were stopped resume. Training may share the machine; measure (--judge) on a quiet one.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from finetune_data import PLANS, load
from report import RESULTS, check_destination, grid
from report import write as write_record

from heedful.data import LabelledExample, ScoredExample, TaggedExample
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.run import distil
from heedful.runs.finetune.run import finetune

KINDS = {"SST-2": "classify", "CoNLL-2003": "tag", "STS-B": "embed"}
STUDENTS = {
    "SST-2": ("layers=3", "layers=2", "bilstm", "attention"),
    "CoNLL-2003": ("layers=3", "layers=2", "bilstm"),
    "STS-B": ("layers=3", "tiny"),
}
EPOCHS = 4  # of students; the teacher has those of the fine-tuning benchmark
LABELLED, CURVE = 1000, 2000  # labelled texts, and steps, of the curve
AMOUNTS = (0, 1000, 4000, 16_000, 64_000)  # texts without labels
ANSWERED = 1000  # texts that are answered at once where speed is measured, or as many as there are
QUICK, STEPS = 160, 6  # examples and steps of a rehearsal
SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where, with what, and whether it is a rehearsal."""

    folder: Path
    seeds: int
    rehearsed: bool
    judge: bool = False  # measure again

    def few(self, rows: Sequence[Any]) -> Sequence[Any]:
        """All, or those of a rehearsal."""
        return rows[:QUICK] if self.rehearsed else rows


def write(task: str, folder: Path, name: str, rows: Sequence[Any]) -> None:
    """A split, in a format that heedful reads; a list of texts is without labels."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        for number, row in enumerate(rows):
            match row:
                case LabelledExample():
                    if not number:
                        csv.writer(file).writerow(("text", "label"))
                    csv.writer(file).writerow((row.text, row.label))
                case ScoredExample():
                    file.write(json.dumps({"anchor": row.text, "positive": row.text_pair, "score": row.score}) + "\n")
                case TaggedExample():
                    file.writelines(f"{word} {tag}\n" for word, tag in zip(row.words, row.tags, strict=True))
                    file.write("\n")
                case str():
                    file.write(json.dumps({"text": row}) + "\n")


def data(task: str, run: Run) -> Path:
    """Train and test as files; test is what is measured, and nothing is chosen by it."""
    loaded, folder = load(task), run.folder / f"{task}-data"
    suffix = {"classify": "csv", "tag": "conll", "embed": "jsonl"}[KINDS[task]]
    for name, rows in (("train", loaded.train), ("test", loaded.held)):
        write(task, folder, f"{name}.{suffix}", run.few(rows))
    return folder


def common(task: str, epochs: float, run: Run, steps: int = 0) -> list[str]:
    """Return the settings that teacher and students share; `steps`, if not 0, replaces the epochs."""
    plan = PLANS[task]
    length = [f"train.epochs={epochs}"]
    if run.rehearsed or steps:
        length = [f"train.max_steps={STEPS if run.rehearsed else steps}"]
    cut = [] if KINDS[task] == "embed" else ["long_inputs=truncate"]
    return [
        *length,
        *cut,
        f"train.batch_size={plan.batch}",
        f"max_length={plan.longest}",
        "data.dev_fraction=0",
        "fit.load_best_at_end=false",
    ]


def teacher(task: str, run: Run) -> Path:
    """MiniLM, fine-tuned once."""
    folder = run.folder / f"{task}-teacher"
    more = [*common(task, PLANS[task].epochs, run), f"train.optimizer.lr={PLANS[task].rate}"]
    if finetune(KINDS[task], data(task, run), folder, model=minilm(), assignments=more).status != "completed":
        raise SystemExit(130)
    return folder


def student(
    task: str, name: str, folder: Path, data_path: Path, run: Run, *more: str, steps: int = 0, **options: Any
) -> dict[str, Any]:
    """The verdict on one student, and what it took."""
    wishes = [*common(task, EPOCHS, run, steps), f"seeds={run.seeds}", f"verdict.texts={ANSWERED}", *more]
    if run.rehearsed:
        quick = ("verdict.rounds=3", "verdict.precision=float32", "verdict.baseline=none")
        wishes += [setting for setting in quick if setting not in more]
    if not name.startswith(("bilstm", "attention", "tiny")):
        wishes.append("train.optimizer.lr=1e-4")
    if run.judge:
        (folder / VERDICT).unlink(missing_ok=True)
    began = time.monotonic()
    done = distil(run.folder / f"{task}-teacher", data_path, folder, student=name, assignments=wishes, **options)
    if done.status != "completed":
        raise SystemExit(130)
    seeds = done.results["seeds"]
    step = sum(seed["seconds"] for seed in seeds) / sum(seed["steps"] for seed in seeds)
    print(f"{task}, {name}: {done.results['verdict']['sentence']}", flush=True)
    return {"verdict": done.results["verdict"], "step": step, "seconds": time.monotonic() - began}


def tasks(task: str, run: Run, names: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Students of a task, all of them unless some are named."""
    place = data(task, run)
    teacher(task, run)
    for name in names or STUDENTS[task]:
        yield name, student(task, name, run.folder / f"{task}-{name}", place, run)


def unlabelled(run: Run) -> Iterator[tuple[str, Any]]:
    """Quality over the amount of text: sentences of SST-2 without their labels, and of IMDB's unlabelled part."""
    teacher("SST-2", run)
    loaded = load("SST-2")
    place = run.folder / "few-data"
    write("SST-2", place, "train.csv", loaded.train[:LABELLED])
    write("SST-2", place, "test.csv", run.few(loaded.held))
    rest = [example.text for example in loaded.train[LABELLED:] if isinstance(example, LabelledExample)]
    sources = {"SST-2": rest, "IMDB": reviews(max(AMOUNTS))}
    for source, texts in sources.items():
        for amount in AMOUNTS[:2] if run.rehearsed else AMOUNTS:
            if not amount and source != "SST-2":
                continue  # the same for both
            path = run.folder / f"{source}-{amount}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:amount]), encoding="utf-8")
            for name in ("layers=2", "bilstm"):
                key = f"{source} {amount} {name}"
                more = {"unlabelled": [path]} if amount else {}
                alone = ["verdict.baseline=none"] if amount else []
                under = run.folder / key.replace(" ", "-")
                yield key, student("SST-2", name, under, place, run, *alone, steps=CURVE, **more)


def reviews(count: int) -> list[str]:
    """Sentences of reviews that nobody labelled."""
    sentences: list[str] = []
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "imdb", "unsupervised.jsonl.xz")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            text = " ".join(json.loads(line)["text"].replace("<br />", " ").split())
            sentences += [word for word in SENTENCE.split(text) if 3 <= len(word.split()) <= 60]
            if len(sentences) >= count:
                break
    return sentences[:count]


def estimated(task: str, results: dict[str, Any], run: Run) -> None:
    """How long all would take, from the time of a step."""
    name = "SST-2" if task == "unlabelled" else task
    steps = CURVE if task == "unlabelled" else EPOCHS * -(-len(load(name).train) // PLANS[name].batch)
    total = 0.0
    for student_name, result in results.items():
        arms = 1 if task == "unlabelled" and " 0 " not in student_name else 2
        hours = arms * run.seeds * steps * result["step"] / 3600
        total += hours * (1 if task != "unlabelled" else len(AMOUNTS) / 2)
        took = f"{result['step']:.3f} s a step, {steps:,} steps, {hours:.1f} h for {arms} x {run.seeds}"
        print(f"{task}, {student_name}: {took}")
    print(f"{task}: about {total:.1f} h in all, without the teacher")


# -- the record ---------------------------------------------------------------------------------------------------


def spread(quality: dict[str, Any]) -> str:
    """Mean and standard deviation, in per cent."""
    deviation = "" if quality["std"] is None else f" ± {100 * quality['std']:.2f}"
    return f"{100 * quality['mean']:.2f}{deviation}"


def table(results: dict[str, Any]) -> str:
    """Format a line for each student, with its speed beside the teacher's in the same turns."""
    first = next(iter(results.values()))["verdict"]
    main, teacher = f"{first['metric']} on {first['split']}", first["models"]["teacher"]
    columns = ["student", main, "without the teacher", "difference (95 %)", "kept", "parameters", "served in"]
    columns += ["texts/s", "to the teacher's", "one text, p50 / p99 ms", "the teacher's", "to the teacher's"]
    alike = [f"{teacher['parameters']:,}", teacher["precision"], "", "1.00", "", "", "1.00"]
    rows = [["the teacher", f"{100 * teacher['quality']['mean']:.2f}", "", "", "100 %", *alike]]
    for name, result in results.items():
        verdict = result["verdict"]
        models, gain = verdict["models"], verdict.get("delta_vs_baseline")
        small, taught = models["student"], models["teacher"]
        alone = spread(models["baseline"]["quality"]) if "baseline" in models else ""
        sure = gain is not None and gain["low"] is not None
        between = f" ({100 * gain['low']:+.2f} to {100 * gain['high']:+.2f})" if gain is not None and sure else ""
        rows.append(
            [
                name,
                spread(small["quality"]),
                alone,
                "" if gain is None else f"{100 * gain['difference']:+.2f}{between}",
                f"{100 * verdict['quality_ratio']:.1f} %",
                f"{small['parameters']:,}",
                small["precision"],
                f"{small['texts_per_second']:,.0f}",
                f"{verdict['throughput_ratio']:.2f}",
                f"{small['p50']:.2f} / {small['p99']:.2f}",
                f"{taught['p50']:.2f} / {taught['p99']:.2f}",
                f"{1 / verdict['latency_ratio']:.2f}",
            ]
        )
    return grid(columns, rows)


def curve(results: dict[str, Any]) -> str:
    """Quality over the amount of text, a column for each student."""
    names = list(dict.fromkeys(key.split()[2] for key in results))
    rows = []
    for source, amount in dict.fromkeys(tuple(key.split()[:2]) for key in results):
        keys = [f"{source} {amount} {name}" for name in names]
        cells = [
            spread(results[key]["verdict"]["models"]["student"]["quality"]) if key in results else "" for key in keys
        ]
        rows.append([source if amount != "0" else "none", f"{int(amount):,}", *cells])
    keys = [f"SST-2 0 {name}" for name in names]
    alone = [spread(results[key]["verdict"]["models"]["baseline"]["quality"]) if key in results else "" for key in keys]
    rows.append(["no teacher", "0", *alone])
    return grid(["texts without labels", "how many", *names], rows)


def about(task: str, seeds: int) -> str:
    """Describe how the runs were trained and measured."""
    if task == "unlabelled":
        return (
            f"Quality over the amount of text without labels: {LABELLED:,} labelled phrases of SST-2, and these "
            "numbers of other phrases of it, or of sentences of IMDB's unlabelled part, which only the teacher labels "
            f"(all-MiniLM-L6-v2, fine-tuned on all of SST-2's labels). {CURVE:,} steps each, {seeds} seeds; accuracy "
            "on SST-2's dev after the last step; dev chose nothing."
        )
    plan = PLANS[task]
    return (
        f"Teacher: all-MiniLM-L6-v2 fine-tuned on {task}, {plan.epochs} epochs, rate {plan.rate:g}. Students: soft and "
        f"hard labels, {EPOCHS} epochs, {seeds} seeds each, with the teacher and, as many steps, without it; mean ± "
        "standard deviation, measured after the last step on what was never trained on and chose nothing. Speed side "
        f"by side in one process, two threads, from text to answer, each in the precision in which it would be served: "
        f"up to {ANSWERED:,} texts at once, and one alone."
    )


def main() -> None:
    """One task, or the curve; what was found so far is written after each student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*KINDS, "unlabelled"])
    parser.add_argument("--students", nargs="+", default=[], help="of a task; else all that it has here")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="for the runs, so that they can resume; default: a temporary folder"
    )
    parser.add_argument("--rehearse", action="store_true", help="a few steps, and how long all would take; no record")
    parser.add_argument("--judge", action="store_true", help="measure again what is finished")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    seeds, curved = 1 if options.rehearse else options.seeds, options.task == "unlabelled"
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.rehearse or options.folder is None else options.folder
        run = Run(folder=folder, seeds=seeds, rehearsed=options.rehearse, judge=options.judge)
        for name, result in unlabelled(run) if curved else tasks(options.task, run, options.students):
            results[name] = result
            if not options.rehearse:
                shown, description = curve(results) if curved else table(results), about(options.task, seeds)
                print(
                    write_record(f"distil-{options.task.casefold()}", description, [shown], results, options.output),
                    flush=True,
                )
    if options.rehearse:
        estimated(options.task, results, Run(folder=folder, seeds=options.seeds, rehearsed=True))


if __name__ == "__main__":
    main()

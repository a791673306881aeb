"""Measure distillation: students of MiniLM on three tasks, each beside the same student that has no teacher.

`unlabelled` measures the quality of students over the amount of text without labels. `pruned` measures token pruning,
which makes the teacher itself faster, with long texts and with shorter ones.

HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --folder runs          # also CoNLL-2003, STS-B
HEEDFUL_DATA=folder python benchmarks/distil.py unlabelled --folder runs     # the curve, with the teacher of SST-2
HEEDFUL_DATA=folder python benchmarks/distil.py pruned --folder runs --train # models for token pruning, to train first
HEEDFUL_DATA=folder python benchmarks/distil.py pruned --folder runs         # token pruning, without a student
HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --rehearse             # a few steps, and how long all would take
HEEDFUL_DATA=folder python benchmarks/distil.py SST-2 --folder runs --judge  # finished students are measured again

Runs that were stopped resume, if the data in the folder is the same. Training may share the machine; measure
(--judge) on a quiet one.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from finetune_data import PLANS, hold_out, load
from parts import Parts, add_parts_option
from report import RESULTS, check_destination, grid
from report import write as write_record

from heedful.atomic_io import atomic_path
from heedful.checkpoint import load as load_model
from heedful.checkpoint import save as save_model
from heedful.data import LabelledExample, ScoredExample, TaggedExample, TextExample, read
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.infer.precision import Precision
from heedful.model.token_pruning import TokenPruning
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.run import distil
from heedful.runs.evaluate import build_eval_task, evaluate
from heedful.runs.finetune.run import finetune
from heedful.runs.prune import REPORT_TEXTS, ROUNDS, prune
from heedful.tasks.metrics import paired_difference
from heedful.tasks.task import evaluate_task

KINDS = {"SST-2": "classify", "CoNLL-2003": "tag", "STS-B": "embed"}
STUDENTS = {
    "SST-2": ("layers=3", "layers=2", "bilstm", "attention"),
    "CoNLL-2003": ("layers=3", "layers=2", "bilstm"),
    "STS-B": ("layers=3", "tiny"),
}
EPOCHS = 4  # of students; the teacher trains as long as in the fine-tuning benchmark
LABELLED = 1000  # labelled texts of the curve
CURVE = 2000  # training steps of the curve
AMOUNTS = (0, 1000, 4000, 16_000, 64_000)  # texts without labels
PRUNED = ("IMDB", "AG News")  # tasks of token pruning: reviews of some hundred tokens, and news of some fifty
HELD_OUT = {"IMDB": 2500, "AG News": 2500, "SST-2": 6000}  # texts of train that choose, at most a quarter of it
ADAPTED = TokenPruning(layer=3, keep_rate=0.25)  # pruning with which models of IMDB are trained further
ADAPTED_STEPS = 600  # half an epoch
MAX_LOSS = 0.3  # points of accuracy that a pruning may lose on these texts
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
ANSWERED = 1000  # maximum texts that are predicted at once when speed is measured
QUICK, STEPS = 160, 6  # examples and training steps of a rehearsal
SENTENCE = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options that all trainings share."""

    folder: Path  # folder of all runs
    seeds: int  # number of seeds
    rehearsed: bool  # whether to train a few steps on a few examples
    judge: bool = False  # whether to measure finished students again
    train_only: bool = False  # whether to train only, and to measure later
    precisions: tuple[Precision, ...] = PRECISIONS  # of token pruning
    parts: Parts | None = None  # finished results of token pruning; None in a rehearsal

    def result(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the finished result with this name, or measure it."""
        return measure() if self.parts is None else self.parts.result(name, measure)

    def few(self, examples: Sequence[Any]) -> Sequence[Any]:
        """Return all examples, or the few of a rehearsal, evenly spread over them."""
        return examples[:: max(1, len(examples) // QUICK)][:QUICK] if self.rehearsed else examples


def write(folder: Path, name: str, examples: Sequence[Any]) -> None:
    """Write a split in a format that Heedful reads: CSV, JSON lines or CoNLL, by the type of the examples.

    A file that exists has to have this content already, since finished runs in the folder were trained on it.
    """
    file = io.StringIO(newline="")
    for index, example in enumerate(examples):
        match example:
            case LabelledExample():
                if index == 0:
                    csv.writer(file).writerow(("text", "label"))
                csv.writer(file).writerow((example.text, example.label))
            case ScoredExample():
                pair = {"anchor": example.text, "positive": example.text_pair, "score": example.score}
                file.write(json.dumps(pair) + "\n")
            case TaggedExample():
                file.writelines(f"{word} {tag}\n" for word, tag in zip(example.words, example.tags, strict=True))
                file.write("\n")
            case TextExample():
                file.write(json.dumps({"text": example.text}) + "\n")
    path, content = folder / name, file.getvalue().encode()
    if path.exists() and path.read_bytes() != content:
        raise SystemExit(f"{path} has other data than this benchmark would write: give another --folder")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def data(task: str, run: Run) -> Path:
    """Write the splits train and test of a task, and return their folder."""
    loaded, folder = load(task), run.folder / f"{task}-data"
    suffix = {"classify": "csv", "tag": "conll", "embed": "jsonl"}[KINDS[task]]
    for name, examples in (("train", loaded.train), ("test", loaded.held)):
        write(folder, f"{name}.{suffix}", run.few(examples))
    return folder


def common(task: str, epochs: float, run: Run, steps: int = 0) -> list[str]:
    """Return the settings that teacher and students share; `steps`, if not 0, replaces the epochs."""
    plan = PLANS[task]
    length = [f"train.epochs={epochs}"]
    if run.rehearsed or steps:
        length = [f"train.max_steps={STEPS if run.rehearsed else steps}"]
    truncation = [] if KINDS.get(task) == "embed" else ["long_inputs=truncate"]
    return [
        *length,
        *truncation,
        f"train.batch_size={plan.batch}",
        f"max_length={plan.longest}",
        "data.dev_fraction=0",
        "fit.load_best_at_end=false",
    ]


def teacher(task: str, run: Run) -> Path:
    """Fine-tune MiniLM on the task, and return the folder of the run."""
    folder = run.folder / f"{task}-teacher"
    settings = [*common(task, PLANS[task].epochs, run), f"train.optimizer.lr={PLANS[task].rate}"]
    if finetune(KINDS[task], data(task, run), folder, model=minilm(), assignments=settings).status != "completed":
        raise SystemExit(130)
    return folder


def student(
    task: str, name: str, folder: Path, data_path: Path, run: Run, *more: str, steps: int = 0, **options: Any
) -> dict[str, Any]:
    """Distil one student.

    Args:
        task: The task, whose teacher is trained already.
        name: The student, as in `heedful distil --student`.
        folder: The folder of the run.
        data_path: The folder of the data.
        run: The options that all trainings share.
        more: Further settings.
        steps: The number of training steps. If 0, the student trains for EPOCHS.
        options: Further arguments of `distil`.

    Returns:
        verdict: The comparison with the teacher.
        step: Seconds of a training step.
        seconds: Seconds of the run.
    """
    settings = [*common(task, EPOCHS, run, steps), f"seeds={run.seeds}", f"verdict.texts={ANSWERED}", *more]
    if run.rehearsed:
        quick = ("verdict.rounds=3", "verdict.precision=float32", "verdict.baseline=none")
        settings += [setting for setting in quick if setting not in more]
    if not name.startswith(("bilstm", "attention", "tiny")):
        settings.append("train.optimizer.lr=1e-4")
    if run.judge:
        (folder / VERDICT).unlink(missing_ok=True)
    start = time.monotonic()
    done = distil(run.folder / f"{task}-teacher", data_path, folder, student=name, assignments=settings, **options)
    if done.status != "completed":
        raise SystemExit(130)
    seeds = done.results["seeds"]
    step_seconds = sum(seed["seconds"] for seed in seeds) / sum(seed["steps"] for seed in seeds)
    print(f"{task}, {name}: {done.results['verdict']['sentence']}", flush=True)
    return {"verdict": done.results["verdict"], "step": step_seconds, "seconds": time.monotonic() - start}


def tasks(task: str, run: Run, names: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Distil the named students of a task, or all of them; yield each name and result."""
    data_path = data(task, run)
    teacher(task, run)
    for name in names or STUDENTS[task]:
        yield name, student(task, name, run.folder / f"{task}-{name}", data_path, run)


def unlabelled(run: Run) -> Iterator[tuple[str, Any]]:
    """Distil two students with each amount of texts without labels; yield "SOURCE AMOUNT STUDENT" and the result.

    The texts are phrases of SST-2 without their labels, and sentences of IMDB's unlabelled part.
    """
    teacher("SST-2", run)
    loaded = load("SST-2")
    data_path = run.folder / "few-data"
    write(data_path, "train.csv", loaded.train[:LABELLED])
    write(data_path, "test.csv", run.few(loaded.held))
    rest = [example.text for example in loaded.train[LABELLED:] if isinstance(example, LabelledExample)]
    sources = {"SST-2": rest, "IMDB": reviews(max(AMOUNTS))}
    for source, texts in sources.items():
        for amount in AMOUNTS[:2] if run.rehearsed else AMOUNTS:
            if amount == 0 and source != "SST-2":
                continue  # it is the same for both sources
            path = run.folder / f"{source}-{amount}.jsonl"
            write(run.folder, path.name, [TextExample(text=text) for text in texts[:amount]])
            for name in ("layers=2", "bilstm"):
                key = f"{source} {amount} {name}"
                options = {"unlabelled": [path]} if amount else {}
                settings = ["verdict.baseline=none"] if amount else []
                folder = run.folder / key.replace(" ", "-")
                yield key, student("SST-2", name, folder, data_path, run, *settings, steps=CURVE, **options)


def pruned(run: Run) -> Iterator[tuple[str, Any]]:
    """Choose a token pruning for fine-tuned models; yield "TASK, seed N, PRECISION" and the report, or its refusal."""
    data_paths = {task: held_out_data(task, run) for task in PRUNED}
    models = {
        (task, seed): fine_tuned(task, data_path, seed, run)
        for task, data_path in data_paths.items()
        for seed in range(run.seeds)
    }
    trained = {
        seed: adapted(models["IMDB", seed], data_paths["IMDB"], run)
        for seed in range(0 if run.rehearsed else run.seeds)
    }
    for (task, seed), folder in models.items() if not run.train_only else ():
        for precision in PRECISIONS[:1] if run.rehearsed else run.precisions:
            name, output = f"{task}, seed {seed}, {precision}", run.folder / f"{task}-pruned-{seed}-{precision}"
            yield name, run.result(name, partial(pruning, folder, data_paths[task], output, precision))
            if task == "IMDB" and seed in trained:
                compare = partial(comparison, folder, trained[seed], data_paths[task], precision)
                yield f"{name}, trained", run.result(f"{name}, trained", compare)


@cache
def held_out_data(task: str, run: Run) -> Path:
    """Write the splits of a task, with dev held out of train and the official test, and return their folder."""
    folder = run.folder / f"{task}-held-out-data"
    loaded = load(task)
    train, dev = hold_out(loaded.train, HELD_OUT[task])
    for name, examples in {"train": train, "dev": dev, "test": loaded.held}.items():
        write(folder, f"{name}.csv", run.few(examples))
    return folder


@cache
def fine_tuned(task: str, data_path: Path, seed: int, run: Run) -> Path:
    """Fine-tune MiniLM on train, without a choice by dev, and return the folder of the run."""
    folder = run.folder / f"{task}-whole-{seed}"
    settings = [setting for setting in common(task, PLANS[task].epochs, run) if "dev_fraction" not in setting]
    settings += [f"train.optimizer.lr={PLANS[task].rate}", f"train.seed={seed}"]
    if finetune("classify", data_path, folder, model=minilm(), assignments=settings).status != "completed":
        raise SystemExit(130)
    return folder


def pruning(folder: Path, data_path: Path, output: Path, precision: Precision) -> dict[str, Any]:
    """Choose a pruning of a model, and return its report, or its refusal."""
    try:
        return prune(folder, data_path, output, max_loss=MAX_LOSS, precision=precision, overwrite=True, log=print)
    except HeedfulError as error:
        return {"refused": str(error)}


@cache
def adapted(folder: Path, data_path: Path, run: Run) -> Path:
    """Fine-tune a model of IMDB further, with the pruning ADAPTED, and return the folder of the run."""
    start, trained = (folder.with_name(f"{folder.name}-{name}") for name in ("start", "adapted"))
    if not start.exists():
        bundle = load_model(folder)
        bundle.prune_tokens(ADAPTED)
        save_model(bundle, start)
    settings = [*common("IMDB", 0, run, ADAPTED_STEPS), "train.optimizer.lr=2e-5"]
    files = {"train": data_path / "train.csv"}
    if finetune("classify", files, trained, model=start, assignments=settings).status != "completed":
        raise SystemExit(130)
    # reviews on which int8 is compared with float32; a run without predictions is compared on texts of other kinds
    if not (predictions := trained / "predictions-dev.jsonl").exists():
        evaluate(trained, {"dev": data_path / "dev.csv"}, split="dev", predictions=predictions)
    return trained


def comparison(full: Path, pruned: Path, data_path: Path, precision: Precision) -> dict[str, Any]:
    """Compare a model trained with ADAPTED with one that computes all tokens; return a report like that of `prune`."""
    source = read({"test": data_path / "test.csv"}, LabelledExample)
    examples = list(source.examples("test"))
    tasks, engines, metrics = {}, {}, {}
    for name, model in (("all_tokens", full), ("pruned", pruned)):
        engine = Engine(model, precision=precision)
        tasks[name], engine.loaded = build_eval_task(engine.loaded, source, "test", "truncate")
        engine.max_length = tasks[name].truncation_length
        engines[name], metrics[name] = engine, evaluate_task(tasks[name], engine, examples)
    inputs = [tasks["pruned"].engine_input(example) for example in examples[:REPORT_TEXTS]]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_index in range(1 + ROUNDS):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine(inputs)
            if round_index > 0:  # the first round is a warm-up
                seconds[name].append(time.perf_counter() - start)
    rates = {name: len(inputs) / statistics.median(times) for name, times in seconds.items()}
    values = {name: float(tasks[name].compute_metrics(metrics[name])["accuracy"]) for name in engines}
    replicates = (metrics[name].bootstraps["accuracy"].values() for name in ("pruned", "all_tokens"))
    lengths = [len(encoded.chunks[0].encoded) for encoded in engines["pruned"].tokenize(inputs)]
    chosen = asdict(ADAPTED) | {
        "tokens_left": sum(map(ADAPTED.count, lengths)) / sum(lengths),
        "difference": values["pruned"] - values["all_tokens"],
        "speedup": rates["pruned"] / rates["all_tokens"],
        **paired_difference(*replicates, count=len(examples)),
    }
    return {"chosen": chosen} | {name: {"value": values[name], "texts_per_second": rates[name]} for name in engines}


def reviews(count: int) -> list[str]:
    """Return the first sentences, of 3 to 60 words, of IMDB's unlabelled reviews."""
    sentences: list[str] = []
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "imdb", "unsupervised.jsonl.xz")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            text = " ".join(json.loads(line)["text"].replace("<br />", " ").split())
            sentences += [sentence for sentence in SENTENCE.split(text) if 3 <= len(sentence.split()) <= 60]
            if len(sentences) >= count:
                break
    return sentences[:count]


def estimated(task: str, results: dict[str, Any], run: Run) -> None:
    """Print how long all runs would take, estimated from the seconds of a training step in a rehearsal."""
    name = "SST-2" if task == "unlabelled" else task
    steps = CURVE if task == "unlabelled" else EPOCHS * -(-len(load(name).train) // PLANS[name].batch)
    total = 0.0
    for student_name, result in results.items():
        arms = 1 if task == "unlabelled" and " 0 " not in student_name else 2
        hours = arms * run.seeds * steps * result["step"] / 3600
        total += hours * (1 if task != "unlabelled" else len(AMOUNTS) / 2)
        estimate = f"{result['step']:.3f} s a step, {steps:,} steps, {hours:.1f} h for {arms} x {run.seeds}"
        print(f"{task}, {student_name}: {estimate}")
    print(f"{task}: about {total:.1f} h in all, without the teacher")


# -- the record ---------------------------------------------------------------------------------------------------


def spread(quality: dict[str, Any]) -> str:
    """Format a mean and its standard deviation, in per cent."""
    deviation = "" if quality["std"] is None else f" ± {100 * quality['std']:.2f}"
    return f"{100 * quality['mean']:.2f}{deviation}"


def table(results: dict[str, Any]) -> str:
    """Format a row for each student as Markdown, with its speed and the teacher's, measured in the same turns."""
    first = next(iter(results.values()))["verdict"]
    main, teacher = f"{first['metric']} on {first['split']}", first["models"]["teacher"]
    columns = ["student", main, "without the teacher", "difference (95 %)", "share of the teacher's quality"]
    columns += ["parameters", "served in", "texts/s", "to the teacher's", "one text, p50 / p99 ms", "the teacher's"]
    columns += ["to the teacher's"]
    speed = [f"{teacher['parameters']:,}", teacher["precision"], "", "1.00", "", "", "1.00"]
    rows = [["the teacher", f"{100 * teacher['quality']['mean']:.2f}", "", "", "100 %", *speed]]
    for name, result in results.items():
        verdict = result["verdict"]
        models = verdict["models"]
        student, teacher = models["student"], models["teacher"]
        gain = verdict.get("delta_vs_baseline")
        difference = "" if gain is None else f"{100 * gain['difference']:+.2f}"
        if gain is not None and gain["low"] is not None:
            difference += f" ({100 * gain['low']:+.2f} to {100 * gain['high']:+.2f})"
        rows.append(
            [
                name,
                spread(student["quality"]),
                spread(models["baseline"]["quality"]) if "baseline" in models else "",
                difference,
                f"{100 * verdict['quality_ratio']:.1f} %",
                f"{student['parameters']:,}",
                student["precision"],
                f"{student['texts_per_second']:,.0f}",
                f"{verdict['throughput_ratio']:.2f}",
                f"{student['p50']:.2f} / {student['p99']:.2f}",
                f"{teacher['p50']:.2f} / {teacher['p99']:.2f}",
                f"{1 / verdict['latency_ratio']:.2f}",
            ]
        )
    return grid(columns, rows)


def curve(results: dict[str, Any]) -> str:
    """Format the quality for each amount of texts without labels as Markdown, with a column for each student."""
    names = list(dict.fromkeys(key.split()[2] for key in results))
    rows = []
    for source, amount in dict.fromkeys(tuple(key.split()[:2]) for key in results):
        keys = [f"{source} {amount} {name}" for name in names]
        cells = [
            spread(results[key]["verdict"]["models"]["student"]["quality"]) if key in results else "" for key in keys
        ]
        rows.append([source if amount != "0" else "none", f"{int(amount):,}", *cells])
    keys = [f"SST-2 0 {name}" for name in names]
    baselines = [
        spread(results[key]["verdict"]["models"]["baseline"]["quality"]) if key in results else "" for key in keys
    ]
    rows.append(["no teacher", "0", *baselines])
    return grid(["texts without labels", "how many", *names], rows)


def pruned_table(results: dict[str, Any]) -> str:
    """Format a row for each pruning as Markdown: its accuracy and speed beside those of all tokens."""
    columns = [
        "model",
        "layers with all tokens",
        "keep_rate",
        "tokens left",
        "accuracy",
        "all tokens",
        "difference (95 %)",
    ]
    columns += ["texts/s", "all tokens", "times as fast"]
    rows = []
    for name, report in results.items():
        if "refused" in report:
            rows.append([name, report["refused"], *[""] * (len(columns) - 2)])
            continue
        chosen, some, every = report["chosen"], report["pruned"], report["all_tokens"]
        numbers = [100 * chosen[key] for key in ("difference", "low", "high")]
        rows.append(
            [
                name,
                str(chosen["layer"]),
                f"{100 * chosen['keep_rate']:g} %",
                f"{100 * chosen['tokens_left']:.0f} %",
                f"{100 * some['value']:.2f}",
                f"{100 * every['value']:.2f}",
                "{:+.2f} ({:+.2f} to {:+.2f})".format(*numbers),
                f"{some['texts_per_second']:,.0f}",
                f"{every['texts_per_second']:,.0f}",
                f"{chosen['speedup']:.2f}",
            ]
        )
    return grid(columns, rows)


def about(task: str, seeds: int, threads: int) -> str:
    """Describe how the runs were trained and measured."""
    if task == "unlabelled":
        return (
            f"Quality over the amount of text without labels: {LABELLED:,} labelled phrases of SST-2, and these "
            "numbers of other phrases of it, or of sentences of IMDB's unlabelled part, which only the teacher labels "
            f"(all-MiniLM-L6-v2, fine-tuned on all of SST-2's labels). {CURVE:,} steps each, {seeds} seeds; accuracy "
            "on SST-2's dev after the last step; dev chose nothing."
        )
    if task == "pruned":
        return (
            f"Token pruning of all-MiniLM-L6-v2, fine-tuned on {' and '.join(PRUNED)} with "
            f"{'one seed' if seeds == 1 else f'{seeds} seeds'}. Not trained with it: the fastest pruning that loses at "
            f"most {MAX_LOSS:g} points, by accuracy and by expected loss, on texts held out of train "
            f"({HELD_OUT['IMDB']:,} of IMDB's, a quarter of AG News'). Trained: a pruning chosen on dev with seed 0, "
            f"with which the model was trained for {ADAPTED_STEPS} more steps of 16 reviews, compared with the model "
            "before them. "
            "Measured on the official test texts. Speed from text to answer, with the pruning and with all tokens in "
            f"turn, in one process, {threads} threads: medians."
        )
    plan = PLANS[task]
    return (
        f"Teacher: all-MiniLM-L6-v2 fine-tuned on {task}, {plan.epochs} epochs, rate {plan.rate:g}. Students: soft and "
        f"hard labels, {EPOCHS} epochs, {seeds} seeds each, with the teacher and, as many steps, without it; mean ± "
        "standard deviation, measured after the last step on what was never trained on and chose nothing. Speed side "
        f"by side in one process, {threads} threads, from text to answer, each in the precision in which it would be "
        f"served: up to {ANSWERED:,} texts at once, and one alone."
    )


def measured(task: str, run: Run, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result of each student of a task, point of the curve, or pruning."""
    if task == "unlabelled":
        return unlabelled(run)
    return pruned(run) if task == "pruned" else tasks(task, run, names)


def main() -> None:
    """Distil the students of a task, or of the curve, or prune tokens; write the record again after each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=[*KINDS, "unlabelled", "pruned"])
    parser.add_argument("--students", nargs="+", default=[], help="students of the task; default: those in STUDENTS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="for the runs, so that they can resume; default: a temporary folder"
    )
    parser.add_argument("--rehearse", action="store_true", help="a few steps, and how long all would take; no record")
    parser.add_argument("--judge", action="store_true", help="measure finished students again")
    parser.add_argument("--train", action="store_true", help="pruned: only train, beside other work; measure later")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="pruned: of the models")
    add_parts_option(parser, "pruned")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.task == "pruned" and options.judge:
        parser.error("--judge is for students: to measure prunings again, remove the folder of --parts")
    if options.task != "pruned" and (options.train or options.precisions is not PRECISIONS):
        parser.error("--train and --precisions are for the task pruned: leave them out")
    check_destination(options.output)
    torch.set_num_threads(options.threads)
    seeds = 1 if options.rehearse else options.seeds
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.rehearse or options.folder is None else options.folder
        parts = None if options.rehearse else Parts(options.parts)
        run = Run(
            folder=folder,
            seeds=seeds,
            rehearsed=options.rehearse,
            judge=options.judge,
            train_only=options.train,
            precisions=tuple(options.precisions),
            parts=parts,
        )
        for name, result in measured(options.task, run, options.students):
            results[name] = result
            if not options.rehearse:
                record_name = f"distil-{options.task.casefold()}"
                text = {"unlabelled": curve, "pruned": pruned_table}.get(options.task, table)(results)
                described = about(options.task, seeds, options.threads)
                if parts is not None and parts.commits:
                    described += f" Measured at {', '.join(sorted(parts.commits))}."
                path = write_record(record_name, described, [text], results, options.output)
                print(path, flush=True)
    if options.rehearse and options.task == "pruned":
        print(pruned_table(results))
    elif options.rehearse:
        estimated(options.task, results, Run(folder=folder, seeds=options.seeds, rehearsed=True))


if __name__ == "__main__":
    main()

"""Measure zero-shot classification: AG News by sentence vectors, and the speed of a cross-encoder beside transformers.

HEEDFUL_DATA=folder python benchmarks/zero_shot.py --folder runs [--texts 1000] [--rounds 5]

The cross-encoder is trained first, unless the folder has it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import lengths
import numpy as np
import tokenizers
import torch
from encode import texts_of
from engines import BOUNDS, SIZES, Job, fastest, minilm
from finetune_data import load
from forward import against, fast_here, text
from harness import Arm, Prepared, Values, measure, serve
from numpy.typing import NDArray
from parts import Parts, add_parts_option
from report import RESULTS, check_destination, grid, write

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import LabelledExample
from heedful.infer.engine import Engine
from heedful.infer.precision import Precision
from heedful.infer.tuning.precision_gate import measure_precisions
from heedful.infer.zero_shot import ENTAILMENT_TEMPLATE, CandidateLabels, zero_shot_engine
from heedful.runs.finetune.run import finetune
from heedful.runs.results import read_results

NAMES = {"0": "World", "1": "Sports", "2": "Business", "3": "Science and technology"}  # AG News' labels
DESCRIPTIONS = {  # written before anything was measured
    "0": "world news: politics, conflicts and diplomacy",
    "1": "sports: games, players, teams and results",
    "2": "business: companies, markets and the economy",
    "3": "science and technology: computers, the internet, research and space",
}
LABELS = (
    *("politics", "war", "football", "tennis", "the stock market"),
    *("oil prices", "software", "space", "medicine", "music"),
)
SICK = {"train": "train", "dev": "trial", "test": "test_annotated"}  # file of each split
STARTS: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
SAMPLE = 16  # texts of each arm whose probabilities are compared with the first arm's
TRIED = 64  # texts on which the pipeline's batch size is chosen
ABOUT = """Quality: {rows:,} texts of AG News' official test, classified without training by the vectors of the texts
and of the labels' names or descriptions. The descriptions were written before anything was measured.

The cross-encoder is all-MiniLM-L6-v2, fine-tuned on the entailment labels of SICK's 4,439 training pairs (sentences
about pictures), since no weights trained on more of natural-language inference were at hand. It reads each text with
the name of each label. Its accuracy on SICK's test is {sick:.1f} %.

Speed: {texts:,} of these texts, each read with {labels} labels by the cross-encoder, from texts to probabilities, which
are compared with the first arm's. `heedful` packs the pairs, in the precisions that its engine accepts for this model
on this processor; `pipeline` is transformers' zero-shot-classification, with its default of one pair at a time and with
the batch size of {sizes} that is fastest.
Each arm is a process of its own, one runs at a time, and ratios are of real tokens a second, taken in each round, to
the fastest pipeline of that round. Measured at {commits}."""


# -- quality ------------------------------------------------------------------------------------------------------


def accuracy(model: str, labels: dict[str, str], count: int | None) -> dict[str, float]:
    """Return the accuracy on AG News' test by sentence vectors or by a cross-encoder, and the number of texts."""
    rows = [row for row in load("AG News").held if isinstance(row, LabelledExample)][:count]
    engine = zero_shot_engine(Engine(model), CandidateLabels.of(labels))
    answers = engine([row.text for row in rows])
    correct = [answer["label"] == row.label for answer, row in zip(answers, rows, strict=True)]
    return {"accuracy": float(np.mean(correct)), "texts": len(rows)}


# -- speed --------------------------------------------------------------------------------------------------------


def cross_encoder(folder: Path) -> Path:
    """Return the run of a classifier of entailment in the folder, trained first if it is missing."""
    run = folder / "sick"
    if not (run / "results.json").exists():
        splits = {name: sick_rows(f"SICK_{file}.txt") for name, file in SICK.items()}
        if finetune("classify", splits, run, model=minilm(), overrides={"eval_baseline": False}).status != "completed":
            raise SystemExit(130)
    return run


def sick_rows(name: str) -> list[dict[str, str]]:
    """Return the pairs of a file of SICK with their entailment labels."""
    path = Path(os.environ["HEEDFUL_DATA"], "tasks", "sick2014", name)
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {"text": row["sentence_A"], "text_pair": row["sentence_B"], "label": row["entailment_judgment"].lower()}
            for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm: read its texts and load its engine."""
    texts = texts_of("AG News", job.count)
    classify, settings = (heedful_arm if job.engine == "packed" else pipeline_arm)(job, texts)
    pairs = token_ids(job.folder, texts)
    indices = [index * len(texts) // SAMPLE for index in range(SAMPLE)]

    def sample(probabilities: NDArray[np.float32]) -> Values:
        values: Values = probabilities[indices].tolist()
        return values

    return Prepared(
        run=lambda: classify(texts),
        sample=sample,
        tokens=sum(map(len, pairs)),
        sequences=len(texts),
        inputs=lengths.digest(pairs),
        settings=settings,
    )


def token_ids(folder: str, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of all pairs of a text and a label."""
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.no_padding()
    backend.no_truncation()
    pairs = [(first, ENTAILMENT_TEMPLATE.format(label)) for first in texts for label in LABELS]
    return [encoding.ids for encoding in backend.encode_batch_fast(pairs)]


Classify = Callable[[Sequence[str]], NDArray[np.float32]]  # returns probabilities, [texts, labels]


def heedful_arm(job: Job, texts: Sequence[str]) -> tuple[Classify, str]:
    """Return the zero-shot engine in the job's precision, and its settings as text."""
    engine = zero_shot_engine(
        Engine(job.folder, precision=cast("Precision", job.precision)), CandidateLabels.of(LABELS)
    )

    def classify(batch: Sequence[str]) -> NDArray[np.float32]:
        return np.array([list(answer["probabilities"].values()) for answer in engine(batch)], np.float32)

    return classify, f"{engine.token_budget} tokens a batch"


def pipeline_arm(job: Job, texts: Sequence[str]) -> tuple[Classify, str]:
    """Return transformers' pipeline in the job's dtype and batch size, and its settings as text."""
    from transformers import pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    pipe: Any = pipeline(
        "zero-shot-classification", model=job.folder, device="cpu", dtype=getattr(torch, job.precision)
    )

    def classifier(size: int) -> Classify:
        def classify(batch: Sequence[str]) -> NDArray[np.float32]:
            answers = pipe(list(batch), candidate_labels=list(LABELS), batch_size=size)
            by_label = (dict(zip(answer["labels"], answer["scores"], strict=True)) for answer in answers)
            return np.array([[scores[label] for label in LABELS] for scores in by_label], np.float32)

        return classify

    size = job.size or fastest({size: classifier(size) for size in SIZES}, texts[:TRIED])
    return classifier(size), f"{size} pairs a batch"


def jobs_of(folder: str, count: int) -> dict[str, Job]:
    """Return all jobs by arm name; the first is the reference. Heedful's precisions are those that `Engine` accepts."""
    accepted = [measurement.precision for measurement in measure_precisions(folder) if not measurement.refused]
    first = Job(engine="pipeline", precision="float32", folder=folder, count=count, size=1)
    jobs = {
        "pipeline float32, one pair at a time": first,
        "pipeline float32": replace(first, size=None),
        "pipeline bfloat16": replace(first, size=None, precision="bfloat16"),
        **{f"heedful {precision}": replace(first, engine="packed", precision=precision) for precision in accepted},
    }
    return {name: job for name, job in jobs.items() if fast_here(job)}


def speed(folder: str, count: int, rounds: int) -> dict[str, Any]:
    """Time all arms in turn, and return their table and the ratios of Heedful's arms."""
    jobs = jobs_of(folder, count)
    arms = [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "packed",
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
    ]
    table = measure(f"{count:,} texts, {len(LABELS)} labels", arms, rounds)
    ratios = against(table, jobs)
    spreads = {name: {group: asdict(spread) for group, spread in groups.items()} for name, groups in ratios.items()}
    return {"text": f"{table.text()}\n{text(ratios)}", "table": asdict(table), "times as fast as": spreads}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure quality, then speed, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--texts", type=int, default=1000, help="texts of the measurement of speed")
    parser.add_argument("--rows", type=int, help="texts of the measurement of quality; default: the whole test")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the cross-encoder")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    add_parts_option(parser, "zero-shot")
    options = parser.parse_args(arguments)
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if options.folder is None:
        parser.error("--folder is needed, for the cross-encoder")
    check_destination(options.output)
    parts = Parts(options.parts)
    quality: dict[str, dict[str, float]] = {}
    for start in options.starts:
        for kind, labels in {"names": NAMES, "descriptions": DESCRIPTIONS}.items():
            name = f"{start}, {kind}"
            part = f"quality, {name}" + (f", {options.rows} rows" if options.rows else "")
            quality[name] = parts.result(part, partial(accuracy, STARTS[start](), labels, options.rows))
            print(name, quality[name], flush=True)
    run = cross_encoder(options.folder)
    name = "cross-encoder, names"
    part = f"quality, {name}" + (f", {options.rows} rows" if options.rows else "")
    quality[name] = parts.result(part, partial(accuracy, str(run), NAMES, options.rows))
    print(name, quality[name], flush=True)
    part = f"speed, {options.texts} texts"
    part += f", {options.rounds} rounds" if options.rounds != parser.get_default("rounds") else ""
    speeds = parts.result(part, partial(speed, str(run / "model"), options.texts, options.rounds))
    about = ABOUT.format(
        rows=int(next(iter(quality.values()))["texts"]),
        texts=options.texts,
        labels=len(LABELS),
        sick=100 * read_results(run)["splits"]["test"]["numbers"]["accuracy"],
        sizes=", ".join(map(str, SIZES)),
        commits=", ".join(sorted(parts.commits)),
    )
    rows = [[name, f"{100 * result['accuracy']:.1f}"] for name, result in quality.items()]
    tables = [grid(["encoder, labels", "accuracy, %"], rows), speeds["text"]]
    print(write("zero-shot", about, tables, {"quality": quality, "speed": speeds}, options.output))


if __name__ == "__main__":
    main()

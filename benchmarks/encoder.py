"""Measure the default encoder: fine-tuned by defaults, its vectors without fine-tuning, and the masks that it fills.

HEEDFUL_DATA=folder python benchmarks/encoder.py --tasks SST-2 MRPC --seeds 1 2 3 --out results/encoder.json
HEEDFUL_DATA=folder python benchmarks/encoder.py --vectors --starts shipped minilm
HEEDFUL_DATA=folder python benchmarks/encoder.py --fill

`--out` adds the results to a file. The other starts are MiniLM, and random weights of the encoder's shape with the
learning rate of RATES that is best on dev with seed 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import minilm
from finetune_data import load
from report import check_destination, facts
from torch import Tensor

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import create, save
from heedful.model.heads import pool
from heedful.runs.finetune.run import finetune
from heedful.tasks.metrics.regression import ranks

TASKS = {  # for each task: its kind, and the split and the metric that are reported
    "SST-2": ("classify", "dev", "accuracy"),
    "MRPC": ("classify", "dev", "accuracy"),
    "RTE": ("classify", "dev", "accuracy"),
    "STS-B": ("regress", "dev", "spearman"),
    "STS-B towers": ("embed", "dev", "spearman"),
    "CoNLL-2003": ("tag", "test", "f1"),
    "AG News": ("classify", "test", "accuracy"),
    "IMDB": ("classify", "test", "accuracy"),
    "SQuAD": ("qa", "test", "f1"),
}
PLACES = {  # folders of the tasks that `finetune` reads from there, under HEEDFUL_DATA/tasks
    "SST-2": "glue/SST-2",
    "MRPC": "glue/MRPC",
    "RTE": "glue/RTE",
    "STS-B": "glue/STS-B",
    "STS-B towers": "glue/STS-B",
    "CoNLL-2003": "conll2003",
}
RATES = (1e-4, 3e-4, 1e-3)  # learning rates that are tried for random weights
STARTS = ("shipped", "random", "minilm")  # the models that are fine-tuned
SENTENCES = (
    "The cat is sleeping on the [MASK].",
    "She drinks a cup of [MASK] every morning.",
    "It is raining, so take an [MASK].",
    "He opened the [MASK] and went inside.",
    "We had [MASK] and bread for breakfast.",
    "The sun rises in the [MASK].",
    "My brother is older than my [MASK].",
    "They live in a small [MASK] near the sea.",
    "The children play in the [MASK] after school.",
    "I would like to [MASK] a book.",
    "He was very [MASK] when he heard the bad news.",
    "The train was [MASK], and we waited an hour.",
    "In winter it is very [MASK] here.",
    "The capital of France is [MASK].",
    "She speaks English and [MASK].",
    "The soup is too [MASK] to eat.",
    "Please close the [MASK] behind you.",
    "The doctor told him to stop [MASK].",
    "There are seven days in a [MASK].",
    "He plays the [MASK] in a band.",
)


def start_of(name: str, model: str, folder: Path) -> str:
    """Return the model of one of STARTS, by folder or name; a random model is written into `folder`."""
    if name == "minilm":
        return str(minilm())
    if name == "shipped":
        return model
    loaded = heedful.load(model)
    save(create(loaded.config, loaded.tokenizer, seed=1), folder / "random")
    return str(folder / "random")


def data_of(task: str) -> Any:
    """Return the data for `finetune`: a folder, or the rows of each split."""
    if task in PLACES:
        return Path(os.environ["HEEDFUL_DATA"], "tasks", PLACES[task])
    data = load(task)
    splits = {"train": data.train, "test": data.held}
    return {name: [_row(example) for example in examples] for name, examples in splits.items()}


def _row(example: Any) -> dict[str, Any]:
    """Return the fields of an example that have a value; answers have the form of SQuAD's data sets."""
    row = {name: value for name, value in asdict(example).items() if value is not None}
    if "answers" in row:
        texts, starts = zip(*row["answers"], strict=True)
        row["answers"] = {"text": list(texts), "answer_start": list(starts)}
    return row


def scored(task: str, start: str, model: str, seed: int, rate: float | None = None) -> dict[str, Any]:
    """Fine-tune by defaults and return the scores.

    Args:
        task: One of TASKS.
        start: One of STARTS.
        model: Folder or name of the shipped encoder.
        seed: The seed of the training.
        rate: The learning rate. If None, it is the default.
    """
    kind, split, metric = TASKS[task]
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        initial = start_of(start, model, Path(scratch))
        assignments = [f"train.seed={seed}"]
        if rate is not None:
            assignments.append(f"train.optimizer.lr={rate}")
        done = finetune(kind, data_of(task), Path(scratch) / "run", model=initial, assignments=assignments)
        splits = {name: result["numbers"] for name, result in done.results["splits"].items()}
        settings = done.results["settings"]["train"]
        baseline = done.results.get("baseline")
    return {
        "task": task,
        "start": start,
        "seed": seed,
        "split": split,
        metric: round(100 * splits[split][metric], 2),
        "numbers": {name: value for name, value in splits[split].items() if isinstance(value, float)},
        "dev": splits.get("dev", {}).get(metric),
        "baseline": baseline,
        "epochs": settings["epochs"],
        "max_steps": settings["max_steps"],
        "batch": settings["batch_size"],
        "rate": settings["optimizer"]["lr"],
        "minutes": round((time.monotonic() - start_time) / 60, 1),
    }


def best_rate(task: str, model: str) -> float:
    """Return the learning rate of RATES with which random weights are best on dev, with seed 1."""
    return max(RATES, key=lambda rate: scored(task, "random", model, 1, rate)["dev"])


def fill(model: str) -> list[dict[str, Any]]:
    """Return the most likely words for the mask of each of SENTENCES."""
    engine = heedful.Engine(model, head="masked_lm")
    return [
        {"text": text, "words": [token["text"] for token in answer["masks"][0]["candidates"]]}
        for text, answer in zip(SENTENCES, engine(list(SENTENCES)), strict=True)
    ]


def vectors(start: str, model: str) -> dict[str, Any]:
    """Score the cosines of mean-pooled vectors, without fine-tuning, on pairs of sentences and on answers."""
    tasks = Path(os.environ["HEEDFUL_DATA"], "tasks")
    name = str(minilm()) if start == "minilm" else model
    loaded = heedful.load(name)
    engine = heedful.Engine(loaded) if start == "minilm" else None

    def encode(texts: list[str]) -> Tensor:
        embeddings = torch.from_numpy(engine.encode(texts)) if engine is not None else mean_vectors(loaded, texts)
        return torch.nn.functional.normalize(embeddings, dim=-1)

    record: dict[str, Any] = {"start": start}
    for task, (first_texts, second_texts, scores) in scored_pairs(tasks).items():
        cosines = (encode(first_texts) * encode(second_texts)).sum(-1).double().numpy()
        record[task] = round(100 * float(np.corrcoef(ranks(cosines), ranks(np.array(scores)))[0, 1]), 2)
    record["TREC-QA test MRR"] = round(100 * reciprocal_rank(tasks / "trecqa/test.csv", encode), 2)
    return record


def scored_pairs(tasks: Path) -> dict[str, tuple[list[str], list[str], list[float]]]:
    """Return the first sentences, the second sentences and the similarity scores of two test splits."""
    sts_lines = (tasks / "glue/STS-B/original/sts-test.tsv").read_text("utf-8").splitlines()
    sts = [line.split("\t") for line in sts_lines]
    sick_lines = (tasks / "sick2014/SICK_test_annotated.txt").read_text("utf-8").splitlines()[1:]  # without the header
    sick = [line.split("\t") for line in sick_lines]
    return {
        "STS-B test": ([row[5] for row in sts], [row[6] for row in sts], [float(row[4]) for row in sts]),
        "SICK test": ([row[1] for row in sick], [row[2] for row in sick], [float(row[3]) for row in sick]),
    }


def mean_vectors(loaded: heedful.ModelBundle, texts: list[str]) -> Tensor:
    """Return the mean of the last hidden states of each text."""
    assert loaded.tokenizer is not None
    vectors = []
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            batch = loaded.tokenizer.pack(texts[start : start + 64])
            vectors.append(pool(loaded.hidden_states(batch), batch, "mean"))
    return torch.cat(vectors)


def reciprocal_rank(path: Path, encode: Callable[[list[str]], Tensor]) -> float:
    """Return the mean of 1 / rank of the first right candidate, over questions with right and wrong candidates."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    questions: dict[str, list[tuple[str, int]]] = {}
    for row in rows:
        questions.setdefault(row["qtext"], []).append((row["atext"], int(row["label"])))
    first_ranks = []
    for question, candidates in questions.items():
        if len({label for _, label in candidates}) < 2:
            continue
        cosines = encode([text for text, _ in candidates]) @ encode([question])[0]
        order = cosines.argsort(descending=True).tolist()
        first_ranks.append(next(rank for rank, index in enumerate(order, start=1) if candidates[index][1]))
    return float(np.mean([1 / rank for rank in first_ranks]))


def main() -> None:
    """Measure, print each result and add it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--model", default=BUNDLED_ENCODER)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fill", action="store_true", help="fill in masks instead")
    parser.add_argument("--vectors", action="store_true", help="measure vectors without fine-tuning instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is not None:
        check_destination(options.out)
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"facts": facts()}
    if options.out is not None and options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))

    def add(section: str, entry: dict[str, Any]) -> None:
        """Add an entry to a section of the record, print it and write the record."""
        record.setdefault(section, []).append(entry)
        summary = {name: value for name, value in entry.items() if name not in ("numbers", "baseline")}
        print(json.dumps(summary), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    if options.fill:
        for filled in fill(options.model):
            add("fill", filled)
        return
    if options.vectors:
        for start in options.starts:
            add("vectors", vectors(start, options.model))
        return
    rates: dict[str, float] = {}
    for seed in options.seeds:
        for task in options.tasks:
            for start in options.starts:
                if start == "random" and task not in rates:
                    rates[task] = best_rate(task, options.model)
                rate = rates.get(task) if start == "random" else None
                add("runs", scored(task, start, options.model, seed, rate))


if __name__ == "__main__":
    main()

"""Measure methods for few labels on SST-2 and AG News, beside a bag of words and SetFit's recipe.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/few_labels.py --starts shipped minilm --output FILE

Each draw has the same number of training rows for each label. All arms of a draw train on the same rows, without a dev
split, and are scored on the same ROWS rows that none of them saw. The defaults of the methods, and the rule by which
"auto" chooses one, were fixed on other data: the sample `intents` and texts of IMDB. Each result is kept in a file, so
that a run that was stopped continues after it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import minilm
from finetune_data import load
from parts import Parts, add_parts_option
from report import check_destination, facts
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from heedful.bundled import BUNDLED_ENCODER, bundled_model
from heedful.data import LabelledExample
from heedful.runs.finetune.run import finetune

TASKS = ("SST-2", "AG News")
SINGLE = ("contrastive", "linear", "finetune")  # methods between which "auto" chooses
METHODS = (*SINGLE, "auto")
ARMS = (*METHODS, "words", "setfit")
ROWS = 2000  # scored rows, at most
PAIRS = 20  # pairs of each text with texts of its label, and as many with texts of other labels (num_iterations)

Rows = Sequence[LabelledExample]


def draw_rows(name: str, shots: int, draw: int) -> tuple[Rows, Rows]:
    """Return random training rows, `shots` of each label, and the rows that are scored."""
    data = load(name)
    generator = random.Random(f"{name} {shots} {draw}")
    rows = [row for row in data.train if isinstance(row, LabelledExample)]
    train: list[LabelledExample] = []
    for label in data.labels:
        train += generator.sample([row for row in rows if row.label == label], shots)
    held = [row for row in data.held if isinstance(row, LabelledExample)]
    return train, random.Random("scored").sample(held, min(ROWS, len(held)))


def plain(rows: Rows) -> list[dict[str, str]]:
    """Return the rows in the form that `finetune` takes."""
    return [{"text": row.text, "label": row.label} for row in rows]


def by_heedful(method: str, model: str, train: Rows, held: Rows, draw: int) -> dict[str, Any]:
    """Train by a method with the command's defaults, and score it.

    Training seconds of "auto" include the comparison of methods.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"method": method, "train.seed": draw, "eval_baseline": False, "data.dev_fraction": 0.0}
        data = {"train": plain(train), "test": plain(held)}
        results = finetune("classify", data, Path(folder) / "run", model=model, overrides=settings).results
    comparison = results.get("method_comparison", {"methods": {}, "method": method})
    compared_seconds = sum(compared["seconds"] for compared in comparison["methods"].values())
    return {
        "accuracy": results["splits"]["test"]["numbers"]["accuracy"],
        "training seconds": results["seeds"][0]["seconds"] + compared_seconds,
        "seconds": time.perf_counter() - start,
        "method": comparison["method"],
    }


def by_words(train: Rows, held: Rows) -> dict[str, Any]:
    """Train logistic regression over TF-IDF, and score it."""
    start = time.perf_counter()
    words = TfidfVectorizer(sublinear_tf=True).fit([row.text for row in train])
    model = LogisticRegression(C=10.0, max_iter=1000)
    model.fit(words.transform([row.text for row in train]), [row.label for row in train])
    return scored(model.predict(words.transform([row.text for row in held])), held, start)


def setfit_pairs(train: Rows, generator: random.Random) -> list[tuple[str, str, float]]:
    """Return pairs of texts in random order, with the score 1.0 if both have the same label, and otherwise 0.0."""
    pairs = []
    for row in train:
        positives = [second for second in train if second.label == row.label and second is not row] or [row]
        negatives = [second for second in train if second.label != row.label]
        for _ in range(PAIRS):
            pairs.append((row.text, generator.choice(positives).text, 1.0))
            pairs.append((row.text, generator.choice(negatives).text, 0.0))
    generator.shuffle(pairs)
    return pairs


def train_on_pairs(encoder: Any, pairs: Sequence[tuple[str, str, float]]) -> None:
    """Train an encoder of sentence-transformers with CosineSimilarityLoss: 10 % warm-up, then a linear fall."""
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    loss = CosineSimilarityLoss(encoder)

    def on_device(value: Any) -> Any:
        return value.to(encoder.device) if isinstance(value, torch.Tensor) else value

    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    batches = [pairs[first : first + 16] for first in range(0, len(pairs), 16)]
    warmup_steps = max(1, len(batches) // 10)
    encoder.train()
    for step, batch in enumerate(batches):
        warmup = (step + 1) / warmup_steps
        decay = (len(batches) - step) / max(1, len(batches) - warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = 2e-5 * min(warmup, decay)
        first_texts, second_texts, scores = zip(*batch, strict=True)
        features = [
            {name: on_device(value) for name, value in encoder.preprocess(list(texts)).items()}
            for texts in (first_texts, second_texts)
        ]
        optimizer.zero_grad()
        loss(features, torch.tensor(scores, device=encoder.device)).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
    encoder.eval()


def by_setfit(model: str, train: Rows, held: Rows, draw: int) -> dict[str, Any]:
    """Train by SetFit's recipe (Tunstall et al. 2022), and score it.

    The encoder is trained on pairs of texts; then logistic regression is fitted over its vectors.
    """
    from sentence_transformers import SentenceTransformer

    start = time.perf_counter()
    torch.manual_seed(draw)
    encoder = SentenceTransformer(model).float()  # on a GPU if there is one
    train_on_pairs(encoder, setfit_pairs(train, random.Random(draw)))
    head = LogisticRegression(max_iter=1000)
    head.fit(encoder.encode([row.text for row in train]), [row.label for row in train])
    training_seconds = time.perf_counter() - start
    result = scored(head.predict(encoder.encode([row.text for row in held])), held, start)
    return result | {"training seconds": training_seconds}


def scored(predicted: Sequence[str], held: Rows, start: float) -> dict[str, Any]:
    """Return the accuracy, and the seconds since `start`."""
    accuracy = float(np.mean(np.array(predicted) == np.array([row.label for row in held])))
    return {"accuracy": accuracy, "seconds": time.perf_counter() - start}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard deviation of each arm's accuracy over the draws, in percent, and its median times."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], str(run["shots"]), run["start"], run["arm"]), []).append(run)
    rows = []
    for (task, shots, start, arm), group in groups.items():
        accuracies = [100 * run["accuracy"] for run in group]
        rows.append(
            {
                "task": task,
                "shots": int(shots),
                "start": start,
                "arm": arm,
                "draws": len(group),
                "mean": round(statistics.fmean(accuracies), 2),
                "std": round(statistics.stdev(accuracies), 2) if len(group) > 1 else None,
                "median seconds": round(statistics.median(run["seconds"] for run in group), 1),
                "median training seconds": round(
                    statistics.median(run.get("training seconds", run["seconds"]) for run in group), 1
                ),
            }
        )
    return rows


def regrets(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many points the mean of "auto" is below that of the best single method, for each group of draws.

    Args:
        rows: The summary of the runs. Groups that lack "auto", or a draw of a method, are left out.
        runs: The runs, with the method that "auto" chose in each draw.
    """
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["shots"], row["start"]), {})[row["arm"]] = row
    found_regrets = []
    for (task, shots, start), arms in groups.items():
        if not {*METHODS} <= {*arms} or len({arms[method]["draws"] for method in METHODS}) > 1:
            continue
        best = max(SINGLE, key=lambda method: arms[method]["mean"])
        key = {"task": task, "shots": shots, "start": start}
        choices = [run["method"] for run in runs if run["arm"] == "auto" and key.items() <= run.items()]
        regret = round(arms[best]["mean"] - arms["auto"]["mean"], 2)
        found_regrets.append(key | {"best method": best, "regret": regret, "chosen": dict(Counter(choices))})
    return found_regrets


def measure(arm: str, model: str, train: Rows, held: Rows, draw: int) -> dict[str, Any]:
    """Train one of ARMS and return its accuracy and its time."""
    if arm in METHODS:
        return by_heedful(arm, model, train, held, draw)
    if arm == "words":
        return by_words(train, held)
    return by_setfit(folder_of(model), train, held, draw)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each arm on each draw; write the record again after each result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--starts", nargs="+", choices=("shipped", "minilm"), default=["shipped"])
    parser.add_argument("--shots", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, required=True)
    add_parts_option(parser, "few-labels")
    options = parser.parse_args(arguments)
    check_destination(options.output)
    parts = Parts(options.parts)
    record: dict[str, Any] = {"facts": facts(), "runs": []}
    models: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
    for draw in options.draws:
        for task in options.tasks:
            for shots in options.shots:
                train, held = draw_rows(task, shots, draw)
                for start in options.starts:
                    for arm in options.arms:
                        result = parts.result(
                            f"{task}, {shots} a label, draw {draw}, {start}, {arm}",
                            partial(measure, arm, models[start](), train, held, draw),
                        )
                        run = {"task": task, "shots": shots, "draw": draw, "start": start, "arm": arm} | result
                        print(json.dumps(run), flush=True)
                        record["runs"].append(run)
                        record["commits"] = sorted(parts.commits)
                        record["summary"] = summary(record["runs"])
                        record["regret"] = regrets(record["summary"], record["runs"])
                        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def folder_of(model: str) -> str:
    """Return the folder of a model, which may be a folder or the name of the bundled encoder."""
    return str(bundled_model(model) or model)


if __name__ == "__main__":
    main()

"""Methods for few labels on SST-2 and AG News, beside a bag of words and SetFit's recipe in sentence-transformers.

HEEDFUL_DATA=folder OMP_NUM_THREADS=2 python benchmarks/few_labels.py --shots 8 16 64 --draws 1 2 3 4 5 --output FILE

Each draw has the same number of training rows for each label. All arms of a draw train on the same rows and are scored
on the same ROWS rows that none of them saw. The defaults of the methods were fixed on other data: the sample `intents`
and texts of IMDB.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import minilm
from finetune_data import load
from report import check_destination, facts
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from heedful.bundled import BUNDLED_ENCODER, bundled_model
from heedful.data import LabelledExample
from heedful.runs.finetune.run import finetune

TASKS = ("SST-2", "AG News")
METHODS = ("contrastive", "linear", "finetune", "auto")
ARMS = (*METHODS, "words", "setfit")
ROWS = 2000  # scored rows, at most
PAIRS = 20  # of each text with texts of its label, and with texts of other labels: SetFit's num_iterations

Rows = Sequence[LabelledExample]


def drawn(name: str, shots: int, draw: int) -> tuple[Rows, Rows]:
    """Return random training rows, `shots` of each label, and the rows that are scored."""
    data = load(name)
    stream = random.Random(f"{name} {shots} {draw}")
    rows = [row for row in data.train if isinstance(row, LabelledExample)]
    train = [row for label in data.labels for row in stream.sample([r for r in rows if r.label == label], shots)]
    held = [row for row in data.held if isinstance(row, LabelledExample)]
    return train, random.Random("scored").sample(held, min(ROWS, len(held)))


def plain(rows: Rows) -> list[dict[str, str]]:
    """Return rows as `finetune` takes them."""
    return [{"text": row.text, "label": row.label} for row in rows]


def by_heedful(method: str, model: str, train: Rows, held: Rows, draw: int) -> dict[str, Any]:
    """Train by a method with the command's defaults; seconds include the comparison of "auto", not the scoring."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"method": method, "train.seed": draw, "eval_baseline": False}
        data = {"train": plain(train), "test": plain(held)}
        if method == "finetune":
            settings["data.dev_fraction"] = 0.0
        results = finetune("classify", data, Path(folder) / "run", model=model, overrides=settings).results
    compared = results.get("method_comparison", {"methods": {}, "method": method})
    return {
        "accuracy": results["splits"]["test"]["numbers"]["accuracy"],
        "training seconds": results["seeds"][0]["seconds"] + sum(m["seconds"] for m in compared["methods"].values()),
        "seconds": time.perf_counter() - began,
        "method": compared["method"],
    }


def by_words(train: Rows, held: Rows) -> dict[str, Any]:
    """TF-IDF with logistic regression."""
    began = time.perf_counter()
    words = TfidfVectorizer(sublinear_tf=True).fit([row.text for row in train])
    model = LogisticRegression(C=10.0, max_iter=1000)
    model.fit(words.transform([row.text for row in train]), [row.label for row in train])
    return scored(model.predict(words.transform([row.text for row in held])), held, began)


def by_setfit(model: str, train: Rows, held: Rows, draw: int) -> dict[str, Any]:
    """SetFit's recipe (Tunstall et al. 2022): pairs of texts by CosineSimilarityLoss, then logistic regression."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    began = time.perf_counter()
    torch.manual_seed(draw)
    stream = random.Random(draw)
    encoder = SentenceTransformer(model).float()  # on a GPU where there is one
    pairs = []
    for row in train:
        alike = [other for other in train if other.label == row.label and other is not row] or [row]
        unlike = [other for other in train if other.label != row.label]
        for _ in range(PAIRS):
            pairs += [(row.text, stream.choice(alike).text, 1.0), (row.text, stream.choice(unlike).text, 0.0)]
    stream.shuffle(pairs)
    loss = CosineSimilarityLoss(encoder)

    def on_device(value: Any) -> Any:
        return value.to(encoder.device) if isinstance(value, torch.Tensor) else value

    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    batches = [pairs[start : start + 16] for start in range(0, len(pairs), 16)]
    warmup = max(1, len(batches) // 10)
    encoder.train()
    for step, batch in enumerate(batches):
        rate = min((step + 1) / warmup, (len(batches) - step) / max(1, len(batches) - warmup))
        for group in optimizer.param_groups:
            group["lr"] = 2e-5 * rate
        features = [encoder.preprocess(list(texts)) for texts in list(zip(*batch, strict=True))[:2]]
        optimizer.zero_grad()
        features = [{name: on_device(value) for name, value in part.items()} for part in features]
        loss(features, torch.tensor([score for _, _, score in batch], device=encoder.device)).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
    encoder.eval()
    head = LogisticRegression(max_iter=1000)
    head.fit(encoder.encode([row.text for row in train]), [row.label for row in train])
    trained = time.perf_counter() - began
    result = scored(head.predict(encoder.encode([row.text for row in held])), held, began)
    return result | {"training seconds": trained}


def scored(predicted: Sequence[str], held: Rows, began: float) -> dict[str, Any]:
    """Return the accuracy, and the seconds since `began`."""
    right = float(np.mean(np.array(predicted) == np.array([row.label for row in held])))
    return {"accuracy": right, "seconds": time.perf_counter() - began}


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard deviation of each arm's accuracy over the draws, in percent, and its median time."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], str(run["shots"]), run["start"], run["arm"]), []).append(run)
    rows = []
    for (task, shots, start, arm), group in groups.items():
        accuracies = [100 * run["accuracy"] for run in group]
        row = {
            "task": task, "shots": int(shots), "start": start, "arm": arm, "draws": len(group),
            "mean": round(statistics.fmean(accuracies), 2),
            "std": round(statistics.stdev(accuracies), 2) if len(group) > 1 else None,
            "median seconds": round(statistics.median(run["seconds"] for run in group), 1),
        }  # fmt: skip
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each arm on each draw, and add it to the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--starts", nargs="+", choices=("shipped", "minilm"), default=["shipped"])
    parser.add_argument("--shots", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    check_destination(options.output)
    record: dict[str, Any] = {"facts": facts(), "runs": []}
    if options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    models: dict[str, Callable[[], str]] = {"shipped": lambda: BUNDLED_ENCODER, "minilm": minilm}
    for draw in options.draws:
        for task in options.tasks:
            for shots in options.shots:
                train, held = drawn(task, shots, draw)
                for start in options.starts:
                    model = models[start]()
                    for arm in options.arms:
                        if arm in METHODS:
                            result = by_heedful(arm, model, train, held, draw)
                        elif arm == "words":
                            result = by_words(train, held)
                        else:
                            result = by_setfit(folder_of(model), train, held, draw)
                        run = {"task": task, "shots": shots, "draw": draw, "start": start, "arm": arm} | result
                        print(json.dumps(run), flush=True)
                        record["runs"].append(run)
                        record["summary"] = summary(record["runs"])
                        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def folder_of(model: str) -> str:
    """Return the folder of a model, also of the encoder that ships."""
    return str(bundled_model(model) or model)


if __name__ == "__main__":
    main()

"""What the default encoder is worth: fine-tuned by defaults, beside its own shape at random and beside MiniLM.

HEEDFUL_DATA=folder python benchmarks/encoder.py --tasks SST-2 MRPC STS-B CoNLL-2003 --out results/encoder.json
HEEDFUL_DATA=folder python benchmarks/encoder.py --fill
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engines import minilm
from report import facts

import heedful
from heedful.checkpoint import create, save
from heedful.runs.finetune import finetune
from heedful.shipped import ENCODER

TASKS = {  # the kind of task, where its data lie, and the split and number that count
    "SST-2": ("classify", "glue/SST-2", "dev", "accuracy"),
    "MRPC": ("classify", "glue/MRPC", "dev", "accuracy"),
    "STS-B": ("regress", "glue/STS-B", "dev", "pearson"),
    "CoNLL-2003": ("tag", "conll2003", "test", "f1"),
}
STARTS = ("shipped", "random", "minilm")
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
    """A folder, or a name, to start from; a random one is drawn into the folder."""
    if name == "minilm":
        return str(minilm())
    if name == "shipped":
        return model
    config = heedful.load(model)
    drawn = create(config.config, config.tokenizer, seed=1)
    save(drawn, folder / "random")
    return str(folder / "random")


def scored(task: str, start: str, model: str, seed: int) -> dict[str, Any]:
    """One fine-tuning by defaults."""
    kind, place, split, main = TASKS[task]
    data = Path(os.environ["HEEDFUL_DATA"], "tasks", place)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = start_of(start, model, Path(scratch))
        done = finetune(kind, data, Path(scratch) / "run", model=found, assignments=[f"train.seed={seed}"])
        numbers = done.results["splits"][split]["numbers"]
        settings = done.results["settings"]["train"]
    return {
        "task": task,
        "start": start,
        "seed": seed,
        "split": split,
        main: round(100 * numbers[main], 2),
        "numbers": {name: value for name, value in numbers.items() if isinstance(value, float)},
        "length": settings["length"],
        "batch": settings["batch"],
        "rate": settings["optimiser"]["rate"],
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def fill(model: str) -> list[dict[str, Any]]:
    """The five most likely words for each of the sentences."""
    engine = heedful.Engine(model, head="masked")
    return [
        {"text": text, "words": [each["text"] for each in answer["masks"][0]["tokens"]]}
        for text, answer in zip(SENTENCES, engine(list(SENTENCES)), strict=True)
    ]


def main() -> None:
    """Measure, and add to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--model", default=ENCODER)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fill", action="store_true", help="fill in masks instead")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.fill:
        for each in fill(given.model):
            print(f"{each['text']}  {', '.join(each['words'])}")
        return
    runs: list[dict[str, Any]] = []
    for seed in given.seeds:
        for task in given.tasks:
            for start in given.starts:
                runs.append(scored(task, start, given.model, seed))
                print(json.dumps({name: value for name, value in runs[-1].items() if name != "numbers"}), flush=True)
                if given.out is not None:
                    given.out.parent.mkdir(parents=True, exist_ok=True)
                    given.out.write_text(json.dumps({"facts": facts(), "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()

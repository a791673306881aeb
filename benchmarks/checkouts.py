"""Compare the speed of this checkout with that of another one, such as a clone of an older commit.

    python benchmarks/checkouts.py BEFORE [--rounds 15] [--only forward,text,training,first]

BEFORE is a checkout with an environment in .venv. Each arm runs in processes of both checkouts that take turns:

* `forward`: an `Engine` in float32 on 512 texts of 2 to 200 words.
* `text`: the same engine on one text of twelve words, 20 times.
* `training`: `heedful finetune classify` from the same model on the sample data, 60 steps; the seconds of the training.
* `first`: a new process from its start to the first answer.

Ratios are of speed, this checkout over the other one, in each round. The interval of the median is that of the sign
test (order statistics of the ratios, at least 95 %).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import comb
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import report
from harness import Arm, Bound, Measured, Prepared, alternate, serve

ROOT = Path(__file__).parents[1]
ARMS = ("forward", "text", "training", "first")
WORDS = ("library", "opens", "nine", "lends", "saws", "drills", "ladders", "books", "maps", "members", "return", "late")
STEPS = 60  # training steps


def texts(count: int, longest: int, seed: int) -> list[str]:
    """Make random texts of 2 to `longest` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(2, longest))) for _ in range(count)]


def prepare(name: str, model: str, data: str, old: bool) -> Prepared:
    """Prepare an arm in a process of the checkout that it measures.

    Args:
        name: The name of the arm, one of ARMS.
        model: Folder of the model.
        data: Folder of the training data.
        old: Whether the checkout is BEFORE, whose command line has other options.
    """
    import heedful

    root = Path(sys.executable).parents[2]  # without resolving .venv/bin/python, which is a link
    if not Path(heedful.__file__).is_relative_to(root):
        raise SystemExit(f"{heedful.__file__} is not of the checkout {root}: unset PYTHONPATH")
    match name:
        case "training":
            return prepare_training(model, data, old)
        case "first":
            return prepare_first_answer(model)
        case _:
            return prepare_engine(name, heedful.Engine(model))


def prepare_engine(name: str, engine: Any) -> Prepared:
    """Prepare the arm `forward` or `text`, which answers texts with an engine."""
    all_at_once = name == "forward"
    inputs = texts(512, 200, seed=1) if all_at_once else texts(1, 12, seed=2) * 20

    def run() -> Any:
        return engine(inputs) if all_at_once else [engine([text])[0] for text in inputs]

    return Prepared(
        run=run,
        sample=lambda answers: [[answer["probability"] for answer in answers[:64]]],
        tokens=sum(len(text.split()) for text in inputs),
        sequences=len(inputs),
        inputs=name,
        settings=f"{len(inputs)} texts",
    )


def prepare_training(model: str, data: str, old: bool) -> Prepared:
    """Prepare the arm `training`; its seconds are those of the training alone, as the command reports them."""
    output = Path(tempfile.mkdtemp()) / "run"
    if old:
        options = ["--set", "train.length.kind=steps", "--set", f"train.length.count={STEPS}"]
        options += ["--set", f"start.model={model}", "--out", str(output)]
    else:
        options = ["--max-steps", str(STEPS), "--model", model, "--output", str(output), "--eval_baseline=false"]
    heedful_command = str(Path(sys.executable).parent / "heedful")

    def train() -> float:
        shutil.rmtree(output, ignore_errors=True)
        command = [heedful_command, "finetune", "classify", data, *options, "--json"]
        subprocess.run(command, check=True, capture_output=True)
        return float(json.loads((output / "results.json").read_text())["seeds"][0]["seconds"])

    return Prepared(
        run=train,
        sample=lambda seconds: [[1.0]],  # trained weights of two checkouts may differ, and are not compared
        tokens=STEPS,
        sequences=1,
        inputs="training",
        settings=f"{STEPS} steps",
        more=lambda seconds: {"seconds": seconds},
    )


def prepare_first_answer(model: str) -> Prepared:
    """Prepare the arm `first`, which starts a process that answers one text."""
    code = f"import heedful; heedful.Engine({model!r})(['Where is the saw?'])"
    return Prepared(
        run=lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True),
        sample=lambda process: [[1.0]],
        tokens=1,
        sequences=1,
        inputs="first",
        settings="a new process",
    )


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median from order statistics, with a coverage of at least `level`.

    With few values, the interval from the least to the greatest value may have a smaller coverage. See David and
    Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    # tails[k]: the probability that at most k of the values are below the median
    tails = list(accumulate(comb(count, k) / 2**count for k in range(count + 1)))
    below = max((k for k in range(count // 2) if 2 * tails[k] <= 1 - level), default=None)
    return (ordered[0], ordered[-1]) if below is None else (ordered[below + 1], ordered[count - 2 - below])


def ratios(measured: Measured) -> list[float]:
    """Return the speed of this checkout divided by the speed of the other one, in each round."""
    before, now = (measured.turns[arm.name] for arm in measured.arms)
    return [truediv(old["seconds"], new["seconds"]) for old, new in zip(before, now, strict=True)]


def make_model(folder: str) -> tuple[str, str]:
    """Fine-tune a model with this checkout; return the folders of the model and of its training data."""
    heedful_command = str(ROOT / ".venv" / "bin" / "heedful")
    intents, run = f"{folder}/intents", f"{folder}/run"
    subprocess.run([heedful_command, "recipe", "cp", "intents"], cwd=folder, check=True, capture_output=True)
    train = [heedful_command, "finetune", "classify", intents, "--output", run, "--max-steps", "20"]
    subprocess.run(train, check=True, capture_output=True)
    # this checkout writes heedful.json for itself: the other one may not know it
    (Path(run) / "model" / "heedful.json").unlink(missing_ok=True)
    return f"{run}/model", intents


def arms_of(name: str, checkouts: Mapping[str, Path], model: str, data: str) -> list[Arm]:
    """Return an arm in the processes of both checkouts."""
    arms = []
    for checkout_name, checkout in checkouts.items():
        command = (str(checkout / ".venv/bin/python"), __file__, "--arm", name, model, data, checkout_name)
        bound = Bound(difference=1e-5, cosine=0.9999)
        arms.append(Arm(name=checkout_name, command=command, is_heedful=checkout_name == "now", bound=bound))
    return arms


def main() -> None:
    """Measure all arms and write the record."""
    os.environ.pop("PYTHONPATH", None)  # each process imports the heedful of its own checkout
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(ARMS))
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    commits = {name: report.clean_commit(checkout) for name, checkout in checkouts.items()}
    data: dict[str, Any] = {"machine": report.facts(), "commits": commits, "rounds": options.rounds, "arms": {}}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        model, intents = make_model(temporary)
        for name in options.only.split(","):
            measured = alternate(arms_of(name, checkouts, model, intents), options.rounds)
            values = ratios(measured)
            low, high = interval(values)
            seconds = {
                checkout: median(turn["seconds"] for turn in turns) for checkout, turns in measured.turns.items()
            }
            data["arms"][name] = {
                "ratio": median(values),
                "interval": [low, high],
                "seconds": seconds,
                "ratios": values,
                "others": measured.others,
            }
            speed = f"{median(values):.3f} ({low:.3f}–{high:.3f})"
            rows.append([name, f"{seconds['before']:.4f}", f"{seconds['now']:.4f}", speed])
            print(name, rows[-1], f"others {measured.others:.0%}", flush=True)
    table = report.grid(["arm", "before, s", "now, s", "speed, now over before (95 % interval)"], rows)
    print(report.write("checkouts", __doc__ or "", [table], data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        _, _, name, model, data, checkout_name = sys.argv
        serve(lambda: prepare(name, model, data, checkout_name == "before"))
    else:
        main()

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
from collections.abc import Sequence
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
STEPS = 60  # of training


def texts(count: int, longest: int, seed: int) -> list[str]:
    """Make random texts of 2 to `longest` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(2, longest))) for _ in range(count)]


def prepare(name: str, model: str, data: str, old: bool) -> Prepared:
    """Prepare an arm in a process of the checkout that it measures.

    Args:
        old: Whether the checkout is BEFORE, whose command line has other options.
    """
    import heedful

    root = Path(sys.executable).parents[2]  # without resolving .venv/bin/python, which is a link
    if not Path(heedful.__file__).is_relative_to(root):
        raise SystemExit(f"{heedful.__file__} is not of the checkout {root}: unset PYTHONPATH")
    if name in ("forward", "text"):
        engine = heedful.Engine(model)
        at_once = name == "forward"
        inputs = texts(512, 200, seed=1) if at_once else texts(1, 12, seed=2) * 20

        def run() -> Any:
            return engine(inputs) if at_once else [engine([text])[0] for text in inputs]

        tokens = sum(len(text.split()) for text in inputs)
        return Prepared(
            run=run,
            sample=lambda answers: [[answer["probability"] for answer in answers[:64]]],
            tokens=tokens,
            sequences=len(inputs),
            inputs=name,
            settings=f"{len(inputs)} texts",
        )
    folder = Path(tempfile.mkdtemp())

    def train() -> float:
        shutil.rmtree(folder / "run", ignore_errors=True)
        output = str(folder / "run")
        if old:
            options = ["--set", "train.length.kind=steps", "--set", f"train.length.count={STEPS}"]
            options += ["--set", f"start.model={model}", "--out", output]
        else:
            options = ["--max-steps", str(STEPS), "--model", model, "--output", output, "--eval_baseline=false"]
        heedful = str(Path(sys.executable).parent / "heedful")
        command = [heedful, "finetune", "classify", data, *options, "--json"]
        subprocess.run(command, check=True, capture_output=True)
        return float(json.loads((folder / "run" / "results.json").read_text())["seeds"][0]["seconds"])

    def first() -> float:
        code = f"import heedful; heedful.Engine({model!r})(['Where is the saw?'])"
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        return 0.0

    if name == "training":
        return Prepared(
            run=train,
            sample=lambda seconds: [[1.0]],
            tokens=STEPS,
            sequences=1,
            inputs=name,
            settings=f"{STEPS} steps",
            more=lambda seconds: {"seconds": seconds},
        )
    return Prepared(
        run=first,
        sample=lambda seconds: [[1.0]],
        tokens=1,
        sequences=1,
        inputs=name,
        settings="a new process",
    )


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median from order statistics; it covers at least `level`.

    See David and Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered, count = sorted(values), len(values)
    tails = list(accumulate(comb(count, k) / 2**count for k in range(count + 1)))
    outside = max((k for k in range(count // 2) if 2 * tails[k] <= 1 - level), default=-1)
    return (ordered[outside + 1], ordered[count - 2 - outside]) if outside >= 0 else (ordered[0], ordered[-1])


def ratios(measured: Measured) -> list[float]:
    """Return the speed of this checkout divided by the speed of the other one, in each round."""
    before, now = (measured.turns[arm.name] for arm in measured.arms)
    return [truediv(old["seconds"], new["seconds"]) for old, new in zip(before, now, strict=True)]


def main() -> None:
    """Measure all arms and write the record."""
    os.environ.pop("PYTHONPATH", None)  # each process imports the heedful of its own checkout
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("before", type=Path)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--only", default=",".join(ARMS))
    arguments = options.parse_args()
    checkouts = {"before": arguments.before.resolve(), "now": ROOT}
    commits = {name: report.clean_commit(checkout) for name, checkout in checkouts.items()}
    data: dict[str, Any] = {"machine": report.facts(), "commits": commits, "rounds": arguments.rounds, "arms": {}}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        heedful = str(ROOT / ".venv" / "bin" / "heedful")
        intents, model = f"{temporary}/intents", f"{temporary}/run"
        subprocess.run([heedful, "recipe", "cp", "intents"], cwd=temporary, check=True, capture_output=True)
        train = [heedful, "finetune", "classify", intents, "--output", model, "--max-steps", "20"]
        subprocess.run(train, check=True, capture_output=True)
        (Path(model) / "model" / "heedful.json").unlink(missing_ok=True)  # written by this checkout for itself
        for name in arguments.only.split(","):
            arms = [
                Arm(
                    name=which,
                    command=(
                        str(checkout / ".venv/bin/python"),
                        __file__,
                        "--arm",
                        name,
                        f"{model}/model",
                        intents,
                        which,
                    ),
                    is_heedful=which == "now",
                    bound=Bound(difference=1e-5, cosine=0.9999),
                )
                for which, checkout in checkouts.items()
            ]
            measured = alternate(arms, arguments.rounds)
            values = ratios(measured)
            low, high = interval(values)
            seconds = {which: median(turn["seconds"] for turn in turns) for which, turns in measured.turns.items()}
            data["arms"][name] = {
                "ratio": median(values),
                "interval": [low, high],
                "seconds": seconds,
                "ratios": values,
                "others": measured.others,
            }
            rows.append(
                [
                    name,
                    *(f"{seconds[which]:.4f}" for which in checkouts),
                    f"{median(values):.3f} ({low:.3f}–{high:.3f})",
                ]
            )
            print(name, rows[-1], f"others {measured.others:.0%}", flush=True)
    table = report.grid(["arm", "before, s", "now, s", "speed, now over before (95 % interval)"], rows)
    print(report.write("checkouts", __doc__ or "", [table], data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        _, _, name, model, data, which = sys.argv
        serve(lambda: prepare(name, model, data, which == "before"))
    else:
        main()

"""How fast tokens are written: a packed key-value cache against transformers' generate, greedily, GPT-2's shape."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lengths
from engines import random_shape
from harness import Arm, Bound, Prepared, Values, measure, serve
from report import RESULTS, write

ABOUT = """Tokens written greedily after prompts of random ids, by GPT-2's shape (124,439,808 parameters) with random
weights; nothing ends early. Each arm is a process of its own, one runs at a time, and ratios are of written tokens a
second, prompts included in the time, taken in each round, to the fastest peer of that round. transformers takes the
prompts of a batch together, padded on the left, with its own cache. Before timing the log-probabilities of the first
written token are compared with the first arm's, at {ids} ids of each prompt."""
BOUNDS = {"float32": Bound(difference=1e-4, cosine=0.99999), "bfloat16": Bound(difference=0.05, cosine=0.999)}
IDS, WRITTEN, QUICK = 64, 64, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What an arm's process is told."""

    ours: bool
    precision: str
    prompts: int
    written: int
    folder: str


def prepare(job: Job) -> Prepared:
    """An arm, ready: a round writes after all prompts at once."""
    given = [each[:48] for each in lengths.sequences("SHORT", job.prompts)]
    return (ours if job.ours else theirs)(job, given)


def ours(job: Job, given: list[list[int]]) -> Prepared:
    """Heedful."""
    import torch

    import heedful
    from heedful.model.decode import Greedy, generate, stream

    loaded = heedful.load(job.folder, dtype=getattr(torch, job.precision))
    head: Any = loaded.head
    prompts = heedful.Packed.of(given)

    def sample(found: Any) -> Values:
        step = next(stream(loaded.model, head, prompts, Greedy(), max_new_tokens=1, stop=[], distribution=True))
        assert step.distribution is not None and all(len(each[0].tokens) == job.written for each in found)
        rows: Values = step.distribution[:, :IDS].tolist()
        return rows

    return Prepared(
        run=lambda: generate(loaded.model, head, prompts, Greedy(), max_new_tokens=job.written, stop=[]),
        sample=sample,
        tokens=job.written * len(given),
        sequences=len(given),
        inputs=lengths.digest(given),
        settings=f"one packed batch, {torch.get_num_threads()} threads",
    )


def theirs(job: Job, given: list[list[int]]) -> Prepared:
    """transformers."""
    import torch
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = GPT2LMHeadModel.from_pretrained(
        job.folder, dtype=getattr(torch, job.precision), attn_implementation="sdpa"
    )
    model.eval()
    model.generation_config.eos_token_id = None
    longest = max(map(len, given))
    tokens = torch.tensor([[*[0] * (longest - len(each)), *each] for each in given])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in given])

    def run() -> Any:
        with torch.inference_mode():
            return model.generate(
                tokens,
                attention_mask=mask,
                min_new_tokens=job.written,
                max_new_tokens=job.written,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )

    def sample(found: Any) -> Values:
        assert found.shape[1] == longest + job.written
        rows: Values = []
        with torch.inference_mode():
            for each in given:
                scores = model(input_ids=torch.tensor([each])).logits[0, -1].float().log_softmax(-1)
                rows.append(scores[:IDS].tolist())
        return rows

    return Prepared(
        run=run,
        sample=sample,
        tokens=job.written * len(given),
        sequences=len(given),
        inputs=lengths.digest(given),
        settings=f"generate, one batch padded on the left, {torch.get_num_threads()} threads",
    )


def arms(folder: str, prompts: int, written: int) -> list[Arm]:
    """Every arm; the first is the reference, and what people run."""
    first = Job(ours=False, precision="float32", prompts=prompts, written=written, folder=folder)
    jobs = {
        "transformers float32": first,
        "transformers bfloat16": replace(first, precision="bfloat16"),
        "heedful float32": replace(first, ours=True),
        "heedful bfloat16": replace(first, ours=True, precision="bfloat16"),
    }
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            ours=job.ours,
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
    ]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help=f"rehearse: {QUICK} tokens after one prompt, no record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        return serve(lambda: prepare(Job(**json.loads(given.arm))))
    if given.rounds < 1 or (given.rounds < 5 and not given.quick):
        parser.error(f"--rounds {given.rounds} are too few to say anything: give at least 5")
    tables = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_shape("gpt2", temporary)
        for prompts in [1] if given.quick else given.prompts:
            title = f"{prompts} prompt{'s' * (prompts > 1)}"
            tables.append(measure(title, arms(folder, prompts, QUICK if given.quick else WRITTEN), given.rounds))
            print(tables[-1].text(), flush=True)
    if given.output or not given.quick:
        texts, values = [table.text() for table in tables], [asdict(table) for table in tables]
        print(write("decoding", ABOUT.format(ids=IDS), texts, values, given.output or RESULTS))


if __name__ == "__main__":
    main()

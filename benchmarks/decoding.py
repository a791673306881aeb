"""Measure how fast GPT-2's shape generates tokens greedily: a packed key-value cache against transformers' generate."""

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
from report import RESULTS, check_destination, write

ABOUT = """Tokens written greedily after prompts of random ids, by GPT-2's shape (124,439,808 parameters) with random
weights; nothing ends early. Each arm is a process of its own, one runs at a time, and ratios are of written tokens a
second, prompts included in the time, taken in each round, to the fastest peer of that round. transformers takes the
prompts of a batch together, padded on the left, with its own cache. Before timing the log-probabilities of the first
written token are compared with the first arm's, at {ids} ids of each prompt."""
BOUNDS = {"float32": Bound(difference=1e-4, cosine=0.99999), "bfloat16": Bound(difference=0.05, cosine=0.999)}
IDS = 64  # token ids whose log-probabilities are compared
WRITTEN = 64  # tokens after each prompt
QUICK = 6  # tokens of a rehearsal


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of an arm's process, which is sent as JSON on its command line."""

    is_heedful: bool
    precision: str
    prompts: int  # number of prompts
    written: int  # tokens after each prompt
    folder: str  # folder of the model


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm: a round generates after all prompts in one batch."""
    prompts = [sequence[:48] for sequence in lengths.sequences("SHORT", job.prompts)]
    return prepare_heedful(job, prompts) if job.is_heedful else prepare_transformers(job, prompts)


def prepare_heedful(job: Job, sequences: list[list[int]]) -> Prepared:
    """Prepare an arm of Heedful."""
    import torch

    import heedful
    from heedful.model.decode import Greedy, generate, stream

    loaded = heedful.load(job.folder, dtype=getattr(torch, job.precision))
    head: Any = loaded.head
    prompts = heedful.Packed.of(sequences)

    def sample(outputs: Any) -> Values:
        step = next(stream(loaded.model, head, prompts, Greedy(), max_new_tokens=1, stop=[], distribution=True))
        assert step.distribution is not None and all(len(output[0].tokens) == job.written for output in outputs)
        log_probs: Values = step.distribution[:, :IDS].tolist()
        return log_probs

    return Prepared(
        run=lambda: generate(loaded.model, head, prompts, Greedy(), max_new_tokens=job.written, stop=[]),
        sample=sample,
        tokens=job.written * len(sequences),
        sequences=len(sequences),
        inputs=lengths.digest(sequences),
        settings=f"one packed batch, {torch.get_num_threads()} threads",
    )


def prepare_transformers(job: Job, prompts: list[list[int]]) -> Prepared:
    """Prepare an arm of transformers."""
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
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

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

    def sample(outputs: Any) -> Values:
        assert outputs.shape[1] == longest + job.written
        log_probs: Values = []
        with torch.inference_mode():
            for prompt in prompts:
                logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
                log_probs.append(logits.float().log_softmax(-1)[:IDS].tolist())
        return log_probs

    return Prepared(
        run=run,
        sample=sample,
        tokens=job.written * len(prompts),
        sequences=len(prompts),
        inputs=lengths.digest(prompts),
        settings=f"generate, one batch padded on the left, {torch.get_num_threads()} threads",
    )


def arms(folder: str, prompts: int, written: int) -> list[Arm]:
    """Return all arms; the first is the reference."""
    first = Job(is_heedful=False, precision="float32", prompts=prompts, written=written, folder=folder)
    jobs = {
        "transformers float32": first,
        "transformers bfloat16": replace(first, precision="bfloat16"),
        "heedful float32": replace(first, is_heedful=True),
        "heedful bfloat16": replace(first, is_heedful=True, precision="bfloat16"),
    }
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.is_heedful,
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
    ]


def main() -> None:
    """Measure each number of prompts, print the tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help=f"rehearse: {QUICK} tokens after one prompt, no record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if options.rounds < 1 or (options.rounds < 5 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 5")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    tables = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = random_shape("gpt2", temporary)
        for prompts in [1] if options.quick else options.prompts:
            title = f"{prompts} prompt{'s' * (prompts > 1)}"
            tables.append(measure(title, arms(folder, prompts, QUICK if options.quick else WRITTEN), options.rounds))
            print(tables[-1].text(), flush=True)
    if options.output or not options.quick:
        texts, values = [table.text() for table in tables], [asdict(table) for table in tables]
        print(write("decoding", ABOUT.format(ids=IDS), texts, values, options.output or RESULTS))


if __name__ == "__main__":
    main()

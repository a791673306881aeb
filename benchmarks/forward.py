"""Measure how fast token ids become mean-pooled embeddings: packed rows against padded batches, without tokenising.

This script writes the records forward-SHAPE; encode.py uses its comparison of arms too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lengths
import numpy as np
import peers
from engines import BOUNDS, ENGINES, OURS, SIZES, Job, minilm, random_shape
from harness import MIN_PEER_COSINE, Arm, Prepared, Values, measure, serve
from numpy.typing import NDArray
from report import RESULTS, Spread, Table, check_destination, grid, write

ABOUT = """Hidden states of {shape}, averaged over each sequence, from lists of random token ids. Tokenising is not
counted; sorting, packing or padding, and restoring the order are. Each arm is a process of its own, one runs at a time,
and ratios are of real tokens a second, taken in each round, to the fastest peer of that round. Before timing {sample}
embeddings are compared with the first arm's: `difference` is the largest one over the scale, `cosine` the least, and
an arm beyond {float32.difference} and {float32.cosine} in float32, or {bfloat16.difference} and {bfloat16.cosine} in
bfloat16, or a cosine of {int8.cosine} in int8, stops the run. A peer whose cosine is below {least} is reported and
never the fastest peer; nor is OpenVINO on packed rows, which are ours. Arms in bfloat16, and ours in int8, are left out
where the processor has no instructions for them. Padded arms take the batch size of {sizes} that is fastest on the
whole input, but for the first, which is what people run: arrival order, batches of {usual}.{unmeasured}"""
COUNTS = {  # sequences of a round, which takes the slowest arm some seconds; sorting them by length saves time
    "minilm": {"SHORT": 512, "MIXED": 128, "LONG": 64},
    "base": {"SHORT": 128, "MIXED": 48, "LONG": 24},
    "albert": {"SHORT": 64, "MIXED": 24, "LONG": 12},
    "t5": {"SHORT": 64, "MIXED": 24, "LONG": 12},
    "deberta": {"SHORT": 64, "MIXED": 24, "LONG": 12},
}
SHAPES = {
    "minilm": "all-MiniLM-L6-v2",
    "base": "BERT-base's shape with random weights",
    "albert": "ALBERT-base's shape with random weights",
    "t5": "the shape of T5-base's encoder with random weights",
    "deberta": "DeBERTa-v3-base's shape with random weights",
}
USUAL = 32  # sequences of a batch in arrival order
SAMPLE = 16  # vectors of each arm that are compared with the first arm's
QUICK = 12  # sequences of a rehearsal


def prepare(job: Job) -> Prepared:
    """Prepare a job's arm: load its engine and draw its sequences."""
    run, settings = (ENGINES | peers.ENGINES)[job.engine](job)
    sequences = lengths.sequences(job.distribution, job.count)
    return prepared(lambda: run(sequences), sequences, settings)


def prepared(run: Callable[[], NDArray[np.float32]], sequences: Sequence[Sequence[int]], settings: str) -> Prepared:
    """Return the arm that computes a vector of each sequence of token ids.

    Args:
        run: Returns the vectors, [sequences, hidden size].
        sequences: The token ids.
        settings: The settings of the arm, as text.
    """
    indices = [index * len(sequences) // SAMPLE for index in range(SAMPLE)]

    def sample(vectors: Any) -> Values:
        values: Values = vectors[indices].tolist()
        return values

    return Prepared(
        run=run,
        sample=sample,
        tokens=sum(map(len, sequences)),
        sequences=len(sequences),
        inputs=lengths.digest(sequences),
        settings=settings,
    )


def compared(usual: Job, best: Job, models: Path, peers_available: Sequence[str]) -> dict[str, Job]:
    """Return all jobs by arm name; the first is the reference.

    Args:
        usual: The job of the reference, with a batch size.
        best: The same job, whose arm chooses the fastest batch size. All other jobs are made from it.
        models: The folder of the peers' models.
        peers_available: The names of the peers.
    """
    arrival = replace(best, order="arrival order")
    return {
        "transformers float32, arrival": replace(usual, order="arrival order"),
        "transformers float32, sorted": best,
        "transformers bfloat16, arrival": replace(arrival, precision="bfloat16"),
        "transformers bfloat16, sorted": replace(best, precision="bfloat16"),
        **peers.jobs(peers_available, models, best),
        **{f"heedful {precision}": replace(best, engine="packed", precision=precision) for precision in OURS},
    }


def arms(jobs: Mapping[str, Job]) -> list[Arm]:
    """Return the arms of the jobs whose precision this machine computes fast."""
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "packed",
            bound=BOUNDS[job.precision],
            stock=job.engine != "openvino rows",
        )
        for name, job in jobs.items()
        if fast_here(job)
    ]


def fast_here(job: Job) -> bool:
    """Return whether this machine has instructions for a job's precision; without them a round takes minutes."""
    from heedful.csrc import kernels
    from heedful.device import multiplies_bfloat16

    if job.precision == "int8" and job.engine == "packed":
        return (library := kernels()) is not None and library.has_int8
    return job.precision != "bfloat16" or multiplies_bfloat16()


def against(table: Table, jobs: Mapping[str, Job]) -> dict[str, dict[str, Spread]]:
    """Return how many times as fast each arm of Heedful is as the fastest arm of several groups.

    The result is by arm, then by group.
    """
    stock = [row.name for row in table.rows if not row.ours and not row.aside]
    groups = {
        "the fastest peer": stock,
        "the fastest but int8": [name for name in stock if jobs[name].precision != "int8"],
        "OpenVINO on our rows": [name for name, job in jobs.items() if job.engine == "openvino rows"],
        table.rows[0].name: [table.rows[0].name],
    }
    seconds = {row.name: row.seconds for row in table.rows}
    ratios: dict[str, dict[str, Spread]] = {}
    for row in table.rows:
        if row.ours:
            ratios[row.name] = {
                group: _ratio(row.seconds, [seconds[name] for name in names])
                for group, names in groups.items()
                if names
            }
    return ratios


def _ratio(seconds: Sequence[float], group_seconds: Sequence[Sequence[float]]) -> Spread:
    """Return how many times as fast an arm is in each round as the fastest arm of a group.

    Args:
        seconds: The arm's time of each round.
        group_seconds: The times of each round of all arms of the group.
    """
    rounds = zip(seconds, *group_seconds, strict=True)
    return Spread.of([min(others) / own for own, *others in rounds])


def text(ratios: Mapping[str, Mapping[str, Spread]]) -> str:
    """Format the ratios as Markdown."""
    columns = ["times as fast as", *next(iter(ratios.values()))]
    return grid(columns, [[name, *(spread.text() for spread in groups.values())] for name, groups in ratios.items()])


def record(
    shape: str,
    names: Sequence[str],
    precisions: Sequence[str],
    texts: Sequence[str],
    data: Any,
    unmeasured: str,
    folder: Path,
) -> Path:
    """Write the record and return its path."""
    about = ABOUT.format(
        shape=SHAPES[shape],
        sample=SAMPLE,
        sizes=", ".join(map(str, SIZES)),
        usual=USUAL,
        least=MIN_PEER_COSINE,
        unmeasured=unmeasured,
        **BOUNDS,
    )
    part = "" if set(names) == set(lengths.DISTRIBUTIONS) else "".join(f"-{name.lower()}" for name in names)
    part += "" if set(precisions) == set(BOUNDS) else "".join(f"-{precision}" for precision in precisions)
    return write(f"forward-{shape}{part}", about, texts, data, folder)


def main() -> None:
    """Measure each distribution, print its tables and write the record."""
    names = list(lengths.DISTRIBUTIONS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(COUNTS), default="minilm")
    parser.add_argument("--distributions", nargs="+", choices=names, default=names)
    parser.add_argument("--precisions", nargs="+", choices=BOUNDS, default=[*BOUNDS], help="of all but the first arm")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--sequences", type=int, help="sequences of a round; default: as in COUNTS")
    parser.add_argument("--quick", action="store_true", help=f"rehearse on {QUICK} sequences, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    peers.options(parser)
    options = parser.parse_args()
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm))))
    if options.rounds < 1 or (options.rounds < 5 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 5")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    texts, data = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = minilm() if options.shape == "minilm" else random_shape(options.shape, f"{temporary}/{options.shape}")
        models = (options.models or Path(temporary, "models")) / options.shape
        available, unmeasured = peers.make_models(options.shape, options.peers, folder, models)
        for name in options.distributions:
            count = QUICK if options.quick else options.sequences or COUNTS[options.shape][name]
            usual = Job(engine="padded", precision="float32", folder=folder, distribution=name, count=count, size=USUAL)
            jobs = compared(usual, usual if options.quick else replace(usual, size=None), models, available)
            reference = next(iter(jobs))
            jobs = {arm: job for arm, job in jobs.items() if arm == reference or job.precision in options.precisions}
            table = measure(name, arms(jobs), options.rounds)
            ratios = against(table, jobs)
            texts += [table.text(), text(ratios)]
            spreads = {
                arm: {group: asdict(spread) for group, spread in groups.items()} for arm, groups in ratios.items()
            }
            data.append(asdict(table) | {"times as fast as": spreads})
            print(*texts[-2:], sep="\n", flush=True)
    if options.output or not options.quick:
        output = options.output or RESULTS
        print(record(options.shape, options.distributions, options.precisions, texts, data, unmeasured, output))


if __name__ == "__main__":
    main()

"""How fast token ids become mean-pooled embeddings: packed rows against padded batches; tokenising is not counted."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import lengths
from engines import ENGINES, SIZES, Job, minilm, random_shape
from harness import Arm, Bound, Prepared, Values, measure, serve
from report import RESULTS, Table, write

ABOUT = """Hidden states of {shape}, averaged over each sequence, from lists of random token ids. Tokenising is not
counted; sorting, packing or padding, and restoring the order are. Each arm is a process of its own, one runs at a time,
and ratios are of real tokens a second, taken in each round, to the fastest peer of that round. Before timing {sample}
embeddings are compared with the first arm's: `difference` is the largest one over the scale, `cosine` the least, and
an arm beyond {float32.difference} and {float32.cosine} in float32, or {bfloat16.difference} and {bfloat16.cosine} in
bfloat16, stops the run. Padded arms take the batch size of {sizes} that is fastest on the whole input, but for the
first, which is what people run: arrival order, batches of {usual}."""
BOUNDS = {"float32": Bound(difference=1e-4, cosine=0.99999), "bfloat16": Bound(difference=0.05, cosine=0.999)}
COUNTS = {  # sequences in a round: some seconds for the slowest arm, and enough that sorting pays
    "minilm": {"SHORT": 512, "MIXED": 128, "LONG": 64},
    "base": {"SHORT": 128, "MIXED": 48, "LONG": 24},
    "albert": {"SHORT": 64, "MIXED": 24, "LONG": 12},
    "t5": {"SHORT": 64, "MIXED": 24, "LONG": 12},
}
SHAPES = {
    "minilm": "all-MiniLM-L6-v2",
    "base": "BERT-base's shape with random weights",
    "albert": "ALBERT-base's shape with random weights",
    "t5": "the shape of T5-base's encoder with random weights",
}
USUAL, SAMPLE, QUICK = 32, 16, 12


def prepare(job: Job) -> Prepared:
    """An arm, ready."""
    run, settings = ENGINES[job.engine](job)
    given = lengths.sequences(job.distribution, job.count)
    shown = [number * len(given) // SAMPLE for number in range(SAMPLE)]

    def sample(vectors: object) -> Values:
        values: Values = vectors[shown].tolist()  # type: ignore[index]
        return values

    return Prepared(
        run=lambda: run(given),
        sample=sample,
        tokens=sum(map(len, given)),
        sequences=len(given),
        inputs=lengths.digest(given),
        settings=settings,
    )


def arms(folder: str, distribution: str, count: int, *, quick: bool) -> list[Arm]:
    """Every arm; the first is the reference, and what people run."""
    padded = Job(
        engine="padded",
        precision="float32",
        distribution=distribution,
        count=count,
        folder=folder,
        size=USUAL if quick else None,
    )
    arrival, packed = replace(padded, order="arrival order"), replace(padded, engine="packed")
    jobs = {
        "transformers float32, arrival": replace(arrival, size=USUAL),
        "transformers float32, sorted": padded,
        "transformers bfloat16, arrival": replace(arrival, precision="bfloat16"),
        "transformers bfloat16, sorted": replace(padded, precision="bfloat16"),
        "heedful float32": packed,
        "heedful bfloat16": replace(packed, precision="bfloat16"),
    }
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--arm", json.dumps(asdict(job))),
            ours=job.engine == "packed",
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
    ]


def record(shape: str, tables: Sequence[Table], folder: Path) -> Path:
    """Write the results."""
    about = ABOUT.format(
        shape=SHAPES[shape],
        sample=SAMPLE,
        sizes=", ".join(map(str, SIZES)),
        usual=USUAL,
        **BOUNDS,
    )
    return write(
        f"forward-{shape}", about, [table.text() for table in tables], [asdict(table) for table in tables], folder
    )


def main() -> None:
    """Measure, print and write."""
    names = list(lengths.DISTRIBUTIONS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(COUNTS), default="minilm")
    parser.add_argument("--distributions", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help=f"rehearse on {QUICK} sequences, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        return serve(lambda: prepare(Job(**json.loads(given.arm))))
    if given.rounds < 1 or (given.rounds < 5 and not given.quick):
        parser.error(f"--rounds {given.rounds} are too few to say anything: give at least 5")
    tables = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = minilm() if given.shape == "minilm" else random_shape(given.shape, temporary)
        for name in given.distributions:
            count = QUICK if given.quick else COUNTS[given.shape][name]
            tables.append(measure(name, arms(folder, name, count, quick=given.quick), given.rounds))
            print(tables[-1].text(), flush=True)
    if given.output or not given.quick:
        print(record(given.shape, tables, given.output or RESULTS))


if __name__ == "__main__":
    main()

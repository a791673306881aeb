"""Measure how long a single sequence takes, from token ids to its mean-pooled embedding, without tokenising."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from statistics import quantiles
from typing import Any

import lengths
import peers
from engines import BOUNDS, ENGINES, OURS, Job, Round, minilm, random_shape
from harness import MIN_PEER_COSINE, Answer, Arm, Measured, Prepared, Values, alternate, serve
from report import RESULTS, Spread, check_destination, grid, write

ABOUT = """One sequence of random token ids at a time through {shape}, to the mean of its hidden states: no tokenising,
no padding. Each arm is a process of its own, one runs at a time. In each of {rounds} rounds an arm makes {calls} calls,
each with another sequence, for each length, after {warm} that are not counted. The 50th and the 99th percentile are
those of the calls of a round, and the tables show their medians over the rounds, and extremes. `time to` is an arm's
50th percentile over the least one among the peers of that round, so below 1 is quicker than all of them. Before timing
embeddings are compared with the first arm's: `cosine` is the least one; an arm beyond {float32.difference} and
{float32.cosine} in float32, or {bfloat16.difference} and {bfloat16.cosine} in bfloat16, or a cosine of {int8.cosine} in
int8, stops the run, and a peer below {least} is reported and never the quickest peer.{unmeasured}"""
CALLS = {"minilm": 100, "base": 50}
SHAPES = {"minilm": "all-MiniLM-L6-v2", "base": "BERT-base's shape with random weights"}
TOKENS = (16, 64, 256)  # lengths of the sequences
WARM = 5  # calls to warm up before each measurement
QUICK = 3  # calls of a rehearsal
SAMPLE = 4  # sequences of each length whose embeddings are compared
Times = dict[int, list[float]]  # seconds of each call, by the length of its sequence


def prepare(job: Job, tokens: Sequence[int]) -> Prepared:
    """Prepare a job's arm.

    Args:
        job: The job; a round has `job.count` calls for each length, except for the first round, which warms up.
        tokens: The lengths of the sequences.
    """
    run, settings = (ENGINES | peers.ENGINES)[job.engine](job)
    by_length = {length: sequences(length, job.count) for length in tokens}
    counts = chain([WARM], repeat(job.count))

    def round_of_calls() -> Times:
        count = next(counts)
        return {length: seconds(run, calls[:count]) for length, calls in by_length.items()}

    def sample(_: Any) -> Values:
        sampled = [sequence for calls in by_length.values() for sequence in calls[:SAMPLE]]
        return [run([sequence])[0].tolist() for sequence in sampled]

    return Prepared(
        run=round_of_calls,
        sample=sample,
        more=lambda times: {"times": times},
        tokens=job.count * sum(tokens),
        sequences=job.count * len(tokens),
        inputs=lengths.digest(list(chain(*by_length.values()))),
        settings=settings,
    )


def sequences(length: int, count: int) -> list[list[int]]:
    """Return `count` sequences of [CLS], random words and [SEP], all of one length."""
    generator = random.Random(f"latency {length}")
    return [
        [
            lengths.CLS,
            *(generator.randrange(lengths.FIRST_WORD, lengths.VOCABULARY) for _ in range(length - 2)),
            lengths.SEP,
        ]
        for _ in range(count)
    ]


def seconds(run: Round, calls: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds of each call, after WARM calls that are not counted."""
    for sequence in calls[:WARM]:
        run([sequence])
    times = []
    for sequence in calls:
        start = time.perf_counter()
        run([sequence])
        times.append(time.perf_counter() - start)
    return times


def compared(usual: Job, models: Path, available: Sequence[str]) -> dict[str, Job]:
    """Return all jobs by arm name; the first is the reference."""
    return {
        "transformers float32": usual,
        "transformers bfloat16": replace(usual, precision="bfloat16"),
        **peers.jobs(available, models, usual, alone=True),
        **{f"heedful {precision}": replace(usual, engine="packed", precision=precision) for precision in OURS},
    }


def arms(jobs: Mapping[str, Job], tokens: Sequence[int]) -> list[Arm]:
    """Return the arms of the jobs."""
    return [
        Arm(
            name=name,
            command=(sys.executable, __file__, "--tokens", *map(str, tokens), "--arm", json.dumps(asdict(job))),
            is_heedful=job.engine == "packed",
            bound=BOUNDS[job.precision],
        )
        for name, job in jobs.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The measurements of an arm at one length; a record's JSON has these names. Percentiles are milliseconds."""

    name: str
    ours: bool
    settings: str
    middle: Spread  # the 50th percentiles of the rounds
    high: Spread  # the 99th percentiles of the rounds
    to_peers: Spread  # ratios of the 50th percentile to the least one among the peers
    to_floats: Spread  # the same, without peers in int8
    middles: tuple[float, ...]  # the 50th percentile of each round
    highs: tuple[float, ...]  # the 99th percentile of each round
    difference: float  # largest difference of its sample to the reference's, over the reference's largest value
    cosine: float  # least cosine of its sample to the reference's
    aside: str  # why the arm may not be the quickest peer, or ""


def lines(measured: Measured, jobs: Mapping[str, Job], length: int) -> list[Line]:
    """Summarise the measurements at one length."""
    middles, highs = ({name: percentiles(turns, length, q) for name, turns in measured.turns.items()} for q in (50, 99))
    stock = [arm.name for arm in measured.arms if measured.may_be_fastest_peer(arm)]
    floats = [name for name in stock if jobs[name].precision != "int8"]

    def ratios(name: str, peer_names: Sequence[str]) -> Spread:
        """Compare the 50th percentiles of an arm with the least ones among peers."""
        rounds = zip(middles[name], *(middles[peer] for peer in peer_names), strict=True)
        return Spread.of([own / min(peer_times) for own, *peer_times in rounds])

    return [
        Line(
            name=arm.name,
            ours=arm.is_heedful,
            settings=measured.first[arm.name]["settings"],
            middle=Spread.of(middles[arm.name]),
            high=Spread.of(highs[arm.name]),
            to_peers=ratios(arm.name, stock),
            to_floats=ratios(arm.name, floats),
            middles=tuple(middles[arm.name]),
            highs=tuple(highs[arm.name]),
            difference=measured.near[arm.name][0],
            cosine=measured.near[arm.name][1],
            aside=measured.aside(arm),
        )
        for arm in measured.arms
    ]


def percentiles(turns: Sequence[Answer], length: int, q: int) -> list[float]:
    """Return the q-th percentile of each round, in milliseconds."""
    return [1e3 * quantiles(turn["times"][str(length)], n=100, method="inclusive")[q - 1] for turn in turns]


def table(length: int, arm_lines: Sequence[Line]) -> str:
    """Format the lines of one length as Markdown."""
    columns = ["arm", "settings", "50th, ms", "99th, ms", "time to the quickest peer", "to the quickest but int8"]
    rows = [
        [
            (f"**{line.name}**" if line.ours else line.name) + (f" ({line.aside})" if line.aside else ""),
            line.settings,
            line.middle.text(),
            line.high.text(),
            line.to_peers.text(),
            line.to_floats.text(),
            f"{line.difference:.1e}",
            f"{line.cosine:.6f}",
        ]
        for line in arm_lines
    ]
    return f"## {length} tokens\n\n" + grid([*columns, "difference", "cosine"], rows)


def main() -> None:
    """Measure all lengths, print their tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(CALLS), default="minilm")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5, help="at least 5, but for --quick")
    parser.add_argument("--quick", action="store_true", help=f"rehearse {QUICK} calls, without a record")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    peers.options(parser)
    options = parser.parse_args()
    if options.arm:
        return serve(lambda: prepare(Job(**json.loads(options.arm)), options.tokens))
    if options.rounds < 1 or (options.rounds < 5 and not options.quick):
        parser.error(f"--rounds {options.rounds} are too few to say anything: give at least 5")
    if options.output or not options.quick:
        check_destination(options.output or RESULTS)
    calls = QUICK if options.quick else CALLS[options.shape]
    with tempfile.TemporaryDirectory() as temporary:
        folder = minilm() if options.shape == "minilm" else random_shape(options.shape, f"{temporary}/{options.shape}")
        models = (options.models or Path(temporary, "models")) / options.shape
        available, unmeasured = peers.make_models(options.shape, options.peers, folder, models)
        usual = Job(engine="padded", precision="float32", folder=folder, count=calls, size=1)
        jobs = compared(usual, models, available)
        measured = alternate(arms(jobs, options.tokens), options.rounds)
    by_length = {length: lines(measured, jobs, length) for length in options.tokens}
    texts = [f"Other processes took at most {measured.others:.0%} of the machine in a turn.\n"]
    texts += [table(length, arm_lines) for length, arm_lines in by_length.items()]
    print(*texts, sep="\n", flush=True)
    if options.output or not options.quick:
        about = ABOUT.format(
            shape=SHAPES[options.shape],
            rounds=options.rounds,
            calls=calls,
            warm=WARM,
            least=MIN_PEER_COSINE,
            unmeasured=unmeasured,
            **BOUNDS,
        )
        data = [
            {"tokens": length, "lines": [asdict(line) for line in arm_lines]} for length, arm_lines in by_length.items()
        ]
        part = "" if set(options.tokens) == set(TOKENS) else "".join(f"-{length}" for length in options.tokens)
        print(write(f"latency-{options.shape}{part}", about, texts, data, options.output or RESULTS))


if __name__ == "__main__":
    main()

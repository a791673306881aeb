"""Run benchmarks in alternating processes, one process for each arm, and compare their rates in each round.

A benchmark's script starts itself with --arm for each arm, and its child calls `serve`: it prepares, writes a sample of
its results, and then runs one round for each line "go" on its standard input. `measure` alternates and summarises.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from math import hypot, isfinite
from operator import mul, truediv
from statistics import median
from typing import Any

from report import Row, Spread, Table, machine_busy

LEAST = 0.99  # cosine that a peer must reach to be the fastest peer: below, its precision loses too much
PAUSE = 0.2  # seconds before a turn, in which the previous arm's threads stop spinning
Values = list[list[float]]
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How close a sample must be to the reference's."""

    difference: float  # the largest one, over the largest value of the reference's sample
    cosine: float  # the least one


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A command that calls `serve`; the first arm of a list is the reference for speed and for results."""

    name: str
    command: tuple[str, ...]
    is_heedful: bool
    bound: Bound
    like: str | None = None  # the arm to compare results with, if the first one computes something else
    stock: bool = True  # whether it runs as its makers offer it; otherwise it is never the fastest peer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prepared arm: a round, and a function that takes a fixed sample of its result."""

    run: Callable[[], Any]
    sample: Callable[[Any], Values]
    tokens: int  # of one round, without padding
    sequences: int  # of one round
    inputs: str  # digest of the inputs; it is the same for all arms that compute the same
    settings: str  # as text, for the table
    more: Callable[[Any], Answer] = lambda result: {}  # further entries of the answer to "go"


def serve(prepare: Callable[[], Prepared]) -> None:
    """Run an arm's process: prepare, run one round to warm up and for the sample, then one round for each "go"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not write among the answers
    arm = prepare()
    sample = arm.sample(arm.run())
    counts = {"tokens": arm.tokens, "sequences": arm.sequences, "inputs": arm.inputs}
    facts = {"settings": arm.settings, "sample": sample, "checksum": checksum(sample)}
    print(json.dumps(counts | facts), file=answers, flush=True)
    for line in sys.stdin:
        assert line == "go\n", line
        start, start_busy = time.perf_counter(), time.process_time()
        result = arm.run()
        seconds, busy = time.perf_counter() - start, time.process_time() - start_busy
        answer = counts | {"seconds": seconds, "busy": busy} | arm.more(result)
        print(json.dumps(answer), file=answers, flush=True)


def checksum(sample: Values) -> str:
    """Return a short hash of a sample in float32."""
    flat = list(chain.from_iterable(sample))
    return hashlib.sha256(struct.pack(f"<{len(flat)}f", *flat)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The answers of all arms; mappings are by the arm's name."""

    arms: Sequence[Arm]
    first: Mapping[str, Answer]  # after preparing, with the sample
    turns: Mapping[str, Sequence[Answer]]  # one answer for each round
    near: Mapping[str, tuple[float, float]]  # difference and cosine to the reference's sample
    others: float  # the largest share of the machine's cores that other processes used in a turn

    def aside(self, arm: Arm) -> str:
        """Return what excludes an arm from being the fastest peer, besides being Heedful's; "" if nothing does."""
        if not arm.stock:
            return "not stock"
        return f"cosine below {LEAST}" if self.near[arm.name][1] < LEAST else ""

    def counts(self, arm: Arm) -> bool:
        """Return whether an arm may be the fastest peer."""
        return not arm.is_heedful and not self.aside(arm)


def measure(title: str, arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Table:
    """Run all arms in turn and return their table."""
    return summarise(title, alternate(arms, rounds, pause=pause))


def alternate(arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Measured:
    """Start all arms, compare their samples, and run them in turn; each round starts with another arm."""
    with ExitStack() as stack:
        ask_arm: dict[str, Callable[[str], Answer]] = {}
        first: dict[str, Answer] = {}
        for arm in arms:  # one after another, because preparing may time batch sizes
            ask_arm[arm.name] = stack.enter_context(started(arm))
            first[arm.name] = ask_arm[arm.name]("")
        near = {arm.name: compare(arm, first[arm.name], first[arm.like or arms[0].name]) for arm in arms}
        turns: dict[str, list[Answer]] = {arm.name: [] for arm in arms}
        others = 0.0
        for round_index in range(rounds):
            start_arm = round_index % len(arms)
            for arm in (*arms[start_arm:], *arms[:start_arm]):
                time.sleep(pause)
                start, start_busy = time.perf_counter(), machine_busy()
                answer = ask_arm[arm.name]("go\n")
                seconds, busy = time.perf_counter() - start, machine_busy() - start_busy
                turns[arm.name].append(answer)
                others = max(others, (busy - answer["busy"]) / seconds / (os.cpu_count() or 1))
    return Measured(arms=arms, first=first, turns=turns, near=near, others=others)


@contextmanager
def started(arm: Arm) -> Iterator[Callable[[str], Answer]]:
    """Start an arm's process; yield a function that writes a line to it and returns its answer."""
    process = subprocess.Popen(arm.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def ask(request: str) -> Answer:
        assert process.stdin is not None and process.stdout is not None
        if process.poll() is None:
            process.stdin.write(request)
            process.stdin.flush()
        if line := process.stdout.readline():
            answer: Answer = json.loads(line)
            return answer
        raise RuntimeError(f'the arm "{arm.name}" ended with {process.wait()}; its errors are above')

    try:
        yield ask
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def compare(arm: Arm, answer: Answer, reference: Answer) -> tuple[float, float]:
    """Return the largest difference of the samples over the reference's scale, and the least cosine.

    Raises:
        RuntimeError: If the arm has other inputs than the reference, or its sample is beyond its bound.
    """
    for what in ("inputs", "tokens", "sequences"):
        if answer[what] != reference[what]:
            raise RuntimeError(f'the arm "{arm.name}" has other {what}: {answer[what]}, not {reference[what]}')
    pairs = list(zip(answer["sample"], reference["sample"], strict=True))
    finite = all(map(isfinite, chain.from_iterable(answer["sample"])))
    scale = max(abs(value) for _, expected in pairs for value in expected)
    difference = max(abs(a - b) for actual, expected in pairs for a, b in zip(actual, expected, strict=True)) / scale
    cosine = min(sum(map(mul, actual, expected)) / (hypot(*actual) * hypot(*expected)) for actual, expected in pairs)
    if not finite or difference > arm.bound.difference or cosine < arm.bound.cosine:
        raise RuntimeError(
            f'the arm "{arm.name}" computes something else: largest difference {difference:.2e} of the scale, '
            f"least cosine {cosine:.6f}, but its bound is {arm.bound.difference} and {arm.bound.cosine}"
        )
    return difference, cosine


def summarise(title: str, measured: Measured) -> Table:
    """Make the table of all arms; its ratios are taken round by round."""
    first, near = measured.first, measured.near
    rates = {name: [turn["tokens"] / turn["seconds"] for turn in turns] for name, turns in measured.turns.items()}
    peers = [arm.name for arm in measured.arms if measured.counts(arm)]
    rounds = list(zip(*(rates[name] for name in peers), strict=True))
    winners = [peers[rates_of_round.index(max(rates_of_round))] for rates_of_round in rounds]
    reference = measured.arms[0].name
    rows = tuple(
        Row(
            name=arm.name,
            ours=arm.is_heedful,
            settings=first[arm.name]["settings"],
            seconds=tuple(turn["seconds"] for turn in measured.turns[arm.name]),
            tokens_per_second=Spread.of(rates[arm.name]),
            sequences_per_second=median(turn["sequences"] / turn["seconds"] for turn in measured.turns[arm.name]),
            to_best_peer=Spread.of(
                [rate / max(rates_of_round) for rate, rates_of_round in zip(rates[arm.name], rounds, strict=True)]
            ),
            to_reference=Spread.of(list(map(truediv, rates[arm.name], rates[reference]))),
            difference=near[arm.name][0],
            cosine=near[arm.name][1],
            checksum=first[arm.name]["checksum"],
            aside=measured.aside(arm),
        )
        for arm in measured.arms
    )
    reference_answer = first[reference]
    return Table(
        title=title,
        inputs=reference_answer["inputs"],
        tokens=reference_answer["tokens"],
        sequences=reference_answer["sequences"],
        rounds=len(rounds),
        best_peers=dict(Counter(winners).most_common()),
        others=measured.others,
        rows=rows,
    )

"""Time the arms of a benchmark in alternating processes, and compare their rates in each round.

An arm is a way to do the benchmark's work, such as one library in one precision. A benchmark's script calls `measure`,
which starts the script again with --arm for each arm, and gives all arms one turn in each round. In the new process the
script calls `serve`, which prepares the arm, writes a sample of its results to standard output, and then runs the
arm's work once for each line "go" on standard input.
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

MIN_PEER_COSINE = 0.99  # peers with a smaller cosine are less precise, and are never counted as the fastest peer
PAUSE = 0.2  # seconds before a turn, in which the previous arm's threads stop spinning
Values = list[list[float]]  # a sample of an arm's results, such as some of its vectors
Answer = dict[str, Any]  # a line of JSON that an arm's process writes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How close an arm's sample must be to the reference's sample."""

    difference: float  # the largest difference of two values, over the largest value of the reference
    cosine: float  # the least cosine of two vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """An arm of a benchmark; the first arm of a list is the reference for speed and for results."""

    name: str
    command: tuple[str, ...]  # starts a process that calls `serve`
    is_heedful: bool  # other arms are peers
    bound: Bound
    like: str | None = None  # name of the arm to compare results with, if the first one computes something else
    stock: bool = True  # whether a peer runs as its makers offer it; otherwise it is never the fastest peer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """An arm that is ready to run."""

    run: Callable[[], Any]  # does the work of one turn and returns its result
    sample: Callable[[Any], Values]  # takes a sample of that result, always at the same places
    tokens: int  # tokens of one turn, without padding
    sequences: int  # sequences of one turn
    inputs: str  # digest of the inputs; it is the same for all arms that compute the same
    settings: str  # as text, for the table
    more: Callable[[Any], Answer] = lambda result: {}  # returns further entries of the answer to "go"


def serve(prepare: Callable[[], Prepared]) -> None:
    """Run an arm's process: prepare it, run it once to warm up and for the sample, then once for each "go"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error, and not between the answers
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
    """The measurements of all arms; mappings are by the arm's name."""

    arms: Sequence[Arm]
    first: Mapping[str, Answer]  # the answers after preparing, with the samples
    turns: Mapping[str, Sequence[Answer]]  # the answers of all rounds
    near: Mapping[str, tuple[float, float]]  # largest difference and least cosine to the reference's sample
    others: float  # the largest share of the machine's cores that other processes used in a turn

    def aside(self, arm: Arm) -> str:
        """Return why a peer may not be the fastest peer, or "" if it may."""
        if not arm.stock:
            return "not stock"
        return f"cosine below {MIN_PEER_COSINE}" if self.near[arm.name][1] < MIN_PEER_COSINE else ""

    def may_be_fastest_peer(self, arm: Arm) -> bool:
        """Return whether an arm is a peer that may be the fastest one."""
        return not arm.is_heedful and not self.aside(arm)


def measure(title: str, arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Table:
    """Run all arms in turn and return their table."""
    return summarise(title, alternate(arms, rounds, pause=pause))


def alternate(arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Measured:
    """Start all arms, compare their samples, and give each arm one turn in each round.

    Each round starts with another arm.
    """
    with ExitStack() as stack:
        ask_arm: dict[str, Callable[[str], Answer]] = {}
        first: dict[str, Answer] = {}
        for arm in arms:  # one after another, because an arm may time several batch sizes while it prepares
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
    """Compare an arm's sample with the reference's sample.

    Returns:
        The largest difference of two values over the largest value of the reference, and the least cosine of two
        vectors.

    Raises:
        RuntimeError: If the arm has other inputs than the reference, or its sample is beyond its bound.
    """
    for key in ("inputs", "tokens", "sequences"):
        if answer[key] != reference[key]:
            raise RuntimeError(f'the arm "{arm.name}" has other {key}: {answer[key]}, not {reference[key]}')
    pairs = list(zip(answer["sample"], reference["sample"], strict=True))
    finite = all(map(isfinite, chain.from_iterable(answer["sample"])))
    scale = max(abs(value) for _, expected in pairs for value in expected)
    differences = [abs(a - b) for actual, expected in pairs for a, b in zip(actual, expected, strict=True)]
    difference = max(differences) / scale
    cosine = min(sum(map(mul, actual, expected)) / (hypot(*actual) * hypot(*expected)) for actual, expected in pairs)
    if not finite or difference > arm.bound.difference or cosine < arm.bound.cosine:
        raise RuntimeError(
            f'the arm "{arm.name}" computes something else: largest difference {difference:.2e} of the scale, '
            f"least cosine {cosine:.6f}, but its bound is {arm.bound.difference} and {arm.bound.cosine}"
        )
    return difference, cosine


def summarise(title: str, measured: Measured) -> Table:
    """Make the table of all arms; its ratios are taken in each round."""
    rates = {name: [turn["tokens"] / turn["seconds"] for turn in turns] for name, turns in measured.turns.items()}
    peers = [arm.name for arm in measured.arms if measured.may_be_fastest_peer(arm)]
    rounds = list(zip(*(rates[name] for name in peers), strict=True))
    best_rates = [max(peer_rates) for peer_rates in rounds]
    best_peers = [peers[peer_rates.index(max(peer_rates))] for peer_rates in rounds]
    reference = measured.arms[0].name
    reference_answer = measured.first[reference]
    return Table(
        title=title,
        inputs=reference_answer["inputs"],
        tokens=reference_answer["tokens"],
        sequences=reference_answer["sequences"],
        rounds=len(rounds),
        best_peers=dict(Counter(best_peers).most_common()),
        others=measured.others,
        rows=tuple(_row(measured, arm, rates[arm.name], best_rates, rates[reference]) for arm in measured.arms),
    )


def _row(
    measured: Measured,
    arm: Arm,
    rates: Sequence[float],
    best_peer_rates: Sequence[float],
    reference_rates: Sequence[float],
) -> Row:
    """Summarise an arm. Rates are tokens a second in each round: its own, the fastest peer's and the reference's."""
    turns, first = measured.turns[arm.name], measured.first[arm.name]
    difference, cosine = measured.near[arm.name]
    return Row(
        name=arm.name,
        ours=arm.is_heedful,
        settings=first["settings"],
        seconds=tuple(turn["seconds"] for turn in turns),
        tokens_per_second=Spread.of(rates),
        sequences_per_second=median(turn["sequences"] / turn["seconds"] for turn in turns),
        to_best_peer=Spread.of(list(map(truediv, rates, best_peer_rates))),
        to_reference=Spread.of(list(map(truediv, rates, reference_rates))),
        difference=difference,
        cosine=cosine,
        checksum=first["checksum"],
        aside=measured.aside(arm),
    )

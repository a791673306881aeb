"""Alternated processes: each arm lives in a process of its own, one runs at a time, and ratios are taken in each round.

An arm prepares, says what it computed for a fixed sample, and then runs one round for each "go" on its standard input.
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

LEAST = 0.99  # cosine that an arm must reach to be the fastest peer: below, its precision loses too much
PAUSE = 0.2  # seconds before a turn, in which the last arm's threads come to rest
Values = list[list[float]]
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How near a sample must be to the reference's: the largest difference over its scale, and the least cosine."""

    difference: float
    cosine: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A command that calls `serve`; the first arm of a list is the reference for speed, and for what is computed."""

    name: str
    command: tuple[str, ...]
    is_heedful: bool
    bound: Bound
    like: str | None = None  # an arm that computes the same, where the first one computes something else
    stock: bool = True  # as its makers offer it; a peer that is fed by us is never the fastest peer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prepared arm: a round, and a function that takes a fixed sample of what the round returns."""

    run: Callable[[], Any]
    sample: Callable[[Any], Values]
    tokens: int  # real ones, in one round
    sequences: int
    inputs: str  # their digest; all arms that compute the same must have the same
    settings: str  # as text, for the table
    more: Callable[[Any], Answer] = lambda result: {}  # what an answer tells of the round besides


def serve(prepare: Callable[[], Prepared]) -> None:
    """Be an arm: prepare, run one round to warm up and to show the sample, then one for each "go"."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be among the answers
    ready = prepare()
    sample = ready.sample(ready.run())
    counts = {"tokens": ready.tokens, "sequences": ready.sequences, "inputs": ready.inputs}
    facts = {"settings": ready.settings, "sample": sample, "checksum": checksum(sample)}
    print(json.dumps(counts | facts), file=answers, flush=True)
    for line in sys.stdin:
        assert line == "go\n", line
        start, start_busy = time.perf_counter(), time.process_time()
        result = ready.run()
        seconds, busy = time.perf_counter() - start, time.process_time() - start_busy
        turn = counts | {"seconds": seconds, "busy": busy} | ready.more(result)
        print(json.dumps(turn), file=answers, flush=True)


def checksum(sample: Values) -> str:
    """A short name for exactly these numbers in float32."""
    flat = list(chain.from_iterable(sample))
    return hashlib.sha256(struct.pack(f"<{len(flat)}f", *flat)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The answers of all arms, by name."""

    arms: Sequence[Arm]
    first: Mapping[str, Answer]  # before timing
    turns: Mapping[str, Sequence[Answer]]  # one of each round
    near: Mapping[str, tuple[float, float]]  # difference and cosine
    others: float  # the largest share of the machine's cores that other processes took in a turn

    def aside(self, arm: Arm) -> str:
        """Return why an arm cannot be the fastest peer although it is not Heedful's; empty if it can."""
        if not arm.stock:
            return "not stock"
        return f"cosine below {LEAST}" if self.near[arm.name][1] < LEAST else ""

    def counts(self, arm: Arm) -> bool:
        """Whether it may be the fastest peer."""
        return not arm.is_heedful and not self.aside(arm)


def measure(title: str, arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Table:
    """All arms in turn, as a table."""
    return summarise(title, alternate(arms, rounds, pause=pause))


def alternate(arms: Sequence[Arm], rounds: int, *, pause: float = PAUSE) -> Measured:
    """Start every arm, compare their samples, and let them run in turn; each round begins with the next arm."""
    with ExitStack() as stack:
        asks: dict[str, Callable[[str], Answer]] = {}
        first: dict[str, Answer] = {}
        for arm in arms:  # one after another, because preparing may include trying batch sizes
            asks[arm.name] = stack.enter_context(started(arm))
            first[arm.name] = asks[arm.name]("")
        near = {arm.name: compare(arm, first[arm.name], first[arm.like or arms[0].name]) for arm in arms}
        turns: dict[str, list[Answer]] = {arm.name: [] for arm in arms}
        others = 0.0
        for number in range(rounds):
            turn = number % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                time.sleep(pause)
                start, start_busy = time.perf_counter(), machine_busy()
                answer = asks[arm.name]("go\n")
                taken, busy = time.perf_counter() - start, machine_busy() - start_busy
                turns[arm.name].append(answer)
                others = max(others, (busy - answer["busy"]) / taken / (os.cpu_count() or 1))
    return Measured(arms=arms, first=first, turns=turns, near=near, others=others)


@contextmanager
def started(arm: Arm) -> Iterator[Callable[[str], Answer]]:
    """The arm's process, as a function that says something to it and waits for its answer."""
    process = subprocess.Popen(arm.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def ask(words: str) -> Answer:
        assert process.stdin is not None and process.stdout is not None
        if process.poll() is None:
            process.stdin.write(words)
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
    """The largest difference over the reference's scale and the least cosine; an arm beyond its bound is an error."""
    for what in ("inputs", "tokens", "sequences"):
        if answer[what] != reference[what]:
            raise RuntimeError(f'the arm "{arm.name}" has other {what}: {answer[what]}, not {reference[what]}')
    pairs = list(zip(answer["sample"], reference["sample"], strict=True))
    finite = all(map(isfinite, chain.from_iterable(answer["sample"])))
    scale = max(abs(value) for _, row in pairs for value in row)
    difference = max(abs(a - b) for mine, row in pairs for a, b in zip(mine, row, strict=True)) / scale
    cosine = min(sum(map(mul, mine, row)) / (hypot(*mine) * hypot(*row)) for mine, row in pairs)
    if not finite or difference > arm.bound.difference or cosine < arm.bound.cosine:
        raise RuntimeError(
            f'the arm "{arm.name}" computes something else: largest difference {difference:.2e} of the scale, '
            f"least cosine {cosine:.6f}, but its bound is {arm.bound.difference} and {arm.bound.cosine}"
        )
    return difference, cosine


def summarise(title: str, measured: Measured) -> Table:
    """Medians and spreads; ratios are taken round by round."""
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
                [mine / max(rates_of_round) for mine, rates_of_round in zip(rates[arm.name], rounds, strict=True)]
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

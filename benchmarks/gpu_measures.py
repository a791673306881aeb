"""Measurements of `gpu.py`: rates of the device, training arms and serving arms, which take turns in one process."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import lengths
from gpu_arms import CHECKS, WAYS, Case, Losses, RoundData, Train, make_round, models
from gpu_serving import (
    SHAPES,
    SMALL,
    TINY,
    Answers,
    alone,
    decoder_folder,
    decoders,
    folder_of,
    mixed,
    prompts,
    texts,
)
from harness import Answer, Arm, Bound, Measured, checksum, compare, summarise
from report import Spread, Table, grid, machine_busy

if TYPE_CHECKING:
    import torch

BOUND = Bound(difference=0.01, cosine=0.9999)  # of losses
VECTOR_BOUND = Bound(difference=0.08, cosine=0.995)  # of vectors in half precision
FEWEST = 3  # rounds that are measured even if no time is left
COMPILING = 60.0  # seconds that must be left before an arm is compiled
COMPILED = ", compiled"  # ends the names of measurements of compiled arms


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The sizes of all measurements; the defaults are those of a record, and `rehearsal` returns small ones."""

    matrix: int = 8192  # rows and columns of the matrices whose product is timed
    copied: int = 2**32  # bytes of the copy that is timed
    rounds: int = 5  # of training and of single texts
    backend: str = "inductor"  # backend of torch.compile
    cases: Mapping[str, Case] = field(
        default_factory=lambda: {
            "mixed lengths, base": _case("base", 12, 768, "mean150", 16_800, 8),
            "full length, base": _case("base", 12, 768, 512, 16_384, 8),
            "mixed lengths, large": _case("large", 24, 1024, "mean150", 16_800, 4),
            "mixed lengths, small": _case("small", 4, 512, "mean150", 67_200, 6),
            "one length, base": _case("base", 12, 768, 150, 16_800, 8),
            "mixed lengths, base, dropout 0.1": replace(_case("base", 12, 768, "mean150", 16_800, 8), dropout=0.1),
            "mixed lengths, base, float32": replace(_case("base", 12, 768, "mean150", 16_800, 4), precision="float32"),
            "mixed lengths, base, rotary": replace(_case("base", 22, 768, "mean150", 16_800, 4), rotary=True),
        }
    )
    tokens: Sequence[int] = (32, 64, 128)  # lengths of single texts, in tokens
    calls: int = 50  # single texts of a round
    texts: int = 2048  # texts of mixed lengths
    budget: int = 32_768  # tokens of a batch of Heedful's engine on a CPU
    prompts: Sequence[int] = (1, 32)  # numbers of prompts that are continued at once
    written: int = 128  # tokens generated after each prompt
    served: int = 3  # rounds of texts of mixed lengths, and of decoding
    tiny: bool = False  # serve tiny models


def _case(name: str, layers: int, width: int, distribution: str | int, tokens: int, steps: int) -> Case:
    """Return a case with the vocabulary of lengths.py."""
    return Case(
        name=name,
        layers=layers,
        width=width,
        vocabulary=lengths.VOCABULARY,
        distribution=distribution,
        tokens=tokens,
        steps=steps,
    )


def rehearsal() -> Size:
    """Return the small size of a rehearsal."""
    full = Size()
    cases = {}
    for name, case in full.cases.items():
        tokens = 2048 if case.distribution == 512 else 2100
        cases[name] = replace(case, layers=2, width=64, vocabulary=2000, tokens=tokens, steps=2)
    return replace(
        full,
        matrix=256,
        copied=2**20,
        rounds=1,
        backend="eager",
        cases=cases,
        tokens=(16,),
        calls=3,
        texts=24,
        budget=2048,
        prompts=(1, 2),
        written=6,
        served=1,
        tiny=True,
    )


class Clock:
    """Counts down the time in which to measure.

    Args:
        minutes: Minutes from now.
    """

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """The seconds that are left; negative after the end."""
        return self.end - time.monotonic()


# -- the device ---------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def rates(size: Size, device: torch.device) -> dict[str, float]:
    """Return the rates of the device, medians of ten runs.

    Returns:
        matrix: FLOP/s of a product of random bfloat16 matrices.
        copy: Bytes/s of a copy, where read and written bytes count.
    """
    import torch

    a, b = (torch.randn(size.matrix, size.matrix, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size.copied, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)

    def median_seconds(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        times = []
        for _ in range(10):
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            times.append(time.perf_counter() - start)
        return median(times)

    return {
        "matrix": 2 * size.matrix**3 / median_seconds(lambda: torch.mm(a, b)),
        "copy": 2 * size.copied / median_seconds(lambda: target.copy_(source)),
    }


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory since the start of the context, beyond what was allocated then.

    The function returns bytes, and 0 for a device other than a GPU.
    """
    if device.type != "cuda":
        yield lambda: 0
        return
    import torch

    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


def free_memory(device: torch.device) -> None:
    """Free the compiled functions and the cached memory of arms that are no longer used."""
    import torch

    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on a GPU, or 0 for another device."""
    if device.type != "cuda":
        return 0
    import torch

    return torch.cuda.memory_allocated(device)


# -- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadyArm:
    """An arm that has made a few updates, and is ready to be timed."""

    name: str
    is_heedful: bool
    check_losses: Losses  # of its first updates, to be compared with those of other arms
    run: Train
    held_bytes: int  # memory that it keeps between its turns
    seconds: float  # time of its first round, which is not counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The measurements of training arms on one case; a record's JSON has these names."""

    what: str  # name of the case
    table: Table
    shares: dict[str, Spread]  # share of the matrix rate that each arm reaches
    memory: dict[str, int]  # peak memory of each arm, in bytes
    failed: dict[str, str]  # arms that were not timed, and why


def make_ready(name: str, data: RoundData, folder: str, device: torch.device, stack: ExitStack, size: Size) -> ReadyArm:
    """Load and compile an arm, make a few updates on one step, and run a round that is not counted."""
    way, bytes_before = WAYS[name], allocated_bytes(device)
    prepare_round = way.load_arm(data, folder, device, stack, size.backend if way.compiled else "")
    check = prepare_round(data.first())
    check_losses = [loss for _ in range(CHECKS) for loss in check()]
    del check  # a trainer may hold an optimizer of its own
    run = prepare_round(data)
    start = time.perf_counter()
    run()
    synchronize(device)
    return ReadyArm(
        name=name,
        is_heedful=way.is_heedful,
        check_losses=check_losses,
        run=run,
        held_bytes=allocated_bytes(device) - bytes_before,
        seconds=time.perf_counter() - start,
    )


def train(what: str, names: Sequence[str], size: Size, device: torch.device, rate: float, clock: Clock) -> Trained:
    """Time arms on one case, in turn. Arms that fail, or compute something else than the first one, are named.

    Args:
        what: The name of the case, with COMPILED at its end if arms are compiled.
        names: The names of the arms in WAYS; the first is the reference.
        rate: The rate of matrix products of the device, in FLOP/s.
    """
    print(f"{what}: {clock.left:.0f} s are left", flush=True)
    data = make_round(size.cases[what.removesuffix(COMPILED)])
    facts = {"tokens": data.tokens, "sequences": data.sequences, "inputs": data.digest}
    settings = f"{data.case.layers} layers, {data.case.width} wide, {data.case.tokens:,} tokens a step"
    with ExitStack() as stack:
        folder = models(data.case, stack.enter_context(tempfile.TemporaryDirectory()))
        ready_arms, failed = _make_all_ready(what, names, data, folder, device, stack, size, clock)
        first: dict[str, Answer] = {}
        for ready_arm in ready_arms:
            sample = [ready_arm.check_losses]
            first[ready_arm.name] = {**facts, "settings": settings, "sample": sample, "checksum": checksum(sample)}
        arms = [Arm(name=arm.name, command=(), is_heedful=arm.is_heedful, bound=BOUND) for arm in ready_arms]
        near = {}
        for arm in arms:
            try:
                near[arm.name] = compare(arm, first[arm.name], first[arms[0].name])
            except RuntimeError as error:
                failed[arm.name] = str(error)
                print(f"{what}: {error}", flush=True)
        seconds, memory, others = _time_rounds([arm for arm in ready_arms if arm.name in near], size, device, clock)
        ready_arms.clear()
    free_memory(device)
    measured = Measured(
        arms=[arm for arm in arms if arm.name in near],
        first=first,
        turns={name: [facts | {"seconds": second} for second in durations] for name, durations in seconds.items()},
        near=near,
        others=others,
    )
    shares = {
        name: Spread.of([data.flop / second / rate for second in durations]) for name, durations in seconds.items()
    }
    return Trained(what=what, table=summarise(what, measured), shares=shares, memory=memory, failed=failed)


def _make_all_ready(
    what: str,
    names: Sequence[str],
    data: RoundData,
    folder: str,
    device: torch.device,
    stack: ExitStack,
    size: Size,
    clock: Clock,
) -> tuple[list[ReadyArm], dict[str, str]]:
    """Return the arms that can be made ready, and the reasons why others cannot, by name.

    Compiled arms come last, and are left out if too little time is left to compile them.

    Raises:
        Exception: The error of the first arm if it cannot be made ready, since it is the reference.
    """
    ready_arms: list[ReadyArm] = []
    failed: dict[str, str] = {}
    for name in sorted(names, key=lambda name: WAYS[name].compiled):
        if WAYS[name].compiled and clock.left < COMPILING:
            failed[name] = f"{max(0.0, clock.left):.0f} s were left, and compiling needs {COMPILING:.0f}"
            continue
        start = time.perf_counter()
        try:
            ready_arms.append(make_ready(name, data, folder, device, stack, size))
            speed = f"{data.tokens / ready_arms[-1].seconds:,.0f} tokens/s in its first round"
            print(f"{what}: {name}: ready after {time.perf_counter() - start:.1f} s, {speed}", flush=True)
        except Exception as error:  # the others are measured nevertheless, and the record says so
            if not ready_arms:
                raise
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            print(f"{what}: {name}: {failed[name]}", flush=True)
    return ready_arms, failed


def _time_rounds(
    arms: Sequence[ReadyArm], size: Size, device: torch.device, clock: Clock
) -> tuple[dict[str, list[float]], dict[str, int], float]:
    """Time the arms in turn, in all rounds or, if no time is left, in FEWEST.

    Returns:
        The seconds of each round and the peak memory in bytes, by the arm's name, and the largest share of the
        machine's cores that other processes used.
    """
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    memory, others = dict.fromkeys(seconds, 0), 0.0
    for round_index in range(size.rounds):
        if round_index >= FEWEST and clock.left < 0:
            break
        first = round_index % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            with measured_peak(device) as peak:
                synchronize(device)
                start, start_busy = time.perf_counter(), machine_busy() - time.process_time()
                arm.run()
                synchronize(device)
                duration = time.perf_counter() - start
                busy = machine_busy() - time.process_time() - start_busy
                seconds[arm.name].append(duration)
                others = max(others, busy / duration / (os.cpu_count() or 1))
                memory[arm.name] = max(memory[arm.name], arm.held_bytes + peak())
    return seconds, memory, others


def training_text(trained: Trained) -> str:
    """Format training measurements as Markdown."""
    rows = [
        [name, share.text(3), f"{trained.memory[name] / 2**30:.2f}" if trained.memory[name] else "not counted"]
        for name, share in trained.shares.items()
    ]
    left_out = "".join(f"\n{name} could not be measured: {why}\n" for name, why in trained.failed.items())
    return trained.table.text() + "\n" + grid(["arm", "share of the matrix rate", "peak memory, GiB"], rows) + left_out


# -- serving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The measurements of serving arms on one kind of input; a record's JSON has these names."""

    what: str  # description of the input
    seconds: dict[str, list[float]]  # by arm, for each round: the median of single calls, or the time of all texts
    cosines: dict[str, float]  # by arm: the least cosine of its vectors to the first arm's

    def against(self, arm: str, others: Sequence[str]) -> Spread:
        """Return how many times as fast an arm is as the fastest of other arms, over the rounds."""
        rounds = zip(self.seconds[arm], *(self.seconds[name] for name in others), strict=True)
        return Spread.of([min(other_seconds) / own_seconds for own_seconds, *other_seconds in rounds])

    def text(self) -> str:
        """Format serving measurements as Markdown."""
        first = next(iter(self.seconds))
        rows = [
            [
                name,
                Spread.of([1e3 * second for second in durations]).text(3),
                self.against(name, [first]).text(),
                f"{self.cosines[name]:.5f}",
            ]
            for name, durations in self.seconds.items()
        ]
        return f"## {self.what}\n\n" + grid(["arm", "ms", f"times as quick as {first}", "cosine"], rows)


def least_cosines(arms: Mapping[str, Answers], inputs: Sequence[Any]) -> dict[str, float]:
    """Return the least cosine of each arm's vectors to the first arm's.

    Raises:
        RuntimeError: If the vectors of an arm are beyond VECTOR_BOUND.
    """
    answers = {}
    for name, run in arms.items():
        vectors = [vector for one_input in inputs for vector in run([one_input])]
        answers[name] = {"inputs": "", "tokens": 0, "sequences": 0, "sample": vectors}
    reference = next(iter(answers.values()))
    cosines: dict[str, float] = {}
    for name, answer in answers.items():
        arm = Arm(name=name, command=(), is_heedful=False, bound=VECTOR_BOUND)
        _, cosines[name] = compare(arm, answer, reference)
    return cosines


def serve_alone(size: Size, device: torch.device, shape: str) -> dict[str, Served]:
    """Measure calls with one text each. The results are by shape and length."""
    import torch

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        chosen = TINY if size.tiny else SHAPES[shape]
        arms = alone(folder_of(chosen, Path(folder), tokenizer=False), device, torch.bfloat16)
    print(f"{shape}: ready after {time.perf_counter() - start:.1f} s", flush=True)
    return {f"{shape} {length}": _serve_length(size, arms, shape, length) for length in size.tokens}


def _serve_length(size: Size, arms: Mapping[str, Answers], shape: str, length: int) -> Served:
    """Measure calls with one text of a length; the texts of all calls differ."""
    stride = (lengths.VOCABULARY - lengths.FIRST_WORD) // (size.calls + length)
    texts_ids = [
        [lengths.CLS, *(lengths.FIRST_WORD + stride * (call + position) for position in range(length - 2)), lengths.SEP]
        for call in range(size.calls)
    ]
    cosines = least_cosines(arms, texts_ids[:3])
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(size.rounds):
        for name in _in_turn(arms, round_index):
            times = []
            for ids in texts_ids:
                start = time.perf_counter()
                arms[name]([ids])
                times.append(time.perf_counter() - start)
            seconds[name].append(median(times))
    return Served(what=f"one text of {length} tokens, {shape}, 50th percentile", seconds=seconds, cosines=cosines)


def serve_mixed(size: Size, device: torch.device) -> dict[str, Served]:
    """Measure calls with all texts of mixed lengths at once."""
    import torch

    mixed_texts = texts(size.texts)
    with tempfile.TemporaryDirectory() as folder:
        path = folder_of(TINY if size.tiny else SMALL, Path(folder), tokenizer=True)
        arms = mixed(path, device, torch.bfloat16, size.budget)
        cosines = least_cosines(arms, mixed_texts[:4])
        seconds = _time_in_turns(size, arms, mixed_texts)
    what = f"{len(mixed_texts):,} texts of mixed lengths, from text to vectors"
    return {"mixed": Served(what=what, seconds=seconds, cosines=cosines)}


def serve_decoding(size: Size, device: torch.device) -> dict[str, Served]:
    """Measure how long it takes to continue one prompt, and several prompts at once."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = decoder_folder(Path(folder), tiny=size.tiny)
        writers = decoders(path, device, torch.bfloat16, size.written)
    cosines = least_cosines({name: writer.first for name, writer in writers.items()}, prompts(3))
    served = {}
    for count in size.prompts:
        seconds = _time_in_turns(size, {name: writer.write for name, writer in writers.items()}, prompts(count))
        what = f"{count * size.written:,} tokens after {count} prompt{'s' * (count > 1)}, GPT-2, greedily"
        served[f"decoding {count}"] = Served(what=what, seconds=seconds, cosines=cosines)
    return served


def _time_in_turns(size: Size, arms: Mapping[str, Callable[[Any], Any]], inputs: Any) -> dict[str, list[float]]:
    """Return the seconds that each arm takes for all inputs in each round, after a round that is not counted."""
    for run in arms.values():
        run(inputs)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_index in range(size.served):
        for name in _in_turn(arms, round_index):
            start = time.perf_counter()
            arms[name](inputs)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _in_turn(arms: Mapping[str, Any], round_index: int) -> list[str]:
    """Return the names of the arms, beginning with another one in each round."""
    first = round_index % len(arms)
    return [*arms][first:] + [*arms][:first]

"""Measurements of `gpu.py`: rates of the device, training arms and serving arms, in turn in one process."""

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
from gpu_arms import CHECKS, WAYS, Case, Given, Losses, given, models
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

BOUND = Bound(difference=0.01, cosine=0.9999)
ANSWER = Bound(difference=0.08, cosine=0.995)  # of vectors in half precision
FEWEST = 3  # rounds, where time is short
COMPILING = 60.0  # seconds that must be left before an arm is compiled
COMPILED = ", compiled"  # end of the name of measurements with compiled arms


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The size of all measurements, full or of a rehearsal."""

    matrix: int = 8192
    copied: int = 2**32  # bytes
    rounds: int = 5
    backend: str = "inductor"  # of torch.compile
    cases: Mapping[str, Case] = field(
        default_factory=lambda: {
            "mixed lengths, base": _case("base", 12, 768, "mean150", 16_800, 8),
            "full length, base": _case("base", 12, 768, 512, 16_384, 8),
            "mixed lengths, large": _case("large", 24, 1024, "mean150", 16_800, 4),
            "mixed lengths, small": _case("small", 4, 512, "mean150", 67_200, 6),
            "one length, base": _case("base", 12, 768, 150, 16_800, 8),
            "mixed lengths, base, dropout 0.1": replace(_case("base", 12, 768, "mean150", 16_800, 8), dropout=0.1),
            "mixed lengths, base, float32": replace(_case("base", 12, 768, "mean150", 16_800, 4), precision="float32"),
        }
    )
    tokens: Sequence[int] = (32, 64, 128)  # of a text alone
    calls: int = 50
    texts: int = 2048
    budget: int = 32_768
    prompts: Sequence[int] = (1, 32)
    written: int = 128  # tokens after each prompt
    served: int = 3  # rounds of mixed texts and of decoding
    tiny: bool = False


def _case(name: str, layers: int, width: int, distribution: str | int, tokens: int, steps: int) -> Case:
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
    whole = Size()
    small = {
        name: replace(case, layers=2, width=64, vocabulary=2000, tokens=2 * 1050 if case.distribution != 512 else 2048)
        for name, case in whole.cases.items()
    }
    cases = {name: replace(case, steps=2) for name, case in small.items()}
    return replace(
        whole,
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
    """How much of the time is left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


# -- the device ---------------------------------------------------------------------------------------------------


def idle(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def rates(size: Size, device: torch.device) -> dict[str, float]:
    """FLOP/s of bfloat16 products on random numbers, bytes/s of copies (read and written): the median of ten."""
    import torch

    a, b = (torch.randn(size.matrix, size.matrix, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(size.copied, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)

    def of(run: Callable[[], Any], count: int = 10) -> float:
        for _ in range(3):
            run()
        times = []
        for _ in range(count):
            idle(device)
            start = time.perf_counter()
            run()
            idle(device)
            times.append(time.perf_counter() - start)
        return median(times)

    return {
        "matrix": 2 * size.matrix**3 / of(lambda: torch.mm(a, b)),
        "copy": 2 * size.copied / of(lambda: target.copy_(source)),
    }


@contextmanager
def room(device: torch.device) -> Iterator[Callable[[], int]]:
    """The most bytes that were taken inside, beyond those that were taken before; 0 where nobody counts them."""
    if device.type != "cuda":
        yield lambda: 0
        return
    import torch

    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: torch.cuda.max_memory_allocated(device) - before


def forget(device: torch.device) -> None:
    """Free what arms have left behind: compiled functions and cached memory."""
    import torch

    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held(device: torch.device) -> int:
    """Bytes that tensors take now."""
    if device.type != "cuda":
        return 0
    import torch

    return torch.cuda.memory_allocated(device)


# -- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ready:
    """An arm that has shown what it learns."""

    name: str
    is_heedful: bool
    learned: Losses
    run: Callable[[], Losses]
    holds: int  # bytes
    seconds: float  # of the round that is not counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A table of training, and what it does not hold."""

    what: str
    table: Table
    shares: dict[str, Spread]  # of the matrix rate
    memory: dict[str, int]  # bytes, at most
    failed: dict[str, str]  # arms that could not be made ready, and why


def ready(name: str, inputs: Given, folder: str, device: torch.device, stack: ExitStack, size: Size) -> Ready:
    """Load, compile, and make a few updates on one step; then a round that is not counted."""
    way, before = WAYS[name], held(device)
    rounds = way.make(inputs, folder, device, stack, size.backend if way.compiled else "")
    check = rounds(inputs.first())
    learned = [loss for _ in range(CHECKS) for loss in check()]
    del check  # a trainer may hold an optimizer of its own
    run = rounds(inputs)
    start = time.perf_counter()
    run()
    idle(device)
    return Ready(
        name=name,
        is_heedful=way.is_heedful,
        learned=learned,
        run=run,
        holds=held(device) - before,
        seconds=time.perf_counter() - start,
    )


def train(what: str, names: Sequence[str], size: Size, device: torch.device, rate: float, clock: Clock) -> Trained:
    """Arms on one case, in turn; one that cannot be made ready is named, but the first has to be.

    Arms that are compiled are made ready last, and left out where no time is left for it.
    """
    print(f"{what}: {clock.left:.0f} s are left", flush=True)
    inputs, failed = given(size.cases[what.removesuffix(COMPILED)]), {}
    with ExitStack() as stack:
        folder = models(inputs.case, stack.enter_context(tempfile.TemporaryDirectory()))
        several = []
        for name in sorted(names, key=lambda name: WAYS[name].compiled):
            if WAYS[name].compiled and clock.left < COMPILING:
                failed[name] = f"{max(0.0, clock.left):.0f} s were left, and compiling needs {COMPILING:.0f}"
                continue
            start = time.perf_counter()
            try:
                several.append(ready(name, inputs, folder, device, stack, size))
                speed = f"{inputs.tokens / several[-1].seconds:,.0f} tokens/s in its first round"
                print(f"{what}: {name}: ready after {time.perf_counter() - start:.1f} s, {speed}", flush=True)
            except Exception as error:  # the others are measured nevertheless, and the record says so
                if not several:
                    raise
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                print(f"{what}: {name}: {failed[name]}", flush=True)
        facts = {"tokens": inputs.tokens, "sequences": inputs.sequences, "inputs": inputs.digest}
        first = {arm.name: _first(arm, facts, inputs) for arm in several}
        arms = [Arm(name=arm.name, command=(), is_heedful=arm.is_heedful, bound=BOUND) for arm in several]
        near = {}
        for arm in arms:
            try:
                near[arm.name] = compare(arm, first[arm.name], first[arms[0].name])
            except RuntimeError as error:
                failed[arm.name] = str(error)
                print(f"{what}: {error}", flush=True)
        arms, several = [arm for arm in arms if arm.name in near], [arm for arm in several if arm.name in near]
        turns: dict[str, list[Answer]] = {arm.name: [] for arm in several}
        memory, others = dict.fromkeys(turns, 0), 0.0
        for number in range(size.rounds):
            if number >= FEWEST and clock.left < 0:
                break
            turn = number % len(several)
            for one_arm in (*several[turn:], *several[:turn]):
                with room(device) as most:
                    idle(device)
                    start, busy = time.perf_counter(), machine_busy() - time.process_time()
                    one_arm.run()
                    idle(device)
                    taken, busy = time.perf_counter() - start, machine_busy() - time.process_time() - busy
                    turns[one_arm.name].append(facts | {"seconds": taken})
                    others = max(others, busy / taken / (os.cpu_count() or 1))
                    memory[one_arm.name] = max(memory[one_arm.name], one_arm.holds + most())
        several.clear()
    forget(device)
    measured = Measured(arms=arms, first=first, turns=turns, near=near, others=others)
    shares = {
        name: Spread.of([inputs.flop / turn["seconds"] / rate for turn in answers]) for name, answers in turns.items()
    }
    return Trained(what=what, table=summarise(what, measured), shares=shares, memory=memory, failed=failed)


def _first(arm: Ready, facts: Mapping[str, Any], inputs: Given) -> Answer:
    sample = [arm.learned]
    how = f"{inputs.case.layers} layers, {inputs.case.width} wide, {inputs.case.tokens:,} tokens a step"
    return {**facts, "settings": how, "sample": sample, "checksum": checksum(sample)}


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
    """Seconds of arms on one kind of input, an entry for each round."""

    what: str
    seconds: dict[str, list[float]]  # of a call (its median), or of all texts
    cosines: dict[str, float]  # to the first arm's vectors, the least

    def against(self, arm: str, others: Sequence[str]) -> Spread:
        """How many times as quick, in each round, as the quickest of the others."""
        rounds = zip(self.seconds[arm], *(self.seconds[peer] for peer in others), strict=True)
        return Spread.of([min(peer_seconds) / mine for mine, *peer_seconds in rounds])

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


def agree(arms: Mapping[str, Answers], shown: Sequence[Any]) -> dict[str, float]:
    """The least cosine of each arm's vectors to the first one's; one that computes something else is an error."""
    answers = {
        name: {"inputs": "", "tokens": 0, "sequences": 0, "sample": [v for text in shown for v in run([text])]}
        for name, run in arms.items()
    }
    right = next(iter(answers.values()))
    return {
        name: compare(Arm(name=name, command=(), is_heedful=False, bound=ANSWER), answer, right)[1]
        for name, answer in answers.items()
    }


def serve_alone(size: Size, device: torch.device, shape: str) -> dict[str, Served]:
    """The 50th percentile of calls with one text of each length, by shape and length."""
    import torch

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        chosen = TINY if size.tiny else SHAPES[shape]
        arms = alone(folder_of(chosen, Path(folder), tokenizer=False), device, torch.bfloat16)
    print(f"{shape}: ready after {time.perf_counter() - start:.1f} s", flush=True)
    return {f"{shape} {length}": _serve_length(size, arms, shape, length) for length in size.tokens}


def _serve_length(size: Size, arms: Mapping[str, Answers], shape: str, length: int) -> Served:
    step = (lengths.VOCABULARY - lengths.FIRST_WORD) // (size.calls + length)
    given_ids = [
        [lengths.CLS, *(lengths.FIRST_WORD + step * (call + place) for place in range(length - 2)), lengths.SEP]
        for call in range(size.calls)
    ]
    cosines = agree(arms, given_ids[:3])
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(size.rounds):
        for name in _in_turn(arms, number):
            times = []
            for ids in given_ids:
                start = time.perf_counter()
                arms[name]([ids])
                times.append(time.perf_counter() - start)
            seconds[name].append(median(times))
    return Served(what=f"one text of {length} tokens, {shape}, 50th percentile", seconds=seconds, cosines=cosines)


def serve_mixed(size: Size, device: torch.device) -> dict[str, Served]:
    """All texts at once."""
    import torch

    several = texts(size.texts)
    with tempfile.TemporaryDirectory() as folder:
        path = folder_of(TINY if size.tiny else SMALL, Path(folder), tokenizer=True)
        arms = mixed(path, device, torch.bfloat16, size.budget)
        cosines = agree(arms, several[:4])
        seconds = _rounds(size, arms, several)
    what = f"{len(several):,} texts of mixed lengths, from text to vectors"
    return {"mixed": Served(what=what, seconds=seconds, cosines=cosines)}


def serve_decoding(size: Size, device: torch.device) -> dict[str, Served]:
    """All tokens after one prompt, and after several at once."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = decoder_folder(Path(folder), tiny=size.tiny)
        writers = decoders(path, device, torch.bfloat16, size.written)
    cosines = agree({name: writer.first for name, writer in writers.items()}, prompts(3))
    served = {}
    for count in size.prompts:
        several = prompts(count)
        seconds = _rounds(size, {name: writer.write for name, writer in writers.items()}, several)
        what = f"{count * size.written:,} tokens after {count} prompt{'s' * (count > 1)}, GPT-2, greedily"
        served[f"decoding {count}"] = Served(what=what, seconds=seconds, cosines=cosines)
    return served


def _rounds(size: Size, arms: Mapping[str, Callable[[Any], Any]], inputs: Any) -> dict[str, list[float]]:
    """Seconds of each arm for all inputs, an entry for each round; a first one is not counted."""
    for run in arms.values():
        run(inputs)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(size.served):
        for name in _in_turn(arms, number):
            start = time.perf_counter()
            arms[name](inputs)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _in_turn(arms: Mapping[str, Any], number: int) -> list[str]:
    """The arms, beginning with another one in each round."""
    turn = number % len(arms)
    return [*arms][turn:] + [*arms][:turn]

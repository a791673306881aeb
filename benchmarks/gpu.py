"""Measure Heedful on a GPU beside transformers: the rate and the memory of pre-training, and the times of serving.

python benchmarks/gpu.py --minutes 9      # measure everything on one CUDA device; the record grows with each part
python benchmarks/gpu.py --rehearse       # measure tiny shapes without a record, on a CPU if there is no GPU

The parts are measured by gpu_measures.py, and their arms are in gpu_arms.py and gpu_serving.py. `goals` compares the
measurements with the rates that Heedful should reach.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lengths
from gpu_arms import CHECKS, WAYS
from gpu_measures import (
    BOUND,
    COMPILED,
    COMPILING,
    FEWEST,
    Clock,
    Served,
    Size,
    Trained,
    rates,
    rehearsal,
    serve_alone,
    serve_decoding,
    serve_mixed,
    train,
    training_text,
)
from gpu_serving import SHAPES
from report import RESULTS, Spread, check_destination, grid, write

ABOUT = """{device}; {versions}. All arms run in one process and take turns; each round begins with the next arm. A turn
is timed from an idle device to an idle device. Ratios are taken in each round; tables show their medians and extremes.
There are {rounds} rounds, or at least {fewest} if the time was up. Compiled arms have a table of their own.

Training: masked language modelling with random weights of BERT's shapes, a vocabulary of {vocabulary:,} and random
token ids. Unless the name of a table says otherwise, there is no dropout, and matrix products are in bfloat16
(autocast); `rotary` is ModernBERT-base's shape. Weights and AdamW's moments (torch's fused kernel) are in float32,
gradients are clipped to a norm of 1, and the loss of each step is read. Mixed lengths have a mean of 150 tokens and go
up to 512 (`mean150` of lengths.py), as paragraphs and short articles do. All arms train on the same sequences and the
same masked tokens. Batches are on the device before a turn, except for `its trainer`, whose masking, packing and
copying are timed. transformers scores all positions, as its model does by default. `padded` pads to 512 tokens.
`grouped` regroups the sequences of a round by length, and pads to a multiple of 8; where nothing is padded it gets no
mask. `packed` puts several sequences into each row of 512 tokens, which a mask keeps apart; transformers' own path
without padding needs flash-attn, which is not installed. Before timing, every arm makes {checks} updates on one step:
`difference` is the largest difference between its losses and the first arm's, over the largest loss, and an arm beyond
{bound} is not timed. Only real tokens count. The share of the matrix rate compares FLOP/s with those of a product of
bfloat16 matrices; a step has 3 (L (24 d² T + 4 d Σs²) + m (2 d² + 2 d V)) FLOP for T real tokens in sequences of s
tokens, and m masked tokens (`rotary`: 17 d² instead of 24 d²). Peak memory is what an arm keeps between its turns and
what a turn adds.

Serving: random bfloat16 weights of the shapes that are named. A single text goes from token ids on the host to the mean
of its hidden states on the host. Mixed lengths go from texts to vectors, in all-MiniLM-L6-v2's shape, by an engine with
its default settings. Decoding is greedy after prompts of 32 random token ids, and includes the time for the prompts."""
# names of training arms, as in gpu_arms.WAYS
PADDED, GROUPED, PACKED = "transformers, padded", "transformers, grouped", "transformers, packed"
HEEDFUL, TRAINER = "heedful", "heedful, its trainer"
# the arms of each kind of part
MIXED = (PADDED, GROUPED, PACKED, HEEDFUL, TRAINER)
FASTER = (PADDED, *(name + COMPILED for name in (HEEDFUL, PACKED, GROUPED, TRAINER)))  # in the order of compiling
FULL = (PADDED, HEEDFUL)
TWO = (GROUPED, HEEDFUL)
BASE = "mixed lengths, base"  # the most important case of training
GROUPS = ("training", "variants", "serving")  # of parts; variants: other models and settings than the usual ones
Part = tuple[str, float, Callable[[], str]]  # name, seconds that it needs, and a function that returns its tables


@dataclass(kw_only=True, slots=True)
class Results:
    """The measurements so far; a record's JSON has these names."""

    rates: dict[str, float] = field(default_factory=dict)  # as `gpu_measures.rates` returns them
    trained: dict[str, Trained] = field(default_factory=dict)  # by case
    served: dict[str, Served] = field(default_factory=dict)  # by kind of input
    missing: dict[str, str] = field(default_factory=dict)  # reasons why parts were not measured, by part

    def texts(self) -> list[str]:
        """Format the measurements as Markdown."""
        rows = [
            ["bfloat16 products", f"{self.rates['matrix'] / 1e12:,.1f} TFLOP/s"],
            ["copy, read and written", f"{self.rates['copy'] / 1e12:,.3f} TB/s"],
        ]
        sections = ["## The device\n\n" + grid(["what", "rate"], rows), goals(self)]
        sections += [training_text(trained) for trained in self.trained.values()]
        sections += [served.text() for served in self.served.values()]
        if self.missing:
            sections.append(
                "## Not measured\n\n" + grid(["part", "why"], [list(item) for item in self.missing.items()])
            )
        return sections

    def data(self) -> Any:
        """Return the measurements as plain values."""
        return {
            "rates": self.rates,
            "trained": {name: asdict(trained) for name, trained in self.trained.items()},
            "served": {name: asdict(served) for name, served in self.served.items()},
            "missing": self.missing,
        }


# -- goals --------------------------------------------------------------------------------------------------------


def best(trained: Trained, *, is_heedful: bool) -> str:
    """Return the name of the arm, of Heedful or of a peer, with the most tokens a second."""
    rows = [row for row in trained.table.rows if row.ours == is_heedful]
    return max(rows, key=lambda row: row.tokens_per_second.median).name


def ratio(trained: Trained, name: str, peer: str) -> Spread:
    """Return how many times as fast an arm is as a peer, over the rounds."""
    seconds = {row.name: row.seconds for row in trained.table.rows}
    rounds = zip(seconds[name], seconds[peer], strict=True)
    return Spread.of([peer_seconds / own_seconds for own_seconds, peer_seconds in rounds])


def goals(results: Results) -> str:
    """Format each goal with the value that was measured."""
    rows = [*_speed_and_memory_goals(results), *_rate_goals(results), *_serving_goals(results)]
    return "## Goals\n\n" + grid(["what", "floor", "seen", "reached"], rows)


def _goal(what: str, bound: str, measured: str, reached: bool) -> list[str]:
    """Return a row of the table of goals."""
    return [what, bound, measured, "yes" if reached else "no"]


def _at_least(what: str, floor: float, measured: Spread) -> list[str]:
    """Return the row of a goal whose median must not be below a floor."""
    return _goal(what, f"≥ {floor}", measured.text(), measured.median >= floor)


def _speed_and_memory_goals(results: Results) -> Iterator[list[str]]:
    """Compare the fastest training arm of Heedful with padded batches, and with the fastest peer."""
    for what, floor in ((BASE, 1.25), (BASE + COMPILED, 1.25), ("full length, base", 1.15)):
        trained = results.trained.get(what)
        if trained is None or len({row.ours for row in trained.table.rows}) < 2:
            continue
        own, peer = best(trained, is_heedful=True), best(trained, is_heedful=False)
        if what.startswith("mixed"):
            yield _at_least(f"{what}: {own} to {PADDED}", 4.0, ratio(trained, own, PADDED))
        yield _at_least(f"{what}: {own} to {peer}", floor, ratio(trained, own, peer))
        if trained.memory[PADDED]:
            share = trained.memory[own] / trained.memory[PADDED]
            yield _goal(f"{what}: peak memory to {PADDED}", "≤ 0.5", f"{share:.2f}", share <= 0.5)


def _rate_goals(results: Results) -> Iterator[list[str]]:
    """Compare the rates of training with that of matrix products, and those of mixed and equal lengths."""
    for shape, floor in (("base", 0.50), ("base" + COMPILED, 0.50), ("large", 0.50), ("small", 0.38)):
        trained = results.trained.get(f"mixed lengths, {shape}")
        if trained is not None and any(row.ours for row in trained.table.rows):
            name = best(trained, is_heedful=True)
            yield _at_least(f"share of the matrix rate, {shape}, {name}", floor, trained.shares[name])
    mixed, uniform = results.trained.get(BASE), results.trained.get("one length, base")
    if mixed and uniform and HEEDFUL in mixed.shares and HEEDFUL in uniform.shares:
        mixed_rate, uniform_rate = (
            next(row for row in trained.table.rows if row.name == HEEDFUL).tokens_per_second.median
            for trained in (mixed, uniform)
        )
        share = mixed_rate / uniform_rate
        yield _goal("ragged over uniform, medians", "≥ 0.92", f"{share:.2f}", share >= 0.92)


def _serving_goals(results: Results) -> Iterator[list[str]]:
    """Compare the last arm of each kind of input, which is Heedful's, with the others."""
    for kind, served in results.served.items():
        first, *_ = served.seconds
        own, *others = reversed(served.seconds)
        if kind == "mixed" or kind.startswith("decoding"):
            yield _at_least(f"{served.what}: to the best other arm", 1.5, served.against(own, others))
        else:
            milliseconds = 1e3 * Spread.of(served.seconds[own]).median
            yield _goal(f"{served.what}, ms", "< 0.7", f"{milliseconds:.3f}", milliseconds < 0.7)
            yield _at_least(f"{served.what}, to transformers", 6.0, served.against(own, [first]))


# -- parts --------------------------------------------------------------------------------------------------------


def parts(results: Results, size: Size, device: Any, clock: Clock) -> list[Part]:
    """Return the parts to measure, the most important ones first. Their functions add to `results`."""

    def training(what: str, seconds: float, names: Sequence[str]) -> Part:
        def run() -> str:
            results.trained[what] = train(what, names, size, device, results.rates["matrix"], clock)
            return training_text(results.trained[what])

        return what, seconds, run

    def serving(what: str, seconds: float, measure: Callable[[], dict[str, Served]]) -> Part:
        def run() -> str:
            served = measure()
            results.served |= served
            return "\n".join(measured.text() for measured in served.values())

        return what, seconds, run

    return [
        training(BASE, 60.0, MIXED),
        *(serving(f"one text, {shape}", 20.0, partial(serve_alone, size, device, shape)) for shape in SHAPES),
        training("full length, base", 30.0, FULL),
        serving("mixed texts", 30.0, partial(serve_mixed, size, device)),
        serving("decoding", 30.0, partial(serve_decoding, size, device)),
        training("mixed lengths, large", 30.0, TWO),
        training("mixed lengths, small", 30.0, TWO),
        training("one length, base", 30.0, TWO),
        training(BASE + COMPILED, 20.0 + COMPILING, FASTER),
        training(f"{BASE}, dropout 0.1", 30.0, TWO),
        training(f"{BASE}, float32", 30.0, TWO),
        training(f"{BASE}, rotary", 30.0, TWO),
    ]


def group_of(part: str) -> str:
    """Return the group of a part, by its name: one of GROUPS."""
    if "length" not in part:
        return "serving"
    return "variants" if part.startswith(f"{BASE}, ") and not part.endswith(COMPILED) else "training"


def measure_parts(
    results: Results, size: Size, device: Any, clock: Clock, only: str | None, folder: Path | None
) -> None:
    """Measure the parts for which time is left, and write the record after each part.

    Args:
        only: One of GROUPS to measure its parts alone, or None to measure all.
        folder: The folder of the record, or None to write no record.
    """
    for name, seconds, run in parts(results, size, device, clock):
        if only not in (None, group_of(name)):
            continue
        if clock.left < seconds:
            results.missing[name] = f"{max(0.0, clock.left):.0f} s were left, {seconds:.0f} are needed"
            continue
        try:
            print(run(), flush=True)
        except Exception as error:  # the other parts are measured nevertheless, and the record says so
            traceback.print_exc()
            results.missing[name] = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ").replace("|", "/")
        if folder:
            record(results, size, device, folder, only)


def record(results: Results, size: Size, device: Any, folder: Path, only: str | None) -> Path:
    """Write the measurements so far and return the path of the record, whose name has `only` at its end."""
    about = ABOUT.format(
        device=_description(device),
        versions=", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "sentence-transformers")),
        rounds=size.rounds,
        fewest=FEWEST,
        vocabulary=lengths.VOCABULARY,
        checks=CHECKS,
        bound=BOUND.difference,
    )
    return write(f"gpu-{only}" if only else "gpu", about, results.texts(), results.data(), folder)


def _description(device: Any) -> str:
    """Return the name and the memory of a GPU, and the versions of its interfaces."""
    import torch

    if device.type != "cuda":
        return "a rehearsal on the CPU"
    properties = torch.cuda.get_device_properties(device)
    memory, compute = f"{properties.total_memory / 2**30:.0f} GiB", f"compute {properties.major}.{properties.minor}"
    return f"{properties.name}, {memory}, {compute}, CUDA {torch.version.cuda}"


def _version(name: str) -> str:
    """Return the version of a package, or "absent"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def main() -> None:
    """Measure all parts, print them and write the record. The exit status is 1 if something was not measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="parts that need more time than is left are skipped")
    parser.add_argument("--rehearse", action="store_true", help="measure tiny shapes without a record; needs no GPU")
    parser.add_argument("--only", choices=GROUPS, help="measure these parts alone")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    options = parser.parse_args()
    clock = Clock(options.minutes)
    import torch

    if not (options.rehearse or torch.cuda.is_available()):
        parser.error("there is no CUDA device: give --rehearse to try the script on a CPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size, results = rehearsal() if options.rehearse else Size(), Results()
    assert {*MIXED, *FASTER, *FULL, *TWO} == set(WAYS), "there is an arm that no part measures"
    print(_description(device), flush=True)
    results.rates = rates(size, device)
    folder = options.output or (None if options.rehearse else RESULTS)
    if folder is not None:
        check_destination(folder)
    measure_parts(results, size, device, clock, options.only, folder)
    print(*results.texts()[:2], sep="\n")
    if folder:
        print(record(results, size, device, folder, options.only))
    for name, why in results.missing.items():
        print(f"not measured: {name}: {why}")
    failed = [name for trained in results.trained.values() for name in trained.failed]
    raise SystemExit(1 if results.missing or failed else 0)


if __name__ == "__main__":
    main()

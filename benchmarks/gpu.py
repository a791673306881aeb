"""Heedful on a GPU: pre-training against padded batches, shares of the matrix rate, memory, serving.

python benchmarks/gpu.py --minutes 9      # all of it, on one CUDA device; what was measured is written as it comes
python benchmarks/gpu.py --rehearse       # the same on tiny shapes, on a CPU where there is no GPU, without a record
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
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

ABOUT = """{device}; {versions}. One process; the arms of a table take turns, each round begins with the next one, and a
turn is timed from an idle device to an idle device. Ratios are taken in each round; tables show their medians and
extremes. {rounds} rounds, {fewest} at least where the time was up. Compiled arms have a table of their own.

Training: masked language modelling, fresh weights of BERT's shapes, a vocabulary of {vocabulary:,}, random ids; no
dropout, and bfloat16 by autocast, where a table does not say otherwise; weights and AdamW's moments (torch's fused
kernel) in float32, the norm clipped to 1; the loss of each step is read. Mixed lengths have a mean of 150 and go up to
512 (`mean150` of lengths.py): paragraphs and short articles. Sequences and hidden tokens are the same in all arms.
Batches lie on the device beforehand, but for `its trainer`, where hiding, packing and sending are counted. transformers
scores all positions, as its own model does; `padded` is to 512, `grouped` are sequences of like lengths of a round,
padded to a multiple of 8; where nothing is padded it is given no mask. `packed` are sequences end to end in rows of
512, which a mask keeps apart: transformers' own path without padding needs flash-attn, which is not installed. Before
timing every arm makes {checks} updates on one step: `difference` is the largest one of its losses to the first arm's
over the largest loss, and beyond {bound} an arm is not timed. Only real tokens count. The share of the matrix rate, of
bfloat16 products, is that of 3 (L (24 d² T + 4 d Σs²) + m (2 d² + 2 d V)) for T real tokens, sequences of s, and m
hidden tokens. Peak memory is an arm's own: what it holds between turns and what a turn adds.

Serving: bfloat16 weights, random ones in the shapes that are named. A text alone goes from ids on the host to the mean
of its rows on the host; mixed lengths go from text to vectors, in all-MiniLM-L6-v2's shape, by an engine as it is by
default; tokens are written greedily after prompts of 32 random ids, prompts included in the time."""
PADDED, GROUPED, PACKED = "transformers, padded", "transformers, grouped", "transformers, packed"
HEEDFUL, TRAINER = "heedful", "heedful, its trainer"
MIXED = (PADDED, GROUPED, PACKED, HEEDFUL, TRAINER)
FASTER = (PADDED, *(name + COMPILED for name in (HEEDFUL, PACKED, GROUPED, TRAINER)))  # in the order of compiling
FULL = (PADDED, HEEDFUL)
OWN = (GROUPED, HEEDFUL)  # what is trained by one arm of theirs and one of ours
BASE = "mixed lengths, base"


@dataclass(kw_only=True, slots=True)
class Found:
    """The measurements so far."""

    rates: dict[str, float] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)
    served: dict[str, Served] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # parts, and why they were not measured

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
    """The arm with the most tokens a second."""
    rows = [row for row in trained.table.rows if row.ours == is_heedful]
    return max(rows, key=lambda row: row.tokens_per_second.median).name


def ratio(trained: Trained, name: str, peer: str) -> Spread:
    """How many times as fast, in each round."""
    seconds = {row.name: row.seconds for row in trained.table.rows}
    return Spread.of([b / a for a, b in zip(seconds[name], seconds[peer], strict=True)])


def goals(results: Found) -> str:
    """Format each goal with the value that was measured."""
    rows: list[list[str]] = []

    def line(what: str, floor: str, seen: str, reached: bool) -> None:
        rows.append([what, floor, seen, "yes" if reached else "no"])

    def least(what: str, floor: float, seen: Spread) -> None:
        line(what, f"≥ {floor}", seen.text(), seen.median >= floor)

    for what, peer_floor in ((BASE, 1.25), (BASE + COMPILED, 1.25), ("full length, base", 1.15)):
        trained = results.trained.get(what)
        if trained is None or len({row.ours for row in trained.table.rows}) < 2:
            continue
        mine, peer_arm = best(trained, is_heedful=True), best(trained, is_heedful=False)
        if what.startswith("mixed"):
            least(f"{what}: {mine} to {PADDED}", 4.0, ratio(trained, mine, PADDED))
        least(f"{what}: {mine} to {peer_arm}", peer_floor, ratio(trained, mine, peer_arm))
        if trained.memory[PADDED]:
            share = trained.memory[mine] / trained.memory[PADDED]
            line(f"{what}: peak memory to {PADDED}", "≤ 0.5", f"{share:.2f}", share <= 0.5)
    for shape, floor in (("base", 0.50), ("base" + COMPILED, 0.50), ("large", 0.50), ("small", 0.38)):
        trained = results.trained.get(f"mixed lengths, {shape}")
        if trained is not None and any(row.ours for row in trained.table.rows):
            name = best(trained, is_heedful=True)
            least(f"share of the matrix rate, {shape}, {name}", floor, trained.shares[name])
    mixed, even = results.trained.get(BASE), results.trained.get("one length, base")
    if mixed and even and OWN[1] in mixed.shares and OWN[1] in even.shares:
        rate = [
            next(row for row in case.table.rows if row.name == OWN[1]).tokens_per_second.median
            for case in (mixed, even)
        ]
        line("ragged over uniform, medians", "≥ 0.92", f"{rate[0] / rate[1]:.2f}", rate[0] >= 0.92 * rate[1])
    for what, served in results.served.items():
        name, *others = reversed(served.seconds)
        if what == "mixed" or what.startswith("decoding"):
            least(f"{served.what}: to the best other arm", 1.5, served.against(name, others))
            continue
        middle = 1e3 * Spread.of(served.seconds[name]).median
        line(f"{served.what}, ms", "< 0.7", f"{middle:.3f}", middle < 0.7)
        least(f"{served.what}, to transformers", 6.0, served.against(name, [next(iter(served.seconds))]))
    return "## Goals\n\n" + grid(["what", "floor", "seen", "reached"], rows)


# -- all of it ----------------------------------------------------------------------------------------------------


def parts(results: Found, size: Size, device: Any, clock: Clock) -> list[tuple[str, float, Callable[[], str]]]:
    """List the parts to measure, most important first: name, seconds that it needs, function that measures it."""

    def training(what: str, names: Sequence[str]) -> str:
        results.trained[what] = train(what, names, size, device, results.rates["matrix"], clock)
        return training_text(results.trained[what])

    def serving(run: Callable[[], dict[str, Served]]) -> str:
        served = run()
        results.served |= served
        return "\n".join(one.text() for one in served.values())

    several: list[tuple[str, float, Callable[[], str]]] = [(BASE, 60.0, partial(training, BASE, MIXED))]
    for shape in SHAPES:
        several.append((f"one text, {shape}", 20.0, partial(serving, partial(serve_alone, size, device, shape))))
    several.append(("full length, base", 30.0, partial(training, "full length, base", FULL)))
    several.append(("mixed texts", 30.0, partial(serving, partial(serve_mixed, size, device))))
    several.append(("decoding", 30.0, partial(serving, partial(serve_decoding, size, device))))
    for what in ("mixed lengths, large", "mixed lengths, small", "one length, base"):
        several.append((what, 30.0, partial(training, what, OWN)))
    several.append((BASE + COMPILED, 20.0 + COMPILING, partial(training, BASE + COMPILED, FASTER)))
    for what in (f"{BASE}, dropout 0.1", f"{BASE}, float32"):
        several.append((what, 30.0, partial(training, what, OWN)))
    return several


def record(results: Found, size: Size, device: Any, folder: Path, part: str | None) -> Path:
    """Write what there is; the record of one part is named after it."""
    about = ABOUT.format(
        device=_named(device),
        versions=", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "sentence-transformers")),
        rounds=size.rounds,
        fewest=FEWEST,
        vocabulary=lengths.VOCABULARY,
        checks=CHECKS,
        bound=BOUND.difference,
    )
    return write(f"gpu-{part}" if part else "gpu", about, results.texts(), results.data(), folder)


def _named(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return "a rehearsal on the CPU"
    known = torch.cuda.get_device_properties(device)
    memory, compute = f"{known.total_memory / 2**30:.0f} GiB", f"compute {known.major}.{known.minor}"
    return f"{known.name}, {memory}, {compute}, CUDA {torch.version.cuda}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def main() -> None:
    """Measure, print and write; the exit status says whether something was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="no part is begun for which no time is left")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, also without a GPU, without a record")
    parser.add_argument("--only", choices=("training", "serving"), help="measure these parts alone")
    parser.add_argument("--output", type=Path, help="another folder for the record")
    chosen = parser.parse_args()
    clock = Clock(chosen.minutes)
    import torch

    if not (chosen.rehearse or torch.cuda.is_available()):
        parser.error("there is no CUDA device: give --rehearse to try the script on a CPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size, results = rehearsal() if chosen.rehearse else Size(), Found()
    assert {*MIXED, *FASTER, *FULL, *OWN} == set(WAYS), "a way that no part measures"
    print(_named(device), flush=True)
    results.rates = rates(size, device)
    folder = chosen.output or (None if chosen.rehearse else RESULTS)
    if folder is not None:
        check_destination(folder)
    for name, seconds, run in parts(results, size, device, clock):
        if chosen.only is not None and ("length" in name) != (chosen.only == "training"):
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
            record(results, size, device, folder, chosen.only)
    print(*results.texts()[:2], sep="\n")
    if folder:
        print(record(results, size, device, folder, chosen.only))
    for name, why in results.missing.items():
        print(f"not measured: {name}: {why}")
    failed = [name for trained in results.trained.values() for name in trained.failed]
    raise SystemExit(1 if results.missing or failed else 0)


if __name__ == "__main__":
    main()

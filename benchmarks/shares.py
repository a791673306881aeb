"""Compute the share of the matrix rate that Heedful's arms of a record reach.

The script divides the operations that the tokens need by the measured seconds, and by the rate of large matrix products
on this machine.

python benchmarks/shares.py results/training-sst2-0.0-DATE.json results/training-mean150-0.0-DATE.json
python benchmarks/shares.py --name shares-serving results/forward-minilm-short-DATE.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels import rate
from lengths import draw
from report import RESULTS, Spread, check_destination, grid, write

ABOUT = """The multiplications and additions a second that the real tokens of a record need, over the rate of products
alone on this machine: {rates} GFLOP/s, by the fastest kernel of each precision, for 4,096 x 768 with 768 x 3,072, in
{rounds} rounds; the time to round to int8 counts. For L layers of width d, a sequence of s tokens needs
L (24 d^2 s + 4 d s^2), training three times that, and BERT-Mini's head 2 d^2 + 2 d V for each masked token. Other
operations do not count, but their time does: embeddings, norms, activations, dropout, packing, the optimizer. A record
of another day may be of another machine."""
PRECISIONS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The multiplications and additions that a token needs in a model."""

    layers: int
    width: int  # hidden size
    trained: bool = False  # whether there is a backward pass
    head: float = 0.0  # operations of the head for each token

    def flop(self, lengths: list[float]) -> float:
        """Return the operations of a token, in the mean over sequences of these lengths."""
        tokens, squares, d = sum(lengths), sum(length**2 for length in lengths), self.width
        once = self.layers * (24 * d * d + 4 * d * squares / tokens) + self.head
        return 3 * once if self.trained else once


SERVED = Work(layers=6, width=384)
TRAINED = Work(layers=6, width=384, trained=True)
MASKED, WORDS = 0.15, 30_522  # share of the tokens that are masked, and the vocabulary
MINI = Work(layers=4, width=256, trained=True, head=MASKED * (2 * 256**2 + 2 * 256 * WORDS))
WORKS = {"SHORT": SERVED, "MIXED": SERVED, "LONG": SERVED, "sst2": TRAINED, "mean150": TRAINED, "mini": MINI}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The share of the matrix rate that an arm of a record uses."""

    record: str
    arm: str
    gflops: Spread  # GFLOP/s that its tokens need
    percent: Spread  # of the matrix rate


def needed(path: Path) -> dict[str, list[float]]:
    """Return the GFLOP/s that the tokens need, for each table and arm of Heedful in a record, and each round."""
    gflops: dict[str, list[float]] = {}
    for table in json.loads(path.read_text("utf-8"))["tables"]:
        title, count = table["title"], table["sequences"]
        if title not in WORKS:
            raise SystemExit(f"{path} has a table {title!r}; expected one of {', '.join(WORKS)}")
        lengths = [table["tokens"] / count] * count if title == "mini" else list(map(float, draw(title, count)))
        gflop = table["tokens"] * WORKS[title].flop(lengths) / 1e9
        for row in table["rows"]:
            if row["ours"]:
                gflops[f"{title}, {row['name']}"] = [gflop / seconds for seconds in row["seconds"]]
    return gflops


def main() -> None:
    """Read the records, measure the matrix rates, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="JSON files, of training.py, pretraining.py, forward.py")
    parser.add_argument("--name", default="shares", help="name of the record")
    parser.add_argument("--rounds", type=int, default=41, help="rounds in which the products are timed")
    parser.add_argument("--output", type=Path, default=RESULTS, help="another folder for the record")
    options = parser.parse_args()
    check_destination(options.output)
    arms = [(path.stem, arm, gflops) for path in options.records for arm, gflops in needed(path).items()]
    precisions = [next(precision for precision in PRECISIONS if precision in arm) for _, arm, _ in arms]
    rates = {precision: rate(options.rounds, precision) for precision in PRECISIONS if precision in precisions}
    shares = [
        Share(
            record=record,
            arm=arm,
            gflops=Spread.of(gflops),
            percent=Spread.of([100 * value / rates[precision] for value in gflops]),
        )
        for (record, arm, gflops), precision in zip(arms, precisions, strict=True)
    ]
    rows = [[share.record, share.arm, share.gflops.text(0), share.percent.text(0)] for share in shares]
    text = grid(["record", "arm", "GFLOP/s needed", "per cent of the rate"], rows)
    print(text)
    peaks = ", ".join(f"{precision} {peak:,.0f}" for precision, peak in rates.items())
    about = ABOUT.format(rates=peaks, rounds=options.rounds)
    print(write(options.name, about, [text], [asdict(share) for share in shares], options.output))


if __name__ == "__main__":
    main()

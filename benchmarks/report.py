"""Write the records of benchmarks: tables and facts about the machine, as dated Markdown and JSON.

All benchmarks call `write`, most of them with the `Table` that harness.py makes. A record names the git commit that it
measured. Records in benchmarks/results come from checkouts without uncommitted changes; rehearsals go into other
folders.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# features of x86 processors that records name
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
# packages whose versions records name
PACKAGES = ("heedful", "torch", "transformers", "openvino", "nncf", "onnxruntime", "ctranslate2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The values of a measurement in all rounds, summarised."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]  # the first and the third

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        first, _, third = statistics.quantiles(values, method="inclusive") if len(values) > 1 else (values[0],) * 3
        return cls(median=statistics.median(values), low=min(values), high=max(values), quartiles=(first, third))

    def text(self, digits: int = 2) -> str:
        """Format the median and, in parentheses, the extremes."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The measurements of one arm; ratios compare tokens a second, so more than 1 means faster."""

    name: str
    ours: bool  # whether it is an arm of Heedful
    settings: str
    seconds: tuple[float, ...]  # time of each round
    tokens_per_second: Spread
    sequences_per_second: float  # median over the rounds
    to_best_peer: Spread  # ratios to the fastest peer of the same round
    to_reference: Spread  # ratios to the first arm
    difference: float  # largest difference of its sample to the reference's, over the reference's largest value
    cosine: float  # least cosine of its sample to the reference's
    checksum: str  # of its sample in float32
    aside: str = ""  # why the arm may not be the fastest peer, or ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Measurements of several arms on the same inputs."""

    title: str
    inputs: str  # digest of the inputs
    tokens: int  # tokens of one round, without padding
    sequences: int  # sequences of one round
    rounds: int
    best_peers: dict[str, int]  # in how many rounds each arm was the fastest peer
    others: float  # the largest share of the machine's cores that other processes used in a turn
    rows: tuple[Row, ...]

    def text(self) -> str:
        """Format the table as Markdown."""
        best = ", ".join(f"{name} in {count}" for name, count in self.best_peers.items())
        about = (
            f"## {self.title}: {self.sequences:,} sequences, {self.tokens:,} real tokens a round\n\n"
            f"{self.rounds} rounds; fastest peer: {best}; other processes took at most {self.others:.0%} "
            "of the machine in a turn.\n\n"
        )
        columns = ["arm", "settings", "real tokens/s", "quartiles", "sequences/s", "to the fastest peer"]
        return about + grid(
            [*columns, f"to {self.rows[0].name}", "difference", "cosine"],
            [
                [
                    (f"**{row.name}**" if row.ours else row.name) + (f" ({row.aside})" if row.aside else ""),
                    row.settings,
                    row.tokens_per_second.text(0),
                    "–".join(f"{edge:,.0f}" for edge in row.tokens_per_second.quartiles),
                    f"{row.sequences_per_second:,.1f}",
                    row.to_best_peer.text(),
                    row.to_reference.text(),
                    f"{row.difference:.1e}",
                    f"{row.cosine:.6f}",
                ]
                for row in self.rows
            ],
        )


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, ["---"] * len(columns), *rows))


def write(name: str, about: str, tables: Sequence[str], data: Any, folder: Path = RESULTS) -> Path:
    """Write name-date.md and name-date.json into the folder and return the path of the first.

    Raises:
        SystemExit: If the folder is in benchmarks/results and the checkout has uncommitted changes.
    """
    machine = facts()
    check_destination(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{machine['date']}.md"
    listed = "\n".join(f"* {key}: {value}" for key, value in machine.items())
    path.write_text("\n".join([f"# {name}, {machine['date']}\n", f"{about}\n", f"{listed}\n", *tables]), "utf-8")
    data = {"about": about, "machine": machine, "tables": data}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return path


def facts() -> dict[str, str]:
    """Return the date, the git commit, and facts about the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # there is no such file on this system
        lines = []
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = cpu.get("flags", "").split()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": current_commit(ROOT),
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "has": ", ".join(flag for flag in FLAGS if flag in flags) or "unknown",
        "has not": ", ".join(flag for flag in FLAGS if flag not in flags) if flags else "unknown",
        "versions": ", ".join(f"{name} {installed}" for name in PACKAGES if (installed := _version(name))),
        "system": f"Python {platform.python_version()}, {platform.system()}",
    }


def check_destination(path: Path) -> None:
    """Check that a record may be written to this file or folder; scripts that run for long call this first.

    Raises:
        SystemExit: If the path is in benchmarks/results and the checkout has uncommitted changes.
    """
    if path.resolve().is_relative_to(RESULTS.resolve()):
        clean_commit(ROOT)


def current_commit(checkout: Path) -> str:
    """Return the git commit of a checkout, with a note if it has uncommitted changes; "unknown" without git.

    A copy made by scripts/gpu_bundle.py has a file with its commit.
    """
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text(encoding="utf-8").strip()
    commit = _git(checkout, "rev-parse", "HEAD").strip()
    note = " with uncommitted changes" if commit and uncommitted_files(checkout) else ""
    return f"{commit}{note}" if commit else "unknown"


def uncommitted_files(checkout: Path) -> list[str]:
    """Return the files that differ from the commit or are untracked, except those in benchmarks/results."""
    status = _git(checkout, "status", "--porcelain", "--untracked-files=all", "--", ".", ":(exclude)benchmarks/results")
    return [line[3:] for line in status.splitlines()]


def clean_commit(checkout: Path) -> str:
    """Return the git commit of a checkout without uncommitted changes.

    Raises:
        SystemExit: If files outside benchmarks/results differ from the commit, or the folder is no git checkout.
    """
    commit = _git(checkout, "rev-parse", "HEAD").strip()
    if not commit:
        raise SystemExit(f"{checkout} is not a git checkout, so a record cannot name its commit: use a clone")
    if files := uncommitted_files(checkout):
        listed = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
        raise SystemExit(
            f"{checkout} has uncommitted changes ({listed}): commit them before measuring, or write the record into "
            "a folder outside benchmarks/results"
        )
    return commit


def machine_busy() -> float:
    """Return the seconds for which all cores together were busy since the machine started, or 0.0 if unknown.

    Time that a virtual machine's host took for other work counts as busy.
    """
    try:
        line = Path("/proc/stat").read_text("utf-8").splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupt, soft, steal = (int(word) for word in line.split()[1:9])
    return float(user + nice + system + interrupt + soft + steal) / float(os.sysconf("SC_CLK_TCK"))


def _version(name: str) -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _git(checkout: Path, *arguments: str) -> str:
    """Return the output of a git command, or "" if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""

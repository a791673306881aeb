"""Helpers of tests that compare, copy or save whole model folders."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import heedful

ROOT = Path(__file__).parents[2]
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 31, "max_position_embeddings": 12}  # of a config


def have_equal_weights(first: Path, second: Path) -> bool:
    """Load two folders, and return whether their weights are equal bit for bit."""
    first_weights, second_weights = heedful.load(first).named_tensors(), heedful.load(second).named_tensors()
    return first_weights.keys() == second_weights.keys() and all(
        torch.equal(first_weights[name], second_weights[name]) for name in first_weights
    )


def file_contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def make_hub_cache(folder: Path, cache: Path, commit: str = "0123456789abcdef0123456789abcdef01234567") -> Path:
    """Copy a folder into a cache of the hub, with links in `snapshots` to files in `blobs`; returns the snapshot."""
    root = cache / "models--maker--model"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for index, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, root / "blobs" / f"blob{index}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{index}")
    return snapshot


def run_python(code: str, *arguments: object) -> str:
    """Run code in a new Python process, and return its output."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()

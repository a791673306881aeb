#!/usr/bin/env python3
"""Install the wheel and the source distribution in empty environments, and run the quickstart in each.

usage: scripts/try_dist.py DIST [--torch REQUIREMENT] PYTHON ...

The script tries, with each Python, the wheel with compilers on the PATH, the wheel without them, and the source
distribution. It prints a line for each and exits with status 1 if one fails or a Python is missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = ("python", "heedful")  # on the PATH of an environment without compilers


class CommandError(Exception):
    """A command failed; the message has the end of its output."""


def run(*command: str | Path, cwd: Path, path: str | None = None) -> None:
    """Run a command.

    Raises:
        CommandError: If the command cannot be started, or its exit status is not 0.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HOME": str(cwd), "XDG_CACHE_HOME": str(cwd / "cache")}
    if path is not None:
        environment["PATH"] = path
    try:
        done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        output = (done.stdout + done.stderr).strip().splitlines()
        raise CommandError("\n".join([f"{' '.join(map(str, command))}: exit status {done.returncode}", *output[-15:]]))


def try_python(python: str, wheel: Path, source: Path, torch: str, folder: Path) -> None:
    """Install both distributions in a new environment, one after the other, and run the quickstart of each.

    Args:
        python: The Python of the environment.
        wheel: The wheel, whose quickstart is run with and without compilers.
        source: The source distribution.
        torch: The requirement that pip installs first.
        folder: An empty folder.
    """
    environment = folder / "environment"
    run(python, "-m", "venv", environment, cwd=folder)
    binaries = environment / "bin"
    pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, torch, cwd=folder)
    run(*pip, wheel, cwd=folder)
    without_compilers = folder / "bare"
    without_compilers.mkdir()
    for name in COMMANDS:
        (without_compilers / name).symlink_to(binaries / name)
    for label, path in (("wheel", None), ("wheel without a compiler", str(without_compilers))):
        report(python, label, binaries / "heedful", folder, path)
    run(*pip, "--force-reinstall", "--no-deps", source, cwd=folder)
    report(python, "source distribution", binaries / "heedful", folder, None)


def report(python: str, label: str, heedful: Path, folder: Path, path: str | None) -> None:
    """Run the quickstart in an empty folder, with an empty cache, and print its seconds."""
    empty_folder = Path(tempfile.mkdtemp(dir=folder))
    start = time.monotonic()
    run(heedful, "quickstart", cwd=empty_folder, path=path)
    print(f"{python}, {label}: quickstart in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    """Try all Pythons, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--torch", default="torch", help="requirement of PyTorch, which pip installs first")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    arguments = parser.parse_args()
    (wheel,), (source,) = (sorted(arguments.dist.resolve().glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    failed = False
    for python in arguments.pythons:
        with tempfile.TemporaryDirectory() as folder:
            try:
                try_python(python, wheel, source, arguments.torch, Path(folder))
            except CommandError as error:
                failed = True
                print(f"{python}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

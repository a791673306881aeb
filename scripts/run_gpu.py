"""Run one part of the checks of Heedful on a GPU machine; this file lies in a folder made by scripts/gpu_bundle.py.

python run_gpu.py --part kernels|tests|training|serving [--rehearse]

It needs Python with PyTorch alone. Wheels are unpacked to the folder `site` once. Output and records are in `results`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 480  # seconds of a part
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
KERNEL_TESTS = "kernel or heads or dropout"
PARTS = {
    "kernels": [*PYTEST, "-k", KERNEL_TESTS],
    "tests": [*PYTEST, "-k", f"not ({KERNEL_TESTS})"],
    "training": ["benchmarks/gpu.py", "--only", "training"],
    "serving": ["benchmarks/gpu.py", "--only", "serving"],
}


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Unpack wheels into a folder of packages, unless it is there."""
    if site.exists() or not wheels.exists():
        return
    partial = site.with_name("site.part")
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
    partial.rename(site)


def main() -> int:
    """Run the part, and return its exit status; 124: it took longer than LIMIT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU: tiny shapes, and tests/gpu are skipped")
    options = parser.parse_args()
    unpack_wheels(HERE / "wheels", HERE / "site")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    command = [sys.executable, *PARTS[options.part]]
    if "benchmarks/gpu.py" in command:
        command += ["--minutes", f"{LIMIT / 60 - 0.5}", *(["--rehearse"] if options.rehearse else [])]
        command += [] if options.rehearse else ["--output", str(results)]
    paths = os.pathsep.join(map(str, (HERE / "site", HERE / "code", HERE / "code/benchmarks")))
    log = results / f"{options.part}.txt"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        environment = os.environ | {"PYTHONPATH": paths}
        try:
            status = subprocess.run(
                command,
                cwd=HERE / "code",
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    print(*log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:], sep="\n")
    print(f"{options.part}: exit status {status} after {time.monotonic() - began:.0f} s; all output is in {log}")
    return status


if __name__ == "__main__":
    sys.exit(main())

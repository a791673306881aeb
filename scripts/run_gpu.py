"""Run one part of the checks of Heedful on a GPU machine.

scripts/gpu_bundle.py makes a folder with this file, the code and the packages.

python run_gpu.py --part kernels|compiled|tests|training|variants|serving [--seconds 480] [--rehearse]

The machine needs Python and PyTorch. Packages are unpacked once, to `site`; output and records are in `results`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 480  # seconds after which a part ends
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "5", "--durations", "12", "tests/gpu"]
COMPILED, KERNELS = "flex or compiled", "kernel or heads or dropout"
PARTS = {
    "kernels": [*PYTEST, "-k", f"({KERNELS}) and not ({COMPILED})"],
    "compiled": [*PYTEST, "-k", COMPILED],  # takes minutes to compile
    "tests": [*PYTEST, "-k", f"not ({KERNELS} or {COMPILED})"],
    "training": ["benchmarks/gpu.py", "--only", "training"],
    "variants": ["benchmarks/gpu.py", "--only", "variants"],
    "serving": ["benchmarks/gpu.py", "--only", "serving"],
}


def unpack_packages(archive: Path, site: Path) -> None:
    """Unpack an archive of packages into a folder, unless it is there."""
    if site.exists() or not archive.exists():
        return
    partial = site.with_name("site.part")
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    (partial / "site").rename(site)


def main() -> int:
    """Run the part, and return its exit status, or 124 if it took longer than --seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--seconds", type=float, default=LIMIT, help="seconds after which the part ends")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes, without tests/gpu")
    options = parser.parse_args()
    unpack_packages(HERE / "site.tar.xz", HERE / "site")
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    command = [sys.executable, *PARTS[options.part]]
    if "benchmarks/gpu.py" in command:
        command += ["--minutes", f"{options.seconds / 60 - 0.25:.2f}", *(["--rehearse"] if options.rehearse else [])]
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
                timeout=options.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    print(*log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:], sep="\n")
    print(f"{options.part}: exit status {status} after {time.monotonic() - began:.0f} s; all output is in {log}")
    return status


if __name__ == "__main__":
    sys.exit(main())

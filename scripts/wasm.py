"""Compile heedful/page/forward.cpp to forward.wasm beside it, with the compiler of the extra `wasm`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "heedful" / "page"
FLAGS = (
    "-target",
    "wasm32-freestanding",
    "-mcpu=generic+simd128+bulk_memory",
    "-std=c++17",
    "-O3",
    "-s",
    "-ffreestanding",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-Wall",
    "-Werror",
    "-nostdlib",
    "-Wl,--no-entry",
)


def compile_wasm(output: Path) -> None:
    """Write the WebAssembly module; one version of the compiler writes the same bytes on all machines."""
    command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, "-o", str(output.absolute()), "forward.cpp"]
    subprocess.run(command, cwd=PAGE, check=True)


if __name__ == "__main__":
    compile_wasm(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE / "forward.wasm")

"""Write the folder of an encoder that ships: float16, the masked head, and the files of sentence-transformers.

python benchmarks/encoder_package.py RUN OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import heedful


def main() -> None:
    """Convert the model of a run or a model folder, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    model = heedful.load(arguments.run, head="masked_lm", dtype=torch.float16)
    heedful.save(model, arguments.out, pooling="mean")
    size = sum(file.stat().st_size for file in arguments.out.rglob("*") if file.is_file())
    parameters = sum(tensor.numel() for tensor in model.parameters())
    print(f"{parameters:,} parameters, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

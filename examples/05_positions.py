"""Positions: "Shivas spoke to Pavlos" against "Pavlos spoke to Shivas", and sinusoids as clock hands.

Idea: attention does not know the order of its inputs. Sines and cosines of several frequencies, like the hands of a
clock, give each position a vector of its own.
Code: heedful/nn/positions.py, kinds of positions in heedful/model/config.py; heedful/study/positions.py.
Expect: without positions the scores of the two sentences are equal, to rounding; with any kind of positions they
differ, even before training. The dot product of two sinusoid vectors depends on their distance alone, and no two
positions have the same vector.
"""

import torch

from heedful.nn.positions import sinusoid
from heedful.study.build import word_level_tokenizer
from heedful.study.positions import ARMS, PERMUTED, build_model, permutation_change

POSITIONS, WIDTH = 64, 32


def sinusoids() -> torch.Tensor:
    """Return the sinusoid vector of each position, [positions, width]."""
    return sinusoid(torch.arange(POSITIONS), WIDTH)


def main() -> dict[str, float]:
    """Return the change of the scores when the two names are swapped, for each kind of positions."""
    tokenizer = word_level_tokenizer(PERMUTED)
    return {arm: permutation_change(build_model(arm, tokenizer, seed=1)) for arm in ARMS}


if __name__ == "__main__":
    print(f'"{PERMUTED[0]}" against "{PERMUTED[1]}": the largest change of a score')
    for arm, value in main().items():
        print(f"{arm:24}{value:.2g}")
    products = sinusoids() @ sinusoids().T
    print("\ndot products of sinusoid vectors, d positions apart, from positions 0, 20 and 40")
    for distance in (0, 1, 2, 4, 8, 16):
        print(f"d = {distance:<3}" + "".join(f"{products[start, start + distance]:9.3f}" for start in (0, 20, 40)))

"""Positions: "Shivas spoke to Pavlos" against "Pavlos spoke to Shivas", and the clock.

Idea: attention has no notion of order (D0 "Positional Encoding", D2 "Positional Encodings", D4 "Position agnostic");
the clock's hands, sines and cosines of several frequencies, give each place a vector of its own (D0).
Code: heedful/nn/positions.py, kinds of positions in heedful/model/config.py; heedful/study/positions.py.
Expect: without positions the scores of two orders are equal to rounding, with each kind they differ, even before any
training. Products of the clock's vectors depend on the distance alone, and no two places have the same vector.
"""

import torch

from heedful.nn.positions import sinusoid
from heedful.study.build import word_level_tokenizer
from heedful.study.positions import ARMS, PERMUTED, build_model, permutation_change

PLACES, WIDTH = 64, 32


def clock() -> torch.Tensor:
    """A vector for each place."""
    return sinusoid(torch.arange(PLACES), WIDTH)


def main() -> dict[str, float]:
    """By how much a score changes when the two names change places, for each kind of positions."""
    tokenizer = word_level_tokenizer(PERMUTED)
    return {arm: permutation_change(build_model(arm, tokenizer, seed=1)) for arm in ARMS}


if __name__ == "__main__":
    print(f'"{PERMUTED[0]}" against "{PERMUTED[1]}": the largest change of a score')
    for arm, value in main().items():
        print(f"{arm:24}{value:.2g}")
    products = clock() @ clock().T
    print("\nproducts of the clock's vectors, d places apart, from place 0, 20 and 40")
    for distance in (0, 1, 2, 4, 8, 16):
        print(f"d = {distance:<3}" + "".join(f"{products[at, at + distance]:9.3f}" for at in (0, 20, 40)))

"""Attention as a weighted average: six ways to score, one softmax, one sum.

Idea: weights that are positive and sum to 1 say how much of each value is read (D0 "Attention - The basics", D3 "Draw
attention for classification", D4 "Popular Attention Scoring functions"); D1 has all six scores in one table.
Code: heedful/nn/scores.py: `cosine`, `dot`, `scaled_dot`, `General`, `Additive`, `Location`; `soft`, `hard`, `read`.
Expect: every row of weights sums to 1; the query is like the third key, so products and cosine look there most;
location never sees a key; those with random weights have learned nothing yet; hard attention reads one value alone.
"""

import torch

from heedful.nn.layout import Layout
from heedful.nn.scores import (
    Additive,
    General,
    Location,
    align,
    cosine,
    dot,
    hard_weights,
    scaled_dot,
    soft_weights,
    weighted_sum,
)

WIDTH, KEYS = 8, 5


def main() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights of each score, and what is read with them."""
    torch.manual_seed(0)
    keys, values = torch.randn(KEYS, WIDTH), torch.eye(KEYS)  # such values show the weights once more
    query = 1.5 * keys[2:3]
    layout = Layout.of([0, 1], [0, KEYS])  # one query to five keys
    scores = {
        "cosine": cosine,
        "dot": dot,
        "scaled dot": scaled_dot,
        "general": General(width=WIDTH, key_width=WIDTH),
        "additive": Additive(width=WIDTH, key_width=WIDTH, inner_width=WIDTH),
        "location": Location(width=WIDTH, longest=KEYS),
    }
    found = {}
    with torch.no_grad():
        for name, score in scores.items():
            weights = soft_weights(align(score, query, keys, layout))
            found[name] = weights[0][0], weighted_sum(weights, values, layout)[0]
        weights = hard_weights(align(dot, query, keys, layout))
        found["hard, dot"] = weights[0][0], weighted_sum(weights, values, layout)[0]
    return found


if __name__ == "__main__":
    print(f"{'':12}" + "".join(f"  key {number}" for number in range(KEYS)) + "    sum")
    for name, (weights, _) in main().items():
        print(f"{name:12}" + "".join(f"{each:7.3f}" for each in weights) + f"{weights.sum():7.3f}")

"""Attention as a weighted average: six ways to score, one softmax, one sum.

Idea: weights that are positive and sum to 1 say how much of each value is read.
Code: `cosine`, `dot`, `scaled_dot`, `General`, `Additive`, `Location`, `soft_weights`, `hard_weights` and
`weighted_sum` in heedful/nn/scores.py.
Expect: every row of weights sums to 1. The query is a multiple of the third key (key 2), so the dot product and the
cosine give that key the largest weight. Location never sees a key. General, additive and location have random weights
here: they have learned nothing yet. Hard attention reads a single value.
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
    """Return the attention weights of each score function, and the weighted sum of the values."""
    torch.manual_seed(0)
    keys, values = torch.randn(KEYS, WIDTH), torch.eye(KEYS)  # the weighted sum of unit vectors is the weights again
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
    results = {}
    with torch.no_grad():
        for name, score in scores.items():
            weights = soft_weights(align(score, query, keys, layout))
            results[name] = weights[0][0], weighted_sum(weights, values, layout)[0]
        weights = hard_weights(align(dot, query, keys, layout))
        results["hard, dot"] = weights[0][0], weighted_sum(weights, values, layout)[0]
    return results


if __name__ == "__main__":
    print(f"{'':12}" + "".join(f"  key {number}" for number in range(KEYS)) + "    sum")
    for name, (weights, _) in main().items():
        print(f"{name:12}" + "".join(f"{weight:7.3f}" for weight in weights) + f"{weights.sum():7.3f}")

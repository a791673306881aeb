"""A recurrent decoder with attention: at each step it looks at all source states, not at one vector of the text.

s_t = GRU([y; c_t], s_(t-1)), where c_t is the mean of the source states weighted by additive scores of s_(t-1)
(Bahdanau et al. 2015, section 3).
"""

import torch
from torch import nn

from heedful.nn.layout import Layout
from heedful.nn.scores import Additive, align, soft_weights, weighted_sum

WIDTH, SOURCE, TARGET = 6, 5, 4


def main() -> torch.Tensor:
    """Return the alignment [target, source], after comparing each step's context with the library's."""
    torch.manual_seed(0)
    states, _ = nn.GRU(WIDTH, WIDTH, batch_first=True)(torch.randn(1, SOURCE, WIDTH))  # encoder
    states, cell = states[0], nn.GRUCell(2 * WIDTH, WIDTH)
    score = Additive(width=WIDTH, key_width=WIDTH, inner_width=WIDTH)
    target, state, alignment = torch.randn(TARGET, WIDTH), states[-1:], []
    for y in target:
        scores = score.out((score.query(state) + score.key(states)).tanh())[:, 0]  # [source]
        weights = scores.softmax(-1)
        context = weights @ states
        layout = Layout.of([0, 1], [0, SOURCE])
        library = weighted_sum(soft_weights(align(score, state, states, layout)), states, layout)
        assert torch.allclose(context, library[0], atol=1e-6)
        state = cell(torch.cat([y, context])[None], state)
        alignment.append(weights)
    return torch.stack(alignment).detach()


if __name__ == "__main__":
    for row in main():
        print(" ".join(f"{weight:.2f}" for weight in row))

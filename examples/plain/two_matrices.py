"""Why queries and keys have two matrices: who scores highest with itself, and what one shared matrix cannot learn.

With W_Q = W_K = W the score of i and j is (W x_i) . (W x_j). By Cauchy and Schwarz the word with the longest W x then
scores highest with itself, whatever W is. Two matrices have no such limit.
"""

import torch

from heedful.nn.scores import dot

WORDS, WIDTH, HEAD = 12, 64, 16


def on_diagonal(scores: torch.Tensor) -> float:
    """Share of the rows whose highest score is the one with themselves."""
    return float((scores.argmax(-1) == torch.arange(len(scores))).float().mean())


def look_at_next(x: torch.Tensor, shared: bool) -> float:
    """Train scores so that each word looks at the next one; share of the words that do so."""
    wq = torch.nn.Parameter(torch.randn(WIDTH, HEAD) / WIDTH**0.5)
    wk = wq if shared else torch.nn.Parameter(torch.randn(WIDTH, HEAD) / WIDTH**0.5)
    following = torch.arange(1, WORDS + 1) % WORDS  # the last word looks at the first
    optimizer = torch.optim.Adam([wq] if shared else [wq, wk], lr=0.01)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(x @ wq @ (x @ wk).T / HEAD**0.5, following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(((x @ wq @ (x @ wk).T).argmax(-1) == following).float().mean())


def main() -> dict[str, float]:
    """Return the share of words on the diagonal, and of words that learned to look at the next one."""
    torch.manual_seed(0)
    x = torch.randn(WORDS, WIDTH)
    wq, wk = torch.randn(2, WIDTH, HEAD)
    assert torch.allclose(dot(x @ wq, x @ wk), x @ (wq @ wk.T) @ x.T, rtol=1e-3, atol=1e-2)  # the library's scores
    found = {
        "highest with itself, no matrices": on_diagonal(x @ x.T),
        "highest with itself, one shared random matrix": on_diagonal(dot(x @ wq, x @ wq)),
        "highest with itself, two random matrices": on_diagonal(dot(x @ wq, x @ wk)),
        "learned to look at the next word, one shared matrix": look_at_next(x, shared=True),
        "learned to look at the next word, two matrices": look_at_next(x, shared=False),
    }
    assert found["learned to look at the next word, two matrices"] == 1.0
    assert found["learned to look at the next word, one shared matrix"] < 1.0
    return found


if __name__ == "__main__":
    for name, share in main().items():
        print(f"{name:54} {share:.2f}")

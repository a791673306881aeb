"""Do attention weights explain an answer? Remove each word and see what that does to the score.

A classifier with one trained query learns "positive if the values of the words sum to more than 0". The change of the
score when a word is removed is measured; its weight only says how much of it was read.
"""

import torch
from torch import nn

from heedful.model.classic_config import AttentionPooling
from heedful.model.pooling import QueryPooler

VALUES = {"the": 0, "end": 0, "is": 0, "a": 0, "but": 0, "what": 0, "music": 0, "very": 0}
VALUES |= {"bad": -1, "awful": -2, "dull": -1, "fine": 1, "great": 2, "good": 1}
WORDS, WIDTH = list(VALUES), 16
TEXT = ["the", "end", "is", "very", "bad", "but", "what", "a", "great", "music"]


class Reader(nn.Module):
    """a = softmax(X q / sqrt(d)), h = a^T X, score = w . h + b."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(len(WORDS), WIDTH)
        self.q, self.out = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and weights of texts [batch, words]."""
        x = self.vectors(tokens)
        weights = (self.q(x)[..., 0] / WIDTH**0.5).softmax(-1)
        return self.out((weights[..., None] * x).sum(-2))[..., 0], weights


def train(seed: int) -> Reader:
    """Learn from random texts of ten words whose values do not sum to 0."""
    torch.manual_seed(seed)
    reader, values = Reader(), torch.tensor(list(VALUES.values()))
    optimizer = torch.optim.Adam(reader.parameters(), lr=0.01)
    for _ in range(300):
        tokens = torch.randint(len(WORDS), (64, len(TEXT)))
        sums = values[tokens].sum(-1)
        scores, used = reader(tokens)[0], (sums != 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(scores, (sums > 0).float(), used)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return reader


def main(seed: int = 0) -> list[tuple[str, float, float]]:
    """Return each word, its weight, and how far the score falls when it is removed."""
    reader, tokens = train(seed), torch.tensor([WORDS.index(word) for word in TEXT])
    with torch.no_grad():
        (score,), (weights,) = reader(tokens[None])
        library = QueryPooler(AttentionPooling(keys="rows", values="rows", scaled=True), WIDTH, 1, WIDTH)
        library.queries.copy_(reader.q.weight)
        x = reader.vectors(tokens)
        assert torch.allclose(library.weights(x, (0, len(TEXT)))[0][0], weights, atol=1e-5)
        without = [tokens[torch.arange(len(TEXT)) != n] for n in range(len(TEXT))]
        changes = [float(score - reader(rest[None])[0][0]) for rest in without]
    return list(zip(TEXT, weights.tolist(), changes, strict=True))


if __name__ == "__main__":
    for word, weight, change in main():
        print(f"{word:6} weight {weight:.3f}  part of the score {change:+.3f}")

"""[CLS], mean or learned attention over the rows of a frozen encoder: which classifies best?

The encoder that ships reads 480 messages to a library once; a linear layer is then trained on each kind of vector. Its
pre-training asked the mean of the rows to be a sentence vector, and [CLS] alone to compare the two texts of a pair.
"""

import csv
from importlib.resources import files

import torch
from torch import nn

import heedful
from heedful.model.classic_config import AttentionPooling
from heedful.model.pooling import QueryPooler

STEPS = 150


def rows_of(model: heedful.ModelBundle, split: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Last hidden states padded to [texts, longest, width], which of them are present, and the labels."""
    lines = files("heedful").joinpath("assets", "intents", f"{split}.csv").read_text(encoding="utf-8").splitlines()
    table = list(csv.DictReader(lines))
    batch = heedful.Packed.of([each.ids for each in model.tokenizer.encode_batch([row["text"] for row in table])])
    with torch.no_grad():
        rows = list(model.model(batch).split(batch.lengths))
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    present = torch.arange(padded.shape[1]) < torch.tensor(batch.lengths)[:, None]
    return padded, present, [row["label"] for row in table]


def pooled(kind: str, x: torch.Tensor, present: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """One vector for each text, [texts, width]."""
    if kind == "[CLS]":
        return x[:, 0]
    scores = x @ query / x.shape[-1] ** 0.5 if kind == "attention" else torch.zeros(x.shape[:2])
    weights = scores.masked_fill(~present, -torch.inf).softmax(-1)  # the mean has equal weights
    return (weights[:, None] @ x)[:, 0]


def main() -> dict[str, float]:
    """Return the test accuracy of each kind; one query with the value 0 is the mean, as in the library."""
    model = heedful.load("heedful-mini-en").eval()
    x, present, labels = rows_of(model, "train")
    test, test_present, test_labels = rows_of(model, "test")
    classes = sorted(set(labels))
    y, gold = (torch.tensor([classes.index(label) for label in each]) for each in (labels, test_labels))
    width, found = x.shape[-1], {}
    library = QueryPooler(AttentionPooling(keys="rows", values="rows", scaled=True), width, 1, width)
    length = int(present[0].sum())
    mean = pooled("mean", x, present, torch.zeros(width))[:1]
    assert torch.allclose(library(x[0, :length], (0, length))[0], mean, atol=1e-5)
    for kind in ("[CLS]", "mean", "attention"):
        torch.manual_seed(0)
        query, out = nn.Parameter(torch.zeros(width)), nn.Linear(width, len(classes))
        optimizer = torch.optim.Adam([query, *out.parameters()], lr=0.01)
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(out(pooled(kind, x, present, query)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found[kind] = float((out(pooled(kind, test, test_present, query)).argmax(-1) == gold).float().mean())
    return found


if __name__ == "__main__":
    for kind, accuracy in main().items():
        print(f"{kind:10} {accuracy:.3f}")

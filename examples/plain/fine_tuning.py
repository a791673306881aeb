"""Do BERT's own weights change in fine-tuning, or only the new layer? Train both ways and look at what moved.

A linear layer over [CLS], or over the mean of all rows, sorts messages to a library. Either it alone is trained, or all
weights are.
"""

import csv
from importlib.resources import files
from itertools import product

import torch
from torch import nn

import heedful

STEPS, TEXTS = 60, 160  # texts of each split


def messages(split: str) -> list[dict[str, str]]:
    """Rows of the sample data with "text" and "label"."""
    lines = files("heedful").joinpath("assets", "intents", f"{split}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(lines))


def scores(encoder: heedful.ModelBundle, layer: nn.Linear, pooling: str, rows: list[dict[str, str]]) -> torch.Tensor:
    """The new layer over one vector of each text, [texts, classes]."""
    batch = encoder.tokenizer.pack([row["text"] for row in rows])
    x = encoder.model(batch)
    if pooling == "[CLS]":
        return layer(x[list(batch.bounds[:-1])])
    return layer(torch.stack([text.mean(0) for text in x.split(batch.lengths)]))


def main(steps: int = 2, texts: int = 24) -> dict[tuple[str, str], tuple[float, float]]:
    """Return for each way the test accuracy, and the distance that the encoder's weights moved over their length."""
    train, test = messages("train")[:texts], messages("test")[:texts]
    classes = sorted({row["label"] for row in train})
    results = {}
    for way, pooling in product(("the new layer alone", "all weights"), ("[CLS]", "mean")):
        torch.manual_seed(0)
        encoder = heedful.load("heedful-mini-en").eval()  # without dropout
        before = [parameter.detach().clone() for parameter in encoder.model.parameters()]
        layer = nn.Linear(before[0].shape[-1], len(classes))

        trained = [{"params": layer.parameters(), "lr": 1e-2}]
        if way == "all weights":
            trained.append({"params": encoder.model.parameters(), "lr": 3e-4})  # small: little is forgotten
        else:
            encoder.model.requires_grad_(False)
        optimizer = torch.optim.AdamW(trained)
        gold = torch.tensor([classes.index(row["label"]) for row in train])
        for _ in range(steps):
            loss = nn.functional.cross_entropy(scores(encoder, layer, pooling, train), gold)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            predicted = [classes[index] for index in scores(encoder, layer, pooling, test).argmax(-1)]
        accuracy = sum(label == row["label"] for label, row in zip(predicted, test, strict=True)) / len(test)
        pairs = list(zip(encoder.model.parameters(), before, strict=True))
        moved = sum(((now - old) ** 2).sum() for now, old in pairs) / sum((old**2).sum() for old in before)
        results[way, pooling] = accuracy, float(moved.detach()) ** 0.5
    assert results["the new layer alone", "[CLS]"][1] == 0 < results["all weights", "[CLS]"][1]
    return results


if __name__ == "__main__":
    for (way, pooling), (accuracy, moved) in main(STEPS, TEXTS).items():
        print(f"{way:19} over {pooling:5}  accuracy {accuracy:.2f}, the encoder moved by {moved:.1%} of its length")

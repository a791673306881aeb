"""Which words does a pronoun look at, and in which head? Rank all heads of a model by one weight.

Run it with a model's folder or name on the Hugging Face hub; for another text and two words change TEXT, FROM and TO:

    python examples/plain/pronoun_heads.py path/to/bert-base-uncased
"""

import sys

import torch

import heedful
from heedful.look.inspection import Inspection

TEXT, FROM, TO = "Shivas was hit by a bus because he crossed the street", "he", "Shivas"


def pieces_of(offsets: list[tuple[int, int]], word: str) -> list[int]:
    """The positions of a word's pieces."""
    start = f" {TEXT} ".index(f" {word} ")
    return [n for n, (begin, end) in enumerate(offsets) if start <= begin < end <= start + len(word)]


def main(name: str = "heedful-mini-en") -> list[tuple[float, int, int, str]]:
    """Return for each head: the weight from `FROM` to `TO`, layer, head, and the piece that `FROM` looks at most."""
    model = heedful.load(name)
    inspection = Inspection(model, TEXT)
    offsets = list(inspection.encoded.offsets)
    (pronoun,), noun = pieces_of(offsets, FROM), pieces_of(offsets, TO)
    pieces = [model.tokenizer.name(int(number)) for number in inspection.encoded.ids]
    found = []
    for layer in range(model.config.model.encoder.layers):
        weights = inspection.weights("encoder", layer)[:, pronoun]  # [heads, keys]
        assert torch.allclose(weights.sum(-1), torch.ones(len(weights)), atol=1e-4)
        for head, row in enumerate(weights):
            found.append((float(row[noun].sum()), layer, head, pieces[int(row.argmax())]))
    return sorted(found, reverse=True)


if __name__ == "__main__":
    for weight, layer, head, most in main(*sys.argv[1:2])[:6]:
        print(f"layer {layer} head {head}: {weight:.3f} from {FROM!r} to {TO!r}; most to {most}")

"""Do two meanings of a word move apart with depth? Compare pairs of one meaning with pairs of two, layer by layer.

A cosine says little alone: what counts is whether two banks of money are more alike than a bank of money and one of a
river. Run it with a model's folder or name on the Hugging Face hub:

    python examples/plain/two_banks.py path/to/bert-base-uncased
"""

import sys
from itertools import combinations

import torch

import heedful
from heedful.model.trace import Trace
from heedful.nn.scores import cosine

WORD = "bank"
RIVER = ["we walked along the river bank", "he sat on the bank of the river", "trees grow on the bank of the stream"]
MONEY = ["she went to the bank to get cash", "the bank gave him a loan", "he took money from the bank account"]


def main(name: str = "heedful-mini-en") -> list[tuple[float, float]]:
    """Return the mean cosine of the word in pairs of one meaning and of two, before each layer and at the end."""
    model = heedful.load(name).eval()
    encoded = model.tokenizer.encode_batch(RIVER + MONEY)
    trace = Trace(what=["states"])
    batch = heedful.Packed.of([each.ids for each in encoded])
    with torch.no_grad():
        model.model(batch, trace=trace)
    word = int(model.tokenizer.ids([WORD])[0][0])
    places = [list(each.ids).index(word) for each in encoded]
    found = []
    for layer in range(model.config.model.encoder.layers + 1):
        rows = torch.stack([trace.states["encoder", layer, text][place] for text, place in enumerate(places)])
        unit = rows / rows.norm(dim=-1, keepdim=True)
        likeness = unit @ unit.T
        assert torch.allclose(likeness, cosine(rows, rows), atol=1e-5)
        pairs = list(combinations(range(len(places)), 2))
        one = [likeness[a, b] for a, b in pairs if (a < len(RIVER)) == (b < len(RIVER))]
        two = [likeness[a, b] for a, b in pairs if (a < len(RIVER)) != (b < len(RIVER))]
        found.append((float(torch.stack(one).mean()), float(torch.stack(two).mean())))
    return found


if __name__ == "__main__":
    print("layer  one meaning  two meanings  difference")
    for layer, (one, two) in enumerate(main(*sys.argv[1:2])):
        print(f"{layer:5} {one:12.3f} {two:13.3f} {one - two:11.3f}")

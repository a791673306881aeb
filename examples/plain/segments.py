"""All segment ids 0: does a BERT still know where the second text begins?

The segment vector is one of two signs; [SEP] is the other. Read one pair with the right segments, with zeros, and with
zeros and no [SEP] between the texts, and compare attention across the border and the answer of the masked-word head.
"""

import sys

import torch

import heedful
from heedful.model.trace import Trace
from heedful.nn.scores import cosine

FIRST, SECOND = "The ferry leaves at noon.", "It [MASK] back in the evening."
Reading = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, weights by layer, probabilities at the mask


def read(model: heedful.ModelBundle, ids: list[int], types: list[int]) -> Reading:
    """Return the attention weights and output of the model for one pair."""
    batch, trace = heedful.Packed.of([ids], types=[types]), Trace(what=["weights"])
    with torch.no_grad():
        rows = model.model(batch, trace=trace)
        scores = model.head(rows, batch)[ids.index(model.tokenizer.special.mask)]
    layers = range(model.config.model.encoder.layers)
    return rows, torch.stack([trace.attention["encoder", layer, 0].weights for layer in layers]), scores.softmax(-1)


def main(name: str = "heedful-mini-en") -> dict[str, tuple[float, float, str]]:
    """Return weight from the second text to the first, cosine of the rows to the first reading, and the filled word."""
    model = heedful.load(name, head="masked_lm").eval()
    encoded = model.tokenizer.encode((FIRST, SECOND))
    ids, types = list(encoded.ids), list(encoded.types)
    border = types.index(1)  # the first token of the second text; [SEP] is before it
    inputs = {
        "segments 0 and 1": (ids, types),
        "all segments 0": (ids, [0] * len(ids)),
        "all 0 and no [SEP] between": (ids[: border - 1] + ids[border:], [0] * (len(ids) - 1)),
    }
    found, usual = {}, None
    for what, (tokens, segments) in inputs.items():
        rows, weights, probabilities = read(model, tokens, segments)
        second = len(ids) - border
        across = weights[:, :, -second:, : border - 1].sum(-1).mean()
        usual = rows if usual is None else usual
        alike = torch.diagonal(cosine(rows[-second:], usual[-second:])).mean()
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-4)
        best = int(probabilities.argmax())
        found[what] = float(across), float(alike), f"{model.tokenizer.name(best)} {float(probabilities[best]):.2f}"
    return found


if __name__ == "__main__":
    print(f"{'':28} weight across  cosine  fills in")
    for what, (across, alike, word) in main(*sys.argv[1:2]).items():
        print(f"{what:28} {across:13.3f} {alike:7.3f}  {word}")

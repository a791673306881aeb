"""Which heads look at the next token, the previous one, or [SEP]? The mean weight of each head on each, by numbers.

Run it with a model's folder or name on the Hugging Face hub, on your own sentences:

    python examples/plain/head_targets.py path/to/bert-base-uncased "First sentence." "Second sentence."
"""

import sys

import torch

import heedful
from heedful.model.trace import Trace

TEXTS = (
    "The ferry leaves at noon, and we are late.",
    "She opened the door and went out.",
    "The bridge was built over the river two years later.",
)


def main(name: str = "heedful-mini-en", *texts: str) -> dict[str, tuple[float, int, int]]:
    """Return, for each target, the head with the largest mean weight on it: weight, layer and head, from 0."""
    model = heedful.load(name).eval()
    texts = texts or TEXTS
    encoder = model.config.model.encoder
    means = torch.zeros(3, encoder.layers, encoder.heads)
    for text in texts:
        trace = Trace()
        with torch.no_grad():
            model.model(heedful.Packed.of([model.tokenizer.encode(text).ids]), trace=trace)
        for layer in range(encoder.layers):
            weights = trace.attention["encoder", layer, 0].weights  # of text 0 of this batch: [heads, n, n]
            assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-4)  # a softmax of each row
            means[0, layer] += weights.diagonal(1, 1, 2).mean(-1)  # from token i to i + 1
            means[1, layer] += weights.diagonal(-1, 1, 2).mean(-1)  # from token i to i - 1
            means[2, layer] += weights[:, :-1, -1].mean(-1)  # from every other token to the last one, [SEP]
    means /= len(texts)
    best = {}
    for target, mean in zip(("next token", "previous token", "[SEP]"), means, strict=True):
        layer, head = divmod(int(mean.argmax()), encoder.heads)
        best[target] = float(mean[layer, head]), layer, head
    return best


if __name__ == "__main__":
    for target, (weight, layer, head) in main(*sys.argv[1:]).items():
        print(f"{target:16}layer {layer}, head {head}: mean weight {weight:.2f}")

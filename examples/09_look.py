"""Looking inside: what each head of a trained encoder attends to, and which vectors it computes.

Idea: attention weights can be shown; some heads look at the next word. After the encoder, "bank" of the river and
"bank" of the money have different vectors.
Code: `Trace` (heedful/model/trace.py), which changes no output; `heedful look` shows the same as a page.
Expect: every row of weights sums to 1; some head looks mostly at the next token; tracing leaves the output equal to the
last bit; the two vectors of "bank", equal in the embedding table, differ. The difference does not grow in each layer.
"""

import torch

import heedful
from heedful.model.trace import Trace
from heedful.nn.scores import cosine

TEXTS = ("he sat on the bank of the river .", "she took the money to the bank .")


def main() -> dict[str, object]:
    """Return attention weights, each head's mean weight on the next token, and the cosine of the two banks by layer."""
    loaded = heedful.load("heedful-mini-en")
    encoded = loaded.tokenizer.encode_batch(list(TEXTS))
    batch, trace = heedful.Packed.of([encoding.ids for encoding in encoded]), Trace(what=["weights", "states"])
    with torch.no_grad():
        rows = loaded.model(batch, trace=trace)
        same = torch.equal(rows, loaded.model(batch))
    stack = loaded.config.model.encoder
    weights = [trace.attention["encoder", layer, 0].weights for layer in range(stack.layers)]
    following = {
        (layer, head): float(head_weights.diagonal(1).mean())
        for layer, heads in enumerate(weights)
        for head, head_weights in enumerate(heads)
    }
    bank = loaded.tokenizer.ids(["bank"])[0][0]
    positions = [encoding.ids.index(bank) for encoding in encoded]
    similarities = []
    for layer in range(stack.layers + 1):
        river, money = (trace.states["encoder", layer, text][position] for text, position in enumerate(positions))
        similarities.append(float(cosine(river[None], money[None])))
    return {"same": same, "weights": weights, "following": following, "likeness": similarities}


if __name__ == "__main__":
    results = main()
    print(f"tracing changes nothing: {results['same']}")
    best = sorted(results["following"].items(), key=lambda item: -item[1])
    print("weight on the next token, by head: ", end="")
    print(", ".join(f"layer {layer} head {head} {share:.2f}" for (layer, head), share in best[:4]))
    print("cosine of the two banks before each block and at the end: ", end="")
    print(", ".join(f"{cosine_of_layer:.3f}" for cosine_of_layer in results["likeness"]))

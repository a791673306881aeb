"""Looking inside: what each head of a real encoder attends to, and which rows it makes.

Idea: "Attention visualized" (D2), a head that looks at the next word (D1), contextual against static vectors, "bank" of
the river and of the money (D0, D2).
Code: `Trace` (heedful/model/trace.py), which changes no output; `heedful look` shows the same as a page.
Expect: all weights of a row sum to 1; some head looks mostly at the next token; tracing gives the same rows to the last
bit; the two rows of "bank", which has one vector in the table, are not equal. They do not part further in each layer.
"""

import torch

import heedful
from heedful.model.trace import Trace
from heedful.nn.scores import cosine

TEXTS = ("he sat on the bank of the river .", "she took the money to the bank .")


def main() -> dict[str, object]:
    """Weights, the share that each head gives to the next token, and how alike the two banks are."""
    loaded = heedful.load("heedful-mini-en")
    encoded = loaded.tokenizer.encode_batch(list(TEXTS))
    batch, trace = heedful.Packed.of([each.ids for each in encoded]), Trace(what=["weights", "states"])
    with torch.no_grad():
        rows = loaded.model(batch, trace=trace)
        same = torch.equal(rows, loaded.model(batch))
    stack = loaded.config.model.encoder
    weights = [trace.attention["encoder", layer, 0].weights for layer in range(stack.layers)]
    following = {
        (layer, head): float(each.diagonal(1).mean())
        for layer, heads in enumerate(weights)
        for head, each in enumerate(heads)
    }
    bank = loaded.tokenizer.ids(["bank"])[0][0]
    places = [each.ids.index(bank) for each in encoded]
    likeness = []
    for layer in range(stack.layers + 1):
        one, other = (trace.states["encoder", layer, text][place] for text, place in enumerate(places))
        likeness.append(float(cosine(one[None], other[None])))
    return {"same": same, "weights": weights, "following": following, "likeness": likeness}


if __name__ == "__main__":
    found = main()
    print(f"tracing changes nothing: {found['same']}")
    best = sorted(found["following"].items(), key=lambda item: -item[1])
    print("weight on the next token, by head: ", end="")
    print(", ".join(f"layer {layer} head {head} {share:.2f}" for (layer, head), share in best[:4]))
    print("cosine of the two banks before each block and at the end: ", end="")
    print(", ".join(f"{each:.3f}" for each in found["likeness"]))

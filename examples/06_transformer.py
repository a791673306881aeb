"""A Transformer from the one stack: encoder, decoder, heads, residuals, norms; counted, trained a little, looked at.

Idea: "Transformers Step-by-Step" (D2), "Multi-headed Self-Attention", residuals and LayerNorm, encoder and decoder (D4,
D0 "Bringing it all together").
Code: heedful/model/stack.py, made of a `ModelConfig` (heedful/model/config.py); heedful/model/decode.py writes with it.
Expect: the parameters are those that the formula gives; the loss falls within a minute's part; a token that is written
looks at no later one, and every row of every head's weights sums to 1.
"""

from dataclasses import replace

import torch

from heedful.model.trace import Trace
from heedful.packed import Packed
from heedful.study.translation import (
    TRANSFORMER,
    Budget,
    build_model,
    sample_sentences,
    train_joint_tokenizer,
    train_translator,
    translation_task,
)


def formula(width: int, inner: int, layers: int, vocabulary: int) -> int:
    """Parameters of so many encoder and decoder blocks with pre-norm, and of one embedding for everything."""
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    norm = 2 * width
    encoder, decoder = attention + mlp + 2 * norm, 2 * attention + mlp + 3 * norm
    return vocabulary * width + layers * (encoder + decoder) + 2 * norm


def main(steps: int = 60) -> dict[str, object]:
    """Train for so many steps; what was found."""
    budget = replace(Budget(), train=1920, test=8, dev=0, steps=steps, eval_every=steps + 1)
    data = sample_sentences(budget, seed=1)
    tokenizer = train_joint_tokenizer(data["train"])
    loaded = build_model(TRANSFORMER, tokenizer, seed=1)
    stack = loaded.config.model.encoder
    losses, _ = train_translator(loaded, translation_task(loaded, tokenizer), budget, data, seed=1)
    example, trace = data["test"][0], Trace(what=["weights"])
    read, written = (Packed.of([tokenizer.encode(text).ids]) for text in example.texts)
    with torch.no_grad():
        loaded.eval().hidden_states(read, written, trace=trace)
    return {
        "count": loaded.count(),
        "formula": formula(stack.width, stack.inner_width, stack.layers, tokenizer.size),
        "losses": losses,
        "own": trace.attention["decoder", 0, 0].weights,  # [heads, written, written]
        "cross": trace.attention["cross", 1, 0].weights,  # [heads, written, read]
    }


if __name__ == "__main__":
    found = main()
    print(f"{found['count']:,} parameters; by the formula {found['formula']:,}")
    losses = found["losses"]
    print("loss of a token: " + ", ".join(f"step {at} {losses[at - 1]:.2f}" for at in (1, 20, 40, 60)))
    print("\nwhat the first written tokens see of each other, first head of the decoder")
    for row in found["own"][0][:6, :6]:
        print("".join(f"{each:7.3f}" for each in row))
    print(f"\nsums of the weights of {len(found['cross'])} heads to what was read: {found['cross'].sum(-1).mean():.6f}")

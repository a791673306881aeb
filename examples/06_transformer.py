"""A Transformer: encoder, decoder, heads, residuals and norms; its parameters, a short training, its attention.

Idea: multi-head self-attention, residuals and layer norm make a block; blocks make an encoder and a decoder.
Code: heedful/model/stack.py, built from a `ModelConfig` (heedful/model/config.py); heedful/model/decode.py generates.
Expect: the number of parameters equals the formula's; the loss falls within seconds; a token of the decoder gives later
tokens the weight 0, and every row of every head's weights sums to 1.
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
    """Return the parameters of `layers` pre-norm encoder and decoder blocks and one embedding that all parts share."""
    attention = 4 * (width * width + width)
    mlp = 2 * width * inner + inner + width
    norm = 2 * width
    encoder, decoder = attention + mlp + 2 * norm, 2 * attention + mlp + 3 * norm
    return vocabulary * width + layers * (encoder + decoder) + 2 * norm


def main(steps: int = 60) -> dict[str, object]:
    """Train a small Transformer; return its parameter count, its losses and two tensors of attention weights."""
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
    results = main()
    print(f"{results['count']:,} parameters; by the formula {results['formula']:,}")
    losses = results["losses"]
    print("loss per token: " + ", ".join(f"step {step} {losses[step - 1]:.2f}" for step in (1, 20, 40, 60)))
    print("\nself-attention weights of the first six written tokens, first head of the decoder")
    for row in results["own"][0][:6, :6]:
        print("".join(f"{weight:7.3f}" for weight in row))
    sums = results["cross"].sum(-1)
    print(f"\nmean sum of a row of cross-attention weights, {len(sums)} heads: {sums.mean():.6f}")

"""Can pre-norm and post-norm be swapped in a trained model? Run the encoder that ships with its norms moved.

Post-norm, as trained: LayerNorm(x + f(x)). The same weights as pre-norm: x + f(LayerNorm(x)). The loss is that of
single words which are masked in turn.
"""

import torch
from torch import nn

import heedful

TEXTS = (
    "the ferry leaves at noon .",
    "she opened the door and went out .",
    "he was born in london in 1856 .",
    "the bridge was built over the river two years later .",
    "many people in the village work on farms .",
    "the book was published in english and german .",
)


def attention(x: torch.Tensor, block: nn.Module, heads: int) -> torch.Tensor:
    """Self-attention of one text with the block's matrices."""
    q, k, v = block.attention.qkv(x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)  # [heads, rows, head width]
    mixed = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v
    return block.attention.out(mixed.transpose(0, 1).flatten(1))


def mlp(x: torch.Tensor, block: nn.Module) -> torch.Tensor:
    """The feed-forward network with GELU."""
    return block.mlp.down(nn.functional.gelu(block.mlp.up(x)))


def encode(model: heedful.ModelBundle, batch: heedful.Packed, pre: bool) -> torch.Tensor:
    """Rows of one text, with the norms behind the sums or before the sublayers."""
    stack = model.model.encoder
    x, heads = model.model.embedding(batch), stack.config.heads
    for block in stack.blocks:
        if pre:
            x = x + attention(block.attention_norm(x), block, heads)
            x = x + mlp(block.mlp_norm(x), block)
        else:
            x = block.attention_norm(x + attention(x, block, heads))
            x = block.mlp_norm(x + mlp(x, block))
    return nn.functional.layer_norm(x, x.shape[-1:]) if pre else x


def main() -> dict[str, float]:
    """Return the mean loss of the masked words in both orders, after comparing the first with the library's rows."""
    model = heedful.load("heedful-mini-en", head="masked_lm").eval()
    losses: dict[str, list[float]] = {"post-norm, as trained": [], "the same weights, pre-norm": []}
    for text in TEXTS:
        ids = list(model.tokenizer.encode(text).ids)
        for position in range(1, len(ids) - 1):
            batch = heedful.Packed.of([[*ids[:position], model.tokenizer.special.mask, *ids[position + 1 :]]])
            with torch.no_grad():
                assert torch.allclose(encode(model, batch, pre=False), model.model(batch), atol=1e-3)
                for pre, found in enumerate(losses.values()):
                    scores = model.head(encode(model, batch, pre=bool(pre)), batch)[position]
                    found.append(-float(scores.log_softmax(-1)[ids[position]]))
    return {name: sum(found) / len(found) for name, found in losses.items()}


if __name__ == "__main__":
    for name, loss in main().items():
        print(f"{name:28} {loss:.2f}")
    print(f"{'a uniform guess':28} {torch.tensor(16_000.0).log():.2f}")

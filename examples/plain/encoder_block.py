"""One encoder block of BERT: attention, residual sum, layer norm, MLP with GELU, residual sum, layer norm.

x = LayerNorm(x + Attention(x)), then x = LayerNorm(x + MLP(x)) (Devlin et al. 2019; norms after the sum, as in Vaswani
et al. 2017). The residual is a sum. The norm has a gain, a bias, and an epsilon below the root.
"""

from math import erf, sqrt

import torch

import heedful
from heedful.model.trace import Trace
from heedful.study.layers import BatchNorm

TEXT = "The ferry leaves at noon."


def layer_norm(x: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Normalise each row: (x - mean) / sqrt(variance + eps) * gain + bias; the variance divides by n."""
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Multiply x by the probability that a standard normal number is below x."""
    return x * (1 + torch.tensor([erf(value / sqrt(2)) for value in x.flatten().tolist()]).view_as(x)) / 2


def main() -> torch.Tensor:
    """Return the rows after the first block of the bundled encoder, computed by hand and compared with its own."""
    model, trace = heedful.load("heedful-mini-en").eval(), Trace(what=["states"])
    batch = heedful.Packed.of([model.tokenizer.encode(TEXT).ids])
    with torch.no_grad():
        model.model(batch, trace=trace)
        x, block, heads = trace.states["encoder", 0, 0], model.model.encoder.blocks[0], 4
        q, k, v = block.attention.qkv(x).view(len(x), 3, heads, -1).permute(1, 2, 0, 3)  # [heads, rows, head width]
        mixed = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v
        x = layer_norm(x + block.attention.out(mixed.transpose(0, 1).flatten(1)), block.attention_norm)
        x = layer_norm(x + block.mlp.down(gelu(block.mlp.up(x))), block.mlp_norm)
        assert torch.allclose(x, trace.states["encoder", 1, 0], atol=1e-4)

        batch_norm = BatchNorm(x.shape[1])  # in training its statistics are those of all rows
        assert torch.allclose(layer_norm(x[:3], block.mlp_norm), layer_norm(x, block.mlp_norm)[:3], atol=1e-5)
        assert not torch.allclose(batch_norm(x[:3]), batch_norm(x)[:3], atol=1e-2)
    return x


if __name__ == "__main__":
    print(main()[:, :6])
